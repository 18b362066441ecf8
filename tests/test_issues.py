"""Who agrees with whom: the script of the verdicts, and the drafts of issues, of which each
reproducer runs, is short, and shows the fault that its text states, in the version it names."""
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from marks import all_slow_but

FOLDER = Path(__file__).resolve().parent.parent / "nbs/studies/issues"
DRAFTS = sorted(FOLDER.glob("*.md"))


def parts(path: Path) -> tuple[str, str, str, str]:
    "Package, version, reproducer and what it prints."
    text = path.read_text(encoding="utf-8")
    package, version = re.search(r"Shown with: (\S+) (\S+)\.\n", text).groups()
    return package, version, *(
        re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL).group(1) for kind in ("python", "text")
    )


def test_there_are_drafts():
    assert len(DRAFTS) >= 3


@pytest.mark.parametrize("path", DRAFTS, ids=lambda p: p.stem)
def test_a_draft_says_to_whom_it_goes_and_is_short(path):
    text = path.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\nTo: [\w.-]+/[\w.-]+\. ", text)
    assert len(parts(path)[2].splitlines()) <= 5


@pytest.mark.parametrize("path", all_slow_but(2, DRAFTS), ids=lambda p: p.stem)
def test_a_reproducer_shows_the_fault(path):
    package, version, code, said = parts(path)
    try: installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError: pytest.skip(f"{package} is not installed")
    if installed.partition("+")[0] != version: pytest.skip(f"{package} {installed}, not {version}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith(said), done.stderr[-500:]


SCRIPT = FOLDER.parent / "benchmarks/referee_agreement.py"
STORED = FOLDER.parents[1] / "results/referee_agreement.json"


def test_the_script_gives_the_stored_verdicts(tmp_path):
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    if np.__version__ != stored["versions"]["numpy"]: pytest.skip("another numpy")
    out = tmp_path / "found.json"
    subprocess.run([sys.executable, SCRIPT, "--only", "numpy", "--out", out], check=True,
                   capture_output=True, timeout=120)
    untimed = lambda rows: [{k: v for k, v in r.items() if k != "seconds"} for r in rows
                            if r["implementation"] == "numpy"]
    found = untimed(json.loads(out.read_text(encoding="utf-8"))["rows"])
    assert found and found == untimed(stored["rows"])


def test_what_is_not_installed_is_recorded_and_a_planted_fault_is_found(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = runpy.run_path(str(SCRIPT))
    case = script["Case"]
    truncated = case("truncated", "E5M2", lambda x: (x.half().view(torch.int16) >> 8).byte())
    script["TABLE"].update({
        "no_such_package_1": ("no_such_package_1", script["of_numpy"]),
        "pytest": ("pytest", lambda: [truncated])})
    rows, found, absent = script["judged"](["no_such_package_1", "pytest"])
    assert absent["no_such_package_1"] == "not installed"
    assert set(found) == {"pytest"} and len(rows) == 1
    assert not rows[0]["conforms"]
    assert "another rounding mode" in [f["name"] for f in rows[0]["faults"]]


def test_every_stored_verdict_is_whole():
    for r in json.loads(STORED.read_text(encoding="utf-8"))["rows"]:
        if "refused" in r: continue
        assert r["conforms"] == (not r["faults"]) and r["inputs"] > 1000, r
        # chance has faults without a mismatch
        assert not r["conforms"] or r["mismatches"] == 0, r
