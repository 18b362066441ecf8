"""Rivals beside their authors' own code, where that is installed but does not run on a CPU."""
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from altgrad.geometry.rivals.split import Split
from altgrad.numbers.formats import get_format

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
