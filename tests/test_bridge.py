"""The bridge between two studies: its ends are what those made, and its claims are judged as they are said."""
import math
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from altgrad.basics import InputError
from altgrad.evidence.instrument import Bench, build_checkpoint, run_arm
from altgrad.model.gpt import GPT, PRESETS
from altgrad.training.experiment import find_config
from altgrad.training.trainer import lr_at

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "nbs/studies/experiments"))

import bridge

TASK = replace(bridge.SMALL.task, steps=5, warmup=2, every=2, chunks=2, windows=2)


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
    c, setting = find_config("ten_million/bf16_baseline"), bridge.SETTINGS["all"]
    torch.manual_seed(0)
    large, model = GPT(PRESETS[c.model]), bridge.first_model(setting, 0)
    assert (model.config.n_layer, model.config.block_size) == (large.config.n_layer, c.block_size)
    assert model.config.n_embd // model.config.n_head == large.config.n_embd // large.config.n_head == 64
    for (name, m), (_, n) in zip(model.named_modules(), large.named_modules(), strict=True):
        if not isinstance(m, nn.Linear) or name == "lm_head": continue
        sizes = [w.std().item() * w.shape[1] ** 0.5 for w in (m.weight, n.weight)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.03)  # 16,384 draws or more: 0.6 % is one sigma
    assert model.wte.weight.std().item() == pytest.approx(large.wte.weight.std().item(), rel=0.03)  # as many draws
    for arm, factor in {"master": 1, "stochastic": 1, "S^-1": 2}.items():
        # float64, in another order
        assert bridge.rates(setting, arm) == pytest.approx((factor * c.lr * 3, c.lr * 3), rel=1e-12)  # 384 = 3 x 128
        run = bridge.planned(setting, arm, 10)
        assert run.lr * run.weight_decay == pytest.approx(c.weight_decay * c.lr, rel=1e-12)  # float64
    rest = bridge.rest_rule(setting, 0.5, [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))], TASK)
    assert [g["weight_decay"] * 0.5 for g in rest.param_groups] == pytest.approx([c.weight_decay * c.lr, 0.0])
    for step in (1, 50, 120, 600, 1200):
        like = replace(c, max_steps=1200, warmup_steps=120)
        found = bridge.share(setting, step, bridge.SMALL.task)
        assert found == pytest.approx(lr_at(step, like) / c.lr, rel=1e-12)  # float64, in another order


def test_an_update_reads_as_much_in_every_setting(bench, monkeypatch):
    shapes = {}
    def seen(model, x, y):
        shapes[name] = x.numel(), x.shape[1]
        return loss_of(model, x, y)
    loss_of = bridge.loss_of
    monkeypatch.setattr(bridge, "loss_of", seen)
    for name in ("sizes", "all"): bridge.make_run((name, "master", bridge.SEEDS[0]), bench)
    assert shapes == {"sizes": (512, 64), "all": (512, 256)}


def test_a_change_changes_one_thing():
    first, last = bridge.SETTINGS["sizes"], bridge.SETTINGS["all"]
    fields = set(bridge.Setting.__dataclass_fields__)
    def apart(a, b): return {f for f in fields if getattr(a, f) != getattr(b, f)}
    assert apart(first, last) == fields
    for name, change in bridge.CHANGES.items():
        assert apart(bridge.SETTINGS[f"with {name}"], first) == set(change)
        assert apart(bridge.SETTINGS[f"all but {name}"], last) == set(change)
    six, halved = bridge.SETTINGS["with blocks"], bridge.SETTINGS[bridge.HALVED]
    assert apart(six, halved) == {"rates"}
    for arm in bridge.ARMS:
        assert bridge.rates(halved, arm) == tuple(rate / 2 for rate in bridge.rates(six, arm))


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


@pytest.fixture
def at_once(monkeypatch):
    "Runs that end at once, in this process; those of a name that is said fail."
    failing = []
    def made(run, commit=None):
        (name, arm, seed), setting = run, bridge.SETTINGS[run[0]]
        if name in failing: raise ValueError("broken")
        return {"run": bridge.run_id(run), "setting": name, "arm": arm, "val_loss": 1.0, "seconds": 1.0, "task": {},
                **asdict(bridge.planned(setting, arm, seed)), "how": asdict(setting), "commit": commit}
    class AtOnce:
        def __init__(self, *a): ...
        def __enter__(self): return self
        def __exit__(self, *a): ...
        def shutdown(self, cancel_futures): assert cancel_futures
        def submit(self, f, run, **kw):
            future = Future()
            try: future.set_result(made(run, **kw))
            except ValueError as e: future.set_exception(e)
            return future
    monkeypatch.setattr(bridge, "ProcessPoolExecutor", AtOnce)
    monkeypatch.setattr(bridge, "bench_of", lambda: type("B", (), {"corpus": lambda self, name: None})())
    return failing


