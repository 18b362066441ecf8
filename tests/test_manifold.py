"""FP8Manifold against geoopt's contract, its optimizers on it, and models whose weights live on
it."""
import copy
import io
import math
import subprocess
import sys

import geoopt
import numpy as np
import pytest
import torch
from geoopt import ManifoldParameter
from geoopt.optim import RiemannianAdam, RiemannianSGD
from torch import nn

from altgrad.basics import InputError
from altgrad.numbers.formats import EIGHT_BIT, FORMATS
from altgrad.geometry.manifold import FP8Manifold, first_step
from altgrad.geometry.spacing import stiffness
from altgrad.model.gpt import GPT, GPTConfig, loss_of
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.training.checkpoint import load_checkpoint, save_checkpoint

from cases import each

DTYPES = (torch.float32, torch.float64)
SCALES = {"one": 1.0, "small": 2.0**-7, "rows": torch.tensor([[0.5], [4.0], [2.0**-6]]), "odd": 0.3}
# a coordinate reaches 127 codes: eight roundings of that
TOLERANCE = {t: 8 * 127 * torch.finfo(t).eps / 2 for t in DTYPES}
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64)

every_format = pytest.mark.parametrize("name", EIGHT_BIT)
all_formats = each("name", EIGHT_BIT)
every_dtype = each("dtype", DTYPES)
every_scale = each("scale", SCALES.values(), ids=SCALES)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def case(name: str, dtype: torch.dtype, scale=1.0, **options):
    """A manifold, two points of the inner range,
    and two tangent vectors of a few codes; all [3, 50]."""
    m = FP8Manifold(name, scale=scale, **options)
    x, y = (
        m.from_coordinate(0.8 * m.coordinate(p), like=p)
        for p in (m.random(3, 50, dtype=dtype), m.random(3, 50, dtype=dtype))
    )
    S = m.stiffness(x)
    return (
        m, x.as_subclass(torch.Tensor), y.as_subclass(torch.Tensor), 3 * S * torch.randn_like(S),
        3 * S * torch.randn_like(S),
    )


def close(a, b, tol, atol=0.0):
    torch.testing.assert_close(
        a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor), rtol=tol, atol=atol
    )


@every_scale
@every_dtype
@every_format
def test_points_vectors_and_projections(name, dtype, scale):
    m, x, _, u, _ = case(name, dtype, scale)
    m.assert_check_point(x)
    m.assert_check_vector(u)
    m.assert_check_point_on_manifold(x)
    m.assert_check_vector_on_tangent(x, u)
    assert torch.equal(m.projx(x), x) and torch.equal(m.proju(x, u), u)
    far = 100 * m.limit(x) * torch.randn_like(x).sign()
    assert not m.check_point_on_manifold(far) and m.check_point_on_manifold(m.projx(far))
    assert torch.equal(m.projx(m.projx(far)), m.projx(far))
    assert torch.equal(m.proju(x, m.proju(x, u)), m.proju(x, u))
    assert torch.equal(m.projx(far), (m.limit(x) * far.sign()).expand_as(x))
    ok, reason = m.check_point_on_manifold(far, explain=True)
    assert not ok and "beyond the largest" in reason
    assert not m.check_vector_on_tangent(x, u * torch.inf)
    y = m.retr(x, u)
    assert y.dtype == dtype and (y - x)[u != 0].sign().equal(u[u != 0].sign())
    m.assert_check_point_on_manifold(m.projx(y))
    m.assert_check_vector_on_tangent(y, m.transp_follow_retr(x, u, u))


@every_scale
@every_dtype
@every_format
def test_exp_and_log_are_inverse(name, dtype, scale):
    m, x, y, u, _ = case(name, dtype, scale)
    tol = TOLERANCE[dtype]
    close(m.expmap(x, m.logmap(x, y)) / m.stiffness(y), y / m.stiffness(y), 0.0, atol=tol)
    S = m.stiffness(x)
    z = m.expmap(x, u)
    close(m.logmap(x, z) / S, u / S, 0.0, atol=tol)
    close(m.expmap(x, m.logmap(x, z)) / m.stiffness(z), z / m.stiffness(z), 0.0, atol=tol)
    assert torch.equal(m.expmap(x, 0 * u), x)
    assert torch.equal(m.logmap(x, x), 0 * x)
    assert torch.equal(m.retr(x, u), m.expmap(x, u))


