"""`make verify` on a part of the patterns: the exact staircases are right, and a quantizer that is
wrong at one pattern is found."""
import importlib.util
import json
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch

from altgrad.numbers.formats import get_format
from altgrad.numbers.kernels import set_path
from altgrad.numbers.quantize import fake_quantize

SCRIPT = Path(__file__).resolve().parent.parent / ".ci/verify.py"
spec = importlib.util.spec_from_file_location("verify", SCRIPT)
verify = sys.modules["verify"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verify)

E4M3 = get_format("E4M3")
ANSWERS = verify.segments(E4M3, "nearest", "saturate")
PART = (0x43000000, 0x44800000)  # 128 to 1024: values, boundaries, 448 and what is beyond


def float_of(pattern: int) -> float:
    return torch.tensor(verify.as_int32(pattern), dtype=torch.int32).view(torch.float32).item()


def ours(x): return fake_quantize(x, E4M3)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    "Compiling takes seconds a kernel: `make verify` does, this does not."
    before = set_path("eager")
    monkeypatch.setattr(verify, "on_path", lambda path: None)
    yield
    set_path(before)


def test_patterns_have_their_exact_values():
    for pattern in (0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x43E00001, 0x7F7FFFFF):
        assert Fraction(float_of(pattern)) == verify.real(pattern)
    assert verify.real(verify.INF) == 2**128
    assert verify.first_pattern(Fraction(464), False) == verify.bits_of(464.0) + 1
    assert verify.first_pattern(Fraction(464), True) == verify.bits_of(464.0)


@pytest.mark.parametrize("rounding, steps", [
    ("nearest", {463.9: 448, 464.0: 448, 464.1: float("nan")}),
    ("away", {463.9: 448, 464.0: float("nan")}),
    ("toward_zero", {447.9: 416, 1e30: 448}),
    ("up", {447.9: 448, 448.1: float("nan"), -1e30: -448}),
    ("down", {447.9: 416, 1e30: 448, -448.1: float("nan")}),
])
def test_the_staircase_at_the_end_of_e4m3(rounding, steps):
    answers = verify.segments(E4M3, rounding, "special")
    for x, expected in steps.items():
        bits = [s.bits for s in answers if s.first <= verify.bits_of(x)][-1]
        assert bits == verify.NAN if expected != expected else float_of(bits) == expected, (
            x,
            rounding,
        )


def test_a_part_of_the_patterns():
    for first, stop in (PART, (0x7F7F0000, 0x80010000)):
        assert verify.sweep(ours, ANSWERS, first, stop).mismatches == 0
    for name in verify.FORMATS:
        fmt = get_format(name)
        for rounding in verify.ROUNDINGS:
            for overflow in verify.POLICIES[:2]:
                if not verify.allowed(fmt, overflow): continue
                quantizer = partial(fake_quantize, fmt=fmt, rounding=rounding, overflow=overflow)
                tried, found = verify.sample(
                    quantizer, verify.segments(fmt, rounding, overflow), stride=50021
                )
                assert tried > 80_000 and found.mismatches == 0, (name, rounding, overflow, found)


WRONG = {  # quantizers with a fault, and how many patterns of a range they get wrong
    "one bit of one pattern": (lambda x: torch.where(x == 200.25, ours(x) + 16, ours(x)), PART, 1),
    "ties away": (lambda x: torch.where(x == 200.0, 208.0, ours(x)), PART, 1),
    "saturates a spacing too early": (
        lambda x: torch.where(x > 448, 416.0, ours(x)),
        PART,
        PART[1] - verify.bits_of(448.0) - 1,
    ),
    "forgets the sign of zero": (lambda x: ours(x) + 0.0, (0x80000000, 0x80002000), 0x2000),
    "NaN to max": (lambda x: ours(x.nan_to_num(448.0)), (0x7FC00000, 0x7FC02000), 0x2000),
    "a number to NaN": (lambda x: torch.where(x == 300.0, torch.nan, ours(x)), PART, 1),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_quantizer_is_found(fault):
    quantizer, (first, stop), wrong = WRONG[fault]
    found = verify.sweep(quantizer, ANSWERS, first, stop)
    assert found.mismatches == wrong and 1 <= len(found.examples) <= verify.EXAMPLES


@pytest.mark.parametrize("name", ["E4M3", "E7M0", "mxint8", "float8_e8m0fnu"])
def test_raise_and_chance(name, monkeypatch):
    for rounding in verify.ROUNDINGS:
        assert verify.check_raise(get_format(name), rounding, None)["mismatches"] == 0
    monkeypatch.setattr(verify, "KEYS", 4)
    found = verify.check_stochastic(get_format(name), "saturate", None)
    assert found["mismatches"] == 0 and found["standard_errors"]["bias"] < verify.STANDARD_ERRORS


def test_biased_chance_is_found(monkeypatch):
    monkeypatch.setattr(verify, "KEYS", 4)
    monkeypatch.setattr(
        verify,
        "fake_quantize",
        lambda x, *_, **how: fake_quantize(x * (1 + 2.0**-9), "E4M3", **how),
    )
    assert verify.check_stochastic(E4M3, "saturate", None)["mismatches"] > 0


def test_results_of_other_code_are_not_kept(tmp_path):
    path = tmp_path / "verify.json"
    verify.store(path, {"a": {"code": "1", "mismatches": 0}, "b": {"code": "2", "mismatches": 0}})
    assert list(verify.load(path, "2")) == ["b"] and verify.load(tmp_path / "none.json", "2") == {}
    assert json.loads(path.read_text())["machine"]["cpu"]
