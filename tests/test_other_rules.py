"""What tier 4 says of the other update rules: gains against plain arithmetic on rows, and verdicts
against effects whose answer is known."""
import importlib.util
import math
from pathlib import Path

import pytest

from altgrad.evidence.study import Effect, read_ledger
from altgrad.training.experiment import HOLDS, OPEN, REFUTED

HERE = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("other_rules", HERE / "nbs/studies/experiments/other_rules.py")
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
NONE_OUTSIDE, IN_E7M0 = program.CLAIMS.values()
THERE = program.Key("riemannian_adamw", "grid_stochastic", "E7M0")


def an_effect(mean, half=0.002):
    around = mean - half, mean + half
    return Effect(mean, around, around, 0.5, (mean,) * 3, 8)


def everywhere(mean): return {key: an_effect(mean) for key in program.KEYS}


@pytest.mark.parametrize("mean, half, verdict", [
    (-0.2, 0.002, HOLDS), (0.005, 0.002, HOLDS), (0.009, 0.002, OPEN), (0.011, 0.002, OPEN), (0.02, 0.002, REFUTED),
])
def test_one_arm_that_gains_refutes_the_first_claim(mean, half, verdict):
    key = program.Key("madam", "fp32", "E4M3")
    found = everywhere(-0.1) | {key: an_effect(mean, half)}
    assert NONE_OUTSIDE(found)[0] == verdict
    assert str(key) in NONE_OUTSIDE(found)[1] or verdict == HOLDS
    assert NONE_OUTSIDE({k: e for k, e in found.items() if k != key})[0] == "not run to the end"
    inside = everywhere(-0.1) | {THERE: an_effect(0.5)}
    assert NONE_OUTSIDE(inside)[0] == HOLDS  # of E7M0 it says nothing


def test_the_line_of_the_powers_is_judged_by_a_root_mean_square():
    keys = list(program.KEYS)[:2]
    assert program.on_the_line(dict(zip(keys, (0.01, -0.01)))) == (HOLDS, "0.010 over 2 arms")
    assert program.on_the_line(dict(zip(keys, (0.03, 0.0))))[0] == REFUTED  # 0.021, whose mean is 0.015
    assert program.on_the_line({keys[0]: 0.0})[0] == "not run"


@pytest.mark.parametrize("mean, verdict", [(0.02, HOLDS), (0.011, OPEN), (0.005, REFUTED), (-0.3, REFUTED)])
def test_the_second_claim_is_judged_by_its_interval(mean, verdict):
    assert IN_E7M0({THERE: an_effect(mean)})[0] == verdict
    assert IN_E7M0({})[0] == "not run"


def losses(rows, key, rule, power=None):
    "By checkpoint and seed, of a rule in the place of a key, at the rate that tuning took."
    mine = [r for r in rows if (r["rule"], r["storage"], r["format"]) == (rule, key.storage, key.format)
            and (power is None or r["power"] == power) and r["placement"] == "update"]
    rates = {}
    for r in mine:
        if r["stage"] == "tune": rates.setdefault(r["lr"], []).append(r["val_loss"])
    best = min(rates, key=lambda lr: sum(rates[lr]) / len(rates[lr]))
    return {(r["checkpoint"], r["seed"]): r["val_loss"] for r in mine if r["stage"] == "confirm" and r["lr"] == best}


