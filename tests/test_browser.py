"""What people see, in a real browser: JupyterLab runs the explorer and the first tutorial; the
rendered pages are whole, wide, narrow and in the dark.

Needs Chromium (or Chrome): on the PATH, or named by the variable ALTGRAD_BROWSER, and then a
missing one is an error and no reason to skip.
Quarto's pages are opened where Quarto is installed, else nbconvert's. Those need no network:
Debian's libjs-mathjax draws their maths where it is there.
"""
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the package playwright is not installed (pip install playwright)"
)

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
TUTORIAL = "tutorials/first_run.ipynb"
RUN_IN_LAB = ["views/04_explorer.ipynb", TUTORIAL]
PAGES = [
    "index.ipynb", "numbers/00_formats.ipynb", "geometry/00_spacing.ipynb",
    "studies/the_answer.ipynb", "studies/speed.ipynb", "tutorials/lab.ipynb",
]
PAGES += RUN_IN_LAB
EVERY = sorted(p.relative_to(NBS).as_posix() for p in NBS.rglob("[!.]*.ipynb") if "/." not in f"{p}")
MATHJAX = Path("/usr/share/javascript/mathjax")  # Debian's and Ubuntu's libjs-mathjax
# WCAG's least, for large text; notebooks colour their code below the 4.5 for small text
CONTRAST = 3.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser():
    "Chromium, or the reason why there is none."
    named = os.environ.get("ALTGRAD_BROWSER")
    path = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if named and not path: pytest.fail(f"ALTGRAD_BROWSER names {named}, which is no program")
    if not path: pytest.skip("no Chromium or Chrome on the PATH (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


# JupyterLab


def free_port() -> int:
    "A port that nobody listens on."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write_settings(folder: Path):
    "Lab without news, with all cells of a notebook in the page and not only those in sight."
    for name, value in {"apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
                        "notebook-extension/tracker": {"windowingMode": "none"}}.items():
        file = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))


def answers(url: str) -> bool:
    "Whether something answers there."
    try:
        with urllib.request.urlopen(url, timeout=5): return True
    except OSError: return False


