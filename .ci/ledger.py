"""Writes the committed ledger from a running one: one parquet file a matrix, and what is in it.

python .ci/ledger.py LEDGER.jsonl [FOLDER]      FOLDER is nbs/results/ledger if not given
The running ledger is copied first and only read; a sweep may go on writing to it.
"""
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from altgrad.evidence.sweep import Ledger, compact

ROOT = Path(__file__).resolve().parent.parent


def main(source: Path, folder: Path) -> None:
    "One file for each matrix of the ledger."
    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(source, Path(copy) / "ledger.jsonl")
        rows = Ledger(copy).rows()
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(row["matrix"] for row in rows):
        path, mine = folder / f"{name}.parquet", [row for row in rows if row["matrix"] == name]
        compact(mine, path)
        stages = ", ".join(
            f"{n} {stage}" for stage, n in sorted(Counter(row["stage"] for row in mine).items())
        )
        print(
            f"{path.name}: {stages}; {sum(bool(row.get('error')) for row in mine)} failed; "
            f"{path.stat().st_size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3): sys.exit(__doc__)
    main(
        Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else ROOT / "nbs/results/ledger"
    )
