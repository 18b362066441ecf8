"""What the scripts of the small studies share: their arguments, and results that are stored after
every run and not made again."""
import argparse
import json
from pathlib import Path
from typing import Any, Callable

import torch

from altgrad.basics import InputError, tell, write_atomic
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


def exit_code(main: Callable[[], int | None]) -> int:
    "What a command ends with: bad input is one line, and code 2."
    try: return main() or 0
    except InputError as e:
        tell(str(e))
        return 2


def text_of(corpus: str) -> dict[str, str]:
    "A text by its name, from `name=path:FILE`; InputError without the sign."
    name, equals, text = corpus.partition("=")
    if not equals: raise InputError(f"--corpus must be a name and a text, such as eurlex=path:FILE, not {corpus!r}")
    return {name: text}


def opened(
    doc: str, out: Path, parts: tuple[str, ...]
) -> tuple[Bench, dict[str, Any], Callable[[], None]]:
    """The instrument on one thread, what is stored so far (lists under `parts`,
    and the circumstances under `facts`), and a function that stores it;
    InputError where what is stored is of another text or other checkpoints."""
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
    bench = Bench(args.checkpoints, text_of(args.corpus))
    stored = (
        json.loads(args.out.read_text(encoding="utf-8"))
        if args.out.is_file()
        else {part: [] for part in parts}
    )
    inputs = {
        "checkpoints": {c: build_checkpoint(bench, c) for c in CHECKPOINTS},
        "corpus": bench.corpus(TEXT).facts() | {"name": TEXT},
    }
    for what, now in inputs.items():
        if stored.get("facts", inputs)[what] != now:
            raise InputError(f"{args.out} holds runs with other {what}: choose another --out")
    stored["facts"] = {
        **inputs,
        "machine": machine(),
        "versions": versions(),
        "git_commit": git_commit(),
    }

    def store() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.out, json.dumps(stored, separators=(",", ":"), allow_nan=False) + "\n")

    return bench, stored, store
