"""Whole runs of real checkpoints by both engines, and runs per hour; writes
nbs/results/replicas.json.

python nbs/studies/benchmarks/engines.py compare --checkpoints DIR --corpus eurlex=path:laws.txt
python nbs/studies/benchmarks/engines.py time --checkpoints DIR --corpus eurlex=path:laws.txt --device cuda

`compare` makes paired runs, the loss by each engine; `time` counts runs per hour, on an idle machine.
"""
import argparse
import itertools
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch

from altgrad.numbers.formats import EIGHT_BIT
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.evidence.instrument import Arm, Bench, Task, build_checkpoint, run_arm
from altgrad.evidence.replicas import run_arms
from stored import add, add_out

COMPARED = [
    dict(format="E4M3", storage="grid_stochastic"),
    dict(format="E7M0", storage="grid_stochastic"),
    dict(format="E4M3", storage="master"),
    dict(format="E7M0", storage="grid_stochastic", rule="riemannian_adamw", lr=0.3),
    dict(format="E5M2", storage="grid_nearest", power=1.0),
    dict(format="E7M0", storage="grid_stochastic", lr=2e-3),
    dict(format="E7M0", storage="grid_stochastic", rule="riemannian_adamw", lr=0.03),
]
BATCHES = {"16 x 64": (16, 64), "4 x 32": (4, 32)}  # sequences an update, and tokens in each


def compare(bench: Bench, options: argparse.Namespace) -> list[dict]:
    """Each arm by both engines, with the same seeds; and alone again with a learning rate
    larger by 2^-20: how far a difference of that size carries."""
    arms = [
        Arm(**{"lr": 4e-3, **cell}, seed=seed, checkpoint=f"{options.model}-{options.first}")
        for cell in COMPARED
        for seed in options.seeds
    ]
    began = time.perf_counter()
    stacked = run_arms(arms, bench, options.device, options.replicas)
    took = time.perf_counter() - began
    keys = (
        "format", "storage", "rule", "power", "lr", "seed", "checkpoint", "checkpoint_sha",
        "corpus_sha", "run",
    )
    rows = []
    for arm, got in zip(arms, stacked):
        want = run_arm(arm, bench)
        nudged = run_arm(replace(arm, lr=arm.lr * (1 + 2**-20)), bench)["raw_loss"]
        alone = want["raw_loss"]
        rows.append({
            **{key: want[key] for key in keys},
            "frozen": want["frozen_loss"],
            "single": alone,
            "batched": got["raw_loss"],
            "nudged": nudged,
        })
        print(f"{arm.format} {arm.storage} {arm.rule} lr {arm.lr:g} seed {arm.seed}: {alone:.5f} alone; "
              f"stacked {got['raw_loss'] - alone:+.5f}, nudged {nudged - alone:+.5f}", flush=True)
    print(f"{len(arms)} replicas in {took:.0f} s")
    return rows


class Shorter(Bench):
    "A bench whose models see fewer tokens of context."
    tokens = 64

    def model(self, checkpoint):
        model = super().model(checkpoint)
        # the positions beyond are there and not used
        model.config = replace(model.config, block_size=self.tokens)
        return model


def shorter(setup: tuple, tokens: int) -> Shorter:
    "A bench of this setup with that many tokens of context."
    bench = Shorter(*setup)
    bench.tokens = tokens
    return bench


def timed_arms(count: int, options: argparse.Namespace) -> list[Arm]:
    "Arms of one kind that differ in format, storage, learning rate and seed."
    cells = itertools.cycle(itertools.product(EIGHT_BIT, ("grid_stochastic", "master")))
    return [
        Arm(format=f, storage=s, lr=4e-3, seed=i, checkpoint=f"{options.model}-{options.first}")
        for i, (f, s) in zip(range(count), cells)
    ]


def runs_per_hour(bench: Bench, options: argparse.Namespace) -> list[dict]:
    """Rounds in which the engines take turns;
    one process a run is a persistent worker with one thread on each core."""
    rows = []
    for batch, (size, tokens) in BATCHES.items():
        task = replace(bench.task, steps=options.steps, batch_size=size)
        setup = bench.with_task(task).setup
        short = shorter(setup, tokens)
        rounds = {f"batched {n}": [] for n in options.replicas}
        for _ in range(options.rounds):
            for n in options.replicas:
                began = time.perf_counter()
                run_arms(timed_arms(n, options), short, options.device, n, options.compiled)
                rounds[f"batched {n}"].append(3600 * n / (time.perf_counter() - began))
            rounds.setdefault("workers", []).append(worker_rate(setup, tokens, options))
        row = {
            "batch": batch,
            "steps": options.steps,
            "runs_per_hour": {k: round(statistics.median(v), 1) for k, v in rounds.items()},
            "rounds": rounds,
        }
        print(batch, row["runs_per_hour"], flush=True)
        rows.append(row)
    return rows


def start(setup: tuple, tokens: int) -> None:
    "Prepares a worker process."
    global BENCH
    torch.set_num_threads(1)
    BENCH = shorter(setup, tokens)


def work(arm: Arm) -> float: return run_arm(arm, BENCH)["seconds"]


def worker_rate(setup: tuple, tokens: int, options: argparse.Namespace) -> float:
    "Runs per hour of persistent workers, without their start."
    with ProcessPoolExecutor(options.workers, get_context("spawn"), start, (setup, tokens)) as pool:
        list(pool.map(work, timed_arms(options.workers, options)))
        arms, began = timed_arms(2 * options.workers, options), time.perf_counter()
        list(pool.map(work, arms))
        return 3600 * len(arms) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--checkpoints", required=True)
    both.add_argument("--corpus", action="append", default=[], metavar="LABEL=DATA")
    both.add_argument(
        "--model", default="stdlib-0.1m", help="recipe of the checkpoint, e.g. stdlib-0.8m"
    )
    both.add_argument("--first", type=int, default=0, help="seed of the checkpoint")
    both.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_out(both, "replicas.json")
    whats = parser.add_subparsers(dest="what", required=True)
    comparing = whats.add_parser("compare", parents=[both], help="the loss of paired runs by each engine")
    comparing.add_argument("--replicas", type=int, default=16, help="in a batch")
    comparing.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    timing = whats.add_parser("time", parents=[both], help="runs per hour, on an idle machine")
    timing.add_argument("--replicas", type=int, nargs="+", default=[16], help="in a batch, one after the other")
    timing.add_argument("--workers", type=int, default=torch.multiprocessing.cpu_count())
    timing.add_argument("--steps", type=int, default=300)
    timing.add_argument("--rounds", type=int, default=3)
    timing.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    commit = code_commit()
    bench = Bench(options.checkpoints, dict(c.split("=", 1) for c in options.corpus), Task())
    build_checkpoint(bench, f"{options.model}-{options.first}")
    config = {k: v for k, v in vars(options).items() if k not in ("checkpoints", "corpus", "out")}
    rows = (compare if options.what == "compare" else runs_per_hour)(bench, options)
    add(options.out, f"{options.what} {options.device} {options.model}", {
        "machine": machine(options.device),
        "versions": versions(),
        "git_commit": commit,
        "config": config,
        "corpus_sha": bench.corpus("eurlex").hash,
        "rows": rows,
    })


if __name__ == "__main__": main()
