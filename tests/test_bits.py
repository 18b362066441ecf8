"""The predictions of loss against bits, on losses whose outcome is known; its frontier, by comparing
all pairs; its rows, by arm."""
import random
from dataclasses import asdict, replace

import pytest

from altgrad.evidence.bench import PROTOCOLS, bits_a_weight

from tiny import load_experiment

bits = load_experiment("loss_against_bits")
CONFIRM = PROTOCOLS["bench-1"].confirm
WIGGLE = [0.001 * (-1) ** k for k in range(len(CONFIRM))]  # checkpoints differ by less than the margin


def panel(**ends: float) -> dict[str, list[float]]:
    "A panel in which all methods end alike, but for these, nats above."
    shift = {name.replace("_", " "): value for name, value in ends.items()}
    return {
        name: [2 + shift.get(name, 0.0) + (wiggle if name != "master" else 0.0) for wiggle in WIGGLE]
        for name in bits.METHODS
    }


AS_EXPECTED = dict(stochastic=0.05, ECO=0.03, residual_2=0.02)


@pytest.mark.parametrize("claim, ends, verdict", [
    ("the frontier of weights", AS_EXPECTED, "holds"),
    ("the frontier of weights", {"residual_4": 0.02}, "refuted"),
    ("the frontier of weights", {"Lion": -0.02}, "refuted"),
    ("the frontier of weights", {"residual_4": 0.0100}, "not decided"),
    ("twelve bits, two ways", {}, "holds"),
    ("twelve bits, two ways", {"wider_float": 0.02}, "refuted"),
    ("twelve bits, two ways", {"wider_float": -0.02}, "refuted"),
    ("sixteen bits and more tie", {}, "holds"),
    ("sixteen bits and more tie", {"bf16_Kahan": 0.02}, "refuted"),
    ("ECO lies between", AS_EXPECTED, "holds"),
    ("ECO lies between", AS_EXPECTED | {"ECO": 0.06}, "refuted"),
    ("ECO lies between", AS_EXPECTED | {"ECO": 0.01}, "refuted"),
    ("ECO lies between", AS_EXPECTED | {"ECO": 0.05}, "not decided"),
    ("moments in eight bits", {}, "holds"),
    ("moments in eight bits", {"master,_8-bit_moments": 0.02}, "refuted"),
    ("geometry", {}, "holds"),
    ("geometry", {"S^1": -0.02}, "refuted"),
    ("Muon's lead", {"Muon,_master": -0.05, "Muon,_residual_4": -0.05}, "holds"),
    ("Muon's lead", {"Muon,_master": -0.02}, "refuted"),
    ("Muon's lead", {"Muon,_master": -0.05, "Muon,_residual_4": -0.02}, "refuted"),
    ("Lion in 20 bits", {"Lion,_residual_4": 0.02, "Lion,_residual_4,_8-bit_moments": 0.02}, "holds"),
    ("Lion in 20 bits", {"Lion,_residual_4,_8-bit_moments": 0.02}, "refuted"),
    ("Muon in 20 bits", {"Muon,_residual_4": -0.05, "Muon,_residual_4,_8-bit_moments": -0.045}, "holds"),
    ("Muon in 20 bits", {"Muon,_residual_4": -0.05}, "refuted"),
    ("Muon in 20 bits", {"Muon,_residual_4": 0.02, "Muon,_residual_4,_8-bit_moments": 0.02}, "refuted"),
    ("noise alone", {}, "no occasion"),
    ("noise alone", {"residual_4": -0.01}, "refuted"),
    ("noise alone", {"ECO,_residual_4": -0.01}, "refuted"),
    ("noise alone", {"residual_4": -0.01, "master,_noise": -0.01}, "holds"),
])
def test_a_prediction_comes_out_as_its_words_say(claim, ends, verdict):
    assert bits.PREDICTIONS[claim](panel(**ends), "E4M3") == verdict


