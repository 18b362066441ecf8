"""What the scripts of the small studies share: their arguments, and results that are stored after
every run and not made again."""
import argparse
import json
from pathlib import Path
from typing import Any, Callable

import torch

from altgrad.basics import write_atomic
from altgrad.training.tracking import git_commit, machine, versions
from altgrad.evidence.instrument import Bench, build_checkpoint
from altgrad.evidence.study import Study, build_study, read_ledger
from altgrad.evidence.sweep import read_matrix

ROOT = Path(__file__).resolve().parents[3] / "nbs"
TEXT, CHECKPOINTS = "eurlex", ("stdlib-0.1m-0", "stdlib-0.1m-1", "stdlib-0.1m-2")


def central_study(tiers: tuple[int, ...] = (1, 2, 3)) -> Study:
    "Tiers of the committed ledger."
    return build_study(
        read_ledger(ROOT / "results/ledger"),
        [read_matrix((ROOT / f"studies/matrices/tier{i}.yaml").read_text()) for i in tiers],
    )


def opened(
    doc: str, out: Path, parts: tuple[str, ...]
) -> tuple[Bench, dict[str, Any], Callable[[], None]]:
    """The instrument on one thread, what is stored so far (lists under `parts`,
    and the circumstances under `facts`), and a function that stores it."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=out, help="the file of results; what it holds is not repeated"
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs/checkpoints"),
        help="folder of checkpoint files; built where they are missing",
    )
    parser.add_argument("--corpus", required=True, help="eurlex=path:<file>")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args.checkpoints, dict([args.corpus.split("=", 1)]))
    stored = (
        json.loads(args.out.read_text(encoding="utf-8"))
        if args.out.is_file()
        else {part: [] for part in parts}
    )
    stored["facts"] = {
        "checkpoints": {c: build_checkpoint(bench, c) for c in CHECKPOINTS},
        "corpus": bench.corpus(TEXT).facts() | {"name": TEXT},
        "machine": machine(),
        "versions": versions(),
        "git_commit": git_commit(),
    }

    def store() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.out, json.dumps(stored, separators=(",", ":"), allow_nan=False) + "\n")

    return bench, stored, store
