"""What the notebook of the update rules cannot show: pickling, non-contiguous weights, both dtypes,
every format against geoopt, and the fast arithmetic against the plain one."""
import ctypes
import math
import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from altgrad.basics import InputError
from altgrad.numbers.formats import EIGHT_BIT, get_format, ulp, unit_in_first_place
from altgrad.numbers import kernels, native
from altgrad.numbers.kernels import rounding_key, uniform
from altgrad.numbers.rule_loops import NAMES
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import compute_scale
from altgrad.geometry import optim
from altgrad.geometry.spacing import (
    LineNumbers, code_coordinate, from_code_coordinate, from_line, line_numbers, power_below, stiffness,
    stiffness_floor, to_line,
)
from altgrad.geometry.optim import GridSGD, Madam, RiemannianAdamW, StiffnessAdamW, StiffnessSGD, on_grids
from altgrad.geometry.rivals.average import AveragedAdamW
from altgrad.geometry.rivals.eco import ECO
from altgrad.geometry.rivals.lion import Lion
from altgrad.geometry.rivals.moments import with_moments
from altgrad.geometry.storage import make_grid_tensor

from cases import each

RULES = {
    "stiffness": lambda p: StiffnessAdamW(p, "E4M3", 1e-2, power=0.5),
    "gradient": lambda p: StiffnessAdamW(p, "E4M3", 1e-2, placement="gradient"),
    "sgd": lambda p: StiffnessSGD(p, "E4M3", 0.1, momentum=0.9),
    "riemannian": lambda p: RiemannianAdamW(p, "E4M3", 0.5),
    "madam": lambda p: Madam(p, "E4M3"),
    "grid": lambda p: GridSGD(p, "E4M3", 0.5),
    "any power": lambda p: StiffnessAdamW(p, "E4M3", 1e-2, power=0.3),
    "plain": lambda p: StiffnessAdamW(p, "E4M3", 1e-2, power=0.0),
    "not normalized": lambda p: StiffnessAdamW(p, "E4M3", 1e-2, normalize=False),
    "floored": lambda p: RiemannianAdamW(p, "E4M3", 0.5, floor_octaves=4),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)
both_dtypes = each("dtype", [torch.float32, torch.float64])


def weights(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return (
        0.02
        * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).to(dtype)


@every_rule
def test_a_pickled_optimizer_goes_on(make):
    p = nn.Parameter(weights(8, 9))
    optimizer = make([p])
    p.grad = weights(8, 9, seed=1)
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    q = again.param_groups[0]["params"][0]
    p.grad = q.grad = weights(8, 9, seed=2)
    optimizer.step()
    again.step()
    assert torch.equal(p, q)


@every_rule
def test_memory_layout_and_empty_or_scalar_parameters_do_not_matter(make):
    plain, turned = nn.Parameter(weights(6, 8)), nn.Parameter(weights(6, 8).t().contiguous().t())
    empty, scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(0.3))
    empty.grad, scalar.grad = torch.zeros(0, 3), torch.tensor(0.1)
    a, b = make([plain]), make([turned, empty, scalar])
    for seed in (1, 2, 3):
        plain.grad = turned.grad = weights(6, 8, seed=seed)
        a.step()
        b.step()
    assert torch.equal(plain, turned) and scalar.isfinite() and empty.shape == (0, 3)


@both_dtypes
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_riemannian_adamw_is_geoopts_on_the_manifold(name, dtype):
    geoopt = pytest.importorskip("geoopt")
    from altgrad.geometry.manifold import FP8Manifold
    w = weights(300, dtype=dtype)
    w[0] = 0.1  # without a gradient: it holds the scale
    options = {"floor_octaves": 8}
    manifold = FP8Manifold(name, scale=compute_scale(w.abs().amax(), name), **options)
    theirs, ours = geoopt.ManifoldParameter(w.clone(), manifold=manifold), nn.Parameter(w.clone())
    a = geoopt.optim.RiemannianAdam([theirs], lr=0.05, eps=1e-16)
    b = RiemannianAdamW([ours], name, 0.05, **options)
    for seed in range(1, 9):
        grad = weights(300, dtype=dtype, seed=seed)
        grad[0] = 0
        theirs.grad, ours.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
    # eight steps, a coordinate of up to 127 codes; atol: of the smallest spacing, or of the floor
    known = 8 * 8 * 127 * torch.finfo(dtype).eps / 2
    smallest = (
        max(
            2.0**-8 * ulp(get_format(name), w.abs().amax() / manifold.scale),
            torch.tensor(get_format(name).min_spacing),
        )
        * manifold.scale
    )
    torch.testing.assert_close(
        ours.detach(), theirs.detach().as_subclass(torch.Tensor), rtol=known,
        atol=known * smallest.item(),
    )


