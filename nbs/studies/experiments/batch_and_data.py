"""Runs the grid of batch sizes and token budgets for nbs/studies/batch_and_data.ipynb; what is
stored already is kept. It takes about an hour on one thread.

python nbs/studies/experiments/batch_and_data.py --checkpoints FOLDER --corpus eurlex=path:TEXT
"""
from dataclasses import asdict
from itertools import product
from pathlib import Path

from altgrad.evidence.instrument import Arm, Task, run_arm
from studies import CHECKPOINTS, TEXT, exit_code, opened

OUT = Path(__file__).resolve().parents[3] / "nbs/results/batch_and_data.json"
BATCHES = (2, 4, 8, 16)  # sequences of 64 tokens an update
BUDGETS = (25_600, 51_200, 102_400, 204_800)  # tokens a run
# FP32 has no format: its rule is AdamW
ARMS = (
    ("E4M3", "fp32"),
    ("E4M3", "grid_stochastic"),
    ("E5M2", "grid_stochastic"),
    ("E7M0", "grid_stochastic"),
)
MOST = 6  # rates an arm may try
TUNE_SEED, CONFIRM_SEEDS = 1000, (0, 1)
ASKED = ("format", "storage", "lr", "seed", "split", "checkpoint")  # of an arm
KEPT = (
    "run", *ASKED, "val_loss", "raw_loss", "diverged", "frozen_loss", "noise", "stall",
    "weights_sha", "seconds",
)


def task_of(batch: int, budget: int) -> Task:
    """The instrument's task with this batch and so many tokens;
    a tenth of the updates is warm-up, ten are measured."""
    steps = budget // (64 * batch)
    return Task(steps=steps, batch_size=batch, warmup=steps // 10, every=steps // 10)


def next_rate(losses: dict[float, float], batch: int) -> float | None:
    """The next rate to try: three, an octave apart, about 0.004 sqrt(batch / 8);
    then on beyond an end while the best lies there."""
    for rate in (0.004 * (batch / 8) ** 0.5 * 2.0**i for i in (-1, 0, 1)):
        if rate not in losses: return rate
    best, rates = min(losses, key=lambda r: (losses[r], r)), sorted(losses)
    if len(rates) < MOST and best == rates[0]: return best / 2
    if len(rates) < MOST and best == rates[-1]: return best * 2
    return None


def main() -> int:
    bench, stored, store = opened(__doc__, OUT, ("runs",))
    benches = {cell: bench.with_task(task_of(*cell)) for cell in product(BATCHES, BUDGETS)}
    tasks = [asdict(b.task) for b in benches.values()]
    stored["facts"] |= {
        "batches": BATCHES, "budgets": BUDGETS, "arms": ARMS, "confirm_seeds": CONFIRM_SEEDS,
        "tasks": tasks,
    }
    done = {
        (*(r[k] for k in ASKED), r["batch"], r["budget"]): r["val_loss"] for r in stored["runs"]
    }

    def loss(cell: tuple[int, int], **arm) -> float:
        "The loss of a run; made if it is not there."
        batch, budget = cell
        key = (*(arm[k] for k in ASKED), batch, budget)
        if key not in done:
            row = run_arm(Arm(rule="adamw", corpus=TEXT, **arm), benches[cell])
            stored["runs"].append({"batch": batch, "budget": budget, **{k: row[k] for k in KEPT}})
            store()
            print(batch, budget, arm, round(row["val_loss"], 4), flush=True)
            done[key] = row["val_loss"]
        return done[key]

    cells = [(batch, budget, *arm) for budget, batch, arm in product(BUDGETS, BATCHES, ARMS)]
    tuned = {}

    def confirm(cell: tuple, seed: int) -> None:
        for checkpoint in CHECKPOINTS:
            loss(
                cell[:2], format=cell[2], storage=cell[3], lr=tuned[cell], seed=seed,
                split="confirm", checkpoint=checkpoint,
            )

    for cell in cells:
        losses = {}
        how = dict(
            format=cell[2], storage=cell[3], seed=TUNE_SEED, split="tune", checkpoint=CHECKPOINTS[0]
        )
        while (rate := next_rate(losses, cell[0])) is not None:
            losses[rate] = loss(cell[:2], lr=rate, **how)
        tuned[cell] = min(losses, key=lambda r: (losses[r], r))
        confirm(cell, CONFIRM_SEEDS[0])
    for seed, cell in product(CONFIRM_SEEDS[1:], cells): confirm(cell, seed)
    return 0


if __name__ == "__main__": raise SystemExit(exit_code(main))
