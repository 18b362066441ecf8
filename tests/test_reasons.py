"""The claims about other reasons, on losses whose outcome is known."""
from dataclasses import asdict, replace

import pytest
import torch

from altgrad.basics import InputError
from altgrad.evidence.instrument import arm_facts

from tiny import load_experiment

reasons = load_experiment("other_reasons")
CONFIRM = reasons.LAW.confirm


def rows_of(part, ends, corpus=reasons.LAW.corpus):
    "Rows in which every arm has its loss, nats above 2."
    return [
        {**arm_facts(replace(arm, split="confirm", corpus=corpus, checkpoint=checkpoint)), "stage": "confirm",
         "val_loss": 2 + ends(name) + 0.001 * (-1) ** (i + k)}
        for i, (name, arm) in enumerate(part.made().items()) for k, checkpoint in enumerate(part.confirm)
    ]


@pytest.mark.parametrize("name", reasons.PARTS)
def test_every_arm_of_a_part_is_another_and_every_claim_reads_arms_that_are_there(name):
    part = reasons.PARTS[name]()
    made = list(part.made().values())
    assert len({str(asdict(arm)) for arm in made}) == len(made)
    losses = reasons.losses_of(rows_of(part, lambda arm: 0.0), part)
    assert set(losses) == set(part.arms)
    for claim in part.claims: assert claim.judge(claim.found(losses)) in ("holds", "refuted", "not decided")


def judged(name, ends):
    "The verdicts of a part, by sentence."
    part = reasons.PARTS[name]()
    losses = reasons.losses_of(rows_of(part, ends), part)
    return {claim.text: claim.judge(claim.found(losses)) for claim in part.claims}


def test_formulas():
    alike = judged("formulas", lambda arm: 0.1)
    assert set(alike.values()) == {"holds"} and len(alike) == 12
    apart = judged("formulas", lambda arm: 0.05 * ("smooth" in arm))
    refuted = [text for text, verdict in apart.items() if verdict == "refuted"]
    assert len(refuted) == 8 and not any("exponent" in text for text in refuted)


def test_an_average_that_wins_more_where_there_is_noise():
    wins = {"AdamW": 0.1, "average": 0.05, "S^-1": 0.06, "S^-0.5": 0.07, "FP32": 0.0, "FP32, average": 0.0}
    assert set(judged("average", wins.get).values()) == {"holds"}
    loses = {**wins, "average": 0.1}
    assert list(judged("average", loses.get).values()) == ["refuted", "refuted", "refuted"]


def test_a_cost_in_shares_of_another():
    cost = {"FP32": 0.0, **{f"{f} {s}": 0.1 for f in ("E4M3", "E5M2", "E7M0") for s in ("tensor", "channel", "32")},
            **{f"{f} {s}": 0.1 if s == "tensor" else 0.05 for f in ("E0M7", "E2M5")
               for s in ("tensor", "channel", "32")}}
    assert set(judged("scales", cost.get).values()) == {"holds"}
    swapped = {name: 0.15 - value if name != "FP32" else 0.0 for name, value in cost.items()}
    swapped |= {f"{f} tensor": 0.1 for f in ("E4M3", "E5M2", "E7M0", "E0M7", "E2M5")}
    found = judged("scales", swapped.get)
    assert {found[t] for t in found if "a third" in t or "four fifths" in t} == {"refuted"}


def test_an_order_that_turns():
    order = {"master": 0.0, "grid_stochastic": 0.05, "grid_nearest": 0.2}
    assert set(judged("tensors", lambda arm: order[arm.split()[1]]).values()) == {"holds"}
    assert set(judged("tensors", lambda arm: -order[arm.split()[1]]).values()) == {"refuted"}


def test_sentences_on_twelve_checkpoints():
    part = reasons.PARTS["twelve"]()
    assert len(set(part.confirm)) == 12 and not set(part.confirm) & set(part.protocol().tune)
    ends = {"master": 0.0, "stochastic": 0.1, "S^-1": 0.05, "S^-0.5": 0.05, "nearest": 0.08, "nearest S^0.5": 0.04,
            "ECO stochastic": 0.05, "master, noise": 0.1}
    def as_said(arm):
        way = arm.split(" ", 1)[1]
        return ends.get(way, 0.0 if way.startswith("master") else -0.05)
    assert set(judged("twelve", as_said).values()) == {"holds"}
    # rules in the geometry gain with master weights, and nothing else differs as it was said
    turned = judged("twelve", lambda arm: -as_said(arm) - 0.2 * ("master S" in arm) - 0.1 * ("noise" in arm))
    assert set(turned.values()) == {"refuted"}, turned


