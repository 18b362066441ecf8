"""What all tests share: the mark of those that need a GPU, which files begin, what the garbage collector
looks at, and workers that start in a moment."""
import gc
import sys

import pytest

from preloaded import IN_A_MOMENT

# Each takes twenty seconds, or more. They begin, so that no worker is left alone with one of them at the end.
LONG = (
    "browser", "record", "cli", "survival", "cluster", "package", "hostile", "gpu", "triton", "sweep", "evidence",
    "bench", "quantize", "contributing", "without_master", "replicas", "referee", "ddp", "docs", "compile", "silent",
    "manifold", "vectors", "blocks", "sizes",
)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: a long proof beside a shorter one; `make slow` runs it, `make test` does not")
    config.addinivalue_line("markers", "cuda: computes on a GPU, and is skipped where there is none; see `make gpu`")
    gc.set_threshold(10_000, 10, 100)  # a ledger of ten thousand rows has the collector begin again and again


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": k for k, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


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
