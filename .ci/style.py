"""Measures how the code reads, beside what is wanted: `make style` prints the table. It informs;
what can be held, ruff holds.

python .ci/style.py            # of this tree
python .ci/style.py --json     # the same, to compare two trees
"""
import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parent.parent
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
EXPORT = re.compile(r"#\s*\|\s*exports?\b")
WANTED = {
    "mean characters a line": "<= 50",
    "lines over 100, per 1,000": "<= 30",
    "lines over 140, per 1,000": "0",
    "a(), b() as a statement, per 1,000": "0",
    "nested f-strings, per 1,000": "<= 2",
    "double or nested comprehensions, per 1,000": "<= 1",
    "lambdas, per 1,000": "<= 4",
    "lines of a function, 90th percentile": "14",
    "lines of the longest function": "31",
    "private names taken from another module": "0",
    "base classes with exactly one child": "0",
    "lines of an export cell, median": "<= 10",
    "words before the first output, median notebook": "<= 60",
    "exported lines before the first output, median": "<= 15",
    "README words before the first code": "<= 150",
}


def sources() -> list[Path]:
    "The package's modules."
    return sorted(
        p for p in (ROOT / "altgrad").rglob("*.py") if p.name not in ("_modidx.py", "__init__.py")
    )


def is_code(line: str) -> bool:
    "Whether a line is neither blank nor a comment."
    return bool(line.strip()) and not line.lstrip().startswith("#")


def nested_f_strings(tree: ast.AST) -> int:
    "How many f-strings stand within another one; the `.2f` of `{x:.2f}` is one to `ast`, not here."
    every = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    specs = {id(n.format_spec) for n in ast.walk(tree) if isinstance(n, ast.FormattedValue)}
    within = {id(inner) for n in every for inner in ast.walk(n) if inner is not n}
    return sum(id(n) in within and id(n) not in specs for n in every)


def tangled(tree: ast.AST) -> int:
    "Comprehensions with two loops, or with another comprehension inside."
    found = [n for n in ast.walk(tree) if isinstance(n, COMPREHENSIONS)]
    return sum(
        len(n.generators) > 1
        or any(isinstance(m, COMPREHENSIONS) and m is not n for m in ast.walk(n))
        for n in found
    )


def function_lines(trees: list[ast.Module]) -> list[int]:
    "The lines of every function, without its signature and docstring."
    functions = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.FunctionDef)]
    return sorted(n.end_lineno - n.body[0].lineno + 1 for n in functions)


def private_imports(trees: list[ast.Module]) -> int:
    "Names with a leading underscore that one module takes from another."
    taken = [
        a.name
        for t in trees
        for n in ast.walk(t)
        if isinstance(n, ast.ImportFrom) and n.level
        for a in n.names
    ]
    return sum(name.startswith("_") for name in taken)


def only_children(trees: list[ast.Module]) -> int:
    "Private base classes that exactly one class has."
    bases = [
        b.id
        for t in trees
        for n in ast.walk(t)
        if isinstance(n, ast.ClassDef)
        for b in n.bases
        if isinstance(b, ast.Name)
    ]
    return sum(name.startswith("_") and bases.count(name) == 1 for name in set(bases))


def of_code() -> dict[str, float]:
    "What is measured in the modules."
    texts = [p.read_text(encoding="utf-8") for p in sources()]
    lines = [line for text in texts for line in text.splitlines() if is_code(line)]
    trees = [ast.parse(text) for text in texts]
    share = 1000 / len(lines)
    statements = [
        n
        for t in trees
        for n in ast.walk(t)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Tuple)
    ]
    lambdas = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.Lambda)]
    functions = function_lines(trees)
    return {
        "lines of code": len(lines),
        "mean characters a line": mean(len(line.strip()) for line in lines),
        "lines over 100, per 1,000": share * sum(len(line) > 100 for line in lines),
        "lines over 140, per 1,000": share * sum(len(line) > 140 for line in lines),
        "a(), b() as a statement, per 1,000": share * len(statements),
        "nested f-strings, per 1,000": share * sum(map(nested_f_strings, trees)),
        "double or nested comprehensions, per 1,000": share * sum(map(tangled, trees)),
        "lambdas, per 1,000": share * len(lambdas),
        "lines of a function, 90th percentile": functions[len(functions) * 9 // 10],
        "lines of the longest function": functions[-1],
        "private names taken from another module": private_imports(trees),
        "base classes with exactly one child": only_children(trees),
    }


def notebooks() -> Iterator[list[dict]]:
    "The cells of every notebook that exports a module."
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        if any(EXPORT.match("".join(c["source"])) for c in cells): yield cells


def before_output(cells: list[dict]) -> tuple[int, int]:
    "Words of prose, and exported lines, that stand before the first output."
    words = lines = 0
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown": words += len(re.sub(r"\(http\S*\)", "", source).split())
        elif EXPORT.match(source): lines += sum(map(is_code, source.splitlines()))
        if cell.get("outputs"): break
    return words, lines


def of_notebooks() -> dict[str, float]:
    "What is measured in the notebooks and the README."
    found = list(notebooks())
    exported = [
        "".join(c["source"]) for cells in found for c in cells if EXPORT.match("".join(c["source"]))
    ]
    words, lines = zip(*map(before_output, found))
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[0]
    return {
        "lines of an export cell, median": median(sum(map(is_code, source.splitlines())) for source in exported),
        "words before the first output, median notebook": median(words),
        "exported lines before the first output, median": median(lines),
        "README words before the first code": len(re.findall(r"\S*\w\S*", re.sub(r"\(\S*\)", "", readme))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    found = of_code() | of_notebooks()
    if parser.parse_args().json: return print(json.dumps(found, indent=1))
    print(f"{'':48} {'here':>8}   wanted")
    for name, value in found.items(): print(f"{name:48} {value:>8.3g}   {WANTED.get(name, '')}")


if __name__ == "__main__": main()