@every_scale
@every_format
def test_the_retraction_is_of_second_order_where_smooth(name, scale):
    m, x, _, u, _ = case(name, torch.float64, scale)
    S = m.stiffness(x)
    h = 2.0**-12
    smooth = (m.stiffness(x + h * u) == S) & (m.stiffness(x - h * u) == S)
    assert smooth.double().mean() > 0.9
    ahead, back = m.retr(x, h * u), m.retr(x, -h * u)
    # of a point, in its spacings; a difference quotient divides that by h
    known = TOLERANCE[torch.float64]
    close(((ahead - back) / (2 * h * S))[smooth], (u / S)[smooth], 0.0, atol=known / h)
    assert (((ahead - 2 * x + back) / (h**2 * S))[smooth].abs() < known / h**2).all()
    # the straight step agrees with it to every order until it leaves the binade, and to first order
    # at its edge from inside
    assert torch.equal(ahead[smooth], (x + h * u)[smooth])
    fmt = FORMATS[name]
    edge = torch.tensor(4.0 * fmt.min_spacing * 2.0**fmt.mantissa_bits, dtype=torch.float64)
    if fmt.exponent_bits > 2:
        one = FP8Manifold(name)
        step = one.stiffness(edge)
        close(one.retr(edge, step), edge + step, 0.0)
        close(one.retr(edge, -step), edge - step / 2, 0.0)  # one code, half as wide below


@every_scale
@every_dtype
@every_format
def test_transport_is_isometric_and_independent_of_the_path(name, dtype, scale):
    m, x, y, u, v = case(name, dtype, scale)
    z, tol = case(name, dtype, scale)[1], 10 * torch.finfo(dtype).eps
    close(m.inner(y, m.transp(x, y, u), m.transp(x, y, v)), m.inner(x, u, v), tol)
    close(m.norm(y, m.transp(x, y, u)), m.norm(x, u), tol)
    close(m.transp(y, z, m.transp(x, y, u)), m.transp(x, z, u), tol)
    close(m.transp(z, x, m.transp(y, z, m.transp(x, y, u))), u, tol)  # no holonomy: flat
    end, carried = m.retr_transp(x, u, v)
    assert torch.equal(end, m.retr(x, u)) and torch.equal(carried, m.transp(x, end, v))
    assert torch.equal(m.transp_follow_retr(x, u, v), carried)
    assert torch.equal(m.expmap_transp(x, u, v)[1], carried)
    assert torch.equal(m.transp_follow_expmap(x, u, v), carried)


@every_dtype
@every_format
def test_a_step_can_be_walked_back(name, dtype):
    m, x, _, u, _ = case(name, dtype)
    assert m.reversible
    y, carried = m.retr_transp(x, u, u)
    back, again = m.retr_transp(y, -carried, carried)
    S = m.stiffness(x)
    # the stiffness at a binade's edge is that above it; a rounding at the edge may turn to the
    # other side, by a factor of 2
    same = m.stiffness(back) == S
    assert same.double().mean() > 0.98
    close(m.coordinate(back), m.coordinate(x), 0.0, atol=TOLERANCE[dtype])
    close((again / S)[same], (u / S)[same], TOLERANCE[dtype], atol=TOLERANCE[dtype])


