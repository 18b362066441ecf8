"""What importing the package costs, and what it does not need."""
import importlib
import pkgutil
import subprocess
import sys

import pytest

import altgrad

OPTIONAL = ("wandb", "datasets", "geoopt", "matplotlib", "nbdev", "fastcore")
MODULES = sorted(
    m.name.removeprefix("altgrad.")
    for m in pkgutil.walk_packages(altgrad.__path__, "altgrad.")
    if not m.ispkg and "._" not in m.name
)


SLOW = (
    *OPTIONAL, "torch._dynamo", "torch._inductor", "pandas", "pyarrow", "scipy", "IPython",
    "rich.markdown",
)


@pytest.mark.parametrize(
    "module",
    [
        "altgrad", "altgrad.training.config", "altgrad.training.trainer",
        "altgrad.training.experiment",
    ],
)
def test_importing_loads_nothing_slow_beside_torch(module):
    code = (
        f"import sys, torch; before = set(sys.modules); import {module}; print(*(set({SLOW!r}) "
        "& (set(sys.modules) - before)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
        == []
    )


def test_every_module_imports_and_the_core_needs_no_optional_package():
    assert "training.trainer" in MODULES
    core = [m for m in MODULES if m != "geometry.manifold"]
    block = f"import sys\nfor name in {OPTIONAL!r}: sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", block + "\n".join(f"import altgrad.{m}" for m in core)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_model_trains_without_the_optional_packages(tmp_path):
    block = f"import sys\nfor name in {OPTIONAL!r}: sys.modules[name] = None\n"
    code = block + f"""
from altgrad.training.data import load_corpus
from altgrad.training.config import make_config
from altgrad.training.trainer import Trainer
corpus = load_corpus("stdlib", cache={str(tmp_path / 'cache')!r})
config = make_config(dict(format="E5M2", max_steps=2, batch_size=2, block_size=16, eval_windows=2))
print(Trainer(config, {str(tmp_path / 'runs')!r}, corpus).run(progress=False)["exit_reason"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "finished\n", done.stderr


def test_public_names_are_what_all_lists():
    for name in MODULES:
        module = importlib.import_module(f"altgrad.{name}")
        assert all(hasattr(module, public) for public in module.__all__), name
