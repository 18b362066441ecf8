"""Records every run of tests/faults.py, and asks what broke first in it.

python nbs/studies/experiments/first_causes.py    # some minutes; nbs/watching/12_cause.ipynb shows it
"""
import argparse
import contextlib
import io
import json
import sys
import time
import warnings
from pathlib import Path

from altgrad.basics import write_atomic
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.watching.record import EVERY, LAST, record

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "nbs/results/first_causes.json"
RUNS = {1: 0, EVERY: 40}  # steps from one that is measured in full to the next -> steps that are added to a run
SEEDS = [0, 1]  # thresholds were set on the runs of seed 0


def row(one, seed: int, every: int) -> dict:
    "What is named as the first cause of one run."
    start = time.perf_counter()
    run = one.run()
    run.steps += RUNS[every]
    run.prepare()
    with contextlib.redirect_stderr(io.StringIO()), record(run.model, run.optim, every=every) as recorder:
        run.train(recorder.loss)
    cause = recorder.cause
    named = cause and {"kind": cause.kind, "layer": cause.layer, "step": cause.step}
    kind = getattr(one, "kind", "")
    planted = {"kind": kind, "layer": one.layer, "step": one.step} if kind else None
    return {
        "run": one.id, "seed": seed, "every": every, "steps": run.steps, "family": run.family,
        "kind": kind, "planted": planted, "named": named,
        "right": named == planted, "said": str(cause or ""), "stopped": recorder.stopped,
        "seconds": round(time.perf_counter() - start, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the libraries whose models are trained
    sys.path.insert(0, str(ROOT / "tests"))
    import faults

    commit, rows = code_commit(), []
    for faults.SEED in options.seeds:
        for every in RUNS: rows += [row(one, faults.SEED, every) for one in (*faults.FAULTS, *faults.HEALTHY)]
    found = {
        "config": {"seeds": options.seeds, "at": faults.AT, "every": list(RUNS), "last": LAST},
        "git_commit": commit,
        "machine": machine(), "versions": versions(), "rows": rows,
    }
    write_atomic(options.out, json.dumps(found, indent=1) + "\n")
    print(f"{sum(r['right'] for r in rows)} of {len(rows)} as planted")


if __name__ == "__main__": main()
