"""Every public name says what it is, says what its parameters are, and is used in an example that
runs. A lint lists the faults of a module's names."""
import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
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


def is_documentable(value: object) -> bool:
    "Whether it is a function or a class of ours; constants and type hints cannot have a docstring."
    return inspect.isclass(value) or callable(value) and inspect.isroutine(inspect.unwrap(value))


def documentable(module: str) -> dict[str, object]:
    "The public names of a module that can have a docstring, and what they stand for."
    place = importlib.import_module(f"altgrad.{module}")
    public = {name: getattr(place, name) for name in place.__all__}
    return {name: value for name, value in public.items() if is_documentable(value)}


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
    names = re.findall(r"^# %% [./]+/nbs/(\S+\.ipynb)", text, re.MULTILINE)
    return [ROOT / "nbs" / name for name in dict.fromkeys(names)]


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


def docstring(name: str, value: object) -> list[str]:
    return [] if written(value) else ["none"]


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


def types(name: str, value: object) -> list[str]:
    "Parameters without a type, and `return` where a function does not say what it returns."
    signatures = [(f, inspect.signature(f)) for f in functions(value)]
    bare = [
        f"{f.__name__}({p.name})"
        for f, s in signatures
        for p in s.parameters.values()
        if p.name != "self" and p.annotation is p.empty
    ]
    return bare + [
        f"{f.__name__}: return"
        for f, s in signatures
        if f.__name__ != "__init__" and s.return_annotation is s.empty
    ]


# a comment with one of these says the shape of a tensor
SHAPES = "[", "shape", "scalar", "broadcast"


def shapes(name: str, value: object) -> list[str]:
    "Parameters of a function that take tensors, and do not say of which shape."
    if inspect.isclass(value): return []
    comments = docments(function := inspect.unwrap(value))
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if "torch.Tensor" in inspect.formatannotation(p.annotation)
        and not any(word in (comments.get(p.name) or "") for word in SHAPES)
    ]


def reference(name: str, value: object) -> list[str]:
    """nbdev looks types up when it writes the reference:
    one that it does not find is an error there, and nowhere else."""
    try: return [] if name in str(show_doc(value)) else ["not shown"]
    except Exception as error: return [repr(error)]


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


LINTS = (docstring, types, shapes, reference)  # of a name and what it stands for


def unused(names: dict, seen: set[str]) -> list[str]:
    "Names that no example uses, nor comes with one that it uses."
    met = set().union(*(comes_with(value) for name, value in names.items() if name in seen))
    return unused(names, seen | met) if met - seen else [name for name in names if name not in seen]


def faults(names: dict, seen: set[str]) -> list[str]:
    "All faults of a module's names, each with its lint; examples use the names seen."
    listed = [f"example: {name}: none" for name in unused(names, seen)]
    for lint in LINTS:
        for name, value in names.items():
            listed += [f"{lint.__name__}: {name}: {fault}" for fault in lint(name, value)]
    return listed


@pytest.mark.parametrize("module", MODULES)
def test_names_of_a_module_have_no_fault(module):
    listed = faults(documentable(module), set().union(*map(examples, notebooks(module))))
    if listed: pytest.fail("\n".join(listed), pytrace=False)


def test_each_lint_sees_its_fault_and_no_other():
    def silent() -> None: pass
    def careless(x: torch.Tensor, n): "What it does."
    def lost(n: "Nowhere") -> None: "What it does."  # noqa: F821

    listed = faults({f.__name__: f for f in (silent, careless, lost)}, {"careless", "lost"})
    starts = [
        "example: silent: none", "docstring: silent: none", "types: careless: careless(n)",
        "types: careless: careless: return", "shapes: careless: x", "reference: lost: NameError",
    ]
    assert len(listed) == len(starts) and all(map(str.startswith, listed, starts)), listed
