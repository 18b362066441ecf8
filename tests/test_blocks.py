"""Weights that live on a grid under the scales of blocks: every write against gfloat and exact
fractions, memory as it is said, every rule and storage, checkpoints, and what is refused."""
import io
from dataclasses import replace
from fractions import Fraction
from functools import cache

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch

from altgrad.basics import InputError
from altgrad.evidence.bench import bits_a_weight
from altgrad.evidence.instrument import (
    Arm, Weights, identity, row_identity, run_arm, run_id,
)
from altgrad.evidence.replicas import kind_if_stacked
from altgrad.geometry.catalogue import RULES
from altgrad.geometry.interchange import load_model, model_codes, save_codes
from altgrad.geometry.optim import (
    StiffnessAdamW, _factor, _grid_numbers, grids_of, stiffness_numbers,
)
from altgrad.geometry.spacing import stiffness
from altgrad.geometry.storage import (
    STORAGES, grid_storages, load_plain_state, make_grid_tensor, plain_state, store_on_grid, write, write_all,
)
from altgrad.model.gpt import GPT, GPTConfig
from altgrad.model.points import LayerPrecisionRule, Precision, PrecisionConfig, Quantizer
from altgrad.model.surgery import quantize_model
from altgrad.numbers.blocks import block_scales, grown
from altgrad.numbers.formats import get_format
from altgrad.numbers.kernels import set_path
from tiny import TASK, small_bench

E2M1 = "float4_e2m1fn"
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
GRANULARITIES = ["channel", 16, 32, "nvfp4"]


def weight(seed=0, rows=8, width=64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=g) * torch.logspace(-3, 0, rows)[:, None]


def nearest(x: Fraction) -> Fraction:
    "The value of E2M1 nearest to a magnitude; ties to the even code."
    return min((abs(x - Fraction(v)), i % 2, Fraction(v)) for i, v in enumerate(VALUES))[2]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_write_is_the_nearest_value_under_each_blocks_scale(granularity):
    w, step = weight(), 0.3 * weight(1)
    grid = make_grid_tensor(w, E2M1, "grid_nearest", granularity=granularity)
    before = grid.dequantize()
    grid.add_(step)
    for x, s, q in zip((before + step).flatten().tolist(), grid.scale.flatten().tolist(),
                       grid.dequantize().flatten().tolist()):
        expected = nearest(abs(Fraction(x)) / Fraction(s)) * Fraction(s)
        assert abs(Fraction(q)) == expected


def test_the_bytes_are_those_of_the_standard():
    w = weight()
    grid = make_grid_tensor(w, E2M1, "grid_nearest", granularity=32)
    parts = grid.parts()
    assert parts["codes"].nbytes == w.numel() // 2
    e8m0, e2m1 = gfloat.formats.format_info_ocp_e8m0, gfloat.formats.format_info_ocp_e2m1
    scales = [gfloat.decode_float(e8m0, int(b)).fval for b in parts["scale"].flatten()]
    low, high = parts["codes"] & 15, parts["codes"] >> 4  # the first of two in the low bits
    codes = torch.stack([low, high], 1).flatten().tolist()
    values = np.array([gfloat.decode_float(e2m1, c).fval for c in codes]).reshape(-1, 32)
    decoded = (values * np.array(scales)[:, None]).reshape(w.shape)
    assert np.array_equal(decoded, grid.dequantize().numpy())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_stochastic_rounding_under_blocks_is_unbiased(granularity):
    w, copies, seeds = weight(rows=2), 5, 200
    mean, many = torch.zeros_like(w), w.repeat(copies, 1)
    grid = make_grid_tensor(w, E2M1, "grid_stochastic", granularity=granularity)
    start, top = grid.dequantize(), grid.scale * 6
    step = torch.where(start.abs() < 0.9 * top, 0.1 * grid.scale, 0.0)  # nothing is outgrown
    for seed in range(seeds):
        grid = make_grid_tensor(many, E2M1, "grid_stochastic", seed, granularity=granularity)
        grid.add_(step.repeat(copies, 1))
        mean += grid.dequantize().view(copies, 2, 64).mean(0) / seeds
    # one draw deviates by at most a spacing, 2 scales; six deviations of the mean
    assert ((mean - start - step).abs() <= 6 * 2 * grid.scale[:2] / (copies * seeds) ** 0.5).all()


