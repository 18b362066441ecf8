"""Formats and rounding: names, facts, tensors, scales, and words that choose how."""
from functools import partial
from typing import Any, Iterator

from .core import Case, Place, either, refused


def _get(name: Any, place: Place) -> None:
    from altgrad.numbers.formats import get_format
    refused(get_format, name)


def _facts(args: tuple, place: Place) -> None:
    from altgrad.numbers.formats import FP8Format
    refused(FP8Format, *args)


def _quantize(make: Any, kwargs: dict, place: Place) -> None:
    from altgrad.numbers.quantize import fake_quantize
    refused(
        lambda: fake_quantize(
            make(), **{"fmt": "E4M3", **{k: v() if callable(v) else v for k, v in kwargs.items()}}
        )
    )


def _right(name: str, seed: int, scale: float, place: Place) -> None:
    "Rounded to the nearest value, found by looking at all of them in float64."
    import torch
    from altgrad.numbers.formats import get_format
    from altgrad.numbers.quantize import fake_quantize
    fmt = get_format(name)
    x = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * scale
    values = fmt.values[fmt.values.isfinite()].double().unique() * scale
    got = fake_quantize(x, name, scale).double()
    want = (x.double()[:, None] - values).abs().min(1).values
    assert ((got - x.double()).abs() <= want * (1 + 1e-6) + 1e-300).all()


def _real(make: Any, place: Place) -> None:
    from altgrad.numbers.formats import get_format
    refused(get_format("E4M3").to_real, make())


def cases(rng) -> Iterator[Case]:
    import numpy as np
    import torch

    from altgrad.numbers.formats import EIGHT_BIT

    for name in (
        "", " ", "E", "E4", "M3", "E4M3 ", "E4M3b", "E4M3bx", "E4M3b7fnx", "E4M3b7ieeeq", "E0M0b0",
        "E99M99b0", "E4M3b9999999", "E1M999999999b0", "E999999999M1b1", "x" * 10**6, "\x00",
        "\ud800", "\x1b[2J", None, 4, 4.3, True, [], {}, (), b"E4M3", object,
    ):
        yield Case(
            "formats", f"get_format {str(name)[:20]!r} {type(name).__name__}", partial(_get, name)
        )
    for i in range(60):
        word = "".join(
            rng.choice("EMbfnutieep3109-. 0123456789") for _ in range(rng.randint(1, 12))
        )
        yield Case("formats", f"word {i} {word!r}", partial(_either, word))
    for args in (
        ("x", 4, 3, True),
        ("x", True, 3),
        ("", 4, 3),
        ("x", 4, 3, 7, "none", 1),
        (None, 4, 3),
        ("x", -1, 3),
        ("x", 4, -3),
        ("x", 4.0, 3),
        ("x", "4", 3),
        ("x", 0, 0),
        ("x", 99, 99),
        ("x", 4, 3, 7.5),
        ("x", 4, 3, None, None),
        ("x", 4, 3, 7, "all"),
        ("x", 4, 3, 7, "none", True, 1),
        ("x", 4, 3, 7, "none", True, True, 1),
        ("x", 4, 3, 10**9),
        ("x", 4, 3, -(10**9)),
        ("x", 0, 7, 0, "ieee"),
        (7, 4, 3),
        ("x", None, 3),
        ("x", 4, [3]),
        ("x\n", 4, 3, 7, "none", "yes"),
    ):
        yield Case("formats", f"FP8Format{args!r}", partial(_facts, args))
    x = partial(torch.ones, 3)
    tensors = {
        "sparse": lambda: torch.ones(3, 3).to_sparse(),
        "list": lambda: [1.0],
        "none": lambda: None,
        "float": lambda: 1.0,
        "numpy": lambda: np.ones(3),
        "integers": lambda: torch.ones(3, dtype=torch.int32),
        "complex": lambda: torch.ones(3, dtype=torch.complex64),
        "bool": lambda: torch.ones(3, dtype=torch.bool),
        "text": lambda: "x",
    }
    for name, make in tensors.items():
        yield Case("formats", f"fake_quantize of {name}", partial(_quantize, make, {}))
        yield (
            Case("formats", f"to_real of {name}", partial(_real, make))
            if name not in ("integers", "sparse", "bool")
            else Case(
                "formats", f"fake_quantize of {name}, scaled",
                partial(_quantize, make, {"scale": 1.0}),
            )
        )
    for value in (True, None, "1", 1j, 0, -1, float("nan"), float("inf"), [1.0], {}, 0.0, -0.5):
        yield Case("formats", f"scale {value!r}", partial(_quantize, x, {"scale": value}))
    for value in (0.0, -1.0, float("nan"), float("inf")):
        yield Case(
            "formats", f"scale tensor {value}",
            partial(_quantize, x, {"scale": partial(torch.tensor, value)}),
        )
        yield Case(
            "formats", f"scale tensor of three, one {value}",
            partial(_quantize, x, {"scale": partial(torch.tensor, [1.0, value, 1.0])}),
        )
    for value in (1.5, "a", [1], True):
        yield Case(
            "formats", f"key {value!r}",
            partial(_quantize, x, {"rounding": "stochastic", "key": value}),
        )
    for kwargs in (
        {"random_bits": True}, {"random_bits": 0}, {"random_bits": -1}, {"random_bits": 99},
        {"random_bits": "8"}, {"rounding": "upwards"}, {"rounding": None}, {"rounding": 1},
        {"overflow": "wrap"}, {"overflow": None}, {"fmt": None}, {"fmt": "E9"}, {"fmt": 8},
    ):
        yield Case("formats", f"fake_quantize {kwargs!r}", partial(_quantize, x, kwargs))
    for name in EIGHT_BIT:
        for seed, scale in enumerate((1.0, 0.25, 2.0**-20)):
            yield Case(
                "formats", f"rounds {name} {scale}", partial(_right, name, seed, scale), right=True
            )


def _either(word: str, place: Place) -> None:
    "No format, or one whose word means itself."
    from altgrad.numbers.formats import get_format
    fmt = either(get_format, word)
    if fmt is not None: assert get_format(fmt.spec) == fmt or get_format(fmt.spec).spec == fmt.spec
