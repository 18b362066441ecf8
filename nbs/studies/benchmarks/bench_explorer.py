"""Times the explorer: every control is moved through its range, from the moved control to the
finished picture; writes nbs/results/bench_explorer.json. About 1 minute on two cores.

python nbs/studies/benchmarks/bench_explorer.py
"""
import argparse
import json
import statistics
import sys
import time

import torch

from altgrad.basics import write_atomic
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.views.explorer import Explorer, Setting, toy_path
from stored import add_out

# fast, dense, slow
STARTS = (
    Setting(), Setting("E0M7", "student t, 2 degrees"),
    Setting("E5M2", rounding="stochastic", rule="RiemannianAdamW"),
)
STEPS = (0.02, 0.05, 0.2, 0.5)
TARGET = 100  # ms


def places(name: str, control) -> list:
    "Where a control is moved to, one after the other."
    if hasattr(control, "options"): return list(control.options)
    return list(STEPS) if name == "step" else list(range(control.min, control.max + 1))


def updates(start: Setting, name: str) -> list[float]:
    """Milliseconds of each change of a control;
    paths that were walked before are forgotten, as a first visit has none."""
    explorer = Explorer(start)
    control, times = explorer.controls[name], []
    for place in places(name, control):
        before = explorer.setting
        toy_path.cache_clear()
        began = time.perf_counter()
        control.value = place
        passed = 1e3 * (time.perf_counter() - began)
        if explorer.setting != before: times.append(passed)
    return times


def measure(rounds: int) -> dict[str, dict]:
    "A row for each control, and one for all."
    updates(STARTS[0], "rounding")  # the first calls of everything
    times = {
        name: [t for _ in range(rounds) for start in STARTS for t in updates(start, name)]
        for name in Explorer().controls
    }
    times["all"] = [t for row in times.values() for t in row]
    return {name: {"updates": len(t), "median_ms": round(statistics.median(t), 2), "slowest_ms": round(max(t), 2),
                   "share_within_target": round(sum(v < TARGET for v in t) / len(t), 4)} for name, t in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser, "bench_explorer.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "machine": machine(), "versions": versions(), "git_commit": code_commit(),
        "target_ms": TARGET, "rows": measure(args.rounds),
    }
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")
    for name, row in found["rows"].items():
        print(
            f"{name:14} {row['updates']:4} updates, median {row['median_ms']:6.1f} ms, slowest "
            f"{row['slowest_ms']:6.1f} ms"
        )
    return 0


if __name__ == "__main__": sys.exit(main())
