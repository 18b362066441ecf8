"""The web site: every notebook becomes a page and is in a menu. Works without Quarto, on a copy."""
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from nbdev.doclinks import nbglob

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(
    p.relative_to(ROOT / "nbs").as_posix() for p in nbglob(ROOT / "nbs", as_path=True)
)
# In one process, which ends at once: a second one imports everything again, and at a usual end each of
# the hundred shells has Python's garbage collected, which takes twice the time of the pages. What it
# takes before the end is a fifth of the rest, for nothing.
PREPARE = """
import gc, os, sys
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

gc.disable()
refresh_quarto_yml()
proc_nbs(n_workers=0)
for stream in (sys.stdout, sys.stderr): stream.flush()
os._exit(0)
"""


def site(copy: Path) -> tuple[Path, str]:
    "The pages, prepared in a copy of the project, and what that printed."
    shutil.copytree(ROOT / "nbs", copy / "nbs", symlinks=True)
    shutil.copytree(ROOT / "altgrad", copy / "altgrad")
    for name in ["settings.ini", "_quarto.yml"]: shutil.copy(ROOT / name, copy)
    way = dict(cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, timeout=600)
    command = [sys.executable, "-c", PREPARE]
    done = subprocess.run(command, **way, capture_output=True, text=True)
    return copy / "_proc", done.stdout + done.stderr


def hrefs(menu) -> list[str]:
    "All notebooks that a menu of _quarto.yml names, at any depth."
    if isinstance(menu, str): return [menu] if menu.endswith(".ipynb") else []
    children = menu.values() if isinstance(menu, dict) else menu if isinstance(menu, list) else []
    return [href for child in children for href in hrefs(child)]


def website() -> dict:
    return yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]


def test_every_notebook_has_a_page_and_the_configuration_reaches_the_site(tmp_path):
    # one test: one worker prepares the site, in which a failing cell costs its page and all after it
    pages, log = site(tmp_path)
    missing = [name for name in NOTEBOOKS if not (pages / name).exists()]
    assert not missing, f"nbdev could not prepare {missing}:\n{log[-2000:]}"
    assert (pages / "_quarto.yml").read_text() == (ROOT / "_quarto.yml").read_text()
    assert "output-dir: _docs" in (pages / "nbdev.yml").read_text()
    assert all((pages / name).is_file() for name in ("styles.css", "site.scss"))


def test_menus_name_only_notebooks_that_exist():
    assert set(hrefs(website())) <= set(NOTEBOOKS)


def test_every_notebook_is_in_one_sidebar():
    listed = hrefs(website()["sidebar"])
    assert sorted(listed) == sorted(set(NOTEBOOKS) - {"index.ipynb"})


def test_each_room_of_the_navbar_has_its_sidebar():
    rooms = {entry["text"]: entry["href"] for entry in website()["navbar"]["left"]}
    assert list(rooms) == ["Start", "Learn", "Understand", "Evidence", "Reference", "Contribute"]
    # a click opens the first page
    for sidebar in website()["sidebar"]:
        assert rooms[sidebar["title"]] == hrefs(sidebar["contents"])[0]
    assert [sidebar["title"] for sidebar in website()["sidebar"]] == list(rooms)[1:-1]


def test_the_reference_stands_on_the_floors():
    contents = website()["sidebar"][-1]["contents"]
    sections = {
        entry["section"].lower(): entry["contents"] for entry in contents if isinstance(entry, dict)
    }
    assert list(sections) == [
        "numbers", "geometry", "model", "watching", "training", "evidence", "views"
    ]
    assert all(
        pages == sorted(
            p.relative_to(ROOT / "nbs").as_posix()
            for p in (ROOT / "nbs" / folder).rglob("*.ipynb")
        )
        for folder, pages in sections.items()
    )


@pytest.mark.parametrize("part", ["readme", "links"])  # those to Colab and Binder
def test_what_is_made_of_the_notebooks_is_in_sync(part):
    command = [sys.executable, ROOT / ".ci/notebooks.py", part, "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode: pytest.fail(done.stderr[-1000:], pytrace=False)


def test_maths_needs_nothing_from_the_web():
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    assert config["format"]["html"]["html-math-method"] == "mathml"


OFFLINE = runpy.run_path(str(ROOT / ".ci/offline.py"))
CDN = "https://cdnjs.cloudflare.com/ajax/libs"
WIDGETS = f"""<head>
<script src="{CDN}/require.js/2.3.6/require.min.js" integrity="sha512-x" crossorigin="anonymous"></script>
<script src="{CDN}/jquery/3.5.1/jquery.min.js" integrity="sha512-y" data-relocate-top="true"></script>
<script type="application/javascript">define('jquery', [],function() {{return window.jQuery;}})</script>
<script src="site_libs/quarto-nav/quarto-nav.js"></script>
</head>
"""


def test_what_quarto_adds_for_widgets_is_removed_and_nothing_else():
    assert OFFLINE["without_widgets"](WIDGETS).split() == [
        "<head>", "<script", 'src="site_libs/quarto-nav/quarto-nav.js"></script>', "</head>"
    ]


def test_a_link_to_a_source_has_a_line_that_is_there_or_none(monkeypatch):
    assert OFFLINE["without_lost_lines"]('<a href="/blob/main/a.py#LNone"><a href="/blob/main/a.py#L3">') == (
        '<a href="/blob/main/a.py"><a href="/blob/main/a.py#L3">')
    monkeypatch.chdir(ROOT)
    drop = runpy.run_path(str(ROOT / ".ci/notebooks.py"))["drop_source_line"]
    for line in ("None", "12"):
        output = {"data": {"text/markdown": f"[source](https://x/blob/main/a.py#L{line}){{target=_blank}}"}}
        drop(output)
        assert output["data"]["text/markdown"] == "[source](https://x/blob/main/a.py){target=_blank}"
    drop({"name": "stdout"})


@pytest.mark.parametrize("text, asks", [
    ('<script src="https://unpkg.com/a.js"></script>', True),
    ('<link href="//fonts.googleapis.com/css" rel="stylesheet">', True),
    ("@import url(https://fonts.googleapis.com/css2?family=Lato);", True),
    ("@font-face { src: url('https://fonts.gstatic.com/a.woff2') }", True),
    ('<a href="https://github.com/altgrad/altgrad">source</a>', False),
    ('<link rel="canonical" href="https://altgrad.github.io/altgrad/">', False),
    ('<img src="images/the_answer.png">', False),
])
def test_a_page_that_asks_elsewhere_is_found(text, asks, tmp_path, capsys):
    (tmp_path / "page.html").write_text(text)
    assert OFFLINE["main"](tmp_path) == asks
    assert ("page.html asks for" in capsys.readouterr().err) == asks


def test_the_themes_ask_for_no_font():
    theme = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["format"]["html"][
        "theme"
    ]
    assert all(names[-1] == "site.scss" for names in theme.values())
    assert "$web-font-path: false" in (ROOT / "nbs/site.scss").read_text()
