"""Wrongs that were silent: each says what it is, or is none any more."""
import gc
import hashlib
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import altgrad
from altgrad.basics import InputError
from altgrad.cli import main
from altgrad.evidence import instrument
from altgrad.evidence.instrument import Arm, Bench, Task, build_checkpoint, run_arm
from altgrad.evidence.replicas import run_arms, stacks
from altgrad.evidence.sweep import Ledger, Sweep, read_matrix
from altgrad.geometry import storage
from altgrad.geometry.catalogue import RULES, Rule
from altgrad.geometry.optim import GeometryOptimizer
from altgrad.geometry.storage import STORAGES
from altgrad.model.gpt import PRESETS, GPTConfig
from altgrad.numbers.kernels import native_now
from altgrad.training import config, trainer
from tiny import HEAD, TEXT

TASK = Task(steps=6, batch_size=2, warmup=2, chunks=2, windows=2, every=3)
MATRIX = HEAD + """\
  - {format: E4M3, storage: fp32, power: 0.5, lr: 0.01}
tune: {seeds: [1000], points: 3, most: 3}
confirm: {seeds: [0]}
task: {steps: 6, batch_size: 2, warmup: 2, chunks: 2, windows: 2, every: 3}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    "A folder with a text, a cache, a checkpoint and a matrix; a small model beside the presets."
    folder = tmp_path_factory.mktemp("silent")
    (folder / "text.txt").write_text(TEXT)
    (folder / "matrix.yaml").write_text(MATRIX)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTGRAD_CACHE", str(folder / "cache"))
        patch.setitem(PRESETS, "gpt-mini", GPTConfig(1, 2, 16, 16))
        build_checkpoint(bench(folder), "tiny-0")
        yield folder


def bench(folder: Path) -> Bench:
    return Bench(
        folder / "checkpoints", {"tiny": f"path:{folder / 'text.txt'}"}, TASK, folder / "cache"
    )


@pytest.fixture(scope="module")
def swept(here) -> Sweep:
    "A sweep whose runs were all made."
    sweep = Sweep(read_matrix(MATRIX), here / "ledger", bench(here))
    with sweep.ledger.writing() as append:
        while jobs := sweep.plan().jobs:
            for job in jobs:
                row = {**asdict(job.arm), **run_arm(job.arm, sweep.bench), "stage": job.stage}
                append(row)
                sweep.rows[row["run"]] = row
    return sweep


ARITHMETIC = "m.lerp_(g, rest1)", "m.lerp_(g, 0.9 * rest1)", "stage tune: 3 runs"
WORDS = (
    '"Adam\'s step for the gradient `g`; updates the moments."',
    '"Another sentence."  # and a comment',
    "stage done: 0 runs",
)


@pytest.mark.parametrize("old, new, runs", [ARITHMETIC, WORDS], ids=["arithmetic", "words"])
def test_changed_code_is_another_run(here, swept, tmp_path, monkeypatch, capsys, old, new, runs):
    "What a sweep would do after an edit of `optim`: the package's files say what its code is."
    package = shutil.copytree(Path(altgrad.__file__).parent, tmp_path / "altgrad")
    source = (package / "geometry/optim.py").read_text(encoding="utf-8")
    assert source.count(old) == 1
    (package / "geometry/optim.py").write_text(source.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(instrument, "files", lambda name: tmp_path / name)
    monkeypatch.setattr(instrument, "code_here", instrument.code_here.__wrapped__)  # read anew
    label = f"tiny=path:{here / 'text.txt'}"
    main(["sweep", str(here / "matrix.yaml"), "--dry-run", "--out", str(here / "ledger"),
          "--corpus", label, "--checkpoints", str(here / "checkpoints")])
    text = capsys.readouterr().out
    assert runs in text and ("4 rows of the code" in text) == ("3 runs" in runs), text


def test_rows_carry_the_code_and_old_ones_count_only_when_told(here, swept, tmp_path):
    rows = swept.ledger.rows()
    assert {row["code"] for row in rows} == {swept.bench.code}
    assert all(instrument.run_id(instrument.row_identity(row)) == row["run"] for row in rows)
    # as they were before
    old = [{key: v for key, v in row.items() if key != "code"} for row in rows]
    for row in old: row["run"] = instrument.run_id(instrument.row_identity(row))
    with Ledger(tmp_path).writing() as append:
        for row in old: append(row)
    before = Sweep(read_matrix(MATRIX), tmp_path, bench(here))
    assert before.plan().stage == "tune" and before.others == {"none": 4}
    assert Sweep(read_matrix(MATRIX), tmp_path, bench(here), ["none"]).plan().stage == "done"
    with pytest.raises(InputError, match="unknown code"):
        Sweep(read_matrix(MATRIX), tmp_path, bench(here), ["0000"])


def test_both_engines_give_a_run_the_same_name(here):
    arm = Arm(checkpoint="tiny-0", corpus="tiny", power=0.5)
    alone, stacked = run_arm(arm, bench(here)), run_arms([arm], bench(here))[0]
    assert alone["run"] == stacked["run"] and alone["code"] == stacked["code"]


def test_every_module_that_a_run_calls_is_part_of_its_identity(here):
    package, files = Path(altgrad.__file__).parent, set()

    def note(frame, event, _): files.add(frame.f_code.co_filename)  # once a call, and of no line

    ready = bench(here).with_task(replace(TASK, steps=2, warmup=1, chunks=1, windows=1))
    ready.corpus("tiny")  # a text's tokens have a hash of their own
    arms = [Arm(checkpoint="tiny-0", corpus="tiny", storage=s, lr=0.01) for s in STORAGES]
    arms += [
        Arm(checkpoint="tiny-0", corpus="tiny", rule=r, lr=0.01)
        for r, rule in RULES.items()
        if rule.knows_grids
    ]
    stacked = [
        replace(arm, seed=1)
        for arm in arms
        if stacks(STORAGES[arm.storage]) and RULES[arm.rule].stacked()
    ]
    native_now()  # a process looks once where the kernels in C++ lie
    gc.collect()  # what other tests have left is let go of before,
    outside = torch.nn.Linear(1, 1)
    altgrad.stall(outside, torch.optim.SGD(outside.parameters())).start().stop()  # and their hooks
    sys.settrace(note)
    try:
        for arm in arms: run_arm(arm, ready)
        run_arms(stacked, ready)
    finally: sys.settrace(None)
    paths = [Path(file) for file in files if Path(file).is_relative_to(package)]
    called = {path.relative_to(package).with_suffix("").as_posix() for path in paths}
    known = {"geometry/optim", "numbers/quantize", "evidence/replicas", "model/surgery"}
    assert known < called <= set(instrument.MODULES)


class Lost(GeometryOptimizer):
    "A rule whose every proposal, or every second weight of it, is not finite."
    def __init__(self, params, fmt, lr, every=1):
        super().__init__(params, dict(fmt=fmt, lr=lr, skip_nonfinite=False))
        self.every = every

    def moments(self, group): return ()
    def move(self, job, group, state): job.w[:: self.every] = torch.nan


def small(here: Path, **values):
    "A run of a few steps on the text."
    settings = dict(
        name="run", model="gpt-mini", data=f"path:{here / 'text.txt'}", format="E4M3",
        max_steps=4, batch_size=2, block_size=16, eval_every=2, eval_windows=2, warmup_steps=0,
        device="cpu", compute_dtype="float32",
    )
    return config.make_config({**settings, **values})


@pytest.mark.parametrize("every, steps, ends, skipped, in_part", [
    (1, 4, "finished, with 4 updates skipped", 4, 0),
    (2, 4, "finished, with 4 updates not finite in part", 0, 4),
    (1, 30, "stopped at step 10: the new weights not finite", 10, 0)])
def test_updates_that_a_grid_cannot_hold_are_told(here, tmp_path, monkeypatch, every, steps, ends, skipped, in_part):
    monkeypatch.setitem(RULES, "lost", Rule(Lost, "", 1.0, "nothing", "here", {"every": every}))
    run = trainer.Trainer(
        small(here, rule="lost", storage="grid_nearest", max_steps=steps), tmp_path
    )
    record = run.run(progress=False)
    assert record["exit_reason"].startswith(ends)
    assert record["results"]["skipped_updates"] == skipped
    assert record["results"]["nonfinite_updates"] == in_part
    weights = sum(g.numel() for g in storage.grid_weights(run.model).values())
    assert {row["nonfinite_weights"] for row in run.folder.metrics()} == {weights // every}


def test_metrics_hold_the_rate_of_the_rule(here, tmp_path):
    from altgrad.watching.metrics import METRICS

    run = trainer.Trainer(
        small(here, rule="riemannian_adamw", rule_lr=0.5, lr=1e-3, warmup_steps=2), tmp_path
    )
    run.run(progress=False)
    for row in run.folder.metrics():
        assert row["rule_lr"] == pytest.approx(0.5 * row["lr"] / 1e-3, rel=8 * 2.0**-53)
    assert {"lr", "rule_lr", "nonfinite_weights"} <= {
        metric.name for section in METRICS for metric in section.metrics
    }


def test_a_rule_has_its_schedule_where_adamw_stands_still(here, tmp_path):
    "A peak of zero for AdamW: the rule goes through the shares of its own peak all the same."
    def rates(name: str, lr: float) -> list[tuple[float, float]]:
        run = trainer.Trainer(small(here, name=name, rule="madam", rule_lr=0.5, lr=lr, max_steps=6, warmup_steps=2),
                              tmp_path)
        assert run.run(progress=False)["exit_reason"].startswith("finished")
        return [(row["lr"], row["rule_lr"]) for row in run.folder.metrics()]
    still, moving = rates("still", 0.0), rates("moving", 1.0)
    assert [lr for lr, _ in still] == [0.0] * 6 and len({lr for lr, _ in moving}) > 3
    assert [rule_lr for _, rule_lr in still] == [rule_lr for _, rule_lr in moving] == [0.5 * lr for lr, _ in moving]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_resumed_run_ends_where_one_that_was_not_stopped_does(here, tmp_path, monkeypatch, value):
    "One validation loss is not finite: the window that judges whether learning is over holds it in both."
    c = small(here, storage="master", lr=0.0, max_steps=9, warmup_steps=1, eval_every=1, checkpoint_every=1,
              converge_window=4)
    evaluate, keep = trainer.evaluate, trainer.Checkpointer.keep
    def overflowing(run):
        return evaluate(run) | ({"val_loss": value} if run.watch.step == 2 else {})
    monkeypatch.setattr(trainer, "evaluate", overflowing)
    whole = trainer.Trainer(replace(c, name="whole"), tmp_path).run(progress=False)
    def stopped(self, row, log):
        keep(self, row, log)
        if row["step"] == 3: raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(trainer.Checkpointer, "keep", stopped)
        trainer.Trainer(replace(c, name="cut"), tmp_path).run(progress=False)
    cut = trainer.Trainer(replace(c, name="cut"), tmp_path).run(progress=False)
    assert (cut["steps"], cut["exit_reason"]) == (whole["steps"], whole["exit_reason"])
    assert whole["steps"] == 6 and "converged" in whole["exit_reason"]  # four finite ones, from the third on


def page_of(folder: Path, capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["watch", str(folder), "--once"]) == 0
    return capsys.readouterr().out


def test_watch_of_a_ledger_averages_over_nothing_that_differs(tmp_path, capsys, monkeypatch):
    def row(i, **values):
        return {
            "run": f"{i:04x}", "stage": "confirm", "matrix": "m", "format": "E4M3",
            "storage": "fp32", "seed": i, "seconds": 1.0, **values,
        }

    bent = dict(rule="stiffness_adamw", lr=0.01)
    arms = [
        dict(rule="madam", lr=0.5, val_loss=9.0),
        dict(rule="adamw", lr=0.01, val_loss=3.0),
        dict(rule="adamw", lr=0.02, val_loss=7.0),
        dict(**bent, power=0.5, placement="update", val_loss=2.0),
        dict(**bent, power=-1.0, placement="update", val_loss=4.0),
        dict(**bent, power=-1.0, placement="gradient", val_loss=6.0),
    ]
    with Ledger(tmp_path).writing() as append:
        for i, values in enumerate(arms + arms): append(row(i, **values))
    page = [" ".join(line.split()) for line in page_of(tmp_path, capsys, monkeypatch).splitlines()]
    for line in (
        "madam 2 0.5 9.0000 9.0000", "stiffness_adamw +0.5 2 0.01 2.0000 2.0000",
        "stiffness_adamw -1 2 0.01 4.0000 4.0000",
        "stiffness_adamw -1 gradient 2 0.01 6.0000 6.0000", "adamw 4 0.01 3.0000 3.0000",
    ):
        assert any(f"fp32 E4M3 {line}" in shown for shown in page), (line, page)


def test_watch_of_a_run_shows_the_rate_of_the_rule(here, tmp_path, monkeypatch, capsys):
    trainer.Trainer(
        small(here, rule="riemannian_adamw", rule_lr=0.5, lr=1e-3, max_steps=2, min_lr_ratio=1.0),
        tmp_path,
    ).run(progress=False)
    page = page_of(tmp_path / "run", capsys, monkeypatch)
    assert "1.00e-03" in page and "5.00e-01" in page


def test_the_whole_shadow_is_of_the_rounded_layers():
    from altgrad.model.gpt import GPT, GPTConfig, loss_of
    from altgrad.watching.sums import Parcel
    from altgrad.watching.shadow import Shadow, shadow_gradients, shadow_metrics
    from altgrad.model.surgery import quantize_model

    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8))
    quantize_model(model, "E2M1")
    x = torch.randint(256, (4, 9))
    batch, shadow, parcel = [(x[:, :-1], x[:, 1:])], Shadow(model), Parcel()
    shadow.begin(1)
    loss_of(model, *batch[0]).backward()
    shadow.measure(batch, parcel)
    measured, exact = shadow_metrics(parcel.unpack()), shadow_gradients(model, batch, shadow.states)
    g, h = (
        torch.cat([t.double().flatten() for t in ts])
        for ts in zip(*[
            (model.get_submodule(n).weight.grad, exact[n]) for n in exact if n != "lm_head"
        ])
    )
    assert measured["shadow/all/cosine"] == pytest.approx(
        float(g @ h / g.norm() / h.norm()), abs=64 * 2.0**-24
    )
    assert "shadow/lm_head/cosine" in measured


def stored_run(folder: Path, config: str, bad: bool) -> Path:
    "A made-up run whose updates stall, and whose loss rises or not."
    from altgrad.training.tracking import MetricsLog, RunFolder

    run = RunFolder(folder)
    run.create(f"name: {folder.name}\nformat: E4M3\nmax_steps: 140\n{config}")
    with MetricsLog(run) as log:
        for s in range(1, 141):
            log.append({
                "step": s,
                "loss": 1 + 4 * 0.95**s + 0.1 * bad * max(0, s - 60),
                "updates/fc/bit_stall_rate": 0.9,
            })
    return folder


def test_autopsy_advises_no_healthy_run_and_nothing_that_is_set(tmp_path):
    from altgrad.views.autopsy import autopsy

    well = str(autopsy(stored_run(tmp_path / "well", "storage: grid_nearest\n", bad=False)))
    assert "shows no illness" in well and "try:" not in well
    ill = str(
        autopsy(
            stored_run(
                tmp_path / "ill", "storage: grid_stochastic\nrule: stiffness_adamw\n", bad=True
            )
        )
    )
    tried = ill.partition("try:")[2]
    assert "storage=master" in tried and "grid_stochastic" not in tried
    assert (
        "riemannian"
        not in str(
            autopsy(
                stored_run(
                    tmp_path / "ulps", "storage: grid_nearest\nrule: riemannian_adamw\n", bad=True
                )
            )
        ).partition("try:")[2]
    )


def grid_model(name: str, seed: int = 0) -> torch.nn.Module:
    from altgrad.model.surgery import quantize_model

    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
    )
    quantize_model(model, "E4M3")
    storage.store_on_grid(model, name, seed=3)
    return model


@pytest.mark.parametrize("name", storage.grid_storages())
def test_a_loaded_model_on_a_grid_goes_on_bit_for_bit(name, tmp_path):
    model, twin = grid_model(name), grid_model(name, seed=1)
    with torch.no_grad():
        for _ in range(3): model[0].weight.mul_(3.1).add_(0.01)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
        for _ in range(2):
            for one, other in zip(
                storage.grid_weights(model).values(), storage.grid_weights(twin).values()
            ):
                assert all(
                    torch.equal(t, other.parts()[part]) for part, t in one.parts().items()
                ), name
            for m in (model, twin): m[0].weight.add_(0.013)


@pytest.mark.parametrize(
    "rules, formats",
    [
        ("*.proj: ; *.attn.qkv: weight=E5M2; *.mlp.fc: weight=E3M4", {"qkv": "E5M2", "fc": "E3M4"}),
        ("*: weight=E5M2", {"qkv": "E5M2", "fc": "E5M2", "proj": "E5M2"}),
        ("*.qkv: weight=E5M2", {"qkv": "E5M2", "fc": "E4M3", "proj": "E4M3"}),
    ],
)
def test_rules_may_cover_every_layer(here, rules, formats):
    model = trainer.make_model(small(here, rules=rules), 256, torch.device("cpu"))
    from altgrad.model.surgery import quantized_layers

    assert {
        name.rpartition(".")[2]: m.weight_format.name for name, m in quantized_layers(model)
    } == formats


@pytest.mark.parametrize("name", ["adamw", "stiffness_adamw"])
def test_adamw_is_the_baseline_by_either_name(name):
    from altgrad.evidence.study import Study, contrast, effect, gain, gain_over_fp32
    from altgrad.evidence.sweep import Tuning

    cells = [
        Arm(storage=s, rule=rule, lr=0.0)
        for s in ("fp32", "grid_nearest")
        for rule in (name, "madam")
    ]
    losses = (
        torch.arange(4.0).view(4, 1, 1, 1)
        + torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0)) * 1e-3
    )
    cubes = {cell: loss.double().numpy() for cell, loss in zip(cells, losses)}
    tuned = {cell: Tuning([], [0.01], [1.0], 0, "") for cell in cells}
    study = Study(
        ("stdlib-0.1m-0", "stdlib-0.1m-1"),
        (0, 1, 2),
        {},
        tuned,
        cubes,
        {},
        losses[0, :, 0, 0].numpy(),
    )
    gained = effect(contrast(study, gain(study, cells[3])), draws=100)
    # the made-up noise of a cell
    assert gained is not None
    assert gained.mean == pytest.approx(2 - 3, abs=5e-3)
    # the made-up noise of a cell
    assert effect(
        contrast(study, gain_over_fp32(study, cells[3])), draws=100
    ).mean == pytest.approx((2 - 3) - (0 - 1), abs=5e-3)


@pytest.fixture(scope="module")
def finished(here, tmp_path_factory) -> Path:
    "A folder with two finished runs, one of them with series."
    out = tmp_path_factory.mktemp("finished")
    for name, every in (("seen", 1), ("plain", None)):
        trainer.Trainer(small(here, name=name, monitor_every=every), out).run(progress=False)
    return out


def other_line(folder: Path) -> None:
    "One loss in the metrics is another number; the file stays whole."
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[1])
    (folder / "metrics.jsonl").write_text(
        "".join([lines[0], json.dumps({**row, "loss": row["loss"] / 2}) + "\n", *lines[2:]])
    )


def test_changed_metrics_of_a_finished_run_are_noticed_by_every_reader(
    here, finished, tmp_path, capsys
):
    from altgrad.training.experiment import compare, read_arm

    run = shutil.copytree(finished, tmp_path / "out") / "plain"
    config, other = small(here, name="plain"), small(here, name="other", rule="madam", rule_lr=0.01)
    whole = trainer.Trainer(config, tmp_path / "out").run(progress=False)
    assert (
        whole["metrics_sha256"] == hashlib.sha256((run / "metrics.jsonl").read_bytes()).hexdigest()
    )
    assert read_arm(run)["record"] == whole
    assert (
        main(["autopsy", str(tmp_path / "out/seen"), "--against", str(run)])
        == main(["watch", str(run), "--once"])
        == 0
    )
    capsys.readouterr()
    other_line(run)
    changed = (run / "metrics.jsonl").read_bytes()
    for argv in (
        ["watch", str(run), "--once"],
        ["autopsy", str(run)],
        ["autopsy", str(tmp_path / "out/seen"), "--against", str(run)],
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "metrics.jsonl is not what the run logged" in error, error
    for again in (
        lambda: read_arm(run),
        lambda: trainer.Trainer(config, tmp_path / "out"),
        lambda: compare([other, config], tmp_path / "out", progress=False),
    ):
        with pytest.raises(InputError, match="metrics.jsonl is not what the run logged"): again()
    # before any arm is trained
    assert (run / "metrics.jsonl").read_bytes() == changed
    assert not (tmp_path / "out/other").exists()


@pytest.mark.parametrize("name, lost", [("seen", True), ("seen", False), ("plain", False)])
def test_autopsy_says_that_the_series_are_gone(finished, tmp_path, name, lost):
    from altgrad.views.autopsy import autopsy

    run = shutil.copytree(finished, tmp_path / "out") / name
    if lost: shutil.rmtree(run / "series")
    assert ("series is gone" in str(autopsy(run))) == lost
