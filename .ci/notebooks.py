"""Looks after the notebooks: runs them, renders the README, links them to Colab and Binder, and
checks that they are clean and exported."""
import argparse
import filecmp
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbconvert.filters import strip_ansi
from nbdev.clean import nbdev_clean
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.process import extract_directives
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
README = ROOT / "README.md"
# nbdev's `- key: value` below the title
FRONTMATTER_LINE = re.compile(r"^- [\w-]+: .*\n?", re.MULTILINE)
DIRECTIVE_LINES = re.compile(r"\A(\s*#\s*\|.*(\n|\Z))+")
SOURCE_LINE = re.compile(r"(/blob/\S+?\.py)#L\w+")  # of nbdev's link to a source
LINK = re.compile(r'(\]\(|src=")([^)"#\s]+)')
NO_SOURCE_TAG = "no-source"  # our exporter shows only the outputs of cells with this tag
SKIP_TAG = "skip-execution"  # nbclient leaves cells with this tag alone, their outputs too


def directives(cell) -> dict:
    "The `#|` directives of a code cell, as nbdev reads them."
    return extract_directives(cell, remove=False) if cell.cell_type == "code" else {}


def is_false(found: dict, name: str) -> bool:
    "Whether the directive `name` is there and says false."
    return found.get(f"{name}:", [""])[0].lower() == "false"


# execute


def is_skipped(cell) -> bool:
    "Whether nbdev_test would skip this cell for what it needs; one that is only slow is run here."
    found = directives(cell)
    flags = set(get_config().tst_flags.split()) - {"slow"}
    return is_false(found, "eval") or bool(found.keys() & flags)


def write_atomically(path: Path, text: str):
    "Replace `path` in one step, so that an interruption leaves the old file."
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def drop_source_line(output):
    "Let nbdev's link in an output open the file: a stored line is soon another, and None for an imported name."
    data = output.get("data", {})
    if "text/markdown" in data: data["text/markdown"] = SOURCE_LINE.sub(r"\1", data["text/markdown"])


def execute_one(path: Path, run_all: bool):
    "Run one notebook in a kernel of its own and store its outputs."
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        # nbdev_clean removes the tag again
        if is_skipped(cell) and not run_all: cell.metadata.tags = [SKIP_TAG]
    where = {"metadata": {"path": str(path.parent)}}
    quiet = ["--log-level=ERROR"]
    NotebookClient(
        nb, timeout=None, skip_cells_with_tag=SKIP_TAG, resources=where, extra_arguments=quiet,
        store_widget_state=False,
    ).execute()
    for output in chain.from_iterable(cell.get("outputs", ()) for cell in nb.cells): drop_source_line(output)
    write_atomically(path, nbformat.writes(nb))
    nbdev_clean.__wrapped__(str(path))


def execute(args) -> int:
    "Run notebooks in place; those that come after a failing one are not run."
    for path in args.notebooks or sorted(nbglob(NBS, as_path=True)):
        print(f"running {path}", flush=True)
        execute_one(Path(path).resolve(), args.all)
    return 0


# readme


def relink(match: re.Match) -> str:
    "Links of index.ipynb are relative to nbs/, those of the README to its parent."
    before, target = match.groups()
    return before + (posixpath.normpath(f"nbs/{target}") if (NBS / target).exists() else target)


def readme_markdown(cell, is_title: bool):
    "A markdown cell as the README shows it."
    source = FRONTMATTER_LINE.sub("", cell.source) if is_title else cell.source
    cell.source = LINK.sub(relink, source)
    return cell


def readme_code(cell):
    "A code cell as the README shows it, or None where it is hidden."
    found = directives(cell)
    if found.keys() & {"hide", "export", "exporti", "default_exp"} or is_false(found, "include"):
        return None
    if is_false(found, "echo"): cell.metadata.tags = [NO_SOURCE_TAG]
    cell.source = DIRECTIVE_LINES.sub("", cell.source)
    if is_false(found, "output"): cell.outputs = []
    for output in cell.outputs:
        shown = output.get("data", {})
        if "text/markdown" in shown:
            shown["text/markdown"] = LINK.sub(relink, shown["text/markdown"])
    return cell


