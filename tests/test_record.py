"""A recorder around loops that are not ours: the planted faults, runs that must not be accused, that
it changes no bit and holds no tensor, and input that would break it."""
import copy
import gc
import io
import json
import logging
import math
import os
import pickle
import shutil
import subprocess
import sys
import weakref

import faults
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import altgrad
import preloaded
from altgrad.basics import InputError
from altgrad.cli import main
from altgrad.watching.cause import SAID, first_cause
from altgrad.watching.record import Recorder, lightning_record, transformers_record
from altgrad.watching.recording import read_recording
from altgrad.watching.what_if import read_dump, what_if

from cases import each
from marks import all_slow_but


def recorded(run: faults.Run, every: int = 1, **how) -> Recorder:
    "The recorder of a whole run."
    run.prepare()
    with altgrad.record(run.model, run.optim, every=every, **how) as recorder: run.train(recorder.loss)
    assert not recorder.stopped
    return recorder


@pytest.mark.parametrize("fault", all_slow_but(6, faults.FAULTS), ids=lambda f: f.id)
def test_the_first_cause_of_a_planted_fault_is_named(fault):
    cause = recorded(fault.run()).cause
    assert (cause.kind, cause.layer, cause.step) == (fault.kind, fault.layer, fault.step)


@pytest.mark.parametrize("run", all_slow_but(6, faults.HEALTHY), ids=lambda r: r.id)
def test_a_healthy_run_is_not_accused(run): assert recorded(run.run()).cause is None


def test_there_are_as_many_planted_faults_as_were_promised():
    assert len(faults.FAULTS) >= 60 and len(faults.HEALTHY) >= 20
    kinds = {f.kind for f in faults.FAULTS}
    assert len(kinds) >= 20 and kinds <= set(SAID)
    for kind in {f.kind for f in faults.FAULTS if not f.within}:
        assert {f.family for f in faults.FAULTS if f.kind == kind} == set(faults.FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("family", faults.FAMILIES)
def test_a_recorded_run_ends_at_the_same_bits(family):
    plain = faults.Run(family).prepare()
    plain.train()
    watched = faults.Run(family)
    recorded(watched)
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)
    state = watched.optim.state_dict()["state"]
    for i, kept in plain.optim.state_dict()["state"].items():
        assert all(torch.equal(v, state[i][k]) for k, v in kept.items())


def test_what_is_recorded_are_the_tensors_of_the_loop():
    torch.manual_seed(0)
    layer = nn.Linear(40, 16)
    sgd, x, seen = torch.optim.SGD(layer.parameters(), lr=0.5), torch.randn(24, 40), {}
    with altgrad.record(layer, sgd) as recorder:
        y = layer(x)
        y.register_hook(lambda g: seen.setdefault("gradient", g.clone()))
        seen["weight"] = layer.weight.detach().clone()
        y.square().mean().backward()
        seen["weight gradient"] = layer.weight.grad.clone()
        sgd.step()
    seen |= {"input": x, "output": y, "weight update": layer.weight.detach().double() - seen["weight"]}
    r = recorder.recording
    assert r.layers[0]["name"] == "model" and r.layers[0]["fan_in"] == 40
    for tensor, value in seen.items():
        stat = lambda name, tensor=tensor: r.get("model", tensor, name)[0]
        assert stat("elements") == value.numel() and stat("amax") == value.abs().max()
        assert stat("least") == value[value != 0].abs().min() and stat("zeros") == (value == 0).sum()
        # squares are summed in float64, of float32 numbers: as many roundings as elements
        exact = value.double().square().sum()
        assert abs(stat("squares") - exact) <= value.numel() * 2.0**-53 * exact
    assert r.dtypes["model|weight"] == "float32"


def test_nothing_is_held_between_steps():
    layer = nn.Linear(8, 8)
    sgd, alive = torch.optim.SGD(layer.parameters(), lr=0.1), []
    with altgrad.record(layer, sgd):
        for _ in range(3):
            x = torch.randn(4, 8)
            y = layer(x)
            y.sum().backward()
            sgd.step()
            alive += [weakref.ref(x), weakref.ref(y)]
            del x, y
            gc.collect()
            assert all(ref() is None for ref in alive)


def test_accumulated_batches_are_one_step_and_evaluation_is_none():
    layer = nn.Linear(4, 4)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    with altgrad.record(layer, sgd, every=1) as recorder:
        for _ in range(3):
            for _ in range(4): layer(torch.randn(5, 4)).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            with torch.no_grad(): layer(torch.full((5, 4), torch.nan))
    r = recorder.recording
    assert r.steps == [1, 2, 3] and recorder.cause is None
    assert (r.get("model", "input", "elements") == 4 * 5 * 4).all()


def test_the_ring_keeps_the_last_steps_and_the_first():
    run = faults.Run("conv", steps=9)
    assert recorded(run, last=3).recording.steps == [1, 7, 8, 9]


def test_a_recorder_rests_after_a_break_and_dumps_the_step_before(tmp_path):
    run = next(f for f in faults.FAULTS if f.id == "zero_scale-conv").run()
    recorder = recorded(run, folder=tmp_path, dump=True)
    assert recorder.recording.steps == list(range(1, faults.AT + 3))
    step, layers = read_dump(tmp_path)
    assert step == faults.AT - 1
    assert all(t.isfinite().all() for kept in layers.values() for t in kept.values())


# the loop goes on


class Fails(nn.Module):
    "A module whose result is no tensor that can be measured."
    def forward(self, x): return torch.empty(3, device="meta")


def loop(model, optimizer, steps=3, x=None):
    "A loop; the number of its steps."
    for _ in range(steps):
        model(torch.randn(2, 3) if x is None else x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps


def test_a_recorder_that_fails_says_so_once_and_the_loop_goes_on(capsys):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].register_forward_hook(lambda m, args, out: (out, Fails()(out))[0])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = nn.Sequential(model, nn.Identity())
    with altgrad.record(broken, sgd) as recorder:
        recorder._forward.layer = lambda *args: 1 / 0
        assert loop(broken, sgd) == 3
    assert "ZeroDivisionError" in recorder.stopped and recorder.stopped in recorder.finding
    assert capsys.readouterr().err.count("altgrad.record stopped") == 1


@each("model, why", (
    (nn.ReLU(), "no parameters"), (nn.Linear(3, 3), "another model's"),
    (nn.Linear(3, 3, device="meta"), "another model's"),
))
def test_what_cannot_be_recorded_is_named_once(model, why, capsys):
    own = nn.Linear(3, 3)
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    with altgrad.record(model, sgd) as recorder: loop(own, sgd)
    assert why in recorder.stopped and capsys.readouterr().err.count("\n") == 1


def test_tensors_on_meta_end_the_recording_and_not_the_loop(capsys):
    model = nn.Linear(3, 3, device="meta")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with altgrad.record(model, sgd) as recorder:
        assert loop(model, sgd, x=torch.empty(2, 3, device="meta")) == 3
    assert "meta device" in recorder.stopped
    assert capsys.readouterr().err.count("\n") == 1


def test_parameters_may_change_during_the_run():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd) as recorder:
        loop(model, sgd)
        model[0].weight = nn.Parameter(torch.randn(3, 3))
        sgd.add_param_group({"params": [model[0].weight]})
        model[1] = nn.Linear(3, 3)  # not hooked: the layer that was is recorded up to here
        sgd.add_param_group({"params": list(model[1].parameters())})
        loop(model, sgd)
    assert not recorder.stopped and recorder.recording.steps == [1, 2, 3, 4, 5, 6]


