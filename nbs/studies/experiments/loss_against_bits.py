"""Tunes and confirms every way to keep and to move 8-bit weights, as `bench-1` does.

python nbs/studies/experiments/loss_against_bits.py --out FOLDER [--format E4M3,...] [--workers N]

The rows go to FOLDER/ledger.jsonl; what it holds is not run again, so that the command goes on where
it was stopped. `python .ci/ledger.py FOLDER/ledger.jsonl nbs/results/bits` stores them for the page,
nbs/studies/loss_against_bits.ipynb, which says what is expected.
"""
import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from altgrad.evidence.bench import PROTOCOLS, Trial
from altgrad.evidence.instrument import Arm
from altgrad.evidence.study import arm_of
from altgrad.geometry.keeping import Storage
from altgrad.geometry.storage import STORAGES
from altgrad.training.experiment import Interval, interval

AT_ONCE = 8  # methods that are tuned before they are confirmed
FORMATS = ("E4M3", "E5M2", "E3M4", "E7M0")  # in the order of the runs
NOISY = f"{os.path.relpath(Path(__file__).parent / 'noisy_adamw.py')}:NoisyAdamW"
GRID, FOUR = "grid_stochastic", "grid_residual4"

# what is kept, what moves it, and what its moments are kept in; by the name that figures show
METHODS: dict[str, dict[str, Any]] = {
    "master": {"storage": "master"},  # AdamW: what all are measured from
    "master, 8-bit moments": {"storage": "master", "moments": "dynamic8"},
    "nearest": {"storage": "grid_nearest"},
    "stochastic": {"storage": GRID},
    "stochastic, 8-bit moments": {"storage": GRID, "moments": "dynamic8"},
    "bf16": {"storage": "bf16"},
    "bf16 stochastic": {"storage": "bf16_stochastic"},
    "bf16 Kahan": {"storage": "bf16_kahan"},
    "split 8": {"storage": "bf16_split8"},
    "FP8 Kahan": {"storage": "grid_kahan"},
    "12-bit float": {"storage": "grid_wide4"},
    "residual 2": {"storage": "grid_residual2"},
    "residual 4": {"storage": FOUR},
    "residual 8": {"storage": "grid_residual8"},
    "residual 4, 8-bit moments": {"storage": FOUR, "moments": "dynamic8"},
    "residual 2, 8-bit moments": {"storage": "grid_residual2", "moments": "dynamic8"},
    "ECO": {"rule": "eco", "storage": "grid_nearest"},
    "ECO stochastic": {"rule": "eco", "storage": GRID},
    "ECO, 8-bit moments": {"rule": "eco", "storage": "grid_nearest", "moments": "dynamic8"},
    "ECO, residual 4": {"rule": "eco", "storage": FOUR},
    "Lion": {"rule": "lion", "storage": GRID},
    "Lion, residual 4": {"rule": "lion", "storage": FOUR},
    "SGD": {"rule": "sgd", "storage": GRID},
    "Muon": {"rule": "muon", "storage": GRID},
    "Madam": {"rule": "madam", "storage": GRID},
    "Riemannian": {"rule": "riemannian_adamw", "storage": GRID},
    "GridSGD": {"rule": "grid_sgd", "storage": GRID},
    "S^-1": {"rule": "stiffness_adamw", "power": -1.0, "storage": GRID},
    "S^1": {"rule": "stiffness_adamw", "power": 1.0, "storage": GRID},
    "S^-1, residual 4": {"rule": "stiffness_adamw", "power": -1.0, "storage": FOUR},
    "fp32": {"storage": "fp32"},  # products see float32
    "fp32, noise": {"rule": NOISY, "storage": "fp32"},
    "master, noise": {"rule": NOISY, "storage": "master"},
}


MARGIN = PROTOCOLS["bench-1"].margin  # nats: arms that are closer are equal
HOLDS, REFUTED, OPEN, NO_CASE = "holds", "refuted", "not decided", "no occasion"
Losses = Mapping[str, Sequence[float]]  # of a panel: by method, one a checkpoint


def arms(fmt: str) -> dict[str, Arm]:
    "The arms of a panel, by name."
    usual = {"format": fmt, "rule": "adamw", "checkpoint": PROTOCOLS["bench-1"].tune[0]}
    return {name: Arm(**usual | how) for name, how in METHODS.items()}


def same_arm(row: Mapping[str, Any], arm: Arm) -> bool:
    "Whether a row is of an arm, whatever its rate, its seed and its checkpoint."
    return replace(arm_of(row), lr=arm.lr, seed=arm.seed, split=arm.split,
                   checkpoint=arm.checkpoint, corpus=arm.corpus) == arm


