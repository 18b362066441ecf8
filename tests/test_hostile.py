"""A tenth of the hostile cases; `make hostile` runs all of them.

They run in forked processes of their own, a hang is killed, and each case says by itself what must
come of it.
"""
import subprocess
import sys
from pathlib import Path

import preloaded

ROOT = Path(__file__).resolve().parent.parent


def hostile(*args: str) -> subprocess.CompletedProcess:
    return preloaded.run_python(ROOT / ".ci/hostile.py", *args, timeout=1200)


def test_a_tenth_of_the_hostile_cases():
    done = hostile("--every", "10", "--workers", "1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = {
        line.split()[0]: [int(n) for n in line.split()[1:4]]
        for line in done.stdout.splitlines()[1:]
        if len(line.split()) == 4
    }
    assert (
        len(counts) == 12
        and counts["all"][0] >= 250
        and counts["all"][1] >= 20
        and counts["all"][2] == 0
    ), counts


def test_there_are_enough_of_them_and_the_seed_gives_them():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from hostile import core; a, b, c = "
        "core.cases(0), core.cases(0), core.cases(1);"
        "names = lambda found: [(x.group, x.name) for x in found]; assert names(a) == names(b) != "
        "names(c) and sorted(names(a)) != [];"
        "print(len(a), sum(x.right for x in a))"
    )
    done = preloaded.run_code(code, ROOT / "tests", timeout=600)
    assert done.returncode == 0, done.stderr
    total, controls = map(int, done.stdout.split())
    assert total >= 2500 and controls >= total / 10


def test_a_case_that_does_not_hold_is_reported(tmp_path):
    """What the harness would say of a traceback, a hang, a death and a wrong answer:
    each is a failure, and the rest goes on."""
    code = """if True:
        import os, sys, time
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from hostile import core
        from hostile.core import Case
        core.LIMIT, core.WAIT = 1, 3
        def wrong(place): raise KeyError("x")
        def hangs(place):
            while True: time.sleep(1)
        def deaf(place):
            while True:
                try: time.sleep(60)
                except BaseException: pass
        def dies(place): os._exit(3)
        def accepts(place): core.refused(int, "3")
        def right(place): pass
        found = [Case("g", f.__name__, f) for f in (wrong, hangs, deaf, dies, accepts, right)]
        for case, why in core.run(found, Path(sys.argv[2]), 1): print(case.name, why, sep="|")
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "tests"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = dict(line.split("|") for line in done.stdout.splitlines())
    assert done.returncode == 0 and said.keys() == {
        "wrong", "hangs", "deaf", "dies", "accepts", "right"
    }, done.stderr
    words = {
        "wrong": "KeyError", "hangs": "more than 1 s", "deaf": "hung", "dies": "died",
        "accepts": "accepted",
    }
    assert all(word in said[name] for name, word in words.items()) and not said["right"], said
