"""The sweep as a program: killed, continued, torn, refused; and rows that do not depend on who
computed them."""
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from altgrad.basics import InputError
from altgrad.training.tracking import git_commit
from altgrad.evidence.instrument import Arm, arm_values, identity, run_id
from altgrad.evidence.stability import StabilitySearch
from altgrad.evidence.sweep import (
    Job, Ledger, Loss, Sweep, Workers, _label, _results, best_arms, check_row, compact, find_row, plan, read_matrix,
    protocol_commit, read_rows, replay,
)
from altgrad.cli import main
from altgrad.views.watch import _outcomes
from tiny import HEAD, TASK, TEXT, small_bench
from wait import has_content, until

ALTGRAD = [str(Path(sys.executable).parent / "altgrad")]
MATRIX = HEAD + """\
  - {format: E4M3, storage: [fp32, grid_stochastic], power: [0, 1], lr: 0.01}
  - {format: E7M0, storage: fp32, power: 0, lr: 1.0e+30}
tune: {seeds: [1000], points: 3, most: 3}
confirm: {seeds: [0]}
task: {steps: 12, batch_size: 4, warmup: 2, chunks: 4, windows: 2, every: 4}
"""
NOISE = ("seconds", "finished", "stage", "lr_edge", "tier", "matrix", "commit", "protocol")


@pytest.fixture(scope="module")
def here(small_copy):
    "A folder with a text, a cache, a checkpoint and a matrix."
    (small_copy / "matrix.yaml").write_text(MATRIX)
    with pytest.MonkeyPatch.context() as m:
        m.setenv("ALTGRAD_CACHE", str(small_copy / "cache"))
        yield small_copy


def command(folder: Path, out: str, *more: str) -> list[str]:
    return [
        *ALTGRAD, "sweep", str(folder / "matrix.yaml"), "--out", str(folder / out), "--corpus",
        f"tiny=path:{folder / 'text.txt'}", "--checkpoints", str(folder / "checkpoints"), *more,
    ]


def rows_of(folder: Path, out: str) -> dict[str, dict]:
    rows = Ledger(folder / out).rows()
    assert len({row["run"] for row in rows}) == len(rows), "a run was made twice"
    return {row["run"]: {k: v for k, v in row.items() if k not in NOISE} for row in rows}


@pytest.fixture(scope="module")
def whole(here):
    "The rows of a sweep by one worker that nothing disturbed."
    assert Sweep(read_matrix(MATRIX), here / "one", small_bench(here)).run(1, progress=False) == 0
    return rows_of(here, "one")


def test_two_workers_make_the_rows_of_one(here, whole):
    assert len(whole) == 5 * 3 + 5
    assert Sweep(read_matrix(MATRIX), here / "two", small_bench(here)).run(2, progress=False) == 0
    assert rows_of(here, "two") == whole


@pytest.mark.slow
def test_killed_sweep_goes_on(here, whole, capsys):
    ledger = here / "killed/ledger.jsonl"
    process = subprocess.Popen(command(here, "killed"), stderr=subprocess.PIPE, text=True)
    while not (ledger.is_file() and ledger.read_bytes().count(b"\n") >= 4):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = ledger.read_bytes()
    with open(ledger, "ab") as file: file.write(b'{"run": "torn, as by a po')
    done = subprocess.run(command(here, "killed"), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    after = ledger.read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1]) and b"torn" not in after
    assert rows_of(here, "killed") == whole
    assert len(read_rows(here / "killed/ledger.parquet")) == len(whole)
    capsys.readouterr()
    assert main(command(here, "killed", "--dry-run")[1:]) == 0
    assert "test: 5 arms, 20 runs in the ledger; stage done: 0 runs" in capsys.readouterr().out


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(here):
    process = subprocess.Popen(command(here, "orphans"), stderr=subprocess.DEVNULL)
    until(lambda: has_content(here / "orphans/ledger.jsonl"), lambda: process.poll() is None)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.is_file(): pytest.skip("this system does not list a process's children")
    found = children.read_text().split()
    process.kill()
    process.wait()
    gone = lambda pid: (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    )
    for _ in range(100):
        if all(map(gone, found)): break
        time.sleep(0.05)
    assert found and all(map(gone, found))