def test_bad_parameters_are_errors_and_a_refused_group_leaves_no_trace():
    optimizer = StiffnessAdamW([nn.Parameter(weights(3))], "E4M3")
    for p in (
        torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bfloat16),
    ):
        with pytest.raises(InputError, match="float32 or float64"):
            optimizer.add_param_group({"params": [p]})
    with pytest.raises(InputError, match="finite"):
        optimizer.add_param_group({"params": [nn.Parameter(weights(3))], "power": float("inf")})
    assert len(optimizer.param_groups) == 1


def towards(optimizer, p, target, drop):
    "A closure of its own: gradients are dropped, then made anew."
    def closure():
        if drop == "zero_grad": optimizer.zero_grad()
        else: p.grad = None
        loss = (p - target).square().sum()
        loss.backward()
        return loss
    return closure


@each("drop", ["zero_grad", "None"])
@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.Adam, Lion], ids=lambda rule: rule.__name__)
def test_on_a_grid_a_step_takes_the_gradients_of_its_closure(rule, drop):
    "The target changes sides at every step, so that a gradient of the step before points elsewhere."
    w = torch.linspace(-1, 1, 16)
    made = [nn.Parameter(make_grid_tensor(w, "E4M3", "grid_residual8")) for _ in range(2)]
    plain = nn.Parameter(made[0].latent().clone())
    by_closure, before, theirs = (make([p], lr=0.1) for make, p in (
        (on_grids(rule), made[0]), (on_grids(rule), made[1]), (rule, plain)))
    for k in range(6):
        target, length = torch.full((16,), 2.0 * (k % 2)), made[0].scale
        with torch.no_grad(): loss = by_closure.step(towards(by_closure, made[0], target, drop))
        assert loss == towards(before, made[1], target, drop)()
        before.step()
        theirs.step(towards(theirs, plain, target, drop))
        assert torch.equal(made[0].codes, made[1].codes) and torch.equal(made[0].latent(), made[1].latent())
        spacing = ulp(get_format("E4M3"), plain.detach().abs().max() / length) * length  # the grid's largest
        assert ((made[0].latent() - plain).abs() <= spacing).all()


@each("make", [
    lambda p: on_grids(torch.optim.SGD)(p, lr=0.1), lambda p: with_moments(torch.optim.SGD, "dynamic8")(p, lr=0.1),
    lambda p: StiffnessAdamW(p, "E4M3"),
])
def test_a_hook_of_a_step_runs_once_and_sees_what_the_optimizer_moves(make):
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # torch puts hooks around the step of a class with its first one
    p, seen = nn.Parameter(make_grid_tensor(torch.ones(4), "E4M3", "grid_nearest")), []
    optimizer = make([p])
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0] is p))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(int(p.writes)))
    p.grad = torch.ones(4)
    optimizer.step()
    assert seen == [True, 1]


@each("make", [
    lambda p: torch.optim.SGD(p, lr=0.1), lambda p: on_grids(torch.optim.SGD)(p, lr=0.1),
    lambda p: StiffnessAdamW(p, "E4M3"), lambda p: RiemannianAdamW(p, "E4M3"),
])
def test_a_graph_from_before_a_step_on_the_grid_is_refused_as_a_plain_one_is(make):
    p = nn.Parameter(make_grid_tensor(torch.ones(4), "E4M3", "grid_nearest"))
    optimizer, x = make([p]), torch.ones(4, requires_grad=True)
    y = x * p
    y.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"): y.sum().backward()


