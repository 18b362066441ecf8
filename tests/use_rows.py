"""What test_contributing.py runs on a copy of the package whose catalogue has a few rows more."""
from dataclasses import replace
from pathlib import Path

from altgrad.basics import InputError
from altgrad.evidence.instrument import Arm, Bench, build_checkpoint, run_arm
from altgrad.evidence.replicas import Batches, run_arms
from altgrad.evidence.study import build_study, contrast, effect, gain
from altgrad.evidence.sweep import Ledger, Sweep, read_matrix
from altgrad.geometry import optim
from altgrad.training.config import make_config
from altgrad.training.trainer import Trainer
from tiny import TEXT

MATRIX = """
name: rows
tier: 0
corpus: tiny
checkpoints: [tiny-0, tiny-1]
arms:
  - {format: E4M3, storage: [fp32, grid_twin, grid_toward_zero], rule: [adamw, sign_sgd, adamw_half], lr: 0.01}
tune: {seeds: [1000, 1001], points: 3, most: 3}
confirm: {seeds: [0, 1]}
task: {steps: 6, batch_size: 2, warmup: 2, chunks: 2, windows: 2, every: 3}
"""
SETTINGS = dict(
    name="mine", format="E4M3", data="path:text.txt", max_steps=2, warmup_steps=0, batch_size=2,
    block_size=16, eval_every=2, eval_windows=2, device="cpu",
)


def refused(function, *args) -> str:
    "What an InputError says."
    try: function(*args)
    except InputError as e: return str(e)
    return ""


def train() -> None:
    config = make_config({
        **SETTINGS, "rule": "sign_sgd", "rule_lr": 1.0, "storage": "grid_toward_zero"
    })
    trainer = Trainer(config, "runs")
    assert trainer.run(progress=False)["exit_reason"] == "finished"
    assert type(trainer.optimizers[0]) is optim.SignSGD
    assert "does not read power" in refused(
        make_config, {**SETTINGS, "rule": "sign_sgd", "power": 2.0}
    )


def sweep(bench: Bench, name: str, pool: Batches | None) -> dict[str, dict]:
    "The rows of a ledger by their names; its study has a gain for every cell."
    matrix = read_matrix(MATRIX)
    assert Sweep(matrix, name, bench).run(1, progress=False, pool=pool) == 0
    rows = {row["run"]: row for row in Ledger(name).rows()}
    study = build_study(rows.values(), [matrix])
    assert len(study.tuned) == 9
    assert all(effect(contrast(study, gain(study, cell)), draws=10) for cell in study.tuned)
    return rows


def compare_engines(bench: Bench) -> None:
    setup = bench.setup
    alone, batched = sweep(bench, "alone", None), sweep(bench, "batched", Batches(setup, 4))
    # cells, checkpoints or seeds; three rates, and two seeds for each checkpoint
    assert alone.keys() == batched.keys()
    assert len(alone) == 9 * 2 * (3 + 2)
    stacked = {(row["rule"], row["storage"]) for row in batched.values() if row.get("engine")}
    assert stacked == {
        (rule, storage) for rule in ("adamw", "adamw_half") for storage in ("fp32", "grid_twin")
    }
    arm = Arm(checkpoint="tiny-0", corpus="tiny", storage="grid_twin", rule="adamw_half", lr=0.01)
    known = replace(arm, storage="grid_stochastic", rule="stiffness_adamw", power=0.5)
    for engine in (lambda a: run_arm(a, bench), lambda a: run_arms([a], bench)[0]):
        assert engine(arm)["weights_sha"] == engine(known)["weights_sha"]
    assert "no rule 'sign_sgd'" in refused(run_arms, [replace(arm, rule="sign_sgd")], bench)
    assert "no storage 'grid_toward_zero'" in refused(
        run_arms, [replace(arm, storage="grid_toward_zero")], bench
    )


if __name__ == "__main__":
    Path("text.txt").write_text(TEXT)
    train()
    bench = Bench("checkpoints", {"tiny": "path:text.txt"}, read_matrix(MATRIX).task, "cache")
    for name in ("tiny-0", "tiny-1"): build_checkpoint(bench, name)
    compare_engines(bench)
