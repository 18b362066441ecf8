"""What stochastic rounding costs in formats of four and six bits: foretold from eight, then run.

python nbs/studies/experiments/narrow_formats.py foretell   # writes nbs/results/narrow/foretold.json
python nbs/studies/experiments/narrow_formats.py run --out FOLDER [--workers N]

The second continues where it was stopped. `python .ci/ledger.py FOLDER/ledger.jsonl
nbs/results/narrow` stores its rows for the page, nbs/studies/narrow_formats.ipynb, which says how
noise is foretold and what would refute it.
"""
import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from altgrad.basics import InputError, make_folder, write_atomic
from altgrad.evidence.bench import PROTOCOLS, Trial
from altgrad.evidence.instrument import Arm, Weights, code_here, run_arm
from altgrad.evidence.study import Cost, arm_of, build_study, costs, read_ledger
from altgrad.evidence.sweep import read_matrix
from altgrad.geometry.spacing import stiffness_floor
from altgrad.numbers.formats import get_format, ulp
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import read_granularity, scale_of
from altgrad.training.experiment import HOLDS, OPEN, REFUTED, Interval, interval
from altgrad.training.tracking import git_commit, machine, versions

ROOT = Path(__file__).resolve().parents[2]
RATE = 4e-3  # AdamW's first guess: every arm runs at this rate
FLOOR = 8.0  # octaves, of every power
EIGHT = ("E0M7", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0")
SIX = ("E2M3b1", "E3M2b3", "E4M1b7", "E5M0b15")
FOUR = ("E1M2b1", "E2M1b1", "E3M0b3")
POWERS = (-0.5, 0.0, 0.5)
BLOCKS = [(fmt, shared) for fmt in SIX + FOUR for shared in ("32", "16")] + [("E2M1b1", "nvfp4")]
LAW = replace(PROTOCOLS["bench-1"], name="narrow", tune=("stdlib-0.1m-100",), points=1, most=1)


def arms() -> dict[str, Arm]:
    "The arms, by name: of one scale a tensor with every power, of blocks by AdamW alone."
    usual: dict[str, Any] = {"rule": "stiffness_adamw", "floor_octaves": FLOOR,
                             "checkpoint": LAW.tune[0]}
    found = {}
    for storage in ("grid_stochastic", "fp32"):
        for fmt in SIX + FOUR:
            for p in POWERS:
                found[f"{fmt} {storage} {p:g}"] = Arm(format=fmt, storage=storage, power=p, **usual)
    for fmt, shared in BLOCKS:
        found[f"{fmt} {shared}"] = Arm(format=fmt, granularity=shared, **usual)
    return found


def bent(step: Tensor, gap: Tensor, power: float) -> Tensor:
    "A step times (S / max S)^p, brought back to its length."
    factor = (gap / gap.amax()) ** power
    out = step * factor
    return out * (step.square().sum() / out.square().sum()).sqrt()


def noise_of(old: Tensor, step: Tensor, fmt: str, shared: str, power: float) -> float:
    """The power of the noise of one stochastic rounding over that of the weights: the variance
    f (1 - f) ulp^2 of a step from the value of the format that is nearest to the weight."""
    f, scale = get_format(fmt), scale_of(old, fmt, read_granularity(shared))
    q = fake_quantize(old, f, scale)
    if power:
        floor = stiffness_floor(q / scale, f, 0.0, FLOOR)
        step = bent(step, torch.maximum(ulp(f, q / scale), floor) * scale, power)
    there = ulp(f, (q + step) / scale) * scale
    part = ((q + step) / there).abs().frac()
    return ((part * (1 - part) * there.square()).mean() / old.square().mean()).item()


class Foretelling(Weights):
    "The weights of a run in float32 that looks, every so many updates, at what rounding would add."
    def __init__(self, model: Any, arm: Arm, wanted: list[tuple[str, str, float]], every: int):
        super().__init__(model, arm)
        self.wanted, self.every, self.steps = wanted, every, 0
        self.seen: list[list[float]] = []

    def update(self, rule: torch.optim.Optimizer) -> None:
        self.steps += 1
        before = [p.detach().clone() for p in self.used]
        super().update(rule)
        if self.steps % self.every: return
        sizes = [p.numel() for p in self.used]
        pairs = [(old, p.detach() - old) for old, p in zip(before, self.used)]
        self.seen.append([
            float(np.average([noise_of(*pair, *key) for pair in pairs], weights=sizes))
            for key in self.wanted
        ])


def foretold_noise(wanted: list[tuple[str, str, float]], checkpoint: str) -> list[float]:
    "The mean noise of each wanted format, granularity and power over a run of AdamW in float32."
    bench, looks = LAW.bench(), []
    arm = Arm(storage="fp32", rule="adamw", lr=RATE, checkpoint=checkpoint, seed=1000)
    def make(model: Any, arm: Arm) -> Weights:
        looks.append(Foretelling(model, arm, wanted, bench.task.every))
        return looks[0]
    run_arm(arm, bench, make)
    return np.mean(looks[0].seen, axis=0).tolist()


def known_costs() -> list[Cost]:
    "What rounding costs the formats of eight bits at this rate, from the ledger."
    names = ("tier1", "tier2", "tier3")
    matrices = [read_matrix((ROOT / f"studies/matrices/{n}.yaml").read_text()) for n in names]
    every = costs(build_study(read_ledger(ROOT / "results/ledger"), matrices), "grid_stochastic")
    return [c for c in every
            if c.lr == RATE and c.power in POWERS and c.format in EIGHT]


def law(points: list[Cost]) -> float:
    "Nats for a unit of noise: the geometric mean over the formats by AdamW, whose power is 0."
    return math.exp(np.mean([math.log(c.excess / c.noise) for c in points if not c.power]))


def foretell() -> None:
    """Writes down what is expected, and how well the same way tells what is known;
    InputError where it stands already, for runs are compared with what was there before them."""
    path = ROOT / "results/narrow/foretold.json"
    if path.exists(): raise InputError(f"{path} was foretold already: remove it first")
    points = known_costs()
    old = [(c.format, "tensor", c.power) for c in points]
    new = [(f, "tensor", p) for f in SIX + FOUR for p in POWERS] + [(*b, 0.0) for b in BLOCKS]
    noise = np.mean([foretold_noise(old + new, name) for name in LAW.confirm[:3]], axis=0).tolist()
    k = law(points)
    known = [
        {**c._asdict(), "foretold_noise": n, "foretold": k * n}
        for c, n in zip(points, noise)
    ]
    foretold = [
        {"format": f, "granularity": g, "power": p, "noise": n, "excess": k * n}
        for (f, g, p), n in zip(new, noise[len(old):])
    ]
    found = {"rate": RATE, "nats_for_noise": k, "known": known, "foretold": foretold,
             "checkpoints": LAW.confirm[:3], "corpus": LAW.corpus, "seed": 1000,
             "code": code_here(), "commit": git_commit(), "machine": machine(),
             "versions": versions()}
    make_folder(path.parent)
    write_atomic(path, json.dumps(found, indent=1) + "\n")


def measured(rows: list[dict[str, Any]]) -> dict[tuple[str, str, float], np.ndarray]:
    "The excess over float32 of each arm's confirmed runs, nats, one a checkpoint."
    ends: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row["stage"] != "confirm": continue
        arm = arm_of(row)
        key = arm.format, arm.storage, arm.granularity, arm.power
        ends.setdefault(key, {})[arm.checkpoint] = row["val_loss"]
    found = {}
    for (fmt, storage, shared, power), losses in ends.items():
        # by AdamW a format does not matter in float32: one stands for those of blocks
        twin = ends.get((fmt, "fp32", "tensor", power), {})
        if storage == "fp32" or set(losses) != set(LAW.confirm) or set(twin) != set(LAW.confirm):
            continue
        found[fmt, shared, power] = np.array([losses[c] - twin[c] for c in LAW.confirm])
    return found


class Score(NamedTuple):
    "How well costs were foretold."
    r2: float  # of the logarithms
    worst: float  # factor
    at: tuple  # where


def score(foretold: dict[tuple, float], found: dict[tuple, np.ndarray]) -> Score:
    "Compare the logarithms of what was foretold and of what came out."
    keys = sorted(found)
    y = np.log([found[k].mean() for k in keys])
    x = np.log([foretold[k] for k in keys])
    off = np.abs(y - x)
    r2 = 1 - (off**2).sum() / ((y - y.mean()) ** 2).sum()
    return Score(float(r2), float(np.exp(off.max())), keys[int(off.argmax())])


LEAST_R2, MOST_R2, MOST_MISS = 0.8, 0.9, 1.5
FLAT = 0.01  # nats: a slope that is smaller is none


def costs_follow(found: Score) -> str:
    "Prediction 1."
    if found.r2 < LEAST_R2: return REFUTED
    return HOLDS if found.r2 >= MOST_R2 and found.worst <= MOST_MISS else OPEN


def slope_of(found: dict[tuple, np.ndarray], fmt: str) -> Interval:
    "D: the least-squares slope of the excess in p."
    return interval(found[fmt, "tensor", 0.5] - found[fmt, "tensor", -0.5])


def slope_follows(foretold: float, d: Interval) -> str:
    "Prediction 2, for one format."
    if abs(foretold) < FLAT: return d.within(-FLAT, FLAT)
    if d.high < 0: return REFUTED
    return HOLDS if d.low > 0 else OPEN


def in_order(found: dict[tuple, np.ndarray]) -> str:
    "Prediction 3."
    ends = [found["E2M1b1", shared, 0.0] for shared in ("tensor", "32", "16", "nvfp4")]
    steps = [interval(a - b) for a, b in zip(ends, ends[1:])]
    if any(s.high < 0 for s in steps): return REFUTED
    return HOLDS if all(s.low > 0 for s in steps) else OPEN


def exponent_decides(found: dict[tuple, np.ndarray], wide: float) -> str:
    "Prediction 4; `wide` is D of E7M0."
    six = slope_of(found, "E5M0b15")
    if six.high < wide / MOST_MISS or six.low > wide * MOST_MISS: return REFUTED
    four = [slope_of(found, fmt) for fmt in FOUR]
    if any(d.low > wide for d in four): return REFUTED
    sure = wide / MOST_MISS <= six.low and six.high <= wide * MOST_MISS
    return HOLDS if sure and all(d.high <= wide for d in four) else OPEN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("foretell", "run"))
    parser.add_argument("--out", type=Path, default=Path("runs/narrow"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.what == "run": return min(Trial(arms(), args.out, LAW).run(args.workers), 1)
    foretell()
    return 0


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