def test_runs_go_on_and_are_stored_in_order(tmp_path, at_once):
    path = tmp_path / "bridge.jsonl"
    bridge.make_runs(tmp_path, ["all"], 1, path)
    bridge.store(tmp_path, path)
    bridge.make_runs(tmp_path / "other", ["sizes", "all"], 1, path)
    bridge.store(tmp_path / "other", path)
    ids = [row["run"] for row in bridge.stored(path)]
    assert ids == [bridge.run_id(run) for run in bridge.every_run(["sizes", "all"])]
    assert len((tmp_path / "other/ledger.jsonl").read_text().splitlines()) == len(ids) // 2
    with pytest.raises(InputError, match="unknown setting"): bridge.every_run(["sizes", "none"])


def test_what_was_made_in_another_way_is_refused(tmp_path, at_once, monkeypatch):
    bridge.make_runs(tmp_path, ["with loop"], 1, tmp_path / "none")
    changed = bridge.SETTINGS | {"with loop": replace(bridge.SETTINGS["with loop"], layers=3)}
    monkeypatch.setattr(bridge, "SETTINGS", changed)
    with pytest.raises(InputError, match="with loop/master/10 was made with how"):
        bridge.make_runs(tmp_path, ["with loop"], 1, tmp_path / "none")


def test_a_run_that_fails_loses_no_other(tmp_path, at_once):
    at_once.append("all")
    with pytest.raises(ValueError, match="broken"):
        bridge.make_runs(tmp_path, ["all"], 1, tmp_path / "none")
    at_once.clear()
    bridge.make_runs(tmp_path, ["all"], 1, tmp_path / "none")
    assert len(bridge.Ledger(tmp_path).rows()) == len(bridge.every_run(["all"]))


def losses(cost, gain=lambda name: 0.0, scatter=1e-4):
    "Losses of all settings: a cost and a gain for each, and a little for each seed."
    def more(seed): return scatter * (-1) ** seed
    return {name: {"master": {s: 1 + s / 10 for s in bridge.SEEDS},
                   "stochastic": {s: 1 + s / 10 + cost(name) + more(s) for s in bridge.SEEDS},
                   "S^-1": {s: 1 + s / 10 + cost(name) - gain(name) for s in bridge.SEEDS}}
            for name in bridge.SETTINGS}


def verdicts(found): return [claim.verdict(found) for claim in bridge.CLAIMS]


def test_claims_are_judged_as_they_are_said():
    as_said = losses(lambda name: {"all": 0.0, "with first weights": 0.04}.get(name, 0.1), lambda name: 0.001)
    for seed in bridge.SEEDS: as_said[bridge.HALVED]["master"][seed] -= 0.05 + seed / 1e3
    assert verdicts(as_said) == ["holds"] * len(bridge.CLAIMS)
    costs = {"sizes": 0.1, "with first weights": 0.06, "all": 0.05, "with rates": 0.16, bridge.HALVED: -0.1}
    other = losses(lambda name: costs.get(name, 0.04), lambda name: 0.05)
    for seed in bridge.SEEDS: other[bridge.HALVED]["master"][seed] += 0.05 + seed / 1e3
    assert verdicts(other) == ["refuted"] * len(bridge.CLAIMS)
    costs = {"sizes": 0.1, "all": 0.01, "with first weights": 0.05, bridge.HALVED: 0.0}
    unsure = losses(lambda name: costs.get(name, 0.052), lambda name: 0.01, scatter=0.02)
    for seed in bridge.SEEDS: unsure[bridge.HALVED]["master"][seed] += 0.01 * (-1) ** seed
    assert verdicts(unsure) == ["not decided"] * len(bridge.CLAIMS)
    assert verdicts({"all": as_said["all"]}) == ["holds"] * 2 + [None] * (len(bridge.CLAIMS) - 2)  # two need no other
    assert verdicts({"sizes": as_said["sizes"]}) == [None] * len(bridge.CLAIMS)


