"""`make gpu` without a GPU: every piece runs, small, on a CPU; the budget, results, failures and
hanging processes are what they should be; the page shows what is stored."""
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "nbs/studies/benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_optim
import bench_step
import gpu
import gpu_parts
from altgrad.numbers.kernels import set_path

PLAN = yaml.safe_load((BENCHMARKS / "gpu.yaml").read_text())
PIECES = [f"{part}_{name}" for part, about in PLAN.items() for name in about.get("pieces", {})]
INTERPRETED = [name for name in PIECES if name in ("tests_triton", "quantize_triton", "quantize_blocks")]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    "What a piece changes in its process, as it was."
    for name in ("CASES", "LAYERS"): monkeypatch.setattr(bench_optim, name, getattr(bench_optim, name))
    path = set_path("auto")
    yield
    set_path(path)


def sound(piece: str, rows: list[dict]) -> None:
    "Checks the rows of a piece, and that none failed but what is not here."
    wanted = PLAN[piece.split("_")[0]].get("wanted", {})
    assert rows and all(row.get("wants") in {None, *wanted} for row in rows)
    for row in rows:
        if row["value"] is not None: assert row["value"] >= 0
        else: assert any(word in row["problem"] for word in ("not installed", "needs", "no GPU")), row
    json.dumps(rows, allow_nan=False)


def in_process(options, kind, model, batch, names, path="auto"):
    "A case of bench_step without a process of its own."
    return bench_step.case(Namespace(**vars(options), case=(kind, model, batch, ",".join(names))))


@pytest.mark.slow
@pytest.mark.parametrize("piece", [name for name in PIECES if name not in INTERPRETED])
def test_a_piece_runs_small_on_a_cpu(piece, monkeypatch):
    if piece != "step_small": monkeypatch.setattr(bench_step, "run_case", in_process)
    rows = {row["what"]: row for row in getattr(gpu_parts, piece)("cpu")}
    sound(piece, list(rows.values()))
    held = {row["wants"]: row["value"] for row in rows.values() if "wants" in row}
    if piece.startswith("tests"): assert set(held.values()) == {0}
    if piece == "quantize_ours": assert set(held) == set(PLAN["quantize"]["wanted"])
    if piece == "replicas_runs": assert held["runs"] > 0


@pytest.mark.slow
def test_kernels_of_triton_run_under_its_interpreter(tmp_path):
    pytest.importorskip("triton")
    code = ("import sys; from pathlib import Path; import gpu_parts\n"
            "for name in sys.argv[1:]: gpu_parts.main(name, 'cpu', Path(name))")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, BENCHMARKS)))}
    done = subprocess.run([sys.executable, "-c", code, *INTERPRETED], env=env, cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for piece in INTERPRETED: sound(piece, json.loads((tmp_path / piece).read_text()))
    found = json.loads((tmp_path / "tests_triton").read_text())
    assert found[0]["value"] == 0 and found[0]["also"].startswith("2 formats")


def test_a_bit_that_differs_is_counted(monkeypatch):
    monkeypatch.setattr(gpu_parts, "fake_quantize", lambda x, *args, **more: torch.full_like(x, 0.1))
    *_, last = gpu_parts.tests_eager("cpu")
    assert last["value"] > 10 and "E4M3 fake_quantize" in last["wrong"][0]


def test_tests_that_fail_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_parts, "TESTS", tmp_path)
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.cuda\n"
        "def test_device(): assert os.environ['ALTGRAD_TEST_DEVICE'] == 'cpu'\n"
        "def test_wrong(): assert 0\ndef test_absent(): pytest.skip('no')\n")
    passed, failed = gpu_parts.tests_suite("cpu")
    assert (passed["value"], passed["also"]) == (1, "1 skipped")
    assert (failed["value"], failed["also"]) == (1, "test_wrong")
    (tmp_path / "test_some.py").write_text("import pytest\npytestmark = pytest.mark.cuda\n")
    with pytest.raises(RuntimeError, match="no test ran"): list(gpu_parts.tests_suite("cpu"))


