"""Runs that end before their last step, go on, or are changed on the way: what their folders keep of it."""
import io

import numpy as np
import pytest
import torch
from rich.console import Console

from altgrad.basics import InputError
from altgrad.evidence.stability import _ARM, thresholds_of
from altgrad.evidence.study import effect
from altgrad.geometry.storage import plain_state
from altgrad.training import trainer as module
from altgrad.training.config import make_config
from altgrad.training.experiment import compare, find_config
from altgrad.training.tracking import StoredRun
from altgrad.training.trainer import Trainer, Watch, trained_model
from altgrad.views.autopsy import advice, autopsy
from altgrad.views.watch import plot_run, render_ledger
from altgrad.views.workspace import _history

TINY = dict(name="run", model="gpt-tiny", max_steps=12, batch_size=4, block_size=16, warmup_steps=2, eval_every=4,
            eval_windows=8, checkpoint_every=4, device="cpu", compute_dtype="float32", format="E4M3")


@pytest.fixture
def config(small_folder):
    return lambda **more: make_config({**TINY, "data": f"path:{small_folder / 'text.txt'}", **more})


def interrupted(monkeypatch, step):
    "Has the next run end in the moment after a step was written, before anyone asks whether it was the last."
    check = Watch.check
    def stop(self, row):
        if row["step"] != step: return check(self, row)
        monkeypatch.setattr(Watch, "check", check)
        raise KeyboardInterrupt
    monkeypatch.setattr(Watch, "check", stop)


def test_a_run_that_converged_keeps_the_weights_of_its_end(config, tmp_path):
    trainer = Trainer(config(lr=0.0, max_steps=40, checkpoint_every=100, converge_window=3), tmp_path / "runs")
    assert trainer.run(progress=False)["exit_reason"].startswith("finished at step 12: converged")
    kept, model = StoredRun(tmp_path / "runs/run").checkpoints.entries(), trained_model(tmp_path / "runs/run")
    assert kept[-1]["step"] == 12
    there = plain_state(model)
    assert all(torch.equal(value, there[name]) for name, value in plain_state(trainer.model).items())


def test_a_run_that_is_taken_up_at_its_last_step_ends_there(config, tmp_path, monkeypatch):
    c = config(lr=0.0, max_steps=40, converge_window=3)
    whole = Trainer(c, tmp_path / "whole").run(progress=False)
    interrupted(monkeypatch, step=12)
    with pytest.raises(KeyboardInterrupt): Trainer(c, tmp_path / "cut").run(progress=False)
    assert Trainer(c, tmp_path / "cut").run(progress=False)["exit_reason"] == whole["exit_reason"]


def test_interventions_are_remembered_and_their_formats_read(config, tmp_path, monkeypatch):
    c = config(storage="grid_nearest", rule_lr=1e-6, monitor_every=1, interventions="move_bit")
    whole = Trainer(c, tmp_path / "whole").run(progress=False)["monitors"]["events"]
    assert any("move_bit" in event for event in whole)
    interrupted(monkeypatch, step=8)
    with pytest.raises(KeyboardInterrupt): Trainer(c, tmp_path / "cut").run(progress=False)
    trainer = Trainer(c, tmp_path / "cut")
    assert trainer.run(progress=False)["monitors"]["events"] == whole
    layer = next(name for name in trained_model(tmp_path / "cut/run").state_dict() if name.endswith("qkv.weight"))
    there = trained_model(tmp_path / "cut/run").get_parameter(layer)
    assert there.fmt != module.get_format("E4M3")
    assert torch.equal(there.dequantize(), trainer.model.get_parameter(layer).dequantize())


def test_a_run_that_was_stopped_has_no_gap(config, tmp_path, monkeypatch):
    before = module.Learner.forward_backward
    def broken(self, batches, **how):
        self.made = getattr(self, "made", 0) + 1
        loss = before(self, batches, **how)
        return loss * float("nan") if self.config.format == "E5M2" and self.made > 5 else loss
    monkeypatch.setattr(module.Learner, "forward_backward", broken)
    arms = [config(name="base", format="bfloat16", max_steps=20), config(name="broken", format="E5M2", max_steps=20)]
    base, stopped = compare(arms, tmp_path / "runs", progress=False, seeds=2).rows()
    assert "stopped" in stopped["exit_reason"] and base["exit_reason"] == "finished"
    assert stopped["val_loss"] is not None and stopped["gap_nats"] is None


