"""Scales, recipes and blocks against exact arithmetic and the standards, written a second time
here; and what `recommend_format` promises."""
import io
import json
import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from altgrad.basics import InputError
from altgrad.numbers.choosing import best_scale, profile_of, recommend_format
from altgrad.numbers.formats import EIGHT_BIT, FORMATS, WIDE, get_format, is_wide
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import (
    KINDS, AmaxAverage, AmaxFirst, AmaxHistory, AmaxNow, Scaling, amax_of, compute_scale,
    mx_scale, nvfp4_scale, scale_of,
)

from cases import each

RESULTS = Path(__file__).resolve().parent.parent / "nbs/results/power_of_the_exponent.json"
MEMORIES = {
    "max": lambda: AmaxHistory(16),
    "recent": lambda: AmaxHistory(3, "most_recent"),
    "average": AmaxAverage,
    "now": AmaxNow,
    "first": AmaxFirst,
}
MX = {
    "E4M3": (8, 448, ml_dtypes.float8_e4m3fn),
    "E5M2": (15, 57344, ml_dtypes.float8_e5m2),
    "float6_e2m3fn": (2, 7.5, ml_dtypes.float6_e2m3fn),
    "float6_e3m2fn": (4, 28, ml_dtypes.float6_e3m2fn),
    "float4_e2m1fn": (2, 6, ml_dtypes.float4_e2m1fn),
}  # emax and max of OCP MX 1.0, table 1


def generator(seed=0): return torch.Generator().manual_seed(seed)


def magnitudes(seed=0, n=400):
    "Positive float32 over its whole normal range, with powers of two and their neighbours."
    x = torch.exp2(torch.rand(n, generator=generator(seed)) * 250 - 125)
    powers = torch.exp2(torch.arange(-120, 121, 8).float())
    return torch.cat([
        x, powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(torch.inf))
    ])


def normal(fmt): return fmt.max <= 2.0**100


# compute_scale


@each("name", [n for n, f in FORMATS.items() if normal(f)])
def test_the_scale_is_the_smallest_that_fits(name):
    fmt = FORMATS[name]
    top = Fraction(1) if fmt.max > WIDE else Fraction(fmt.max)
    amax = magnitudes()
    power, exact = (compute_scale(amax, fmt, kind) for kind in KINDS)
    below = exact.nextafter(torch.tensor(0.0))
    for a, p, e, b in zip(amax.tolist(), power.tolist(), exact.tolist(), below.tolist()):
        if not 2.0**-120 < a / fmt.max < 2.0**120: continue
        a, p = Fraction(a), Fraction(p)
        assert p.numerator & (p.numerator - 1) == 0 and p.denominator & (p.denominator - 1) == 0
        assert (1 <= a / p < 2) if fmt.max > WIDE else (a / p <= top < 2 * a / p)
        assert a / Fraction(e) <= top < a / Fraction(b)


@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_scale_depends_on_the_value_and_not_on_its_dtype(dtype):
    amax = torch.tensor([0.0, 0.02, 1.5, 448.0, 500.0, 60000.0]).to(dtype)
    for kind in KINDS:
        got = compute_scale(amax, "E4M3", kind)
        assert got.dtype == torch.float32
        assert torch.equal(got, compute_scale(amax.double(), "E4M3", kind))


# granularity


