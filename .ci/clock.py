"""Times `make test` and `make rest` on a quiet machine, part by part, and writes nbs/results/make_test.json;
half an hour on two cores. Nothing is written where a part fails.

python .ci/clock.py [--out FILE]
"""
import argparse
import json
import subprocess
import time
from pathlib import Path

from altgrad.basics import tell, write_atomic
from altgrad.training.tracking import code_commit, machine, versions

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "nbs/results/make_test.json"
TARGETS = "test", "rest"


def timed(command: list[str]) -> dict[str, float] | None:
    "The seconds of each part that a command announces with ==; None where it fails."
    began, marks = time.monotonic(), []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("== "): marks.append((line[3:].split(":")[0], time.monotonic() - began))
    if process.returncode: return None
    ends = [at for _, at in marks[1:]] + [time.monotonic() - began]
    return {name: round(end - at, 1) for (name, at), end in zip(marks, ends)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=STORED)
    args = parser.parse_args()
    commit = code_commit()
    seconds = {}
    for target in TARGETS:
        parts = timed(["make", target])
        if parts is None:
            tell(f"make {target} failed: nothing is stored")
            return 1
        seconds[target] = parts
        tell(f"make {target} took {sum(parts.values()) / 60:.1f} minutes")
    facts = {"git_commit": commit, "machine": machine(), "versions": versions(), "seconds": seconds}
    write_atomic(args.out, json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__": raise SystemExit(main())
