"""Processes that start in a moment: a server that has imported torch forks them.

`run` and `start` run `altgrad` so. All else is as from a shell: the entry point, arguments, environment,
output, exit code and signals are the command's own. Tests of the start itself start the program.
"""
import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ALTGRAD = str(Path(sys.executable).parent / "altgrad")
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload([
    "altgrad.cli", "altgrad.training.trainer", "altgrad.views.report", "altgrad.views.watch",
    "matplotlib.pyplot", "torch._dynamo", "wandb",
])


def _program(args: list[str], env: dict[str, str], folder: str, files: list[str]) -> None:
    "Runs the program in this process."
    for fd, name in enumerate(files, 1): os.dup2(os.open(name, os.O_WRONLY), fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [ALTGRAD, *args]
    try: runpy.run_path(ALTGRAD, run_name="__main__")
    finally: atexit._run_exitfuncs()  # multiprocessing ends a process without them


class Program:
    "A command that runs; used as `subprocess.Popen` is."
    def __init__(self, args: list[str], env: Mapping[str, str]):
        self.files = [tempfile.NamedTemporaryFile("r+", encoding="utf-8") for _ in range(2)]
        names = [file.name for file in self.files]
        self.process = FORKS.Process(target=_program, args=(args, dict(env), os.getcwd(), names))
        self.process.start()

    @property
    def returncode(self) -> int | None: return self.process.exitcode

    def poll(self) -> int | None: return self.returncode

    def send_signal(self, how: signal.Signals) -> None: os.kill(self.process.pid, how)

    def communicate(self, timeout: float) -> tuple[str, str]:
        "What it printed, when it has ended; one that does not end is killed."
        self.process.join(timeout)
        if self.returncode is None:
            self.process.kill()
            self.process.join()
            raise subprocess.TimeoutExpired("altgrad", timeout)
        out, err = (file.read() for file in self.files)
        return out, err


def start(*args: Any, env: Mapping[str, str] = os.environ) -> Program:
    "A command that runs."
    return Program(list(map(str, args)), env)


def run(*args: Any, env: Mapping[str, str] = os.environ, timeout: float = 120.0) -> subprocess.CompletedProcess:
    "A command that has ended."
    program = start(*args, env=env)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(["altgrad", *args], program.returncode, out, err)
