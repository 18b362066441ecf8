"""Rivals beside their authors' own code, where that is no example for a page."""
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from altgrad.geometry.keeping import Storage
from altgrad.geometry.rivals.split import Split
from altgrad.numbers.formats import get_format
from altgrad.numbers.quantize import fake_quantize

FLASH = importlib.util.find_spec("flashoptim")  # pip install --no-deps flashoptim


class Block(torch.Tensor):
    "A tensor that is cast as Triton casts: `bitcast` keeps the bits."
    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def triton_in_torch() -> dict[str, ModuleType]:
    "Modules by the names that FlashOptim imports; functions of a kernel are torch's."
    modules = {name: ModuleType(name) for name in (
        "triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice"
    )}
    triton, tl, extra, libdevice = modules.values()
    triton.jit = lambda f: f
    triton.Config = triton.autotune = triton.heuristics = lambda *_, **__: lambda f: f
    triton.language, tl.extra, extra.libdevice = tl, extra, libdevice
    tl.constexpr, tl.tensor = int, torch.Tensor
    # a magnitude's bits are not negative: signed integers hold them
    tl.uint16, tl.uint32 = torch.int16, torch.int32
    for name in ("abs", "where", "floor", "exp2", "clamp", "sqrt", "sigmoid"):
        setattr(tl, name, getattr(torch, name))
    for name in ("int8", "int16", "int32", "float32", "float16", "bfloat16"):
        setattr(tl, name, getattr(torch, name))
    libdevice.copysign = torch.copysign
    return modules


@pytest.fixture
def flash(monkeypatch) -> ModuleType:
    "FlashOptim's own file, with torch in the place of Triton."
    for name, module in triton_in_torch().items(): monkeypatch.setitem(sys.modules, name, module)
    path = f"{FLASH.submodule_search_locations[0]}/optimizers.py"
    spec = importlib.util.spec_from_file_location("flashoptim_in_torch", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(FLASH is None, reason="FlashOptim is not installed")
@pytest.mark.parametrize("bits", [8, 16])
def test_split_weights_are_those_of_flashoptim_to_the_last_bit(flash, bits):
    g = torch.Generator().manual_seed(bits)
    w = torch.randn(100_000, generator=g)
    # with these exponents half a spacing is a normal number of float32
    w *= 2.0 ** torch.randint(-110, 120, w.shape, generator=g)
    w = torch.cat([w, torch.tensor([0.0, 1.0, 1 - 2.0**-10, -1 - 2.0**-9, 2.0**-100])])
    kind, fmt = Split("nearest", residual_bits=bits, fmt="bfloat16"), get_format("bfloat16")
    q = kind.round(w, fmt, 0)
    narrow, integer = w.bfloat16().as_subclass(Block), {8: torch.int8, 16: torch.int16}[bits]
    theirs = flash._compute_ecc_bits(w.as_subclass(Block), narrow, integer, 7, kind.levels)
    ours = kind.remember(w, q, fmt, 0)
    assert ours.dtype == integer and torch.equal(ours, theirs.as_subclass(torch.Tensor))
    joined = flash._apply_error_correction(narrow, ours.as_subclass(Block), 7, kind.levels)
    assert torch.equal(kind.latent(q, ours, fmt), joined.as_subclass(torch.Tensor))
    assert ours.float().abs().max() == kind.levels and len(ours.unique()) > 2**bits / 3


def of_torchao():
    return pytest.importorskip("torchao.optim.quant_utils")._fp32_to_bf16_sr


def of_heavyball():
    round_into = pytest.importorskip("heavyball.utils").stochastic_round_
    return lambda x: round_into(torch.empty_like(x, dtype=torch.bfloat16), x)


@pytest.mark.parametrize("of", [of_torchao, of_heavyball])
def test_stochastic_rounding_to_bfloat16_is_theirs(of):
    theirs = of()
    torch.manual_seed(2)
    x, fmt, n = torch.randn(500), get_format("bfloat16"), 1024
    low, high = (fake_quantize(x, fmt, rounding=r) for r in ("down", "up"))
    chance = ((x - low) / (high - low)).nan_to_num(0)
    kind, up = Storage("stochastic", fmt="bfloat16"), torch.zeros(2, 500)
    for key in range(n):
        drawn = torch.stack([kind.round(x, fmt, key), theirs(x).float()])
        assert ((drawn == low) | (drawn == high)).all()
        up += drawn == high
    # five standard errors, and 2^-16 for bits that they do not draw
    allowed = 5 * (chance * (1 - chance) / n).sqrt() + 2.0**-16
    assert ((up / n - chance).abs() <= allowed).all()
