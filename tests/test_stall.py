"""A meter around loops that are not ours: the four threads of its page, what it counts against
arithmetic by hand, that it changes no bit, and input that would break it."""
import gc
import io
import json
import math
import os
import tempfile
import weakref
from itertools import accumulate
from pathlib import Path

import ml_dtypes
import numpy as np
import optimi
import pytest
import torch
from torch import nn

import altgrad
import preloaded
from altgrad.basics import InputError
from altgrad.geometry.optim import RiemannianAdamW, on_grids
from altgrad.geometry.storage import store_on_grid
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.watching.attempt import AT_A_TIME, attempt_alone
from altgrad.watching.stall import FORGOTTEN, AT_ONCE, WATCHED, lightning_stall

from cases import each

BOTH = each("dtype", (torch.bfloat16, torch.float32))


class Block(nn.Module):
    "A residual block as language models have it."
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x): return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def network(dtype=torch.bfloat16, width=32) -> nn.Module:
    "Two blocks between an embedding and a head."
    torch.manual_seed(0)
    blocks = [nn.Embedding(64, width), Block(width), Block(width), nn.Linear(width, 64, bias=False)]
    return nn.Sequential(*blocks).to(dtype)


def train(model: nn.Module, optimizer, steps: int = 4) -> None:
    "A training loop that knows of no meter."
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(64, (8, 17), generator=g)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


class AdamWithRoundedUpdates(torch.optim.Optimizer):
    """Adam as in Nerogar/OneTrainer#996: weight decay multiplies the parameter in its own format,
    the rest is rounded stochastically."""
    decays_apart = True

    def __init__(self, params, lr=1e-4, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad.float()
                m = state.setdefault("m", torch.zeros_like(g)).lerp_(g, 0.1)
                v = state.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 0.01)
                rest = 1 - group["lr"] * group["weight_decay"]
                if self.decays_apart: p.mul_(rest)
                w = p.float() if self.decays_apart else p.float() * rest
                w = w - group["lr"] * m / (v.sqrt() + 1e-8)
                if p.dtype == torch.bfloat16:
                    noise = torch.randint(2**16, p.shape, dtype=torch.int32)
                    w = ((w.view(torch.int32) + noise) & -(2**16)).view(torch.float32)
                p.copy_(w)


# the four threads


@BOTH
def test_normalization_weights_stay_exactly_one(dtype, capsys):
    "vllm-project/speculators#765: training in bfloat16 left every normalization weight at 1.0."
    model = network(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with altgrad.stall(model, optimizer) as meter: train(model, optimizer, 20)
    norms = ["1.norm.weight", "2.norm.weight"]
    still = all((model.get_parameter(name) == 1).all() for name in norms)
    told = capsys.readouterr().err
    if dtype == torch.float32: assert not still and not meter.alarms and told == ""
    else:
        assert still and meter.alarms["never moved"] == norms
        assert set(norms) <= set(meter.alarms["stalled"])
        assert told.startswith("altgrad.stall, step 1: ") and norms[0] in told


@BOTH
def test_weight_decay_is_not_applied(dtype, capsys):
    "Nerogar/OneTrainer#996: decay multiplies in bfloat16, where 1 - 1e-4 * 0.01 is 1."
    model = network(dtype)
    optimizer = AdamWithRoundedUpdates(model.parameters())
    with altgrad.stall(model, optimizer) as meter: train(model, optimizer, 1)
    told = capsys.readouterr().err
    if dtype == torch.float32: assert not meter.alarms and told == ""
    else:
        assert len(meter.alarms["decay absorbed"]) == 8 and "stalled" not in meter.alarms
        assert told.startswith("altgrad.stall, step 1: weight decay, where it is rounded by itself")
        assert meter.all()["decay_absorbed"] == 1.0


class AdamWithRoundedSums(AdamWithRoundedUpdates):
    "The same with one rounding of all, as Adafactor has it according to that issue."
    decays_apart = False


@each("kind", (AdamWithRoundedUpdates, AdamWithRoundedSums))
def test_decay_that_is_rounded_with_the_rest_is_no_alarm(kind):
    "12,000 weights whose decay of 1e-4 is about a fiftieth of a spacing: some two hundred move."
    model = network()
    optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.1)
    with altgrad.stall(model, optimizer) as meter: train(model, optimizer, 1)
    assert meter.all()["decay_absorbed"] == 1.0
    assert ("decay absorbed" in meter.alarms) is kind.decays_apart


