"""What pages must look like: the rules of CONTRIBUTING.md that a program can check. A lint lists the
faults of a page, as nbdev reads it."""
import ast
import math
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import yaml
from execnb.nbio import dict2nb
from nbdev.doclinks import nbglob
from nbdev.process import NBProcessor

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
NOTEBOOKS = sorted(nbglob(NBS, as_path=True))
EXPORTS = {"export", "exports", "exporti"}
IMPORTS = (ast.Import, ast.ImportFrom)
# `- key: value` lines are options of nbdev
TITLE = re.compile(r"\A# \S[^\n]*\n\n?> \S[^\n]*(\n\n?(- [\w-]+: [^\n]*\n?)+)?\Z")
PROMISE = re.compile(r"(After this page you (know|can|have) \S.{20,300}\.\n\n)?")
MACHINE_PATHS = [f"/{folder}/" for folder in ("home", "root", "Users", "tmp")] + [f"{ROOT}/"]
EXPORT_LIMIT, CLASS_LIMIT = 40, 150  # lines: a class is one class, and need not be cut
TABLE_LIMIT = 100  # a table is read by its rows
PNG_LIMIT = 200_000  # bytes
ALT_LEAST = 30  # characters
RUFF = "-m ruff check -q --isolated --select F821 --output-format concise --stdin-filename shown.py -"


def cells(page, kind: str = "code") -> list:
    "A page's cells of one kind, their directives split from the source by nbdev."
    return [c for c in page.cells if c.cell_type == kind]


def data(cell) -> list[dict]:
    "What each output of a cell shows, by its kind."
    return [o.get("data", {}) for o in cell.get("outputs", [])]


def mixes_imports(cell) -> bool:
    """Whether the site's build runs this cell for its import, and with it statements that may need
    cells that are not run.

    nbdev runs a cell that holds an import at any depth. It runs exported cells anyway; cells with
    `eval: false` or `nbdev_export()`, never.
    """
    if cell.directives_.keys() & (EXPORTS | {"exec_doc"}): return False
    if cell.directives_.get("eval:") == ["false"] or "nbdev_export()" in cell.source: return False
    tree = cell.parsed_() or []
    return any(isinstance(n, IMPORTS) for top in tree for n in ast.walk(top)) and not all(
        isinstance(top, IMPORTS) for top in tree
    )


def imports(page) -> list[str]:
    "Cells that import and do something else."
    return [c.source for c in cells(page) if mixes_imports(c)]


def title(page) -> list[str]:
    "A first cell that is not `# Title`, `> one line` and no more."
    first = page.cells[0]
    good = first.cell_type == "markdown" and TITLE.match(first.source.strip())
    return [] if good else [f"not `# Title`, `> one line` and no more: {first.source}"]


def limit_of(cell) -> float:
    "The most lines that an export cell may have; imports may have any."
    body = ast.parse(cell.source).body
    if all(isinstance(node, IMPORTS) for node in body): return math.inf
    if len(body) == 1 and isinstance(body[0], ast.ClassDef): return CLASS_LIMIT
    return TABLE_LIMIT if isinstance(body[-1], (ast.Assign, ast.AnnAssign)) else EXPORT_LIMIT


def long_exports(page) -> list[str]:
    "Export cells of too many lines."
    exported = [c for c in cells(page) if c.directives_.keys() & EXPORTS]
    sizes = [(len(c.source.strip().splitlines()), limit_of(c), c.source[:100]) for c in exported]
    return [f"{size} > {limit} lines: {start}" for size, limit, start in sizes if size > limit]


def hidden_names(page) -> list[str]:
    "What the shown cells of a tutorial need, and only hidden ones have."
    if Path(page.path_).parent.name != "tutorials": return []
    shown = [
        c.source for c in cells(page)
        if "hide" not in c.directives_ and c.directives_.get("echo:") != ["false"]
    ]
    plain = ["\n".join(line for line in s.splitlines() if not line.startswith("%%")) for s in shown]
    done = subprocess.run(
        [sys.executable, *RUFF.split()], input="\n\n".join(plain), capture_output=True, text=True
    )
    return [done.stdout + done.stderr] if done.returncode else []