def test_a_rule_that_needs_a_closure_is_not_for_grids():
    with pytest.raises(InputError, match="LBFGS needs a closure"): on_grids(torch.optim.LBFGS)


def plain_coordinate(a, n):
    "The coordinate as it is defined, with a logarithm and a choice."
    first = unit_in_first_place(a.clamp(max=n.high)).clamp(n.low, n.high)
    phi = (first.log2().round() - n.bottom) * n.per_binade + a / first * n.per_binade
    return torch.where(a < n.start, a / n.floor, phi - n.offset)


def plain_magnitude(psi, n):
    "Its inverse, with a power and a choice."
    binades = (psi + n.offset) * n.unit
    whole = (binades.floor() - 1).clamp(min=0).clamp(max=n.top - n.bottom)
    power = unit_in_first_place(1.25 * torch.exp2(whole + n.bottom))
    inner = psi * n.floor
    return torch.where(inner < n.start, inner, (binades - whole) * power)


def same(a, b):
    "Whether two tensors have the same bits; one NaN is as good as another."
    return ((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all()


def magnitudes(dtype):
    "Every power of two, its neighbours, what lies between, zero, infinity and NaN."
    low, high = (-149, 127) if dtype == torch.float32 else (-1074, 1023)
    p = torch.tensor([2.0**k for k in range(low, high + 1)], dtype=torch.float64).to(dtype)
    near = torch.nextafter(p, p.new_zeros(())), torch.nextafter(p, p.new_full((), torch.inf))
    drawn = weights(20_000, dtype=dtype).abs() * torch.logspace(-20, 12, 20_000, 2, dtype=dtype)
    return torch.cat([p, *near, 1.25 * p, 1.5 * p, drawn, p.new_tensor([0, torch.inf, torch.nan])])


@both_dtypes
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_exponents_from_bits_are_those_of_the_logarithm(name, dtype):
    fmt, a = get_format(name), magnitudes(dtype)
    n = None
    for floor in (0.0, 3.7 * fmt.min_spacing, 64 * fmt.min_spacing, 10 * fmt.max):
        n = line_numbers(fmt, torch.tensor(floor, dtype=dtype))
        most = torch.finfo(dtype).max  # of what lies there, nothing is claimed
        a = torch.where((a * n.floor < most) | ~a.isfinite(), a, 0.0)
        assert same(to_line(a, n), plain_coordinate(a, n)), floor
        assert same(from_line(a, n), plain_magnitude(a, n)), floor
        if floor: continue
        assert same(to_line(a, n, floored=False), plain_coordinate(a, n))
        assert same(from_line(a, n, floored=False), plain_magnitude(a, n))
    a = a.clamp(max=n.high)
    below = unit_in_first_place(a)
    assert same(power_below(a), torch.where(a < torch.finfo(dtype).tiny, 0.0, below))


def plain_stiffness(u, n, least):
    return (unit_in_first_place(u.abs().clamp(max=n.high)) * n.unit).clamp(min=least)


def plain_walk(u, step, n):
    psi = plain_coordinate(u.abs(), n).copysign(u) + step
    return plain_magnitude(psi.abs(), n).copysign(psi)


def plain_riemannian(w, g, state, t, n, scale, lr=0.5, beta1=0.9, beta2=0.999, eps=1e-16):
    "A step of `RiemannianAdamW`, one operation after another."
    g = plain_stiffness(w / scale, n, n.floor) * scale * g
    m, v = state
    m.lerp_(g, torch.tensor(1 - beta1, dtype=w.dtype))
    v.mul_(beta2).addcmul_((1 - beta2) * g, g)
    step = -lr / (1 - beta1**t) * m / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps)
    return plain_walk(w / scale, step, n) * scale


def plain_grid(w, g, state, t, n, scale, lr=0.5, momentum=0.9, clip=4.0):
    "A step of `GridSGD`."
    (buffer,) = state
    buffer.mul_(momentum).add_(plain_stiffness(w / scale, n, n.floor) * scale * g)
    rungs = buffer * buffer.square().mean().rsqrt() * -lr
    u = plain_walk(w / scale, torch.where(rungs == rungs, rungs, 0.0).clamp(-clip, clip), n)
    spacing = plain_stiffness(u, n, 2.0**n.bottom * n.unit)
    steps, key = u / spacing, rounding_key(0, t, 1)
    whole, noise = (u / spacing).floor(), uniform(u.shape, key)
    return torch.where(noise < steps - whole, whole + 1, whole) * spacing * scale


@each("floor_octaves", [None, 3.0])
@each("name", ["E0M7", "E2M5", "E4M3", "E5M2", "E7M0"])
@pytest.mark.parametrize("rule", ["riemannian", "grid"])
def test_rules_are_their_plain_formulas_bit_for_bit(rule, name, floor_octaves):
    make, plain, kept = {
        "riemannian": (RiemannianAdamW, plain_riemannian, 2), "grid": (GridSGD, plain_grid, 1),
    }[rule]
    p, fmt = nn.Parameter(weights(700)), get_format(name)
    w, state = p.detach().clone(), [torch.zeros(700) for _ in range(kept)]
    optimizer = make([p], name, 0.5, floor_octaves=floor_octaves)
    for t in range(1, 9):
        p.grad = weights(700, seed=t)
        amax = w.abs().amax().double()
        scale = compute_scale(amax, fmt).double()
        floor = stiffness_floor(amax / scale, fmt, floor_octaves=floor_octaves)
        n = LineNumbers(*(torch.as_tensor(x).to(w) for x in line_numbers(fmt, floor)))
        w = plain(w, p.grad, state, t, n, scale.to(w))
        optimizer.step()
        assert same(p.detach(), w), t
    found = [x for x in optimizer.state[p].values() if torch.is_tensor(x)]
    assert all(map(same, found, state))


@every_rule
def test_parts_change_no_bit(make, monkeypatch):
    def run(size):
        monkeypatch.setattr(optim, "CHUNK", size)
        p = nn.Parameter(weights(37, 41))
        optimizer = make([p])
        for seed in range(1, 5):
            p.grad = weights(37, 41, seed=seed)
            optimizer.step()
        return [p.detach(), *(x for x in optimizer.state[p].values() if torch.is_tensor(x))]

    for size in (64, 256, 1024):
        assert all(map(torch.equal, run(size), run(1 << 17))), size


@each("name", ["E4M3", "E7M0"])
def test_derivatives_of_the_coordinate_go_forwards_too(name):
    z, ones = torch.tensor([0.3, -1.1, 2.9]), torch.ones(3)
    for function in (code_coordinate, from_code_coordinate):
        f = partial(function, fmt=get_format(name))
        forwards = torch.func.jvp(f, (z,), (ones,))[1]
        x = z.clone().requires_grad_()
        backwards, = torch.autograd.grad(f(x).sum(), x)
        assert torch.equal(forwards, backwards) and (forwards != 0).all()
    # the coordinate changes by one over the spacing
    slope = torch.func.jvp(partial(code_coordinate, fmt=get_format(name)), (z,), (ones,))[1]
    assert torch.equal(slope, 1 / stiffness(z, name))


POWERS = (0.0, 0.3, 1.0, 0.5, -0.5, -1.0, 2.0)
LOOPED = {
    **{f"S^{p:g}": partial(StiffnessAdamW, lr=1e-2, power=p, floor_octaves=4) for p in POWERS},
    **{f"smooth S^{p:g}": partial(
        StiffnessAdamW, lr=1e-2, power=p, formula="smooth", floor_octaves=3.3, betas=(0.3, 0.6)) for p in POWERS},
    "lns, gradient": partial(StiffnessAdamW, formula="lns", power=0.5, placement="gradient", floor_octaves=4),
    "not normalized": partial(StiffnessAdamW, lr=1e-2, normalize=False),
    "gradient": partial(StiffnessAdamW, lr=1e-2, placement="gradient", weight_decay=0.3),
    "sgd": partial(StiffnessSGD, lr=0.1, weight_decay=0.3, power=0.5, floor_octaves=3.3),
    "momentum": partial(StiffnessSGD, lr=0.1, momentum=0.9),
    "riemannian": partial(RiemannianAdamW, lr=0.5, weight_decay=0.3),
    "floored": partial(RiemannianAdamW, lr=0.5, floor_octaves=3.3, damping=0.003),
    "grid": partial(GridSGD, lr=0.5, weight_decay=0.3),
    "grid, floored": partial(GridSGD, lr=0.5, floor_octaves=4),
    "grid, nearest": partial(GridSGD, lr=0.5, rounding="nearest"),
    "grid, not rounded": partial(GridSGD, lr=0.5, rounding="none"),
    "madam": partial(Madam, lr=0.1),
}


VECTORS = torch.backends.cpu.get_cpu_capability() in native.VECTORS  # whether torch multiplies and adds at once


@pytest.fixture
def with_loops():
    "Skips where there are no loops in C++, or torch rounds in between; there alone may their bits be others."
    if kernels.native_now() is None: pytest.skip("there is no C++ compiler")
    if optim.compare_loops() and not VECTORS: pytest.skip(optim.loops_text())
    assert optim.compare_loops() == ""


@pytest.fixture
def compared_anew(with_loops, monkeypatch): monkeypatch.setitem(optim.loops, "differ", None)


def moved(make, w, name="E4M3", eager=False, steps=3):
    "The bits of the weights and moments that a rule leaves after some steps."
    before = kernels.set_path("eager") if eager else ""
    chance, p = torch.Generator().manual_seed(5), nn.Parameter(w.clone())
    rule = make([p], fmt=name)
    try:
        for _ in range(steps):
            p.grad = 1e-3 * torch.randn(w.shape, generator=chance, dtype=torch.float64).to(w.dtype)
            rule.step()
    finally:
        if eager: kernels.set_path(before)
    return p.detach(), [t for t in rule.state[p].values() if torch.is_tensor(t)]


def same_bits(a, b):
    "Whether two results have the same bits; any NaN is NaN."
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}
    pairs = zip((a[0], *a[1]), (b[0], *b[1]), strict=True)
    return all(bool(((x.view(integers[x.dtype]) == y.view(integers[x.dtype])) | (x.isnan() & y.isnan())).all())
               for x, y in pairs)