@pytest.mark.parametrize("fmt", [E2M1, "E1M2b1", "E4M3"])
@pytest.mark.parametrize("granularity", [32, "nvfp4"])
def test_a_weight_that_leaves_its_block_is_right_on_average(fmt, granularity):
    w, copies, n = torch.full((4, 32), 0.25), 5, 500
    w[:, 5] = top = 1.0
    step, mean, many, grew = torch.zeros(4, 32), torch.zeros(4, 32), w.repeat(copies, 1), 0
    step[:, 5] = 0.03
    for seed in range(n // copies):
        grid = make_grid_tensor(many, fmt, "grid_stochastic", seed, granularity=granularity)
        start, scale = grid.dequantize()[:4], grid.scale[0, 5].item()
        grid.add_(step.repeat(copies, 1))
        mean += grid.dequantize().view(copies, 4, 32).sum(0) / n
        grew += int((grid.scale[:, 5] > scale).sum())
    values = get_format(fmt).values
    gap = scale * values[values.isfinite()].unique().diff()[-1].item()
    last = start[0, 5] / scale == get_format(fmt).max
    assert not last or 0 < grew < 2 * 4 * n * 0.03 / gap  # as seldom as the step is short
    # one draw deviates by at most a spacing under a doubled scale; six deviations of the mean
    assert ((mean - start - step).abs() <= 6 * 2 * gap * top / n**0.5).all()


@pytest.mark.parametrize("storage", grid_storages())
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_storage_keeps_blocks(storage, granularity):
    w = weight()
    grid = make_grid_tensor(w, E2M1, storage, granularity=granularity)
    for seed in range(3): grid.add_(0.1 * weight(seed))
    own = STORAGES[storage].fmt is not None
    assert grid.granularity == ("tensor" if own else granularity)
    assert grid.dequantize().isfinite().all() and grid.latent().isfinite().all()
    if own: return
    scale = grid.scale
    assert set(grid.dequantize().abs().div(scale).unique().tolist()) <= set(VALUES)
    same = grid.clone()
    same.copy_(grid)
    assert torch.equal(same.codes, grid.codes) and torch.equal(same.scale, scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_stiffness_is_the_spacing_under_each_blocks_scale(granularity):
    w = weight()
    p = torch.nn.Parameter(make_grid_tensor(w, E2M1, "grid_nearest", granularity=granularity))
    rule = StiffnessAdamW([p], E2M1, 1e-2, power=1.0, floor_octaves=8.0)
    group = rule.param_groups[0]
    rows = stiffness_numbers(grids_of(group, [p]), group)
    scales = block_scales(granularity)
    each = scales.values(p.data.scales())
    assert rows.shape[0] == each.numel()
    real = stiffness(p.data.dequantize() / p.data.scale, get_format(E2M1)) * p.data.scale
    # S / max S of the whole tensor, in float64 and rounded once to float32
    numbers = next(_grid_numbers(rule, group, [p]))
    found = _factor(p.data.dequantize().flatten(), numbers.float(), True, "clone")
    block_top = stiffness(scales.amax(p.data.dequantize()) / each, get_format(E2M1)) * each
    expected = real.flatten() / block_top.max()
    assert torch.allclose(found, expected, rtol=2.0**-22, atol=0)


@pytest.fixture(scope="module")
def bench(small_folder): return small_bench(small_folder)


@pytest.mark.parametrize("rule", [r for r in RULES if ":" not in r])
@pytest.mark.parametrize("granularity", ["16", "nvfp4", "channel"])
def test_every_rule_trains_in_blocks(bench, rule, granularity):
    how = {"power": 1.0} if "power" in RULES[rule].reads.split() else {}
    arm = Arm(format=E2M1, rule=rule, storage="grid_stochastic", granularity=granularity, lr=2e-3,
              checkpoint="tiny-0", corpus="tiny", **how)
    row, again = run_arm(arm, bench), run_arm(arm, bench)
    assert row["steps"] == TASK.steps and row["weights_sha"] == again["weights_sha"]
    assert row["granularity"] == granularity and row["flips"] > 0
    assert run_id(row_identity(row)) == row["run"] == run_id(identity(arm, bench))


def test_bits_a_weight_are_those_in_memory(bench):
    arm = Arm(format=E2M1, rule="sgd", storage="grid_nearest", checkpoint="tiny-0", corpus="tiny")
    def bits(granularity, **how):
        found = replace(arm, granularity=granularity, **how)
        return bits_a_weight(found, bench) - 32  # SGD's momentum
    assert bits("tensor") == 4 and bits("16") == 4.5 and bits("nvfp4") == 4.5
    assert bits("16", storage="grid_residual4") == 8.5
    assert bits("16", format="E4M3") == 8.5


def test_products_see_blocks_where_weights_are_kept_in_float32(bench):
    arm = Arm(format=E2M1, storage="master", granularity="16", checkpoint="tiny-0", corpus="tiny")
    model = bench.model("tiny-0")
    weights = Weights(model, arm)
    layer = model.blocks[0].mlp.fc
    w = layer.weight.detach()
    scale = w.abs().unflatten(1, (-1, 16)).amax(-1).repeat_interleave(16, 1)
    scale = torch.exp2((scale.double() / 6).log2().ceil()).float()  # the least power of two
    assert torch.equal(layer.weight_scale(), scale)
    assert any(torch.equal(found, scale) for found in weights.scales() if found.shape == w.shape)


def test_a_model_in_blocks_is_saved_and_loaded(tmp_path):
    def made():
        torch.manual_seed(0)
        model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8))
        rule = LayerPrecisionRule("*", f"{E2M1} 32")
        quantize_model(model, config=PrecisionConfig(default=rule))
        store_on_grid(model, "grid_residual4")
        return model
    first, second, file = made(), made(), io.BytesIO()
    for p in first.parameters():
        if not p.requires_grad: continue
        with torch.no_grad(): p.add_(0.05)
    torch.save(plain_state(first), file)
    file.seek(0)
    load_plain_state(second, torch.load(file, weights_only=True))
    x = torch.arange(8)[None]
    assert torch.equal(first(x), second(x))
    whole = io.BytesIO()
    torch.save(first.state_dict(), whole)
    whole.seek(0)
    third = made()
    third.load_state_dict(torch.load(whole, weights_only=True))
    assert torch.equal(first(x), third(x))
    codes = model_codes(first)
    name, held = next((n, c) for n, c in codes.items() if hasattr(c, "block"))
    assert held.block == 32
    assert torch.equal(held.dequantize(), dict(first.named_parameters())[name].data.dequantize())
    save_codes(first, tmp_path / "m.safetensors")
    fourth = made()
    load_model(fourth, tmp_path / "m.safetensors")
    assert torch.equal(first(x), fourth(x))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["E2M1", "E4M3"])
