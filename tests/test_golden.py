"""Pins: run ids, runs that are made again, texts, roundings and the README's first table, as they were on
29 November 2026. Code may move and shrink; these stay."""
import hashlib
import json
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch

from altgrad.evidence.instrument import row_identity, run_id
from altgrad.evidence.sweep import beside
from altgrad.numbers.formats import EIGHT_BIT
from altgrad.numbers.kernels import rounding_key
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.vectors import ROUNDINGS
from altgrad.training.data import load_corpus

from cases import each
from marks import all_slow_but

ROOT = Path(__file__).resolve().parent.parent
PINS = json.loads((ROOT / "tests/golden.json").read_text(encoding="utf-8"))
REPLAYS = runpy.run_path(str(ROOT / ".ci/replays.py"))


@cache
def rows() -> dict[str, tuple[str, dict]]:
    "The stored rows by run, each with its ledger."
    return {row["run"]: (folder, row) for folder, row in REPLAYS["every_row"]()}


def test_runs_keep_their_ids():
    ids = {run: run_id(row_identity(rows()[run][1])) for run in PINS["runs"]}
    assert [run for run, now in ids.items() if now != run] == []


@pytest.mark.parametrize("run", all_slow_but(2, PINS["replays"]))
def test_a_run_ends_as_its_row_says(run, tmp_path):
    outcome = REPLAYS["compared"](*rows()[run], tmp_path)
    assert REPLAYS["explained"](outcome), outcome["said"]


def test_texts_are_the_same():
    texts, _ = beside(ROOT / "nbs/results/ledger")
    assert {name: load_corpus(text, "bytes").hash for name, text in texts.items()} == PINS["texts"]


@cache
def patterns() -> torch.Tensor:
    "Every 65,521st float32 pattern: both signs, all exponents, infinities and NaN."
    return torch.arange(0, 2**32, 65_521, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("fmt", EIGHT_BIT)
@each("rounding", (*ROUNDINGS, "stochastic"))
def test_rounding_keeps_its_bits(fmt, rounding):
    key = {"key": rounding_key(0)} if rounding == "stochastic" else {}
    rounded = fake_quantize(patterns(), fmt, rounding=rounding, **key)
    bits = torch.where(rounded.isnan(), torch.nan, rounded).view(torch.int32)  # one NaN for all
    assert hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16] == PINS["roundings"][f"{fmt} {rounding}"]


def test_the_first_table_of_the_readme_has_its_numbers():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    table = "".join(line for line in lines if line.startswith("|"))
    assert [number for number in PINS["readme"] if number not in table] == []
