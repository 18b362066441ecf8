"""What an arm may say beside its first fields, each beside a loop of its own."""
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from altgrad.basics import InputError
from altgrad.evidence.instrument import (
    LATER, Arm, Bench, arm_facts, arm_values, ramp, row_identity, run_arm, run_id, state_hash, unusual,
)
from altgrad.evidence.replicas import kind_of
from altgrad.evidence.stability import thresholds_of
from altgrad.evidence.sweep import read_matrix, read_rows
from altgrad.geometry.optim import StiffnessAdamW, on_grids
from altgrad.geometry.storage import make_grid_tensor, store_on_grid
from altgrad.model.gpt import loss_of
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.training.config import TrainConfig, config_rule
from altgrad.training.data import get_batch

from tiny import HEAD, TASK, small_bench

SMALL = dict(checkpoint="tiny-0", corpus="tiny", lr=0.01)


@pytest.fixture(scope="module")
def bench(small_folder) -> Bench: return small_bench(small_folder)


def train(bench, make, points=None, every=0):
    "The hash of weights after a loop that knows nothing of arms; each rule is made anew."
    model = bench.model("tiny-0")
    weights = [m.weight for name, m in model.named_modules()
               if isinstance(m, nn.Linear) and name != "lm_head"]
    if points: quantize_model(model, config=PrecisionConfig(default=LayerPrecisionRule("*", **points)))
    for p in model.parameters(): p.requires_grad_(any(p is w for w in weights))
    rule = make(weights)
    for step in range(1, TASK.steps + 1):
        if every and step > 1 and (step - 1) % every == 0: rule = make(weights)
        for group in rule.param_groups: group["lr"] = 0.01 * ramp(step, TASK.steps, TASK.warmup)
        model.zero_grad()
        batch = get_batch(bench.corpus("tiny").train, TASK.batch_size, model.config.block_size, 0, step)
        loss_of(model, *batch).backward()
        rule.step()
    return state_hash({str(i): p for i, p in enumerate(weights)})[:16]


def adamw(**how):
    betas = TASK.beta1, TASK.beta2
    return lambda weights: torch.optim.AdamW(
        weights, betas=betas, eps=TASK.eps, **{"weight_decay": 0.0, **how}
    )


def stiff(formula):
    how = dict(betas=(TASK.beta1, TASK.beta2), eps=TASK.eps, weight_decay=0.0, power=-1.0,
               floor_octaves=8.0)
    return lambda weights: StiffnessAdamW(weights, "E5M2", formula=formula, **how)


@pytest.mark.parametrize("fields, make, loop", [
    (dict(rule="adamw", storage="fp32", weight_decay=0.3), adamw(weight_decay=0.3), {}),
    (dict(rule="adamw", storage="fp32", reset_every=5), adamw(), dict(every=5)),
    (dict(rule="adamw", storage="fp32", inputs="E4M3", gradients="E5M2"), adamw(),
     dict(points=dict(activation="E4M3", gradient="E5M2"))),
    (dict(rule="adamw", storage="master", inputs="E1M6 unscaled"), adamw(),
     dict(points=dict(weight="E5M2", activation="E1M6 unscaled"))),
    *((dict(power=-1.0, storage="fp32", formula=name), stiff(name), {})
      for name in ("smooth", "exponent", "lns")),
])
def test_an_arm_is_a_loop_by_hand(bench, fields, make, loop):
    row = run_arm(Arm(format="E5M2", **SMALL, **fields), bench)
    plain = run_arm(Arm(**{**SMALL, "format": "E5M2", **fields, **{k: LATER[k] for k in unusual(fields)}}),
                    bench)
    assert row["weights_sha"] == train(bench, make, **loop) != plain["weights_sha"]
    assert row["run"] != plain["run"] and unusual(row) == unusual(fields)