def die(arm: Arm) -> dict:
    "Stands in for a run: one seed raises, one kills its worker."
    if arm.seed == 3: os._exit(1)
    return {"error": "ValueError: no"} if arm.seed == 2 else {"error": None, "val_loss": 1.0}


@pytest.mark.slow
def test_a_dying_worker_costs_one_run(here):
    jobs = [Job(Arm(seed=s), "tune") for s in range(6)]
    with Workers(2, (here, {}, TASK, None)) as workers:
        got = {job.arm.seed: result["error"] for job, result in _results(workers, jobs, die)}
    assert got == {
        0: None, 1: None, 2: "ValueError: no", 3: "the worker process died", 4: None, 5: None
    }


def test_a_failed_run_is_recorded_and_tried_again(here, monkeypatch):
    folder = here / "failing"
    sweep = Sweep(read_matrix(MATRIX), folder, small_bench(here))
    # cannot be sent to a worker: every run fails
    monkeypatch.setattr("altgrad.evidence.sweep.work_alone", lambda arm: 1 / 0)
    failed = sweep.run(1, progress=False)
    rows = Ledger(folder).rows()
    assert failed == len(rows) > 0
    assert all(row["error"] and row["storage"] in ("fp32", "grid_stochastic") for row in rows)
    again = Sweep(read_matrix(MATRIX), folder, small_bench(here))
    assert again.rows == {} and len(again.plan().jobs) == 15
    monkeypatch.undo()
    assert again.run(2, progress=False) == 0
    compact(Ledger(folder).rows(), folder / "x.parquet")
    assert all(row["error"] is None for row in read_rows(folder / "x.parquet"))


def test_an_arm_is_not_confirmed_before_its_failed_tuning_runs_are_made_again(here, whole, monkeypatch):
    "The runs at the best rate of the others fail once: no arm is ever confirmed at the second best."
    folder, matrix = here / "once", read_matrix(MATRIX)
    rates = {}
    for row in whole.values():
        if row["split"] == "confirm": rates.setdefault((row["format"], row["storage"], row["power"]), row["lr"])
    out = []  # the arms whose best run fails
    def results(workers, jobs, work):
        for job in jobs:
            a = job.arm
            fails = a.split == "tune" and a.format == "E4M3" and a.lr == rates[a.format, a.storage, a.power]
            if fails and len(out) < 2: out.append((a.storage, a.power))
            result = {"error": "MemoryError: "} if fails and (a.storage, a.power) in out else None
            yield job, result or {"error": None, **whole[sweep.run_id(a)]}
    monkeypatch.setattr("altgrad.evidence.sweep._results", results)
    sweep = Sweep(matrix, folder, small_bench(here))
    assert sweep.run(1, progress=False) == len(out) == 2
    first = [row for row in Ledger(folder).rows() if row["stage"] == "confirm"]
    assert {(r["storage"], r["power"]) for r in first if r["format"] == "E4M3"}.isdisjoint(out) and len(first) == 3
    monkeypatch.undo()
    assert Sweep(matrix, folder, small_bench(here)).run(1, progress=False) == 0
    good = {row["run"]: row["lr"] for row in Ledger(folder).rows() if not row["error"]}
    assert good == {run: row["lr"] for run, row in whole.items()}


