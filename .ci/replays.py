"""Makes stored rows again and stores how they compare: the thirty that tests/golden.json names, or others
drawn by chance from every ledger; of the ledger of sizes those that took two minutes at most on a CPU, for
others take hours.

python .ci/replays.py                       # the thirty
python .ci/replays.py --seed 1 [--rows 30]  # another draw

The result goes to nbs/results/replays.json, beside those of other machines, settings and draws (as the
page that shows it says, nbs/studies/portability.ipynb). Rows of failed runs are not drawn. A run that does
not agree on another CPU, and needs no checkpoint of another's machine, is made twice more, at rates that lie
a rounding's width beside its own: how far they end apart is how far a last bit can carry. Exit code 1 where a
row does not agree and lies farther apart than that.
"""
import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from altgrad.basics import tell, write_atomic
from altgrad.evidence.bench import PROTOCOLS
from altgrad.evidence.instrument import Arm, Bench, Task, arm_values, run_arm
from altgrad.evidence.sweep import beside, read_rows, replay, same_cpu, with_threads
from altgrad.training.tracking import git_commit, machine, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "nbs/results"
STORED = RESULTS / "replays.json"
LIMITS = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"  # what makes a CPU compute as an older one
NUDGES = 2.0**-19, -(2.0**-19)  # relative: eight to sixteen units in float32's last place
WITH_TEXTS = "ledger", "ledger/amended"  # texts and checkpoints lie beside them
SIZES, MOST = "sizes", 120  # from first weights, which any machine can make; seconds of a run
OF_BENCH = "bits", "narrow", "law", *(f"reasons/{p.name}" for p in sorted(RESULTS.glob("reasons/*")))


Placed = tuple[str, dict[str, Any]]  # the folder that a row lies in, and the row


def every_row() -> list[Placed]:
    "The rows that can be made again, in the order of their ids."
    rows = [(folder, row) for folder in (*WITH_TEXTS, *OF_BENCH, SIZES)
            for row in read_rows(RESULTS / folder) if not row.get("error") and (folder != SIZES or short(row))]
    return sorted(rows, key=lambda pair: pair[1]["run"])


def chosen(count: int, seed: int | None) -> list[Placed]:
    "Rows drawn by chance; without a seed those that are pinned."
    if seed is not None: return random.Random(seed).sample(every_row(), count)
    pins = json.loads((ROOT / "tests/golden.json").read_bytes())["replays"]
    rows = {row["run"]: (folder, row) for folder, row in every_row()}
    return [rows[run] for run in pins]


def short(row: dict[str, Any]) -> bool:
    "Whether a run is of minutes here, too."
    return row["seconds"] <= MOST and "gpu" not in row["machine"]


def place(folder: str, checkpoints: Path) -> tuple[Bench, Path | None]:
    "The bench that makes a folder's runs, and where its own checkpoints lie."
    if folder in OF_BENCH: return PROTOCOLS["bench-1"].bench(), None
    if folder == SIZES: return Bench(checkpoints, beside(RESULTS / WITH_TEXTS[0])[0]), None
    texts, kept = beside(RESULTS / folder)
    return Bench(checkpoints, texts), kept


def nudged(row: dict[str, Any], bench: Bench) -> dict[str, Any]:
    "How far a run ends from its row, and here from itself at rates that differ in float32's last bits, in nats."
    arm, bench = Arm(**arm_values(row)), bench.with_task(Task(**row["task"]))
    now, *others = (run_arm(replace(arm, lr=arm.lr * (1 + nudge)), bench)["val_loss"] for nudge in (0.0, *NUDGES))
    return {"apart": now - row["val_loss"], "nudged": [other - now for other in others]}


def compared(folder: str, row: dict[str, Any], checkpoints: Path) -> dict[str, Any]:
    "What is stored of a row that was made again."
    bench, kept = place(folder, checkpoints)
    agrees, said = replay(row, bench, kept)
    found = {"ledger": folder, "run": row["run"], "machine": row["machine"], "agrees": agrees, "said": said}
    with with_threads(row["machine"].get("threads", 1)):
        if agrees or same_cpu(row["machine"]) or folder in WITH_TEXTS: return found
        return found | nudged(row, bench)


def explained(found: dict[str, Any]) -> bool:
    "Whether a row agrees, or lies no farther apart than a nudged rate carries the same run."
    return found["agrees"] or "nudged" in found and abs(found["apart"]) <= max(map(abs, found["nudged"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=30, help="how many a draw has")
    parser.add_argument("--seed", type=int, help="of a draw; without one the pinned rows are made again")
    args = parser.parse_args()
    found, rows = [], chosen(args.rows, args.seed)
    with tempfile.TemporaryDirectory() as checkpoints:
        for folder, row in rows:
            found.append(compared(folder, row, Path(checkpoints)))
            tell(f"{len(found)}/{len(rows)} {folder}: {found[-1]['said']}")
    limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
    facts = {"seed": args.seed, "commit": git_commit(), "machine": machine(), "limits": limits,
             "versions": versions(), "rows": found}
    stored = json.loads(STORED.read_bytes()) if STORED.is_file() else {}
    name = f"{facts['machine']['cpu']}, {facts['machine']['capability']}"
    if limits: name += " by setting"
    if args.seed is not None: name += f", draw {args.seed}"
    stored[name] = facts
    write_atomic(STORED, json.dumps(stored, indent=1) + "\n")
    return 0 if all(map(explained, found)) else 1


if __name__ == "__main__": sys.exit(main())