@every_scale
@every_format
def test_distance_is_the_length_of_the_geodesic(name, scale):
    m, x, y, _, _ = case(name, torch.float64, scale)
    t = torch.linspace(0, 1, 5001, dtype=torch.float64)[:, None, None]
    path = m.expmap(x, t * m.logmap(x, y))
    length = (path.diff(dim=0).abs() / m.stiffness((path[1:] + path[:-1]) / 2)).sum(0)
    # the mesh's error: 5,000 pieces of at most 254 codes
    close(length, m.dist(x, y), 5e-3, atol=1e-3)
    close(m.dist(x, y), m.dist(y, x), 8 * 2.0**-53)
    close(m.dist2(x, y), m.dist(x, y) ** 2, 0.0)
    close(m.dist(x, y), m.norm(x, m.logmap(x, y)), 1e-12)
    assert torch.equal(m.dist(x, y, keepdim=True), m.dist(x, y))
    assert torch.equal(m.dist(x, x), 0 * x)


@all_formats
def test_the_manifold_is_flat(name):
    m, x, y, _, _ = case(name, torch.float64)
    z = case(name, torch.float64)[1]
    a, b, c = torch.stack([x, y, z]).sort(dim=0).values
    known = TOLERANCE[torch.float64]
    close(m.dist(a, b) + m.dist(b, c), m.dist(a, c), 0.0, atol=known)
    # Pythagoras, for a right angle between two weights
    corner = torch.stack([y[0], x[1]])
    close(
        m.dist(x[:2], corner).square().sum(0) + m.dist(corner, y[:2]).square().sum(0),
        m.dist(x[:2], y[:2]).square().sum(0), 0.0, atol=2 * 254 * known,
    )
    # geodesics are straight: the midpoint of a parallelogram's diagonals is the same
    middle = m.expmap(x, 0.5 * m.logmap(x, y))
    close(m.coordinate(middle), (m.coordinate(x) + m.coordinate(y)) / 2, 0.0, atol=known)


@every_scale
@every_format
def test_gradient_and_inner_product_do_not_reduce(name, scale):
    m, x, _, u, v = case(name, torch.float64, scale)
    g, S = torch.randn_like(x), m.stiffness(x)
    r = m.egrad2rgrad(x, g)
    close(r, S**2 * g, 1e-12)
    close(m.inner(x, r, v), g * v, 1e-12)
    close(m.component_inner(x, r), S**2 * g**2, 1e-12)
    for f in (m.inner, m.component_inner): assert f(x, u, v).shape == x.shape
    assert torch.equal(m.inner(x, u, v), m.inner(x, u, v, keepdim=True))
    assert torch.equal(m.inner(x, u), m.inner(x, u, u))
    w = torch.as_tensor(scale, dtype=torch.float64)
    assert torch.equal(S, w * stiffness(x / w, name))


@every_dtype
@all_formats
def test_broadcasting(name, dtype):
    m, x, y, u, v = case(name, dtype, SCALES["rows"])
    stack = lambda t: torch.stack([t] * 4)  # noqa: E731
    for f, args in (
        *((f, (x, u)) for f in (m.expmap, m.retr, m.egrad2rgrad, m.proju, m.norm)),
        (m.logmap, (x, y)), (m.dist, (x, y)), (m.transp, (x, y, v)), (m.inner, (x, u, v)),
        (m.transp_follow_retr, (x, u, v)), (m.projx, (x,)),
    ):
        whole = stack(f(*args))
        assert torch.equal(f(*map(stack, args)), whole), f.__name__
        if len(args) == 1: continue
        assert torch.equal(f(*args[:1], *map(stack, args[1:])), whole), f.__name__
    for row in range(3):
        alone = FP8Manifold(name, scale=m.scale[row].item())
        assert torch.equal(alone.expmap(x[row], u[row]), m.expmap(x, u)[row])
    assert m.dist(x[:, :1], y).shape == y.shape and m.proju(x, u[:1]).shape == x.shape
    assert FP8Manifold(name).dist(x[0, 0], y[0, 0]).shape == ()