def test_a_sweep_judges_what_its_ledger_has(here, whole, monkeypatch):
    "Runs at the lower rates end in no number: the rows in memory are those that a later sweep reads."
    def results(workers, jobs, work):
        for job in jobs:
            row = {"error": None, **whole[sweep.run_id(job.arm)]}
            yield job, {**row, "raw_loss": math.nan, "travel": math.inf} if job.arm.lr < 0.01 else row
    monkeypatch.setattr("altgrad.evidence.sweep._results", results)
    sweep = Sweep(read_matrix(MATRIX), here / "no_number", small_bench(here))
    assert sweep.run(1, progress=False) == 0
    later = Sweep(read_matrix(MATRIX), here / "no_number", small_bench(here))
    assert later.rows == sweep.rows and later.plan() == sweep.plan()
    assert any(row["travel"] is None for row in sweep.rows.values())


def test_an_arm_with_two_rates_is_two_among_the_best():
    row = {"stage": "confirm", "format": "E4M3", "storage": "fp32", "rule": "adamw", "lr": 4e-3, "val_loss": 2.0}
    rows = [{**row, "run": f"{k}"} for k in range(4)]
    assert best_arms(rows) == [("E4M3 fp32 adamw", 2.0, 4)]
    other = [{**row, "run": f"other {k}", "lr": 2e-3, "val_loss": 3.0} for k in range(2)]
    assert best_arms(rows + other) == [("E4M3 fp32 adamw lr=0.004", 2.0, 4), ("E4M3 fp32 adamw lr=0.002", 3.0, 2)]


def test_arms_that_differ_are_not_averaged_nor_called_the_same():
    usual = dict(asdict(Arm(rule="stiffness_sgd", corpus="eurlex")), task={"steps": 200}, stage="confirm")
    others = [{"power": 1.0}, {"moments": "dynamic8"}, {"corpus": "stdlib"}, {"checkpoint": "scratch-0.1m-0"},
              {"task": {"steps": 300}}, {"floor_octaves": 4.0}, {"rule": "mine.py:R@0123456789ab", "power": 2.0}]
    for other in others:
        rows = [{**usual, "run": "a", "val_loss": 2.0}, {**usual, **other, "run": "b", "val_loss": 3.0}]
        found = best_arms(rows)
        assert [(mean, runs) for _, mean, runs in found] == [(2.0, 1), (3.0, 1)] and found[0][0] != found[1][0]
        table = _outcomes(rows)
        assert table.row_count == 2 and len({*table.columns[2].cells}) == 2, other
        arms = [replace(Arm(**arm_values(row)), corpus="eurlex") for row in rows]  # a matrix has one text
        assert len({_label(arm) for arm in arms}) == len({*arms})
    assert _label(Arm()).startswith("E4M3 grid_stochastic stiffness_adamw p=0 lr")
    plain = {**usual, "rule": "adamw", "run": "a", "val_loss": 2.0}
    assert best_arms([plain]) == [("E4M3 grid_stochastic adamw R=8", 2.0, 1)]


def test_replay(here, whole, capsys):
    row = find_row(Ledger(here / "one").rows(), next(iter(whole)))
    agrees, text = replay(row, small_bench(here))
    assert agrees and "bit for bit" in text
    row["val_loss"] += 1e-9
    assert not replay({**row, "commit": git_commit()}, small_bench(here))[0]
    agrees, text = replay({**row, "machine": {"cpu": "another"}}, small_bench(here))
    assert agrees and "another CPU" in text
    (here / "other.txt").write_text((here / "text.txt").read_text().replace("times", "plus"))
    other = small_bench(here, text="other.txt")
    with pytest.raises(InputError, match="another text"): replay(row, other)
    code = main(["replay", row["run"], "--ledger", str(here / "one"), *command(here, "one")[5:]])
    assert code == 0 and "bit for bit" in capsys.readouterr().out


