"Which cases of a long test `make test` leaves to `make rest`."
from collections.abc import Sequence
from typing import Any

import pytest


def all_slow_but(count: int, cases: Sequence[Any]) -> list[Any]:
    "Cases of which so many, evenly spread, belong to `make test`."
    quick = {place * len(cases) // count for place in range(count)}
    return [case if place in quick else pytest.param(case, marks=pytest.mark.slow)
            for place, case in enumerate(cases)]
