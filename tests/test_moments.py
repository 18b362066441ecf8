"""Moments in eight bits beside bitsandbytes and torchao: the same maps, codes and steps; and what
every rule, storage and checkpoint makes of them."""
import io
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from altgrad.basics import InputError
from altgrad.evidence.bench import arms_of, bits_a_weight
from altgrad.evidence.instrument import (
    RECIPES, Arm, Bench, Task, arm_facts, blank_model, build_checkpoint, recipe_of, row_identity,
    run_arm, run_id,
)
from altgrad.evidence.replicas import kind_of
from altgrad.evidence.study import arm_of
from altgrad.evidence.sweep import read_rows
from altgrad.geometry.catalogue import RULES, Rule, RuleSettings, build_rule
from altgrad.geometry.rivals.moments import (
    MOMENTS, SIGNED, Dynamic, dynamic_map, is_packed, pack_moment, unpack_moment, with_moments
)
from altgrad.geometry.storage import make_grid_tensor
from altgrad.training.checkpoint import pack_state, unpack_state
from altgrad.training.config import make_config
from altgrad.training.trainer import make_model, make_optimizers
from tiny import small_bench

logging.disable(logging.WARNING)  # torchao tells which of its GPU libraries it cannot load
import bitsandbytes.functional as bnb  # noqa: E402
import torchao.optim.adam as adam  # noqa: E402
import torchao.optim.quant_utils as theirs  # noqa: E402

logging.disable(logging.NOTSET)

LEDGER = Path(__file__).resolve().parent.parent / "nbs/results/ledger/instrument.parquet"
PACKED = [name for name, kind in MOMENTS.items() if kind]


def blocks(signed: bool, size: int = 256) -> torch.Tensor:
    "Blocks whose magnitudes span many decades."
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, size, generator=generator)
    x = x * torch.exp(4 * torch.randn(1024, size, generator=generator))
    return x if signed else x.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_the_maps_are_those_of_bitsandbytes_and_torchao(signed):
    ours = dynamic_map(signed)
    assert torch.equal(ours, bnb.create_dynamic_map(signed))
    assert torch.equal(ours, torch.tensor(theirs.create_dynamic_map(signed)))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_torchao_but_in_the_middle_between_two(signed):
    x, values = blocks(signed), dynamic_map(signed)
    scaled, scale = theirs.scale_tensor(x, 256)
    codes = theirs.quantize_8bit_with_qmap(scaled, values)
    ours = Dynamic().pack(x, signed)
    assert torch.equal(ours["scale"].view(-1), scale)
    other = codes != ours["codes"]
    # it rounds up there, and bitsandbytes down
    below = ours["codes"].int()[other]
    assert torch.equal(codes[other].int(), below + 1)
    assert torch.equal(scaled[other], (values[below] + values[below + 1]) / 2)
    assert other.sum() <= 1
    back = theirs.dequant_with_qmap(ours["codes"], values, scale)
    assert torch.equal(Dynamic().unpack(ours, signed), back)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_bitsandbytes_whose_kernel_for_a_cpu_is_wrong_by_a_table_step(signed):
    x, values = blocks(signed), dynamic_map(signed)
    ours = Dynamic().pack(x, signed)
    # of float64 it compares all distances
    codes, scale = torch.ops.bitsandbytes.quantize_blockwise(x.double(), values, 256)
    assert torch.equal(codes, ours["codes"]) and torch.equal(scale, ours["scale"].view(-1))
    # of float32 it looks the code up in a table of 2^16 steps over [-1, 1]
    codes, state = bnb.quantize_blockwise(x, code=values, blocksize=256)
    def away(codes): return (values[codes.int()].double() - x.double() / ours["scale"]).abs()
    assert (away(codes) - away(ours["codes"]) <= 2**-15).all()
    back = bnb.dequantize_blockwise(ours["codes"], absmax=state.absmax, code=values, blocksize=256)
    assert torch.equal(Dynamic().unpack(ours, signed), back)