def texts(cell) -> list[str]:
    """The source of a cell and all text that it printed or showed;
    not images, whose base64 may spell anything."""
    outputs = cell.get("outputs", [])
    printed = ["".join(o.get("text", [])) + "".join(o.get("traceback", [])) for o in outputs]
    shown = [d[kind] for d in data(cell) for kind in d if kind.startswith("text/")]
    return [cell.source, *printed, *map("".join, shown)]


def machine_paths(page) -> list[str]:
    "Paths of somebody's machine, in a source or in an output."
    every = [text for cell in cells(page) + cells(page, "markdown") for text in texts(cell)]
    return [f"{part} in {text}" for text in every for part in MACHINE_PATHS if part in text]


def stored_errors(page) -> list[str]:
    "Cells that failed."
    return [c.source for c in cells(page) if any(o.output_type == "error" for o in c.outputs)]


def documentation(page) -> list[str]:
    "Cells that are to show documentation, and show nothing."
    calls = [c for c in cells(page) if re.search(r"^(for .*: )?show_doc\(", c.source, re.M)]
    return [c.source for c in calls if not c.outputs]


def widgets(page) -> list[str]:
    "Stored widgets: their ids are new at every run, and no page can show them without a kernel."
    shown = [c.source for c in cells(page) if "widget-view" in " ".join(chain(*data(c)))]
    return shown + ["in the notebook's metadata"] * ("widgets" in page.metadata)


