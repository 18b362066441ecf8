"""Whatever writes a weight on a grid writes it, rounded once, or is refused. One write is lost, and no test is of it:
that of a part which was taken while a gradient was recorded, and is written when none is."""
import copy
import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from geoopt import ManifoldParameter
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from altgrad.basics import InputError
from altgrad.geometry.keeping import pack, pack_bits, unpack
from altgrad.geometry.storage import (
    GridTensor, grid_storages, load_plain_state, make_grid_tensor, plain_state, store_on_grid,
)
from altgrad.model.surgery import quantize_model
from altgrad.numbers.formats import FORMATS, get_format

from cases import each

STORAGES = ("grid_nearest", "grid_stochastic", "grid_residual4", "grid_wide4", "bf16")
START = torch.tensor([[1.0, -2.0, 0.5, 4.0], [0.25, 3.0, -1.5, 448.0]])  # all of E4M3, and so are their halves


def weight(storage="grid_nearest"): return nn.Parameter(make_grid_tensor(START, "E4M3", storage))


def on_grid(model: nn.Module, fmt: str, storage: str = "grid_nearest") -> nn.Module:
    quantize_model(model, fmt)
    store_on_grid(model, storage)
    return model


@each("fmt", ["E2M5", "E0M7"])
@each("how", [{}, {"assign": True}])
def test_plain_weights_that_are_loaded_make_the_grid_anew(fmt, how):
    "Their scale is their own: one of weights that are 64 times larger would leave nothing of most."
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 32))
    with torch.no_grad(): plain[0].weight /= 64
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    other = on_grid(nn.Sequential(nn.Linear(32, 32)), fmt)
    other.load_state_dict(state, **how)
    first = on_grid(plain, fmt)
    assert isinstance(other[0].weight, GridTensor)
    assert torch.equal(other[0].weight.codes, first[0].weight.codes)
    assert torch.equal(other[0].weight.scale, first[0].weight.scale)
    with pytest.raises(InputError, match="0.weight: weights on a grid must be finite"):
        other.load_state_dict(state | {"0.weight": torch.full((32, 32), torch.nan)})


def test_weights_on_another_grid_bring_their_own_scale():
    "Written over weights that are 64 times larger, most of them would be zero, and no residual be read."
    torch.manual_seed(0)
    given, large = (on_grid(nn.Sequential(nn.Linear(32, 32)), fmt, kind)
                    for fmt, kind in (("E4M3", "grid_residual4"), ("E0M7", "grid_nearest")))
    with torch.no_grad(): large[0].weight.mul_(64.0)
    large.load_state_dict(given.state_dict())
    again = make_grid_tensor(given[0].weight.latent(), "E0M7", "grid_nearest")
    assert torch.equal(large[0].weight.dequantize(), again.dequantize())


def test_what_is_drawn_after_plain_weights_were_loaded_again_is_new():
    model = on_grid(nn.Sequential(nn.Linear(32, 32)), "E4M3", "grid_stochastic")
    plain, codes = {"0.weight": model[0].weight.dequantize(), "0.bias": model[0].bias.detach()}, []
    for _ in range(2):
        model.load_state_dict(plain)
        with torch.no_grad(): codes.append((model[0].weight + 0, model[0].weight.add_(1e-3).data.codes.clone()))
    (first, one), (second, other) = codes
    assert torch.equal(first, second) and not torch.equal(one, other)


def test_assigned_weights_keep_the_dtype_that_the_model_had():
    model = on_grid(nn.Sequential(nn.Linear(8, 8)).bfloat16(), "E4M3")
    plain = {"0.weight": model[0].weight.dequantize(), "0.bias": model[0].bias.detach()}
    model.load_state_dict(plain, assign=True)
    assert model[0].weight.data.made_from == torch.bfloat16


@each("fmt", ["float16", "E0M15", "E4M11"])
def test_sixteen_bits_in_blocks_are_written(fmt):
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    grid = make_grid_tensor(w, fmt, "grid_nearest", granularity=32)
    grid.mul_(100.0)
    # E0M15, the one fixed point: half a step of 2^-15 of a block's largest, below 2 x 100 x 4 x 2
    assert (grid.dequantize() - 100 * w).abs().max() < 1600 * 2.0**-10