def test_the_noise_of_a_residuals_grid():
    part = reasons.PARTS["noise"]()
    assert set(part.made().values()) - set(reasons.PARTS["twelve"]().made().values()) == set(part.own().values())
    cost = {"E5M2 2": 0.02, "E7M0 2": 0.05}
    def as_said(arm):
        fmt, way = arm.split(" ", 1)
        if "noise" in way: return cost.get(f"{fmt} {way.split()[-2]}", 0.001)
        return {"master": 0.0}.get(way, 0.1 if fmt == "E7M0" else -0.02)
    assert set(judged("noise", as_said).values()) == {"holds"}
    # noise costs much where it was to cost little and the other way round, and a residual lies on the other side of it
    cost = {"E5M2 2": 0.0, "E7M0 2": 0.0}
    def turned(arm):
        fmt, way = arm.split(" ", 1)
        if "noise" in way: return cost.get(f"{fmt} {way.split()[-2]}", 0.03)
        return {"master": 0.0}.get(way, -0.1 if fmt == "E7M0" else 0.1)
    assert set(judged("noise", turned).values()) == {"refuted"}


@pytest.mark.parametrize("kind, levels", [("TwoBits", 2), ("FourBits", 14)])
def test_added_noise_rounds_to_the_levels_of_a_residual(kind, levels):
    noisy = getattr(load_experiment("noisy_residual"), kind)
    # 0.75 is the largest weight, so that it is E4M3's 384 and a spacing is 2^-4 of that binade's first value
    w = torch.nn.Parameter(torch.full((20_000,), 0.75))
    optimizer = noisy([w], lr=1e-4, format="E4M3")
    w.grad = torch.ones_like(w)
    optimizer.step()
    level = (0.75 / 384 * 32) / levels
    steps = (0.75 - w.detach()) / level
    # a level of float32 numbers near one, and a probability from 20,000 draws
    assert (steps - steps.round()).abs().max() < 2**-24 / level and set(steps.round().tolist()) == {0.0, 1.0}
    share = 1e-4 / level
    assert abs(steps.mean().item() - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


@pytest.mark.parametrize("program, kind, format, gap", [
    # 0.75 is the largest weight of a tensor or a block. Alone in a tensor it is E7M0's own value, with a spacing of
    # a power of two; MX gives E2M1 a power of two, under which it is 6, or 3, and NVFP4 one that makes it 6
    ("noisy_adamw", "NoisyAdamW", "E4M3", 0.75 / 384 * 32), ("noisy_in_blocks", "MXFP4", "E2M1b1", 0.25),
    ("noisy_in_blocks", "NVFP4", "E2M1b1", 0.25),
])
def test_added_noise_rounds_to_the_spacings_of_the_format(program, kind, format, gap):
    w = torch.nn.Parameter(torch.full((640, 32), 0.75))
    optimizer = getattr(load_experiment(program), kind)([w], lr=gap / 8, format=format)
    w.grad = torch.ones_like(w)
    optimizer.step()
    steps = (0.75 - w.detach()) / gap
    # float32 numbers near one, and scales of NVFP4 that are rounded to three bits beside one of the tensor
    assert (steps - steps.round()).abs().max() < 2**-20 / gap and set(steps.round().flatten().tolist()) == {0.0, 1.0}
    assert abs(steps.mean().item() - 1 / 8) < 5 * (7 / 64 / w.numel()) ** 0.5  # draws of one in eight


@pytest.mark.parametrize("kind, width", [("MXFP4", 32), ("NVFP4", 16)])
def test_noise_in_blocks_has_a_scale_for_each_block(kind, width):
    small = torch.cat([torch.full((64, width), 0.75), torch.full((64, width), 0.75 / 64)], 1)
    w = torch.nn.Parameter(small.clone())
    optimizer = getattr(load_experiment("noisy_in_blocks"), kind)([w], lr=1e-3, format="E2M1b1")
    w.grad = torch.ones_like(w)
    optimizer.step()
    moved = (small - w.detach()).abs().amax(0)
    assert moved[:width].max() > 30 * moved[width:].max() > 0  # the spacing is relative to the block's own largest


def test_inputs_that_differ_in_a_bit_refute():
    part = reasons.PARTS["inputs"]()
    losses = {name: [2.0] * len(CONFIRM) for name in part.arms}
    assert part.claims[0].judge(part.claims[0].found(losses)) == "holds"
    losses["E1M6"] = [2.0 + 2.0**-50] * len(CONFIRM)
    assert part.claims[0].judge(part.claims[0].found(losses)) == "refuted"


def test_an_arm_that_was_confirmed_at_two_rates_is_refused():
    part = reasons.PARTS["resets"]()
    rows = rows_of(part, lambda arm: 0.0)
    other = [{**row, "lr": 0.7 * row["lr"], "val_loss": 9.0} for row in rows[:5]]
    with pytest.raises(InputError, match="FP32 0 is confirmed at two rates, 0.0028 and 0.004"):
        reasons.losses_of(rows + other, part)


def test_an_arm_that_is_not_confirmed_everywhere_is_not_there():
    part = reasons.PARTS["average"]()
    rows = [row for row in rows_of(part, lambda arm: 0.0) if row["checkpoint"] != CONFIRM[0]]
    assert reasons.losses_of(rows, part) == {}