@all_formats
def test_random_points_and_origin(name):
    m = FP8Manifold(name, scale=0.25)
    for draw in (m.random, m.random_uniform, m.random_normal):
        for dtype in DTYPES:
            x = draw(5, 7, dtype=dtype)
            assert isinstance(x, geoopt.ManifoldTensor)
            assert x.manifold is m
            assert x.shape == (5, 7)
            assert x.dtype == dtype
            m.assert_check_point_on_manifold(x)
        assert draw((2, 3)).shape == (2, 3)
    o = m.origin(2, 3, dtype=torch.float64)
    assert isinstance(o, geoopt.ManifoldTensor)
    assert torch.equal(o.data, torch.zeros(2, 3, dtype=torch.float64))
    codes = m.coordinate(m.random(20_000, dtype=torch.float64)) / m.fmt.last_finite
    assert abs(codes.mean()) < 0.02 and abs(codes.std() - 3**-0.5) < 0.01
    far = geoopt.Scaled(m, 3.0).dist(o, m.limit(o))
    assert (far - 3 * m.dist(o, m.limit(o))).abs().max() <= 3 * TOLERANCE[torch.float32]


@every_scale
@all_formats
def test_state_dict_copies_and_pickles(name, scale):
    m = FP8Manifold(name, damping=0.1, floor_octaves=4, scale=scale)
    assert list(m.state_dict()) == ["scale"]
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    fresh = FP8Manifold(name, scale=torch.ones_like(m.scale))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh.scale, m.scale)
    file = io.BytesIO()
    p = ManifoldParameter(m.random(3, 5), manifold=m)
    torch.save(p, file)
    file.seek(0)
    for twin in (copy.deepcopy(p), torch.load(file, weights_only=False)):
        n = twin.manifold
        assert type(twin) is ManifoldParameter
        assert torch.equal(twin, p)
        assert n is not m
        assert twin.requires_grad
        assert (n.fmt, n.damping, n.floor_octaves) == (m.fmt, 0.1, 4)
        assert torch.equal(n.scale, m.scale)
    assert name in repr(m) and "floor_octaves=4" in repr(m)


@each("options", [
    dict(damping=0.01), dict(floor_octaves=0), dict(floor_octaves=5),
    dict(damping=1e-3, floor_octaves=2.5),
])
@every_format
def test_floors(name, options):
    m = FP8Manifold(name, scale=0.5, **options)
    sizes = torch.logspace(-16, 0, 200, base=2, dtype=torch.float64)
    x, y = torch.randn(2, 200, dtype=torch.float64) * sizes * 0.1
    x[0] = y[0] = 0.9  # the largest of both: the floor is the same at either
    below = 2.0 ** -options.get("floor_octaves", math.inf)
    low = max(options.get("damping", 0), below * stiffness(torch.tensor(1.8), name).item())
    assert (m.stiffness(x) >= 0.5 * low).all()
    assert torch.equal(m.stiffness(x), m.stiffness(x, like=y))
    known = TOLERANCE[torch.float64]
    # 0.9 is the largest weight: no floor is above it
    close(m.expmap(x, m.logmap(x, y)), y, known, atol=known * 0.9)
    close(m.norm(y, m.transp(x, y, y - x)), m.norm(x, y - x), 16 * 2.0**-53)
    t = torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None]
    path = m.expmap(x, t * m.logmap(x, y))
    length = (path.diff(dim=0).abs() / m.stiffness((path[1:] + path[:-1]) / 2, like=x)).sum(0)
    close(length, m.dist(x, y), 2e-3, atol=2e-3)  # the mesh's error
    assert (m.dist(x, y) <= FP8Manifold(name, scale=0.5).dist(x, y) + known).all()
    # the ordinary geometry
    if options == dict(floor_octaves=0):
        close(m.dist(x, y), (x - y).abs() / m.stiffness(x[0]), 0.0, atol=known)


