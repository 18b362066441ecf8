"""Runs `altgrad` as a program, each command in a process of its own, which a waiting process forks: it
has imported what a command imports, seconds of work, once.

All else is as from a shell: its arguments, environment, output and exit code are the command's own, and a
signal reaches it alone. Only what Python reads at its start is shared. Tests of the start itself, and those
that need more than one command at a time, start the program.
"""
import atexit
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ALTGRAD = Path(sys.executable).parent / "altgrad"
NUMBER = struct.Struct("q")  # what the waiting process answers: a pid, and then an exit code


def end(code: Any) -> None:
    "Ends this process as Python does at an exit."
    if isinstance(code, str): print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else code or 0)


def command(asked: dict[str, Any]) -> None:
    "Runs the program in this process, and ends it."
    import runpy
    import traceback

    files = [os.open(os.devnull, os.O_RDONLY), *(os.open(name, os.O_WRONLY) for name in asked["files"])]
    for fd, file in enumerate(files): os.dup2(file, fd)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = [str(ALTGRAD), *asked["args"]]
    try: runpy.run_path(str(ALTGRAD), run_name="__main__")
    except SystemExit as e: end(e.code)
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)


def serve() -> None:
    "Answers each line of JSON: the pid of its command, and when that ends its exit code."
    import matplotlib.pyplot  # noqa: F401
    import torch._dynamo  # noqa: F401
    import wandb  # noqa: F401

    import altgrad.cli
    import altgrad.training.trainer
    import altgrad.views.report
    import altgrad.views.watch  # noqa: F401

    answers = os.dup(1)
    os.dup2(2, 1)  # no module writes among the answers
    for line in sys.stdin:
        pid = os.fork()
        if not pid: command(json.loads(line))
        os.write(answers, NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        os.write(answers, NUMBER.pack(os.waitstatus_to_exitcode(status)))


class Program:
    "A command that runs, or has run; used as `subprocess.Popen` is."
    def __init__(self, server: subprocess.Popen, args: list[str], env: Mapping[str, str]):
        self.server, self.returncode = server, None
        self.files = [tempfile.NamedTemporaryFile("r+", encoding="utf-8") for _ in range(2)]
        asked = {"args": args, "env": dict(env), "folder": os.getcwd(), "files": [f.name for f in self.files]}
        server.stdin.write(f"{json.dumps(asked)}\n".encode())
        server.stdin.flush()
        self.pid = self._number(60.0)
        assert self.pid

    def _number(self, seconds: float) -> int | None:
        "The next answer, or none in time."
        if not select.select([self.server.stdout], [], [], seconds)[0]: return None
        answer = os.read(self.server.stdout.fileno(), NUMBER.size)
        if len(answer) < NUMBER.size: raise RuntimeError("the process that forks the program has ended")
        return NUMBER.unpack(answer)[0]

    def wait(self, timeout: float) -> int | None:
        "Its exit code; None where it still runs."
        if self.returncode is None: self.returncode = self._number(timeout)
        return self.returncode

    def poll(self) -> int | None: return self.wait(0.0)

    def send_signal(self, how: signal.Signals) -> None: os.kill(self.pid, how)

    def communicate(self, timeout: float) -> tuple[str, str]:
        "What it printed, when it has ended; one that does not end is killed."
        if self.wait(timeout) is None:
            self.send_signal(signal.SIGKILL)
            self.wait(10.0)
            raise subprocess.TimeoutExpired("altgrad", timeout)
        return self.files[0].read(), self.files[1].read()


class Preloaded:
    "Starts commands, one after the other."
    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def start(self, *args: Any, env: Mapping[str, str] = os.environ) -> Program:
        "A command that runs."
        return Program(self.server, list(map(str, args)), env)

    def run(self, *args: Any, env: Mapping[str, str] = os.environ, timeout: float = 120.0
            ) -> subprocess.CompletedProcess:
        "A command that has ended."
        program = self.start(*args, env=env)
        out, err = program.communicate(timeout)
        return subprocess.CompletedProcess(["altgrad", *args], program.returncode, out, err)

    def close(self) -> None:
        "Ends the waiting process."
        self.server.stdin.close()
        self.server.wait(10.0)


@cache
def preloaded() -> Preloaded:
    "The one of this process."
    made = Preloaded()
    atexit.register(made.close)
    return made


if __name__ == "__main__": serve()