def test_layers_together_are_no_layer(config, tmp_path):
    import matplotlib.pyplot as plt
    c = config(storage="grid_nearest", monitor_every=3, max_steps=12, rule_lr=1e-6)
    Trainer(c, tmp_path / "runs").run(progress=False)
    assert not [f for f in autopsy(tmp_path / "runs/run").causes if f.layer.partition("/")[0] == "all"]
    fig = plot_run(tmp_path / "runs/run")
    maps = [ax for ax in fig.axes if ax.images and ax.get_xlabel() == "step" and ax.get_ylabel() != "code"]
    assert maps and all(image.get_array().count() for ax in maps for image in ax.images)
    for ax in maps:  # the first step, and each third one
        assert ax.images[0].get_array().shape[1] == 5
        assert "all" not in [label.get_text().partition("/")[0] for label in ax.get_yticklabels()]
    plt.close(fig)


def test_a_stall_is_answered_with_what_was_found_to_help():
    said = advice("bit_stall_rate", {"storage": "grid_nearest"})[1]
    assert "grid_residual4" in said and "riemannian" not in said
    assert "grid_residual4" not in advice("bit_stall_rate", {"storage": "grid_residual8"})[1]


def test_settings_are_judged_together_with_their_file(tmp_path):
    file = tmp_path / "watched.yaml"
    file.write_text("format: E4M3\nshadow_every: 1\n")
    assert find_config(str(file), {"monitor_every": 1}).shadow_every == 1
    found = find_config(f"{file}:monitor_every=1,storage=grid_nearest")
    assert found.name == "watched_monitor_every_1_grid_nearest" and found.monitor_every == 1
    assert find_config(f"{file}:monitor_every=1,name=mine", {"name": "given"}).name == "mine"
    with pytest.raises(InputError, match="monitor_every"): find_config(str(file))
    with pytest.raises(InputError, match="format is null"): make_config({"format": None, "rule_lr": 0.001})
    with pytest.raises(InputError, match="intervention"): make_config({"monitor_every": 1, "interventions": ","})


def test_failed_runs_take_no_time_and_a_null_stage_is_one(tmp_path):
    rows = [{"run": "a", "stage": None, "seconds": 10.0, "val_loss": 1.0, "format": "E4M3", "storage": "master",
             "rule": "adamw", "lr": 0.1, "seed": 0}, {"run": "b", "stage": "tune", "error": "MemoryError"},
            {"run": "c", "stage": "tune", "seconds": 10.0}]
    out = io.StringIO()
    Console(file=out, width=120).print(render_ledger(tmp_path / "ledger.jsonl", rows))
    tune = next(line for line in out.getvalue().splitlines() if line.strip("│ ").startswith("tune "))
    assert tune.strip("│ ").split() == ["tune", "2", "1", "10.0"]


def test_the_last_mean_of_a_curve_stands_at_a_step_that_was_made():
    assert [step for step, _ in _history({"steps": 13, "curve": [3.0, 2.9]})] == [10, 13]


def test_one_checkpoint_shows_nothing():
    for shape in ((1, 3, 8), (3, 1, 8)): assert effect(np.ones(shape)) is None


def test_a_run_of_two_codes_is_one_run():
    def row(seed, code): return {
        "stage": "max-lr", "format": "E4M3", "storage": "master", "rule": "stiffness_adamw", "power": 0.0,
        "placement": "update", "damping": None, "floor_octaves": 8, "checkpoint": "tiny-0", "lr": 0.1,
        "seed": seed, "diverged": False, "code": code}
    found = lambda rows: thresholds_of([{**dict.fromkeys(_ARM), **r} for r in rows])[0]["stable"]
    assert found([row(0, "a"), row(0, "b"), row(1, "a")]) is None
    assert found([row(0, "a"), row(1, "b"), row(2, "a")]) == 0.1
