"""What importing the package costs, and what it does not need."""
import importlib
import pkgutil
import subprocess
import sys

import pytest

import altgrad

OPTIONAL = ("wandb", "datasets", "geoopt", "matplotlib", "nbdev", "fastcore")
MODULES = sorted(m.name for m in pkgutil.iter_modules(altgrad.__path__) if not m.name.startswith("_"))


def seconds_beyond_torch(module: str) -> float:
    "Best of three: how long a module takes to import in a new interpreter that has torch already."
    code = f"import time, torch; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
    return min(float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout) for _ in range(3))


@pytest.mark.parametrize("module", ["altgrad", "altgrad.trainer", "altgrad.experiment"])
def test_importing_costs_little_more_than_torch(module):
    assert seconds_beyond_torch(module) < 0.3


def test_every_module_imports_and_the_core_needs_no_optional_package():
    assert "trainer" in MODULES
    core = [m for m in MODULES if m not in ("manifold",)]
    block = f"import sys\nfor name in {OPTIONAL!r}: sys.modules[name] = None\n"
    done = subprocess.run([sys.executable, "-c", block + "\n".join(f"import altgrad.{m}" for m in core)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_trains_without_the_optional_packages(tmp_path):
    block = f"import sys\nfor name in {OPTIONAL!r}: sys.modules[name] = None\n"
    code = block + f"""
from altgrad.data import load_corpus
from altgrad.trainer import Trainer, make_config
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
