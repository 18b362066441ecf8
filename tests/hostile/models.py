"""Models of strangers: what can be quantized, and what is said where it cannot."""
from functools import partial
from typing import Any, Callable, Iterator

from .core import Case, Place, refused


def _plain() -> Any:
    from torch import nn
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def _wrong(make: Callable[[], Any], args: tuple, kwargs: dict, place: Place) -> None:
    "Refused, and the model is as it was."
    import torch
    from altgrad.model.surgery import quantize_model
    model = make()
    before = (
        {k: v.clone() for k, v in model.state_dict().items() if torch.is_tensor(v) and not _lazy(v)}
        if isinstance(model, torch.nn.Module)
        else {}
    )
    kinds = [type(m) for m in model.modules()] if isinstance(model, torch.nn.Module) else []
    refused(quantize_model, model, *args, **kwargs)
    if before:
        assert [type(m) for m in model.modules()] == kinds
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())


def _lazy(v: Any) -> bool:
    import torch
    return torch.nn.parameter.is_lazy(v)


def _stored(storage: str, place: Place) -> None:
    "What `state_dict()` gives is read by `torch.load(weights_only=True)` and means the same."
    import torch
    from altgrad.geometry.storage import store_on_grid
    from altgrad.model.surgery import quantize_model
    torch.manual_seed(0)
    model = _plain()
    quantize_model(model, "E4M3")
    if storage: store_on_grid(model, storage, 0)
    x, path = torch.randn(5, 8), place.folder / "m.pt"
    want = model(x)
    torch.save(model.state_dict(), path)
    state = torch.load(path, weights_only=True)
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    assert torch.equal(model(x), want)


def _works(fmt: str, place: Place) -> None:
    import torch
    from altgrad.numbers.quantize import fake_quantize
    from altgrad.numbers.scaling import compute_scale
    from altgrad.model.surgery import quantize_model
    torch.manual_seed(0)
    model, plain = _plain(), None
    x, w = torch.randn(5, 8), model[0].weight.detach().clone()
    quantize_model(model, fmt)
    plain = fake_quantize(w, fmt, compute_scale(w.abs().amax(), fmt))
    want = torch.nn.functional.linear(x, plain, model[0].bias)
    assert torch.allclose(model[0](x), want, rtol=1e-5, atol=1e-6)


def cases(rng) -> Iterator[Case]:
    from torch import nn
    import torch

    for name, make in {
        "lazy": lambda: nn.Sequential(nn.LazyLinear(4)),
        "none": lambda: None,
        "a class": lambda: nn.Linear,
        "a list": lambda: [nn.Linear(2, 2)],
        "text": lambda: "gpt",
        "int8 weights": lambda: _cast(torch.int8),
        "complex weights": lambda: _cast(torch.complex64),
        "no linear layer": lambda: nn.Sequential(nn.ReLU()),
        "a tensor": lambda: torch.ones(3),
    }.items():
        for fmt in ("E4M3", "E5M2", "E7M0"):
            yield Case("models", f"{name} {fmt}", partial(_wrong, make, (fmt,), {}))
    for fmt in ("E9M9", "", None, 8, "float8_e8m0fnu", "E4M3b7fnu", [], True, "x" * 10**5):
        yield Case("models", f"format {str(fmt)[:20]!r}", partial(_wrong, _plain, (fmt,), {}))
    for skip in (3, 1.5, True, [3], [None], {"a": 1}):
        yield Case("models", f"skip {skip!r}", partial(_wrong, _plain, ("E4M3",), {"skip": skip}))
    for seed in (-1, 1.5, "1", None, True, 2**63, 2**64):
        yield Case("models", f"seed {seed!r}", partial(_wrong, _plain, ("E4M3",), {"seed": seed}))
    for config in ("x", 3, [], {}):
        yield Case("models", f"config {config!r}", partial(_wrong, _plain, (), {"config": config}))
    for storage in (
        "", "grid_nearest", "grid_stochastic", "grid_residual2", "grid_residual4", "grid_residual8",
        "bf16",
    ):
        yield Case(
            "models", f"state_dict of {storage or 'master'}", partial(_stored, storage), right=True
        )
    for e in range(8):
        yield Case(
            "models", f"quantized in E{e}M{7 - e}", partial(_works, f"E{e}M{7 - e}"), right=True
        )


def _cast(dtype: Any) -> Any:
    from torch import nn
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    return nn.Sequential(layer)
