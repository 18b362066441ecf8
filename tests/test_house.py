"""The floors: a module imports from floors below its own, and from its own floor without a circle;
and what `altgrad` itself hands on."""
import ast
import importlib
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import altgrad

ROOT = Path(__file__).resolve().parent.parent
HOUSE = runpy.run_path(str(ROOT / ".ci/house.py"))
FLOORS, FILES, MODULES = (HOUSE[key] for key in ("FLOORS", "FILES", "MODULES"))
name_of, floor, imports = HOUSE["name_of"], HOUSE["floor"], cache(HOUSE["imports"])
STANDARD = set(sys.stdlib_module_names)


def upward(path: Path) -> list[str]:
    "Modules that a file imports from a floor above."
    return [name for name in sorted(imports(path)) if floor(name) > floor(name_of(path))]


def absolute(path: Path) -> list[str]:
    """Modules that a file imports by absolute names. The hash of what a run computes takes only
    relative ones for nothing; nbdev leaves an import absolute whose last line is short."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = [n.module for n in body if isinstance(n, ast.ImportFrom) and not n.level]
    return [name for name in names if name.startswith("altgrad")]


def test_modules_import_downward_and_by_relative_names():
    listed = [f"{name_of(p)}: {name} is on a floor above" for p in FILES for name in upward(p)]
    listed += [f"{name_of(p)}: {name} is an absolute name" for p in FILES for name in absolute(p)]
    if listed: pytest.fail("\n".join(listed), pytrace=False)


def test_an_import_upward_or_by_an_absolute_name_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setitem(name_of.__globals__, "ROOT", tmp_path)
    path = tmp_path / "altgrad/numbers/planted.py"
    path.parent.mkdir(parents=True)
    path.write_text("from ..basics import COLORS\nfrom ..cli import main\nfrom altgrad import cli")
    assert (upward(path), absolute(path)) == (["cli"], ["altgrad"])


def test_no_circle():
    open_, done = [], set()

    def visit(module: str):
        assert module not in open_, " -> ".join([*open_, module])
        if module in done: return
        open_.append(module)
        for name in graph[module]: visit(name)
        done.add(open_.pop())

    graph = {name_of(path): sorted(imports(path)) for path in FILES}
    for module in graph: visit(module)
    assert len(done) == len(MODULES) > 30


def test_no_module_has_a_name_of_its_folder_or_of_the_standard_library():
    for module in MODULES:
        folder, _, name = module.rpartition(".")
        assert name not in STANDARD and name not in folder.split("."), module


def test_notebooks_stand_on_the_same_floors():
    for path in FILES:
        *folder, name = HOUSE["notebook_of"](path).split("/")
        assert [*folder, name.split("_", 1)[-1]] == name_of(path).split("."), path


def test_numbers_of_notebooks_have_no_gap():
    for folder in (*FLOORS[1:-1], "geometry/rivals"):
        numbers = sorted(p.name[:2] for p in (ROOT / "nbs" / folder).glob("*.ipynb"))
        assert numbers == [f"{i:02}" for i in range(len(numbers))], folder


def test_the_drawing_is_of_this_house():
    drawn = HOUSE["svg"]()
    assert HOUSE["DRAWING"].read_text(encoding="utf-8") == drawn, "run python .ci/house.py"
    assert drawn.count('class="floor"') == len(FLOORS) <= 16
    assert len(drawn) < 30_000
    rooms = [*HOUSE["rooms"]().values()]
    # basics and cli are floors of one module; a folder within a floor is one room
    assert sum(map(len, rooms)) == len({tuple(m.split(".")[:2]) for m in MODULES}) - 2


def test_the_package_hands_on_what_people_type():
    assert set(altgrad.__all__) == set(altgrad._PLACES) <= set(dir(altgrad))
    for name, place in altgrad._PLACES.items():
        assert getattr(altgrad, name) is getattr(importlib.import_module(f"altgrad.{place}"), name)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        altgrad.quantise  # noqa: B018


def test_importing_the_package_alone_loads_nothing():
    code = (
        "import sys; before = set(sys.modules); import altgrad; print(*(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "numpy", "typing"} & set(loaded)