@each("storage", ["grid_residual4", "grid_kahan", "bf16_kahan"])
def test_another_memory_format_changes_no_part_of_a_weight(storage):
    model = on_grid(nn.Sequential(nn.Conv2d(8, 8, 3)), "E4M3", storage)
    with torch.no_grad(): model[0].weight.mul_(0.3)
    before = {name: part.clone() for name, part in model[0].weight.data.parts().items()}
    model.to(memory_format=torch.channels_last)
    for name, part in model[0].weight.data.parts().items(): assert torch.equal(part, before[name]), name


def test_a_weight_that_was_not_contiguous_is_written():
    model = nn.Sequential(nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    w = on_grid(model, "E4M3", "grid_residual8")[0].weight
    with torch.no_grad(): w.mul_(1.0)
    assert torch.equal(w.latent(), w.data.contiguous().latent())


def test_two_layers_that_share_a_weight_share_its_codes():
    layers = [nn.Linear(8, 8) for _ in range(3)]
    layers[2].weight = layers[0].weight
    model = on_grid(nn.Sequential(*layers), "E4M3")
    assert model[0].weight is model[2].weight and model[0].weight is not model[1].weight
    model(torch.ones(1, 8)).sum().backward()
    assert len(list(model.parameters())) == 5 and model[2].weight.grad is not None


def test_a_shared_weight_is_plain_once_and_comes_back_in_both_layers():
    def made(seed):
        torch.manual_seed(seed)
        layers = [nn.Linear(8, 8, bias=False) for _ in range(2)]
        layers[1].weight = layers[0].weight
        return on_grid(nn.Sequential(*layers), "E4M3")
    state, other = plain_state(made(0)), made(1)
    assert sorted(state) == [f"0.weight.{part}" for part in ("codes", "rescales", "scale", "writes")]
    load_plain_state(other, state)
    assert torch.equal(other[1].weight.dequantize(), made(0)[1].weight.dequantize())


def test_in_inference_mode_it_is_read_as_elsewhere():
    model, x = on_grid(nn.Sequential(nn.Linear(8, 8)), "E4M3"), torch.ones(2, 8)
    with torch.no_grad(): want, row = model(x), model[0].weight[0] + 0
    with torch.inference_mode():
        assert torch.equal(model(x), want) and torch.equal(model[0].weight[0] + 0, row)
        state = model.state_dict()
    on_grid(nn.Sequential(nn.Linear(8, 8)), "E4M3").load_state_dict(state)
    model(x).sum().backward()
    assert model[0].weight.grad.shape == (8, 8)


def test_memory_is_shared_part_by_part_and_never_as_floats():
    model = on_grid(nn.Sequential(nn.Linear(8, 8)), "E4M3").share_memory()
    assert all(part.is_shared() for part in model[0].weight.data.parts().values())
    for take in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises(InputError, match="dequantize"): take(model[0].weight.detach())


WRITES = {  # each leaves values of E4M3, so that rounding changes none
    "mul_": lambda w: w.mul_(0.5),
    "zero_": lambda w: w.zero_(),
    "copy_": lambda w: w.copy_(START.flip(0)),
    "whole": lambda w: w.__setitem__(slice(None), 2.0),
    "mask": lambda w: w.__setitem__(START > 2, 1.0),
    "index": lambda w: w.__setitem__((torch.tensor([0, 1]), torch.tensor([3, 0])), torch.tensor([2.0, 8.0])),
    "data": lambda w: setattr(w, "data", START * 0.5),
    "foreach mul": lambda w: torch._foreach_mul_([w], 0.5),
    "foreach add": lambda w: torch._foreach_add_([w], [START]),
    "foreach copy": lambda w: torch._foreach_copy_([w], [START.flip(1)]),
    "foreach lerp": lambda w: torch._foreach_lerp_([w], [torch.zeros(2, 4)], 0.5),
    "foreach zero": lambda w: torch._foreach_zero_([w]),
    "foreach addcdiv": lambda w: torch._foreach_addcdiv_([w], [START], [torch.ones(2, 4)], 1.0),
    "two of a list": lambda w: torch._foreach_mul_([torch.ones(3), w], 0.5),
    "out": lambda w: torch.mul(w, 0.5, out=w),
    "out of others": lambda w: torch.add(START, START, out=w),
    "from its part": lambda w: w.copy_(w.flip(0)[:1]),
    "from its view": lambda w: w.copy_(w.view(4, 2).reshape(2, 4)),
    "out of a part": lambda w: torch.mul(weight()[:1], torch.ones(2, 1), out=w),
    "by its part": lambda w: w.mul_(w[:, :1].sign()),
    "foreach of parts": lambda w: torch._foreach_copy_([w], [w.chunk(2)[1].expand(2, 4)]),
    "eye_": lambda w: nn.init.eye_(w),
    "zeros_": lambda w: nn.init.zeros_(w),
    "vector": lambda w: vector_to_parameters(START.flip(1).flatten(), [w]),
}
PARTS = {
    "row": lambda w: w.__setitem__(0, 7.0),
    "element": lambda w: w.__setitem__((0, 1), 7.0),
    "rows": lambda w: w.__setitem__(slice(0, 1), 7.0),
    "view": lambda w: w.view(-1).mul_(0),
    "transposed": lambda w: w.T.mul_(0),
    "part": lambda w: w[0].mul_(0),
    "part of a part": lambda w: w[0][1:].zero_(),
    "chunk": lambda w: w.chunk(2)[0].zero_(),
    "unbind": lambda w: w.unbind(0)[1].fill_(1),
    "diagonal": lambda w: w.diagonal().fill_(1),
    "out": lambda w: torch.mul(w[0], 0, out=w[0]),
    "foreach": lambda w: torch._foreach_zero_([w[0]]),
    "orthogonal_": lambda w: nn.init.orthogonal_(w),
}


@pytest.mark.parametrize("storage", STORAGES)
@each("name", WRITES)
def test_a_write_is_made(name, storage):
    w, plain = weight(storage), START.clone()
    with torch.no_grad():
        WRITES[name](w)
        if name == "data": plain = START * 0.5
        else: WRITES[name](plain)
    assert type(w.data) is GridTensor
    # E4M3 ends at 448, and twice that is a power of two times a number of its own: the scale grew
    assert torch.equal(w.dequantize(), plain)


@pytest.mark.parametrize("storage", STORAGES)
@each("name", PARTS)
def test_a_part_is_not_written(name, storage):
    w = weight(storage)
    before = {key: part.clone() for key, part in w.data.parts().items()}
    with torch.no_grad(), pytest.raises(InputError, match="a part of a weight on a grid cannot be written"):
        PARTS[name](w)
    with pytest.raises((InputError, RuntimeError)): PARTS[name](w)  # autograd's own word
    with pytest.raises(InputError): PARTS[name](w.detach())
    assert all(torch.equal(part, before[key]) for key, part in w.data.parts().items())


@torch.no_grad()
def test_a_part_is_read_as_any_tensor():
    w = weight()
    part, here = w[0], START[0]
    assert torch.equal(part, here) and torch.equal(w.T, START.T) and torch.equal(w.view(-1)[3:], START.flatten()[3:])
    assert part.tolist() == here.tolist() and float(part[1]) == -2.0
    assert np.array_equal(part.numpy(), here.numpy()) and np.array_equal(np.asarray(part), here.numpy())
    with pytest.raises(ValueError, match="read-only"): part.numpy()[0] = 1
    assert f"{part[1]:.1f}" == "-2.0"
    for made in (part + 1, part.clone(), torch.cat([part, part]), copy.deepcopy(part), part.double(), part @ part):
        assert type(made) is torch.Tensor
    changed = part.clone()
    changed.zero_()
    assert torch.equal(w.dequantize(), START)
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    assert torch.equal(torch.load(file), here)


@each("storage", STORAGES)
def test_data_that_is_taken_and_put_back_is_what_it_was(storage):
    "As when an average of weights is evaluated in their place."
    w, other = weight(storage), weight(storage)
    kept, w.data = w.data, torch.zeros(2, 4)
    assert not w.dequantize().any()
    w.data = kept
    assert torch.equal(w.dequantize(), START)
    with torch.no_grad(): other.mul_(0.5)
    w.data, other.data = other.data, w.data
    assert torch.equal(w.dequantize(), START / 2) and torch.equal(other.dequantize(), START)


def test_a_weight_keeps_type_and_shape():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = weight()
    model = Plain()
    for change in (model.half, model.double, model.bfloat16):
        with pytest.raises(InputError, match="keeps its dtype"): change()
    with pytest.raises(InputError, match="keeps its shape"): model.w.data = torch.zeros(4)
    assert model.float().w.dtype == torch.float32 and torch.equal(model.w.dequantize(), START)


MODES = lambda: torch.device("cpu"), lambda: FlopCounterMode(display=False)


@pytest.mark.parametrize("storage", grid_storages())
@each("fmt, granularity", [("E4M3", "tensor"), ("E2M1", "tensor"), ("E5M2", 16)])
def test_what_is_not_finite_leaves_code_and_rest_as_they_were(storage, fmt, granularity):
    "Every bit; and what is finite beside it comes out as it does where all is."
    drawn = torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(32, 48, generator=drawn)
    wrong = torch.tensor([torch.nan, torch.inf, -torch.inf])
    a = make_grid_tensor(normal(), fmt, storage, granularity=granularity)
    for _ in range(3): a.add_(0.03 * normal())
    for _ in range(4):  # nothing is finite
        before = {name: part.clone() for name, part in a.parts().items() if name != "writes"}
        a.copy_(torch.full((32, 48), torch.nan))
        assert all(torch.equal(a.parts()[name], part) for name, part in before.items())
    b, old, scale = copy.deepcopy(a), a.latent(), a.scale.clone()
    lost = torch.rand(32, 48, generator=drawn) < 0.3
    given = old + 0.03 * normal()
    b.copy_(torch.where(lost, old, given))
    a.copy_(torch.where(lost, wrong[torch.arange(48) % 3], given))
    same, there = ~lost & (b.scale == scale), lost & (a.scale == scale)
    assert same.any() and there.any() and torch.equal(a.scale, b.scale)
    assert torch.equal(a.latent()[same], b.latent()[same]) and torch.equal(a.dequantize()[same], b.dequantize()[same])
    assert torch.equal(a.latent()[there], old[there])


@each("copied", [torch.clone, lambda w: w.detach().clone(), copy.deepcopy, nn.Parameter.clone])
def test_a_clone_counts_for_itself(copied):
    w = weight()
    with torch.no_grad():
        w.mul_(0.5)
        told = {name: w.how[name].clone() for name in ("counts", "nonfinite")}
        other = copied(w)
        assert all(torch.equal(other.how[name], value) for name, value in told.items())
        other.fill_(torch.nan)
        other.mul_(0.5)
    assert all(torch.equal(w.how[name], value) for name, value in told.items())
    assert other.how["nonfinite"] == 8 and other.how["counts"][0] == 24


def test_where_the_scale_grows_what_was_there_is_rounded_anew():
    w = make_grid_tensor(torch.tensor([1.0, 0.53, 0.25]), "E0M7", "grid_residual8")
    before = w.latent()
    w.copy_(torch.tensor([3.0, torch.nan, -torch.inf]))
    assert w.scale == 4 and (w.latent()[1:] - before[1:]).abs().max() <= 4 / 128 / 254
    assert (w.dequantize() / w.scale * 128).frac().eq(0).all()


@each("inside", MODES)
def test_what_is_wrong_is_seen_in_every_mode(inside):
    layer = nn.Linear(4, 2, bias=False)
    layer.weight = weight()
    state = plain_state(layer)
    state["weight.scale"] = torch.tensor(torch.nan)
    with inside():
        with pytest.raises(InputError, match="finite"): make_grid_tensor(START / 0, "E4M3", "grid_nearest")
        with pytest.raises(InputError, match="scale of weight"): load_plain_state(layer, state)
        with torch.no_grad(), pytest.raises(InputError, match="a part of"): layer.weight[0].zero_()
    assert torch.equal(layer.weight.dequantize(), START)


def test_what_is_not_finite_on_a_manifold_is_seen():
    model = nn.Sequential(nn.Linear(4, 2))
    quantize_model(model, "E4M3", skip=(), manifold=True)
    assert isinstance(model[0].weight, ManifoldParameter)
    with torch.no_grad(): model[0].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="finite"): store_on_grid(model, "grid_nearest")