def readme_cells(cells: list) -> list:
    "The cells that the README shows; raw cells are frontmatter."
    titles = [c for c in cells if c.cell_type == "markdown"][:1]
    shown = [
        readme_code(c) if c.cell_type == "code" else readme_markdown(c, c in titles)
        for c in cells
        if c.cell_type != "raw"
    ]
    return [c for c in shown if c is not None]


def markdown_exporter() -> MarkdownExporter:
    "nbconvert's exporter, preferring the outputs that GitHub shows best."
    config = Config()
    config.NbConvertBase.display_data_priority = [
        "text/markdown", "image/png", "text/html", "text/plain"
    ]
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_input_tags = {NO_SOURCE_TAG}
    return MarkdownExporter(config=config)


def render_readme() -> str:
    "The text of README.md."
    nb = nbformat.read(NBS / get_config().readme_nb, as_version=4)
    nb.cells = readme_cells(nb.cells)
    # for the code fences; nbdev_clean removes it from notebooks
    nb.metadata.language_info = {"name": "python"}
    text, resources = markdown_exporter().from_notebook_node(nb)
    if resources.get("outputs"):
        sys.exit(
            "index.ipynb: save figures under nbs/images and link to them; the README cannot hold "
            "them"
        )
    return re.sub(r"\n{3,}", "\n\n", strip_ansi(text)).strip() + "\n"


def readme(args) -> int:
    "Write README.md, or with --check compare it."
    text = render_readme()
    if not args.check: write_atomically(README, text)
    elif README.read_text(encoding="utf-8") != text:
        print("README.md differs from nbs/index.ipynb: run `make readme`", file=sys.stderr)
        return 1
    return 0


# links: where a page can be run by a click, and what makes that work; the same on every page


# was committed before the runs of the study, and is not changed
FROZEN = {"studies/protocol.ipynb"}
# as they are, and as they were
BADGES = re.compile(r"(\n\n)?(<small>)?\[(Open in )?Colab\]\(\S*\)[^\n]*")


def badges(name: str) -> str:
    "Two small links that open the page `name`, a path below nbs/."
    config = get_config()
    place = f"{config.user}/{config.repo}"
    colab = f"https://colab.research.google.com/github/{place}/blob/{config.branch}/nbs/{name}"
    binder = f"https://mybinder.org/v2/gh/{place}/{config.branch}?labpath=nbs/{name}"
    return f"<small>[Colab]({colab}) · [Binder]({binder})</small>"


def colab_cell(name: str) -> str:
    """Colab opens a notebook alone: this cell fetches the project, installs it,
    and goes to the notebook's folder. It does nothing elsewhere."""
    config = get_config()
    return "\n".join([
        "#| hide",
        "#| eval: false",
        "import os",
        "import subprocess",
        "",
        'if os.path.isdir("/content"):  # Google Colab',
        f'    clone = "git clone -q --depth 1 {config.git_url} /content/altgrad"',
        '    install = "pip install -q \'/content/altgrad[dev]\'"',
        '    subprocess.run(f"{clone} && {install}", shell=True, check=True)',
        f'    os.chdir("/content/altgrad/{posixpath.dirname(f"nbs/{name}")}")',
    ])


def with_links(nb, name: str):
    "The notebook with both in its second and third cell."
    second = nb.cells[1]
    if second.cell_type != "markdown":
        sys.exit(f"{name}: the second cell must be text, and holds the links")
    said = BADGES.sub("", second.source).strip()
    second.source = f"{said}\n\n{badges(name)}".strip()
    source = colab_cell(name)
    if "# Google Colab" not in nb.cells[2].source:
        nb.cells.insert(2, nbformat.v4.new_code_cell(source))
    nb.cells[2].source = source
    return nb


