"""Asks the referee for the name of every planted fault, and whether it accuses a right quantizer.

python nbs/studies/benchmarks/referee_mutants.py    # half a minute; nbs/numbers/09_referee.ipynb shows it
"""
import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from altgrad.basics import InputError, write_atomic
from altgrad.numbers.referee import judge
from altgrad.training.tracking import code_commit, machine, versions
from stored import add_out

ROOT = Path(__file__).resolve().parents[3]
SEED = 0


def row(planted) -> dict:
    "What the referee calls one quantizer."
    start = time.perf_counter()
    try: named, refused = judge(planted.f, planted.format, **planted.asks).names, None
    except InputError as e: named, refused = [], str(e)
    return {
        "quantizer": planted.f.__name__, "format": planted.format, "asks": planted.asks,
        "fault": planted.fault, "named": named, "refused": refused,
        "seconds": round(time.perf_counter() - start, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser, "referee_mutants.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of numpy, about casts of NaN: the quantizers are as they are
    sys.path.insert(0, str(ROOT / "tests"))
    import mutants

    torch.manual_seed(SEED)
    np.random.seed(SEED)
    commit = code_commit()
    rows = [row(p) for p in (*mutants.RIGHT, *mutants.RIGHT_HALVES, *mutants.MUTANTS,
                               *mutants.HALVES, *mutants.COMBINED)]
    found = {
        "config": {"seed": SEED}, "git_commit": commit, "machine": machine(),
        "versions": versions(), "seconds": sum(r["seconds"] for r in rows), "rows": rows,
    }
    write_atomic(options.out, json.dumps(found, indent=1) + "\n")
    print(f"{sum(sorted(r['named']) == sorted(filter(None, r['fault'].split(' + '))) for r in rows)} "
          f"of {len(rows)} as planted")


if __name__ == "__main__": main()