def test_collectives_are_refused():
    "They say of none of their arguments that it is written."
    w = weight()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for given in (w.data, w.data[0]):
            for call in (lambda t: dist.broadcast(t, 0), dist.all_reduce, lambda t: dist.all_gather([t], t)):
                with pytest.raises(InputError, match="collectives"): call(given)
        dist.all_reduce(w.dequantize())
    finally: dist.destroy_process_group()
    assert torch.equal(w.dequantize(), START)


def test_copying_a_list_is_copying_each():
    "A weight of `without_master` begins anew, with a scale of its own, whoever copies into it."
    one, other = weight(), weight()
    for w in (one, other): w.data.how["afresh"] = True
    small = START * 2.0**-20
    with torch.no_grad():
        one.copy_(small)
        torch._foreach_copy_([other], [small])
    assert torch.equal(one.dequantize(), small) and torch.equal(other.dequantize(), small)


def test_the_average_of_a_model_moves():
    "The running average of weights on a grid follows them as that of plain ones does, within a spacing."
    def trained(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(8):
            with torch.no_grad(): model.weight.copy_(START * 2.0 ** -(step // 4))
            average.update_parameters(model)
        return average.module.weight
    def layer(w):
        model = nn.Linear(4, 2, bias=False)
        model.weight = w
        return model
    ours, plain = trained(layer(weight("grid_residual8"))), trained(layer(nn.Parameter(START.clone())))
    assert type(ours.data) is GridTensor
    # a residual of eight bits is 1/254 of a spacing, which is at most 1/8 of the weight; eight roundings
    assert torch.allclose(ours.dequantize(), plain.data, rtol=1 / 8, atol=0)
    assert not torch.equal(ours.dequantize(), START)


def test_data_of_another_shape_is_refused():
    with pytest.raises(InputError, match="keeps its shape"): weight().data = torch.ones(3)


@each("part, value", (("scale", 0.3), ("scale", float("nan")), ("codes", 127), ("writes", -1)))
def test_a_damaged_plain_state_is_refused_and_changes_nothing(part, value):
    def made():
        model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False))
        for layer in model: layer.weight = weight()
        return model
    model, other = made(), made()
    with torch.no_grad(): other[0].weight.zero_()
    state = plain_state(other)
    state[f"1.weight.{part}"] = torch.full_like(state[f"1.weight.{part}"], value)
    with pytest.raises(InputError, match="1.weight"): load_plain_state(model, state)
    assert torch.equal(model[0].weight.dequantize(), START)


@each("name", [n for n, f in FORMATS.items() if f.signed and f.has_zero and not f.twos_complement])
def test_a_zero_of_either_sign_has_a_code(name):
    "That of -0 where a format has one, else that of 0; all other values keep theirs."
    fmt = FORMATS[name]
    zeros = unpack(pack(torch.tensor([-0.0, 0.0]), fmt), fmt)
    assert zeros.tolist() == [0, 0] and zeros.signbit().tolist() == [fmt.code_minus_zero is not None, False]


@each("spec", ["E4M3b126", "E4M3b125", "E4M3b124", "E4M3b127", "E2M5b123", "E2M1b-20", "E4M3b-60"])
def test_every_value_has_its_code_under_any_bias(spec):
    "Where one over the smallest spacing is no float32 number, too."
    fmt = get_format(spec)
    codes = pack(fmt.values, fmt)
    assert torch.equal(codes.long(), fmt.to_bits(fmt.values).long())
    assert torch.equal(codes.long(), torch.arange(2**fmt.bits))


def test_zeros_stay_zeros_in_a_format_of_tiny_numbers():
    values = torch.tensor([0.0, 1.0, -1.0])
    assert torch.equal(make_grid_tensor(values, "E4M3b126", "grid_nearest").dequantize(), values)


@each("bits", [0, 3, 5, 6, 7, 16])
def test_bits_that_do_not_fill_a_byte_are_refused(bits):
    with pytest.raises(InputError, match="unknown number of bits"): pack_bits(torch.tensor([1], dtype=torch.int8), bits)