def test_a_loop_that_never_runs_is_said(capsys):
    layer = nn.Linear(3, 3)
    with altgrad.record(layer, torch.optim.SGD(layer.parameters(), lr=0.1)): pass
    assert "no forward pass" in capsys.readouterr().err


@each("every", (1, 10))
def test_a_layer_on_the_meta_device_is_named_and_one_that_is_not_called_is_none(every):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].spare = nn.Linear(4, 4, device="meta")
    with altgrad.record(model, sgd, every=every) as recorder: steps_of(model, sgd, recorder.loss, 3)
    assert not recorder.stopped and recorder.steps == 3
    model[1].to("meta")
    with altgrad.record(model, sgd, every=every) as recorder: model[1](model[0](torch.ones(2, 8)).to("meta"))
    assert recorder.stopped == "1 is on the meta device, without values"


def test_a_compiled_model_is_named(capsys):
    model = nn.Sequential(nn.Linear(3, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for compiled in (torch.compile(model), nn.Sequential(torch.compile(model))):
        with altgrad.record(compiled, sgd) as recorder: pass
        assert "compiled" in recorder.stopped


@each("arguments, words", (
    ((None, None), "must be a torch.nn.Module"), (([], None), "not empty"),
    ((nn.Linear(3, 3), "sgd"), "must be a torch.optim.Optimizer"),
))
def test_arguments_of_the_wrong_kind_are_refused(arguments, words):
    with pytest.raises(InputError, match=words): altgrad.record(*arguments)


def test_a_dump_needs_a_folder_and_last_is_a_number_of_steps():
    layer = nn.Linear(3, 3)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(InputError, match="needs a folder"): altgrad.record(layer, sgd, dump=True)
    for last in (0, 1.5, True):
        with pytest.raises(InputError, match="last must be"): altgrad.record(layer, sgd, last=last)


def test_an_exception_of_the_loop_is_the_loops_and_the_recording_is_written(tmp_path):
    layer = nn.Linear(3, 3)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(KeyError), altgrad.record(layer, sgd, folder=tmp_path / "run"):
        loop(layer, sgd)
        raise KeyError("the loop's own")
    assert read_recording(tmp_path / "run").steps == [1, 2, 3]


def printed(meter) -> str:
    "A meter as the package rich prints it."
    from rich.console import Console
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(meter)
    return console.export_text()


def test_a_recorder_as_a_table_has_what_left_its_range_first_and_twenty_rows():
    run = next(f for f in faults.FAULTS if f.id == "zero_scale-conv").run()
    recorder = recorded(run)
    said = printed(recorder)
    rows = [line for line in said.splitlines() if line.startswith("│")]
    assert "zero scale in fc2" in said and "│ fc2 " in rows[0] and "zero scale, step 5" in rows[0]
    assert "not finite" in rows[0] and len(rows) == len(recorder.facts_of_layers)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, every=1) as recorder: loop(model, sgd, x=torch.ones(2, 4))
    said = printed(recorder)
    assert said.count("\n│") == 20 and "and 10 more" in said
    fresh = altgrad.record(model, sgd)
    assert "nothing was recorded" in printed(fresh) and fresh.cause is None


def test_where_nothing_can_be_written_the_cause_is_found_and_said(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    run = next(f for f in faults.FAULTS if f.id == "zero_scale-conv").run()
    recorder = recorded(run, folder=tmp_path / "file" / "run")
    told = capsys.readouterr().err
    assert "altgrad.record wrote nothing: cannot create" in told and not recorder.saved
    assert recorder.finding.startswith("step 5: zero scale in fc2: ") and recorder.finding in told


# from the shell


@pytest.fixture
def broken(tmp_path):
    "A folder of a run that broke."
    run = next(f for f in faults.FAULTS if f.id == "zero_scale-conv").run()
    recorded(run, folder=tmp_path / "broken", dump=True)
    return tmp_path / "broken"


def copy_of(folder):
    "What was in a folder, beside it, and nothing that was done to an earlier copy."
    return shutil.copytree(folder, folder.with_name("copy"), dirs_exist_ok=True)


def test_autopsy_of_a_recording(broken, capsys):
    assert main(["autopsy", str(broken)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 5: zero scale in fc2: ") and "the loss is nan" in said
    assert str(first_cause(read_recording(broken))) in said
    assert (broken / "autopsy.png").read_bytes()[:4] == b"\x89PNG"


def test_what_if_of_a_dump(broken, capsys):
    ask = ["what-if", str(broken), "--format", "E5M2", "--block", "32", "--rounding", "stochastic"]
    assert main(ask) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[1:]] == [
        loss.layer for loss in what_if(broken, "E5M2", 32)
    ] == ["conv1", "conv2", "fc1", "fc2"]


@each("change, words", (
    (lambda folder: (folder / "record.npz").write_bytes(b"PK"), "damaged"),
    (lambda folder: (folder / "record.json").write_text("{"), "no recording"),
    (lambda folder: (folder / "record.json").write_text("[1]"), "no recording"),
    (lambda folder: (folder / "record.json").write_text('{"altgrad_recording": 7}'), "version 7"),
    (lambda folder: (folder / "record.json").write_text('{"altgrad_recording": true}'), "is no recording"),
    (lambda folder: (folder / "record.npz").unlink(), "cannot read"),
))
def test_a_damaged_recording_is_refused_in_one_line(broken, change, words, capsys):
    folder = copy_of(broken)
    change(folder)
    assert main(["autopsy", str(folder)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@each("key, value", (
    ("facts", [1]), ("facts", []), ("series", 3), ("series", [[1]]), ("steps", None), ("layers", 5),
    ("layers", [{}]), ("facts", [{"loss": "much"}] * 5), ("dtypes", 3), ("forgotten", 3),
    ("facts", [{"loss": 10**400}] * 5), ("steps", [1, 2, 3, 4, 10**400]),
    ("layers", [{"name": "a", "kind": [1], "fan_in": 3, "has_weight": True, "float8": False}]),
    ("layers", [{"name": "a", "kind": "Linear", "fan_in": 10**400, "has_weight": True, "float8": "no"}]),
))
def test_a_recording_with_other_values_is_refused(broken, key, value, capsys):
    folder, facts = copy_of(broken), json.loads((broken / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**facts, key: value}))
    assert main(["autopsy", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_layers_keep_names_of_their_own():
    "Where a wrapper's name is a layer's own, and where the model has parameters beside a child `model`."
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.module = nn.Parameter(torch.ones(4)), nn.Linear(4, 4, bias=False)
        def forward(self, x): return self.module(x) * self.weight
    class Held(nn.Module):
        "What a wrapper would be called comes first."
        def __init__(self):
            super().__init__()
            self.module, self.a = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False)}), nn.Linear(4, 4, bias=False)
        def forward(self, x): return self.a(self.module["a"](x))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.model, self.g = nn.Parameter(torch.ones(())), nn.Linear(4, 4), Gated()
            self.h = Held()
        def forward(self, x): return self.h(self.g(self.model(x))) * self.scale
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with altgrad.record(net, optimizer) as recorder, altgrad.stall(net, optimizer, every=1) as meter:
        loop(net, optimizer, 2, torch.ones(2, 4))
    held = ["h.module.a", "h.a"]
    assert list(meter.tensors) == [
        "scale", "model.weight", "model.bias", "g.weight", "g.module.weight", *(f"{name}.weight" for name in held)]
    names = [layer["name"] for layer in recorder.recording.layers]
    assert len(names) == len(set(names)) == 6 and {"(model)", "model", "g", *held} < set(names)


def test_a_wrapped_model_has_its_own_names():
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
        def forward(self, x): return self.module(x)
    for model, layer in ((nn.Linear(2, 2), "model"), (nn.Sequential(nn.Linear(2, 2)), "0")):
        for wrapped in (model, Wrapped(model), Wrapped(Wrapped(model))):
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            with altgrad.record(wrapped, optimizer) as recorder, altgrad.stall(wrapped, optimizer, every=1) as meter:
                loop(wrapped, optimizer, 1, torch.ones(1, 2))
            assert [x["name"] for x in recorder.recording.layers] == [layer]
            assert [n.rpartition(".")[0] for n in meter.tensors] == ["" if layer == "model" else layer] * 2


def test_a_damaged_dump_is_refused_in_one_line(broken, capsys):
    whole = (broken / "dump.pt").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"x" * 100):
        (broken / "dump.pt").write_bytes(content)
        assert main(["what-if", str(broken), "--format", "E5M2"]) == 2
    torch.save({"altgrad_dump": 2}, broken / "dump.pt")
    assert main(["what-if", str(broken), "--format", "E5M2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 4 and said.count("is damaged") == 3 and "version 2" in said


def test_a_recorder_that_fails_leaves_other_hooks_alone(monkeypatch, capsys):
    "A hook must not be taken away while torch goes through the hooks."
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = altgrad.record(model, optimizer).start()
    optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    def fails(self): raise RuntimeError("planted")
    monkeypatch.setattr("altgrad.watching.record._Steps.before", fails)
    loop(model, optimizer, 3, torch.ones(2, 4))
    assert seen == ["before", "after"] * 3 and "planted" in recorder.stopped
    assert capsys.readouterr().err.count("planted") == 1
    recorder.stop()
    assert not recorder._handles


def test_a_mask_of_minus_infinity_is_no_data_that_is_broken():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with altgrad.record(model, optimizer) as recorder:
        for _ in range(4):
            loss = recorder.loss(model(torch.randn(2, 5, 16), src_mask=mask).square().mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.cause is None


def two_in_turn(iterations: int, tells: bool, **how) -> Recorder:
    "The recorder of two models against each other, each with an optimizer."
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (one, other)]
    with altgrad.record([one, other], optimizers, **how) as recorder:
        loss = recorder.loss if tells else lambda loss: loss
        for _ in range(iterations):
            made = one(torch.randn(8, 4))
            optimizers[1].zero_grad()
            loss((other(made.detach()) - other(torch.randn(8, 4))).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss(-other(made).mean()).backward()
            optimizers[0].step()
    return recorder


def test_two_models_against_each_other_have_no_gradient_that_was_forgotten():
    assert two_in_turn(6, tells=True).cause is None


# what was named wrongly once


def steps_of(model, optimizer, told, steps, before=lambda step: None, x=None):
    "A loop of regression whose `before` is called with each step's number."
    g = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        before(step)
        given = torch.randn(16, 8, generator=g) if x is None else x
        told(model(given).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Spiky(nn.Linear):
    "A layer whose last channel is a thousand times as large from the step `now` on."
    now, factor = False, 1e3

    def forward(self, x):
        y = super().forward(x)
        if not self.now: return y
        return y * torch.where(torch.arange(y.shape[-1]) == y.shape[-1] - 1, self.factor, 1.0).to(y.dtype)


class Divides(nn.Linear):
    "A layer that divides by a scale of zero from the step `now` on."
    now = False

    def forward(self, x): return super().forward(x / 0 * 0 if self.now else x)


class Spared(nn.Module):
    "Two layers; the second never sees the last channel of the first."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = Spiky(8, 17), Divides(16, 4)

    def forward(self, x): return self.b(self.a(x)[..., :16])


@each("broke", (4, 20))
def test_an_outlier_that_did_no_harm_is_not_what_broke(broke):
    model = Spared()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    def before(step): model.a.now, model.b.now = step >= 3, step >= broke
    with altgrad.record(model, sgd, every=1) as recorder:
        steps_of(model, sgd, recorder.loss, broke + 2, before)
    cause = recorder.cause
    assert (cause.kind, cause.layer, cause.step) == ("zero scale", "b", broke)


def test_an_outlier_that_overflows_is_what_broke():
    torch.manual_seed(0)
    model = nn.Sequential(Spiky(8, 16), nn.Linear(16, 4)).half()
    with torch.no_grad(): model[1].weight.fill_(4.0)
    model[0].factor = 3e4
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    def before(step): model[0].now = step >= 5
    with altgrad.record(model, sgd, every=1) as recorder:
        steps_of(model, sgd, recorder.loss, 7, before, x=torch.ones(16, 8).half())
    cause = recorder.cause
    assert (cause.kind, cause.layer, cause.step) == ("outlier channel", "0", 5)


@each("strange", ("a last layer of zeros", "one layer of zeros", "an embedding that is the head"))
def test_a_strange_beginning_that_a_run_outlived_is_not_what_broke(strange):
    "Data that break a run at step 60 are named, and not what its first step looked like."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    if strange == "one layer of zeros": model = nn.Sequential(nn.Linear(16, 1))
    if strange == "an embedding that is the head":
        model = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 1))
        nn.init.normal_(model[1].weight)
    else: nn.init.zeros_(model[-1].weight)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with altgrad.record(model, adamw, every=10) as recorder:
        for step in range(1, 61):
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
            if step == 60: x[0, 0] = torch.nan
            loss = (model(x)[:, 0] - x[:, 1]).square().mean()
            recorder.loss(loss)
            loss.backward()
            adamw.step()
            adamw.zero_grad()
    assert (recorder.cause.kind, recorder.cause.step) == ("non-finite data", 60)


def test_a_recording_of_no_step_is_an_empty_figure():
    model = nn.Linear(4, 4)
    assert altgrad.record(model, torch.optim.SGD(model.parameters(), lr=0.1)).plot().axes


@each("layer", (nn.Linear(8, 8), nn.LayerNorm(8)))
def test_a_number_that_is_not_finite_in_a_bias_is_not_the_layers_arithmetic(layer):
    model = nn.Sequential(nn.Linear(8, 8), layer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    def before(step):
        if step == 5: layer.bias.data[3] = torch.nan
    with altgrad.record(model, sgd, every=1) as recorder: steps_of(model, sgd, recorder.loss, 7, before)
    cause = recorder.cause
    assert (cause.kind, cause.layer, cause.step) == ("changed outside a step", "1", 5)
    assert "nan" in cause.said


def test_weights_that_are_not_finite_from_the_beginning_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].bias.data[0] = torch.inf
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, every=1) as recorder: steps_of(model, sgd, recorder.loss, 3)
    cause = recorder.cause
    assert (cause.kind, cause.layer, cause.step) == ("initial weights not finite", "1", 1)


def test_a_step_that_makes_nan_of_finite_numbers_is_named():
    "Adam without an epsilon divides 0 by 0 where an input, and so a gradient, is always zero."
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
    x = torch.rand(16, 8)
    x[:, 0] = 0
    with altgrad.record(model, adam, every=1) as recorder: steps_of(model, adam, recorder.loss, 3, x=x)
    cause = recorder.cause
    assert (cause.kind, cause.layer, cause.step) == ("NaN from the optimizer", "0", 1)


@each("rate", (math.nan, math.inf))
def test_a_rate_that_is_no_number_is_named(rate, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sgd, folder = torch.optim.SGD(model.parameters(), lr=0.01), tmp_path / str(rate)
    def before(step): sgd.param_groups[0]["lr"] = rate if step >= 5 else 0.01
    with altgrad.record(model, sgd, folder=folder, every=1) as recorder:
        steps_of(model, sgd, recorder.loss, 7, before)
    for cause in (recorder.cause, first_cause(read_recording(folder))):
        assert (cause.kind, cause.layer, cause.step) == ("rate is not finite", "", 5)
        assert f"rate is {rate}" in cause.said


@each("every", (1, 10))
def test_recorder_and_autopsy_agree_on_a_slow_divergence(tmp_path, capsys, every):
    "The loss grows by 1 % a step: the last 16 steps alone do not show that it has tripled."
    model, tmp_path = nn.Linear(8, 8), tmp_path / str(every)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    with altgrad.record(model, sgd, folder=tmp_path, last=16, every=every) as recorder:
        x = torch.randn(4, 8)
        for step in range(300):
            recorder.loss(model(x).square().mean() * 0 + 1.01**step).backward()
            sgd.step()
            sgd.zero_grad()
    told = capsys.readouterr().err.splitlines()
    again = first_cause(read_recording(tmp_path))
    # at step n + 1 the loss is 1.01^n, and the median of those before it 1.01^((n - 1) / 2)
    first = next(n for n in range(300) if 1.01 ** (n - (n - 1) / 2) > 3) + 1
    assert len(told) == 1 and again.step == first and str(again) in told[0]
    assert "in the median" in again.said


def test_a_normalization_with_stored_statistics_is_not_accused_of_its_epsilon():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[1].running_var.fill_(1e4)
    model[1].eval()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, every=1) as recorder: steps_of(model, sgd, recorder.loss, 8)
    assert recorder.cause is None


def test_conv1d_of_transformers_is_a_linear_layer(tmp_path):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(12, 8), nn.ReLU(), Conv1D(4, 12))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, folder=tmp_path, dump=True, every=1) as recorder:
        steps_of(model, sgd, recorder.loss, 4)
    r = recorder.recording
    assert [(x["kind"], x["fan_in"]) for x in r.layers] == [("Linear", 8), ("other", None), ("Linear", 12)]
    # so many roundings in a sum
    assert 0 <= r.get("0", "output", "error").max() < 8 * 2.0**-24
    lost = what_if(tmp_path, "E4M3")
    assert [one.layer for one in lost] == ["0", "2"] and all(0 < one.error_weight < 0.1 for one in lost)


@each("attend", ("self", "cross"))
def test_both_products_of_attention_are_dumped(tmp_path, attend):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x): return self.heads(x, *((x, x) if attend == "self" else (x * 2, x * 2)))[0]
    torch.manual_seed(0)
    tmp_path /= attend
    model, x = Attends(), torch.randn(4, 6, 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, folder=tmp_path, dump=True, every=1) as recorder:
        steps_of(model, sgd, recorder.loss, 3, x=x)
    _, kept = read_dump(tmp_path)
    first, last = kept["heads"], kept["heads.out_proj"]
    assert first["weight"].shape == (24, 8) and ("input" in first) is (attend == "self")
    assert last["weight"].shape == (8, 8) and last["gradient"].shape == x.shape
    found = {one.layer: one for one in what_if(tmp_path, "E4M3")}
    assert 0 < found["heads.out_proj"].error_input < 0.1
    assert (0 < found["heads"].error_output < 0.1) is (attend == "self")


