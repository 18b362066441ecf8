"""What all tests share: the mark of those that need a GPU, which files begin, what the garbage collector
looks at, workers that start in a moment, one temporary folder, and what is made once for all."""
import gc
import os
import shutil
import sys
import tempfile
from multiprocessing import current_process
from pathlib import Path

import pytest
from filelock import FileLock

from preloaded import IN_A_MOMENT

# Each takes twenty seconds, or more. They begin, so that no worker is left alone with one of them at the end.
LONG = (
    "browser", "record", "cli", "survival", "cluster", "package", "hostile", "gpu", "triton", "sweep", "evidence",
    "bench", "quantize", "contributing", "without_master", "replicas", "referee", "ddp", "docs", "compile", "silent",
    "manifold", "vectors", "blocks", "sizes",
)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: takes about ten seconds or more; `make rest` runs it, `make test` does not")
    config.addinivalue_line("markers", "cuda: computes on a GPU, and is skipped where there is none; see `make gpu`")
    gc.set_threshold(10_000, 10, 100)  # a ledger of ten thousand rows has the collector begin again and again
    if not hasattr(config, "workerinput"): open_temporary_folder(config)  # workers inherit it


def open_temporary_folder(config):
    "What libraries and killed processes leave goes at the end; the path is short, as sockets lie there."
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own stays where it is
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name
    current_process()._config["tempdir"] = folder.name  # or multiprocessing makes its own


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


@pytest.fixture(scope="session")
def once(request, tmp_path_factory):
    "Returns a folder by its name, which the first worker to ask for it fills for all."
    base = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"): base = base.parent

    def folder(name, fill):
        with FileLock(base / f"{name}.lock"):
            if not (base / name).is_dir():
                fill(fresh := tmp_path_factory.mktemp(name))
                fresh.rename(base / name)
        return base / name

    return folder


@pytest.fixture(scope="session")
def small_folder(once) -> Path:
    "A text, its corpus, the checkpoints tiny-0 to tiny-4 and the C++ kernels, to be read only."
    from tiny import fill_folder
    return once("small", fill_folder)


@pytest.fixture(scope="module")
def small_copy(small_folder, tmp_path_factory) -> Path:
    "The same, for the tests of a file to write to."
    return shutil.copytree(small_folder, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True)


@pytest.fixture(autouse=True, scope="module")
def garbage_of_the_module():
    "Python's collector looks at what a module made, not at torch and thousands of tests each time."
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def workers_in_a_moment(request):
    "Workers of sweeps and referees are forked, not started anew; test_sweep.py has them as users do."
    modules = map(sys.modules.get, ("altgrad.evidence.sweep", "altgrad.numbers.referee"))
    with pytest.MonkeyPatch.context() as patch:
        for module in filter(None, modules if request.module.__name__ != "test_sweep" else ()):
            patch.setattr(module, "get_context", lambda method: IN_A_MOMENT)
        yield