def test_a_file_of_blocks_goes_into_a_model_with_the_same(tmp_path, name, granularity):
    file = tmp_path / "m.safetensors"
    def made(seed, granularity=granularity):
        layer = torch.nn.Linear(64, 8, bias=False)
        w = make_grid_tensor(weight(seed), name, "grid_residual4", granularity=granularity)
        layer.weight = torch.nn.Parameter(w)
        return layer
    first, second = made(0), made(1)
    with torch.no_grad(): first.weight.mul_(9.0)
    save_codes(first, file)
    load_model(second, file)
    assert torch.equal(first.weight.dequantize(), second.weight.dequantize())
    assert torch.equal(second.weight.latent(), second.weight.dequantize())
    for other in {"tensor", "channel", 16, 32} - {granularity}:
        if granularity == "nvfp4" and other == 16: continue  # may be powers of two
        third = made(1, other)
        before = third.weight.latent()
        with pytest.raises(InputError, match=f"does not hold {third.weight.fmt.name} codes with"):
            load_model(third, file)
        assert torch.equal(third.weight.latent(), before)


def test_scales_that_a_grid_does_not_have_are_not_loaded(tmp_path):
    layer, file = torch.nn.Linear(64, 8, bias=False), tmp_path / "m.safetensors"
    layer.weight = torch.nn.Parameter(make_grid_tensor(weight(), E2M1, "grid_nearest", granularity=32))
    (name, codes), = model_codes(layer).items()
    for scale in (0.3, 1.0 + 2.0**-20, 2.0**-130):
        save_codes({name: replace(codes, scale=torch.full_like(codes.scale, scale))}, file)
        with pytest.raises(InputError, match="scales of blocks of 32 that its grid can hold"): load_model(layer, file)


