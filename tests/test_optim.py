"""What the notebook of the update rules cannot show: pickling, non-contiguous weights, both dtypes,
and every format against geoopt."""
import pickle

import pytest
import torch
from torch import nn

from altgrad.basics import InputError
from altgrad.numbers.formats import EIGHT_BIT, get_format, ulp
from altgrad.numbers.scaling import compute_scale
from altgrad.geometry.optim import GridSGD, Madam, RiemannianAdamW, StiffnessAdamW, StiffnessSGD

RULES = {
    "stiffness": lambda p: StiffnessAdamW(p, "E4M3", 1e-2, power=0.5),
    "gradient": lambda p: StiffnessAdamW(p, "E4M3", 1e-2, placement="gradient"),
    "sgd": lambda p: StiffnessSGD(p, "E4M3", 0.1, momentum=0.9),
    "riemannian": lambda p: RiemannianAdamW(p, "E4M3", 0.5),
    "madam": lambda p: Madam(p, "E4M3"),
    "grid": lambda p: GridSGD(p, "E4M3", 0.5),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
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
