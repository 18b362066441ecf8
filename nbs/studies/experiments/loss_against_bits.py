"""Tunes and confirms every way to keep and to move 8-bit weights, as `bench-1` does.

python nbs/studies/experiments/loss_against_bits.py --out FOLDER [--format E4M3,...] [--workers N]

The rows go to FOLDER/ledger.jsonl; what it holds is not run again, so that the command goes on where
it was stopped. `python .ci/ledger.py FOLDER/ledger.jsonl nbs/results/bits` stores them for the page,
nbs/studies/loss_against_bits.ipynb, which says what is expected.
"""
import argparse
import os
from pathlib import Path
from typing import Any

from altgrad.evidence.bench import Trial
from altgrad.evidence.instrument import Arm

FORMATS = ("E4M3", "E5M2", "E3M4", "E7M0")  # in the order of the runs
NOISY = f"{Path(__file__).parent / 'noisy_adamw.py'}:NoisyAdamW"
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


def arms(fmt: str) -> dict[str, Arm]:
    "The arms of a panel, by name."
    return {name: Arm(**{"format": fmt, "rule": "adamw", **how}) for name, how in METHODS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--format", default=",".join(FORMATS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    return max(Trial(arms(fmt), args.out).run(args.workers) for fmt in args.format.split(","))


if __name__ == "__main__": raise SystemExit(main())