def test_a_row_is_made_again_with_as_many_threads_as_its_run_had(here, whole):
    "So many are no other CPU: a loss that is off by less than the tolerance is refused."
    row = {**find_row(Ledger(here / "one").rows(), next(iter(whole))), "commit": git_commit()}
    assert row["machine"]["threads"] == 1
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        agrees, said = replay(row, small_bench(here))
        assert agrees and "bit for bit" in said
        agrees, said = replay({**row, "val_loss": row["val_loss"] + 0.009}, small_bench(here))
        assert not agrees and "on the same kind of CPU" in said
        assert torch.get_num_threads() == 2
        for wrong in (0, "1", 10**6):
            with pytest.raises(InputError, match="machine.threads"):
                replay({**row, "machine": {**row["machine"], "threads": wrong}}, small_bench(here))
    finally: torch.set_num_threads(before)


@pytest.mark.parametrize("key, value, words", [
    ("task", {"stepps": 1}, "did you mean steps"), ("task", {"steps": 0}, "steps"), ("rule", "none", "unknown rule"),
])
def test_a_row_that_no_run_wrote_is_not_replayed(here, whole, key, value, words):
    row = find_row(Ledger(here / "one").rows(), next(iter(whole)))
    with pytest.raises(InputError, match=words): replay({**row, key: value}, small_bench(here))


@pytest.mark.parametrize("key, value", [("corpus_sha", 7), ("code", []), ("raw_loss", "x"), ("machine", 7)])
def test_a_value_that_no_run_wrote_is_damage(key, value):
    row = {"run": "a", "val_loss": 2.5, key: value}
    with pytest.raises(InputError, match=f"{key} must be a"):
        check_row(row, "ledger.jsonl is damaged in line 1")