class TheirArithmetic(torch.optim.Optimizer):
    "AdamW as torchao computes a step, with its moments in float32."
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                adam.single_param_adam(
                    p.detach(), p.grad, state["step"], state["exp_avg"], state["exp_avg_sq"], None,
                    torch.tensor(group["lr"]), 0.9, 0.999, 1e-2, 1e-8, True, False,
                )


@pytest.mark.parametrize("moments, rival", [("dynamic8", "AdamW8bit"), ("e4m3", "AdamWFp8")])
def test_twenty_steps_are_those_of_torchao(moments, rival):
    # in these twenty steps no quotient lies in the middle between two values, where it rounds up
    generator = torch.Generator().manual_seed(3)
    start, x = torch.randn(64, 128, generator=generator), torch.randn(128, generator=generator)
    ours, its = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = with_moments(TheirArithmetic, moments)([ours], lr=0.01)
    other = getattr(adam, rival)([its], lr=0.01)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(20):
            losses = []
            for w, optimizer in ((ours, mine), (its, other)):
                w.grad = None
                loss = (w @ x).square().mean() + w.pow(4).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]
    assert torch.equal(ours, its) and losses[0] < 0.9 * (start @ x).square().mean()
    for name in ("exp_avg", "exp_avg_sq"):
        kept, its_state = mine.state[ours][name], other.state[its][name]
        assert torch.equal(kept[moments], its_state.codes.view(torch.uint8))
        assert torch.equal(kept["scale"].view(-1), its_state.scale)


def grads(shape: tuple[int, ...], steps: int) -> torch.Tensor:
    return torch.randn(steps, *shape, generator=torch.Generator().manual_seed(2)) * 1e-2


def stepped(name: str, moments: str, on_grid: bool, by_hand: str | None = None) -> torch.Tensor:
    "A weight after four steps; by hand, its state is packed and unpacked here after each."
    w = torch.linspace(-1, 1, 70 * 64).view(70, 64)
    if on_grid: w = make_grid_tensor(w, "E4M3", "grid_stochastic")
    w = torch.nn.Parameter(w)
    settings = RuleSettings(fmt="E4M3", lr=RULES[name].guess, rounding="none", moments=moments)
    optimizer = build_rule(name, [w], settings)
    for g in grads(w.shape, 4):
        w.grad = g
        optimizer.step()
        for key, value in optimizer.state[w].items() if by_hand else ():
            if key in SIGNED:
                parts = pack_moment(value, by_hand, SIGNED[key])
                value.copy_(unpack_moment(parts, by_hand, SIGNED[key]))
    kept = optimizer.state[w]
    assert by_hand or all(isinstance(kept[key], dict) for key in kept if key in SIGNED)
    return w.dequantize() if on_grid else w.detach()


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("moments", PACKED)
@pytest.mark.parametrize("name", [n for n, r in RULES.items() if n != "muon" and not r.averages])
def test_every_rule_steps_as_if_its_moments_had_been_rounded(name, moments, on_grid):
    assert torch.equal(
        stepped(name, moments, on_grid), stepped(name, "float32", on_grid, by_hand=moments)
    )


def test_an_average_is_no_moment_and_is_not_packed():
    with pytest.raises(InputError, match="'average'"): stepped("averaged_adamw", "dynamic8", False)


@pytest.mark.parametrize("make", [
    partial(torch.optim.Adam, amsgrad=True), torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    torch.optim.Adadelta, torch.optim.Adagrad, partial(torch.optim.SGD, lr=0.1, momentum=0.9),
])
def test_optimizers_of_torch_keep_their_moments_so(make):
    rule = make.func if isinstance(make, partial) else make
    settings = make.keywords if isinstance(make, partial) else {}
    w = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = with_moments(rule, "dynamic8")([w], **settings)
    for g in grads(w.shape, 3):
        w.grad = g
        optimizer.step()
    kept = [name for name, value in optimizer.state[w].items() if isinstance(value, dict)]
    assert kept and not any(
        isinstance(value, torch.Tensor) and value.numel() > 1
        for value in optimizer.state[w].values()
    )