@BOTH
@each("lr", (6e-6, 6e-7), ids=("Automodel#3444", "torchtune#2254"))
def test_small_rates_round_back(lr, dtype, capsys):
    """NVIDIA-NeMo/Automodel#3444: at 6e-6 many AdamW steps round back to the same bfloat16 value.
    meta-pytorch/torchtune#2254: very bad convergence with bf16, at 6e-7."""
    model = network(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    with altgrad.stall(model, optimizer) as meter: train(model, optimizer, 3)
    told = capsys.readouterr().err
    if dtype == torch.float32: assert not meter.alarms and told == ""
    else:
        # a matrix of 32 columns begins within 1 / sqrt(32): beyond 2^-9 a step of 6e-6 is lost
        assert meter.all()["absorbed"] > 0.95 and len(meter.alarms["stalled"]) == 8
        assert told.startswith("altgrad.stall, step 1: 8 of 8 tensors stall in bfloat16")


@each("lr", (1e-6, 4e-6, 5e-5))
@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.RAdam))
@BOTH
def test_decay_is_lost_where_the_factor_says_so(kind, dtype, lr, capsys):
    """The factor of 4e-6 times 0.01 is 1 - 2^-24 in float32, which moves every weight though 4e-8 of most
    is below half a spacing; that of 1e-6 is one."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(dtype)
    settings = {"decoupled_weight_decay": True} if kind is torch.optim.RAdam else {}
    optimizer = kind(model.parameters(), lr=lr, weight_decay=0.01, **settings)
    before = model.weight.detach().clone()
    with altgrad.stall(model, optimizer) as meter:
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    stayed = (model.weight == before).float().mean().item()
    assert meter.all()["decay_absorbed"] == stayed
    lost = dtype == torch.bfloat16 or lr == 1e-6
    assert stayed == lost and ("decay absorbed" in meter.alarms) is lost
    assert ("weight decay" in capsys.readouterr().err) is lost


@each("broken", (5, None), ids=("an element", "all"))
def test_updates_that_are_not_finite_are_said_and_not_counted(broken):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    with altgrad.stall(model, adam, every=1) as meter:
        for _ in range(2):
            for p in model.parameters(): p.grad = torch.ones_like(p)
            model[1].weight.grad.view(-1)[slice(broken and broken - 1, broken)] = torch.nan
            adam.step()
    told = "of 1 tensors updates or weights were not finite and are not counted (1.weight)"
    assert told in meter.finding and "no update was attempted" not in meter.finding
    per_step = 1 if broken else model[1].weight.numel()
    assert [t["nonfinite"] for t in meter.to_dict()["tensors"]] == [0, 2 * per_step]
    assert meter.all()["absorbed"] == 0.0


# what is counted


def by_hand(kind: str, w, g, m, v, step: int, lr: float, decay: float):
    "One step of SGD with momentum, or of AdamW, as its paper has it; float64 of numpy."
    if kind == "SGD": return -lr * (0.9 * m + g + decay * w)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    size = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return -lr * (size + decay * w)


def plain(t: torch.Tensor) -> np.ndarray: return t.detach().double().numpy()


@each("kind,dtype", (
    *((kind, dtype) for kind in ("SGD", "AdamW") for dtype in (torch.bfloat16, torch.float32)),
    ("SGD", torch.float16),  # Adam's second moments underflow in it
))
def test_the_attempt_is_the_formula(kind, dtype):
    torch.manual_seed(2)
    p = nn.Parameter(torch.randn(500).to(dtype))
    more = dict(momentum=0.9) if kind == "SGD" else {}
    o = getattr(torch.optim, kind)([p], lr=0.01, weight_decay=0.1, **more)
    for step in range(1, 4):
        p.grad, state = torch.randn(500).to(dtype), o.state.get(p, {})
        # torch's first step has the gradient alone in the buffer
        m = state.get("exp_avg", state.get("momentum_buffer", torch.zeros(1)))
        v = state.get("exp_avg_sq", torch.zeros(1))
        found = attempt_alone(o, o.param_groups[0], p)
        want = by_hand(kind, plain(p), plain(p.grad), plain(m), plain(v), step, 0.01, 0.1)
        # a sum with a weight below 4: 2^-51 of it, and a dozen operations on the update
        assert np.abs(plain(found.update) - want).max() < 2.0**-49
        assert np.abs(plain(found.decay) + 0.01 * 0.1 * plain(p)).max() < 2.0**-49
        assert found.linear
        o.step()


@each("lr", (1e-2, 1e-3, 1e-4))
def test_counts_against_exact_rounding(lr):
    "Counts of bfloat16 against numpy and ml_dtypes, which know nothing of torch."
    torch.manual_seed(3)
    model = nn.Linear(40, 50, bias=False).bfloat16()
    with torch.no_grad(): model.weight.copy_(torch.randn(50, 40))
    o = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    with altgrad.stall(model, o) as meter:
        model.weight.grad = torch.randn(50, 40).bfloat16()
        w, g = plain(model.weight), plain(model.weight.grad)
        o.step()
    row, after = meter.tensors["weight"], plain(model.weight)
    u = by_hand("AdamW", w, g, 0.0, 0.0, 1, lr, 0.0)
    assert row.absorbed == (after == w).mean()
    # an update of 1e-4 is the difference of numbers below 4: to 2^-37 of it; sums of 2,000 of them
    near = dict(rel_tol=2.0**-36)
    stay = np.abs(u) * (after == w)
    assert math.isclose(row.mass_absorbed, stay.sum() / np.abs(u).sum(), **near)
    way = ((after - w) * np.sign(u)).sum() / np.abs(u).sum()
    assert math.isclose(row.arrived, way, **near)

    small = w.astype(ml_dtypes.bfloat16)
    beside = np.nextafter(small, np.where(u > 0, np.inf, -np.inf).astype(small.dtype))
    half = np.abs(beside.astype(np.float64) - w) / 2
    def kept(least): return (np.abs(u) * (np.abs(u) > least)).sum() / np.abs(u).sum()
    for name, least in (("nearest", half), ("more4", half / 16), ("more8", half / 256)):
        assert math.isclose(row.kept()[name], kept(least), **near), name
    # bisection on the rule itself: the smallest rate that moves half
    low, high = 0.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        moved = (np.abs(u) * middle / lr > half).mean()
        low, high = (low, middle) if moved >= 0.5 else (middle, high)
    assert math.isclose(row.lr_to_move_half, high, rel_tol=2.0**-23)  # kept as float32


def test_a_sample_stands_for_a_tensor():
    "Half of the columns get updates that are too small; the length of a row is a power of two."
    model = nn.Linear(1024, 128, bias=False).bfloat16()
    with torch.no_grad(): model.weight.fill_(1.0)
    o = torch.optim.SGD(model.parameters(), lr=1.0)
    with altgrad.stall(model, o) as meter:
        columns = torch.where(torch.arange(1024) % 8 < 4, 1.0, 2.0**-12).bfloat16()
        model.weight.grad = columns.repeat(128, 1)
        o.step()
    row = meter.tensors["weight"]
    assert row.watched == WATCHED < row.elements
    # three standard errors of a share of one half among 2,048
    assert abs(row.absorbed - 0.5) < 1.5 / math.sqrt(WATCHED)


def test_one_element_that_is_not_watched_counts_as_a_move():
    model = nn.Linear(300, 300, bias=False).bfloat16()
    o = torch.optim.SGD(model.parameters(), lr=0.0)
    for moves in (True, False):
        with altgrad.stall(model, o) as meter:
            model.weight.grad = torch.ones(300, 300).bfloat16()
            o.step()
            with torch.no_grad(): model.weight[0, 1] += moves
        assert meter.tensors["weight"].moved is moves


class InEightBits(torch.optim.Optimizer):
    "SGD on parameters in an 8-bit format, for which torch has no arithmetic."
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_((p.float() - self.param_groups[0]["lr"] * p.grad.float()).to(p.dtype))


@each("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
def test_parameters_in_eight_bits(dtype):
    torch.manual_seed(5)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(300).to(dtype))
    model.w.grad, before = torch.randn(300).to(dtype), plain(model.w)
    optimizer = InEightBits(model.parameters(), lr=0.02)
    with altgrad.stall(model, optimizer) as meter: optimizer.step()
    row = meter.tensors["w"]
    meant = plain(model.w.grad) != 0
    assert row.stored == str(dtype).removeprefix("torch.")
    assert row.absorbed == (plain(model.w) == before)[meant].mean()
    assert meter.alarms["stalled"] == ["w"]


def test_a_compiled_step_is_not_measured_and_goes_on():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for p in model.parameters(): p.grad = torch.ones_like(p)
    before = model[3].weight.clone()
    with altgrad.stall(model, optimizer, every=1) as meter:
        torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(before, model[3].weight)
    assert meter.stopped == "the optimizer's step is compiled" and meter.measured == 0


# nothing is changed

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-4)),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-4, amsgrad=True, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "stochastic": AdamWithRoundedUpdates,
    "optimi": lambda p: optimi.AdamW(p, lr=1e-4),
}


@pytest.mark.parametrize("kind,dtype", (
    *((kind, dtype) for kind in KINDS for dtype in (torch.bfloat16, torch.float32)),
    ("sgd", torch.float16),  # Adam's second moments underflow in it
), ids=str)
def test_watching_changes_no_bit(kind, dtype):
    def run(every):
        model = network(dtype)
        optimizer = KINDS[kind](model.parameters())
        torch.manual_seed(4)
        if every:
            with altgrad.stall(model, optimizer, every) as meter: train(model, optimizer)
            assert meter.measured == 4 // every + (every > 1) and not meter.stopped
            assert any(row.steps for row in meter.tensors.values())
        else: train(model, optimizer)
        return model.state_dict(), optimizer.state_dict()["state"], torch.rand(8), optimizer
    weights, state, drawn, optimizer = run(0)
    for every in (1, 2):
        weights2, state2, drawn2, optimizer2 = run(every)
        assert torch.equal(drawn, drawn2)
        assert all(torch.equal(a, weights2[name]) for name, a in weights.items())
        names = [(i, k) for i in state for k in state[i] if state[i][k] is not None]
        pairs = [(torch.as_tensor(state[i][k]), torch.as_tensor(state2[i][k])) for i, k in names]
        assert pairs and all(torch.equal(*pair) for pair in pairs)
        assert not optimizer2._optimizer_step_pre_hooks
        assert not optimizer2._optimizer_step_post_hooks
        assert vars(optimizer).keys() == vars(optimizer2).keys()


@pytest.mark.parametrize(
    "storage", ("grid_nearest", "grid_stochastic", "grid_residual4", "bf16_kahan")
)
@pytest.mark.parametrize("rule, shared", (
    ("torch", "tensor"), ("on_grids", "tensor"), ("riemannian", "tensor"),
    ("on_grids", "channel"), ("on_grids", "32"), ("on_grids", "nvfp4"),
))
def test_weights_on_the_grid(storage, rule, shared):
    build = {
        "torch": lambda p: torch.optim.AdamW(p, lr=2e-4),
        "on_grids": lambda p: on_grids(torch.optim.AdamW)(p, lr=2e-4),
        "riemannian": lambda p: RiemannianAdamW(p, "E4M3", lr=0.05),
    }[rule]

    def run(watched):
        model = network(torch.float32, width=64)
        seen = LayerPrecisionRule("*", weight=f"E4M3 {shared}")
        quantize_model(model, config=PrecisionConfig(default=seen))
        store_on_grid(model, storage)
        optimizer = build(model.parameters())
        if not watched: train(model, optimizer)
        else:
            with altgrad.stall(model, optimizer, every=1) as meter: train(model, optimizer)
            watched.append(meter)
        return model
    first, second = run([]), run(found := [None])
    for a, b in zip(first.parameters(), second.parameters()):
        if hasattr(a.data, "parts"): pairs = zip(a.data.parts().values(), b.data.parts().values())
        else: pairs = [(a, b)]
        assert all(torch.equal(*pair) for pair in pairs)
    meter, up = found[1], found[1].tensors["1.up.weight"]
    assert not meter.stopped and meter.measured == 4 and up.steps == 4
    stalls = "1.up.weight" in meter.alarms.get("stalled", [])
    assert stalls == (storage == "grid_nearest")
    if storage != "grid_nearest": assert 0.8 < up.arrived < 1.2  # of 8,192 elements in four steps


# who stores more than a parameter says


def test_a_compensation_is_no_stall():
    "optimi keeps beside a bfloat16 weight what its rounding lost."
    for kahan, stalls in ((True, False), (False, True)):
        model = network()
        optimizer = optimi.AdamW(model.parameters(), lr=1e-5, kahan_sum=kahan)
        with altgrad.stall(model, optimizer, every=1) as meter: train(model, optimizer)
        assert ("stalled" in meter.alarms) is stalls
        assert ("decay absorbed" in meter.alarms) is stalls


class WithMasters(torch.optim.Optimizer):
    "SGD that keeps a float32 copy of each parameter in its state."
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float().clone())
                master.sub_(group["lr"] * p.grad)
                p.copy_(master)


def test_a_copy_in_higher_precision_is_no_stall():
    model = network()
    optimizer = WithMasters(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)  # now the copies are there
    with altgrad.stall(model, optimizer, every=1) as meter: train(model, optimizer)
    assert not meter.alarms
    row = meter.tensors["3.weight"]
    assert (row.stored, row.beside) == ("bfloat16", "float32") and 0.9 < row.arrived < 1.1


class Clipped(torch.optim.Optimizer):
    "SGD on gradients that are divided by the norm of all of them: no step of one tensor alone."
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every: p.sub_(self.param_groups[0]["lr"] * p.grad / (9 * norm))


def test_a_step_that_needs_all_tensors_is_not_guessed():
    model = network(torch.float32)
    optimizer = Clipped(model.parameters(), lr=0.1)
    with altgrad.stall(model, optimizer) as meter: train(model, optimizer, 1)
    notes = {row.note for row in meter.tensors.values()}
    assert notes == {"the step made again on it alone is not the step that it took"}
    assert not meter.alarms and "nothing was measured" in meter.finding


def test_an_optimizer_that_holds_its_parameters_elsewhere_moves_none_of_them():
    class Hidden(WithMasters):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.mine = [p for group in self.param_groups for p in group["params"]]

        @torch.no_grad()
        def step(self):
            for p in self.mine: p.sub_(p.grad)
    model, twin = network(torch.float32), network(torch.float32)
    for m, watched in ((model, True), (twin, False)):
        optimizer = Hidden(m.parameters(), lr=0.1)
        if not watched: train(m, optimizer, 2)
        else:
            with altgrad.stall(m, optimizer, every=1) as meter: train(m, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert not any(row.steps for row in meter.tensors.values())


# loops


def steps_by(closure: bool) -> dict:
    "What a meter finds where gradients come before the step, or within it."
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 10)
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))

    def loss():
        optimizer.zero_grad()
        value = model(tokens).float().square().mean()
        value.backward()
        return value
    with altgrad.stall(model, optimizer, every=1) as meter:
        for _ in range(3):
            if closure: optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            scheduler.step()
    assert meter.measured == 3 and meter.tensors["3.weight"].lr == 5e-5
    return meter.to_dict()


def test_a_closure_and_a_scheduler(): assert steps_by(True) == steps_by(False)


def test_lbfgs_with_its_closure_is_not_measured_and_goes_on():
    model = network(torch.float32)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss():
        optimizer.zero_grad()
        value = model(torch.arange(64)).square().mean()
        value.backward()
        return value
    before = loss().item()
    with altgrad.stall(model, optimizer, every=1) as meter: optimizer.step(loss)
    assert loss().item() < before and "takes a closure" in meter.finding


@each("fused", (False, True))
def test_a_scaler_skips_a_step(fused):
    "Before a step, or within a fused one, gradients are divided by the scale or the step is left."
    model, scaler = network(torch.float32), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    with altgrad.stall(model, optimizer, every=1) as meter:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.arange(64)).square().mean()).backward()
            if step == 1: model[3].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
    assert meter.measured == 2 and not meter.stopped
    assert all(row.steps == 2 and not row.note for row in meter.tensors.values()), meter
    assert not meter.alarms


def test_groups_accumulation_ties_and_what_has_no_gradient():
    model = network()
    model[3].weight = model[0].weight  # tied
    model.extra = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))  # never used
    groups = [
        dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=0.1, lr=1e-2),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0, lr=1e-6),
    ]
    optimizer = torch.optim.AdamW(groups)
    with altgrad.stall([model], [optimizer], every=2) as meter:
        for _ in range(6):
            for _ in range(3): model(torch.arange(64)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (meter.steps, meter.measured) == (6, 4)
    assert len(meter.tensors) == len(list(model.parameters())) == 8
    assert meter.tensors["extra"].note == "it has no gradient" and not meter.tensors["extra"].steps
    norm, matrix = meter.tensors["1.norm.weight"], meter.tensors["1.up.weight"]
    assert (norm.lr, matrix.lr) == (1e-6, 1e-2)
    assert norm.decay_absorbed is None and matrix.decay_absorbed is not None
    assert meter.alarms["stalled"] == ["1.norm.weight", "2.norm.weight"]


def test_a_step_within_a_step_and_a_step_that_fails():
    class Nested(torch.optim.AdamW):
        fails = False

        def step(self, closure=None):
            if self.fails: raise ArithmeticError
            return super().step(closure)
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # from now on its step calls hooks, too
    model = network()
    optimizer = Nested(model.parameters(), lr=1e-4)
    with altgrad.stall(model, optimizer, every=1) as meter:
        train(model, optimizer, 2)
        optimizer.fails = True
        with pytest.raises(ArithmeticError): train(model, optimizer, 1)
        optimizer.fails = False
        train(model, optimizer, 3)
    assert (meter.steps, meter.measured) == (6, 5) and not meter.stopped
    assert all(row.steps == meter.measured for row in meter.tensors.values())


def test_a_closure_that_fails_takes_no_other_step_with_it():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    def closure(): return model(torch.zeros(1, 4, dtype=torch.long)).square().mean().backward()
    def fails(): raise ArithmeticError
    with altgrad.stall(model, optimizer, every=1) as meter:
        for act in (closure, fails, closure, fails, fails, closure):
            optimizer.zero_grad()
            try: optimizer.step(act)
            except ArithmeticError: pass
    assert (meter.steps, meter.measured) == (6, 3) and not meter.stopped


def most_bytes(act) -> int:
    "The most that is allocated at once while something is done, beyond what there was."
    with torch.profiler.profile(profile_memory=True) as profile: act()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    sizes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(accumulate((size for _, size in sizes), initial=0))


def bytes_of_a_meter(model, optimizer) -> tuple[int, int]:
    "The most bytes that a meter takes where it starts, and where it measures."
    for p in model.parameters(): p.grad = torch.randn_like(p)
    optimizer.step()
    meter = altgrad.stall(model, optimizer, every=1)
    began, watch = most_bytes(meter.start), meter._watches[0]
    def measure(): assert watch.enter() and watch.leave()
    measured = most_bytes(measure)
    meter.stop()
    # no step was made between, which is what the meter finds
    found = {row.note for row in meter.tensors.values()}
    assert found <= {"", "the step made again on it alone is not the step that it took"}
    assert meter.measured == 1 and not meter.stopped
    return began, measured


def squares(n: int, width: int, dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(n))).to(dtype)


@pytest.mark.parametrize("n, width", ((4, 1024), (40, 512)))
def test_memory(n, width):
    """At once there are, of each watched element, its code and its update, and a chunk in whose
    arithmetic there are up to eighteen numbers of float64 for an element."""
    model = squares(n, width)
    began, measured = bytes_of_a_meter(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    kept, chunk = n * WATCHED * (2 + 8), AT_ONCE["cpu"] * 8
    assert 0 < measured <= kept + 18 * chunk
    assert began <= n * WATCHED * 2 + AT_A_TIME * 16
    if width == 1024: assert max(began, measured) < width**2 * 2, "less than one weight"


@pytest.mark.parametrize("kahan", (False, True))
@pytest.mark.parametrize("dtype, each", ((torch.bfloat16, 4), (torch.float32, 8)), ids=str)
def test_memory_where_an_optimizer_is_not_torchs(dtype, each, kahan):
    """Its step is made on one whole tensor at a time, one trial after another, in float32, or in
    float64 of a tensor in float32: a weight, its gradient, the states, and a temporary of the step."""
    model = squares(3, 1024, dtype)
    optimizer = optimi.AdamW(model.parameters(), lr=1e-4, kahan_sum=kahan)
    began, measured = bytes_of_a_meter(model, optimizer)
    states = 3 if kahan and dtype == torch.bfloat16 else 2
    assert began < 2**19 and measured <= (1 + 1 + states + 1) * each * 1024**2 + 2**19


# bad input


@each("model,optimizer,every,said", (
    ("gpt2", None, 20, "model must be a torch.nn.Module"),
    (None, "adamw", 20, "optimizer must be a torch.optim.Optimizer"),
    (None, [], 0, "every must be a whole number of steps"),
    (None, None, True, "every must be a whole number of steps"),
    (None, None, 2.0, "every must be a whole number of steps"),
))
def test_arguments_of_the_wrong_kind(model, optimizer, every, said):
    good = nn.Linear(2, 2)
    model = good if model is None else model
    optimizer = torch.optim.SGD(good.parameters()) if optimizer is None else optimizer
    with pytest.raises(InputError, match=said): altgrad.stall(model, optimizer, every)


@each("model,said", (
    (nn.ReLU(), "the model has no parameters"),
    (nn.Linear(2, 2), "no parameter of the optimizer is one of the model's"),
))
def test_what_cannot_be_watched_is_said_once(model, said, capsys):
    own = network()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
    with altgrad.stall(model, optimizer, every=1) as meter: train(own, optimizer)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and said in told[0] and said in meter.stopped and said in meter.finding


def test_a_loop_that_never_steps(capsys):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with altgrad.stall(model, optimizer) as meter: pass
    assert meter.finding == "nothing was measured: the optimizer made no step in the meter"
    assert meter.finding in capsys.readouterr().err and meter.metrics() == {}
    assert "nothing was measured" in str(meter) and "nothing was measured" in meter._repr_html_()
    json.dumps(meter.to_dict())


def test_a_tensor_on_meta_and_other_odd_ones():
    model = network()
    model.ghost = nn.Parameter(torch.empty(4, device="meta"))
    model.spins = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    model.none = nn.Parameter(torch.empty(0))
    model.rows = nn.Embedding(9, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with altgrad.stall(model, optimizer, every=1) as meter:
        model.spins.grad = torch.ones(4, dtype=torch.complex64)
        model.rows(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert meter.tensors["ghost"].note == "it is on the meta device, without values"
    assert meter.tensors["spins"].note == "its numbers are complex"
    assert meter.tensors["none"].note == "it is empty"
    assert meter.tensors["rows.weight"].note == "its gradient is sparse"
    assert not meter.stopped and str(meter).count("not measured") > 4


def test_parameters_that_change():
    "A new shape, a new format, and a new parameter: each is named, and the others go on."
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with altgrad.stall(model, optimizer, every=1) as meter:
        train(model, optimizer, 2)
        model[1].norm.weight.data = model[1].norm.weight.data.float()
        model[2].norm.weight.data = torch.ones(7, dtype=torch.bfloat16)
        del optimizer.state[model[1].norm.weight], optimizer.state[model[2].norm.weight]
        model.late = nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [model.late]})
        for p in model.parameters(): p.grad = torch.ones_like(p)
        optimizer.step()
    assert meter.tensors["1.norm.weight"].note == "its format changed from bfloat16 to float32"
    assert meter.tensors["2.norm.weight"].note == "its shape changed from [32] to [7]"
    assert meter.tensors["late"].steps == 1 and meter.tensors["1.up.weight"].steps == 3
    assert not meter.stopped
    assert "of 2 tensors its format changed from bfloat16 to float32 (1.norm.weight" in meter.finding


def test_a_layer_that_an_optimizer_is_given_later_is_measured_from_then_on():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sgd = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with altgrad.stall(model, sgd, every=1) as meter:
        for step in range(4):
            if step == 2: sgd.add_param_group({"params": list(model[0].parameters())})
            model.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            sgd.step()
            assert ("no optimizer holds it" in meter.finding) == (step < 2)
    assert not meter.stopped and not meter.alarms
    assert {name: row.steps for name, row in meter.tensors.items()} == {
        "0.weight": 2, "0.bias": 2, "1.weight": 4, "1.bias": 4}


def test_a_model_that_is_cast_during_the_run_is_said_once(capsys):
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with altgrad.stall(model, optimizer, every=1) as meter:
        for step in range(6):
            if step == 2: model.bfloat16()
            model(torch.ones(2, 16, dtype=model.weight.dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = "parameters change during the run: of 2 tensors its format changed from float32 to bfloat16"
    assert capsys.readouterr().err.count(said) == 1
    assert "since then they are not measured" in meter.finding and "since then" in str(meter)


@each("told_to", ("the optimizer too", "the model alone"))
def test_a_parameter_that_takes_the_place_of_another(told_to, capsys):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with altgrad.stall(model, optimizer, every=1) as meter:
        train(model, optimizer, 2)
        old = model[1].up.weight
        model[1].up.weight = new = nn.Parameter(old.detach().clone())
        if told_to == "the optimizer too":
            held = optimizer.param_groups[0]["params"]
            held[:] = [new if p is old else p for p in held]
        train(model, optimizer, 2)
    later = meter.tensors["1.up.weight, from step 3 on"]
    expected = (2, "") if told_to == "the optimizer too" else (0, FORGOTTEN)
    assert (later.steps, later.note) == expected and meter.tensors["1.up.weight"].steps == 2
    said = "altgrad.stall: parameters change during the run: 1.up.weight, from step 3 on"
    assert capsys.readouterr().err.splitlines().count(said) == 1 and not meter.stopped


def test_a_fault_of_the_meter_is_said_once_and_the_training_goes_on(monkeypatch, capsys):
    def broken(*_): raise ZeroDivisionError("by a meter")
    monkeypatch.setattr("altgrad.watching.stall._batch", broken)
    model, twin = network(), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with altgrad.stall(model, optimizer, every=1) as meter: train(model, optimizer)
    train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    told = capsys.readouterr().err
    assert told == "altgrad.stall stopped at step 1: ZeroDivisionError: by a meter\n"
    assert "stopped at step 1" in meter.finding


def test_an_error_of_the_loop_is_the_loops():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with pytest.raises(KeyError), altgrad.stall(model, optimizer): raise KeyError("theirs")
    assert not optimizer._optimizer_step_pre_hooks


@each("shape", ((108, 36), (8, 768), (144, 48), (180, 60), (2100,), (100, 30), (50, 41), (4095,)))
@each("first", (1e-1, 1e-4))
def test_the_elements_that_are_watched_are_from_the_whole_tensor(shape, first):
    "Half of a tensor's updates are too small; both halves are watched, in proportion."
    w = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    optimizer, n = torch.optim.SGD([w], lr=1.0), w.numel()
    g = torch.full((n,), 1e-1 if first == 1e-4 else 1e-4, dtype=torch.bfloat16)
    g[: n // 2] = first
    w.grad = g.view(shape)
    before = w.detach().clone()
    holder = torch.nn.Module()
    holder.w = w
    with altgrad.stall(holder, optimizer, every=1) as meter: optimizer.step()
    [row] = meter.tensors.values()
    assert abs(row.absorbed - (w == before).double().mean()) < 0.06  # a tenth of the end may be left out
    assert row.watched == min(n, 2048)


@each("kind", (torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.ASGD))
def test_parameters_without_dimensions_are_measured(kind):
    class Gates(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.tensor(x)) for x in (1.0, 2.0))
            self.line = torch.nn.Linear(3, 3)
        def forward(self, x): return self.line(x) * self.a + self.b
    model = Gates()
    optimizer = kind(model.parameters(), lr=1e-2)
    with altgrad.stall(model, optimizer, every=1) as meter:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not meter.stopped and meter.steps == 3
    assert {name: row.steps for name, row in meter.tensors.items()} == dict.fromkeys(
        ("a", "b", "line.weight", "line.bias"), 3)


def test_a_rate_of_zero_attempts_nothing():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with altgrad.stall(model, optimizer) as meter: train(model, optimizer, 1)
    assert meter.finding == "no update was attempted: learning rates or gradients were zero"
    assert not meter.alarms


def test_a_meter_that_has_ended_holds_nothing(capsys):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with altgrad.stall(model, optimizer, every=1) as meter: train(model, optimizer)
    found, weight = meter.to_dict(), weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert weight() is None and meter.to_dict() == found
    meter.stop()
    capsys.readouterr()
    meter.start()
    assert "make another one" in capsys.readouterr().err


def test_what_is_handed_out():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with altgrad.stall(model, optimizer, every=2) as meter: train(model, optimizer)
    told = json.loads(json.dumps(meter.to_dict(), allow_nan=False))
    assert told["measured"] == 3 and len(told["tensors"]) == 8 and told["alarms"] == meter.alarms
    assert all(path.startswith("stall/all/") for path in meter.metrics())
    assert all(math.isfinite(value) for value in meter.metrics().values())
    assert len(str(meter).splitlines()) == 3 + 8 and "<table>" in meter._repr_html_()
    assert meter.plot().axes[0].get_xticklabels()[0].get_text() == "0"


def test_a_meter_as_a_table_has_the_worst_first_and_twenty_rows():
    from rich.console import Console
    def printed(meter):
        console = Console(width=250, record=True, file=io.StringIO())
        console.print(meter)
        return console.export_text()
    model = nn.Sequential(network(), *(nn.Linear(4, 4) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with altgrad.stall(model, optimizer) as meter: train(model[0], optimizer, 1)
    said = printed(meter)
    rows = [line for line in said.splitlines() if line.startswith("│")]
    assert "tensors stall in bfloat16" in said and len(rows) == 20 and "and 28 more" in said
    assert "norm.weight" in rows[0] and "never" in rows[0] and "it has no gradient" in rows[-1]
    with altgrad.stall(model, optimizer) as meter: pass
    assert "made no step in the meter" in printed(meter)


# in a loop as torchtitan has it


class Container(torch.optim.Optimizer):
    "Several optimizers as one, as torchtitan's OptimizersContainer has them."
    def __init__(self, parts, kind=torch.optim.AdamW, **settings):
        self.optimizers = [kind(part.parameters(), **settings) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], settings)

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers: optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers: optimizer.zero_grad(*args, **kwargs)


class Processor:
    "What torchtitan's loop logs."
    def __init__(self): self.logged = []

    def log(self, step, loss, extra_metrics): self.logged.append((step, loss, extra_metrics))


class Titan:
    "A trainer whose model lies in parts, a stage of a pipeline each."
    def __init__(self, dtype):
        whole = network(dtype)
        self.model_parts = [whole[:2], whole[2:]]
        self.optimizers = Container(self.model_parts, lr=1e-5)
        self.schedulers = [torch.optim.lr_scheduler.ConstantLR(o, 1.0) for o in self.optimizers.optimizers]
        self.metrics_processor, self.step = Processor(), 0

    def train(self, meters, steps=4, told=lambda loss: loss):
        g = torch.Generator().manual_seed(1)
        for self.step in range(1, steps + 1):
            self.optimizers.zero_grad()
            tokens = torch.randint(64, (8, 17), generator=g)
            h = tokens[:, :-1]
            for part in self.model_parts: h = part(h)
            loss = nn.functional.cross_entropy(h.float().flatten(0, 1), tokens[:, 1:].flatten())
            told(loss).backward()
            params = [p for part in self.model_parts for p in part.parameters()]
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            self.optimizers.step()
            for scheduler in self.schedulers: scheduler.step()
            extra = {k: v for meter in meters for k, v in meter.news().items()}
            self.metrics_processor.log(self.step, loss.item(), extra)
        return params


@BOTH
def test_in_a_loop_as_torchtitan_has_it(dtype, capsys):
    watched, plain = Titan(dtype), Titan(dtype)
    meter = altgrad.stall(watched.model_parts, watched.optimizers, every=2)
    recorder = altgrad.record(watched.model_parts, watched.optimizers, every=2)
    with meter, recorder: weights = watched.train((meter, recorder), told=recorder.loss)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain.train(()), strict=True))
    logged = watched.metrics_processor.logged
    measured = [bool(extra) for _, _, extra in logged]
    assert measured == [True, True, False, True] and (meter.steps, meter.measured) == (4, 3)
    assert all(math.isfinite(v) for _, _, extra in logged for v in extra.values())
    assert len(meter.tensors) == 8 and all(row.steps == 3 for row in meter.tensors.values())
    assert recorder.recording.steps == [1, 2, 3, 4] and not recorder.stopped and not meter.stopped
    assert recorder.recording.losses().tolist() == [loss for _, loss, _ in plain.metrics_processor.logged]
    told = capsys.readouterr().err
    assert not meter.unwatched and not recorder.unwatched and "not given" not in told
    if dtype == torch.float32: assert not meter.alarms and recorder.cause is None and told == ""
    else:
        assert meter.alarms["never moved"] == ["1.norm.weight", "2.norm.weight"]
        assert recorder.cause.kind == "stalled" and logged[0][2]["stall/all/absorbed"] > 0.5


# several processes

TWO = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import altgrad
sys.path.insert(0, os.environ["TESTS"])
from test_stall import AdamWithRoundedUpdates, network
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
found = []
for kind in (torch.optim.AdamW, AdamWithRoundedUpdates):
    for watched in (True, False):
        model = DistributedDataParallel(network())
        optimizer = kind(model.parameters(), lr=1e-4)
        meter = altgrad.stall(model, optimizer, every=1)
        if watched: meter.start()
        for step in range(3):
            optimizer.zero_grad()
            tokens = torch.arange(64).roll(3 * step + dist.get_rank())
            model(tokens).float().square().mean().backward()
            torch.manual_seed(step)
            optimizer.step()
        if watched: meter.stop()
        found.append((meter, torch.cat([p.detach().flatten() for p in model.parameters()])))
(one, a), (_, b), (other, c), (_, d) = found
assert torch.equal(a, b) and torch.equal(c, d), "watching changed a bit"
assert one.measured == 3 and len(one.alarms["stalled"]) == 8 and not one.stopped
assert all(row.name[0] in "0123" for row in one.tensors.values()), "without the wrapper's prefix"
notes = {r.note for r in other.tensors.values()}
assert notes == {"its optimizer's step may speak with other processes"}
both = [None, None]
dist.all_gather_object(both, one.to_dict())
assert both[0] == both[1], "data parallel: each process sees the same"
model = network()
for part in (*model, model): fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
with altgrad.stall(model, optimizer, every=1) as meter:
    model(torch.arange(64)).float().square().mean().backward()
    optimizer.step()
assert len(meter.alarms["stalled"]) == 8 and not meter.stopped
assert meter.tensors["0.weight"].shape == (32, 32), "sharded: each process sees its part"
dist.destroy_process_group()
print("fine", flush=True)
"""