@each("layers, words", (
    ({"a": {"input": torch.ones(4, 3), "weight": torch.ones(5, 7)}}, "input"),
    ({"a": {"gradient": torch.ones(4, 3), "weight": torch.ones(5, 7)}}, "gradient"),
    ({"a": {"input": torch.ones(4, 7), "gradient": torch.ones(3, 5), "weight": torch.ones(5, 7)}}, "rows"),
    ({"a": {"input": torch.tensor(1.0), "weight": torch.ones(5, 7)}}, "input"),
    ({"a": {"input": torch.ones(0, 7), "weight": torch.ones(5, 7)}}, "input"),
    ({"a": {"input": torch.ones(4, 7, dtype=torch.complex64), "weight": torch.ones(5, 7)}}, "input"),
    ({"a": {"weight": torch.ones(5, 7, dtype=torch.int32)}}, "weight"),
    ({"a": {"weight": torch.ones(5)}}, "weight"),
    ({"a": {"weight": torch.ones(0, 7)}}, "weight"),
    ({"a": {"weight": torch.ones(5, 7), "other": torch.ones(1)}}, "other"),
    ({"a": {"input": torch.tensor(1.0), "weight": torch.ones(5, 7, 3)}}, "input"),
    ({3: {"weight": torch.ones(5, 7)}}, "name"),
    ({"a": {"weight": torch.ones(5, 7).to_sparse()}}, "weight"),
))
def test_a_dump_whose_tensors_do_not_fit_is_refused_in_one_line(layers, words, tmp_path, capsys):
    torch.save({"altgrad_dump": 1, "step": 1, "layers": layers}, tmp_path / "dump.pt")
    assert main(["what-if", str(tmp_path), "--format", "E5M2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said


def test_two_optimizers_in_turn_make_one_step_an_iteration():
    recorder = two_in_turn(10, tells=False, every=1)
    assert recorder.recording.steps == list(range(1, 11)) and recorder.cause is None


@each("pace", (1, 3))
def test_an_optimizer_that_rests_ends_no_step_and_holds_none_up(pace):
    "The second optimizer steps once in `pace` iterations, and at first not at all."
    torch.manual_seed(0)
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (one, other)]
    with altgrad.record([one, other], optimizers, every=1) as recorder:
        for i in range(24):
            other(one(torch.randn(8, 4))).square().mean().backward()
            optimizers[0].step()
            if i >= 12 and i % pace == 0: optimizers[1].step()
            for o in optimizers: o.zero_grad()
    # the first iteration waits for the second optimizer, which does not come
    assert 22 <= len(recorder.recording.steps) <= 24 and recorder.cause is None


class Overflows(nn.Linear):
    "A layer whose results are infinite when `now` is set."
    now = False

    def forward(self, x): return super().forward(x) * (math.inf if self.now else 1.0)


class Checkpointed(nn.Module):
    "Blocks of which a checkpoint, of one kind or the other, keeps no results; None: without."
    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.into, self.out, self.reentrant = nn.Linear(4, 8), nn.Linear(8, 1), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Overflows(8, 8)) for _ in range(4))
        self.attend = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        x = self.into(x)
        attended = lambda x: self.attend(x, x, x, need_weights=False)[0]
        for block in (*self.blocks, attended):
            if self.reentrant is None: x = block(x)
            else: x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


