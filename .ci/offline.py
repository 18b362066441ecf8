"""Makes the rendered site need no other host: `make docs` runs it on _docs.

python .ci/offline.py FOLDER

Removes the scripts that Quarto adds for widgets (nothing here uses them) and source lines that
are None, and fails if a page still asks for something elsewhere. Quarto puts require.js and jQuery,
from a CDN, into each page that has an HTML output, also where that output is a table
(`extractJupyterWidgetDependencies` in quarto-cli's src/core/jupyter/widgets.ts).
"""
import re
import sys
from pathlib import Path

WIDGETS = re.compile(
    r"""<script\b[^>]*\bsrc="https://[^"]*/(?:require|jquery)[^"]*"[^>]*></script>\s*"""
    r"""|<script\b[^>]*>\s*define\('jquery'[^<]*</script>\s*"""
)
ASKS = (
    re.compile(r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']((?:https?:)?//[^"']+)"""),
    re.compile(
        r"""<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|icon|preconnect)["'])"""
        r"""[^>]*?\bhref=["']((?:https?:)?//[^"']+)"""
    ),
    re.compile(r"""@import\s+(?:url\()?["']?((?:https?:)?//[^"')]+)"""),
    re.compile(r"""url\(["']?((?:https?:)?//[^"')]+)"""),
)


def without_widgets(page: str) -> str:
    "A page without the scripts for widgets."
    return WIDGETS.sub("", page)


def without_lost_lines(page: str) -> str:
    "A page whose links to a source have a line or none, and not the None that nbdev stores for an imported name."
    return page.replace('.py#LNone"', '.py"')


def asked(text: str) -> list[str]:
    "The addresses of other hosts that a browser asks when it opens a page or reads a style sheet."
    return [address for pattern in ASKS for address in pattern.findall(text)]


def main(folder: Path) -> int:
    "Cleans every page; 1 if some file still asks elsewhere."
    found = 0
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".html", ".css")):
        before = path.read_text(encoding="utf-8")
        after = without_lost_lines(without_widgets(before)) if path.suffix == ".html" else before
        if after != before: path.write_text(after, encoding="utf-8")
        for address in asked(after):
            print(f"{path.relative_to(folder)} asks for {address}", file=sys.stderr)
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    if len(sys.argv) != 2: sys.exit("usage: python .ci/offline.py FOLDER")
    sys.exit(main(Path(sys.argv[1])))
