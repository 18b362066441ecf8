"""Makes stored rows again, drawn by chance from every ledger, and stores how they compare.

python .ci/replays.py [--rows 30] [--seed 0]

The result goes to nbs/results/replays.json, beside those of other machines and settings (as the
page that shows it says, nbs/studies/portability.ipynb). Rows of failed runs are not drawn. Exit code
1 where a row does not agree.
"""
import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from altgrad.basics import tell, write_atomic
from altgrad.evidence.bench import PROTOCOLS
from altgrad.evidence.instrument import Bench
from altgrad.evidence.sweep import beside, read_rows, replay
from altgrad.training.tracking import git_commit, machine, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "nbs/results"
STORED = RESULTS / "replays.json"
LIMITS = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"  # what makes a CPU compute as an older one
WITH_TEXTS = "ledger", "ledger/amended"  # texts and checkpoints lie beside them
OF_BENCH = "bits", "narrow", *(f"reasons/{p.name}" for p in sorted(RESULTS.glob("reasons/*")))


def drawn(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    "Rows by chance, each with the folder that it lies in."
    rows = [(folder, row) for folder in (*WITH_TEXTS, *OF_BENCH)
            for row in read_rows(RESULTS / folder) if not row.get("error")]
    return random.Random(seed).sample(sorted(rows, key=lambda pair: pair[1]["run"]), count)


def again(folder: str, row: dict[str, Any], checkpoints: Path) -> tuple[bool, str]:
    "Whether a row agrees with its repetition, and a sentence."
    if folder in OF_BENCH: return replay(row, PROTOCOLS["bench-1"].bench())
    texts, kept = beside(RESULTS / folder)
    return replay(row, Bench(checkpoints, texts), kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as checkpoints:
        for folder, row in drawn(args.rows, args.seed):
            agrees, said = again(folder, row, Path(checkpoints))
            tell(f"{len(found) + 1}/{args.rows} {folder}: {said}")
            found.append({"ledger": folder, "run": row["run"], "machine": row["machine"],
                          "agrees": agrees, "said": said})
    limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
    facts = {"seed": args.seed, "commit": git_commit(), "machine": machine(), "limits": limits,
             "versions": versions(), "rows": found}
    stored = json.loads(STORED.read_bytes()) if STORED.is_file() else {}
    name = f"{facts['machine']['cpu']}, {facts['machine']['capability']}"
    stored[f"{name} by setting" if limits else name] = facts
    write_atomic(STORED, json.dumps(stored, indent=1) + "\n")
    return 0 if all(row["agrees"] for row in found) else 1


if __name__ == "__main__": sys.exit(main())