def test_an_error_of_cuda_ends_a_piece_and_others_do_not():
    row = gpu_parts.problem("this", "ms", ValueError("two\nlines"))
    assert row["value"] is None and row["problem"] == "ValueError: two lines"
    with pytest.raises(RuntimeError): gpu_parts.problem("this", "ms", RuntimeError("CUDA error: misaligned"))


SMALL = {
    "one": {"pieces": {"a": {"cpu": "1s"}, "b": {"cpu": "2s"}}, "wanted": {"it": {"most": 1}}},
    "two": {"missing": "nobody wrote it"},
    "three": {"pieces": {"c": {"cpu": "500s"}, "d": {"cpu": "3s"}}},
}


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    "Runs the small plan with pieces that are not run; returns those that were tried, and the lines."
    monkeypatch.setattr(gpu, "facts_of", lambda device: facts)
    facts = {"device": "GPU X-1", "git_commit": "1" * 40, "code": "c", "versions": {"torch": "2"}}

    def run(budget=100.0, failing=(), commit="1" * 40, code="c", out=tmp_path / "gpu"):
        tried = []

        def attempt(piece, device, facts, limit):
            tried.append((piece.name, limit))
            error = {"error": "it broke\nin two lines"} if piece.name in failing else {}
            return {"when": "now", "seconds": 1.5, "rows": [gpu_parts.row("x", 2, "ms", "it")], **error}

        monkeypatch.setattr(gpu, "attempt", attempt)
        facts["code"], facts["git_commit"] = code, commit
        failures = gpu.work(SMALL, "cpu", budget, out)
        return [name for name, _ in tried], failures, capsys.readouterr().out, dict(tried)

    return run


def stored(folder: Path, part: str) -> dict: return json.loads((folder / f"gpu/{part}.gpu-x-1.json").read_text())


def test_what_fits_runs_in_order_and_what_does_not_is_named(go, tmp_path):
    tried, failures, lines, limits = go()
    assert (tried, failures) == (["a", "b", "d"], 0)
    assert "three, c: skipped, its 8.3 min do not fit into the " in lines
    assert "two: not yet written: nobody wrote it" in lines and not (tmp_path / "gpu/two.gpu-x-1.json").exists()
    assert lines.index("one, a: about 1 s") < lines.index("one, b: about 2 s")
    found = stored(tmp_path, "one")
    assert found["device"] == "GPU X-1" and set(found["pieces"]) == {"a", "b"}
    assert found["pieces"]["a"]["git_commit"] == "1" * 40 and found["pieces"]["a"]["when"] == "now"
    assert limits["b"] <= 3 * 2 + gpu.GRACE


def test_what_has_a_result_is_kept_until_the_code_changes(go):
    go()
    tried, _, lines, _ = go()
    assert tried == [] and lines.count("kept, it has a result of this code") == 3
    assert go(commit="2" * 40)[0] == []  # that of the results, for one
    assert go(code="d")[0] == ["a", "b", "d"]


def test_a_failure_is_kept_and_stops_nothing_and_is_tried_again_last(go, tmp_path):
    tried, failures, lines, _ = go(failing=("a",))
    assert (tried, failures) == (["a", "b", "d"], 1) and "FAILED: it broke;" in lines
    found = stored(tmp_path, "one")["pieces"]["a"]
    assert found["error"] == "it broke\nin two lines" and found["rows"]
    assert go(budget=700.0)[0] == ["c", "a"]


def test_a_piece_that_the_budgets_end_cut_short_leaves_the_result_of_before(go, tmp_path, monkeypatch):
    go()
    clock = itertools.count(0, 60)  # the second look is past the budget of the first
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    tried, failures, lines, _ = go(budget=100.0, failing=("a",), code="d")
    assert (tried, failures) == (["a"], 1) and "    not stored: the budget is spent" in lines
    assert stored(tmp_path, "one")["pieces"]["a"]["code"] == "c"


