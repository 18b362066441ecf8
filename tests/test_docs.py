"""The web site: every notebook becomes a page and is in a menu. Works without Quarto, on a copy, so that the tree stays clean."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from nbdev.doclinks import nbglob

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p.relative_to(ROOT / "nbs").as_posix() for p in nbglob(ROOT / "nbs", as_path=True))
PREPARE = """
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

refresh_quarto_yml()
proc_nbs(n_workers=2)
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    "A copy of the project with its pages prepared in _proc, and what that printed."
    copy = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "nbs", copy / "nbs", symlinks=True)
    shutil.copytree(ROOT / "altgrad", copy / "altgrad")
    for name in ["settings.ini", "_quarto.yml"]: shutil.copy(ROOT / name, copy)
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([sys.executable, "-c", PREPARE], cwd=copy, env=env, capture_output=True, text=True, timeout=600)
    return copy / "_proc", done.stdout + done.stderr


def hrefs(menu) -> list[str]:
    "All notebooks that a menu of _quarto.yml names, at any depth."
    if isinstance(menu, str): return [menu] if menu.endswith(".ipynb") else []
    children = menu.values() if isinstance(menu, dict) else menu if isinstance(menu, list) else []
    return [href for child in children for href in hrefs(child)]


def website() -> dict:
    return yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_has_a_page(site, name):
    # a cell that fails while the page is prepared costs the whole page
    pages, log = site
    assert (pages / name).exists(), f"nbdev could not prepare {name}:\n{log[-2000:]}"


def test_configuration_reaches_the_site(site):
    pages, _ = site
    assert (pages / "_quarto.yml").read_text() == (ROOT / "_quarto.yml").read_text()
    assert "output-dir: _docs" in (pages / "nbdev.yml").read_text()


def test_menus_name_only_notebooks_that_exist():
    assert set(hrefs(website())) <= set(NOTEBOOKS)


def test_every_notebook_is_in_the_sidebar():
    assert set(NOTEBOOKS) <= set(hrefs(website()["sidebar"]))