@all_formats
def test_autograd_knows_the_slopes(name):
    m, x, y, u, _ = case(name, torch.float64, 0.5)
    a = x.clone().requires_grad_()
    slope, = torch.autograd.grad(m.dist(a, y).sum(), a)
    known = 16 * 2.0**-53  # a handful of products
    close(slope, (x - y).sign() / m.stiffness(x), known)
    b = y.clone().requires_grad_()
    slope, = torch.autograd.grad(m.logmap(x, b).sum(), b)
    close(slope, m.stiffness(x) / m.stiffness(y), known)
    a, v = x.clone().requires_grad_(), u.clone().requires_grad_()
    end = m.expmap(a, v)
    for slope in torch.autograd.grad(end.sum(), (a, v)):
        close(slope, m.stiffness(end) / m.stiffness(x), known)


@every_format
def test_one_code_per_step_wherever_the_weight_lies(name):
    for seed in range(3):
        start, moved = first_step(name, amax=FORMATS[name].max, n=3000, seed=seed)
        assert ((moved - 1).abs() < TOLERANCE[torch.float32]).all() and (start > 0).all()
    _, adam = first_step(name, lr=1e-3)
    assert adam.max() > 50 if FORMATS[name].exponent_bits > 3 else adam.max() < 40


@all_formats
def test_codes_change_by_one_from_values_of_the_format(name):
    fmt, s = FORMATS[name], 2.0**-2
    code = torch.arange(1, fmt.last_finite)
    m = FP8Manifold(fmt, scale=s)
    for sign in (1.0, -1.0):
        w = ManifoldParameter(fmt.to_real(code, torch.float64) * s, manifold=m)
        w.grad = torch.full_like(w, -sign)
        RiemannianAdam([w], lr=1.0, eps=1e-60).step()
        assert torch.equal(fmt.to_bits(w.detach() / s).int(), (code + int(sign)).int())


@every_format
def test_riemannian_sgd_goes_down(name):
    m = FP8Manifold(name, scale=0.5)
    x, goal = (m.random(200, dtype=torch.float64) for _ in range(2))
    w = ManifoldParameter(x.detach().clone(), manifold=m)
    opt = RiemannianSGD([w], lr=0.1)
    for _ in range(200):
        opt.zero_grad()
        (0.5 * m.dist(w, goal).square().sum()).backward()
        opt.step()
    # the loss is a parabola in codes, and each step a tenth of the way in codes
    close(
        m.coordinate(w.detach()), m.coordinate(goal), 0.0,
        atol=254 * 0.9**200 + 200 * TOLERANCE[torch.float64],
    )


@every_format
def test_riemannian_adam_is_adam_on_the_code_coordinate(name):
    m, x, goal, _, _ = case(name, torch.float64, 0.5)
    w, psi = ManifoldParameter(x.clone(), manifold=m), nn.Parameter(m.coordinate(x))
    options = dict(lr=0.7, betas=(0.8, 0.95), eps=1e-3, amsgrad=True)
    on_manifold, in_codes = RiemannianAdam([w], **options), torch.optim.Adam([psi], **options)
    for _ in range(40):
        on_manifold.zero_grad()
        in_codes.zero_grad()
        m.dist(w, goal).square().sum().backward()
        (psi - m.coordinate(goal)).square().sum().backward()
        on_manifold.step()
        in_codes.step()
    # 40 steps in float64, each of which Adam's quotient may magnify near the goal
    close(m.coordinate(w.detach()), psi.detach(), 0.0, atol=1e-6)


@each("call, words", [
    (lambda: FP8Manifold("E9M9"), "unknown format"),
    (lambda: FP8Manifold("E4M3", scale=0.0), "scale must be positive"),
    (lambda: FP8Manifold("E4M3", scale=torch.tensor([1, 2])), "scale must be positive"),
    (lambda: FP8Manifold("E4M3", damping=float("nan")), "damping"),
    (lambda: FP8Manifold("E4M3", floor_octaves=-1.0), "floor_octaves"),
    (lambda: FP8Manifold("E4M3").stiffness(torch.arange(3)), "float32 or float64"),
    (lambda: FP8Manifold("E4M3").random(3, dtype=torch.float16), "float32 or float64"),
])
def test_bad_input_is_named(call, words):
    with pytest.raises(InputError, match=words): call()


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def on_manifold(name="E4M3", **kwargs) -> tuple[GPT, RiemannianAdam]:
    "A GPT with all its linear layers on a manifold, and an optimizer for it."
    model = gpt()
    quantize_model(model, name, **{"skip": (), "manifold": True, **kwargs})
    there = [p for p in model.parameters() if isinstance(p, ManifoldParameter)]
    rest = [p for p in model.parameters() if not isinstance(p, ManifoldParameter)]
    lr = 0.12 * 2 ** FORMATS[name].mantissa_bits
    groups = [dict(params=there, lr=lr), dict(params=rest, lr=3e-3)]
    return model, RiemannianAdam(groups, eps=1e-15)


