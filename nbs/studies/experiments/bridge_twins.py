"""S^-1 in FP32 in two settings of the bridge, beside the arms on the grid; every arm is tuned there.

python nbs/studies/experiments/bridge_twins.py --out FOLDER [--workers N]

Rows go to FOLDER/ledger.jsonl; the command resumes where it was stopped. The predictions are part 8.2 of
nbs/studies/protocol_2.ipynb.
"""
import argparse
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple

import torch

from altgrad.basics import tell
from altgrad.evidence.instrument import Arm
from altgrad.evidence.sweep import Ledger, Loss, Matrix, Tuning, loss_of_row, tuning
from altgrad.training.tracking import code_commit, machine, versions

sys.path.append(str(Path(__file__).parent))
import bridge
import sizes

SETTINGS = "with first weights", "all"
WAYS = {  # storage, and the arm of the bridge whose rule and first rate it has
    "FP32 AdamW": ("fp32", "stochastic"), "FP32 S^-1": ("fp32", "S^-1"),
    "AdamW": ("grid_stochastic", "stochastic"), "S^-1": ("grid_stochastic", "S^-1"),
}
Cell = tuple[str, str]  # setting and way


class Run(NamedTuple):
    "A run before it is made."
    setting: str
    way: str
    arm: Arm

    @property
    def name(self) -> str:
        "The name of its row."
        return f"{self.setting}/{self.way}/{self.arm.split}/{self.arm.lr:g}/{self.arm.seed}"


def cell_arm(cell: Cell) -> Arm:
    "The arm of a cell at the bridge's own rate, of the first seed that tunes."
    setting, way = cell
    storage, like = WAYS[way]
    return replace(bridge.planned(bridge.SETTINGS[setting], like, sizes.TUNE_SEEDS[0]), storage=storage, split="tune")


def search(cell: Cell, losses: Mapping[str, Loss]) -> Tuning:
    "The search for a cell's rate with two seeds, from the bridge's own rate."
    arm, seeds = cell_arm(cell), sizes.TUNE_SEEDS[:2]
    checkpoints = tuple(f"{bridge.SMALL.recipe}-{seed}" for seed in seeds)
    matrix = Matrix("bridge twins", 0, ((arm, arm.lr),), checkpoints, seeds, (), task=bridge.SMALL.task)
    return tuning(arm, arm.lr, matrix, lambda a: losses.get(Run(*cell, a).name))


def confirming(cell: Cell, rate: float) -> list[Run]:
    "The runs of a tuned cell that count."
    return [Run(*cell, replace(cell_arm(cell), lr=rate, split="confirm", seed=seed,
                               checkpoint=f"{bridge.SMALL.recipe}-{seed}")) for seed in bridge.SEEDS]


def missing(rows: Iterable[Mapping[str, Any]]) -> list[Run]:
    "The runs that can be made now: of cells that are tuned those that count, of others the next of the search."
    losses = {row["run"]: loss_of_row(row) for row in rows}
    runs: list[Run] = []
    for cell in product(SETTINGS, WAYS):
        state = search(cell, losses)
        found = [Run(*cell, job.arm) for job in state.missing]
        runs += found or confirming(cell, state.rates[state.best])
    return [run for run in runs if run.name not in losses]


def make(run: Run, commit: str | None) -> dict[str, Any]:
    "The row of a run."
    began, bench, setting = time.perf_counter(), bridge.bench_of(), bridge.SETTINGS[run.setting]
    rest_lr = bridge.rates(setting, WAYS[run.way][1])[1]
    arm = replace(run.arm, weight_decay=bridge.decay_at(setting, run.arm.lr))  # as much an update at every rate
    model, losses = bridge.train(setting, arm, rest_lr, bench)
    loss = bridge.validate(model, arm, bench)
    ended = math.isfinite(losses[-1]) and math.isfinite(loss)
    return {
        "run": run.name, "setting": run.setting, "way": run.way, **asdict(arm), "rest_lr": rest_lr,
        "task": asdict(bench.task), "diverged": not ended, "val_loss": loss if ended else math.log(256),
        "raw_loss": loss if ended else None, "corpus_sha": bench.corpus(arm.corpus).hash,
        "seconds": round(time.perf_counter() - began, 3), "commit": commit, "machine": machine("cpu"),
        "versions": versions(),
    }


def make_all(out: Path, workers: int) -> None:
    "Makes what is missing, stage by stage, and stores each row as its run ends."
    ledger, commit = Ledger(out), code_commit()
    bridge.bench_of().corpus("eurlex")  # prepared once, before the workers ask for it
    pool = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
    with ledger.writing() as append, pool:
        try:
            while runs := missing(ledger.rows()):
                waiting = [pool.submit(make, run, commit) for run in runs]
                for number, future in enumerate(as_completed(waiting), 1):
                    append(row := future.result())
                    tell(f"{number} of {len(runs)}: {row['run']} ends at {row['val_loss']:.4f}, {row['seconds']:.0f} s")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    make_all(args.out, args.workers)
    return 0


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
