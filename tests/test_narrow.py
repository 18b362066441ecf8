"""Noise that is foretold, beside writes that are made; scores and verdicts on costs that are known."""
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from altgrad.evidence.bench import PROTOCOLS
from altgrad.geometry.optim import StiffnessAdamW
from altgrad.geometry.storage import make_grid_tensor

from marks import all_slow_but
from tiny import load_experiment

narrow = load_experiment("narrow_formats")
CONFIRM = PROTOCOLS["bench-1"].confirm


def steps_of(w, fmt, powers):
    "The first steps of the rule from a weight, all with one gradient."
    grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
    found = []
    for power in powers:
        p = torch.nn.Parameter(w.clone())
        p.grad = grad
        StiffnessAdamW([p], fmt, 0.02, power=power, weight_decay=0.0, floor_octaves=narrow.FLOOR).step()
        found.append(p.detach() - w)
    return found


@pytest.mark.parametrize("fmt, shared, power", all_slow_but(2, [
    ("E4M3", "tensor", 0.0), ("E7M0", "tensor", 0.0), ("E2M1b1", "32", 0.0), ("E3M0b3", "16", 0.0),
    ("E1M2b1", "tensor", 0.0), ("E5M2", "tensor", -0.5), ("E5M2", "tensor", 0.5), ("E2M1b1", "tensor", -0.5),
]))
def test_noise_is_the_variance_of_writes(fmt, shared, power):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(8, 64, generator=g)
    at = make_grid_tensor(w, fmt, "grid_nearest", granularity=narrow.read_granularity(shared)).dequantize()
    plain, step = steps_of(at, fmt, (0.0, power))
    n, sums, squares = 2000, torch.zeros(8, 64), torch.zeros(8, 64)
    for seed in range(n):
        grid = make_grid_tensor(w, fmt, "grid_stochastic", seed, granularity=narrow.read_granularity(shared))
        grid.copy_(at + step)
        sums += grid.dequantize()
        squares += grid.dequantize().square()
    variance = squares / n - (sums / n).square()
    found = (variance.mean() / w.square().mean()).item()
    # a variance from n draws is known to a few parts in the root of n; 512 weights share the error
    assert narrow.noise_of(w, plain, fmt, shared, power) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("power", [-0.5, 0.5])
def test_a_bent_step_is_that_of_the_rule(power):
    g = torch.Generator().manual_seed(1)
    w = torch.randn(64, 64, generator=g)
    grad = torch.randn(64, 64, generator=g)
    p, q = (torch.nn.Parameter(w.clone()) for _ in range(2))
    p.grad = q.grad = grad
    how = dict(weight_decay=0.0, floor_octaves=narrow.FLOOR)
    StiffnessAdamW([p], "E5M2", 1e-3, power=0.0, **how).step()
    StiffnessAdamW([q], "E5M2", 1e-3, power=power, **how).step()
    gap = narrow.ulp(narrow.get_format("E5M2"), w / narrow.scale_of(w, "E5M2"))
    floor = narrow.stiffness_floor(w / narrow.scale_of(w, "E5M2"), narrow.get_format("E5M2"), 0.0,
                                   narrow.FLOOR)
    bent = narrow.bent(p.detach() - w, torch.maximum(gap, floor), power)
    # the differences of two float32 weights below 4 are known to 2^-22
    assert torch.allclose(bent, q.detach() - w, rtol=0, atol=2.0**-21)


def test_foretold_costs_need_no_run_in_a_narrow_format():
    wanted = [("E7M0", "tensor", 0.0), ("E4M3", "tensor", 0.0)]
    wide, fine = narrow.foretold_noise(wanted, narrow.LAW.tune[0])
    assert wide > 5 * fine > 0


def rows_of(costs):
    "Rows in which every arm of a format has its cost above float32."
    rows = []
    for arm in narrow.arms().values():
        for i, checkpoint in enumerate(CONFIRM):
            cost = costs(arm) if arm.storage == "grid_stochastic" else 0.0
            rows.append({**asdict(arm), "stage": "confirm", "checkpoint": checkpoint,
                         "val_loss": 2 + 0.1 * i + cost})
    return rows


def test_what_comes_out_as_foretold_holds_and_what_does_not_is_refuted():
    told = {(a.format, a.granularity, a.power): 0.02 + 0.01 * i
            for i, a in enumerate(narrow.arms().values()) if a.storage == "grid_stochastic"}
    found = narrow.measured(rows_of(lambda a: told[a.format, a.granularity, a.power]))
    assert set(found) == set(told)
    score = narrow.score(told, found)
    assert score.r2 == pytest.approx(1) and score.worst == pytest.approx(1)
    assert narrow.costs_follow(score) == "holds"
    flat = narrow.measured(rows_of(lambda a: 0.05))
    assert narrow.costs_follow(narrow.score(told, flat)) == "refuted"
    assert narrow.slope_follows(0.05, narrow.slope_of(flat, "E5M0b15")) == "not decided"
    assert narrow.slope_follows(0.0, narrow.slope_of(flat, "E1M2b1")) == "holds"
    assert narrow.in_order(flat) == "not decided"
    assert narrow.exponent_decides(flat, 0.1) == "refuted"


def test_a_verdict_on_a_slope_is_that_of_its_interval():
    for slope, verdict in ((0.05, "holds"), (-0.05, "refuted")):
        found = narrow.measured(rows_of(lambda a, d=slope: 0.1 + d * a.power))
        assert narrow.slope_follows(0.05, narrow.slope_of(found, "E2M1b1")) == verdict
    assert narrow.slope_follows(0.0, narrow.slope_of(found, "E2M1b1")) == "refuted"  # -0.05 is not none


@pytest.mark.parametrize("costs, verdict", [((4, 3, 2, 1), "holds"), ((1, 2, 3, 4), "refuted")])
def test_a_verdict_on_blocks_is_that_of_their_order(costs, verdict):
    cost = dict(zip(("tensor", "32", "16", "nvfp4"), costs))
    assert narrow.in_order(narrow.measured(rows_of(lambda a: 0.1 * cost[a.granularity]))) == verdict


@pytest.mark.parametrize("six, four, verdict", [
    (0.1, 0.05, "holds"), (0.1, 0.2, "refuted"), (0.02, 0.05, "refuted"), (0.3, 0.05, "refuted"),
])
def test_a_verdict_on_the_exponent_is_that_of_its_slopes(six, four, verdict):
    "The wide format of six bits has the slope of E7M0, here 0.1; those of four bits have no larger one."
    slope = {"E5M0b15": six, **dict.fromkeys(narrow.FOUR, four)}
    found = narrow.measured(rows_of(lambda a: 0.5 + slope.get(a.format, 0.0) * a.power))
    assert narrow.exponent_decides(found, 0.1) == verdict


def test_an_arm_that_is_not_confirmed_everywhere_is_not_there():
    rows = [row for row in rows_of(lambda a: 0.1) if row["checkpoint"] != CONFIRM[0]]
    assert narrow.measured(rows) == {}


def test_the_arms_are_those_that_were_foretold():
    keys = {(a.format, a.granularity, a.power) for a in narrow.arms().values()
            if a.storage == "grid_stochastic"}
    told = json.loads((narrow.ROOT / "results/narrow/foretold.json").read_text())["foretold"]
    assert keys == {(c["format"], c["granularity"], c["power"]) for c in told}
    assert np.all([c["excess"] > 0 for c in told])