def test_what_a_change_alone_leaves_of_the_cost():
    costs = {"sizes": 0.1, "with rates": 0.12, "with loop": 0.02, "with blocks": -0.3, "with context": 0.0501}
    found = losses(lambda name: costs.get(name, 0.06), scatter=1e-3)
    assert bridge.alone(found) == {"at least half": ["first weights", "rates"], "at most half": ["loop", "blocks"],
                                   "not decided": ["context"]}
    del found["with loop"]["master"][10]
    with pytest.raises(KeyError): bridge.alone(found)


def test_a_setting_is_slow_between_the_first_two_lengths_of_sizes():
    found = losses(lambda name: {"all": -0.1}.get(name, 0.1), scatter=0.0)  # master weights end at 2.35
    for name, loss in {"with context": 2.45, "with loop": 2.55, "all": 2.41}.items():
        for arm in bridge.ARMS:
            for seed in bridge.SEEDS: found[name][arm][seed] += loss - 2.35
    def at(loss): return dict.fromkeys(bridge.SEEDS, loss)
    there = {(part, bridge.ARMS[arm]): at(loss + (0.2 if arm == "stochastic" else 0.0))
             for part, loss in {"300": 2.5, "0.4m": 2.4}.items() for arm in bridge.ARMS}
    assert bridge.slow(found, there) == ["with context", "all"]
    for (loss, cost), expected in {bridge.place(found, "all"): (2.41, -0.1),
                                   bridge.place_in_sizes(there, "300"): (2.5, 0.2)}.items():
        assert (loss, cost.mean) == pytest.approx(expected, abs=1e-12)  # float64, sums of eight


def test_an_interval_is_that_of_scipy():
    found = losses(lambda name: 0.1, scatter=0.02)
    for seed in bridge.SEEDS: found["sizes"]["stochastic"][seed] = 1 + seed / 10 + 0.1 + seed / 1e3
    d = np.array([list(bridge.costs(found, name).values()) for name in ("with loop", "sizes")])
    mean, low, high = bridge.left("with loop", 0.5)(found)
    expected = stats.ttest_1samp(d[0] - 0.5 * d[1], 0.0).confidence_interval()
    assert (mean, low, high) == pytest.approx((np.mean(d[0] - 0.5 * d[1]), *expected), rel=1e-9)  # float64


def test_a_seed_counts_where_all_arms_of_a_setting_have_it():
    rows = [{"setting": name, "arm": arm, "seed": seed, "val_loss": 1.0, "diverged": False}
            for name, arm, seed in bridge.every_run()]
    assert list(bridge.losses_of(rows)) == list(bridge.SETTINGS)
    less = [r for r in rows if (r["setting"], r["arm"], r["seed"]) != ("all", "S^-1", 11)]
    assert set(bridge.losses_of(less)["all"]["master"]) == set(bridge.SEEDS) - {11}
    assert verdicts(bridge.losses_of(less))[0] is None
    diverged = [r | {"diverged": r["setting"] == "all"} for r in rows]
    assert "all" not in bridge.losses_of(diverged)  # nothing minus nothing is no cost of zero


def test_a_loss_that_is_not_finite_is_told(bench, monkeypatch):
    monkeypatch.setattr(bridge, "validate", lambda *a: math.nan)
    row = bridge.make_run(("sizes", "master", bridge.SEEDS[0]), bench)
    assert row["diverged"] and row["val_loss"] == math.log(256)


def test_runs_came_after_what_was_said_of_them():
    if not (rows := bridge.stored()): pytest.skip("no run is stored")
    def git(*words): return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if git("rev-parse", "--is-shallow-repository") != ["false"]: pytest.skip("no history")
    def said(words):
        return int(git("log", "--reverse", "--format=%ct", f"-S{words}", "--", "nbs/studies/protocol_2.ipynb")[0])
    first, halved = said("512 bytes in every setting"), said("half of all rates")
    for row in rows:
        ended = datetime.fromisoformat(row["finished"]).timestamp()
        assert ended - row["seconds"] > (halved if row["setting"] == bridge.HALVED else first)
        assert math.isfinite(row["val_loss"]) and row["steps"] == row["task"]["steps"] or row["diverged"]