@pytest.mark.parametrize("make", LOOPED.values(), ids=LOOPED)
def test_loops_in_cpp_give_torchs_bits(with_loops, make):
    # E0M7 has the formula ulp alone
    names = [n for n in EIGHT_BIT if n != "E0M7" or "formula" not in make.keywords]
    w = weights(3001)  # more than a block of 1,024; zeros, subnormal numbers and far ones
    w[::97], w[::101], w[::103], w[::107] = 0.0, 1e-40, -3.0, -0.0
    differ = [(name, n) for name in names for n in (1, 5, 3001)
              if not same_bits(moved(make, w[:n], name), moved(make, w[:n], name, eager=True))]
    assert differ == []


@each("eager", [False, True])
@both_dtypes
@pytest.mark.parametrize("name", ["E7M0", "E4M3", "E0M7", "E6M1"])
def test_ties_go_to_the_even_code(name, dtype, eager):
    "A step of half a code outwards from every value under scale one: where `fake_quantize` puts the middle."
    fmt = get_format(name)
    values = fmt.values[(fmt.values > 2.0**-30) & fmt.values.isfinite()].to(dtype)
    if fmt.max > 2.0**16: values = values[values < 2]
    middle = (values[1:] + values[:-1]) / 2
    p = nn.Parameter(torch.cat([values[:-1], -values[:-1], values[-1:]]))
    p.grad = -p.detach().sign() / stiffness(p.detach(), fmt)
    p.grad[-1] = 0
    assert compute_scale(p.detach().max(), fmt) == 1
    before, lr = kernels.set_path("eager") if eager else "", 0.5 * ((len(p) - 1) / len(p)) ** 0.5
    try: GridSGD([p], fmt, lr=lr, momentum=0.0, rounding="nearest").step()
    finally:
        if eager: kernels.set_path(before)
    assert torch.equal(p.detach()[:-1], fake_quantize(torch.cat([middle, -middle]), fmt))


