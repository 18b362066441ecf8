"""Nothing is lost: killed anywhere, on a full disk, with damaged files or in company, a run ends
bit for bit like one that nothing disturbed.

The processes are real and so is SIGKILL. A server that has imported torch forks them, which takes
milliseconds instead of seconds.
`make kills` runs the long form.
"""
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

import preloaded
from altgrad.basics import InputError
from altgrad.numbers.formats import EIGHT_BIT
from altgrad.training.tracking import RunFolder, read_wandb
from altgrad.watching.series import read_histograms, read_series
from preloaded import ALTGRAD, FORKS
from wait import has_content, until

pytestmark = pytest.mark.slow

SMALL = dict(
    format="E4M3", max_steps=9, batch_size=2, block_size=16, warmup_steps=2, eval_every=4,
    eval_windows=4, checkpoint_every=3, dropout=0.1, device="cpu",
)
# Half the blocks, for runs of which only the file operations and the state matter, not how long they take.
SMALLER = {**SMALL, "model": "two-blocks"}
# the last is of a log that holds the others
TIMES = ("tokens_per_s", "wall_clock_s", "metrics_sha256")


# what happens in a process


def die(): os.kill(os.getpid(), signal.SIGKILL)


def before_an_operation(folder: str, at: int) -> None:
    """Dies before the file operation number `at` under a folder:
    an open to write, a rename, a removal, a new folder."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        path = {"open": 0, "os.rename": 1, "os.remove": 0, "os.mkdir": 0}.get(event)
        if (
            path is None
            or not isinstance(args[path], (str, os.PathLike))
            or not str(args[path]).startswith(folder)
        ):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR): return
        seen += 1
        if seen == at: die()

    sys.addaudithook(hook)


def half_a_line(nth: int) -> None:
    "Dies in the middle of writing a row."
    from altgrad.training import tracking
    whole, count = tracking.MetricsLog.append, 0

    def append(log, row):
        nonlocal count
        count += 1
        if count == nth:
            log.file.write(tracking.json_line(row).encode()[:40])
            die()
        whole(log, row)

    tracking.MetricsLog.append = append


def half_a_file(nth: int) -> None:
    "Dies in the middle of writing a checkpoint."
    from altgrad.training import checkpoint
    whole, count = checkpoint.write_atomic, 0

    def write(path, data):
        nonlocal count
        count += str(path).endswith(".pt")
        if count == nth:
            whole(path, lambda file: (file.write(data[: len(data) // 2]), file.flush(), die()))
        whole(path, data)

    checkpoint.write_atomic = write


def in_a_call(name: str, nth: int) -> None:
    "Dies in a function of the trainer's module, or in a method as `Learner.update`."
    from altgrad.training import trainer
    owner, _, last = name.rpartition(".")
    place = getattr(trainer, owner) if owner else trainer
    whole, count = getattr(place, last), 0

    def call(*args, **kwargs):
        nonlocal count
        count += 1
        if count == nth: die()
        return whole(*args, **kwargs)

    setattr(place, last, call)


WOUNDS = {"files": before_an_operation, "line": half_a_line, "file": half_a_file, "call": in_a_call}


def life(
    config: dict, out: str, data: str, wound: tuple | None = None, limit: int | None = None,
    mirror: str = "off", said: str | None = None,
) -> None:
    "One process of a run: its exit code is 0, or 1 with one line in the file `said`."
    from altgrad.model.gpt import PRESETS
    from altgrad.training.data import load_corpus
    from altgrad.training.config import make_config
    from altgrad.training.trainer import Trainer

    torch.set_num_threads(1)
    PRESETS["two-blocks"] = replace(PRESETS["gpt-tiny"], n_layer=2)
    corpus = load_corpus(f"path:{data}/text.txt", cache=f"{data}/cache")
    if limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if wound: WOUNDS[wound[0]](*wound[1:])
    try:
        Trainer(make_config({"data": f"path:{data}/text.txt", **config}), out, corpus, mirror).run(
            progress=False
        )
    except InputError as e: Path(said).write_text(f"{type(e).__name__}: {e}"), os._exit(1)


def begin(config: dict, out: Path, data: Path, **more):
    process = FORKS.Process(
        target=life, args=(config, str(out), str(data)), kwargs=more, daemon=True
    )
    process.start()
    return process


def live(config: dict, out: Path, data: Path, **more) -> int:
    "The exit code of one life."
    process = begin(config, out, data, **more)
    process.join(120)
    return process.exitcode


# what a run leaves behind


def timeless(value):
    if isinstance(value, dict):
        return {
            k: timeless(v)
            for k, v in value.items()
            if k not in (*TIMES, "seconds", "continued_from_step", "git_commit")
        }
    return [timeless(v) for v in value] if isinstance(value, (list, tuple)) else value


def bits(value):
    """A checkpoint's content with the bytes of every tensor;
    timings are left out, and the hash of the log that holds some."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype), tuple(value.shape),
            value.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items() if k not in ("seconds", "log")}
    return [bits(v) for v in value] if isinstance(value, (list, tuple)) else value