def train(model, optimizer, steps) -> list[float]:
    "Losses on a short cycle of tokens."
    tokens = torch.arange(2 * 33).reshape(2, 33) % 23
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@every_format
def test_a_gpt_trains_on_its_manifold(name):
    model, optimizer = on_manifold(name, manifold=dict(floor_octaves=6))
    # by its weights on the manifold alone
    for group in optimizer.param_groups[1:]: group["lr"] = 0.0
    losses = train(model, optimizer, 60)
    assert losses[-1] < 0.1 * losses[0], losses


def test_ties_gradients_and_places():
    model = gpt()
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = quantize_model(model, "E5M2", skip=(), manifold=True)
    assert len(report.changed) == 9 and model.lm_head.weight is model.wte.weight
    assert [name for name, _ in model.named_parameters()] == list(before)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not model.blocks[0].attn.qkv.weight.requires_grad
    assert type(model.wpe.weight) is nn.Parameter
    for row in report.changed:
        layer = model.get_submodule(row.name)
        assert isinstance(layer.weight, ManifoldParameter)
        assert layer.manifold is layer.weight.manifold
        assert layer.manifold.scale == layer.weight_scale()
        assert layer.manifold.fmt == layer.weight_format
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.wte.weight
    assert twin.lm_head.manifold is twin.wte.weight.manifold is not model.lm_head.manifold
    twin.double()
    assert isinstance(twin.wte.weight, ManifoldParameter)
    assert twin.lm_head.manifold.scale.dtype == torch.float64


def test_an_unmatched_head_keeps_its_embedding_off_the_manifold():
    model = gpt()
    quantize_model(model, "E5M2", manifold=True)
    assert type(model.wte.weight) is nn.Parameter and model.lm_head.weight is model.wte.weight
    assert isinstance(model.blocks[1].mlp.fc.weight, ManifoldParameter)


def test_wrong_requests_change_nothing():
    two = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    two["b"].weight = two["a"].weight
    rules = PrecisionConfig([LayerPrecisionRule("a", "E4M3"), LayerPrecisionRule("b", "E5M2")])
    for model, words, kwargs in [
        (two, "b shares its weight with a layer in E4M3", dict(config=rules, manifold=True)),
        (
            nn.Sequential(nn.Linear(4, 4)).bfloat16(), "float32 or float64",
            dict(format="E4M3", manifold=True),
        ),
        (
            nn.Sequential(nn.Linear(4, 4)), "unknown manifold option 'octaves'",
            dict(format="E4M3", manifold=dict(octaves=3)),
        ),
        (nn.Sequential(nn.Linear(4, 4)), "damping", dict(format="E4M3", manifold=dict(damping=-3))),
    ]:
        before = [(type(m), *map(id, m._parameters.values())) for m in model.modules()]
        with pytest.raises(InputError, match=words): quantize_model(model, **kwargs)
        assert before == [(type(m), *map(id, m._parameters.values())) for m in model.modules()]
    quantize_model(two, config=PrecisionConfig(default="E4M3"), manifold={})
    assert isinstance(two["a"].weight, ManifoldParameter) and two["a"].weight is two["b"].weight