@pytest.mark.parametrize("shape", [(7,), (5, 33), (3, 4, 70), (2, 32)])
@each("block", [1, 16, 32, 100])
def test_blocks_against_a_loop(shape, block):
    x = torch.randn(shape, generator=generator(1))
    for dim in range(-len(shape), len(shape)):
        amax = amax_of(x, block, dim)
        assert amax.shape[dim] == -(-shape[dim] // block)
        for i, part in enumerate(x.split(block, dim)):
            assert torch.equal(amax.select(dim, i), part.abs().amax(dim))
        scale = scale_of(x, "E4M3", block, dim)
        assert scale.shape == x.shape
        for part, s in zip(x.split(block, dim), scale.split(block, dim)):
            alone = compute_scale(part.abs().amax(dim, keepdim=True), "E4M3")
            assert torch.equal(s, alone.expand_as(s))


def test_channels_and_tensors():
    x = torch.randn(4, 6, 3, 3, generator=generator(2))
    assert torch.equal(amax_of(x, "channel", (1, 2, 3)), x.abs().amax((1, 2, 3), keepdim=True))
    assert amax_of(x, "channel", 1).shape == (4, 1, 3, 3)
    assert torch.equal(scale_of(x, "E5M2"), compute_scale(x.abs().max(), "E5M2"))
    fake_quantize(x, "E4M3", scale_of(x, "E4M3", "channel", (1, 2, 3)), overflow="raise")
    x[0, 0, 0, 0] = torch.nan
    assert amax_of(x).isnan()
    assert amax_of(x, "channel", (1, 2, 3)).isnan().sum() == 1
    assert (scale_of(x, "E4M3", "channel", (1, 2, 3))[0] == 1).all()


@each("bad", ["row", 0, -1, 2.0, None])
def test_a_wrong_granularity_is_named(bad):
    with pytest.raises(InputError, match="tensor, channel, a block's length"):
        amax_of(torch.ones(4), bad)
    with pytest.raises(InputError, match="with elements"): amax_of(torch.ones(0), "tensor")


@each("granularity", ("channel", 4))
@each("dim", (2, -3, "rows", 1.0))
def test_a_dimension_that_is_not_there_is_named(granularity, dim):
    for of in (amax_of, lambda x, *to: scale_of(x, "E4M3", *to)):
        with pytest.raises(InputError, match=r"shape \(4, 8\) has no dimension"):
            of(torch.ones(4, 8), granularity, dim)


def test_a_number_is_a_channel_and_has_no_blocks():
    number = torch.tensor(-3.0)
    assert amax_of(number) == amax_of(number, "channel") == 3
    for refused in (lambda: amax_of(number, 32), lambda: mx_scale(number, "E4M3"),
                    lambda: nvfp4_scale(number)):
        with pytest.raises(InputError, match="has no blocks"): refused()
    for make in (lambda block: mx_scale(torch.ones(4), "E4M3", block=block),
                 lambda block: nvfp4_scale(torch.ones(4), block=block)):
        for block in ("tensor", 0, 2.0):
            with pytest.raises(InputError, match="block's length is a whole number"): make(block)


# MX and NVFP4


def mx_reference(row, name):
    "OCP MX 1.0, section 6.3, on one row of float32: exact exponents, ml_dtypes for the elements."
    emax, top, dtype = MX[name]
    out = np.zeros_like(row)
    for i in range(0, len(row), 32):
        part = row[i:i + 32].astype(np.float64)
        amax = np.abs(part).max()
        shared = min(max(math.frexp(amax)[1] - 1 - emax, -127), 127) if amax else 0
        inside = np.clip(np.ldexp(part, -shared), -top, top).astype(np.float32)
        q = inside.astype(dtype).astype(np.float64)
        out[i:i + 32] = np.ldexp(q, shared).astype(np.float32)
    return out


@pytest.mark.parametrize("name", MX)
def test_mx_blocks_at_every_exponent(name):
    sizes = torch.exp2(torch.arange(-126, 124).float())[:, None]
    x = torch.randn(250, 75, generator=generator(3)) * sizes
    x[3, :32], x[:, 0] = 0, 0
    x[::2, 1] = torch.exp2(torch.arange(-126, 124, 2).float()).nextafter(torch.tensor(0.0))
    got = fake_quantize(x, name, mx_scale(x, name))
    want = torch.from_numpy(np.stack([mx_reference(row, name) for row in x.numpy()]))
    assert torch.equal(got, want)


def test_mx_scales_are_e8m0_numbers():
    x = torch.tensor([[2.0**-149] * 32 + [3e38] * 32])
    for name in MX:
        scale = mx_scale(x, name)
        rounded = scale.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        assert torch.equal(torch.from_numpy(rounded), scale), name


def test_the_example_of_the_notebook_saturates():
    x = torch.tensor([[500.0] + [1.0] * 31])
    assert mx_scale(x, "E4M3")[0, 0] == 1
    assert fake_quantize(x, "E4M3", mx_scale(x, "E4M3"))[0, 0] == 448
    assert compute_scale(torch.tensor(500.0), "E4M3") == 2


@each("dim", [0, 1, -1])
def test_nvfp4_has_two_levels(dim):
    normal, other = (torch.randn(50, 41, generator=generator(seed)) for seed in (4, 5))
    x = normal * other.exp()
    scale = nvfp4_scale(x, dim=dim)
    whole = x.abs().max() / (448 * 6)
    for part, s in zip(x.split(16, dim), scale.split(16, dim)):
        level = (part.abs().amax(dim, keepdim=True) / 6 / whole).numpy()
        level = level.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert torch.equal(s, (torch.from_numpy(level).clamp(min=2.0**-9) * whole).expand_as(s))
    assert (scale.amax() / whole) == 448
    assert (nvfp4_scale(torch.zeros(3, 20)) > 0).all()
    assert (nvfp4_scale(torch.full((3, 20), 1e-44)) > 0).all()


# recipes


def stream(steps=40, shape=(3,)):
    "Amaxes with zeros, infinities and NaN among them."
    x = torch.exp(2 * torch.randn(steps, *shape, generator=generator(6)))
    odd = torch.tensor([0.0, torch.inf, torch.nan])[torch.arange(x.numel()).reshape(x.shape) % 3]
    return torch.where(torch.rand(x.shape, generator=generator(7)) < 0.2, odd, x)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@each("margin", [0, 1, 3])
def test_delayed_scaling_is_transformer_engines(algo, margin):
    ours = Scaling("E4M3", AmaxHistory(5, algo), margin=margin, kind="exact")
    ring = np.zeros(5)
    multiplier = 1.0
    for a in torch.exp(3 * torch.randn(100, generator=generator(8))).tolist() + [0.0] * 8 + [2.0]:
        ring[0] = a
        amax = ring.max() if algo == "max" else ring[0]
        if amax > 0: multiplier = 448 / amax / 2**margin
        ring = np.roll(ring, -1)
        ring[0] = 0
        ours.update(torch.tensor(a))
        assert math.isclose(ours.scale.item() * multiplier, 1, rel_tol=4 * 2.0**-24)


@pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
@each("kind", KINDS)
@each("shape", [(), (3,), (2, 1, 4)])
def test_resumed_is_uninterrupted_through_a_file(make, kind, shape):
    whole = Scaling("E5M2", make(), margin=1, kind=kind)
    later = Scaling("E5M2", make(), margin=1, kind=kind)
    for t, a in enumerate(stream(shape=shape)):
        if t == 13:
            file = io.BytesIO()
            torch.save(whole.state_dict(), file)
            later.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        used = whole.step(a)
        if t >= 13:
            assert torch.equal(later.step(a), used) and torch.equal(later.scale, whole.scale)
        assert whole.scale.shape == shape
        assert (whole.scale > 0).all()
        assert whole.scale.isfinite().all()


@each("amax, margin, scale", [(-100, 200, 92), (120, -200, -88), (5, 2.5, -0.5)])
def test_a_margin_is_added_to_the_octaves_of_a_scale(amax, margin, scale):
    "The power of two above 2^amax / 448 is 2^(amax - 8); 2^200 is no number of float32."
    scaling = Scaling("E4M3", margin=margin)
    scaling.update(torch.tensor(2.0**amax))
    assert scaling.scale.item() == pytest.approx(2.0**scale, rel=2.0**-22)  # two roundings of 2^2.5


def test_a_state_of_another_recipe_is_refused():
    state = Scaling("E4M3").state_dict()
    for other in (
        Scaling("E5M2"), Scaling("E4M3", AmaxHistory(8)), Scaling("E4M3", AmaxNow()),
        Scaling("E4M3", margin=1), Scaling("E4M3", kind="exact"),
    ):
        with pytest.raises(InputError, match="the state is that of"): other.load_state_dict(state)
    Scaling("e4m3").load_state_dict(state)


def test_registered_formats_are_as_wide_as_their_max_says():
    "None has values above 2^16 alone: their scales do not depend on the smallest value."
    assert [n for n, fmt in FORMATS.items() if is_wide(fmt) != (fmt.max > WIDE)] == []


@pytest.mark.parametrize("moved, fmt, octaves", [
    ("E4M3b-2", "E4M3b7", 9), ("E2M1b-40", "E2M1b1", 41), ("E5M2b-70", "E5M2b15", 85), ("E4M3b-60", "E4M3b7", 67),
])
@each("kind", KINDS)
def test_a_format_of_large_values_alone_has_the_scales_of_one_around_one(moved, fmt, octaves, kind):
    "The same values times a power of two: as much smaller are its scales, and nothing else changes."
    assert not is_wide(get_format(moved)) and not is_wide(get_format(fmt))
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    here, there = (compute_scale(x.abs().amax(), f, kind) for f in (moved, fmt))
    assert here == there * 2.0**-octaves
    assert torch.equal(fake_quantize(x, moved, here), fake_quantize(x, fmt, there))


@each("damage, told", [
    ({"scale": torch.tensor(-1.0)}, "scale must be"), ({"scale": torch.tensor(torch.nan)}, "scale must be"),
    ({"scale": None}, "scale must be"), ({"memory": "x"}, "memory must be"),
    ({"memory": torch.tensor([-1.0])}, "memory must be"),
])
def test_a_damaged_state_changes_nothing(damage, told):
    scaling = Scaling("E4M3")
    scaling.update(torch.tensor(3.0))
    before = scaling.state_dict()
    with pytest.raises(InputError, match=told): scaling.load_state_dict(before | damage)
    assert scaling.scale is before["scale"] and scaling.memory.state is before["memory"]
    for lost in ("scale", "memory"):
        with pytest.raises(InputError, match=lost):
            scaling.load_state_dict({k: v for k, v in before.items() if k != lost})
    for none in (None, [], {}):
        with pytest.raises(InputError, match="the state is that of"): scaling.load_state_dict(none)


@each("memory, scale", [
    (torch.ones(3), ()), (torch.ones(17), ()), (torch.ones(()), ()), (torch.ones(16, 3), ()), (torch.ones(16), (3,)),
])
def test_a_memory_of_another_length_is_refused(memory, scale):
    scaling = Scaling("E4M3", AmaxHistory(16))
    state = scaling.state_dict() | {"memory": memory, "scale": torch.ones(scale)}
    with pytest.raises(InputError, match="a memory of shape .* is not that of AmaxHistory") as e:
        scaling.load_state_dict(state)
    assert len(str(e.value).splitlines()) == 1 and scaling.memory.state is None
    for shape in ((), (3,)):
        scaling.load_state_dict(state | {"memory": torch.ones(16, *shape), "scale": torch.ones(shape)})


@each("make", [AmaxNow, AmaxFirst, AmaxAverage])
def test_a_memory_of_another_shape_than_the_scale_is_refused(make):
    scaling = Scaling("E4M3", make())
    state = scaling.state_dict()
    for memory, scale in (((3,), ()), ((), (3,)), ((1,), ())):
        with pytest.raises(InputError, match="a memory of shape .* is not that of Amax"):
            scaling.load_state_dict(state | {"memory": torch.ones(memory), "scale": torch.ones(scale)})
    assert scaling.memory.state is None
    for shape in ((), (3,)):
        scaling.load_state_dict(state | {"memory": torch.ones(shape), "scale": torch.ones(shape)})
        scaling.update(torch.ones(shape))


@each("make", MEMORIES.values(), ids=MEMORIES)
def test_what_is_not_a_number_changes_nothing(make):
    s = Scaling("E4M3", make())
    for bad in (torch.inf, torch.nan): s.update(torch.tensor(bad))
    assert s.scale == 1 and s.memory.amax == 0
    s.update(torch.tensor(3.0))
    before, memory = s.scale, s.memory.state.clone()
    for bad in (torch.inf, -torch.inf, torch.nan): s.update(torch.tensor(bad))
    assert torch.equal(s.scale, before) and torch.equal(s.memory.state, memory)


@each("make", [*MEMORIES.values(), lambda: AmaxHistory(1)])
def test_the_shape_of_the_amaxes_stays(make):
    for first, then in (((), (1,)), ((3,), ()), ((3,), (1,)), ((2, 3), (3,))):
        s = Scaling("E4M3", make())
        s.update(torch.ones(first))
        with pytest.raises(InputError, match="does not fit"): s.update(torch.ones(then))


def test_a_memory_forgets_after_its_length():
    s = Scaling("E4M3", AmaxHistory(4), kind="exact")
    seen = []
    for a in (448.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        s.update(torch.tensor(a))
        seen.append(s.memory.amax.item())
    assert seen == [448, 448, 448, 448, 1, 1]


class NoWaiting(TorchDispatchMode):
    "Fails where a value is asked of a device."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func) and "is_nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


@each("make", MEMORIES.values(), ids=MEMORIES)
def test_no_value_is_asked_of_the_device(make):
    x = torch.randn(8, 64, generator=generator(9))
    for kind in KINDS:
        s = Scaling("E4M3", make(), kind=kind)
        with NoWaiting():
            for _ in range(3): s.step(amax_of(x, "channel"))
            mx_scale(x, "E4M3")
            nvfp4_scale(x)
            scale_of(x, "E4M3", 32, kind=kind)


# choosing


def test_the_ranking_does_not_depend_on_units():
    x = torch.randn(5000, generator=generator(10))
    a, b = recommend_format(x), recommend_format(x * 2.0**-13)
    assert [(r.format, r.sqnr) for r in a] == [(r.format, r.sqnr) for r in b]
    assert a.profile == b.profile
    assert [r.scale * 2.0**-13 for r in a] == [r.scale for r in b]


def test_a_format_keeps_its_own_values():
    for name in ("E0M7", "E3M4", "E4M3", "E5M2"):
        v = FORMATS[name].values
        assert best_scale(v[v.isfinite()], name)[1] == math.inf
        names = ("E0M7", "E1M6") if name == "E0M7" else (name,)
        assert recommend_format(v[v.isfinite()]).best.name in names


def test_one_value_among_zeros():
    x = torch.zeros(10**6)
    x[17] = 2.0  # every format here has a power of two
    r = recommend_format(x, sample=100)
    assert all(row.sqnr == math.inf for row in r)
    assert r.profile.octaves == 0
    assert "keeps most" in repr(r)
    assert profile_of(x).kurtosis == pytest.approx(1e6)


def test_rich_and_plain_show_the_same(capsys):
    from rich.console import Console
    r = recommend_format(torch.randn(500, generator=generator(11)), ["E4M3", "E5M2"])
    Console(width=200).print(r)
    shown = capsys.readouterr().out
    for word in ("E4M3", "E5M2", "SQNR dB", f"{r[0].sqnr:.1f}", "keeps most"):
        assert word in shown
        assert word in repr(r)


# the stored study


def test_the_study_names_its_circumstances():
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert stored["formats"] == list(EIGHT_BIT) and len(stored["git_commit"]) == 40, (
        "run it on a clean commit"
    )
    assert stored["machine"]["cpu"]
    assert stored["versions"]["torch"]
    assert len(stored["model"]["corpus"]["hash"]) == 64
    assert stored["model"]["seed"] == stored["model"]["config"]["seed"]


def test_the_papers_order_of_splits():
    theory = json.loads(RESULTS.read_text(encoding="utf-8"))["theory"]
    best = {
        name: max(d["formats"], key=lambda f: d["formats"][f]["sqnr"]) for name, d in theory.items()
    }
    assert best["uniform"] in ("E0M7", "E1M6")
    assert best["Gaussian"] == "E2M5"
    assert best["t3"] == best["t5"] == "E3M4"