@pytest.mark.parametrize("make", LOOPED.values(), ids=LOOPED)
def test_loops_see_what_is_not_finite_and_large_tensors_as_torch_does(with_loops, make):
    w = weights(kernels.CHUNK + 77)
    assert same_bits(moved(make, w, "E5M2"), moved(make, w, "E5M2", eager=True))
    for odd in (math.inf, -math.inf, math.nan):
        w[5] = odd
        assert same_bits(moved(make, w[:99], "E5M2"), moved(make, w[:99], "E5M2", eager=True)), odd


@pytest.fixture
def threads():
    "Sets how many threads torch has."
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# to both sides of a vector, a row, a level of 16 rows, a second one, and of what torch gives to a thread
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 31, 32, 33, 63, 511, 512, 513, 1000, 1023, 1025, 8191, 8192, 8225, 32767, 32768,
           32769, 40_000, 65_537, 131_105, 262_144, 300_001, 2_000_003)


@each("many", [1, 2, 3, 11])
def test_sums_are_torchs(with_loops, threads, many):
    "Where a process has found that they are: torch may add otherwise on other machines."
    if not optim.loops["sums"]: pytest.skip("torch adds in another order here")
    threads(many)
    library, chance = native.find_library(), torch.Generator().manual_seed(7)
    for n in LENGTHS:
        x, found = torch.randn(n, generator=chance).square_(), ctypes.c_float()
        library.sum_float32(x.data_ptr(), found, n, many, native.shared(native.Call(), n))
        assert found.value == x.sum().item(), n


