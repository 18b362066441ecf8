"""What the notebooks must look like: the rules of CONTRIBUTING.md that a program can check."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbdev.doclinks import nbglob
from nbdev.process import NBProcessor

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(nbglob(ROOT / "nbs", as_path=True))
EXPORTS = {"export", "exports", "exporti"}
# `- key: value` lines are options of nbdev
TITLE = re.compile(r"\A# \S[^\n]*\n\n?> \S[^\n]*(\n\n?(- [\w-]+: [^\n]*\n?)+)?\Z")
MACHINE_PATHS = [f"/{folder}/" for folder in ("home", "root", "Users", "tmp")] + [f"{ROOT}/"]
EXPORT_LIMIT, CLASS_LIMIT = 40, 150  # lines: a class is one class, and need not be cut
TABLE_LIMIT = 100  # a table is read by its rows
PNG_LIMIT = 200_000  # bytes

every_notebook = pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda p: p.relative_to(ROOT / "nbs").as_posix()
)


def cells(path: Path, kind: str = "code") -> list:
    "A notebook's cells of one kind, their directives split from the source by nbdev."
    return [c for c in NBProcessor(path).nb.cells if c.cell_type == kind]


def mixes_imports(cell) -> bool:
    """Whether the site's build runs this cell for its import, and with it statements that may need
    cells that are not run.

    nbdev runs a cell that holds an import at any depth. It runs exported cells anyway; cells with
    `eval: false` or `nbdev_export()`, never.
    """
    if cell.directives_.keys() & (EXPORTS | {"exec_doc"}): return False
    if cell.directives_.get("eval:") == ["false"] or "nbdev_export()" in cell.source: return False
    imports = (ast.Import, ast.ImportFrom)
    tree = cell.parsed_() or []
    return any(isinstance(n, imports) for top in tree for n in ast.walk(top)) and not all(
        isinstance(top, imports) for top in tree
    )


def texts(cell) -> list[str]:
    """The source of a cell and all text that it printed or showed;
    not images, whose base64 may spell anything."""
    outputs = cell.get("outputs", [])
    printed = ["".join(o.get("text", [])) + "".join(o.get("traceback", [])) for o in outputs]
    shown = [
        "".join(data)
        for o in outputs
        for kind, data in o.get("data", {}).items()
        if kind.startswith("text/")
    ]
    return [cell.source, *printed, *shown]


@every_notebook
def test_imports_have_their_own_cells(path):
    assert [c.source for c in cells(path) if mixes_imports(c)] == []


@every_notebook
def test_starts_with_title_and_description(path):
    first = NBProcessor(path).nb.cells[0]
    is_title = first.cell_type == "markdown" and TITLE.match(first.source.strip())
    assert is_title, (
        f"the first cell must be `# Title`, `> one line` and no more, not:\n{first.source}"
    )


def only_imports(cell) -> bool:
    "Whether a cell imports and does nothing else."
    return all(
        isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(cell.source).body
    )


def limit_of(cell) -> int:
    "The most lines that an export cell may have."
    body = ast.parse(cell.source).body
    if len(body) == 1 and isinstance(body[0], ast.ClassDef): return CLASS_LIMIT
    return TABLE_LIMIT if isinstance(body[-1], (ast.Assign, ast.AnnAssign)) else EXPORT_LIMIT


@every_notebook
def test_export_cells_are_short(path):
    exported = [c for c in cells(path) if c.directives_.keys() & EXPORTS and not only_imports(c)]
    sizes = [(len(c.source.strip().splitlines()), limit_of(c), c.source[:100]) for c in exported]
    assert [size for size in sizes if size[0] > size[1]] == []


TUTORIALS = [path for path in NOTEBOOKS if path.parent.name == "tutorials"]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_what_a_tutorial_shows_needs_nothing_that_it_hides(path):
    shown = [
        c.source for c in cells(path)
        if "hide" not in c.directives_ and c.directives_.get("echo:") != ["false"]
    ]
    plain = ["\n".join(line for line in s.splitlines() if not line.startswith("%%")) for s in shown]
    command = "-m ruff check -q --isolated --select F821 --output-format concise --stdin-filename shown.py -"
    found = subprocess.run(
        [sys.executable, *command.split()], input="\n\n".join(plain), capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (0, "")


@every_notebook
def test_no_machine_paths(path):
    found = [
        text for kind in ["code", "markdown"] for cell in cells(path, kind) for text in texts(cell)
    ]
    assert [(part, text) for text in found for part in MACHINE_PATHS if part in text] == []


@every_notebook
def test_no_stored_errors(path):
    assert [c.source for c in cells(path) if any(o.output_type == "error" for o in c.outputs)] == []


@every_notebook
def test_a_cell_that_shows_documentation_shows_it(path):
    calls = [c for c in cells(path) if re.search(r"^(for .*: )?show_doc\(", c.source, re.M)]
    assert [c.source for c in calls if not c.outputs] == []


@every_notebook
def test_no_stored_widgets(path):
    # their ids are drawn anew at every run, and no page can show them without a kernel
    nb = NBProcessor(path).nb
    shown = [
        c.source
        for c in nb.cells
        if c.cell_type == "code"
        and any("widget-view" in kind for o in c.outputs for kind in o.get("data", {}))
    ]
    assert shown == [] and "widgets" not in nb.metadata


@every_notebook
def test_figures_are_small(path):
    pngs = [
        o.data["image/png"]
        for c in cells(path)
        for o in c.outputs
        if "image/png" in o.get("data", {})
    ]
    sizes = [len("".join(png)) * 3 // 4 for png in pngs]  # base64 spells 3 bytes in 4 characters
    assert [size for size in sizes if size > PNG_LIMIT] == []


def test_readme_is_in_sync():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/notebooks.py", "readme", "--check"],
        capture_output=True,
        text=True,
    )
    if done.returncode: pytest.fail(done.stderr[-1000:], pytrace=False)


def test_a_notebook_frees_no_operator_of_the_package():
    "torch frees an operator when another is registered under its name; see `operator_name`."
    cells = [cell.source for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells
             if "custom_op(" in cell.source]
    assert len(cells) >= 3 and all("custom_op(operator_name(__name__, " in source for source in cells)
