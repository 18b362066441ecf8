"Cases that one item goes through, where an item for each would cost more than its check."
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest
import torch


def each(names: str, cases: Iterable[Any], ids: Iterable[str] = ()) -> Callable:
    """As `pytest.mark.parametrize`, in one item. All cases are tried, each from the same random
    state of torch; the error is the first one's, with the names of the cases that fail."""
    keys = names.replace(",", " ").split()
    rows = [case if len(keys) > 1 else (case,) for case in cases]
    texts = list(ids) or [", ".join(map(text_of, row)) for row in rows]
    own = [(text, dict(zip(keys, row, strict=True))) for text, row in zip(texts, rows, strict=True)]
    assert own, f"no case of {names}"

    def over(test: Callable) -> Callable:
        plain, inner = getattr(test, "each", (test, [("", {})]))
        every = [(", ".join(filter(None, (a, b))), x | y) for a, x in own for b, y in inner]

        @wraps(test)
        def run(**fixtures): go_through(plain, every, fixtures)

        asked = inspect.signature(test)
        fixtures = [p for name, p in asked.parameters.items() if name not in keys]
        run.__signature__, run.each = asked.replace(parameters=fixtures), (plain, every)
        return run
    return over


def go_through(test: Callable, cases: list[tuple[str, dict]], fixtures: dict[str, Any]) -> None:
    "Try all cases of a test; it is skipped where all of them are."
    state, faults, skips = torch.get_rng_state(), {}, []
    for place, (text, case) in enumerate(cases):
        torch.set_rng_state(state)
        try: test(**fixtures, **case)
        except pytest.skip.Exception as skip: skips.append(skip)
        except (Exception, pytest.fail.Exception) as error: faults[f"{place} ({text})"] = error
    if len(skips) == len(cases): raise skips[0]
    for first in faults.values():
        first.add_note(f"{len(faults)} of {len(cases)} cases fail: {'; '.join(faults)}")
        raise first


def text_of(value: Any) -> str:
    "A value of a case in a few words."
    text = getattr(value, "__name__", None) or " ".join(str(value).split())
    return text if len(text) < 80 else f"{text[:77]}..."
