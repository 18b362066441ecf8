"""Writes the committed ledger from a running one: one parquet file a matrix, and what is in it.

python .ci/ledger.py LEDGER.jsonl [FOLDER [COLUMN]]
FOLDER is nbs/results/ledger if not given; a COLUMN, such as format, has a file for each of its
values in place of one for each matrix.
The running ledger is copied first and only read; a sweep may go on writing to it. All files of the
folder have the same columns afterwards, so that they are loaded together. A stored file whose runs the
ledger does not have is left as it is, and so is everything else: it is of another sweep.
"""
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from altgrad.basics import InputError, tell
from altgrad.evidence.sweep import Ledger, compact, read_rows, write_table

ROOT = Path(__file__).resolve().parent.parent


def same_columns(folder: Path) -> None:
    "Gives every file of a folder the columns of all, in one order; what a file did not have is empty."
    tables = {path: pq.read_table(path) for path in sorted(folder.glob("*.parquet"))}
    schema = pa.unify_schemas([t.schema for t in tables.values()], promote_options="permissive")
    for path, table in tables.items():
        if table.schema.equals(schema): continue
        columns = {f.name: table[f.name] if f.name in table.schema.names else pa.nulls(len(table), f.type)
                   for f in schema}
        write_table(pa.table(columns).cast(schema), path)


def main(source: Path, folder: Path = ROOT / "nbs/results/ledger", column: str = "matrix") -> None:
    "One file for each value of a column of the ledger."
    with tempfile.TemporaryDirectory() as copy:
        try: shutil.copy(source, Path(copy) / "ledger.jsonl")
        except OSError as e: raise InputError(f"{source} cannot be read: {e.strerror}") from None
        rows = Ledger(copy).rows()
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[Path, list] = {}
    for row in rows: parts.setdefault(folder / f"{row[column]}.parquet", []).append(row)
    for path, mine in parts.items():
        stored = {row["run"] for row in read_rows(path)} if path.exists() else set()
        if lost := stored - {row["run"] for row in mine}:
            raise InputError(f"{path} holds {len(lost)} runs that {source} does not have: give another FOLDER")
    for path, mine in parts.items():
        compact(mine, path)
        stages = ", ".join(
            f"{n} {stage}" for stage, n in sorted(Counter(row["stage"] for row in mine).items())
        )
        print(
            f"{path.name}: {stages}; {sum(bool(row.get('error')) for row in mine)} failed; "
            f"{path.stat().st_size / 1e6:.2f} MB"
        )
    same_columns(folder)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4): sys.exit(__doc__)
    try: main(*map(Path, sys.argv[1:3]), *sys.argv[3:])
    except InputError as e:
        tell(str(e))
        sys.exit(2)