def outcome(folder: Path) -> dict:
    "Everything a run has to say, to the last bit."
    run = RunFolder(folder)
    entries = [{k: v for k, v in e.items() if k != "sha256"} for e in run.checkpoints.entries()]
    states = {
        e["file"]: bits(torch.load(run.checkpoints.folder / e["file"], weights_only=True))
        for e in entries
    }
    assert not [p for p in folder.rglob("*") if p.name.endswith(".tmp")]
    assert {p.name for p in run.checkpoints.folder.glob("*.pt")} == set(states)
    return {
        "metrics": timeless(run.metrics()),
        "record": timeless(run.record()),
        "entries": entries,
        "states": states,
        "seconds": run.record()["results"]["wall_clock_s"],  # which no two runs share
    }


def assert_same(folder: Path, whole: dict) -> None:
    "Part by part, since a difference of whole outcomes would fill the screen."
    found = outcome(folder)
    found["record"]["name"] = whole["record"]["name"]
    assert [r["step"] for r in found["metrics"]] == list(range(1, len(whole["metrics"]) + 1)), (
        "a step is missing or doubled"
    )
    for part in ("metrics", "record", "entries"): assert found[part] == whole[part], part
    for file, state in whole["states"].items():
        for part in state: assert found["states"][file][part] == state[part], f"{file}: {part}"


@pytest.fixture(scope="module")
def data(small_copy): return small_copy


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    "The outcome of a run that nothing disturbed, by config."
    known, out = {}, tmp_path_factory.mktemp("whole")

    def get(**config):
        name = "-".join(map(str, config.values())) or "plain"
        if name not in known:
            assert live({**SMALL, **config, "name": name}, out, data) == 0
            known[name] = outcome(out / name)
        return known[name]

    return get


# killed


WOUNDED = [
    ("line", 1),
    ("line", 5),
    ("file", 1),
    ("file", 3),
    ("call", "evaluate", 1),
    ("call", "evaluate", 3),
    ("call", "Learner.update", 8),
    ("call", "RunRecord.write", 1),
    ("call", "RunRecord.write", 2),
    ("call", "run_results", 1),
]


@pytest.mark.parametrize("wound", WOUNDED, ids=str)
def test_killed_in_a_write_an_evaluation_or_an_update(data, tmp_path, whole, wound):
    config = {**SMALLER, "name": "cut"}
    assert live(config, tmp_path, data, wound=wound) == -signal.SIGKILL
    assert live(config, tmp_path, data) == 0
    assert_same(tmp_path / "cut", whole(model="two-blocks"))


def kill_at_every(step: int, config: dict, out: Path, data: Path, whole: dict) -> int:
    """Kills a run before each `step`-th of its file operations,
    and the run that goes on as well; how many kills."""
    kills = 0
    for at in range(1, 1000, step):
        name = f"at{at}"
        folder = str(out / name)
        code = live({**config, "name": name}, out, data, wound=("files", folder, at))
        if code == 0: return kills
        assert code == -signal.SIGKILL
        # soon after it has begun to go on
        kills += 1 + (
            live({**config, "name": name}, out, data, wound=("files", folder, 1 + at % 7)) != 0
        )
        assert live({**config, "name": name}, out, data) == 0
        assert_same(out / name, whole)
        shutil.rmtree(folder)
    raise AssertionError("never came through")


def test_killed_before_file_operations(data, tmp_path, whole):
    assert kill_at_every(9, {**SMALLER}, tmp_path, data, whole(model="two-blocks")) > 10