def test_two_processes(tmp_path):
    (tmp_path / "two.py").write_text(TWO, encoding="utf-8")
    here = os.path.dirname(__file__)
    env = {**os.environ, "TESTS": here, "OMP_NUM_THREADS": "1"}
    done = preloaded.torchrun(2, tmp_path / "two.py", env=env)
    assert done.stdout.count("fine") == 2, done.stderr[-3000:]


def test_a_layer_that_no_optimizer_holds_is_named():
    kept, lost = nn.Linear(4, 4), nn.Linear(4, 4)
    lost.bias.requires_grad_(False)
    model = nn.Sequential(kept, lost)
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    with altgrad.stall(model, optimizer) as meter:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert "of 1 tensors no optimizer holds it (1.weight)" in meter.finding
    assert not meter.tensors["1.weight"].moved and "1.bias" not in meter.tensors


@each("make", [
    lambda: altgrad.stall([], torch.optim.SGD([nn.Parameter(torch.ones(1))])),
    lambda: altgrad.stall(nn.Linear(1, 1), []),
    lambda: lightning_stall(every=0),
    lambda: lightning_stall(every="5"),
])
def test_what_is_empty_or_no_number_is_refused_at_once(make):
    with pytest.raises(InputError): make()


def test_a_tensor_with_nan_has_not_moved_by_being_there():
    layer = nn.Linear(4, 4)
    with torch.no_grad(): layer.weight[0, 0] = math.nan
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with altgrad.stall(layer, optimizer) as meter:
        layer(torch.ones(2, 4)).nan_to_num().sum().backward()
        optimizer.step()
    assert not any(row.moved for row in meter.tensors.values())


def test_a_step_that_raised_hides_no_other_optimizer(capsys):
    layer = nn.Linear(4, 4)
    own, other = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.Adam(layer.parameters(), lr=0.1)
    def closure(): raise ArithmeticError
    with altgrad.stall(layer, own) as meter:
        with pytest.raises(ArithmeticError): own.step(closure)
        for _ in range(3):
            layer(torch.ones(2, 4)).sum().backward()
            other.step()
    assert set(meter.unwatched) == {"Adam"}
