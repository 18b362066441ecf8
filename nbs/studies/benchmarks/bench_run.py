"""What a run of the instrument costs: CPU seconds of its parts; writes nbs/results/bench_run.json.
About 3 minutes on two cores.

python nbs/studies/benchmarks/bench_run.py [--label now] [--rounds 5]

Three arms of the bench's task take turns in a process that is set up as a worker of a sweep is.
Each part is a function that the run calls; what such functions call in turn counts once. With
PYTHONPATH=CHECKOUT the code of another checkout is timed, and --label says what it is.
"""
import argparse
import statistics
import time
from collections import defaultdict
from functools import wraps
from typing import Any

import torch

from altgrad.basics import tell
from altgrad.evidence import instrument, sweep
from altgrad.evidence.bench import PROTOCOLS
from altgrad.evidence.instrument import Arm, Bench, Weights, run_arm
from altgrad.geometry import optim
from altgrad.training.tracking import code_commit, machine, versions
from stored import add, add_out

PROTOCOL = PROTOCOLS["bench-1"]
ARMS = {
    "FP32, AdamW": dict(storage="fp32", rule="adamw"),
    "E4M3, stochastic, AdamW": dict(rule="adamw"),
    "E7M0, stochastic, StiffnessAdamW": dict(format="E7M0", power=-1.0),
}
PARTS = {  # where the functions are that make up a part
    "model": [(Bench, "model"), (Weights, "__init__")],
    "batches": [(instrument, "get_batch")],
    "forward": [(instrument, "loss_of")],
    "backward": [(torch.Tensor, "backward")],
    "rule": [(Weights, "update")],
    "storage": [(optim, "write"), (instrument, "write_all"), (Weights, "decode")],
    "explanation": [(instrument, "_watched_update"), (instrument, "explain_end")],
    "evaluation": [(instrument, "_validate")],
    "hashes": [(instrument, "state_hash"), (instrument, "make_row")],
}


class Clock:
    "CPU seconds by part: of nested parts the inner one counts."
    def __init__(self):
        self.spent: dict[str, float] = defaultdict(float)
        self.parts, self.since = ["other"], time.process_time()

    def turn(self) -> None:
        "Give the part of now the time since the last turn."
        now = time.process_time()
        self.spent[self.parts[-1]] += now - self.since
        self.since = now

    def watch(self, owner: Any, name: str, part: str) -> None:
        "Count a function as a part from now on."
        if not hasattr(owner, name): return  # code from before it was there
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args, **kwargs):
            self.turn()
            self.parts.append(part)
            try: return function(*args, **kwargs)
            finally:
                self.turn()
                self.parts.pop()

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        "The parts so far; the clock begins anew."
        self.turn()
        found, self.spent = dict(self.spent), defaultdict(float)
        return found


def started() -> tuple[Bench, dict[str, float]]:
    "A worker's bench, and what it costs once a process."
    cost = {"imports": time.process_time()}
    clock = time.process_time()
    def lap(name: str) -> None:
        nonlocal clock
        now = time.process_time()
        cost[name], clock = now - clock, now
    known = PROTOCOL.bench()
    bench = sweep.start_bench((known.folder, known.data, known.task, known.cache))
    lap("hash of the code")
    bench.corpus(PROTOCOL.corpus)
    lap("text")
    bench.state(PROTOCOL.confirm[0])
    lap("checkpoint")
    return bench, cost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--label", default="now", help="of the code, e.g. before")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken")
    add_out(parser, "bench_run.json")
    options = parser.parse_args()
    bench, cost = started()
    clock = Clock()
    for part, functions in PARTS.items():
        for owner, name in functions: clock.watch(owner, name, part)
    if hasattr(instrument, "write"): instrument.write = optim.write  # it is one function
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    rows = {}
    for _ in range(options.rounds + 1):  # the first one validates the start, too
        for name, facts in ARMS.items():
            arm = Arm(**facts, checkpoint=PROTOCOL.confirm[0], split="confirm")
            clock.take()
            rows[name] = run_arm(arm, bench)
            rounds[name].append(clock.take())
            tell(f"{name}: {sum(rounds[name][-1].values()):.2f} s of CPU")
    arms = {
        name: {
            "parts": {part: round(statistics.median(r.get(part, 0.0) for r in later), 4)
                      for part in [*PARTS, "other"]},
            "rounds": [round(sum(r.values()), 3) for r in later],
            "first": round(sum(first.values()), 3),
            "val_loss": rows[name]["val_loss"], "weights_sha": rows[name]["weights_sha"],
        }
        for name, (first, *later) in rounds.items()
    }
    add(options.out, options.label, {
        "machine": machine(), "versions": versions(), "git_commit": code_commit(),
        "protocol": PROTOCOL.name, "steps": bench.task.steps, "rounds": options.rounds,
        "once_a_process": {name: round(s, 3) for name, s in cost.items()}, "arms": arms,
    })


if __name__ == "__main__": main()
