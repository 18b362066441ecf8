"""Processes that start in a moment: a server that has imported torch forks them.

`run` and `start` run `altgrad` so, `run_python` a program, `run_code` one that is given as text, and
`torchrun` one in several processes. All else is as from a shell: the entry point, arguments, environment,
output, exit code and signals are the command's own. Tests of the start and of the end of an interpreter
start the program itself. `IN_A_MOMENT` forks the workers of sweeps.
"""
import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

ALTGRAD = str(Path(sys.executable).parent / "altgrad")
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload([
    "altgrad.cli", "altgrad.evidence.sweep", "altgrad.training.trainer", "altgrad.views.report",
    "altgrad.views.watch", "matplotlib.pyplot", "torch._dynamo", "torch.distributed.run", "wandb",
])
Command = Callable[[list[str]], None]  # what a process does with its arguments


class Told(ForkServerProcess):
    "A forked process with the environment of the moment in which it was made."
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.told = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.told)
        super().run()


class _InAMoment(ForkServerContext):
    Process = Told


IN_A_MOMENT = _InAMoment()


def by_python(args: list[str]) -> None:
    "Does what `python FILE ...` does."
    sys.argv = args
    sys.path.insert(0, os.path.dirname(os.path.abspath(args[0])))
    runpy.run_path(args[0], run_name="__main__")


def by_code(args: list[str]) -> None:
    "Does what `python -c CODE ...` does."
    sys.argv = ["-c", *args[1:]]
    sys.path.insert(0, "")
    exec(compile(args[0], "<string>", "exec"), {"__name__": "__main__"})


def by_torchrun(args: list[str]) -> None:
    "Does what `torchrun --standalone --nproc-per-node N FILE ...` does, its processes forked."
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", args[0], "--run-path", "--start-method", "fork", *args[1:]])


def _program(command: Command, args: list[str], env: dict[str, str], folder: str, files: list[str]) -> None:
    "Runs a program in this process."
    for fd, name in enumerate(files, 1): os.dup2(os.open(name, os.O_WRONLY), fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    try: command(args)
    finally: atexit._run_exitfuncs()  # multiprocessing ends a process without them


class Program:
    "A command that runs; used as `subprocess.Popen` is."
    def __init__(self, command: Command, args: list[str], env: Mapping[str, str], cwd: str | None = None):
        self.files = [tempfile.NamedTemporaryFile("r+", encoding="utf-8") for _ in range(2)]
        names = [file.name for file in self.files]
        given = (command, args, dict(env), str(cwd or os.getcwd()), names)
        self.process = FORKS.Process(target=_program, args=given)
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


def _ended(program: Program, args: tuple, timeout: float) -> subprocess.CompletedProcess:
    "A program that has ended."
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(list(args), program.returncode, out, err)


def start(*args: Any, env: Mapping[str, str] = os.environ) -> Program:
    "A command that runs."
    return Program(by_python, [ALTGRAD, *map(str, args)], env)


def run(*args: Any, env: Mapping[str, str] = os.environ, timeout: float = 120.0) -> subprocess.CompletedProcess:
    "A command that has ended."
    return _ended(start(*args, env=env), ("altgrad", *args), timeout)


def run_python(*args: Any, env: Mapping[str, str] = os.environ, cwd: Any = None,
               timeout: float = 300.0) -> subprocess.CompletedProcess:
    "A program of Python that has ended: its file and its arguments."
    return _ended(Program(by_python, list(map(str, args)), env, cwd), args, timeout)


def run_code(code: str, *args: Any, env: Mapping[str, str] = os.environ,
             timeout: float = 120.0) -> subprocess.CompletedProcess:
    "A program of Python that has ended: its text and its arguments."
    return _ended(Program(by_code, [code, *map(str, args)], env), ("-c", *args), timeout)


def torchrun(processes: int, *args: Any, env: Mapping[str, str] = os.environ, cwd: Any = None,
             timeout: float = 300.0) -> subprocess.CompletedProcess:
    "A program in so many processes that has ended: its file and its arguments."
    return _ended(Program(by_torchrun, [str(processes), *map(str, args)], env, cwd), args, timeout)
