"""On a GPU: what computes one element at a time gives the CPU's bits; what adds stays within its
rounding errors. `make gpu` runs these, and rehearses them on a CPU (ALTGRAD_TEST_DEVICE=cpu)."""
import os
from contextlib import suppress

import pytest
import torch
from torch import nn

import altgrad
from altgrad.evidence.instrument import Arm, Bench, Task
from altgrad.evidence.replicas import run_arms
from altgrad.geometry.catalogue import RULES, RuleSettings, build_rule
from altgrad.geometry.storage import grid_storages, make_grid_tensor
from altgrad.model.gpt import GPT, GPTConfig, loss_of
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.products import QuantizedLinear
from altgrad.model.surgery import quantize_model
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.kernels import rounding_key, uniform
from altgrad.numbers.quantize import fake_quantize
from altgrad.training.config import make_config
from altgrad.training.data import Corpus
from altgrad.training.trainer import Trainer
from altgrad.watching.monitors import Monitors
from tiny import small_bench

DEVICE = os.environ.get("ALTGRAD_TEST_DEVICE", "cuda")
HERE = DEVICE == "cpu" or torch.cuda.is_available()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HERE, reason="no CUDA device")]
POINTS = dict(weight="E4M3", activation="E4M3", gradient="E5M2")
RULED = [name for name, rule in RULES.items() if rule.knows_grids]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(t: torch.Tensor) -> torch.Tensor: return t.detach().cpu().float().view(torch.int32)


def test_random_numbers_are_the_same_everywhere():
    key = rounding_key(3, 5, 7)
    there = uniform(torch.Size((300, 1001)), key, DEVICE)
    assert there.device.type == DEVICE
    assert torch.equal(there.cpu(), uniform(torch.Size((300, 1001)), key))


@pytest.mark.parametrize("gradient", ("straight_through", "clipped"))
def test_gradients_of_rounding_are_the_same(gradient):
    found = []
    for device in ("cpu", DEVICE):
        x = (300 * random(70, 33)).to(device).requires_grad_()
        y = fake_quantize(x, "E4M3", gradient=gradient)
        y.backward(random(70, 33, seed=1).to(device))
        found.append((bits(y), bits(x.grad)))
    (y, g), (y_there, g_there) = found
    assert torch.equal(y, y_there) and torch.equal(g, g_there)


def test_counts_beyond_what_float32_counts_are_exact():
    "A third of 3 * 2^24 + 3 numbers overflows, vanishes, is NaN: an odd number above 2^24 each."
    third = 2**24 + 1
    x = torch.tensor([1e9, 1e-9, torch.nan], device=DEVICE).repeat_interleave(third)
    counted = quantize_stats(x, "E4M3")[1]
    assert (counted.overflow, counted.underflow, counted.nan) == (third, third, third)
    found = dict(zip(*(t.tolist() for t in counted.histogram.cpu().unique(return_counts=True))))
    assert found == {third: 3, 0: 253}  # the largest value, zero and NaN


@pytest.mark.parametrize("storage", grid_storages())
def test_weights_on_the_grid_are_the_same_after_writes(storage):
    w = random(48, 40)
    grids = [make_grid_tensor(w.to(device), "E4M3", storage, seed=1) for device in ("cpu", DEVICE)]
    for step in range(4):
        for grid in grids: grid.add_(0.05 * random(48, 40, seed=2 + step).to(grid.device))
    here, there = grids
    assert torch.equal(bits(here.dequantize()), bits(there.dequantize()))
    assert torch.equal(bits(here.scale), bits(there.scale))


@pytest.mark.parametrize("rule", RULED)
def test_update_rules_are_the_same_in_float64(rule):
    settings = RuleSettings(fmt="E4M3", lr=RULES[rule].guess)
    found = []
    for device in ("cpu", DEVICE):
        p = nn.Parameter(random(32, 24).double().to(device))
        optimizer = build_rule(rule, [p], settings)
        for step in range(3):
            p.grad = random(32, 24, seed=1 + step).double().to(device)
            optimizer.step()
        found.append(p.detach().cpu())
    # some hundred operations, each of a relative error of 2^-53, on numbers of the weights' size
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def layer_on(device: str) -> tuple[torch.Tensor, ...]:
    "Output and gradients of a rounding layer whose sums are whole numbers, so that none rounds."
    layer = QuantizedLinear.adopt(nn.Linear(64, 32, bias=False), "E4M3", activation="E4M3", gradient="E4M3")
    layer = layer.to(device)
    whole = lambda *shape: random(*shape).mul(2).round().clamp(-4, 4).to(device)
    with torch.no_grad(): layer.weight.copy_(whole(32, 64))
    x = whole(16, 64).requires_grad_()
    y = layer(x)
    y.backward(whole(16, 32))
    return y, x.grad, layer.weight.grad