def losses_of(rows: Iterable[Mapping[str, Any]], fmt: str) -> dict[str, list[float]]:
    "The confirmed losses of a panel's finished methods, in the order of the checkpoints."
    confirmed = [row for row in rows if row["stage"] == "confirm" and row["format"] == fmt]
    order, found = PROTOCOLS["bench-1"].confirm, {}
    for name, arm in arms(fmt).items():
        ends = {row["checkpoint"]: row["val_loss"] for row in confirmed if same_arm(row, arm)}
        if set(ends) >= set(order): found[name] = [ends[c] for c in order]
    return found


def above(losses: Losses, method: str, other: str) -> Interval:
    "How far a method ends above another, nats."
    return interval(a - b for a, b in zip(losses[method], losses[other], strict=True))


def weight_bits(method: str) -> float:
    "The bits of a weight and of what remembers for it."
    kind: Storage = STORAGES[METHODS[method]["storage"]]
    return kind.bits


def equal(found: Interval) -> str:
    "Whether two methods tie."
    if found.low > MARGIN or found.high < -MARGIN: return REFUTED
    return HOLDS if -MARGIN <= found.low and found.high <= MARGIN else OPEN


def at_most(found: Interval, most: float = MARGIN) -> str:
    "Whether one method ends at most so far above another."
    if found.low > most: return REFUTED
    return HOLDS if found.high <= most else OPEN


def together(verdicts: Iterable[str]) -> str:
    "The verdict on several claims that a prediction makes at once."
    found = list(verdicts)
    if not found: return NO_CASE
    return next((v for v in (REFUTED, OPEN) if v in found), HOLDS)


EXPECTED = ("stochastic", "ECO", "residual 2", "residual 4")  # on the frontier
WIDE = ("bf16 stochastic", "bf16 Kahan", "split 8", "FP8 Kahan", "residual 8")


def frontier_of_weights(losses: Losses, fmt: str) -> str:
    "Prediction 1."
    small = [m for m in METHODS if weight_bits(m) <= 12 and m not in EXPECTED]
    for m in small:
        if all(above(losses, m, other).high < 0 for other in EXPECTED): return REFUTED
    return at_most(above(losses, "residual 4", "master"))


def equal_bits(losses: Losses, fmt: str) -> str:
    "Prediction 2."
    return equal(above(losses, "12-bit float", "residual 4"))


def sixteen_bits(losses: Losses, fmt: str) -> str:
    "Prediction 3."
    return together(equal(above(losses, m, "master")) for m in WIDE)


def eco_between(losses: Losses, fmt: str) -> str:
    "Prediction 4."
    to_noise, to_residual = above(losses, "ECO", "stochastic"), above(losses, "ECO", "residual 2")
    if to_noise.low > 0 or to_residual.high < 0: return REFUTED
    return HOLDS if to_noise.high < 0 < to_residual.low else OPEN


def small_moments(losses: Losses, fmt: str) -> str:
    "Prediction 5."
    return together(
        at_most(above(losses, f"{m}, 8-bit moments", m)) for m in ("master", "residual 4")
    )


def geometry(losses: Losses, fmt: str) -> str:
    "Prediction 6."
    if fmt == "E7M0": return at_most(above(losses, "S^-1", "stochastic"), -MARGIN)
    pairs = [(m, "stochastic") for m in ("S^-1", "S^1", "Riemannian", "GridSGD")]
    pairs.append(("S^-1, residual 4", "residual 4"))
    return together(at_most(above(losses, other, m)) for m, other in pairs)


def noise_alone(losses: Losses, fmt: str) -> str:
    "Prediction 7."
    adamw = [
        m for m, how in METHODS.items() if set(how) == {"storage"} and m not in ("fp32", "master")
    ]
    better = [m for m in adamw if above(losses, m, "master").high < 0]
    if not better: return NO_CASE
    return HOLDS if above(losses, "master, noise", "master").high < 0 else REFUTED


PREDICTIONS: dict[str, Callable[[Losses, str], str]] = {
    "the frontier of weights": frontier_of_weights,
    "twelve bits, two ways": equal_bits,
    "sixteen bits and more tie": sixteen_bits,
    "ECO lies between": eco_between,
    "moments in eight bits": small_moments,
    "geometry": geometry,
    "noise alone": noise_alone,
}


def frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    "The methods, by bits and loss, below which none lies that keeps as few bits."
    best, found = float("inf"), []
    for name in sorted(points, key=points.__getitem__):
        if points[name][1] < best: found.append(name)
        best = min(best, points[name][1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", default=",".join(FORMATS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    failed = 0
    for fmt in args.format.split(","):
        named = list(arms(fmt).items())
        for k in range(0, len(named), AT_ONCE):  # so that what is stopped has confirmed arms
            failed += Trial(dict(named[k : k + AT_ONCE]), args.out).run(args.workers)
    return min(failed, 1)


if __name__ == "__main__": raise SystemExit(main())