@pytest.mark.slow
def test_gains_are_means_over_pairs_of_rows():
    "Of some arms, from the rows alone."
    rows = [r for r in read_ledger(HERE / "nbs/results/ledger") if r["tier"] <= 4 and not r["error"]]
    study = program.stored()
    found = program.gains(study)
    assert found
    for key in list(found)[:: len(found) // 3]:
        plain, rule = losses(rows, key, "stiffness_adamw", 0.0), losses(rows, key, key.rule)
        seeds = {s for s in range(8) if all((c, s) in plain and (c, s) in rule for c in study.checkpoints)}
        gaps = [plain[pair] - rule[pair] for pair in plain if pair[1] in seeds]
        # sums of at most 24 losses and of their pieces in another order
        assert found[key].mean == pytest.approx(sum(gaps) / len(gaps), abs=1e-12)
        assert found[key].seeds == len(seeds)


def arms_of_powers():
    "By format, the share of codes that change and the loss of each power of S, from the rows alone."
    found = {}
    for folder, wanted in (("ledger", lambda r: r["tier"] == 2 and r["format"] not in ("E7M0", "E0M7", "E1M6")),
                           ("ledger/amended", lambda r: r["matrix"] == "retuned")):
        rows = [r for r in read_ledger(HERE / "nbs/results" / folder) if wanted(r) and r["storage"] == "grid_nearest"
                and r["rule"] == "stiffness_adamw" and r["placement"] == "update" and abs(r["power"]) <= 1]
        for f, p in sorted({(r["format"], r["power"]) for r in rows}):
            ends = [r for r in rows if (r["format"], r["power"], r["stage"]) == (f, p, "confirm")]
            assert len(ends) == 24 and len({r["lr"] for r in ends}) == 1
            if sum(r["diverged"] for r in ends) >= 12: continue
            flips, loss = (sum(r[key] for r in ends) / len(ends) for key in ("flips", "val_loss"))
            found.setdefault(f, []).append((math.log2(flips), loss))
    return found


def straight(points):
    "The least-squares line through points, by its closed form: its place at zero and its slope."
    xs, ys = zip(*points)
    x, y = (sum(v) / len(v) for v in (xs, ys))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a in xs)
    return y - slope * x, slope


@pytest.mark.slow
def test_the_line_of_powers_has_the_runs_that_count_and_no_arm_twice():
    arms = arms_of_powers()
    line = program.line_of_powers(program.stored(), program.retuned())
    every = [arm for points in arms.values() for arm in points]
    assert set(arms) == {"E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0"} and len(every) == len(set(every)) == line.arms
    assert (line.at_one, line.slope) == pytest.approx(straight(every), abs=1e-9)  # sums of some tens of numbers
    squares = []
    for f, points in arms.items():
        at_one, slope = straight([arm for other, others in arms.items() if other != f for arm in others])
        squares += [(y - at_one - slope * x) ** 2 for x, y in points]
    assert line.typical == pytest.approx((sum(squares) / len(squares)) ** 0.5, abs=1e-9)  # and of squares


def test_how_many_arms_are_near_the_line():
    found = dict(zip(program.KEYS, (-0.5, -0.01, 0.02, 0.03, 0.4)))
    said = program.near_the_line(found, 0.02)
    assert said == "3 of 5 end above it, and 2 lie within its typical miss of 0.020 nats"


@pytest.mark.parametrize("mean, half, verdict", [
    (0.05, 0.01, HOLDS), (0.035, 0.01, OPEN), (0.065, 0.01, OPEN), (0.02, 0.005, REFUTED), (0.1, 0.01, REFUTED),
    (0.04, 0.05, REFUTED), (-0.05, 0.01, REFUTED),
])
def test_a_bound_is_refuted_by_zero_and_by_an_interval_outside(mean, half, verdict):
    assert program.within(an_effect(mean, half), 0.03, 0.07)[0] == verdict
    assert program.within(None, 0.03, 0.07)[0] == "not run"


@pytest.mark.parametrize("means, verdict", [
    ((0.03, 0.02), HOLDS), ((0.03, 0.001), REFUTED), ((-0.03, 0.02), REFUTED), ((0.03, None), "not run"),
])
def test_one_format_refutes_that_stochastic_rounding_ends_lower(means, verdict):
    found = {f: m and an_effect(m) for f, m in zip(program.SAID_AGAIN, means)}
    assert program.above_stochastic(found)[0] == verdict