def test_products_of_whole_numbers_are_exact():
    for here, there in zip(layer_on("cpu"), layer_on(DEVICE)): assert torch.equal(bits(here), bits(there))


def test_hardware_multiplies_the_same_numbers():
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9): pytest.skip("no FP8 units")
    x, w = (random(32, 64, seed=s).mul(2).round().clamp(-4, 4).to(DEVICE) for s in (0, 1))
    one = torch.ones((), device=DEVICE)
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    y = torch._scaled_mm(x8, w8.t(), one, one, out_dtype=torch.float32)
    assert torch.equal(bits(y), bits(x.cpu() @ w.cpu().T))


def gpt(device: str, **more) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16))
    quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("*", **POINTS)]), **more)
    return model.to(device)


def test_a_model_that_rounds_has_the_loss_of_the_cpu():
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    here, there = (loss_of(gpt(d), tokens[:, :-1].to(d), tokens[:, 1:].to(d)).item() for d in ("cpu", DEVICE))
    # no rounding error: a sum in another order moves few inputs to a neighbouring value, by 1/16 each
    assert abs(here - there) < 0.02


def watched(device: str) -> dict[str, float]:
    "What monitors see of one step."
    model = gpt(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitors = Monitors(model, [optimizer], every=1, histogram_every=1, health_every=1)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    monitors.begin(1)
    loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
    monitors.gradients()
    optimizer.step()
    return monitors.end().values


def test_monitors_see_the_same_weights():
    here, there = watched("cpu"), watched(DEVICE)
    assert here.keys() == there.keys()
    weights = [path for path in here if "/weight/" in path]
    assert len(weights) > 20
    # sums of at most 4,096 terms in float32: 4096 * 2^-24 of each
    for path in weights: assert there[path] == pytest.approx(here[path], rel=2.5e-4, nan_ok=True), path


@pytest.mark.parametrize("storage", ("master", "grid_stochastic"))
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(small_folder, tmp_path, storage,
                                                           monkeypatch):
    corpus = small_bench(small_folder).corpus("tiny")
    config = make_config(dict(
        name="run", format="E4M3", storage=storage, max_steps=6, batch_size=2, block_size=16,
        eval_windows=4, model="gpt-tiny", checkpoint_every=3, device=DEVICE, compile="off", data=corpus.name))
    whole = Trainer(config, tmp_path / "whole", corpus).run(progress=False)
    batch, seen = Corpus.batch, []

    def interrupted(self, size, length, seed, step, *more):
        seen.append(step)
        if seen == [1, 2, 3, 4, 5]: raise KeyboardInterrupt
        return batch(self, size, length, seed, step, *more)

    monkeypatch.setattr(Corpus, "batch", interrupted)
    with suppress(KeyboardInterrupt): Trainer(config, tmp_path / "parts", corpus).run(progress=False)
    parts = Trainer(config, tmp_path / "parts", corpus).run(progress=False)
    assert seen[5] > 1 and seen[-1] == 6  # it went on, and did not begin again
    assert whole["exit_reason"] == parts["exit_reason"] == "finished"
    # no rounding error: the same kernels on the same numbers, whose sums may change their order
    assert abs(whole["results"]["val_loss"] - parts["results"]["val_loss"]) < 1e-3


def test_replicas_are_the_single_runs_of_the_cpu(small_folder):
    class Exact(Bench):
        def model(self, checkpoint): return super().model(checkpoint).double()

    task = Task(steps=8, batch_size=2, warmup=2, chunks=2, windows=2, every=4)
    bench = small_bench(small_folder, task, kind=Exact)
    arms = [Arm(format=f, storage=s, checkpoint="tiny-0", corpus="tiny", lr=0.01, seed=i)
            for i, (f, s) in enumerate((f, s) for f in ("E4M3", "E7M0") for s in ("fp32", "grid_stochastic"))]
    here, there = (run_arms(arms, bench, device) for device in ("cpu", DEVICE))
    # float64: some 8 updates from numbers that differ by 1e-16 leave no more, unless a code flips
    for a, b in zip(here, there): assert abs(a["raw_loss"] - b["raw_loss"]) < 1e-9


@pytest.mark.parametrize("bits_beside", (0, 4))
def test_training_without_master_weights_learns_there(bits_beside):
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=64, block_size=16)).to(DEVICE)
    optimizer = altgrad.without_master(model, torch.optim.AdamW, lr=3e-3, bits=bits_beside)
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses = []
    for _ in range(20):
        loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1  # the same few tokens again and again
