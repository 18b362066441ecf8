"Which cases of a long test `make test` leaves to `make rest`."
from collections.abc import Sequence
from typing import Any

import pytest


def all_slow_but(count: int, cases: Sequence[Any]) -> list[Any]:
    "Cases of which so many, evenly spread, belong to `make test`."
    quick = {place * len(cases) // count for place in range(count)}
    def marked(case: Any) -> Any:
        return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
    return [case if place in quick else marked(case) for place, case in enumerate(cases)]