@pytest.mark.parametrize("how, said", [
    (dict(granularity="block"), "unknown granularity 'block'"),
    (dict(granularity="0"), "unknown granularity '0'"),
    (dict(granularity=32), "granularity must be text"),
    (dict(format="bfloat16"), "4, 6 or 8 bits"),
    (dict(granularity="32", storage="master", power=1.0), "stored under them, not from master"),
    (dict(granularity="32", storage="bf16", rule="grid_sgd"), "stored under them, not from bf16"),
    (dict(format="float8_e8m0fnu"), "no sign"),
])
def test_what_no_arm_can_have_is_refused(how, said):
    with pytest.raises(InputError, match=said): Arm(**how)


def test_what_has_no_blocks_is_refused():
    with pytest.raises(InputError, match=r"\[out, in\], not torch.float32 \[64\]"):
        make_grid_tensor(torch.ones(64), E2M1, "grid_nearest", granularity=32)
    with pytest.raises(InputError, match="float32 weights .* not torch.float64"):
        make_grid_tensor(torch.ones(2, 64).double(), E2M1, "grid_nearest", granularity=32)
    assert kind_if_stacked(Arm(granularity="32")) is None


def test_a_state_of_another_granularity_is_refused():
    def made(words):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 4))
        rule = LayerPrecisionRule("*", words)
        quantize_model(model, config=PrecisionConfig(default=rule), skip=())
        store_on_grid(model, "grid_nearest")
        return model
    with pytest.raises(RuntimeError, match="does not fit: 0.weight.scale is torch.float32"):
        load_plain_state(made("E4M3 32"), plain_state(made("E4M3")))


def test_nvfp4_at_a_point_is_narrow_only_where_bfloat16_holds_it():
    for name, fits in ((E2M1, True), ("E4M3", True), ("E3M4", False), ("E5M2", True)):
        point = Quantizer(Precision(name, granularity="nvfp4"))
        x = point(weight())
        assert point.is_bfloat16 == fits
        assert not fits or torch.equal(x.bfloat16().float(), x)


@pytest.mark.parametrize("name", ["E4M3", "E7M0", "bfloat16"])
@pytest.mark.parametrize("storage", ["grid_stochastic", "grid_nearest"])
def test_many_writes_have_the_bits_of_single_ones_on_every_path(name, storage):
    shapes = (7, 5), (64, 33), (64, 33), (300, 5)
    def grids():
        return [make_grid_tensor(normal(*s), name, storage, 3, i, counted=False) for i, s in enumerate(shapes)]
    def normal(*shape): return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    found = []
    for path, together in (("eager", True), ("compiled", True), ("eager", False), ("compiled", False)):
        before = set_path(path)
        try:
            made = grids()
            for step in range(3):
                new = [(to, to.latent() * 1.5 + 0.01 * step, None) for to in made]
                if together: write_all(new)
                else:
                    for one in new: write(*one)
        finally: set_path(before)
        found.append([to.codes.clone() for to in made])
    for other in found[1:]: assert all(map(torch.equal, found[0], other))