def links(args) -> int:
    "Write the links into every page, or with --check say where they are missing."
    stale = []
    for path in sorted(nbglob(NBS, as_path=True)):
        name = path.relative_to(NBS).as_posix()
        if name in FROZEN: continue
        before = nbformat.read(path, as_version=4)
        after = with_links(nbformat.read(path, as_version=4), name)
        if [c.source for c in before.cells] == [c.source for c in after.cells]: continue
        stale.append(name)
        if args.check: continue
        write_atomically(path, nbformat.writes(after))
        nbdev_clean.__wrapped__(str(path))
    for name in stale if args.check else ():
        print(f"{name} lacks its links: run .ci/notebooks.py links", file=sys.stderr)
    return int(args.check and bool(stale))


# checks: both work on copies, so the tree is never changed and need not be a git checkout


def check_clean(args) -> int:
    "Fail if nbdev_clean would change a notebook."
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(folder) / "nbs"
        shutil.copytree(NBS, copies, symlinks=True)
        nbdev_clean.__wrapped__(str(copies))
        dirty = [
            p
            for p in sorted(nbglob(NBS, as_path=True))
            if p.read_bytes() != (copies / p.relative_to(NBS)).read_bytes()
        ]
    for path in dirty:
        print(f"{path.relative_to(ROOT)} is not clean: run `make export`", file=sys.stderr)
    return int(bool(dirty))


def export_copy(folder: Path):
    """Export the notebooks into `folder`, from nothing but __init__.py,
    so that a module without a notebook is noticed."""
    shutil.copy(ROOT / "settings.ini", folder)
    shutil.copytree(NBS, folder / "nbs", symlinks=True)
    (folder / "altgrad").mkdir()
    shutil.copy(ROOT / "altgrad/__init__.py", folder / "altgrad")
    # nbdev_export does nothing where it is set
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    code = "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()"
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, check=True)


def check_export(args) -> int:
    "Fail if exporting the notebooks would change altgrad/."
    with tempfile.TemporaryDirectory() as folder:
        export_copy(Path(folder))
        new, old = Path(folder, "altgrad"), ROOT / "altgrad"
        names = sorted({
            p.relative_to(top).as_posix() for top in (new, old) for p in top.rglob("*.py")
        })
        _, differ, missing = filecmp.cmpfiles(new, old, names, shallow=False)
    for name in sorted(differ + missing):
        print(
            f"altgrad/{name} is not what the notebooks export: run `make export` (it overwrites "
            "edits made in altgrad/)",
            file=sys.stderr,
        )
    return int(bool(differ + missing))


def parse_args() -> argparse.Namespace:
    "The command line."
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("execute", help="run notebooks in place and keep their outputs")
    run.add_argument("notebooks", nargs="*", type=Path, help="default: all of them")
    run.add_argument(
        "--all", action="store_true", help="also run cells marked eval: false or notest"
    )
    run.set_defaults(function=execute)
    render = commands.add_parser("readme", help="write README.md from nbs/index.ipynb")
    render.add_argument("--check", action="store_true", help="only compare; exit 1 if it differs")
    render.set_defaults(function=readme)
    place = commands.add_parser("links", help="write the links to Colab and Binder into every page")
    place.add_argument(
        "--check", action="store_true", help="only compare; exit 1 if some page lacks them"
    )
    place.set_defaults(function=links)
    commands.add_parser("check-clean", help="would nbdev_clean change a notebook?").set_defaults(
        function=check_clean
    )
    commands.add_parser("check-export", help="would nbdev_export change altgrad/?").set_defaults(
        function=check_export
    )
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    args.notebooks = [p.resolve() for p in getattr(args, "notebooks", [])]
    os.chdir(ROOT)  # nbdev finds settings.ini from the working directory
    sys.exit(args.function(args))