def test_pieces_that_time_nothing_run_at_once(tmp_path, monkeypatch):
    plan = {"one": {"at_once": True, "pieces": {"a": {"cpu": "9s"}, "b": {"cpu": "9s"}}},
            "two": {"pieces": {"c": {"cpu": "9s"}, "d": {"cpu": "9s"}}}}
    meeting, alone = threading.Barrier(2), threading.Lock()

    def attempt(piece, *args):
        if piece.part == "one": meeting.wait(60)  # broken unless both are here
        else:
            assert alone.acquire(blocking=False)
            time.sleep(0.1)
            alone.release()
        return {"when": "now", "seconds": 1.0, "rows": [gpu_parts.row("x", 2, "ms")]}

    monkeypatch.setattr(gpu, "attempt", attempt)
    monkeypatch.setattr(gpu, "facts_of", lambda device: {"device": "X", "git_commit": None, "code": "c",
                                                         "versions": {"torch": "2"}})
    assert gpu.work(plan, "cpu", 100.0, tmp_path) == 0
    assert {len(json.loads((tmp_path / f"{part}.x.json").read_text())["pieces"]) for part in plan} == {2}


def test_an_interruption_ends_all_pieces_that_run_at_once(tmp_path, monkeypatch):
    def attempt(piece, device, facts, limit):
        code = "pass" if piece.name == "a" else "import time; time.sleep(99)"
        return {"error": gpu.limited([sys.executable, "-c", code], limit, tmp_path / piece.name)}

    monkeypatch.setattr(gpu, "attempt", attempt)
    pieces = [gpu.Piece("one", name, 9.0, tmp_path / "one.json") for name in "ab"]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        for piece, _ in gpu.results(pieces, "cpu", {}, 99.0):
            assert piece.name == "a"
            raise KeyboardInterrupt
    gc.collect()
    assert not gpu.UNDER_WAY and time.monotonic() - began < 50


def test_a_piece_that_hangs_is_ended_with_all_it_started(tmp_path):
    child = f"import time; open({str(tmp_path / 'child')!r}, 'w').write(str(__import__('os').getpid())); time.sleep(99)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(99)"
    began = time.monotonic()
    error = gpu.limited([sys.executable, "-c", code], 5, tmp_path / "log")
    assert error == "ended after 5 s, its limit" and time.monotonic() - began < 60
    pid = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z": break
        time.sleep(0.1)
    else: pytest.fail("the child lives on")


def test_an_error_is_told_with_its_last_lines(tmp_path):
    code = "print('before'); raise SystemExit('what broke')"
    error = gpu.limited([sys.executable, "-c", code], 60, tmp_path / "log")
    assert error.splitlines()[0] == "its process ended with 1" and "what broke" in error
    assert gpu.limited([sys.executable, "-c", "pass"], 60, tmp_path / "log") is None


@pytest.mark.slow
def test_the_whole_way_for_one_piece(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"step": {"pieces": {"products": {"cpu": "5s"}, "absent": {"cpu": "1s"}}}}))
    monkeypatch.setattr(gpu, "PLAN", plan)
    argv = ["--device", "cpu", "--budget", "10m", "--out", str(tmp_path / "out")]
    assert gpu.main(argv) == 1
    (path,) = (tmp_path / "out").iterdir()
    found = json.loads(path.read_text())["pieces"]
    assert len(found["products"]["rows"]) == 3 and "error" not in found["products"]
    assert "KeyError: 'step_absent'" in found["absent"]["error"]
    for piece in found.values(): assert {"device", "driver", "versions", "git_commit", "when", "seconds"} <= set(piece)
    capsys.readouterr()
    gpu.main(argv)
    assert "step, products: kept" in capsys.readouterr().out


