"""The benchmarks: each says what it measures, and where its result goes is looked at before anything
is timed."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "nbs/studies/benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_stall
import bench_step
import stored


def test_each_benchmark_says_what_it_measures_and_how_long_and_can_be_quick():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    about = re.search(r"^ABOUT := (.*)$", makefile, re.M)[1]
    for path in sorted(BENCHMARKS.glob("bench_*.py")):
        said = subprocess.run([sys.executable, "-c", about, path], capture_output=True, text=True).stdout
        assert re.search(r"About \d+ minutes? on two cores\.$", said), path.name
        source = path.read_text(encoding="utf-8")
        assert '"--rounds"' in source and "git_commit()" not in source, path.name
        assert "type=result" in source or f'add_out(parser, "{path.stem}.json")' in source, path.name


@pytest.mark.parametrize("file, problem", [
    ("", "cannot be written; allowed: a file in a folder that can"), ("absent/a.json", "cannot be written"),
    ("damaged.json", "is damaged: remove it"), ("list.json", "is damaged"),
])
def test_a_result_that_cannot_be_stored_is_refused_before_anything_is_timed(
    file, problem, tmp_path, monkeypatch, capsys
):
    (tmp_path / "damaged.json").write_text('{"cpu": ')
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.setattr(sys, "argv", ["bench_stall.py", "--out", str(tmp_path / file)])
    monkeypatch.setattr(bench_stall, "measure", None)
    with pytest.raises(SystemExit) as e: bench_stall.main()
    assert e.value.code == 2 and problem in capsys.readouterr().err.splitlines()[-1]


def test_a_result_joins_those_of_other_devices(tmp_path):
    file = stored.result(str(tmp_path / "a.json"))
    for device, value in (("cpu", 1), ("cuda", 2), ("cpu", 3)): stored.add(file, device, {"value": value})
    assert stored.read(file) == {"cpu": {"value": 3}, "cuda": {"value": 2}}


def test_the_products_of_a_step_are_of_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(bench_step, "fast_bfloat16", lambda device: device.type == "cuda")
    assert [bench_step.products_of(device) for device in ("cpu", "cuda")] == ["float32", "bfloat16"]