def test_what_cannot_be_kept_so_is_one_clear_line():
    settings = RuleSettings(fmt="E4M3", lr=0.1, moments="dynamic8")
    w = torch.nn.Parameter(torch.ones(2, 2))
    plain = Rule(torch.optim.SGD, reads="", guess=0.1, unit="", source="")
    with pytest.raises(InputError, match="^SGD has no moments to keep as dynamic8$"):
        plain.build([w], settings)
    average = Rule(torch.optim.ASGD, reads="", guess=0.1, unit="", source="")
    with pytest.raises(InputError, match="^ASGD keeps 'ax' for every element of a weight, and"):
        average.build([w], settings)
    with pytest.raises(InputError, match="unknown moments 'int8'.*dynamic8"):
        Arm(moments="int8")
    with pytest.raises(InputError, match="made from float32, not torch.float64: exp_avg"):
        wide = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.float64))
        wide.grad = wide.detach().clone()
        with_moments(torch.optim.AdamW, "coat8")([wide]).step()
    with pytest.raises(InputError, match="moments coat8 of an arm is not for replicas: leave it at float32"):
        kind_of(Arm(rule="adamw", moments="coat8"))
    with pytest.raises(InputError, match="unknown moments 'int8'"): make_config({"moments": "int8"})
    with pytest.raises(InputError, match="has no moments to keep"):
        make_config({"moments": "e4m3", "rule": "stiffness_sgd", "beta1": 0.0, "format": "E4M3"})


def test_a_state_is_plain_tensors_and_loads_into_its_like_alone():
    def make(moments):
        w = torch.nn.Parameter(torch.linspace(-1, 1, 8192).view(64, 128))
        return w, with_moments(torch.optim.AdamW, moments)([w])
    g = grads((64, 128), 4)
    for moments in PACKED:
        w, optimizer = make(moments)
        for i in range(2):
            w.grad = g[i]
            optimizer.step()
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        again, loaded = make(moments)
        with torch.no_grad(): again.copy_(w)
        loaded.load_state_dict(torch.load(buffer, weights_only=True))
        for i in (2, 3):
            for p, o in ((w, optimizer), (again, loaded)):
                p.grad = g[i]
                o.step()
        assert torch.equal(w, again), moments
        for other in PACKED:
            if other == moments: continue
            with pytest.raises(ValueError, match=f"exp_avg was not saved as {other}"):
                make(other)[1].load_state_dict(optimizer.state_dict())
    whole = torch.optim.AdamW([again])
    again.grad = g[0]
    whole.step()
    with pytest.raises(ValueError, match="exp_avg was not saved as coat8"):
        make("coat8")[1].load_state_dict(whole.state_dict())


def test_a_weight_that_is_not_contiguous_is_moved_as_any_other():
    start, weights = torch.linspace(-1, 1, 8192).view(64, 128), []
    for turned in (False, True):
        w = torch.nn.Parameter(start.t().contiguous().t() if turned else start.clone())
        optimizer = with_moments(torch.optim.AdamW, "dynamic8")([w], lr=0.1, fused=True)
        for g in grads(w.shape, 3):
            w.grad = torch.empty_like(w).copy_(g)
            optimizer.step()
        weights.append(w.detach())
    assert not weights[1].is_contiguous() and torch.equal(*weights)


def test_a_step_that_fails_leaves_codes():
    class Failing(torch.optim.AdamW):
        def step(self):
            super().step()
            raise RuntimeError("no")
    w = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = with_moments(Failing, "dynamic8")([w])
    w.grad = grads(w.shape, 1)[0]
    with pytest.raises(RuntimeError, match="no"): optimizer.step()
    assert optimizer.state[w]["exp_avg"]["dynamic8"].dtype == torch.uint8


def real_shapes() -> Bench:
    "A bench with the model of a real checkpoint, not trained."
    bench = Bench()
    bench.model = lambda name: blank_model(recipe_of(name)[0])
    return bench


