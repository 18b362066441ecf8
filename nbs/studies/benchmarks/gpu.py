"""Runs, on a machine with a GPU, what was written for one: `make gpu`; writes nbs/results/gpu.

python nbs/studies/benchmarks/gpu.py --device cuda --budget 40m
python nbs/studies/benchmarks/gpu.py --device cpu --budget 3m    # a dry run, far smaller, into runs/gpu

gpu.yaml lists the parts, in order of worth. Each of their pieces runs in a process of its own, which is
ended when it takes three times as long as expected; pieces that time nothing run at once. What has a
result of this code and device is kept.
"""
import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, Iterator

import torch
import yaml

from altgrad.basics import InputError, make_folder, one_line, parse_json, tell, unknown, write_atomic
from altgrad.training.tracking import CODE, code_commit, machine, versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PLAN = HERE / "gpu.yaml"
OUT = {"cuda": ROOT / "nbs/results/gpu", "cpu": ROOT / "runs/gpu"}
UNITS = {"s": 1, "m": 60, "h": 3600}
GRACE = 60  # seconds that a piece may take in any case, beside three times what is expected


def seconds_of(text: str) -> float:
    "A length of time; InputError for what is none."
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smh])", text)
    if not found or not float(found[1]):
        raise InputError(f"a time is a number above 0 with its unit, not {text!r}; allowed: 90s, 40m, 1.5h")
    return float(found[1]) * UNITS[found[2]]


def said(seconds: float) -> str:
    "A length of time in words."
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def check_device(device: str) -> None:
    "InputError for a device that is none, or is not here."
    if device not in OUT: raise unknown("device", device, OUT)
    if device == "cuda" and not torch.cuda.is_available():
        why = "no CUDA device is here" if torch.version.cuda or torch.version.hip else (
            f"torch {torch.__version__} is built without CUDA")
        raise InputError(f"device cuda: {why}; allowed: cpu, a dry run")


# where results come from


def driver() -> str | None:
    "The version of NVIDIA's driver, if that can be asked for."
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0] or None
    return None


def code_hash() -> str:
    "A hash of the files that a result depends on, for what is not committed."
    digest = hashlib.sha256()
    files = (p for folder in CODE for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".yaml"))
    for path in sorted(files): digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def packages() -> dict[str, str | None]:
    "The versions of what computes."
    found = {**versions(), "cuda": torch.version.cuda}
    for name in ("triton", "torchao"):
        found[name] = None
        with suppress(PackageNotFoundError): found[name] = version(name)
    return found


def facts_of(device: str) -> dict[str, Any]:
    "What every piece's result says of where it comes from."
    about = machine(device)
    return {
        "device": about.get("gpu", f"a dry run on {about['cpu']}"), "driver": driver() if device == "cuda" else None,
        "git_commit": code_commit(), "code": code_hash(), "machine": about, "versions": packages(),
    }


# results