@pytest.mark.parametrize("key, value, words", [
    ("val_loss", -3.0, "at least 0"), ("lr", -1.0, "at least 0"), ("seed", -4, "at least 0"),
    ("seconds", -1, "at least 0"),
    ("format", "E9M9", "unknown format"), ("storage", "grid_nearst", "did you mean grid_nearest"),
    ("rule", "adam", "unknown rule"), ("split", "train", "unknown split"),
    ("error", "it failed", "an error and a val_loss"),
])
def test_a_value_that_no_run_can_have_is_damage(tmp_path, key, value, words):
    row = {"run": "a", "val_loss": 2.5, "power": -1.0}
    check_row(row, "")
    (tmp_path / "ledger.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, key: value}) + "\n")
    with pytest.raises(InputError, match=f"damaged in line 2: .*{words}"): Ledger(tmp_path).rows()


def test_lines_that_end_otherwise_are_not_passed_over(tmp_path):
    lines = [json.dumps({"run": name, "val_loss": 2.5}) for name in "ab"]
    def ledger(end):
        (tmp_path / "ledger.jsonl").write_bytes("".join(line + end for line in lines).encode())
        return Ledger(tmp_path).rows()
    assert len(ledger("\n")) == len(ledger("\r\n")) == 2
    with pytest.raises(InputError, match="end with a newline"): ledger("\r")


def test_a_flipped_bit_of_a_stored_ledger_is_found(tmp_path):
    "Wherever it lies in the pages; what follows them has no checksum, and is read or refused."
    rows = [{"run": f"{n:04}", "val_loss": n / 7, "curve": [n / 3, n / 9]} for n in range(300)]
    compact(rows, tmp_path / "good.parquet")
    data = (tmp_path / "good.parquet").read_bytes()
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # where the footer begins
    for at in range(100, end, 211):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        (tmp_path / "bad.parquet").write_bytes(bad)
        try: found = read_rows(tmp_path / "bad.parquet")
        except InputError: continue
        assert found == read_rows(tmp_path / "good.parquet"), at  # a statistic that nothing reads


def test_a_link_to_itself_is_no_ledger(tmp_path):
    (tmp_path / "ledger.jsonl").symlink_to(tmp_path / "ledger.jsonl")
    with pytest.raises(InputError, match="is not a file"): Ledger(tmp_path).rows()


def test_rows_name_the_last_change_of_the_protocol():
    root = Path(__file__).resolve().parent.parent
    def git(*args): return subprocess.run(["git", "-C", root, *args], capture_output=True, text=True).stdout.split()
    if not git("rev-parse", "HEAD"): pytest.skip("not a checkout")
    last, = git("rev-list", "-1", "HEAD", "nbs/studies/protocol.ipynb")
    changed = bool(git("diff", "--name-only", "HEAD", "--", "nbs/studies/protocol.ipynb"))
    assert protocol_commit() == last + "+" * changed


def test_identity_is_stable_and_knows_the_text(here):
    arm = Arm(checkpoint="tiny-0", corpus="tiny")
    facts = {
        **identity(arm, small_bench(here)), "checkpoint_sha": "0" * 64, "corpus_sha": "1" * 64,
        "instrument": 1,
    }
    # changes with the code; the rest is what the rows of the first studies are named by
    assert facts.pop("code") == small_bench(here).code
    assert run_id(facts) == run_id(dict(reversed(facts.items()))) == "99660a5393bb3d5e"
    (here / "third.txt").write_text((here / "text.txt").read_text() + "x")
    other = small_bench(here, text="third.txt")
    assert run_id(identity(arm, small_bench(here))) != run_id(identity(arm, other))
    assert run_id(identity(arm, small_bench(here))) == run_id(
        identity(Arm(checkpoint="tiny-0", corpus="tiny", power=0, lr=4e-3), small_bench(here))
    )


@pytest.mark.parametrize(
    "changes",
    [
        (("tier: 0", "tier: x"), "tier"),
        (("E4M3", "E9M9"), "unknown format"),
        (("tiny-0", "huge-0"), "unknown checkpoint"),
        (("corpus: tiny", "corpus: moon"), "no text for the label"),
        (("name:", "nam:"), "unknown key"),
        (("seeds: [1000]", f"seeds: {10**30}"), "tune seeds"),
        (("seeds: [0]", f"seeds: {10**30}"), "confirm seeds"),
        (("power: 0,", f"power: {10**30},"), "power"),
        (("power: 0,", "rule: {a: 1},"), "rule must be text"),
        (("points: 3", "points: [3, 5]"), "points must be one whole number"),
        (("most: 3", "most: [3, 5]"), "most must be one whole number"),
        (("tier: 0", "tier: [0, 1]"), "tier must be one whole number"),
        (("{format: E4M3,", "{format: [E4M3, e4m3],"), "one arm twice"),
        (("power: 0,", "rule: adamw, floor_octaves: 4,"), "adamw has no floor_octaves"),
        (("power: 0,", "exclude: {rule: adamw},"), "matches no arm"),
        (("power: 0,", "exclude: {rul: adamw},"), "did you mean rule"),
        (("power: 0,", "exclude: {lr: 1.0e+30},"), "unknown key in exclude"),
        (("tune:", "extend_power: {step: 0.5}\ntune:"), "needs a value for 'limit'"),
        (("tune:", "extend_power: {limit: 2}\ntune:"), "needs a value for 'step'"),
        (("tune:", "extend_power: {step: 0, limit: 2}\ntune:"), "step must be above 0"),
        (("tune:", "extend_power: {step: 0.5, limit: 0.5}\ntune:"), "limit must be at least 1"),
        (("power: [0, 1]", "power: [-1, 1]"), ("tune:", "extend_power: {step: 1, limit: 1}\ntune:"),
         "limit must be at least 2"),
        (("power: 0,", "power: 0, exclude: {},"), "must name an axis"),
        (("name: test", "name: a/b"), "name must be that of a file"),
        (("[tiny-0]", "[tiny-0, tiny-00]"), "the checkpoint 'tiny-00' is named tiny-0"),
        (("[tiny-0]", "[tiny-0, tiny-\u0660]"), "is named tiny-0"),
        (("power: 0,", "power: 0, exclude: {power: 0},"), "leaves no arm"),
        (("power: [0, 1],", "power: [0, 1], exclude: [{power: 0}, {power: 1}],"), "leaves no arm"),
    ],
)
def test_bad_matrix_is_one_line(here, capsys, changes):
    *changes, words = changes
    text = MATRIX
    for old, new in changes: text = text.replace(old, new)
    (here / "bad.yaml").write_text(text)
    code = main(["sweep", str(here / "bad.yaml"), *command(here, "bad")[3:]])
    said = capsys.readouterr()
    assert code == 2 and said.err.count("\n") == 1 and words in said.err and not said.out


def test_numbers_may_be_written_as_yaml_does_not_know_them():
    text = MATRIX.replace("0.01", "1e-2").replace("[0, 1]", "[0, 1e0]").replace("1.0e+30", "1e30")
    text = text.replace("steps: 12", "eps: 1e-8, steps: 12")
    assert read_matrix(text) == read_matrix(MATRIX)
    with pytest.raises(InputError, match="lr must be a finite number, not 'much'"):
        read_matrix(MATRIX.replace("0.01", "much"))


def test_a_checkpoint_of_another_text_or_shape_is_refused_in_one_line(here, tmp_path, capsys):
    (tmp_path / "other.txt").write_text(TEXT.replace("times", "plus"))
    mine = {"--checkpoints": tmp_path / "checkpoints", "--corpus": f"tiny=path:{here / 'text.txt'}"}
    command = ["sweep", here / "matrix.yaml", "--out", tmp_path / "out", "--dry-run"]
    def said(**changes):
        code = main([*map(str, command), *map(str, itertools.chain.from_iterable({**mine, **changes}.items()))])
        return code, capsys.readouterr().err
    assert said()[0] == 0
    other = {"--corpus": f"tiny=path:{tmp_path / 'other.txt'}"}
    assert said(**other)[0] == 2 and "was pretrained on another text than path:" in said(**other)[1]
    (tmp_path / "checkpoints/tiny-0.text").unlink()  # one that does not say its text is taken as it is
    assert said(**other)[0] == 0
    file = tmp_path / "checkpoints/tiny-0.pt"
    state = torch.load(file)
    for wrong in ([1, 2], {"w": torch.ones(2)}, {**state, "w": 1}, {k: v[:1] for k, v in state.items()}):
        torch.save(wrong, file)
        code, told = said()
        assert code == 2 and told.count("\n") == 1 and "tiny-0.pt holds no model of its recipe" in told
    assert not (tmp_path / "out").exists()


def test_what_another_process_adds_before_the_lock_is_not_made_again(here, whole):
    late, early = (Sweep(read_matrix(MATRIX), here / "raced", small_bench(here)) for _ in range(2))
    assert early.run(1, progress=False) == 0
    assert late.run(1, progress=False) == 0
    assert rows_of(here, "raced") == whole


def test_one_arm_is_searched_once(here):
    arms = [Arm(format=name, lr=0.01, corpus="tiny") for name in ("E4M3", "e4m3")]
    search = StabilitySearch(arms, here / "once", small_bench(here), ("tiny-0",), (1,))
    assert len(search.plan().jobs) == 1


def test_a_name_that_looks_like_json_is_a_name(here, whole, tmp_path):
    named = [{**row, "matrix": "{draft} one"} for row in whole.values()]
    compact(named, tmp_path / "x.parquet")
    back = read_rows(tmp_path / "x.parquet")
    assert {row["matrix"] for row in back} == {"{draft} one"} and all(isinstance(r["task"], dict) for r in back)


def test_a_label_has_one_text(here, capsys):
    again = ["--corpus", f"tiny=path:{here / 'text.txt'}"]
    for words in (command(here, "twice")[1:], ["replay", "ab", "--ledger", str(here), *again],
                  ["max-lr", "E4M3", "--out", str(here / "twice"), *again]):
        assert main([*words, *again]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "--corpus tiny is given 2 times" in said
    assert not (here / "twice").exists()


def test_an_exclusion_knows_the_defaults():
    "What an entry leaves out is what `Arm` says."
    def arms(exclude):
        text = MATRIX.replace("power: [0, 1], lr", f"power: [0, 1], exclude: {exclude}, lr")
        return [(a.format, a.storage, a.power) for a, _ in read_matrix(text).cells]
    every = [("E4M3", s, p) for s in ("fp32", "grid_stochastic") for p in (0, 1)] + [("E7M0", "fp32", 0)]
    assert arms("{rule: stiffness_adamw, power: 1}") == [arm for arm in every if arm[2] == 0]
    assert arms("{moments: float32, storage: fp32}") == every[2:]
    assert arms("[{power: 1.0, storage: fp32}, {power: 0, storage: fp32}]") == every[2:]


def test_powers_are_extended_only_where_a_rule_reads_one():
    text = MATRIX.replace(", power: [0, 1]", ", rule: adamw").replace(", power: 0", ", rule: adamw")
    assert len(read_matrix(text).cells) == 3
    with pytest.raises(InputError, match="no arm has one"):
        read_matrix(text + "extend_power: {step: 0.5, limit: 2}\n")


def test_a_second_writer_is_refused(here, capsys):
    with Ledger(here / "locked").writing():
        assert main(command(here, "locked")[1:]) == 2
    assert "another sweep" in capsys.readouterr().err


def test_a_file_system_without_locks_takes_a_ledger(tmp_path, monkeypatch):
    import errno
    import fcntl
    def flock(file, how): raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", flock)
    with Ledger(tmp_path).writing() as append: append({"run": "a", "val_loss": 1.0})
    assert [row["run"] for row in Ledger(tmp_path).rows()] == ["a"]


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit of a file's size here")
def test_a_disk_that_fills_up_is_one_line_and_keeps_the_rows_before(tmp_path):
    "A limit of the file's size stands in for the disk, in the middle of the second row."
    code = """
import resource, signal, sys
from altgrad.evidence import sweep
from altgrad.basics import WriteError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (45, 45))
try:
    with sweep.Ledger(sys.argv[1]).writing() as append:
        for name in "abc": append({"run": name, "val_loss": 1.0})
except WriteError as e: print(e)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith(f"cannot write {tmp_path / 'ledger.jsonl'}: "), done.stderr
    assert [row["run"] for row in Ledger(tmp_path).rows()] == ["a"]
    with Ledger(tmp_path).writing() as append: append({"run": "b", "val_loss": 1.0})
    assert [row["run"] for row in Ledger(tmp_path).rows()] == ["a", "b"]


def test_stored_matrices_can_be_read():
    for path in sorted((Path(__file__).parent.parent / "nbs/studies/matrices").glob("*.yaml")):
        matrix = read_matrix(path.read_text())
        assert plan(matrix, lambda arm: Loss(1.0, abs(math.log(arm.lr)))).stage == "done", path.name


def test_a_folder_whose_name_is_not_utf8_takes_a_ledger_and_gives_it_back(tmp_path):
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    rows = [{"run": "a", "val_loss": 1.5, "task": {"steps": 1}, "curve": [1.0, 0.5]}]
    compact(rows, odd / "ledger.parquet")
    assert [p.name for p in odd.iterdir()] == ["ledger.parquet"]
    assert read_rows(odd) == rows


FAULTS = """
import ctypes, resource, torch
from altgrad.evidence.sweep import start_bench
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50): torch.ones(2**18) + 1  # 1 MB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
start_bench(("checkpoints",))
faults()
print(faults() if hasattr(ctypes.CDLL(None), "mallopt") else 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of others is not told")
def test_a_worker_keeps_the_memory_that_it_frees():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256  # pages of one of the fifty: the others are not new