def test_where_an_arm_starts_is_no_other_arms(bench):
    "On one bench after all others, and on a bench that knows nothing."
    base = dict(SMALL, rule="adamw")
    arms = [Arm(**{**base, **fields}) for fields in (
        dict(format="E5M2"), dict(format="E5M2", lr=0.02), dict(format="E4M3"), dict(format="E7M0"),
        dict(format="E5M2", storage="fp32"), dict(format="E5M2", storage="master", granularity="channel"),
        dict(format="E5M2", storage="master", inputs="E4M3"), dict(format="E5M2", split="tune"),
        dict(format="E5M2", checkpoint="tiny-1"), dict(format="E7M0", storage="grid_stochastic", seed=1),
    )]
    task, rest = replace(TASK, steps=1, warmup=1), ("seconds",)
    shared = bench.with_task(task)
    kept = lambda row: {key: value for key, value in row.items() if key not in rest}
    for arm in arms: assert kept(run_arm(arm, shared)) == kept(run_arm(arm, bench.with_task(task)))


def test_a_reset_leaves_what_the_grid_remembers(bench):
    "The moments begin anew; codes, residuals and scales do not."
    def rule_of(weights): return on_grids(torch.optim.AdamW)(
        weights, betas=(TASK.beta1, TASK.beta2), eps=TASK.eps, weight_decay=0.0)
    arm = Arm(format="E4M3", rule="adamw", storage="grid_residual4", reset_every=4, **SMALL)
    model = bench.model("tiny-0")
    used = [m.weight for name, m in model.named_modules()
            if isinstance(m, nn.Linear) and name != "lm_head"]
    stored = [nn.Parameter(make_grid_tensor(p, "E4M3", "grid_residual4", 0, i)) for i, p in enumerate(used)]
    for p in model.parameters(): p.requires_grad_(any(p is w for w in used))
    for step in range(1, TASK.steps + 1):
        if step % 4 == 1: rule = rule_of(stored)
        for p, grid in zip(used, stored): p.data.copy_(grid.dequantize())
        for group in rule.param_groups: group["lr"] = 0.01 * ramp(step, TASK.steps, TASK.warmup)
        model.zero_grad()
        batch = get_batch(bench.corpus("tiny").train, TASK.batch_size, model.config.block_size, 0, step)
        loss_of(model, *batch).backward()
        for p, grid in zip(used, stored): grid.grad = p.grad
        rule.step()
    hashed = state_hash({str(i): p.data.dequantize() for i, p in enumerate(stored)})[:16]
    assert run_arm(arm, bench)["weights_sha"] == hashed


def test_a_format_is_one_arm_by_any_of_its_names():
    "A spec of a format that has a name is the one that remains another: stored rows were made under it."
    for names in (("E4M3", "e4m3", "float8_e4m3fn"), ("E7M0", "e7m0"), ("E4M3b8", "e4m3b8", "e04M3b8"),
                  ("float4_e2m1fn", "FLOAT4_e2m1fn"), ("E2M1b1", "e2m1b1")):
        arms = {Arm(format=name) for name in names}
        assert [arm.format for arm in arms] == [names[0]]


def test_the_ids_of_stored_rows_are_those_of_their_arms():
    "An arm that is read from a row names the run as the row does, under every spelling that was stored."
    seen = set()
    for path in sorted((Path(__file__).parent.parent / "nbs/results").rglob("*.parquet")):
        if not {"run", "task", "format"} <= set(pq.read_schema(path).names): continue
        if seen.issuperset(pq.read_table(path, columns=["format"])["format"].to_pylist()): continue
        for row in read_rows(path):
            if row.get("error") or row["format"] in seen: continue
            seen.add(row["format"])
            facts = {**row_identity(row), **arm_facts(Arm(**arm_values(row)))}
            assert run_id(facts) == row["run"], (path, row["format"])
    assert {"E4M3", "E2M1b1", "E3M2b3", "float4_e2m1fn"} <= seen


def test_thresholds_on_two_texts_are_two():
    row = {**asdict(Arm()), "stage": "max-lr", "task": {"steps": 200}}
    def rows(rate, ends, **how):
        return [{**row, "lr": rate, "diverged": ends, "seed": seed, **how} for seed in (3000, 3001, 3002)]
    for how in ({"corpus": "laws"}, {"checkpoint": "stdlib-0.8m-0"}, {"placement": "gradient"}, {"floor_octaves": 4.0},
                {"task": {"steps": 400}}):
        one, other = thresholds_of(rows(0.1, False) + rows(0.05, True, **how))
        assert (one["stable"], one["unstable"]) == (0.1, None) and (other["stable"], other["unstable"]) == (None, 0.05)