@pytest.mark.parametrize("many", [1, 2, 3])
def test_loops_add_up_as_many_threads_do(with_loops, threads, monkeypatch, many):
    threads(many)
    w = weights(70_003)
    rules = (partial(StiffnessAdamW, lr=1e-2), partial(StiffnessAdamW, lr=1e-2, placement="gradient"),
             partial(StiffnessSGD, lr=1e-2, momentum=0.9), partial(GridSGD, lr=0.5))
    agree = optim.loops["sums"]
    for make in rules:
        expected = moved(make, w, eager=True)
        for sums in (agree, False):  # False: torch's own operations make the passes that add
            monkeypatch.setitem(optim.loops, "sums", sums)
            assert same_bits(moved(make, w), expected), (make, sums)


def calls_of_loops(monkeypatch) -> list[str]:
    "The names of the loops that will be called."
    called, real = [], optim._loop_call
    def noted(loop, bound):
        found = real(loop, bound)
        if found is not None: called.append(loop.name)
        return found
    monkeypatch.setattr(optim, "_loop_call", noted)
    return called


def test_every_loop_is_called(with_loops, monkeypatch):
    "A loop that refuses all it is given would have torch's bits, too."
    called = calls_of_loops(monkeypatch)
    for make in LOOPED.values(): moved(make, weights(64))
    assert set(called) == {loop.name for loop in optim._looped.values()} <= set(NAMES)


def test_loops_are_used_and_only_where_they_serve(with_loops, monkeypatch):
    called = calls_of_loops(monkeypatch)
    make = partial(RiemannianAdamW, lr=0.5)
    moved(make, weights(64))
    assert called
    called.clear()
    moved(make, weights(64).double())
    moved(make, weights(64), eager=True)
    assert not called


@each("granularity", ["channel", 16, "nvfp4"])
def test_numbers_of_elements_go_by_torchs_operations(with_loops, monkeypatch, granularity):
    "A weight in blocks has a grid for each of them, and a loop takes the numbers of one."
    found, called = [], calls_of_loops(monkeypatch)
    for path in ("auto", "eager"):
        before = kernels.set_path(path)
        p = nn.Parameter(make_grid_tensor(weights(8, 32), "E4M3", "grid_nearest", granularity=granularity))
        rule = RiemannianAdamW([p], "E4M3", 0.5)
        p.grad = weights(8, 32, seed=1)
        rule.step()
        kernels.set_path(before)
        found.append(p.dequantize().clone())
    assert torch.equal(*found) and not called