def test_a_state_dict_of_plain_tensors_loads_with_weights_only():
    model, optimizer = on_manifold("E5M2")
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {type(t) for t in state["model"].values()} == {torch.Tensor}
    other, _ = on_manifold("E5M2")
    other.lm_head.manifold.scale.fill_(99.0)
    other.load_state_dict(state["model"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    assert other.wte.weight.manifold.scale == model.wte.weight.manifold.scale
    assert isinstance(other.wte.weight, ManifoldParameter)


def test_a_continued_run_is_the_uninterrupted_one(tmp_path):
    whole, optimizer = on_manifold("E4M3")
    train(whole, optimizer, 8)
    first, optimizer = on_manifold("E4M3")
    train(first, optimizer, 4)
    save_checkpoint(tmp_path / "c.pt", first, [optimizer], 4)
    second, optimizer = on_manifold("E4M3")
    with torch.no_grad():
        for p in second.parameters(): p.mul_(1.5)
    step, _ = load_checkpoint(tmp_path / "c.pt", second, [optimizer])
    train(second, optimizer, 8 - step)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters()))


def test_surgery_needs_geoopt_only_for_the_manifold():
    code = """
import sys
sys.modules["geoopt"] = None
from torch import nn
from altgrad.basics import InputError
from altgrad.model.surgery import quantize_model
model = nn.Sequential(nn.Linear(4, 4))
try: quantize_model(model, "E4M3", manifold=True)
except InputError as e: print(e)
print(len(quantize_model(model, "E4M3").changed))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = "manifold=True needs the package geoopt (pip install geoopt)\n1\n"
    assert done.stdout == wanted, done.stderr


# distinct ones, an octave apart
GAPS = {"E0M7": 1, "E1M6": 1, "E2M5": 3, "E3M4": 7, "E4M3": 15, "E5M2": 30, "E6M1": 63, "E7M0": 126}


@each("floor_octaves", [None, 0.5, 2, 6, 40, 200])
@every_format
def test_what_calls_itself_reversible_is(name, floor_octaves):
    "As geoopt's own suite asks: back along the transported vector, over points of all magnitudes."
    m = FP8Manifold(name, floor_octaves=floor_octaves)
    worst = 0.0
    for _ in range(3):
        x = (
            m.random(20, 20, dtype=torch.float64) * torch.rand(20, 20, dtype=torch.float64)
        ).as_subclass(torch.Tensor)
        S = m.stiffness(x)
        u = 3 * S * torch.randn_like(S)
        y, carried = m.retr_transp(x, u, u)
        back, _ = m.retr_transp(y, -carried, carried)
        worst = max(worst, float((m.coordinate(back, like=x) - m.coordinate(x)).abs().max()))
    assert not m.reversible or worst < 1e-6
    assert m.reversible == (floor_octaves is None or floor_octaves >= GAPS[name] - 1)


def test_a_loaded_scale_decides_which_points_are_taken():
    tiny, half = FP8Manifold("E4M3", scale=1e-50), FP8Manifold("E4M3", scale=0.5)
    held = {name: copy.deepcopy(m.state_dict()) for name, m in (("tiny", tiny), ("half", half))}
    tiny.load_state_dict(held["half"])
    half.load_state_dict(held["tiny"])
    with pytest.raises(InputError, match="float32 does not hold the scale"): half.stiffness(torch.ones(2))
    assert (tiny.stiffness(torch.ones(2)) > 0).all()
    assert (half.stiffness(torch.ones(2, dtype=torch.float64)) > 0).all()


@each("kind", (float, np.float32, np.float64))
def test_numbers_of_numpy_are_numbers(kind):
    made = FP8Manifold("E4M3", scale=kind(0.5), damping=kind(0.25), floor_octaves=kind(8))
    plain = FP8Manifold("E4M3", scale=0.5, damping=0.25, floor_octaves=8)
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made.stiffness(x), plain.stiffness(x))
    for wrong in ({"scale": True}, {"damping": True}, {"floor_octaves": True}, {"damping": "1"}):
        with pytest.raises(InputError, match=next(iter(wrong))): FP8Manifold("E4M3", **wrong)
