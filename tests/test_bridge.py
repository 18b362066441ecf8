"""The bridge between two studies: its ends are what those made, and its claims are judged as they are said."""
import math
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from altgrad.basics import InputError
from altgrad.evidence.instrument import Bench, build_checkpoint, run_arm
from altgrad.training.experiment import find_config
from altgrad.training.trainer import lr_at

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "nbs/studies/experiments"))

import bridge

TASK = replace(bridge.SMALL.task, steps=5, batch_size=2, warmup=2, every=2, chunks=2, windows=2)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    "A bench of seconds, with first weights in a folder."
    folder = tmp_path_factory.mktemp("bridge")
    text = folder / "acts.txt"
    text.write_text("Article 1. The Commission shall adopt delegated acts.\n" * 4000)
    bench = Bench(folder / "checkpoints", {"eurlex": f"path:{text}"}, TASK, folder / "cache")
    build_checkpoint(bench, f"scratch-0.4m-{bridge.SEEDS[0]}")
    return bench


@pytest.mark.parametrize("arm", bridge.ARMS)
def test_one_end_is_the_study_of_sizes(bench, arm):
    seed = bridge.SEEDS[0]
    plan = bridge.planned(bridge.SETTINGS["sizes"], arm, seed)
    assert bridge.make_run(("sizes", arm, seed), bench)["val_loss"] == run_arm(plan, bench)["val_loss"]


def test_the_other_end_is_the_run_of_ten_million():
    c, width = find_config("ten_million/bf16_baseline"), 128
    setting = bridge.SETTINGS["all"]
    model = bridge.first_model(setting, 0)
    assert (model.config.n_layer, model.config.block_size) == (6, c.block_size)
    assert model.config.n_embd == width and model.config.n_embd // model.config.n_head == 16
    assert 0.019 < model.blocks[0].attn.qkv.weight.std() < 0.021  # 49,152 draws: 1 % is three sigmas
    for arm, factor in {"master": 1, "stochastic": 1, "S^-1": 2}.items():
        assert bridge.rates(setting, arm) == pytest.approx((factor * c.lr * 3, c.lr * 3), rel=1e-12)  # 384 = 3 x 128
        run = bridge.planned(setting, arm, 10)
        assert run.lr * run.weight_decay == pytest.approx(c.weight_decay * c.lr * 3, rel=1e-12)  # float64
    for step in (1, 50, 120, 600, 1200):
        like = replace(c, max_steps=1200, warmup_steps=120)
        # float64: the share and the rate are the same product in another order
        assert bridge.share(setting, step, bridge.SMALL.task) == pytest.approx(lr_at(step, like) / c.lr, rel=1e-12)


def test_a_change_changes_one_thing():
    first, last = bridge.SETTINGS["sizes"], bridge.SETTINGS["all"]
    fields = set(bridge.Setting.__dataclass_fields__)
    def apart(a, b): return {f for f in fields if getattr(a, f) != getattr(b, f)}
    assert apart(first, last) == fields
    for name, change in bridge.CHANGES.items():
        assert apart(bridge.SETTINGS[f"with {name}"], first) == set(change)
        assert apart(bridge.SETTINGS[f"all but {name}"], last) == set(change)


def test_gradients_are_clipped_and_weights_decay(bench, monkeypatch):
    norms = []
    clip = nn.utils.clip_grad_norm_
    def seen(parameters, limit):
        norm = clip(parameters, limit)
        norms.append((float(norm), float(torch.stack([p.grad.norm() for p in parameters]).norm()), limit))
        return norm
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", seen)
    bridge.make_run(("with loop", "master", bridge.SEEDS[0]), bench)
    assert len(norms) == TASK.steps
    for before, after, limit in norms:
        assert after == pytest.approx(min(before, limit), rel=1e-5)  # sums of float32: some hundred ulps at most
    bridge.make_run(("sizes", "master", bridge.SEEDS[0]), bench)
    assert len(norms) == TASK.steps  # no clipping there