def kill_at_random(times: int, seed: int, config: dict, out: Path, data: Path, whole: dict) -> int:
    """Kills a run at random moments, again and again, until it comes through; how many kills.
    The first falls into the first half of the time that a run takes which nothing disturbs."""
    rng, kills, folder = random.Random(seed), 0, out / config["name"]
    wait = min(1.5, whole["seconds"] / 2)
    while True:
        process, end = begin(config, out, data), time.monotonic() + rng.uniform(0, wait)
        while process.exitcode is None and (time.monotonic() < end or kills >= times):
            time.sleep(0.001)
        process.kill()
        process.join()
        if process.exitcode == 0: break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills, "the run came through before it was killed"
    assert_same(folder, whole)
    return kills


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments(data, tmp_path, whole, seed):
    longer = dict(max_steps=30, eval_every=7, checkpoint_every=5)
    kill_at_random(4, seed, {**SMALL, **longer, "name": "cut"}, tmp_path, data, whole(**longer))


@pytest.mark.parametrize("number, name", list(enumerate(EIGHT_BIT)))
def test_every_format_with_stochastic_rounding(data, tmp_path, whole, number, name):
    arm = dict(
        format=name, storage="grid_stochastic", model="two-blocks",
        rule=("adamw", "grid_sgd", "stiffness_adamw", "riemannian_adamw")[number % 4],
    )
    config = {**SMALL, **arm, "name": "cut"}
    wound = [("line", 8), ("file", 2), ("call", "evaluate", 2), ("call", "Learner.update", 5)][
        number // 2
    ]
    assert live(config, tmp_path, data, wound=wound) == -signal.SIGKILL
    assert live(config, tmp_path, data) == 0
    assert_same(tmp_path / "cut", whole(**arm))


def test_the_loader_has_no_worker_to_lose():
    """A batch is a function of seed and step, computed where it is used:
    nothing runs ahead, so a kill has no queue to forget."""
    import altgrad.training.data
    import altgrad.training.trainer
    for module in (altgrad.training.data, altgrad.training.trainer):
        assert not {"DataLoader", "multiprocessing"} & set(
            Path(module.__file__).read_text().replace("(", " ").replace(".", " ").split()
        )


# a full disk


@pytest.mark.parametrize("limit, what", [(5_000_000, "step-00000006.pt"), (1_600, "metrics.jsonl")])
def test_a_disk_that_fills_up_takes_nothing_away(data, tmp_path, whole, limit, what):
    """A limit on the size of files stands in for the disk:
    for a checkpoint it is too small at once, for the log after some rows."""
    config, said = {**SMALL, "name": "cut"}, tmp_path / "said"
    assert live(config, tmp_path, data, wound=("call", "Learner.update", 5)) == -signal.SIGKILL
    run = RunFolder(tmp_path / "cut")
    before = run.checkpoints.entries()
    assert [e["step"] for e in before] == [3, 4]
    assert live(config, tmp_path, data, limit=limit, said=str(said)) == 1
    assert (
        what in said.read_text()
        and "\n" not in said.read_text()
        and said.read_text().startswith("WriteError: cannot write")
    ), said.read_text()
    assert run.checkpoints.entries() == before
    for e in before:
        assert sha256((run.checkpoints.folder / e["file"]).read_bytes()).hexdigest() == e["sha256"]
    assert live(config, tmp_path, data) == 0
    assert_same(tmp_path / "cut", whole())


SCRIPT = """
mount -t tmpfs -o size=24m none {disk} || exit 77
{altgrad} train {config} --out {disk} 2> {out}/first; echo $? > {out}/code
ls {disk}/cut/checkpoints > {out}/files
mount -o remount,size=200m {disk} && {altgrad} train {config} --out {disk} 2> {out}/second && cp -r {disk}/cut {out}/cut
"""