@each("every", (1, 10))
def test_layers_in_a_checkpoint_have_the_places_of_the_forward_pass(every):
    found = {}
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with altgrad.record(model, optimizer, every=every) as recorder:
            for step in range(1, 8):
                model.blocks[1][1].now = step == 6
                loop(model, optimizer, 1, torch.randn(3, 4))
        found[reentrant] = [layer["name"] for layer in recorder.recording.layers]
        assert (recorder.cause.layer, recorder.cause.step) == ("blocks.1.1", 6) and not recorder.stopped
    assert found[True] == found[False] == found[None]


def two_paces(every: int, parts: bool, cleared: str) -> Recorder:
    """A loop whose second optimizer steps once in three batches. Gradients are cleared after a step, or
    before the first backward pass that follows it; or those of one optimizer never are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    ahead, behind = model[:2], model[2:]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (behind, ahead)]
    with altgrad.record(model, optimizers, every=every) as recorder:
        for batch in range(1, 34):
            x = torch.randn(8, 8)
            loss = (behind(ahead(x)) if parts else model(x)).square().mean()
            for n, optimizer in enumerate(optimizers):
                if cleared == "before" and (n == 0 or batch % 3 == 1): optimizer.zero_grad()
            recorder.loss(loss).backward()
            for n, optimizer in enumerate(optimizers):
                if n and batch % 3: continue
                optimizer.step()
                if cleared == "after" or cleared == f"not {1 - n}": optimizer.zero_grad()
    assert not recorder.stopped
    return recorder


@each("cleared", ("after", "before"))
@each("parts", (False, True))
@pytest.mark.parametrize("every", (1, 2, 5, 10))
def test_an_optimizer_that_accumulates_beside_another_is_not_accused(every, parts, cleared):
    assert two_paces(every, parts, cleared).cause is None


@each("cleared", ("not 0", "not 1"))
@pytest.mark.parametrize("every", (1, 2, 5, 10))
def test_one_of_two_optimizers_whose_gradients_are_never_cleared_is_named(every, cleared):
    cause = two_paces(every, False, cleared).cause
    assert cause is not None and cause.kind == "gradients not cleared"


def attacked(model, optimizer, x, how: str):
    "A loss, and old gradients cleared only after some other gradients were made, or never."
    x.requires_grad_()
    if how == "by hand":
        loss = model(x).square().mean()
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))): p.grad = g
        return loss
    if "backward" in how:
        model(x).square().mean().backward()
        loss = model((x + 0.1 * x.grad.sign()).detach()).square().mean()
    else:
        g, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (g.norm(dim=1) - 1).square().mean() + model((x + 0.1 * g.sign()).detach()).square().mean()
    if "kept" not in how: optimizer.zero_grad(set_to_none="zeros" not in how)
    loss.backward()
    return loss


@each("every", (1, 4))
@pytest.mark.parametrize("how", ("grad", "grad, zeros", "grad, kept", "backward", "backward, zeros", "by hand"))
def test_gradients_are_kept_where_a_backward_pass_adds_to_them(how, every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with altgrad.record(model, optimizer, every=every) as recorder:
        for _ in range(9):
            recorder.loss(attacked(model, optimizer, torch.randn(8, 8), how))
            optimizer.step()
    cause = recorder.cause
    assert not recorder.stopped and (cause and cause.kind) == ("gradients not cleared" if "kept" in how else None)


@each("every", (1, 4))
def test_a_scaler_skips_a_fused_step_as_another_one(every):
    "A skipped step is none, and gradients have no scale."
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        model, scaler = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        with altgrad.record(model, optimizer, every=every) as recorder:
            for step in range(12):
                optimizer.zero_grad()
                scaler.scale(recorder.loss(model(torch.randn(4, 8)).square().mean())).backward()
                if step in (3, 7): model[1].weight.grad[0, 0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
        assert recorder.cause is None and not recorder.stopped
        found.append(recorder.recording)
    a, b = found
    assert a.steps == b.steps == list(range(1, 11)) and a.series == b.series and a.facts == b.facts
    same = lambda r, what: [r.get(layer, "weight gradient", what) for layer in "01"]
    for what in ("amax", "elements", "inf"): assert np.array_equal(same(a, what), same(b, what), equal_nan=True)


@each("every", (1, 4))
def test_a_layer_that_is_frozen_has_no_gradient_that_could_be_kept(every):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model[0].requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    with altgrad.record(model, sgd, every=every) as recorder:
        for _ in range(9):
            model(torch.randn(8, 8)).square().mean().backward()
            sgd.step()
    assert recorder.cause.kind == "gradients not cleared"


def test_layers_that_an_optimizer_is_given_later_are_not_forgotten():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    sgd = torch.optim.SGD(model[2].parameters(), lr=1e-3)
    with altgrad.record(model, sgd, every=1) as recorder:
        steps_of(model, sgd, recorder.loss, 3)
        assert recorder.cause.kind == "not in the optimizer"
        sgd.add_param_group({"params": list(model[0].parameters())})
        model.zero_grad()
        steps_of(model, sgd, recorder.loss, 3)
    assert recorder.cause is None


def test_what_transforms_call_stops_no_recorder():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    def loss(w, x): return torch.func.functional_call(model, w, (x[None],)).square().mean()
    with altgrad.record(model, sgd, every=1) as recorder:
        for _ in range(3):
            steps_of(model, sgd, recorder.loss, 1)
            torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.randn(4, 8))
    assert not recorder.stopped and recorder.cause is None and recorder.recording.steps == [1, 2, 3]


@each("every", (1, 4))
@each("kind", ("spectral_norm", "weight_norm"))
def test_a_weight_with_a_parametrization_is_left_alone(kind, every):
    "To read one of a spectral norm is an iteration of its vectors."
    def run(watched):
        torch.manual_seed(0)
        norm = getattr(nn.utils.parametrizations, kind)
        model = nn.Sequential(norm(nn.Linear(8, 16)), nn.ReLU(), norm(nn.Linear(16, 1)))
        recorder = altgrad.record(model, sgd := torch.optim.SGD(model.parameters(), lr=0.1), every=every)
        if watched: recorder.start()
        steps_of(model, sgd, lambda loss: loss, 6)
        recorder.stop()
        return model.state_dict(), recorder
    (plain, _), (seen, recorder) = run(False), run(True)
    assert recorder.cause is None and recorder.recording.steps == list(range(1, 7))
    assert all(torch.equal(value, seen[name]) for name, value in plain.items())


def test_a_model_that_is_used_by_its_parts_is_recorded():
    "Its own forward is never called, as in Lightning's training_step."
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, every=1) as recorder:
        steps_of(lambda x: model["b"](model["a"](x)), sgd, recorder.loss, 4)
    assert recorder.recording.steps == [1, 2, 3, 4] and len(recorder.recording.losses()) == 4
    assert recorder.recording.get("a", "input", "elements").tolist() == [16 * 8] * 4


# steps that are not measured

AT_ONCE = {  # kinds that a glance sees
    "non-finite data", "data out of range", "non-finite loss", "overflow", "division by zero", "rate too large",
    "initial weights too large", "not in the optimizer", "cut from the loss", "changed outside a step", "rate is zero",
}
TWICE = {"gradient lost", "coarse sums", "gradient underflow"}  # that two measured steps have to show


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in faults.FAULTS if f.family == "conv"], ids=lambda f: f.id)
def test_between_measured_steps_a_fault_is_seen_at_once_or_late_and_never_as_another(fault):
    "Steps 1, 4 and 8 are measured; most faults come at 5. A loss that rises has the next step measured, too."
    cause = recorded(fault.run(), every=4).cause
    if fault.kind in TWICE: assert cause is None
    else:
        assert (cause.kind, cause.layer) == (fault.kind, fault.layer)
        at_once = fault.kind in AT_ONCE or fault.step == 1
        assert cause.step == fault.step if at_once else fault.step <= cause.step <= 8


@pytest.mark.slow
@pytest.mark.parametrize("run", faults.HEALTHY, ids=lambda r: r.id)
def test_a_healthy_run_is_not_accused_between_measured_steps(run):
    assert recorded(run.run(), every=4).cause is None


def test_a_glance_has_the_magnitudes_of_a_measured_step():
    full, glanced = (recorded(faults.Run("conv"), every=every).recording for every in (1, 10))
    assert glanced.measured().tolist() == [True] + 8 * [False] + [True] and full.measured().all()
    for layer, tensor in glanced.series:
        if tensor in ("input", "output", "weight", "weight gradient"):
            assert (glanced.get(layer, tensor, "amax") == full.get(layer, tensor, "amax")).all()
            assert not glanced.bad(layer, tensor).any()
    left = [r.get("fc1", "weight update", "reference") for r in (full, glanced)]
    assert (left[0] == left[1]).all()
    assert (full.rms("fc1", "weight update") == pytest.approx(glanced.rms("fc1", "weight update"), rel=2048 * 2.0**-24))


def test_a_glance_takes_few_operations():
    """For a layer with weight and bias: seven magnitudes, a sample before and after, two norms, what
    moves them; what is done with the one number that each gives is not counted."""
    class Calls(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            Calls.n += any(x.numel() > 1 for x in given)
            return func(*args, **(kwargs or {}))

    def operations(every, layers=8):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        recorder = altgrad.record(model, sgd, every=every or 1)
        if every: recorder.start()
        loop(model, sgd, 2, torch.ones(2, 8))  # of the step that follows, the end of the second is a part
        Calls.n = 0
        with Calls(): loop(model, sgd, 1, torch.ones(2, 8))
        if every: recorder.stop()
        return Calls.n / layers
    bare, glanced, measured = map(operations, (0, 10, 1))
    assert glanced - bare <= 24 and measured - bare > 5 * (glanced - bare)


def test_the_ring_keeps_the_last_measured_steps_too():
    run = faults.Run("conv", steps=23)
    assert recorded(run, every=5, last=3).recording.steps == [1, 10, 15, 20, 21, 22, 23]


@each("every", (0, 2.0, True, None))
def test_every_is_a_number_of_steps(every):
    layer = nn.Linear(3, 3)
    with pytest.raises(InputError, match="every must be"):
        altgrad.record(layer, torch.optim.SGD(layer.parameters()), every=every)


def test_a_fault_that_only_a_measured_step_shows_is_found_after_the_loss_rose(tmp_path, capsys):
    "A layer of stale scale from step 12 on; the loss rises at 13, and a measured step would come at 20."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), Clips(32, 32), nn.Linear(32, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    def before(step): model[1].now = step >= 12
    with altgrad.record(model, sgd, folder=tmp_path) as recorder:
        for step in range(1, 17):
            before(step)
            x = torch.randn(16, 8)
            y = model(x)
            recorder.loss((model[2](model[1].whole) - y).square().mean() + 1e-3).backward()
            sgd.step()
    told = capsys.readouterr().err
    assert recorder.recording.measured().nonzero()[0].tolist() == [0, 9, 13]  # steps 1, 10, 14
    cause = first_cause(read_recording(tmp_path))
    assert (cause.kind, cause.layer, cause.step) == ("stale scale", "1", 14)
    assert told.startswith("altgrad.record, step 14: step 14: stale scale in 1") and told.count("\n") == 1


class Clips(nn.Linear):
    "A layer that clips what it is given far below its range from the step `now` on."
    now, whole = False, None

    def forward(self, x):
        self.whole = super().forward(x).detach()
        return super().forward(x.clamp(-0.1, 0.1)) if self.now else super().forward(x)


# gradients that a step makes itself


def closed_loop(kind: str, build, every: int, steps: int = 12) -> Recorder:
    "A recorder of a loop whose closure makes the gradients: in the step, or before it."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    optimizer, batches = build(model.parameters()), torch.randn(1, 16, 8).expand(steps, -1, -1)
    with altgrad.record(model, optimizer, every=every) as recorder:
        for x in batches:
            def closure(x=x):
                optimizer.zero_grad()
                loss = recorder.loss(model(x).square().mean())
                loss.backward()
                return loss
            if kind == "closure": optimizer.step(closure)
            elif kind == "keyword": optimizer.step(closure=closure)
            else:
                loss = closure()
                optimizer.step(lambda loss=loss: loss)
    assert not recorder.stopped
    return recorder


ONE_CALL = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=1),
}


@each("kind", ("closure", "keyword"))
@each("every", (1, 5))
@pytest.mark.parametrize("build", ONE_CALL.values(), ids=ONE_CALL)
def test_gradients_of_a_closure_are_those_of_its_own_step(build, every, kind):
    inside, before = closed_loop(kind, build, every), closed_loop("before", build, every)
    a, b = inside.recording, before.recording
    assert inside.cause is None and a.steps == list(range(1, 13)) and a.facts == b.facts
    assert a.series == b.series and np.array_equal(a.values, b.values, equal_nan=True)
    assert np.isfinite(a.get("0", "weight gradient", "amax")).all()
    assert np.isfinite(a.get("0", "weight update", "squares")).all()


@each("every", (1, 3))
def test_a_closure_that_is_called_many_times_is_one_step(every):
    recorder = closed_loop("closure", lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=4), every)
    r = recorder.recording
    assert recorder.cause is None and r.steps == list(range(1, 13))
    assert all(facts["steps"] == 1 for facts in r.facts)


def test_a_closure_that_is_never_called_and_one_that_fails():
    class Ignores(torch.optim.SGD):
        def step(self, closure=None): return super().step()
    def fails(): raise ArithmeticError
    layer = nn.Linear(3, 3)
    sgd = Ignores(layer.parameters(), lr=0.1)
    with altgrad.record(layer, sgd, every=1) as recorder:
        for _ in range(3):
            layer(torch.randn(2, 3)).square().sum().backward()
            sgd.step(fails)
            sgd.zero_grad()
    assert recorder.cause is None and recorder.recording.steps == [1, 2, 3]
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    with altgrad.record(layer, sgd, every=1) as recorder:
        with pytest.raises(ArithmeticError): sgd.step(fails)
        loop(layer, sgd, 4)
    assert recorder.cause is None and not recorder.stopped


@each("where", ("step", "closure"))
@each("every", (1, 4))
def test_a_step_that_fails_takes_no_other_step_with_it(where, every):
    class Nested(torch.optim.AdamW):
        def step(self, closure=None):
            if where == "step" and now["fails"]: raise ArithmeticError
            return super().step(closure)
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # from now on its step calls hooks, too
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer, now = Nested(model.parameters(), lr=1e-3), {"fails": False}
    def closure():
        optimizer.zero_grad()
        recorder.loss(model(torch.randn(16, 4)).square().mean()).backward()
        if where == "closure" and now["fails"]: raise ArithmeticError
    with altgrad.record(model, optimizer, every=every) as recorder:
        for i in range(8):
            now["fails"] = i == 2
            if where == "step": closure()
            try: optimizer.step(closure if where == "closure" else None)
            except ArithmeticError: pass
    # the iteration that made no step is part of the next one
    assert recorder.cause is None and recorder.recording.steps == list(range(1, 8))
    moved = recorder.recording.get("0", "weight update", "reference")
    assert np.isfinite(moved).all()


# optimizers that a recorder was not given


def another(kind: str, steps: int = 3):
    "A model, an optimizer, and another that takes its place, or never does."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    first = torch.optim.SGD(model.parameters(), lr=0.01)
    second = {
        "ours": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "another model's": lambda: torch.optim.AdamW(nn.Linear(2, 2).parameters()),
        "an average's": lambda: torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1),
    }[kind]()
    return model, first, second


@pytest.mark.parametrize("make", (altgrad.record, altgrad.stall))
@each("kind", ("ours", "another model's", "an average's"))
def test_an_optimizer_that_takes_the_place_of_another_is_said_once(kind, make, capsys):
    model, first, second = another(kind)
    told = lambda loss: loss
    with make(model, first, every=1) as meter:
        steps_of(model, first, told, 3)
        for _ in range(2): steps_of(model, second, told, 2)
        if kind != "ours": steps_of(model, first, told, 1)
    said = capsys.readouterr().err
    moved = "moved the model's parameters, and the meter was not given that optimizer"
    assert not meter.stopped
    if kind == "ours":
        assert f"4 steps of AdamW, from step 4 on, {moved}" in meter.finding
        assert said == (
            f"altgrad.{make.__name__}, step 4: AdamW moves the model's parameters, and the meter was "
            "not given that optimizer\n"
        )
    else: assert moved not in meter.finding and said == ""
    if kind == "ours" and make is altgrad.record: assert meter.recording.steps == list(range(1, 8))
    second.step()
    assert not capsys.readouterr().err, "after the end nothing is seen"


class Around(torch.optim.Optimizer):
    "An optimizer that makes its step by one that it holds."
    def __init__(self, inner):
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.held = inner

    def step(self, closure=None): return self.held.step()


@each("watched", ("inner", "outer"))
@pytest.mark.parametrize("make", (altgrad.record, altgrad.stall))
def test_an_optimizer_within_another_is_no_stranger(make, watched, capsys):
    model, inner, _ = another("ours")
    outer = Around(inner)
    with make(model, inner if watched == "inner" else outer, every=1) as meter:
        steps_of(model, outer, lambda loss: loss, 3)
    assert meter.steps == 3 and not meter.unwatched and "not given" not in capsys.readouterr().err


@pytest.mark.parametrize("make", (altgrad.record, altgrad.stall))
def test_a_meter_that_nobody_holds_is_let_go(make):
    gc.collect()
    make(*another("ours")[:2]).start().stop()  # hooks of meters that are gone go when one begins
    in_module = sys.modules["torch.optim.optimizer"]
    hooks = in_module._global_optimizer_pre_hooks, in_module._global_optimizer_post_hooks
    before = [dict(kept) for kept in hooks]
    model, sgd, other = another("ours")
    gone = weakref.ref(make(model, sgd).start())
    assert [len(kept) for kept in hooks] == [len(kept) + 1 for kept in before]
    parts = [weakref.ref(model), weakref.ref(sgd)]
    steps_of(model, sgd, lambda loss: loss, 1)
    del model, sgd, other
    gc.collect()
    assert gone() is None and all(part() is None for part in parts)
    make(*another("ours")[:2]).start().stop()
    assert [dict(kept) for kept in hooks] == before


@pytest.mark.parametrize("make", (altgrad.record, altgrad.stall))
def test_a_meter_may_be_collected_while_torch_goes_through_its_hooks(make):
    *parts, other = another("another model's")
    parts.append(make(*parts).start())
    gone = weakref.ref(parts[-1])
    def drop(*given):
        parts.clear()
        gc.collect()
    to_every = sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook
    handles = [to_every(drop), to_every(lambda *given: None)]  # torch goes on to the second
    try: other.step()
    finally:
        for handle in handles: handle.remove()
    assert gone() is None


def test_gradients_that_are_dropped_as_they_are_used_are_said_and_nobody_is_accused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    optimizer = altgrad.without_master(model, torch.optim.AdamW, lr=1e-3, release_gradients=True)
    optimizer.releases_gradients = True
    with altgrad.record(model, optimizer, every=1) as recorder, altgrad.stall(model, optimizer) as meter:
        steps_of(model, optimizer, recorder.loss, 6)
    told = "gradients were dropped as they were used (release_gradients=True), in steps that a meter does not see"
    assert recorder.cause is None and recorder.finding == f"nothing broke in 6 steps; {told}"
    assert meter.finding == f"nothing was measured: {told}"


# copies of a model that is recorded


def nothing_of_it_is_recorded(copied: nn.Module, recorder: Recorder) -> None:
    steps = recorder.steps
    copied(torch.full((2, 8), torch.nan))
    assert recorder.steps == steps and not recorder.stopped


def test_a_model_can_be_saved_and_copied_while_it_is_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, every=1) as recorder:
        average = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(4):
            steps_of(model, sgd, recorder.loss, 1)
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            nothing_of_it_is_recorded(copy.copy(model[0]), recorder)
            torch.save(model, tmp_path / "model.pt")
            copies.append(torch.load(tmp_path / "model.pt", weights_only=False))
            average.update_parameters(model)
            for one in (*copies, average): nothing_of_it_is_recorded(one, recorder)
            pickle.dumps(sgd), copy.deepcopy(sgd).step()
    assert recorder.cause is None and recorder.recording.steps == [1, 2, 3, 4]


def test_a_saved_model_asks_for_no_altgrad(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4))
    with altgrad.record(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        torch.save(model, tmp_path / "model.pt")
    read = (
        "import sys, torch; sys.modules['altgrad'] = None; "
        "print(torch.load(sys.argv[1], weights_only=False)(torch.ones(1, 8)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", read, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert "torch.Size([1, 4])" in done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draw", (torch.jit.trace, torch.export.export), ids=("trace", "export"))
def test_a_graph_may_be_drawn_while_a_model_is_recorded(draw):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with altgrad.record(model, sgd, every=1) as recorder:
        for _ in range(3):
            steps_of(model, sgd, recorder.loss, 1)
            draw(model, (torch.ones(2, 8),))
    assert recorder.cause is None and recorder.recording.steps == [1, 2, 3] and not recorder.stopped


# in the loops of frameworks


class Rows(torch.utils.data.Dataset):
    "Inputs and the sums of their elements; the row `bad` has a NaN."
    def __init__(self, bad=None):
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        if bad is not None: self.x[bad, 3] = torch.nan

    def __len__(self): return 64

    def __getitem__(self, i): return {"x": self.x[i], "labels": self.x[i].nansum()[None]}


class Sums(nn.Module):
    "Two linear layers, the second of which may divide by zero; it returns its loss, as transformers asks."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.calls, self.breaks_at = nn.Linear(8, 32), Divides(32, 1), 0, 0

    def forward(self, x, labels):
        self.calls += self.training
        self.down.now = self.training and self.calls == self.breaks_at
        return {"loss": (self.down(self.up(x)) - labels).square().mean()}


def in_trainer(model, folder, data, callback=lambda trainer: None, **more) -> object:
    "Train in transformers; the callback."
    import transformers

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args): return None

    usual = {"max_steps": 6, "per_device_train_batch_size": 8, "report_to": [], "save_strategy": "no",
             "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "seed": 0}
    arguments = transformers.TrainingArguments(folder, **{**usual, **more})
    trainer = InOrder(model, arguments, train_dataset=data, eval_dataset=Rows(bad=1))
    made = callback(trainer)
    if made is not None: trainer.add_callback(made)
    trainer.train()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("micro", (1, 2))
def test_in_the_trainer_of_transformers(tmp_path, micro, capsys):
    "Evaluation meets a NaN at every step, and is no step."
    model, plain, folder = Sums(), Sums(), tmp_path / "record"
    model.breaks_at = plain.breaks_at = 4 * micro
    more = {"gradient_accumulation_steps": micro, "eval_strategy": "steps", "eval_steps": 1}
    watch = in_trainer(model, tmp_path / "a", Rows(), lambda t: transformers_record(t, folder), **more)
    in_trainer(plain, tmp_path / "b", Rows(), **more)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(model.parameters(), plain.parameters()))
    r, cause = read_recording(folder), first_cause(read_recording(folder))
    assert r.steps == [1, 2, 3, 4] and r.losses()[:3].min() > 0 and math.isnan(r.losses()[3])
    assert (cause.kind, cause.layer, cause.step) == ("zero scale", "down", 4)
    assert str(cause) in capsys.readouterr().err and str(watch.meter.cause) == str(cause)
    assert not model._forward_hooks and not model._forward_pre_hooks


def with_lightning(model, data, callback, steps=6, fails_at=0, **more):
    "Train in Lightning, whose training_step calls a part of its module."
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, i):
            if i + 1 == fails_at: raise KeyError("the loop's own")
            return self.net(**batch)["loss"]

        def validation_step(self, batch, i): self.net(**batch)

        def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=1e-4)

    loaders = (torch.utils.data.DataLoader(rows, 8) for rows in (data, Rows(bad=1)))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(accelerator="cpu", max_steps=steps, callbacks=[callback] if callback else [],
                         val_check_interval=2, **dict.fromkeys(quiet, False), **more)
    trainer.fit(Module(), *loaders)
    return callback


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("micro", (1, 2))
def test_in_lightning(tmp_path, micro, capsys):
    model, plain = Sums(), Sums()
    model.breaks_at = plain.breaks_at = 3 * micro
    more = {"steps": 4, "accumulate_grad_batches": micro}
    watch = with_lightning(model, Rows(), lightning_record(tmp_path), **more)
    with_lightning(plain, Rows(), None, **more)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(model.parameters(), plain.parameters()))
    r, cause = read_recording(tmp_path), first_cause(read_recording(tmp_path))
    assert r.steps == [1, 2, 3] and r.losses()[:2].min() > 0 and math.isnan(r.losses()[2])
    assert (cause.kind, cause.layer, cause.step) == ("zero scale", "net.down", 3)
    assert str(watch.meter.cause) == str(cause) and str(cause) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", (1, 10))
@pytest.mark.parametrize("micro", (1, 2))
def test_a_healthy_run_in_lightning_is_not_accused(every, micro):
    "Its optimizers take a closure that makes the gradients."
    watch = with_lightning(Sums(), Rows(), lightning_record(every=every), steps=25, accumulate_grad_batches=micro)
    r = watch.meter.recording
    assert watch.meter.cause is None and r.steps == list(range(1, 26))
    assert np.isfinite(r.get("net.up", "weight gradient", "amax")).all()
    assert np.isfinite(r.get("net.up", "weight update", "squares")).all()


@pytest.mark.filterwarnings("ignore")
def test_lightning_gives_its_batches_and_an_exception_leaves_a_recording(tmp_path):
    bad = with_lightning(Sums(), Rows(bad=19), lightning_record(), steps=4).meter.cause
    assert (bad.kind, bad.step) == ("non-finite data", 3)
    with pytest.raises(KeyError): with_lightning(Sums(), Rows(), lightning_record(tmp_path), fails_at=4)
    r = read_recording(tmp_path)
    assert r.steps == [1, 2, 3, 4] and len([f for f in r.facts if "loss" in f]) == 3  # of the fourth, the batch
    assert r.get("", "input", "amax")[3] > 0


def test_with_accelerate_and_a_wrapped_optimizer():
    import accelerate

    model, data = Sums(), torch.utils.data.DataLoader(Rows(), 8)
    own = accelerate.Accelerator(cpu=True)
    model.breaks_at = 3
    model, optimizer, data = own.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)
    with altgrad.record(model, optimizer) as recorder:
        for batch in data:
            own.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    cause = recorder.cause
    assert (cause.kind, cause.layer, cause.step) == ("zero scale", "down", 3)


@each("make", (
    lambda: lightning_record(every=0), lambda: lightning_record(last="5"), lambda: lightning_record(dump=True),
    lambda: transformers_record(None, every=1.5),
))
def test_callbacks_refuse_wrong_settings_at_once(make):
    with pytest.raises(InputError): make()


SHARDED = """
import copy, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import altgrad
dist.init_process_group("gloo")
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
losses = []
for watched in (True, False):
    model = copy.deepcopy(plain)
    for part in (model[0], model[2], model): fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = altgrad.record(model, optimizer, f"{sys.argv[1]}/{dist.get_rank()}", every=2)
    if watched: recorder.start()
    for step in range(4):
        loss = model(torch.full((2, 16), 1.0 + step + dist.get_rank())).square().mean()
        if watched: recorder.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if watched: recorder.stop()
    if watched: assert "0.weight is spread over several processes" in recorder.finding
