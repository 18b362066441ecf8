"""Runs the hostile cases of tests/hostile, all of them or some, and prints how many there were of
each group and which did not hold."""
import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hostile import core

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the cases and of their order (default: 0)"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)"
    )
    parser.add_argument("--every", type=int, default=1, help="run each n-th case only (default: 1)")
    parser.add_argument(
        "--only", default="", help="run only cases whose group and name contain this"
    )
    args = parser.parse_args()
    sys.exit(core.main(args.seed, args.workers, args.every, args.only))
