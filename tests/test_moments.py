"""Moments in eight bits beside bitsandbytes and torchao: the same maps, codes and steps; and what
every rule, storage and checkpoint makes of them."""
import logging

import pytest
import torch

from altgrad.basics import InputError
from altgrad.geometry.rivals.moments import (
    MOMENTS, Dynamic, dynamic_map, with_moments
)

logging.disable(logging.WARNING)  # torchao tells which of its GPU libraries it cannot load
theirs = pytest.importorskip("torchao.optim.quant_utils")
adam = pytest.importorskip("torchao.optim.adam")
bnb = pytest.importorskip("bitsandbytes.functional")
logging.disable(logging.NOTSET)

PACKED = [name for name, kind in MOMENTS.items() if kind]


def blocks(signed: bool, size: int = 256) -> torch.Tensor:
    "Blocks whose magnitudes span many decades."
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, size, generator=generator)
    x = x * torch.exp(4 * torch.randn(1024, size, generator=generator))
    return x if signed else x.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_the_maps_are_those_of_bitsandbytes_and_torchao(signed):
    ours = dynamic_map(signed)
    assert torch.equal(ours, bnb.create_dynamic_map(signed))
    assert torch.equal(ours, torch.tensor(theirs.create_dynamic_map(signed)))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_torchao_but_in_the_middle_between_two(signed):
    x, values = blocks(signed), dynamic_map(signed)
    scaled, scale = theirs.scale_tensor(x, 256)
    codes = theirs.quantize_8bit_with_qmap(scaled, values)
    ours = Dynamic().pack(x, signed)
    assert torch.equal(ours["scale"].view(-1), scale)
    other = codes != ours["codes"]
    # it rounds up there, and bitsandbytes down
    below = ours["codes"].int()[other]
    assert torch.equal(codes[other].int(), below + 1)
    assert torch.equal(scaled[other], (values[below] + values[below + 1]) / 2)
    assert other.sum() <= 1
    back = theirs.dequant_with_qmap(ours["codes"], values, scale)
    assert torch.equal(Dynamic().unpack(ours, signed), back)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_bitsandbytes_whose_kernel_for_a_cpu_is_wrong_by_a_table_step(signed):
    x, values = blocks(signed), dynamic_map(signed)
    ours = Dynamic().pack(x, signed)
    # of float64 it compares all distances
    codes, scale = torch.ops.bitsandbytes.quantize_blockwise(x.double(), values, 256)
    assert torch.equal(codes, ours["codes"]) and torch.equal(scale, ours["scale"].view(-1))
    # of float32 it looks the code up in a table of 2^16 steps over [-1, 1]
    codes, state = bnb.quantize_blockwise(x, code=values, blocksize=256)
    def away(codes): return (values[codes.int()].double() - x.double() / ours["scale"]).abs()
    assert (away(codes) - away(ours["codes"]) <= 2**-15).all()
    back = bnb.dequantize_blockwise(ours["codes"], absmax=state.absmax, code=values, blocksize=256)
    assert torch.equal(Dynamic().unpack(ours, signed), back)


class TheirArithmetic(torch.optim.Optimizer):
    "AdamW as torchao computes a step, with its moments in float32."
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                adam.single_param_adam(
                    p.detach(), p.grad, state["step"], state["exp_avg"], state["exp_avg_sq"], None,
                    torch.tensor(group["lr"]), 0.9, 0.999, 1e-2, 1e-8, True, False,
                )


@pytest.mark.parametrize("moments, rival", [("dynamic8", "AdamW8bit"), ("e4m3", "AdamWFp8")])
def test_twenty_steps_are_those_of_torchao(moments, rival):
    # in these twenty steps no quotient lies in the middle between two values, where it rounds up
    generator = torch.Generator().manual_seed(3)
    start, x = torch.randn(64, 128, generator=generator), torch.randn(128, generator=generator)
    ours, its = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = with_moments(TheirArithmetic, moments)([ours], lr=0.01)
    other = getattr(adam, rival)([its], lr=0.01)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(20):
            losses = []
            for w, optimizer in ((ours, mine), (its, other)):
                w.grad = None
                loss = (w @ x).square().mean() + w.pow(4).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]
    assert torch.equal(ours, its) and losses[0] < 0.9 * (start @ x).square().mean()
    for name in ("exp_avg", "exp_avg_sq"):
        kept, its_state = mine.state[ours][name], other.state[its][name]
        assert torch.equal(kept["codes"], its_state.codes.view(torch.uint8))
        assert torch.equal(kept["scale"].view(-1), its_state.scale)