assert losses[:4] == losses[4:], "the loop went on, to the same numbers"
dist.destroy_process_group()
print("fine", flush=True)
"""


@pytest.mark.slow
def test_a_sharded_model_is_refused_once_and_trains_on(tmp_path):
    (tmp_path / "sharded.py").write_text(SHARDED, encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = preloaded.torchrun(2, tmp_path / "sharded.py", tmp_path, env=env)
    assert done.stdout.count("fine") == 2, done.stderr[-3000:]
    assert done.stderr.count("altgrad.record stopped at step 0: 0.weight is spread over") == 2


def test_a_loop_that_never_steps_is_told_so(capsys):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with altgrad.record(model, torch.optim.SGD(model.parameters(), lr=0.1)) as recorder:
        for _ in range(3): model(torch.ones(2, 8)).square().mean().backward()
    said = "but no optimizer made a step in the recorder"
    assert said in recorder.finding and capsys.readouterr().err.count(said) == 1


@each("every", (1, 2, 3))
def test_one_spike_is_no_divergence_however_often_the_loss_is_told(every):
    from altgrad.watching.cause import diverges, usual_losses
    losses = np.full(24, np.nan)
    losses[::every] = 1.0
    losses[12] = 10.0
    assert diverges(losses, usual_losses(losses)) is None
    losses[12 + every] = 10.0
    assert diverges(losses, usual_losses(losses)) == 12


def test_a_folder_that_is_no_path_is_refused_at_once():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with pytest.raises(InputError, match="folder"): altgrad.record(layer, optimizer, folder=5)


def test_a_batch_without_tokens_leaves_a_sparse_gradient_and_a_recorder(capsys):
    table, head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)
    both = nn.ModuleList([table, head])
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(head.parameters(), 0.1)]
    with altgrad.record(both, optimizers, every=1) as recorder:
        for tokens in (torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64), torch.tensor([3])):
            for o in optimizers: o.zero_grad()
            (head(table(tokens)).sum() + head(torch.ones(1, 4)).sum()).backward()
            for o in optimizers: o.step()
    assert not recorder.stopped and recorder.steps == 3


def test_tiny_and_huge_gradients_lose_what_others_lose(tmp_path):
    from altgrad.watching.what_if import _layer, _Rounder
    from altgrad.numbers.formats import get_format
    g = torch.Generator().manual_seed(0)
    kept = {key: torch.randn(16, 16, generator=g) for key in ("weight", "input", "gradient")}
    def lost(size):
        q = _Rounder(get_format("E4M3"), "tensor", "nearest", None)
        row = _layer("0", {**kept, "gradient": kept["gradient"] * size}, q)
        return row.error_input, row.error_weight
    # scales by powers of two move no bit of normal numbers; others are half a spacing of float32 apart
    for size in (2.0**-80, 2.0**66): assert lost(size) == pytest.approx(lost(1.0), rel=1e-6)