@cache
def largest_value(fmt) -> Fraction:
    "The largest value below 2^128 that a format has under a power of two up to 2^127: tried one by one."
    # the products are exact in float64
    products = (v * 2.0**k for k in range(-10, 128) for v in fmt.values.tolist())
    return Fraction(max(x for x in products if x < 2.0**128))


@pytest.mark.parametrize("granularity", ["tensor", *GRANULARITIES])
@pytest.mark.parametrize("name", ["E2M1", "E4M3", "E5M2", "E7M0", "E0M7", "E2M5"])
def test_extreme_values_are_stored_to_half_a_spacing_or_saturate(name, granularity):
    "From first weights of one size to writes of another, in exact arithmetic."
    fmt = get_format(name)
    if fmt.max > 2.0**60 and granularity == "nvfp4": return  # a scale of 1e-38 / 2^64 is none in float32
    beyond = Fraction(1, 16) if granularity == "nvfp4" else 0  # a first scale of NVFP4 is rounded to nearest
    for first in (1e-38, 1e-36, 1.0, 2.0**100, 3e38):
        for to in (1e-36, 1000.0, 2.0**120, 2.0**126, 3e38, 3.4028234663852886e38):
            w = torch.full((1, 64), first)
            grid = make_grid_tensor(w, name, "grid_nearest", granularity=granularity)
            w[0, 3] = to
            for _ in range(2): grid.copy_(w)  # once more changes nothing
            found, given = (Fraction(x[0, 3].item()) for x in (grid.dequantize(), w))
            if first > to: assert grid.dequantize().isfinite().all() and (grid.scale > 0).all()
            else:
                kept = min(given, largest_value(fmt))
                relative = Fraction(2) ** -(fmt.mantissa_bits + 1)
                if not fmt.exponent_bits: relative = Fraction(2, 128)  # of a code from 64 on: half a spacing
                assert abs(found - kept) <= (relative + beyond) * kept, (first, to, float(found))
            assert grid.dequantize().isfinite().all()
            assert grid.rescales <= 1


def test_a_grid_in_float64_saturates_where_float32_ends():
    for first in (1.0, 1e300):
        grid = make_grid_tensor(torch.tensor([first, 1.0], dtype=torch.float64), "E4M3", "grid_nearest")
        grid.copy_(torch.tensor([1e300, -1e300], dtype=torch.float64))
        assert grid.scale == 2.0**120 and grid.dequantize().tolist() == [240 * 2.0**120, -240 * 2.0**120]


def test_usual_scales_are_the_smallest_that_fit_and_grow_to_those():
    "Amaxes at, below and above every power of two: a first scale, and one that has grown, by exact arithmetic."
    for name in ("E2M1", "E4M3", "E5M2", "E0M7"):
        top, fmt = Fraction(get_format(name).max), get_format(name)
        for k in range(-100, 100, 7):
            for amax in (top * Fraction(2) ** k, top * Fraction(2) ** k * Fraction(4097, 4096)):
                wanted = Fraction(2) ** (k + (amax > top * Fraction(2) ** k))
                amaxes, old = torch.tensor([float(amax)] * 3), torch.tensor([2.0**-110, float(wanted), 2.0**110])
                assert grown(amaxes, old, fmt).tolist() == [float(wanted), float(wanted), 2.0**110]


@pytest.mark.parametrize("storage", ["grid_nearest", "grid_stochastic"])
@pytest.mark.parametrize("moved", ["E4M3b-2", "E4M3b-60", "E4M3b-110"])
def test_blocks_of_a_format_of_large_values_alone_are_those_of_one_around_one(moved, storage):
    "The same values times a power of two; of the last, no format goes on beyond the largest in float32."
    chance = torch.Generator().manual_seed(0)
    start, new = torch.randn(2, 8, 64, generator=chance)
    here, there = (make_grid_tensor(start, spec, storage, granularity=16) for spec in (moved, "E4M3b7"))
    for factor in (1.0, 3.0, 40.0):
        for grid in (here, there): grid.copy_(factor * new)
        assert torch.equal(here.dequantize(), there.dequantize())