def test_runs_go_on_and_are_stored_in_order(tmp_path, monkeypatch):
    def made(run, bench=None):
        name, arm, seed = run
        return {"run": bridge.run_id(run), "setting": name, "arm": arm, "seed": seed, "val_loss": 1.0,
                "seconds": 1.0, "lr": 1.0, "task": {}, "checkpoint": "scratch-0.4m-10"}
    class AtOnce:
        def __init__(self, *a): ...
        def __enter__(self): return self
        def __exit__(self, *a): ...
        def submit(self, f, run):
            future = Future()
            future.set_result(made(run))
            return future
    monkeypatch.setattr(bridge, "ProcessPoolExecutor", AtOnce)
    monkeypatch.setattr(bridge, "bench_of", lambda: type("B", (), {"corpus": lambda self, name: None})())
    path = tmp_path / "bridge.jsonl"
    bridge.make_runs(tmp_path, ["all"], 1, path)
    bridge.store(tmp_path, path)
    bridge.make_runs(tmp_path / "other", ["sizes", "all"], 1, path)
    bridge.store(tmp_path / "other", path)
    ids = [row["run"] for row in bridge.stored(path)]
    assert ids == [bridge.run_id(run) for run in bridge.every_run(["sizes", "all"])]
    assert len((tmp_path / "other/ledger.jsonl").read_text().splitlines()) == len(ids) // 2
    with pytest.raises(InputError, match="unknown setting"): bridge.every_run(["sizes", "none"])


def losses(cost, gain):
    "Losses of all settings: a cost and a gain for each, and a little for each seed."
    return {name: {"master": {s: 1 + s / 10 for s in bridge.SEEDS},
                   "stochastic": {s: 1 + s / 10 + cost(name) + s / 1e4 for s in bridge.SEEDS},
                   "S^-1": {s: 1 + s / 10 + cost(name) - gain(name) + s / 1e4 for s in bridge.SEEDS}}
            for name in bridge.SETTINGS}


def test_claims_are_judged_as_they_are_said():
    def verdicts(found): return [claim.verdict(found) for claim in bridge.CLAIMS]
    as_said = losses(lambda name: {"all": 0.0, "with first weights": 0.01}.get(name, 0.1), lambda name: 0.001)
    assert verdicts(as_said) == ["holds"] * len(bridge.CLAIMS)
    costs = {"sizes": 0.1, "with first weights": 0.1, "all": 0.05}
    other = losses(lambda name: costs.get(name, 0.01), lambda name: 0.05)
    assert verdicts(other) == ["refuted"] * len(bridge.CLAIMS)
    for seed in bridge.SEEDS: other["all"]["stochastic"][seed] += 0.2 * (-1) ** seed
    assert verdicts(other)[0] == "not decided"
    assert verdicts({"all": as_said["all"]}) == ["not run"] * len(bridge.CLAIMS)
    one, two = bridge.costs(as_said, "all"), [s / 1e4 for s in bridge.SEEDS]
    np.testing.assert_allclose(one, two, atol=1e-15)  # differences of numbers near 2: ulps of 4e-16


def test_a_setting_counts_when_all_of_its_runs_are_there():
    rows = [{"setting": name, "arm": arm, "seed": seed, "val_loss": 1.0} for name, arm, seed in bridge.every_run()]
    assert list(bridge.losses_of(rows)) == list(bridge.SETTINGS)
    assert "all" not in bridge.losses_of([r for r in rows if (r["setting"], r["seed"]) != ("all", 11)])


def test_runs_came_after_what_was_said_of_them():
    if not (rows := bridge.stored()): pytest.skip("no run is stored")
    def git(*words): return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not git("rev-list", "-1", "HEAD"): pytest.skip("no history")
    said = git("log", "--reverse", "--format=%ct", "-S7. From 6.4M to ten", "--", "nbs/studies/protocol_2.ipynb")[0]
    for row in rows:
        ended = datetime.fromisoformat(row["finished"]).timestamp()
        assert ended - row["seconds"] > int(said)
        assert math.isfinite(row["val_loss"]) and row["steps"] == row["task"]["steps"] or row["diverged"]