@pytest.fixture(scope="module")
def lab(browser, small_copy, tmp_path_factory):
    """A JupyterLab server with a home of its own over a copy of the notebooks:
    its folder, and the address of a notebook in it."""
    home, token, port = tmp_path_factory.mktemp("home"), secrets.token_hex(8), free_port()
    folder = home / "nbs"
    shutil.copytree(NBS, folder)
    write_settings(home / "settings")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "JUPYTER"))}
    env |= {
        "HOME": str(home),
        "ALTGRAD_CACHE": f"{small_copy}/cache",
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "IN_TEST": "1",
        "OMP_NUM_THREADS": "1",  # IN_TEST: nothing is exported
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        "--expose-app-in-browser",
    ]
    with open(home / "log", "wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while not answers(f"http://127.0.0.1:{port}/api"):
            assert server.poll() is None and time.monotonic() < until, (home / "log").read_text()[
                -2000:
            ]
            time.sleep(0.2)
        yield folder, lambda name: f"http://127.0.0.1:{port}/lab/tree/{name}?token={token}&reset"
    finally:
        server.terminate()
        server.wait(30)


def run_all(page, name: str):
    """Runs every cell of the notebook that is open and saves it;
    only when the last one has ended does this return."""
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    page.wait_for_function(
        "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
        timeout=120_000,
    )
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")


def problems(path: Path) -> list[str]:
    "Cells of a notebook that were not run, or that ended with an error."
    cells = [
        c
        for c in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if c["cell_type"] == "code" and "".join(c["source"]).strip()
    ]
    failed = [
        f"{o['ename']}: {o['evalue']}"
        for c in cells
        for o in c["outputs"]
        if o["output_type"] == "error"
    ]
    return failed + [
        "not run: " + "".join(c["source"])[:200] for c in cells if c["execution_count"] is None
    ]


def picture(page) -> str:
    "The explorer's picture, as the browser has it."
    return page.evaluate("""async () => {
        const bytes = new Uint8Array(await (await fetch(document.querySelector('img.widget-image').src)).arrayBuffer());
        return Array.from(new Uint8Array(await crypto.subtle.digest('SHA-256', bytes))).join(' ')}""")


def changed(page, before: str) -> str:
    "The next picture."
    until = time.monotonic() + 30
    while (now := picture(page)) == before:
        assert time.monotonic() < until, "the picture did not change"
        page.wait_for_timeout(20)
    return now


# nbconvert's template asks the network for scripts, and the network is off; Quarto's pages do not
UNREACHABLE = "net::ERR_FAILED"


def open_page(browser, width: int, height: int = 900):
    "A page whose errors are kept, those of its console too."
    page = browser.new_page(viewport={"width": width, "height": height})
    page.failed, page.console = [], []
    page.on("pageerror", lambda e: page.failed.append(str(e)))
    page.on("console", lambda m: page.console.append(m.text) if m.type == "error" else None)
    return page


@pytest.mark.parametrize("name", RUN_IN_LAB)
def test_notebook_runs_in_jupyterlab(browser, lab, name, tmp_path):
    folder, address = lab
    page = open_page(browser, 1280)
    page.goto(address(name))
    run_all(page, name)
    assert problems(folder / name) == []
    page.screenshot(path=tmp_path / "lab.png")
    if name == "views/04_explorer.ipynb": drag(page, tmp_path)
    page.close()


def drag(page, tmp_path: Path):
    "Moves a slider and picks from a menu with the keyboard."
    page.locator("img.widget-image").scroll_into_view_if_needed()
    first = picture(page)
    label = page.locator(".widget-hslider", has_text="exponent bits")
    label.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    second = changed(page, first)
    menu = page.locator(".widget-dropdown", has_text="format").locator("select")
    # the kernel sends the picture, the number and the menu one after the other
    sync_api.expect(label.locator(".widget-readout")).to_have_text("5", timeout=30_000)
    sync_api.expect(menu).to_have_value("E5M2", timeout=30_000)
    page.keyboard.press("ArrowLeft")
    assert changed(page, second) != first, (
        "the mantissa gave a bit away on the way up, and stays: E4M2 is not E4M3"
    )
    menu.select_option("E4M3")
    until = time.monotonic() + 30
    while picture(page) != first and time.monotonic() < until: page.wait_for_timeout(20)
    assert picture(page) == first and page.failed == []
    page.screenshot(path=tmp_path / "explorer.png")


# the rendered pages


def by_nbconvert(folders: list[Path]) -> dict[bool, dict[str, Path]]:
    """Pages without Quarto, light and dark. They differ before their first cell only, so that each is
    converted once, and code is not cleaned of HTML: Pygments has escaped it."""
    from nbconvert import HTMLExporter
    from nbconvert.filters import clean_html
    from nbformat.v4 import new_notebook

    exporters = [HTMLExporter(theme=theme) for theme in ("light", "dark")]
    coloured = '<div class=" highlight hl-'
    cleaned = lambda text: text if text.startswith(coloured) else clean_html(text)
    exporters[0].register_filter("clean_html", cleaned)
    if MATHJAX.is_dir():
        for e in exporters: e.mathjax_url = "https://mathjax/MathJax.js?config=TeX-AMS_CHTML-full,Safe"
    heads = [e.from_notebook_node(new_notebook())[0].partition("<main>")[0] for e in exporters]
    found: dict[bool, dict[str, Path]] = {False: {}, True: {}}
    for name in EVERY:
        light = exporters[0].from_filename(str(NBS / name))[0]
        mine, other = (head.replace("<title>Notebook<", f"<title>{Path(name).stem}<") for head in heads)
        assert light.startswith(mine), name
        for dark, page in enumerate((light, other + light.removeprefix(mine))):
            found[dark][name] = (folders[dark] / name).with_suffix(".html")
            found[dark][name].parent.mkdir(parents=True, exist_ok=True)
            found[dark][name].write_text(page, encoding="utf-8")
    whole = exporters[1].from_filename(str(NBS / TUTORIAL))[0]
    assert found[True][TUTORIAL].read_text(encoding="utf-8") == whole
    return found


def by_quarto(folder: Path) -> dict[str, Path]:
    "Pages as the site has them: light and dark are one."
    for name in ("nbs", "altgrad"): shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for name in ("settings.ini", "_quarto.yml"): shutil.copy(ROOT / name, folder)
    code = (
        "from nbdev.quarto import refresh_quarto_yml as a; from nbdev.serve import proc_nbs as "
        "b; a(); b(n_workers=1)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
        timeout=600,
    )
    for name in EVERY:
        subprocess.run(
            ["quarto", "render", name, "--no-execute"],
            cwd=folder / "_proc",
            check=True,
            timeout=600,
        )
    return {name: (folder / "_proc/_docs" / name).with_suffix(".html") for name in EVERY}


@pytest.fixture(scope="module")
def rendered(browser, tmp_path_factory) -> dict[bool, dict[str, Path]]:
    "dark -> name -> page."
    folders = [tmp_path_factory.mktemp(name) for name in ("light", "dark")]
    if shutil.which("quarto"): return dict.fromkeys((False, True), by_quarto(folders[0]))
    for folder in folders: shutil.copytree(NBS / "images", folder / "images")
    return by_nbconvert(folders)


def serve_mathjax(route):
    "Debian's MathJax in place of the network; everything else out there is unreachable."
    path = MATHJAX / route.request.url.partition("//mathjax/")[2].partition("?")[0]
    route.fulfill(path=path) if route.request.url.startswith(
        "https://mathjax/"
    ) and path.is_file() else route.abort()


@pytest.fixture(scope="module")
def visit(browser, rendered):
    """Opens a rendered page at a width; with maths where that matters, as it takes seconds. A page of
    nbconvert's takes the place of the one before it, since a tab costs more than what it shows; one of
    Quarto's remembers whether it is dark, and has a tab of its own."""
    tabs, quarto = {}, shutil.which("quarto")

    def tab(width: int, dark: bool, maths: bool):
        page = open_page(browser, width)
        if not quarto and (MATHJAX.is_dir() or not maths):
            page.route(
                re.compile("^https?:"), serve_mathjax if maths else lambda route: route.abort()
            )
        page.emulate_media(color_scheme="dark" if dark else "light")
        return page

    def open_at(name: str, width: int, dark: bool = False, maths: bool = False):
        how = width, dark, maths
        if quarto and how in tabs: tabs.pop(how).close()
        page = tabs[how] = tabs.get(how) or tab(*how)
        page.failed.clear()
        page.console.clear()
        page.goto(rendered[dark][name].as_uri())
        if dark:
            page.evaluate(
                "document.body.classList.contains('quarto-light') && "
                "window.quartoToggleColorScheme?.()"
            )
        return page
    yield open_at
    for page in tabs.values(): page.close()


every_page = pytest.mark.parametrize("name", PAGES)


def source(name: str) -> list[dict]:
    "A notebook's cells."
    return json.loads((NBS / name).read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("name", EVERY)
def test_every_page_opens_on_a_phone_and_in_the_dark_with_the_network_off(visit, name):
    for width, dark in ((390, False), (1280, True)):
        page = visit(name, width, dark)
        said = page.failed + page.console
        if not shutil.which("quarto"): said = [text for text in said if UNREACHABLE not in text]
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, page.evaluate(
            WIDEST, width
        )


@every_page
def test_figures_are_shown(visit, name):
    page = visit(name, 1280)
    broken = page.evaluate(
        "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src.slice(0, "
        "100))"
    )
    stored = sum(
        "image/png" in o.get("data", {}) for c in source(name) for o in c.get("outputs", [])
    )
    assert broken == [] and page.evaluate("document.images.length") >= stored


@every_page
def test_links_lead_somewhere(visit, name):
    page = visit(name, 1280)
    hrefs = page.evaluate(
        "[...document.querySelectorAll('main a[href], .jp-Notebook a[href]')].map(a => "
        "a.getAttribute('href'))"
    )
    here = (NBS / name).parent
    local = [h for h in hrefs if not re.match(r"[a-z]+:|#", h)]
    missing = [
        h
        for h in local
        if not any(
            (here / h.split("#")[0]).with_suffix(end).exists()
            for end in (".ipynb", Path(h.split("#")[0]).suffix)
        )
    ]
    anchors = [h for h in hrefs if h.startswith("#") and len(h) > 1]
    lost = [
        h
        for h in anchors
        if not page.evaluate("id => !!document.getElementById(decodeURIComponent(id))", h[1:])
    ]
    assert missing + lost == []


RAW_MATHS = """() => {
    const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const text = walk.currentNode.data, e = walk.currentNode.parentElement;
        if (!/\\$[^$]+\\$/.test(text)) continue;
        if (e.closest('pre, code, script, style, .highlight, annotation')) continue;
        found.push(text.trim().slice(0, 80));
    }
    return found }"""


@every_page
def test_maths_is_drawn(visit, name):
    has_maths = any(
        re.search(r"\$[^$`]+\$", re.sub(r"`[^`]*`", "", "".join(c["source"])))
        for c in source(name)
        if c["cell_type"] == "markdown"
    )
    if not has_maths: pytest.skip("no maths on this page")
    page = visit(name, 1280, maths=True)
    try:
        page.wait_for_selector(
            ".MathJax_CHTML, mjx-container, .MathJax, .katex", state="attached",
            timeout=20_000 if MATHJAX.is_dir() else 10_000,
        )
    except sync_api.TimeoutError:
        if not MATHJAX.is_dir():
            pytest.skip(
                "no MathJax here and none from the network (Debian: apt-get install libjs-mathjax)"
            )
        raise
    page.wait_for_function(
        "!window.MathJax?.Hub || !document.querySelector('.MathJax_Preview:not(:empty)')",
        timeout=20_000,
    )
    assert page.evaluate(RAW_MATHS) == [] and page.locator(".merror, .katex-error").count() == 0


@every_page
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(visit, name, width, tmp_path):
    page = visit(name, width, maths=True)
    page.screenshot(path=tmp_path / f"{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, page.evaluate(
        WIDEST, width
    )


WIDEST = """width => {
    const scrolls = e => {  // whether it stands in something that scrolls or hides what is too wide
        for (e = e.parentElement; e && e !== document.body; e = e.parentElement)
            if (getComputedStyle(e).overflowX !== 'visible') return true;
        return false };
    const wide = e => e.getBoundingClientRect().right > width + 1 && !scrolls(e);
    const found = [...document.querySelectorAll('body *')].filter(wide);
    return found.slice(0, 5).map(e => e.outerHTML.slice(0, 150)) }"""

FAINT = """least => {
    const numbers = c => {
        const m = c.match(/[\\d.]+/g).map(Number);
        return m.length < 4 ? [...m.slice(0, 3), 1] : m };
    const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const ground = e => {
        for (; e; e = e.parentElement) {
            const c = numbers(getComputedStyle(e).backgroundColor);
            if (c[3] > 0.5) return c }
        return [255, 255, 255] };
    const found = {}, walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const e = walk.currentNode.parentElement, style = getComputedStyle(e);
        const text = walk.currentNode.data.trim();
        if (!text || !e.getClientRects().length || style.visibility !== 'visible') continue;
        if (e.closest('script, style, .anchor-link, .MathJax_Preview')) continue;
        const both = [light(numbers(style.color)), light(ground(e))];
        const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        const place = `${style.color} in ${e.tagName} ${e.className}: ${ratio.toFixed(2)}`;
        if (ratio < least) found[place] = text.slice(0, 60);
    }
    return found }"""


@every_page
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out(visit, name, dark, tmp_path):
    page = visit(name, 1280, dark)
    page.screenshot(path=tmp_path / "page.png")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    shade = sum(map(float, re.findall(r"[\d.]+", ground)[:3])) / 3
    assert (shade < 100) == dark, f"the {'dark' if dark else 'light'} page stands on {ground}"
    assert page.evaluate(FAINT, CONTRAST) == {}