@dataclass
class Piece:
    "A piece of a part, and the file of results that it belongs to."
    part: str
    name: str
    expected: float  # seconds
    file: Path

    @property
    def stored(self) -> dict[str, Any]:
        "The result that is there, or nothing."
        return read(self.file).get("pieces", {}).get(self.name, {})

    def holds(self, facts: dict[str, Any]) -> bool:
        "Return whether it has a result of this code, and no error; a commit of results changes no code."
        return self.stored.get("code") == facts["code"] and "error" not in self.stored

    def failed(self, facts: dict[str, Any]) -> bool:
        "Return whether it failed with this code."
        return "error" in self.stored and self.stored["code"] == facts["code"]

    def store(self, facts: dict[str, Any], result: dict[str, Any]) -> None:
        "Puts a result into the part's file."
        found = read(self.file) or {"part": self.part, "device": facts["device"], "pieces": {}}
        found["pieces"][self.name] = {**facts, **result}
        write_atomic(self.file, json.dumps(found, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    "A file of results; empty where there is none, InputError where it is damaged."
    if not path.is_file(): return {}
    try: return parse_json(path.read_bytes())
    except ValueError: raise InputError(f"{path} is damaged: remove it") from None


def pieces_of(plan: dict[str, Any], device: str, facts: dict[str, Any], out: Path) -> list[Piece]:
    "All pieces in order of worth; those that failed before come last."
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    found = []
    for part, about in plan.items():
        for name, times in about.get("pieces", {}).items():
            piece = Piece(part, name, seconds_of(times[device]), out / f"{part}.{slug}.json")
            if "error" not in piece.stored: piece.expected = piece.stored.get("seconds", piece.expected)
            found.append(piece)
    return sorted(found, key=lambda piece: piece.failed(facts))


# running


UNDER_WAY: set[subprocess.Popen] = set()


def end(child: subprocess.Popen) -> None:
    "Ends a process and all that it started."
    with suppress(ProcessLookupError, PermissionError): os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired): child.wait(10)  # what hangs in the driver may stay


def limited(command: list[str], seconds: float, log: Path) -> str | None:
    "Runs a command and all that it starts, at most so long; what went wrong, if anything did."
    with open(log, "wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
    UNDER_WAY.add(child)
    try: code = child.wait(seconds)
    except subprocess.TimeoutExpired: return f"ended after {said(seconds)}, its limit"
    finally:
        end(child)
        UNDER_WAY.discard(child)
    if not code: return None
    text = log.read_text(errors="replace").replace(f"{ROOT}{os.sep}", "")
    last = [line for line in text.splitlines() if line.strip()][-30:]
    return "\n".join([f"its process ended with {code}", *last])


def attempt(piece: Piece, device: str, facts: dict[str, Any], limit: float) -> dict[str, Any]:
    "A piece's result: its rows, those before an error too, and the error."
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows.json"), Path(folder, "log.txt")
        script, name = HERE / "gpu_parts.py", f"{piece.part}_{piece.name}"
        error = limited([sys.executable, str(script), name, device, str(rows)], limit, log)
        found = json.loads(rows.read_text()) if rows.is_file() else []
    if not found and not error: error = "it measured nothing"
    result = {"when": datetime.now(UTC).isoformat(timespec="seconds"),
              "seconds": round(time.monotonic() - began, 1), "rows": found}
    return result | ({"error": error} if error else {})


def told(result: dict[str, Any], wanted: dict[str, dict[str, float]]) -> Iterator[str]:
    "The lines of a result: what is held to something, how much else there is, and what went wrong."
    for row in result["rows"]:
        if row["value"] is None or row.get("wants") not in wanted: continue
        limit = ", ".join(f"at {how} {number:g}" for how, number in wanted[row["wants"]].items())
        yield f"    {row['what']}: {row['value']:g} {row['unit']} ({limit} wanted)"
    problems = sum("problem" in row for row in result["rows"])
    yield f"    {said(result['seconds'])}; {len(result['rows'])} rows, {problems} of them without a value"
    if "error" in result: yield f"    FAILED: {one_line(result['error'].splitlines()[0], 150)}; more is in its file"


def at_once(pieces: list[Piece], plan: dict[str, Any]) -> Iterator[list[Piece]]:
    "The pieces that run together: those of a part that times nothing; each other one is alone."
    for part, group in groupby(pieces, key=lambda piece: piece.part):
        found = list(group)
        yield from [found] if plan[part].get("at_once") else ([piece] for piece in found)


def due(piece: Piece, facts: dict[str, Any], left: float) -> bool:
    "Whether a piece is to run in the time that is left; says why not, or for how long."
    name = f"{piece.part}, {piece.name}"
    if piece.holds(facts): print(f"{name}: kept, it has a result of this code")
    elif piece.expected > left:
        print(f"{name}: skipped, its {said(piece.expected)} do not fit into the {said(max(0, left))} left")
    else:
        print(f"{name}: about {said(piece.expected)}", flush=True)
        return True
    return False


def results(pieces: list[Piece], device: str, facts: dict[str, Any], left: float) -> Iterator[tuple[Piece, dict]]:
    "Runs pieces at the same time; each with its result, as they end."
    with ThreadPoolExecutor(max(1, len(pieces))) as pool:
        running = {pool.submit(attempt, piece, device, facts, min(left, 3 * piece.expected + GRACE)): piece
                   for piece in pieces}
        try:
            for future in as_completed(running): yield running[future], future.result()
        finally:
            for child in list(UNDER_WAY): end(child)  # all of them, where this one was interrupted


def work(plan: dict[str, Any], device: str, budget: float, out: Path) -> int:
    "Runs what fits, in order; returns how many pieces failed."
    began, facts, failures = time.monotonic(), facts_of(device), 0
    make_folder(out)
    print(f"{facts['device']}, torch {facts['versions']['torch']}, commit {facts['git_commit']}: {said(budget)}")
    if device == "cuda" and not re.fullmatch("[0-9a-f]{40}", facts["git_commit"] or ""):
        print("the code is not a commit: commit it first, if the results are to be stored")
    for part, about in plan.items():
        if "missing" in about: print(f"{part}: not yet written: {about['missing']}")
    for group in at_once(pieces_of(plan, device, facts, out), plan):
        left = budget - (time.monotonic() - began)
        group = [piece for piece in group if due(piece, facts, left)]
        for piece, result in results(group, device, facts, left):
            cut = "error" in result and time.monotonic() - began >= budget
            if not cut: piece.store(facts, result)  # a result of before is worth more than an end of the budget
            # the speed of a dry run says nothing
            wanted = plan[piece.part].get("wanted", {}) if device == "cuda" or piece.part == "tests" else {}
            print(f"  {piece.part}, {piece.name}:")
            for line in told(result, wanted): print(line, flush=True)
            if cut: print("    not stored: the budget is spent", flush=True)
            failures += "error" in result
    print(f"{said(time.monotonic() - began)} in all; {failures} failed; results are in {out}")
    return failures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run (default: cuda)")
    parser.add_argument("--budget", default="40m", help="the time that there is, e.g. 90s (default: 40m)")
    parser.add_argument("--out", type=Path, help="folder of results (default: nbs/results/gpu; runs/gpu of a dry run)")
    args = parser.parse_args(argv)
    try:
        budget = seconds_of(args.budget)
        check_device(args.device)
        plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
        return int(work(plan, args.device, budget, args.out or OUT[args.device]) > 0)
    except InputError as e:
        tell(str(e))
        return 2
    except KeyboardInterrupt:
        tell("interrupted: what was finished is stored; the same command goes on")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