@pytest.mark.parametrize("fmt, cost, verdict", [
    ("MXFP4", 0.1, "holds"), ("NVFP4", 0.05, "refuted"), ("MXFP4", 0.06, "not decided"),
    ("E4M3", 0.1, "no occasion"),
])
def test_what_four_bits_cost(fmt, cost, verdict):
    losses = panel(stochastic=cost)
    losses["stochastic"].reverse()  # so that checkpoints differ
    assert bits.four_bits(losses, fmt) == verdict


@pytest.mark.parametrize("mx, nv, verdict", [
    (0.1, 0.05, "holds"), (0.05, 0.1, "refuted"), (0.05, 0.05, "not decided"),
])
def test_finer_scales(mx, nv, verdict):
    nv = {name: ends[::-1] for name, ends in panel(stochastic=nv).items()}
    assert bits.finer_scales(panel(stochastic=mx), nv) == verdict


@pytest.mark.parametrize("name", bits.PANELS)
def test_bits_of_the_weight_are_those_in_memory(name):
    bench, moments = PROTOCOLS["bench-1"].bench(), {"adamw": 64, "sgd": 32, "eco": 64}
    for method, arm in bits.arms(name).items():
        if arm.rule not in moments or arm.moments != "float32": continue
        measured = bits_a_weight(arm, bench) - moments[arm.rule]
        assert measured == bits.weight_bits(method, name), method


@pytest.mark.parametrize("gain, verdict", [(0.03, "holds"), (0.0, "refuted")])
def test_in_e7m0_the_power_minus_one_is_expected_to_gain(gain, verdict):
    assert bits.geometry(panel(**{"S^-1": -gain}), "E7M0") == verdict


def test_the_cheapest_is_the_best_that_fits_and_no_control():
    losses = panel(stochastic=0.05, ECO=0.03, residual_4=-0.02, master=0.0, fp32=-0.5)
    among = ["stochastic", "ECO", "residual 4", "fp32", "bf16"]
    for limit, best in ((8, "ECO"), (11.9, "ECO"), (12, "residual 4"), (32, "residual 4")):
        assert bits.cheapest(losses, "E4M3", limit, among) == best
    assert all(bits.weight_bits("stochastic", name) <= bits.limits(name)[0] for name in bits.PANELS)


def test_the_frontier_is_what_no_other_dominates():
    draw = random.Random(0)
    for _ in range(200):
        points = {str(k): (draw.randrange(8), draw.randrange(8)) for k in range(10)}
        kept = {points[name] for name in bits.frontier(points)}
        alone = {p for p in points.values()
                 if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points.values())}
        assert kept == alone


@pytest.mark.parametrize("name", ["E5M2", "MXFP4"])
def test_rows_are_found_by_their_arms(name):
    other = {"E5M2": "E4M3", "MXFP4": "NVFP4"}[name]
    rows = [
        {**asdict(replace(arm, checkpoint=c, corpus="eurlex", split="confirm", lr=0.1)),
         "stage": "confirm", "val_loss": float(CONFIRM.index(c))}
        for arm in bits.arms(name).values() for c in CONFIRM
    ]
    random.Random(0).shuffle(rows)
    found = bits.losses_of(rows, name)
    assert set(found) == set(bits.METHODS) and bits.losses_of(rows, other) == {}
    assert all(ends == [float(k) for k in range(len(CONFIRM))] for ends in found.values())
    short = [row for row in rows if row["checkpoint"] != CONFIRM[3]]
    assert bits.losses_of(short, name) == {}


def test_a_verdict_rests_on_the_methods_that_it_asks_for():
    losses = bits.Asked(panel())
    bits.PREDICTIONS["what four bits cost"](losses, "MXFP4")
    assert losses.keys_asked == {"stochastic", "residual 4"}
    losses = bits.Asked(panel())
    bits.PREDICTIONS["geometry"](losses, "E4M3")
    assert losses.keys_asked >= {"GridSGD", "S^-1", "residual 4"} and "Muon" not in losses.keys_asked