@each("eager", [True, False])
def test_autograd_sees_what_a_step_has_changed_and_nothing_else(with_loops, eager):
    before = kernels.set_path("eager" if eager else "auto")
    try:
        for make in (StiffnessAdamW, partial(StiffnessAdamW, placement="gradient"), RiemannianAdamW, Madam, GridSGD,
                     partial(StiffnessSGD, momentum=0.9)):
            p, free = nn.Parameter(weights(64)), torch.rand(64, requires_grad=True)
            rule = make([p], fmt="E4M3")
            p.grad = weights(64, seed=1)
            rule.step()
            kept = [t for t in rule.state[p].values() if torch.is_tensor(t) and t.shape == p.shape]
            losses = [(free * t).sum() for t in (p, *kept)]
            of_gradient = (free * p.grad).sum()
            rule.step()
            for loss in losses:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"): loss.backward()
            of_gradient.backward()
    finally: kernels.set_path(before)


def test_loops_work_without_versions(with_loops):
    with torch.inference_mode():
        p = nn.Parameter(weights(8))
        p.grad = weights(8, seed=1)
        RiemannianAdamW([p], "E4M3").step()
        assert not torch.equal(p, weights(8))


class OfEach(Madam):
    "A limit for each weight."
    def move(self, job, group, state):
        state["max"] = job.w.abs() * 2
        super().move(job, group, state)


class WithoutMemory(GridSGD):
    "The RMS of the momentum is taken whole."
    def needs_spare(self, group): return 0


@pytest.mark.parametrize("make", [OfEach, partial(WithoutMemory, lr=0.5)], ids=["limits", "memory"])
def test_a_rule_that_uses_a_pass_otherwise_goes_by_torchs_operations(with_loops, make):
    w = weights(300)
    assert same_bits(moved(make, w), moved(make, w, eager=True))


def test_a_gradient_that_is_the_weight_is_read_in_torchs_order(with_loops):
    made = []
    for rule in (partial(StiffnessAdamW, fmt="E4M3", power=0.0), torch.optim.AdamW):
        p = nn.Parameter(weights(100))
        optimizer = rule([p], lr=0.3, eps=0.1, weight_decay=0.5)
        for _ in range(3):
            p.grad = p.detach()  # of half its square
            optimizer.step()
        made.append(p.detach().clone())
    assert torch.equal(*made)


FLUSHED = """
import sys, torch
from altgrad.geometry.optim import StiffnessAdamW
from altgrad.numbers import kernels
kernels.native_now(), torch.set_num_threads(2)
assert torch.set_flush_denormal(True)
chance = torch.Generator().manual_seed(0)
w, g = (torch.randn(300_001, generator=chance) for _ in range(2))
found = []
for path in ("auto", "eager"):
    kernels.set_path(path)
    p = torch.nn.Parameter(w.clone())
    rule = StiffnessAdamW([p], "E4M3", power=0.0)
    for _ in range(3):
        p.grad = 1e-20 * g
        rule.step()
    found.append([p.detach(), *rule.state[p].values()])
print(all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*found)))
"""


@pytest.mark.slow
def test_numbers_that_are_flushed_to_zero_are_torchs(with_loops):
    done = subprocess.run([sys.executable, "-c", FLUSHED], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr[-1500:]


def test_an_interrupted_comparison_decides_nothing(compared_anew, monkeypatch):
    real, calls = optim._two_steps, []
    def stops(make):
        calls.append(make)
        if len(calls) in (1, 4): raise KeyboardInterrupt
        return real(make)
    monkeypatch.setattr(optim, "_two_steps", stops)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt): optim.compare_loops()
        assert optim.loops["differ"] is None and optim._chosen.loops is None


def test_without_loops_nothing_is_compared(compared_anew):
    before = kernels.set_path("eager")
    try: assert optim.compare_loops() == "" and optim.loops["differ"] is None
    finally: kernels.set_path(before)