def large_figures(page) -> list[str]:
    "Figures of too many bytes; base64 spells 3 in 4 characters."
    pngs = [d["image/png"] for c in cells(page) for d in data(c) if "image/png" in d]
    sizes = [len("".join(png)) * 3 // 4 for png in pngs]
    return [f"{size} > {PNG_LIMIT} bytes" for size in sizes if size > PNG_LIMIT]


def image_texts(page) -> list[str]:
    "Short alternatives to the images that the text shows."
    sources = [c.source for c in cells(page, "markdown")]
    alts = [alt for source in sources for alt in re.findall(r"!\[([^\]]*)\]\(", source)]
    return [f"{alt!r} is short" for alt in alts if len(alt) < ALT_LEAST]


def links(page) -> list[str]:
    "Links within the site that lead nowhere."
    written = [c.source for c in cells(page, "markdown")]
    written += ["".join(d.get("text/markdown", "")) for c in cells(page) for d in data(c)]
    plain = [re.sub(r"\$[^$]*\$|`[^`]*`", "", text) for text in written]
    targets = [link for text in plain for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    inside = [t.partition("#")[0] for t in targets if not re.match(r"https?://|mailto:|#", t)]
    return [link for link in inside if not (Path(page.path_).parent / link).exists()]


def maths(page) -> list[str]:
    "Text with the old font switches, which pandoc does not know when it writes MathML."
    return [c.source for c in cells(page, "markdown") if re.search(r"\\(rm|bf|it)\b", c.source)]


def promise(page) -> list[str]:
    "A second cell that says more than one line, or has no links beneath it."
    text, _, badges = (source := page.cells[1].source).rpartition("<small>")
    return [] if badges.startswith("[Colab]") and PROMISE.fullmatch(text) else [source]


def lacks_texts(cell) -> bool:
    "Whether some figure of a cell has no text in its `#| fig-alt:`, or a short one."
    figures = sum(any(kind.startswith("image/") for kind in d) for d in data(cell))
    line = re.search(r"^#\| fig-alt: (.*)$", cell.source, re.MULTILINE)
    alts = yaml.safe_load(line[1]) if line else []
    every = alts if isinstance(alts, list) else [alts]
    return figures > 0 and [len(alt) >= ALT_LEAST for alt in every] != [True] * figures


def alt_texts(page) -> list[str]:
    "Cells that draw, and do not say what is to be seen."
    return [c.source[-200:] for c in cells(page) if lacks_texts(c)]


LINTS = (
    title, imports, long_exports, hidden_names, machine_paths, stored_errors, documentation,
    widgets, large_figures, image_texts, links, maths,
)
# of all pages but the one that was committed before the runs and is not changed
LATER = (promise, alt_texts)
PROTOCOL = NBS / "studies/protocol.ipynb"


def faults(page) -> list[str]:
    "All faults of a page, each with the name of its lint."
    lints = LINTS if Path(page.path_) == PROTOCOL else LINTS + LATER
    return [f"{lint.__name__}: {fault}" for lint in lints for fault in lint(page)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(NBS).as_posix())
def test_page_has_no_fault(path):
    listed = faults(NBProcessor(path).nb)
    if listed: pytest.fail("\n".join(listed), pytrace=False)


def text(source: str) -> dict: return dict(cell_type="markdown", source=source)


def code(source: str, **output) -> dict:
    outputs = [{"output_type": "display_data", **output}] if output else []
    return dict(cell_type="code", source=source, outputs=outputs)


BADGES, ALT = "<small>[Colab](https://c)</small>", "#| fig-alt: 'A line that rises, and then falls'"
GOOD = [
    text("# Title\n\n> What it is."),
    text(f"After this page you can tell a fault from none.\n\n{BADGES}"),
    code(f"{ALT}\nprint()", data={"image/png": "AAAA"}),
]
# a place in that page, a cell that takes it, and the lint that sees it
PLANTED = [
    (0, text("# Title"), "title"),
    (1, text(f"After this page you know it.\n\n{BADGES}"), "promise"),
    (2, code("import os\nos.getcwd()"), "imports"),
    (2, code("#| export\n" + "print()\n" * 41), "long_exports"),
    (2, code("#| export\nclass A:\n" + "    print()\n" * 150), "long_exports"),
    (2, code("#| export\nA = [\n" + "    1,\n" * 99 + "]"), "long_exports"),
    (2, code("print(lost)"), "hidden_names"),
    (2, code("print()", text=["at /home/me"]), "machine_paths"),
    (2, code("print()", data={"text/plain": f"{MACHINE_PATHS[-2]}a"}), "machine_paths"),
    (2, text("In /Users/me"), "machine_paths"),
    (2, code("print()", output_type="error"), "stored_errors"),
    (2, code("#| hide\nshow_doc(print)"), "documentation"),
    (2, code("print()", data={"application/vnd.jupyter.widget-view+json": ""}), "widgets"),
    (2, code(f"{ALT}\nprint()", data={"image/png": "A" * 270_000}), "large_figures"),
    (2, code("print()", data={"image/png": "AAAA"}), "alt_texts"),
    (2, text("![short](https://a)"), "image_texts"),
    (2, text("[a](no_such.ipynb)"), "links"),
    (2, code("print()", data={"text/markdown": "[a](no_such.md)"}), "links"),
    (2, text(r"${\rm x}$"), "maths"),
]


def planted(place: int, cell: dict):
    "A tutorial of three cells, one of them exchanged."
    nb = dict2nb(cells=[*GOOD[:place], cell, *GOOD[place + 1:]], metadata={})
    nb.path_ = NBS / "tutorials/planted.ipynb"
    return NBProcessor(nb=nb).nb


def test_each_lint_sees_its_fault_and_no_other():
    for place, cell, name in PLANTED:
        listed = faults(planted(place, cell))
        assert {fault.partition(":")[0] for fault in listed} == {name}, cell
    assert {name for *_, name in PLANTED} == {lint.__name__ for lint in LINTS + LATER}


def test_a_notebook_frees_no_operator_of_the_package():
    "torch frees an operator when another is registered under its name; see `operator_name`."
    sources = [c.source for path in NOTEBOOKS for c in NBProcessor(path).nb.cells]
    makers = [source for source in sources if "custom_op(" in source]
    assert len(makers) >= 3
    assert all("custom_op(operator_name(__name__, " in source for source in makers)