def test_what_is_usual_leaves_no_trace():
    arm = Arm(**SMALL)
    assert not unusual(asdict(arm)) and not set(LATER) & set(arm_facts(arm))


def test_axes_of_a_matrix():
    matrix = read_matrix(HEAD + """
  - {format: E5M2, storage: fp32, power: -1, formula: [ulp, smooth], lr: 0.01}
  - {format: E5M2, storage: master, rule: adamw, inputs: ["", E4M3], gradients: E5M2, lr: 0.01}
  - {format: E5M2, storage: master, rule: adamw, weight_decay: [0, 0.1], reset_every: 50, lr: 0.01}
tune: {seeds: [1000]}
confirm: {seeds: [0]}
""")
    said = [unusual(asdict(arm)) for arm, _ in matrix.cells]
    assert said == [
        {}, {"formula": "smooth"}, {"gradients": "E5M2"}, {"inputs": "E4M3", "gradients": "E5M2"},
        {"reset_every": 50}, {"weight_decay": 0.1, "reset_every": 50},
    ]


@pytest.mark.parametrize("fields, said", [
    (dict(formula="cubic"), "unknown stiffness formula 'cubic'"),
    (dict(formula="smooth", rule="adamw"), "adamw has no formula"),
    (dict(formula="lns", format="E0M7"), "E0M7 has no exponent bits"),
    (dict(weight_decay=0.1, rule="madam"), "madam has no weight_decay"),
    (dict(weight_decay=-0.1), "weight_decay must be at least 0"),
    (dict(reset_every=-1), "reset_every must be a whole number"),
    (dict(reset_every=2.0), "reset_every must be a whole number"),
    (dict(reset_every=50, rule="averaged_adamw"), "averaged_adamw keeps its averages"),
    (dict(inputs="E4M3 delaied"), "did you mean delayed"),
    (dict(gradients="E9M9"), "E9M9"),
])
def test_an_arm_that_cannot_be(fields, said):
    with pytest.raises(InputError, match=said): Arm(**fields)


@pytest.mark.parametrize("key", LATER)
def test_replicas_take_no_later_field(key):
    value = {"moments": "coat8", "granularity": "32", "formula": "smooth", "weight_decay": 0.1,
             "reset_every": 5, "inputs": "E4M3", "gradients": "E5M2"}[key]
    rule = "adamw" if key == "granularity" else "stiffness_adamw"
    with pytest.raises(InputError, match=f"^{key} {value} of an arm is not for replicas"):
        kind_of(Arm(rule=rule, **{key: value}))


def test_a_formula_reaches_the_rule_of_a_run():
    weights = [nn.Parameter(torch.randn(8, 8))]
    given = config_rule(weights, TrainConfig(format="E4M3", rule="stiffness_adamw", formula="lns"))
    usual = config_rule(weights, TrainConfig(format="E4M3", rule="stiffness_adamw"))
    assert given.param_groups[0]["formula"] == "lns" and usual.param_groups[0]["formula"] == "ulp"
    with pytest.raises(InputError, match="adamw does not read formula"):
        TrainConfig(format="E4M3", formula="lns")
    with pytest.raises(InputError, match="unknown formula 'cubic'"):
        TrainConfig(format="E4M3", rule="stiffness_adamw", formula="cubic")


@pytest.mark.parametrize("words", ["unscaled", "delayed"])
def test_a_grid_refuses_a_scale_that_it_would_not_have(words):
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_model(model, config=PrecisionConfig(default=LayerPrecisionRule("*", weight=f"E4M3 {words}")),
                   skip=())
    with pytest.raises(InputError, match=f"scaling must be current, not {words}"):
        store_on_grid(model, "grid_nearest")
    with pytest.raises(InputError, match="on a manifold"):
        quantize_model(nn.Sequential(nn.Linear(8, 8)), skip=(), manifold=True,
                       config=PrecisionConfig(default=LayerPrecisionRule("*", weight=f"E4M3 {words}")))


def test_unscaled_is_the_cast():
    "Behind no scale a point is torch's own cast, where both saturate."
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 100
    layer = nn.Linear(64, 4)
    quantize_model(nn.Sequential(layer), skip=(), config=PrecisionConfig(
        default=LayerPrecisionRule("*", activation="E4M3 unscaled")))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(layer.points["activation"](x), expected)