def test_where_a_bit_differs_there_are_no_loops(compared_anew, monkeypatch):
    "Roots that are rounded right are not those of Intel's vector math, which torch may have."
    exponential = native.vector_math()[1]
    monkeypatch.setattr(native, "vector_math", lambda: (0, exponential))
    make, w = partial(StiffnessAdamW, lr=1e-2), weights(9999)
    assert same_bits(moved(make, w), moved(make, w, eager=True))
    x = weights(9999).abs()
    rounds_right = np.array_equal(x.sqrt().numpy(), np.sqrt(x.numpy()))
    assert bool(optim.loops["differ"]) != rounds_right
    assert rounds_right or "other bits" in optim.loops_text()


def test_every_loop_has_torchs_bits_where_torch_multiplies_and_adds_at_once(compared_anew):
    if not VECTORS: pytest.skip("torch rounds in between here")
    assert optim.compare_loops() == ""


def test_the_comparison_is_seen_by_nobody(compared_anew):
    seen = []
    hook = register_optimizer_step_post_hook(lambda rule, *_: seen.append(rule))
    state = torch.get_rng_state()
    try: optim.compare_loops()
    finally: hook.remove()
    assert not seen and torch.equal(torch.get_rng_state(), state)
    torch.set_default_dtype(torch.float64)
    try: found = optim.compare_loops()
    finally: torch.set_default_dtype(torch.float32)
    assert found == optim.compare_loops()


OTHERS = {
    "power of ECO": (partial(StiffnessAdamW, fmt="E4M3"), partial(ECO, fmt="E4M3"), "power must be 0"),
    "decay": (partial(StiffnessAdamW, fmt="E4M3"), partial(AveragedAdamW, fmt="E4M3"), "the state has no decay"),
    "power": (partial(RiemannianAdamW, fmt="E4M3"), partial(StiffnessAdamW, fmt="E4M3"), "the state has no power"),
    "damping": (Madam, partial(GridSGD, fmt="E4M3"), "the state has no momentum, .*damping"),
    "format": (torch.optim.AdamW, partial(StiffnessAdamW, fmt="E4M3"), "the state has no fmt"),
}


def after_a_step(make, seed: int = 1):
    "A weight, and the optimizer that moved it once."
    p = nn.Parameter(weights(8, 9))
    rule = make([p])
    p.grad = weights(8, 9, seed=seed)
    rule.step()
    return p, rule


def held(p, rule):
    "What a rule holds, as plain values."
    state = {k: v.tolist() if torch.is_tensor(v) else v for k, v in rule.state[p].items()}
    return state, [{k: v for k, v in group.items() if k != "params"} for group in rule.param_groups]


@each("there, here, told", OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_rule_is_refused_and_nothing_is_loaded(there, here, told):
    saved, (p, rule) = after_a_step(there)[1].state_dict(), after_a_step(here, seed=2)
    before, group = held(p, rule), rule.param_groups[0]
    with pytest.raises(InputError, match=told) as error: rule.load_state_dict(saved)
    assert "\n" not in str(error.value)
    assert held(p, rule) == before and rule.param_groups[0] is group
    rule.step()


@each("damage, told", [
    ({"power": math.nan}, "power must be a finite number"), ({"lr": -1.0}, "lr must be a finite number"),
    ({"betas": (0.9, 1.0)}, "each of betas"), ({"placement": "elsewhere"}, "placement"),
])
def test_a_state_with_a_setting_that_is_refused_elsewhere_is_not_loaded(damage, told):
    p, rule = after_a_step(partial(StiffnessAdamW, fmt="E4M3"))
    saved, before = rule.state_dict(), held(p, rule)
    saved["param_groups"][0].update(damage)
    with pytest.raises(InputError, match=told): rule.load_state_dict(saved)
    assert held(p, rule) == before


def test_groups_that_are_too_many_or_too_few_are_torchs_error():
    rule = StiffnessAdamW([nn.Parameter(weights(3))], "E4M3")
    saved = rule.state_dict()
    for groups in ([], saved["param_groups"] * 2):
        with pytest.raises(ValueError, match="parameter groups"):
            rule.load_state_dict({**saved, "param_groups": groups})