@pytest.mark.slow
def test_a_small_disk_that_is_really_full(data, tmp_path, whole):
    "A file system of 24 MB holds two checkpoints of 10 MB, and not the third beside them."
    (tmp_path / "disk").mkdir()
    (tmp_path / "cut.yaml").write_text(
        "".join(f"{k}: {v}\n" for k, v in {**SMALL, "data": f"path:{data}/text.txt"}.items())
    )
    script = SCRIPT.format(
        disk=tmp_path / "disk", altgrad=ALTGRAD, config=tmp_path / "cut.yaml", out=tmp_path
    )
    env = {**os.environ, "ALTGRAD_CACHE": f"{data}/cache", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except FileNotFoundError: pytest.skip("this system has no unshare")
    if not (tmp_path / "code").exists(): pytest.skip("this user may not mount a file system")
    said = (tmp_path / "first").read_text()
    assert (tmp_path / "code").read_text() == "1\n" and "Traceback" not in said
    assert said.splitlines()[-1].startswith("altgrad: cannot write"), said
    assert said.endswith(
        "No space left on device; the same command goes on from the last checkpoint\n"
    ), said
    assert (tmp_path / "files").read_text().split() == [
        "manifest.json", "step-00000003.pt", "step-00000004.pt"
    ]
    assert done.returncode == 0, done.stderr + (tmp_path / "second").read_text()
    assert_same(tmp_path / "cut", whole())


# company, damage, anomalies


def test_a_second_process_is_refused_in_one_line(data, tmp_path):
    first = begin({**SMALL, "name": "cut", "max_steps": 100_000}, tmp_path, data)
    until(lambda: has_content(tmp_path / "cut/metrics.jsonl"), first.is_alive)
    changes = {**SMALL, "name": "cut", "max_steps": 100_000, "data": f"path:{data}/text.txt"}
    args = [arg for key, value in changes.items() for arg in ("--set", f"{key}={value}")]
    env = {**os.environ, "ALTGRAD_CACHE": f"{data}/cache"}
    done = preloaded.run("train", "e4m3_fp8", *args, "--out", tmp_path, env=env, timeout=60)
    alive = first.exitcode is None
    first.kill()
    first.join()
    assert alive
    assert done.returncode == 2
    assert "is in use" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    assert not RunFolder(tmp_path / "cut").in_use()


FAILS = """
import os, signal, sys
import altgrad.training.trainer as T
from altgrad.model.parallel import ProcessLost
from altgrad.cli import main
update, path_text, failed = T.Learner.update, T.path_text, []
def fails(learner, step, *rest):
    if step == 3: failed.append(step); raise ProcessLost("no answer")
    return update(learner, step, *rest)
def interrupted(device):
    if failed and failed.pop(): os.kill(os.getpid(), signal.SIGTERM)
    return path_text(device)
T.Learner.update, T.path_text = fails, interrupted
sys.exit(main())
"""


def test_a_signal_while_a_failure_is_written_down(data, tmp_path):
    settings = [
        arg
        for key, value in {**SMALL, "name": "lost", "data": f"path:{data}/text.txt"}.items()
        for arg in ("--set", f"{key}={value}")
    ]
    env = {**os.environ, "ALTGRAD_CACHE": f"{data}/cache"}
    done = preloaded.run_code(FAILS, "train", "e4m3_fp8", *settings, "--out", tmp_path, env=env)
    record = RunFolder(tmp_path / "lost").record()
    assert done.returncode == 1 and "no answer; the same command goes on" in done.stderr, (
        done.stderr
    )
    assert record["exit_reason"] == "error: ProcessLost: no answer" and record["steps"] == 2


class Evil:
    def __init__(self, path): self.path = path
    def __reduce__(self): return Path.touch, (self.path,)


def test_a_checkpoint_never_runs_code(data, tmp_path):
    assert (
        live({**SMALL, "name": "cut"}, tmp_path, data, wound=("call", "Learner.update", 5))
        == -signal.SIGKILL
    )
    run, proof = RunFolder(tmp_path / "cut"), tmp_path / "ran"
    entry, _ = run.checkpoints.newest()
    torch.save({"step": 4, "extra": Evil(proof)}, run.checkpoints.folder / entry["file"])
    content = (run.checkpoints.folder / entry["file"]).read_bytes()
    run.checkpoints.manifest.write_text(
        json.dumps([{**entry, "sha256": sha256(content).hexdigest()}])
    )
    assert live({**SMALL, "name": "cut"}, tmp_path, data, said=str(tmp_path / "said")) == 1
    assert "holds more than tensors" in (tmp_path / "said").read_text() and not proof.exists()
    pickle.loads(pickle.dumps(Evil(proof)))
    assert proof.exists()  # the trap works


def test_damage_is_named_and_survived(data, tmp_path, whole):
    assert (
        live({**SMALL, "name": "cut"}, tmp_path, data, wound=("call", "Learner.update", 8))
        == -signal.SIGKILL
    )
    run = RunFolder(tmp_path / "cut")
    newest = run.checkpoints.folder / run.checkpoints.entries()[-1]["file"]
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with redirect_stderr(io.StringIO()) as said: assert run.checkpoints.newest()[0]["step"] == 4
    assert said.getvalue().count("\n") == 1
    assert (
        "step-00000006.pt is damaged (its SHA-256 differs): step-00000004.pt is next"
        in said.getvalue()
    )
    assert live({**SMALL, "name": "cut"}, tmp_path, data) == 0
    assert_same(tmp_path / "cut", whole())


def series_of(folder: Path) -> dict:
    "The measurements of every layer, as the files have them; memory and time are left out."
    import pyarrow.parquet as pq
    rows = [
        (kind, r["path"], r["step"], str(r[column]))
        for kind, column in (("values", "value"), ("histograms", "counts"))
        for part in folder.glob(f"series/{kind}-*.parquet")
        for r in pq.read_table(part).to_pylist()
    ]
    assert len({row[:3] for row in rows}) == len(rows), "a measurement is there twice"
    return {row[:3]: row[3] for row in rows}


MONITORED = dict(monitor_every=1)


@pytest.fixture(scope="module")
def cut_series(data, tmp_path_factory):
    """A monitored run that was killed after its seventh step,
    and the series of one that was left alone."""
    out = tmp_path_factory.mktemp("series")
    assert live({**SMALL, **MONITORED, "name": "whole"}, out, data) == 0
    assert (
        live({**SMALL, **MONITORED, "name": "cut"}, out, data, wound=("call", "Learner.update", 8))
        == -signal.SIGKILL
    )
    return out


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "delete all", "nothing"])
def test_damaged_series_are_measured_again(data, tmp_path, cut_series, damage):
    shutil.copytree(cut_series / "cut", tmp_path / "cut")
    part = sorted((tmp_path / "cut/series").glob("values-*.parquet"))[0]
    content = part.read_bytes()
    if damage == "flip": part.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    if damage == "cut": part.write_bytes(content[: len(content) // 2])
    if damage == "delete": part.unlink()
    if damage == "delete all": shutil.rmtree(tmp_path / "cut/series")
    if damage not in ("nothing", "delete all"):
        from altgrad.views.autopsy import autopsy
        with pytest.raises(InputError, match=part.name): autopsy(tmp_path / "cut")
    assert live({**SMALL, **MONITORED, "name": "cut"}, tmp_path, data) == 0
    assert series_of(tmp_path / "cut") == series_of(cut_series / "whole")
    again = (tmp_path / "cut/checkpoints").glob("*.aside")
    assert bool(list(again)) == (damage != "nothing")  # what was whole is not trained again


def test_a_manifest_cannot_name_a_file_outside(data, tmp_path):
    assert (
        live({**SMALL, "name": "cut"}, tmp_path, data, wound=("call", "Learner.update", 8))
        == -signal.SIGKILL
    )
    run, victim = RunFolder(tmp_path / "cut"), tmp_path / "victim.pt"
    victim.write_text("mine")
    entries = run.checkpoints.entries()
    run.checkpoints.manifest.write_text(
        json.dumps([*entries[:-1], {**entries[-1], "file": "../../victim.pt"}])
    )
    assert live({**SMALL, "name": "cut"}, tmp_path, data) == 0
    assert victim.read_text() == "mine" and not list(tmp_path.glob("*.aside"))


def test_an_anomaly_leaves_a_checkpoint_with_its_batches(data, tmp_path):
    from altgrad.training.data import get_batch, load_corpus
    assert live({**SMALL, "name": "wild", "lr": 1e30, "warmup_steps": 0}, tmp_path, data) == 0
    run = RunFolder(tmp_path / "wild")
    odd = [e for e in run.checkpoints.entries() if e["anomaly"]]
    step, row = odd[0]["step"], next(r for r in run.metrics() if r.get("events"))
    assert step == row["step"]
    assert row["events"][0]["kind"] == "nonfinite" == odd[0]["anomaly"]
    assert "nonfinite" in row
    kept = torch.load(run.checkpoints.folder / odd[0]["file"], weights_only=True)["extra"][
        "batches"
    ]
    corpus = load_corpus(f"path:{data}/text.txt", cache=f"{data}/cache")
    assert list(kept) == list(range(max(1, step - 3), step + 1))
    for s, [(x, y)] in kept.items():
        assert all(map(torch.equal, (x, y), get_batch(corpus.train, 2, 16, 42, s)))


# the mirror


def test_the_mirror_of_a_killed_run_has_every_step(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {**SMALL, "name": "cut", "max_steps": 30}
    assert live(config, tmp_path, data, wound=("line", 20), mirror="offline") == -signal.SIGKILL
    assert live(config, tmp_path, data, mirror="offline") == 0
    run, end = RunFolder(tmp_path / "cut"), time.monotonic() + 20
    # wandb's process may be behind
    while not any(30 in part["rows"] for part in read_wandb(run.path)) and time.monotonic() < end:
        time.sleep(0.1)
    parts = read_wandb(run.path)
    assert len({part["id"] for part in parts}) == 1 and {part["name"] for part in parts} == {"cut"}
    rows = {r["step"]: r for r in run.metrics()}
    found = {}
    for part in parts:
        assert list(part["rows"]) == sorted(part["rows"])
        for step, row in part["rows"].items():
            assert found.setdefault(step, row["loss"]) == row["loss"] == rows[step]["loss"]
            assert row["_step"] == step
    assert sorted(found) == list(range(1, 31))


def test_the_mirror_has_the_layers_that_were_asked_for(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {**SMALL, "name": "layers", "max_steps": 12, "format": "E5M2", "monitor_every": 1,
              "wandb_layers": "gradients, histograms"}
    assert live(config, tmp_path, data, mirror="offline") == 0
    run, end = RunFolder(tmp_path / "layers"), time.monotonic() + 20
    while not any(12 in part["rows"] for part in read_wandb(run.path)) and time.monotonic() < end:
        time.sleep(0.1)
    rows, series = read_wandb(run.path)[0]["rows"], read_series(run.path / "series")
    asked = {path for path in series if path.startswith("gradients/") and "/all/" not in path}
    assert {path.split("/")[2] for path in asked} >= {"l2", "snr", "dead_neurons"}
    for path in asked:
        steps, values = series[path]
        assert [np.float32(rows[step][path]) for step in steps] == list(values)
    histograms = read_histograms(run.path / "series")
    for path, (steps, counts) in histograms.items():
        assert [rows[step][path]["values"] for step in steps] == counts.tolist()
        assert rows[steps[0]][path]["bins"] == list(range(257))
    layers = {path for row in rows.values() for path in row if path.count("/") > 1} - set(histograms)
    assert {path for path in layers if "/all/" not in path} == asked


# its readers


def test_watch_follows_a_run_to_its_end(data, tmp_path):
    from rich.console import Console

    from altgrad.views.watch import watch
    process = begin({**SMALL, "name": "seen", "max_steps": 30}, tmp_path, data)
    until(lambda: (tmp_path / "seen/run.json").is_file(), process.is_alive)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    watch(tmp_path / "seen", console=console, every=0.05)
    process.join()
    text = console.file.getvalue()
    assert process.exitcode == 0
    assert "step 30 of 30" in text
    assert "finished" in text.split("step 30 of 30")[-2]
    assert "killed" not in text


def test_watch_and_autopsy_of_a_killed_run(data, tmp_path, capsys):
    from altgrad.cli import main
    assert (
        live({**SMALL, "name": "cut"}, tmp_path, data, wound=("call", "Learner.update", 8))
        == -signal.SIGKILL
    )
    assert main(["watch", str(tmp_path / "cut"), "--once"]) == 0
    assert "killed (its record says running" in capsys.readouterr().out
    assert main(["autopsy", str(tmp_path / "cut")]) == 0
    said = capsys.readouterr().out
    assert "killed" in said
    assert "7 of 9 steps" in said
    assert (tmp_path / "cut/autopsy.png").read_bytes()[:4] == b"\x89PNG"
    assert live({**SMALL, "name": "cut"}, tmp_path, data) == 0  # and reading it has changed nothing
