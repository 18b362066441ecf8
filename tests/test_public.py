"""Every public name says what it is, says what its parameters are, is used in an example that runs,
and has a page in the sidebar."""
import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import yaml
from fastcore.docments import docments
from nbdev.process import NBProcessor
from nbdev.showdoc import show_doc

import altgrad

ROOT = Path(__file__).resolve().parent.parent
EXPORTS, NOT_RUN = {"export", "exports", "exporti"}, {"slow", "notest"}
MODULES = sorted(
    m.name.removeprefix("altgrad.")
    for m in pkgutil.walk_packages(altgrad.__path__, "altgrad.")
    if not m.ispkg and "._" not in m.name
)
every_module = pytest.mark.parametrize("module", MODULES)


def public(module: str) -> dict[str, object]:
    """The public names of a module and what they stand for;
    those of type hints (`Losses = Callable[...]`) and constants too."""
    found = importlib.import_module(f"altgrad.{module}")
    return {name: getattr(found, name) for name in found.__all__}


def is_documentable(value: object) -> bool:
    "Whether it is a function or a class of ours; constants and type hints cannot have a docstring."
    return (
        inspect.isroutine(inspect.unwrap(value)) if callable(value) else False
    ) or inspect.isclass(value)


def written(value: object) -> str:
    """The docstring, if somebody wrote it:
    dataclasses and named tuples make one of their fields, and others have their base's."""
    doc = (inspect.unwrap(value).__doc__ or "").strip()
    if not inspect.isclass(value): return doc
    made = doc.startswith(f"{value.__name__}(") or any(
        value.__doc__ == base.__doc__ for base in value.__mro__[1:]
    )
    return "" if made else doc


def notebooks(module: str) -> list[Path]:
    "The notebooks that a module is exported from."
    text = (ROOT / "altgrad" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    return [
        ROOT / "nbs" / name
        for name in dict.fromkeys(re.findall(r"^# %% [./]+/nbs/(\S+\.ipynb)", text, re.MULTILINE))
    ]


def code_in(text: str) -> ast.AST | None:
    """A text of several lines as code, for some examples hand it to another process;
    None if it is none."""
    try: return ast.parse(text) if "\n" in text else None
    except SyntaxError: return None


def used(tree: ast.AST) -> set[str]:
    "Names that code uses: not those that it only imports, defines or hands to `show_doc`."
    if isinstance(tree, ast.Call) and getattr(tree.func, "id", "") == "show_doc": return set()
    if (
        isinstance(tree, ast.Constant)
        and isinstance(tree.value, str)
        and (inner := code_in(tree.value))
    ):
        return used(inner)
    own = (
        {tree.id}
        if isinstance(tree, ast.Name)
        else {tree.attr}
        if isinstance(tree, ast.Attribute)
        else set()
    )
    return own.union(*(used(child) for child in ast.iter_child_nodes(tree)))


def examples(path: Path) -> set[str]:
    "Names that the cells of a notebook use which export nothing, and which are run."
    is_example = lambda c: (
        not c.directives_.keys() & (EXPORTS | NOT_RUN) and c.directives_.get("eval:") != ["false"]
    )
    cells = [c for c in NBProcessor(path).nb.cells if c.cell_type == "code" and is_example(c)]
    return set().union(*(used(top) for c in cells for top in c.parsed_() or []))


@every_module
def test_docstrings(module):
    assert [
        name
        for name, value in public(module).items()
        if is_documentable(value) and not written(value)
    ] == []


def functions(value: object) -> Iterator[Callable]:
    """A function, or the public methods of a class and its constructor,
    if it has one of its own: `dataclass` and `NamedTuple` make theirs of typed fields."""
    if not inspect.isclass(value): yield inspect.unwrap(value)
    elif not (is_dataclass(value) or issubclass(value, tuple)):
        yield from (
            f
            for name, f in vars(value).items()
            if inspect.isfunction(f) and (name in ("__init__", "__call__") or name[0] != "_")
        )


def untyped(value: object) -> list[str]:
    "Parameters without a type, and `return` where a function does not say what it returns."
    said = [(f, inspect.signature(f)) for f in functions(value)]
    bare = [
        f"{f.__name__}({p.name})"
        for f, s in said
        for p in s.parameters.values()
        if p.name != "self" and p.annotation is p.empty
    ]
    return bare + [
        f"{f.__name__}: return"
        for f, s in said
        if f.__name__ != "__init__" and s.return_annotation is s.empty
    ]


@every_module
def test_types(module):
    found = {
        name: untyped(value) for name, value in public(module).items() if is_documentable(value)
    }
    assert {name: bare for name, bare in found.items() if bare} == {}


# a comment with one of these says the shape of a tensor
SHAPES = "[", "shape", "scalar", "broadcast"


def shapeless(value: object) -> list[str]:
    "Parameters of a function that take tensors, and do not say of which shape."
    told = docments(value)
    return [
        p.name
        for p in inspect.signature(value).parameters.values()
        if "torch.Tensor" in inspect.formatannotation(p.annotation)
        and not any(word in (told.get(p.name) or "") for word in SHAPES)
    ]


@every_module
def test_shapes(module):
    found = {
        name: shapeless(inspect.unwrap(value))
        for name, value in public(module).items()
        if is_documentable(value) and not inspect.isclass(value)
    }
    assert {name: bare for name, bare in found.items() if bare} == {}


@every_module
def test_reference(module):
    """nbdev looks types up when it writes the reference:
    one that it does not find is an error there, and nowhere else."""
    for name, value in public(module).items():
        if is_documentable(value): assert name in str(show_doc(value)), name


def comes_with(value: object) -> set[str]:
    """Names that whoever uses `value` meets: in the types of what it returns and of its fields,
    and the classes it is made from."""
    calls = (
        [m for _, m in inspect.getmembers(value, inspect.isfunction)]
        if inspect.isclass(value)
        else [inspect.unwrap(value)]
    )
    types = [getattr(call, "__annotations__", {}).get("return", "") for call in calls] + list(
        vars(value).get("__annotations__", {}).values()
    )
    return set(re.findall(r"\w+", " ".join(map(str, types)))) | {
        base.__name__ for base in getattr(value, "__mro__", ())
    }


@every_module
def test_examples(module):
    seen = set().union(*map(examples, notebooks(module)))
    told = {name: value for name, value in public(module).items() if is_documentable(value)}
    while (
        more := set().union(*(comes_with(value) for name, value in told.items() if name in seen))
        - seen
    ):
        seen |= more
    assert [name for name in told if name not in seen] == []


@every_module
def test_pages(module):
    menu = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]
    missing = [
        p.name for p in notebooks(module) if p.relative_to(ROOT / "nbs").as_posix() not in str(menu)
    ]
    assert notebooks(module) and missing == []
