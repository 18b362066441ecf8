"""What a case is, what it may say, and how thousands are run."""
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable, Iterator

# seconds of the processor a case, seconds in all (others may have the cores), characters a line
LIMIT = 10
WAIT = 60
LONGEST = 300
TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(3000))


@dataclass(frozen=True)
class Case:
    "Something hostile, or a control."
    group: str
    name: str
    check: Callable[["Place"], None]  # raises where it does not hold
    right: bool = False  # a control: right input, which must work


class Place:
    "Where a case runs: an empty folder of its own, and what all cases read."
    def __init__(self, folder: Path, base: Path): self.folder, self.base = folder, base


# what may be said


def assert_line(line: str) -> None:
    "One line for people: not empty, not long, nothing that a terminal obeys."
    assert line.strip() and "\n" not in line and len(line) <= LONGEST and line.isprintable(), (
        f"no line for people: {line[:400]!r}"
    )


def refused(call: Callable, *args: Any, **kwargs: Any) -> str:
    "The line of the InputError that the call must raise."
    from altgrad.basics import InputError

    try: got = call(*args, **kwargs)
    except InputError as e:
        assert_line(str(e))
        return str(e)
    raise AssertionError(f"accepted: {str(got)[:150]!r}")


def either(call: Callable, *args: Any) -> Any:
    "What the call returns, or None where it refuses in one line."
    from altgrad.basics import InputError

    try: return call(*args)
    except InputError as e: assert_line(str(e))
    return None


def told(*argv: Any) -> tuple[int, str, str]:
    "Exit code, output and error stream of a command, in this process."
    from altgrad.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try: code = main([str(a) for a in argv])
        except SystemExit as e: code = e.code
    return code, out.getvalue(), err.getvalue()


def refused_command(*argv: Any, lines: int = 1) -> str:
    """The one line of a command that must be refused with exit code 2;
    `lines` more than one where it says first what it is about to do."""
    code, out, err = told(*argv)
    said = err.splitlines()
    assert code == 2 and not out, f"exit code {code}, said {err[-300:]!r}, wrote {out[:100]!r}"
    assert 1 <= len(said) <= lines and said[-1].startswith("altgrad"), (
        f"not one line: {err[:400]!r}"
    )
    for line in said: assert_line(line)
    return said[-1]


def works(*argv: Any) -> str:
    "The output of a command that must work."
    code, out, err = told(*argv)
    assert code == 0 and "Traceback" not in err, f"exit code {code}, said {err[-300:]!r}"
    for line in err.splitlines(): assert_line(line)
    return out


# what all cases read

SMALL = {
    "model": "gpt-mini", "format": "E4M3", "max_steps": 8, "batch_size": 2, "block_size": 8,
    "warmup_steps": 2, "eval_every": 4, "eval_windows": 4, "checkpoint_every": 3,
    "monitor_every": 2, "device": "cpu", "compute_dtype": "float32",
}


def settings(base: Path, **changes: Any) -> list[str]:
    "A small run on the command line."
    values = {**SMALL, "name": "r", "data": f"path:{base}/text.txt", **changes}
    return [arg for key, value in values.items() for arg in ("--set", f"{key}={value}")]


def make_base(base: Path) -> None:
    """A text, a run that was killed at its seventh step,
    the same run left alone, and a small sweep's ledger."""
    # once, and not in every worker: what a run loads late takes seconds
    import matplotlib.pyplot  # noqa: F401
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    from altgrad.evidence import replicas, sweep  # noqa: F401
    from altgrad.model import gpt as model
    from altgrad.training import tracking, trainer
    from altgrad.views import autopsy, watch  # noqa: F401
    from kernels import with_kernels

    torch.set_num_threads(1)
    os.environ |= {
        "ALTGRAD_CACHE": with_kernels(base / "cache"),
        "HOME": str(base),
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
    }
    model.PRESETS["gpt-mini"] = model.GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16)
    # a process each, and nothing here depends on it
    tracking.git_commit = trainer.git_commit = sweep.git_commit = sweep.protocol_commit = lambda: (
        None
    )
    (base / "text.txt").write_text(TEXT)
    process = get_context("fork").Process(target=_make_base, args=(base,))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert (base / "ledger/ledger.jsonl").is_file()
    assert (base / "killed/r/metrics.jsonl").is_file()