@pytest.mark.parametrize("moments, bits", [
    ("float32", 32), ("dynamic8", 8.125), ("e4m3", 8.125), ("e5m2", 8.125), ("coat8", 8.5)
])
def test_bits_a_weight_are_measured(moments, bits):
    counts = {"adamw": 2, "madam": 1, "lion": 1, "sgd": 1, "eco": 2}
    if moments == "float32": counts["averaged_adamw"] = 3
    for rule, count in counts.items():
        arm = Arm(rule=rule, moments=moments, checkpoint="stdlib-0.1m-0")
        assert bits_a_weight(arm, real_shapes()) == 8 + count * bits, rule


def test_stored_rows_keep_their_names_and_have_float32():
    rows = read_rows(LEDGER)[:50]
    for row in rows:
        assert row.get("moments") is None and run_id(row_identity(row)) == row["run"]
        arm = arm_of(row)
        assert arm.moments == "float32" and arm_facts(arm).keys() <= row.keys()
    assert rows and len({run_id(arm_facts(Arm(moments=name))) for name in MOMENTS}) == len(MOMENTS)


def test_fp32_arms_of_a_verdict_keep_moments_in_float32():
    arms = arms_of(Arm(rule="madam", moments="coat8"))
    assert {role: arm.moments for role, arm in arms.items()} == {
        "rule": "coat8", "rival": "coat8", "rule_fp32": "float32", "rival_fp32": "float32",
        "master": "float32",
    }


@pytest.mark.parametrize("rule, storage", [
    ("adamw", "master"), ("riemannian_adamw", "grid_residual4")
])
def test_a_checkpoint_goes_on_bit_for_bit_and_fits_no_other_moments(rule, storage):
    def fresh(moments):
        c = make_config({"moments": moments, "rule": rule, "storage": storage, "format": "E4M3"})
        model = make_model(c, 256, torch.device("cpu"))
        return model, make_optimizers(model, c)
    def move(model, optimizers, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters(): p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers: optimizer.step()
    model, optimizers = fresh("coat8")
    move(model, optimizers, 1)
    data = pack_state(model, optimizers, 1)
    again = fresh("coat8")
    unpack_state(data, "the file", *again)
    for seed in (2, 3):
        for pair in ((model, optimizers), again): move(*pair, seed)
    for a, b in zip(model.parameters(), again[0].parameters()): assert torch.equal(a, b)
    assert any(is_packed(v) for o in optimizers for s in o.state.values() for v in s.values())
    for other, said in ((None, "saved in eight bits"), ("dynamic8", "not saved as dynamic8")):
        with pytest.raises(InputError, match=said): unpack_state(data, "the file", *fresh(other))


def test_a_run_with_packed_moments_is_another_run_with_other_weights(
        small_folder, tmp_path, monkeypatch):
    recipe = replace(RECIPES["tiny"], n_embd=64, steps=2)
    monkeypatch.setitem(RECIPES, "wide", recipe)
    task = Task(steps=4, batch_size=2, warmup=1, chunks=4, windows=2, every=2)
    bench = small_bench(small_folder, task).with_folder(tmp_path)
    build_checkpoint(bench, "wide-0")
    arm = Arm(rule="adamw", checkpoint="wide-0", corpus="tiny")
    rows = [run_arm(replace(arm, moments=name), bench) for name in MOMENTS]
    assert len({row["weights_sha"] for row in rows}) == len({row["run"] for row in rows}) == 5
    assert "moments" not in rows[0] and [row["moments"] for row in rows[1:]] == PACKED
    # a code is wrong by an eighth at most: so much of what the steps did to the loss
    most = abs(rows[0]["raw_loss"] - rows[0]["frozen_loss"]) / 8
    for row in rows:
        assert run_id(row_identity(row)) == row["run"]
        assert abs(row["raw_loss"] - rows[0]["raw_loss"]) < most
        assert run_arm(arm_of(row), bench)["weights_sha"] == row["weights_sha"]
