"""The web site: every notebook becomes a page, is in a menu, says what it is for, and has text for
its figures. Works without Quarto, on a copy."""
import json
import os
import re
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
# that one was committed before the runs and is not changed
PAGES = [name for name in NOTEBOOKS if name != "studies/protocol.ipynb"]
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


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    "A copy of the project with its pages prepared in _proc, and what that printed."
    copy = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "nbs", copy / "nbs", symlinks=True)
    shutil.copytree(ROOT / "altgrad", copy / "altgrad")
    for name in ["settings.ini", "_quarto.yml"]: shutil.copy(ROOT / name, copy)
    env = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE],
        cwd=copy,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
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
    assert all((pages / name).is_file() for name in ("styles.css", "site.scss"))


def test_menus_name_only_notebooks_that_exist():
    assert set(hrefs(website())) <= set(NOTEBOOKS)


def test_every_notebook_is_in_one_sidebar():
    listed = hrefs(website()["sidebar"])
    assert sorted(listed) == sorted(set(NOTEBOOKS) - {"index.ipynb"})


def cells(name: str, kind: str) -> list[dict]:
    "A notebook's cells of one kind, their source as one text."
    nb = json.loads((ROOT / "nbs" / name).read_text(encoding="utf-8"))
    return [
        {**cell, "source": "".join(cell["source"])}
        for cell in nb["cells"]
        if cell["cell_type"] == kind
    ]


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


@pytest.mark.parametrize("name", PAGES)
def test_a_promise_is_one_line(name):
    nb = json.loads((ROOT / "nbs" / name).read_text(encoding="utf-8"))
    promise, _, links = "".join(nb["cells"][1]["source"]).rpartition("<small>")
    assert links.startswith("[Colab]") and re.fullmatch(
        r"(After this page you (know|can|have) \S.{20,300}\.\n\n)?", promise
    ), promise


def test_pages_can_be_opened_in_colab_and_binder():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/notebooks.py", "links", "--check"],
        capture_output=True,
        text=True,
    )
    if done.returncode: pytest.fail(done.stderr[-1000:], pytrace=False)


def alt_texts(source: str) -> list[str]:
    "What a cell's `#| fig-alt:` says, one text a figure."
    found = re.search(r"^#\| fig-alt: (.*)$", source, re.MULTILINE)
    texts = yaml.safe_load(found[1]) if found else []
    return texts if isinstance(texts, list) else [texts]


@pytest.mark.parametrize("name", PAGES)
def test_figures_have_alt_text(name):
    for cell in cells(name, "code"):
        figures = sum(
            any(kind.startswith("image/") for kind in output.get("data", {}))
            for output in cell["outputs"]
        )
        texts = alt_texts(cell["source"])
        assert not figures or len(texts) == figures and all(len(text) >= 30 for text in texts), (
            cell["source"][-200:]
        )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_images_in_text_have_alt_text(name):
    for cell in cells(name, "markdown"):
        assert all(len(alt) >= 30 for alt in re.findall(r"!\[([^\]]*)\]\(", cell["source"]))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_within_the_site_lead_somewhere(name):
    here = (ROOT / "nbs" / name).parent
    texts = [cell["source"] for cell in cells(name, "markdown")]
    shown = [
        output.get("data", {}).get("text/markdown", "")
        for cell in cells(name, "code")
        for output in cell["outputs"]
    ]
    texts += ["".join(text) for text in shown]
    links = [
        link
        for text in texts
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"\$[^$]*\$|`[^`]*`", "", text))
    ]
    inside = [
        link.partition("#")[0] for link in links if not re.match(r"https?://|mailto:|#", link)
    ]
    assert [link for link in inside if not (here / link).exists()] == []


def test_maths_needs_nothing_from_the_web():
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    assert config["format"]["html"]["html-math-method"] == "mathml"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_maths_is_in_the_latex_that_becomes_mathml(name):
    # pandoc does not know the old font switches
    assert [
        cell["source"]
        for cell in cells(name, "markdown")
        if re.search(r"\\(rm|bf|it)\b", cell["source"])
    ] == []


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