def _make_base(base: Path) -> None:
    from dataclasses import asdict

    from altgrad.training import trainer
    from altgrad.evidence.instrument import Bench, run_arm
    from altgrad.evidence.sweep import Sweep, read_matrix
    from altgrad.training.tracking import machine, versions

    from .matrices import MATRIX

    works(
        "train", "bf16_baseline", *settings(base), "--out", base / "whole", "--wandb", "off",
        "--json",
    )
    update, count = trainer.Learner.update, []

    def dies(learner, step, *rest):
        count.append(step)
        if step == 8: raise KeyboardInterrupt
        return update(learner, step, *rest)

    trainer.Learner.update = dies
    told(
        "train", "bf16_baseline", *settings(base), "--out", base / "killed", "--wandb", "off",
        "--json",
    )
    trainer.Learner.update = update
    record = json.loads((base / "killed/r/run.json").read_text())
    (base / "killed/r/run.json").write_text(json.dumps({**record, "exit_reason": "running"}))
    sweep = Sweep(
        read_matrix(MATRIX), base / "ledger",
        Bench(base / "checkpoints", {"tiny": f"path:{base}/text.txt"}),
    )
    with redirect_stderr(io.StringIO()): sweep.build()
    with sweep.ledger.writing() as append:
        for job in sweep.plan().jobs[:4]:
            append({
                "run": sweep.run_id(job.arm), **asdict(job.arm), **run_arm(job.arm, sweep.bench),
                "error": None, "machine": machine(), "versions": versions(), "stage": job.stage,
                "lr_edge": job.lr_edge, "tier": 0, "matrix": "test",
            })


# thousands of them


def cases(seed: int = 0, modules: Any = None) -> list[Case]:
    "All cases, in an order that the seed gives; of two with one name the later gets a number."
    from . import MODULES

    found, names = [], Counter()
    for module in modules or MODULES:
        for case in module.cases(random.Random(f"{module.__name__} {seed}")):
            names[case.group, case.name] += 1
            count = names[case.group, case.name]
            found.append(case if count == 1 else replace(case, name=f"{case.name} ({count})"))
    random.Random(seed).shuffle(found)
    return found


class TooLong(BaseException):
    "A case took more than its time; nothing that catches errors catches this."


def _too_long(*_): raise TooLong(f"more than {LIMIT} s of the processor, or {WAIT} s in all")


def _outcome(case: Case, base: Path) -> str:
    "Why a case does not hold; empty where it does."
    folder = Path(tempfile.mkdtemp(dir=base))
    for name in (signal.SIGALRM, signal.SIGPROF): signal.signal(name, _too_long)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    signal.alarm(WAIT)
    try:
        os.chdir(folder)
        case.check(Place(folder, base))
        return ""
    except BaseException as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return " ".join(
            f"{type(e).__name__}: {e} ({Path(where.filename).name}:{where.lineno})".split()
        )[:400]
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.chdir(base)
        shutil.rmtree(folder, ignore_errors=True)


def _work(found: list[Case], base: Path, pipe: Any) -> None:
    "A worker: runs the cases whose numbers come."
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    for number in iter(pipe.recv, None): pipe.send((number, _outcome(found[number], base)))


def run(found: list[Case], base: Path, workers: int = 1) -> Iterator[tuple[Case, str]]:
    """Each case with why it does not hold, as they come;
    a process that does not come back is killed, and its case has hung."""
    fork, waiting, busy = get_context("fork"), list(range(len(found)))[::-1], {}

    def begin() -> None:
        here, there = fork.Pipe()
        process = fork.Process(target=_work, args=(found, base, there), daemon=True)
        process.start()
        there.close()
        give(here, process)

    def give(pipe, process) -> None:
        number = waiting.pop() if waiting else None
        pipe.send(number)
        if number is not None: busy[pipe] = (process, number, time.monotonic())

    for _ in range(workers): begin()
    while busy:
        for pipe in wait(list(busy), timeout=1):
            process, number, _ = busy.pop(pipe)
            try: why = pipe.recv()[1]
            except EOFError:
                yield found[number], "the process died"
                begin()
                continue
            yield found[number], why
            give(pipe, process)
        for pipe, (process, number, began) in list(busy.items()):
            if time.monotonic() - began < 2 * WAIT: continue
            del busy[pipe]
            process.kill()
            yield found[number], "it hung, and was killed"
            begin()


def report(found: list[Case], failures: list[tuple[Case, str]]) -> str:
    "Counts of every group, and each failure."
    lines = [f"{'group':<14}{'cases':>7}{'controls':>10}{'failed':>8}"]
    for group in [*dict.fromkeys(c.group for c in sorted(found, key=lambda c: c.group)), ""]:
        here = [c for c in found if c.group == group or not group]
        controls = sum(c.right for c in here)
        failed = sum(c in here for c, _ in failures)
        lines.append(f"{group or 'all':<14}{len(here):>7}{controls:>10}{failed:>8}")
    return "\n".join([*lines, *(f"failed: {c.group} | {c.name} | {why}" for c, why in failures)])


def main(seed: int = 0, workers: int = os.cpu_count() or 1, every: int = 1, only: str = "") -> int:
    "Runs them all; 1 where one does not hold."
    found = [c for c in cases(seed)[::every] if not only or only in f"{c.group} | {c.name}"]
    failures = []
    with tempfile.TemporaryDirectory() as base:
        make_base(Path(base))
        for number, (case, why) in enumerate(run(found, Path(base), workers), 1):
            if why:
                failures.append((case, why))
                print(f"FAILED {case.group} | {case.name} | {why}", file=sys.stderr, flush=True)
            if number % 250 == 0:
                print(
                    f"{number} of {len(found)} cases, {len(failures)} failed", file=sys.stderr,
                    flush=True,
                )
    print(report(found, failures))
    return int(bool(failures))
