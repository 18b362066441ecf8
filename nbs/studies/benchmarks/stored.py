"Where a benchmark's result goes, which is looked at before anything is timed, and what lies there."
import argparse
import json
import os
from pathlib import Path
from typing import Any

from altgrad.basics import write_atomic

RESULTS = Path(__file__).resolve().parents[2] / "results"


def read(path: Path) -> dict[str, Any]:
    "What a file of results holds by device or setting; nothing where there is none, ValueError where it is damaged."
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(found, dict): raise ValueError("it is not an object")
    return found


def result(text: str) -> Path:
    "The file of a result that can be written, for argparse."
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; allowed: a file in a folder that can")
    try: read(path)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is damaged: remove it, or choose another") from None
    return path


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    "The option --out, which is checked as it is given."
    parser.add_argument("--out", type=result, default=str(RESULTS / name), metavar="FILE",
                        help=f"the file of results (default: nbs/results/{name})")


def add(path: Path, name: str, found: dict[str, Any]) -> None:
    "Puts a result beside those of other devices or settings, in place of an older one."
    write_atomic(path, json.dumps(read(path) | {name: found}, indent=1) + "\n")