@pytest.mark.parametrize("argv, why", [
    (["--budget", "abc"], "a time is a number above 0 with its unit, not 'abc'"),
    (["--budget", ""], "allowed: 90s, 40m, 1.5h"), (["--budget", "0m"], "above 0"), (["--budget", "-1m"], "above 0"),
    (["--device", "tpu"], "unknown device 'tpu'"), (["--device", ""], "allowed: cuda, cpu"),
    (["--device", "cuda"], "device cuda: "),
])
def test_bad_input_is_one_line_and_writes_nothing(argv, why, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {"--device": "cpu", "--budget": "1m", **dict([argv])}
    assert gpu.main([f"{k}={v}" for k, v in given.items()] + ["--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert why in told.err and told.err.count("\n") == 1 and not told.out
    assert not (tmp_path / "out").exists()


def test_a_damaged_result_is_one_line(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"step": {"pieces": {"products": {"cpu": "5s"}}}}))
    monkeypatch.setattr(gpu, "PLAN", plan)
    monkeypatch.setattr(gpu, "facts_of", lambda device: {
        "device": "X", "git_commit": None, "code": "c", "versions": {"torch": "2"}})
    (tmp_path / "step.x.json").write_text("{")
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/step.x.json is damaged: remove it\n"


def test_every_piece_of_the_plan_can_run():
    for part, about in PLAN.items():
        assert about["title"] and ("missing" in about) != ("pieces" in about)
        for name, times in about.get("pieces", {}).items():
            assert callable(getattr(gpu_parts, f"{part}_{name}"))
            assert set(times) == {"cuda", "cpu"} and all(map(gpu.seconds_of, times.values()))
    expected = [sum(gpu.seconds_of(t[d]) for p in PLAN.values() for t in p.get("pieces", {}).values())
                for d in ("cuda", "cpu")]
    assert expected[0] <= 40 * 60 and expected[1] <= 3 * 60


def page(folder: Path, monkeypatch) -> list[str]:
    "The texts that the page shows, where its stored results lie in a folder."
    (folder / "studies").mkdir()
    (folder / "studies/benchmarks").symlink_to(BENCHMARKS)
    monkeypatch.chdir(folder / "studies")
    cells = json.loads((ROOT / "nbs/studies/gpu.ipynb").read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    code = "\n".join(source for source in sources if "eval: false" not in source)
    names: dict = {}
    exec(code, names)
    return [names["parts_table"](), names["results_text"]()]


def test_the_page_says_that_nothing_was_run(tmp_path, monkeypatch):
    table, found = page(tmp_path, monkeypatch)
    assert found.startswith("**Nothing has been run on a GPU yet.**")
    assert "rounding: at most 1.1" in table and "runs: at least 4000" in table


def test_the_page_shows_results_the_moment_they_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "facts_of", lambda device: {
        "device": "NVIDIA X", "driver": "1.2", "git_commit": "1" * 40, "code": "c",
        "versions": {"torch": "2", "cuda": "13", "triton": None, "torchao": "0.1"}})
    rows = [gpu_parts.row("ours", 1.08, "times clone", "rounding", also="9 GB/s"),
            gpu_parts.row("counts", 1.2, "times clone", "counts"),
            gpu_parts.row("theirs", None, "times clone", problem="not installed")]
    result = {"when": "2026-01-01", "seconds": 3, "rows": rows}
    hung = {"blocks": {"error": "it hung\nmore"}}
    monkeypatch.setattr(gpu, "attempt", lambda piece, *args: result | hung.get(piece.name, {}))
    gpu.work({"quantize": PLAN["quantize"]}, "cuda", 2400, tmp_path / "results/gpu")
    _, found = page(tmp_path, monkeypatch)
    assert "| ours | 1.08 times clone | at most 1.1: met | 9 GB/s |" in found
    assert "| counts | 1.2 times clone | at most 1.15: **missed** |  |" in found
    assert "| theirs | not installed | - | |" in found and found.count("**Failed**: it hung") == 1
    assert "NVIDIA X, driver 1.2, torch 2, cuda 13, triton absent, torchao 0.1, commit 111111111111" in found
    assert "Nothing has been run" not in found and "Not run: it has no result yet" in found
