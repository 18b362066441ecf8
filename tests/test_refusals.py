"""What formats, rounding, scales, models and files refuse: one line that says what is allowed, and
nothing changed before it."""
import json
import os
import random
import stat
import struct
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from altgrad.basics import (
    MESSAGE, InputError, make_folder, one_line, parse_yaml, unknown, write_atomic,
)
from altgrad.numbers.choosing import best_scale, profile_of, recommend_format
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.formats import FORMATS, FP8Format, get_format
from altgrad.numbers.kernels import rounding_key
from altgrad.numbers.quantize import dequantize, fake_quantize, quantize
from altgrad.numbers.scaling import (
    AmaxAverage, AmaxHistory, Scaling, amax_of, compute_scale, mx_scale, scale_of,
)
from altgrad.geometry.interchange import Codes, load_codes, load_model, model_codes, save_codes
from altgrad.geometry.layouts import export_weights
from altgrad.geometry.manifold import FP8Manifold
from altgrad.geometry.optim import GridSGD, RiemannianAdamW, StiffnessAdamW
from altgrad.geometry.storage import grid_storages, make_grid_tensor, store_on_grid
from altgrad.model.points import LayerPrecisionRule, Precision, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.cli import main
from altgrad.training import trainer
from altgrad.training.config import load_config, make_config
from altgrad.training.data import load_corpus
from altgrad.training.experiment import Comparison
from altgrad.training.tracking import RunFolder, StoredRun
from altgrad.training.trainer import Trainer
from altgrad.views import report, workspace
from altgrad.views.autopsy import autopsy
from altgrad.views.page import write_page
from altgrad.views.watch import rows_of
from altgrad.watching.monitors import Monitors

X = torch.tensor([1.0, 2.0, -3.0])
WIDE = torch.ones(2, 2)


def refused(call, *args, **kwargs):
    "What the one line of the InputError says."
    with pytest.raises(InputError) as caught: call(*args, **kwargs)
    message = str(caught.value)
    assert message == message.strip() and len(message.splitlines()) == 1 and len(message) <= 300
    return message


# messages


def test_a_message_is_one_short_line_whatever_it_tells():
    for text in ("a\nb", "x" * 10**6, "a\u2028b\rc", "", "x" * MESSAGE):
        assert len(str(InputError(text)).splitlines()) <= 1
        assert len(str(InputError(text))) <= MESSAGE
    assert str(InputError("as  it is")) == one_line("as  it is") == "as  it is"
    long = str(unknown("format", "E4M33" + "x" * 1000, ["E4M3"] * 500))
    assert long.startswith("unknown format 'E4M33xxx")
    assert long.endswith("E4M3, E4M3")
    assert len(long) == MESSAGE
    assert "did you mean" in refused(get_format, "E4M33")
    assert refused(get_format, "x").endswith("or a spec such as E4M3b8")


# formats


@pytest.mark.parametrize(("facts", "words"), [
    (("x", True, 3), "exponent_bits must be a whole number from 0 to 8, not True"),
    (("x", 4, False), "mantissa_bits must be a whole number"),
    (("x", 4, 3, True), "bias must be a whole number, not True"),
    (("x", 4, 3, 7.0), "bias must be a whole number, not 7.0"),
    (("", 4, 3), "name"), ((" ", 4, 3), "name"), ((None, 4, 3), "name"), ((7, 4, 3), "name"),
    (("x", 4, 3, 7, "none", 1), "signed must be True or False, not 1"),
    (("x", 4, 3, 7, "none", True, 0), "subnormals must be True or False, not 0"),
])
def test_facts_of_a_wrong_type(facts, words):
    assert words in refused(FP8Format, *facts)


@pytest.mark.parametrize("codes", [[1], 3, None, np.array([1]), WIDE.int().to_sparse()], ids=str)
def test_codes_that_are_no_tensor(codes):
    assert "dense tensor of integers" in refused(FORMATS["E4M3"].to_real, codes)


# rounding

NO_TENSOR = {
    "list": [1.0], "none": None, "float": 1.0, "numpy": np.ones(2, np.float32),
    "sparse": WIDE.to_sparse(), "csr": WIDE.to_sparse_csr(), "text": "x",
}
TAKERS = {
    "fake_quantize": lambda x: fake_quantize(x, "E4M3"),
    "quantize": lambda x: quantize(x, "E4M3"),
    "dequantize": dequantize,
    "quantize_stats": lambda x: quantize_stats(x, "E4M3"),
    "to_bits": FORMATS["E4M3"].to_bits,
    "ulp": FORMATS["E4M3"].ulp,
    "amax_of": amax_of,
    "compute_scale": lambda x: compute_scale(x, "E4M3"),
    "scale_of": lambda x: scale_of(x, "E4M3"),
    "Codes.of": lambda x: Codes.of(x, "E4M3"),
    "profile_of": profile_of,
    "best_scale": lambda x: best_scale(x, "E4M3"),
    "recommend_format": recommend_format,
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("kind", NO_TENSOR)
def test_what_is_no_dense_tensor(taker, kind):
    assert "takes a dense float tensor, not" in refused(TAKERS[taker], NO_TENSOR[kind])


SCALED = {
    "fake_quantize": fake_quantize,
    "quantize": quantize,
    "quantize_stats": quantize_stats,
    "dequantize": lambda x, fmt, scale: dequantize(x, scale),
}


@pytest.mark.parametrize("function", SCALED)
@pytest.mark.parametrize(
    "scale",
    [
        True, None, "1", 1j, [1.0], np.ones(1), torch.tensor(True), torch.tensor(1j),
        WIDE[0].to_sparse(),
    ],
    ids=str,
)
def test_a_scale_that_is_no_number(function, scale):
    assert "positive number or a dense tensor of them" in refused(
        SCALED[function], torch.ones(2), "E4M3", scale
    )


BAD_SCALES = [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("function", SCALED)
@pytest.mark.parametrize("bad", BAD_SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_scale_tensor_that_is_not_positive_and_finite(function, bad, dtype):
    x = torch.randn(8, 4).to(dtype)
    rows = torch.ones(8, 1, dtype=dtype)
    rows[5] = bad
    blocks = torch.ones(8, 4, dtype=dtype)
    blocks[7, 3] = bad
    for scale in (
        torch.tensor(bad, dtype=dtype), torch.tensor([bad], dtype=dtype), rows,
        rows.T[:, :4].clone(), blocks,
    ):
        if scale.isfinite().all() and (scale > 0).all(): continue
        assert "a scale must be positive and finite, not" in refused(
            SCALED[function], x, "E4M3", scale
        )


def test_a_scale_that_vanishes_in_the_type_that_computes():
    assert "positive and finite" in refused(
        fake_quantize, X, "E4M3", torch.tensor(1e-60, dtype=torch.float64)
    )
    assert (
        fake_quantize(
            torch.tensor([3e-60], dtype=torch.float64), "E4M3",
            torch.tensor(1e-60, dtype=torch.float64),
        ).item()
        == 3 * 1e-60
    )


def test_the_gradient_and_the_transforms_refuse_a_scale_too():
    zero, rows = torch.tensor(0.0), torch.tensor([[1.0], [0.0]])
    assert "positive and finite" in refused(fake_quantize, X.clone().requires_grad_(), "E4M3", zero)
    assert "positive and finite" in refused(
        torch.func.vmap(lambda x, s: fake_quantize(x, "E4M3", s)), torch.ones(2, 3), rows
    )
    assert "positive and finite" in refused(
        torch.func.grad(lambda x: fake_quantize(x, "E4M3", zero).sum()), X
    )
    operator = torch.compile(
        lambda x, s, k: fake_quantize(x, "E4M3", s, rounding="stochastic", key=k),
        backend="eager",
        fullgraph=True,
    )
    assert operator(X, torch.tensor(0.5), torch.tensor(3)).shape == X.shape
    assert "positive and finite" in refused(operator, X, torch.tensor(-1.0), torch.tensor(3))


@pytest.mark.parametrize(
    "key", [1.5, "a", True, [1], np.int64(3), 2**63, torch.tensor(1.0), torch.tensor([1])], ids=str
)
def test_a_key_of_a_wrong_type(key):
    assert "a key is an int of 64 bits or an int64 tensor of no dimensions" in refused(
        fake_quantize, X, "E4M3", rounding="stochastic", key=key
    )


@pytest.mark.parametrize("bits", [True, 0, 25, 8.0, "8", None])
def test_random_bits_of_a_wrong_type(bits):
    assert "random_bits must be a whole number from 1 to 24" in refused(
        fake_quantize, X, "E4M3", rounding="stochastic", key=1, random_bits=bits
    )


def test_every_kind_of_scale_and_key_that_was_right_is_still():
    expected = fake_quantize(X, "E4M3", 0.37)
    tensors = (
        torch.tensor(0.37), torch.tensor([0.37]), torch.full((3,), 0.37),
        torch.tensor(0.37, dtype=torch.float64),
    )
    for scale in (np.float32(0.37), np.float64(0.37), *tensors):
        assert torch.equal(fake_quantize(X, "E4M3", scale), expected), scale
    assert torch.equal(fake_quantize(X, "E4M3", torch.tensor(2)), fake_quantize(X, "E4M3", 2))
    least = torch.tensor(2.0**-149)  # the smallest positive float32
    assert torch.equal(fake_quantize(X * 0, "E4M3", least), X * 0)
    key = rounding_key(3)
    assert torch.equal(
        fake_quantize(X, "E4M3", rounding="stochastic", key=key),
        fake_quantize(X, "E4M3", rounding="stochastic", key=torch.tensor(key)),
    )


# scales


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: amax_of(X, True), "a block's length"),
        (lambda: mx_scale(X, "E2M1", block=True), "a block's length"),
        (lambda: AmaxHistory(True), "length must be"),
        (lambda: AmaxAverage("0.9"), "momentum must be"),
        (lambda: AmaxAverage(None), "momentum must be"),
        (lambda: Scaling("E4M3", margin=float("nan")), "margin must be"),
        (lambda: Scaling("E4M3", margin="1"), "margin must be"),
        (lambda: Scaling("E4M3", margin=1e9), "margin must be"),
        (lambda: Scaling("E4M3", margin=True), "margin must be"),
        (lambda: recommend_format(X, []), "at least one format"),
        (lambda: recommend_format(X, sample=0), "sample must be"),
        (lambda: recommend_format(X, sample=2.5), "sample must be"),
        (lambda: best_scale(X * 0, "E4M3"), "nonzero"),
    ],
)
def test_arguments_of_scales(call, words):
    assert words in refused(call)


def test_a_block_longer_than_the_row_is_the_row():
    x = torch.randn(4, 10)
    for block in (10, 11, 10**9, 10**30):
        assert torch.equal(scale_of(x, "E4M3", block), scale_of(x, "E4M3", "channel").expand(4, 10))
        assert torch.equal(mx_scale(x, "E2M1", block=block), mx_scale(x, "E2M1", block=10))


# models


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "E4M4b7u"])
def test_a_format_without_a_sign_is_no_point(name):
    model = nn.Sequential(nn.Linear(4, 4))
    before = dict(model.state_dict())
    rules = PrecisionConfig(default=name)
    for call in (
        lambda: quantize_model(model, name),
        lambda: Precision(name),
        lambda: quantize_model(model, config=rules),
    ):
        assert f"{get_format(name).name} has no sign" in refused(call)
    rule = [LayerPrecisionRule("0", "E4M3")]
    # untouched until here: it is quantized only now
    quantize_model(model, config=PrecisionConfig(rule))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool])
def test_weights_that_are_no_floats(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    assert "1 has weights of torch." in refused(quantize_model, model, "E4M3")
    assert type(model[0]) is nn.Linear
    quantize_model(model, "E4M3", skip="1")
    assert "dense float tensor" in refused(
        make_grid_tensor, torch.ones(2).to(dtype), "E4M3", "grid_nearest"
    )


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", None, True], ids=repr)
def test_a_seed_that_is_none(seed):
    model = nn.Sequential(nn.Linear(4, 4))
    assert "seed must be a whole number from 0 to 2^63 - 1" in refused(
        quantize_model, model, "E4M3", seed=seed
    )
    assert type(model[0]) is nn.Linear


# files


def a_model(seed=0, storage=None, fmt="E4M3"):
    "Two layers and a norm, in E4M3 or on its grid."
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    quantize_model(model, fmt)
    if storage: store_on_grid(model, storage)
    return model


def same_state(a, b):
    "Whether two states are equal in names, kinds and every bit."
    def said(value):
        if isinstance(value, Codes):
            return said(value.codes), said(value.scale), value.fmt, value.block
        return value.dtype, value.shape, value.detach().flatten().view(torch.uint8).tolist()
    return {name: said(value) for name, value in a.items()} == {
        name: said(value) for name, value in b.items()
    }


@pytest.fixture
def file(tmp_path):
    "A file with a model's codes."
    path = tmp_path / "model.safetensors"
    save_codes(a_model(), path, {"made by": "a test"})
    return path


def rewrite(path, change=None, tensors=None, keep_digest=False):
    """Writes a file again, after changes to its facts and tensors;
    without the SHA-256, which would find any of them."""
    with safe_open(path, "pt") as f: words = f.metadata()
    found, facts = load_file(path), json.loads(words["altgrad"])
    if not keep_digest: facts.pop("sha256")
    if tensors: tensors(found)
    told = change(facts) if change else facts
    save_file(
        found, path, {**words, "altgrad": told if isinstance(told, str) else json.dumps(told)}
    )


def put(key, value):
    "Sets an item at a path of keys, and returns the whole."
    def change(facts):
        at = facts
        for part in key[:-1]: at = at[part]
        at[key[-1]] = value
        return facts
    return change


def both(path):
    "What both readers say of a file, and that the model stays as it was."
    model = a_model(seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    messages = refused(load_codes, path), refused(load_model, model, path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert str(path)[:20] in messages[0]
    return messages[0]


def half(data): return data[: len(data) // 2]


@pytest.mark.parametrize(
    "damage",
    [
        half,
        lambda data: data[:-1],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: struct.pack("<Q", 2**63) + data[8:],
        lambda data: bytes(range(256)) * 8,
        lambda data: data[:40] + b"\xff" + data[41:],
        lambda data: data + b"x",
    ],
)
def test_a_damaged_file(file, damage):
    file.write_bytes(damage(file.read_bytes()))
    assert "not a whole safetensors file" in both(file)


def test_one_bit_that_fell_over(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "SHA-256" in both(file)


def test_a_path_that_is_no_file(tmp_path, file):
    assert "there is no such file" in both(tmp_path / "absent")
    assert "no path of a file" in both(tmp_path)
    for path in (None, 3, "a\0b", ""): assert "no path of a file" in refused(load_codes, path)
    with pytest.raises(InputError): load_codes("x" * 5000)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "", "cpu:x", -1, 2.5])
def test_a_device_that_is_not_here(file, device):
    assert repr(str(device)) in refused(load_codes, file, device)
    assert load_codes(file, torch.device("cpu")).keys() == load_codes(file).keys()


SPEC = FORMATS["E4M3"].spec
FACTS = asdict(FORMATS["E4M3"])
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        *(
            lambda facts, told=told: told
            for told in ("{", "[]", "null", "1", DEEP, "{}", "NaN", '"x"')
        ),
        lambda facts: {"weights": facts["weights"]},
        put(("formats",), {}),
        put(("formats",), []),
        put(("more",), 1),
        put(("weights",), ["0.weight"]),
        put(("sha256",), 1),
        put(("formats", SPEC, "z"), 1),
        put(("formats", SPEC), None),
        put(("formats", SPEC, "name"), None),
        put(("formats", SPEC, "signed"), 1),
        put(("formats", SPEC, "exponent_bits"), 10**400),
        put(("formats", SPEC, "bias"), 3),
        put(("formats", SPEC), asdict(FORMATS["E5M2"])),
        put(("formats", SPEC, "name"), "E5M2"),
        put(("formats", SPEC, "name"), "float8_e4m3"),
        put(("weights", "zz"), {"format": SPEC, "block": None}),
        put(("weights", "0.weight", "format"), "E4M3"),
        put(("weights", "0.weight", "format"), ["E4M3"]),
        *(
            put(("weights", "0.weight", "block"), block)
            for block in (0, -3, "4", True, 4.0, 10**9, 4)
        ),
        put(("weights", "0.weight"), {"format": SPEC}),
        put(("weights", "0.weight_scale"), {"format": SPEC, "block": None}),
        put(("weights", "1.weight"), {"format": SPEC, "block": None}),
    ],
)
def test_facts_that_are_wrong(file, change):
    rewrite(file, change)
    both(file)


def replaced(name, make):
    def change(tensors): tensors[name] = make(tensors[name])
    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("0.weight_scale"),
        lambda tensors: tensors.pop("0.weight"),
        *(
            replaced("0.weight_scale", lambda s, bad=bad: torch.full_like(s, bad))
            for bad in BAD_SCALES
        ),
        *(
            replaced("0.weight_scale", lambda s, shape=shape: torch.ones(shape))
            for shape in (7, (16, 8, 1), (2, 16, 8))
        ),
        *(
            replaced("0.weight_scale", lambda s, dtype=dtype: s.to(dtype))
            for dtype in (torch.int32, torch.bool, torch.complex64)
        ),
        *(
            replaced("0.weight", lambda c, dtype=dtype: c.float().to(dtype))
            for dtype in (torch.float32, torch.float8_e5m2, torch.bfloat16, torch.int64)
        ),
        replaced("0.weight", lambda c: c.view(torch.uint8)),
    ],
)
def test_tensors_that_are_wrong(file, change):
    rewrite(file, tensors=change)
    both(file)


def test_codes_beyond_the_format(tmp_path):
    path = tmp_path / "codes.safetensors"
    save_codes({"w": Codes.of(torch.ones(4), "E2M1")}, path)
    rewrite(path, tensors=replaced("w", lambda c: c + 16))
    assert "codes of float4_e2m1fn lie between 0 and 15" in refused(load_codes, path)


def test_a_file_without_facts_or_digest(file):
    rewrite(file)
    # others may write a file without a digest
    assert same_state(load_codes(file), model_codes(a_model()))
    save_file({"x": torch.ones(2)}, file)
    assert "no key 'altgrad'" in both(file)


@pytest.mark.parametrize(
    "change",
    [
        replaced("0.bias", lambda b: b[:3]),
        replaced("0.bias", lambda b: b.to(torch.int32)),
        replaced("0.bias", lambda b: b.to(torch.complex64)),
        lambda tensors: tensors.pop("2.bias"),
        lambda tensors: tensors.update(other=torch.ones(1)),
        replaced("2.weight", lambda w: w[:, :3].clone()),
        replaced("1.weight", lambda w: w[None]),
    ],
)
@pytest.mark.parametrize("storage", [None, "grid_nearest", "grid_residual4"])
def test_a_file_that_does_not_fit_leaves_the_model_untouched(tmp_path, change, storage):
    path, model = tmp_path / "model.safetensors", a_model(seed=1, storage=storage)
    save_codes(a_model(storage=storage), path)
    rewrite(path, tensors=change)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "does not fit the model" in refused(load_model, model, path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "wrong",
    [
        {"0.weight": Codes.of(torch.ones(16, 8), "E5M2")},
        {"0.weight": torch.ones(16, 8)},
        {"0.weight": Codes.of(torch.ones(16, 8), "E4M3", "channel")},
        {
            "0.weight": Codes(
                Codes.of(torch.ones(16, 8), "E4M3").codes, torch.tensor(0.3), FORMATS["E4M3"]
            )
        },
    ],
)
def test_a_grid_takes_its_own_codes_only(tmp_path, wrong):
    path, model = tmp_path / "model.safetensors", a_model(seed=1, storage="grid_nearest")
    save_codes({**model_codes(a_model(storage="grid_nearest")), **wrong}, path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert "E4M3 codes with one scale that is a power of two" in refused(load_model, model, path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# writing


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (3, "takes a model"),
        ([("w", X)], "takes a model"),
        ({3: X}, "name is a text"),
        ({"__metadata__": X}, "name is a text"),
        ({"\ud800": X}, "Unicode"),
        *(
            ({"w": wrong}, "dense tensors")
            for wrong in (3, None, WIDE.to_sparse(), X.to(torch.complex128))
        ),
        ({"w": X.to("meta")}, "without data"),
        ({"w": Codes.of(X, "E4M3"), "w_scale": X}, "two tensors"),
        ({"w": Codes.of(X, FP8Format("E5M2", 4, 3, 7))}, "E5M2"),
    ],
    ids=str,
)
def test_what_a_file_cannot_hold(file, what, words):
    before = file.read_bytes()
    assert words in refused(save_codes, what, file)
    assert file.read_bytes() == before and [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"altgrad": "x"}, ["a"], {"a": None}], ids=str)
def test_metadata_that_is_no_text(tmp_path, metadata):
    assert "metadata" in refused(save_codes, {"w": X}, tmp_path / "file", metadata)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path):
    assert "no path of a file" in refused(save_codes, {"w": X}, tmp_path)
    assert "no path of a file" in refused(save_codes, {"w": X}, "")
    assert "cannot write" in refused(save_codes, {"w": X}, tmp_path / "absent" / "file")
    assert "no path of a file" in refused(save_codes, {"w": X}, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    [
        lambda c, s, f: Codes(c.float(), s, f),
        lambda c, s, f: Codes(c, s * 0, f),
        lambda c, s, f: Codes(c, s, "E4M3"),
        lambda c, s, f: Codes(c, s, f, 0),
        lambda c, s, f: Codes(c, torch.ones(2), f, 3),
        lambda c, s, f: Codes(c, 1.0, f),
        lambda c, s, f: Codes([1], s, f),
        lambda c, s, f: Codes(c.view(torch.uint8), s, f),
        lambda c, s, f: Codes(torch.ones(2, dtype=torch.int32), s, FORMATS["E2M5"]),
    ],
)
def test_codes_are_checked_when_they_are_made(make):
    good = Codes.of(torch.ones(8), "E4M3")
    refused(make, good.codes, good.scale, FORMATS["E4M3"])


def test_codes_of_float64_are_rounded_once():
    "Beside the middle of two values, nearer to the upper one than float32 can say."
    x = torch.tensor([1.0625 + 1e-12, 1.0625, 256.0], dtype=torch.float64)
    assert Codes.of(x, "E4M3").dequantize().tolist() == [1.125, 1.0, 256.0]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        y = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
        one, other = Codes.of(y, "E4M3"), Codes.of(y.double(), "E4M3")
        assert torch.equal(one.bits(), other.bits()) and torch.equal(one.scale, other.scale)


def test_a_grid_tensor_by_name_is_written_as_codes(tmp_path):
    grid = make_grid_tensor(
        torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), "E2M5", "grid_nearest"
    )
    save_codes({"w": grid}, tmp_path / "file")
    assert torch.equal(load_codes(tmp_path / "file")["w"].dequantize(), grid.dequantize())


# weights and the geometry


def layers(*weights):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in weights))
    for layer, w in zip(model, weights): nn.init.constant_(layer.weight, w)
    return model


@pytest.mark.parametrize("storage", grid_storages())
@pytest.mark.parametrize("wrong", (float("nan"), float("inf"), -float("inf")))
def test_what_is_not_finite_is_no_weight_on_a_grid(storage, wrong):
    w = torch.ones(3, 4, dtype=torch.float64)
    w[1, 2] = wrong
    assert "1 of 12 are not" in refused(make_grid_tensor, w, "E4M3", storage)
    model = layers(1.0, wrong)
    quantize_model(model, "E4M3", skip=())
    assert refused(store_on_grid, model, storage).startswith("1.weight: weights on a grid must be finite")
    assert all(type(p.data) is torch.Tensor for p in model.parameters())  # the first layer's, too
    assert "empty" in refused(make_grid_tensor, torch.ones(0, 4), "E4M3", storage)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.signed])
def test_weights_have_a_sign(name):
    w = nn.Parameter(torch.ones(3))
    for call in (
        lambda: make_grid_tensor(w, name, "grid_nearest"),
        lambda: FP8Manifold(name),
        lambda: StiffnessAdamW([w], fmt=name, lr=0.1, floor_octaves=8),
    ):
        assert "has no sign" in refused(call)


@pytest.mark.parametrize("scale", (0.0, -1.0, float("nan"), float("inf"), "1", None, True,
                                   torch.ones(2, dtype=torch.int32), torch.ones(0)))
def test_a_scale_is_positive_and_finite(scale):
    assert "scale must be" in refused(FP8Manifold, "E4M3", scale=scale)


@pytest.mark.parametrize("scale", (1e-50, 1e300))
def test_a_scale_of_float64_is_for_points_of_float64(scale):
    m, x = FP8Manifold("E4M3", scale=scale), torch.ones(3) * 0.5
    assert "float32 does not hold the scale" in refused(m.stiffness, x)
    assert "float32 does not hold the scale" in refused(m.projx, x)
    wide = x.double() * scale
    assert torch.equal(m.stiffness(wide), FP8Manifold("E4M3").stiffness(x).double() * scale)


@pytest.mark.parametrize("manifold, words", (
    (None, "manifold must be"), (1, "manifold must be"), ("yes", "manifold must be"),
    ({"scale": torch.ones(3)}, "does not broadcast"), ({"scale": torch.ones(1, 1, 1)}, "does not broadcast"),
    ({"scale": 1e-50}, "float32 does not hold the scale"), ({"octaves": 3}, "manifold option"),
))
def test_options_of_a_manifold(manifold, words):
    model = layers(1.0)
    assert words in refused(quantize_model, model, "E4M3", skip=(), manifold=manifold)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("rule, wrong", (
    (GridSGD, {"seed": 1.5}), (GridSGD, {"seed": True}), (StiffnessAdamW, {"betas": 0.9}),
    (StiffnessAdamW, {"compiled": "no"}), (StiffnessAdamW, {"normalize": 1}),
    (StiffnessAdamW, {"skip_nonfinite": "no"}), (StiffnessAdamW, {"damping": "1"}),
    (StiffnessAdamW, {"lr": True}), (StiffnessAdamW, {"floor_octaves": "8"}),
    (RiemannianAdamW, {"floor_octaves": float("nan")}),
))
def test_settings_of_a_rule_are_of_their_kind(rule, wrong):
    w = nn.Parameter(torch.ones(3))
    assert next(iter(wrong)) in refused(rule, [w], **{"fmt": "E4M3", "lr": 0.1, **wrong})


@pytest.mark.parametrize("wrong", ({"seed": 1.5}, {"seed": -1}, {"tensor": 0.5}, {"tensor": 2**32}))
def test_settings_of_a_grid_are_of_their_kind(wrong):
    assert next(iter(wrong)) in refused(make_grid_tensor, X, "E4M3", "grid_stochastic", **wrong)


def test_the_last_tensor_draws_as_no_other():
    w = torch.full((1000,), 1.03)
    grids = [make_grid_tensor(w, "E4M3", "grid_stochastic", tensor=n) for n in (0, 1, 2**32 - 1)]
    for grid in grids: grid.add_(0.01)
    codes = [grid.codes.tolist() for grid in grids]
    assert codes[0] != codes[1] != codes[2] != codes[0]


@pytest.mark.parametrize("wrong", (
    {"every": 2.5}, {"every": float("nan")}, {"histogram_every": 0}, {"health_every": True}, {"optimizers": ["a"]},
))
def test_settings_of_monitors_are_of_their_kind(wrong):
    assert next(iter(wrong)) in refused(Monitors, layers(1.0), **wrong)


# what a file or a tensor holds, and its reader does not


def test_values_beyond_a_models_type_are_not_loaded(tmp_path):
    model = layers(1.0)
    quantize_model(model, "E4M3", skip=())
    model[0].bias.data.fill_(1e6)
    save_codes(model, tmp_path / "x")
    half = layers(0.5).half()
    assert "0.bias: 4 of 4 values lie beyond" in refused(load_model, half, tmp_path / "x")
    assert half[0].weight.eq(0.5).all()
    model[0].bias.data.fill_(1e4)
    save_codes(model, tmp_path / "x")
    load_model(half, tmp_path / "x")
    assert half[0].bias.eq(1e4).all()


def test_tied_weights_take_one_value(tmp_path):
    def tied():
        model = layers(1.0, 1.0)
        model[1].weight = model[0].weight
        return model
    def file_of(*weights):
        quantize_model(model := layers(*weights), "E4M3", skip=())
        save_codes(model, tmp_path / "x")
    file_of(1.0, 2.0)
    assert "0.weight and 1.weight are one tensor" in refused(load_model, model := tied(), tmp_path / "x")
    assert model[0].weight.eq(1.0).all()
    file_of(2.0, 2.0)
    load_model(model, tmp_path / "x")
    assert model[1].weight.eq(2.0).all()


@pytest.mark.parametrize("size", (1e-100, 1e100, 1e-310))
def test_a_format_is_chosen_for_magnitudes_of_float32(size):
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * size
    for call in (recommend_format, profile_of, lambda x: best_scale(x, "E4M3")):
        assert "float32 holds" in refused(call, x)


def test_noise_of_half_precision_is_measured_in_float32():
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 2e-6).half()
    assert best_scale(x, "E4M3") == best_scale(x.float(), "E4M3")


@pytest.mark.parametrize("name", ("model.safetensors", "config.json"))
def test_an_export_writes_both_files_or_none(tmp_path, name):
    model = layers(1.0)
    quantize_model(model, "E4M3", skip=())
    (tmp_path / name).mkdir()
    assert "directory" in refused(export_weights, model, tmp_path, "fp8").lower()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert "unknown layout" in refused(export_weights, model, tmp_path / "out", ["fp8"])


# files, by chance: 2,000 changes that no list above thought of


def mutated(data, rng):
    "A file's bytes after a random change to header, body, length, or the words of the header."
    size = struct.unpack("<Q", data[:8])[0]
    kind, out = rng.randrange(7), bytearray(data)
    if kind == 0: out[rng.randrange(8, 8 + size)] = rng.randrange(256)
    elif kind == 1: out[rng.randrange(8 + size, len(out))] ^= 1 << rng.randrange(8)
    elif kind == 2: del out[rng.randrange(len(out)) :]
    elif kind == 3: out[rng.randrange(8)] ^= 1 << rng.randrange(8)
    elif kind == 4:
        at = rng.randrange(8, len(out))
        out[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
    else:  # the header stays JSON, as long as it says: another digit, letter or bracket in the same place
        places = [i for i in range(8, 8 + size) if chr(out[i]) in '0123456789{}[],:"truefalsnEMb']
        for _ in range(rng.randrange(1, 4)):
            out[rng.choice(places)] = ord(rng.choice('0123456789{}[],:"truefalsnEMb-'))
    return bytes(out)


def test_2000_damaged_files_are_refused_or_the_same(tmp_path):
    rng, path = random.Random(18), tmp_path / "file"
    model = a_model()
    state = {
        **model_codes(model),
        "few": Codes.of(torch.ones(3), "E2M1"),
        "blocks": Codes.of(torch.randn(2, 10), "E5M2", 4),
        "count": torch.tensor(3),
    }
    save_codes(state, path, {"made by": "a test"})
    whole, refusals = path.read_bytes(), 0
    for _ in range(2000):
        path.write_bytes(mutated(whole, rng))
        try: found = load_codes(path)
        except InputError as e:
            refusals += 1
            assert len(str(e).splitlines()) == 1 and len(str(e)) <= MESSAGE
        else: assert same_state(found, state)
    assert refusals > 1500


# run folders


def test_a_line_of_metrics_that_is_too_deep_to_read_is_damage(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics_file.write_bytes(b'{"step": 1}\n' + b"[" * 100_000 + b"\n")
    assert run.whole_steps() == 1
    assert "damaged in line 2" in refused(run.metrics)


@pytest.mark.parametrize(("row", "words"), [
    ({"loss": 1.0}, "step must be a whole number, not None"), ({"step": "2"}, "step must be"),
    ({"step": 2, "loss": "low"}, "loss cannot be 'low'"), ({"step": 2, "lr": [1.0]}, "lr cannot be"),
    ({"step": 2, "events": ["x"]}, "events cannot be"),
])
def test_a_line_of_metrics_that_is_no_step_is_named(tmp_path, row, words):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    good = {"step": 1, "loss": None, "lr": 1e-3, "nonfinite": ["loss"], "events": [{"kind": "nonfinite"}]}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    assert f"{tmp_path / 'metrics.jsonl'} is damaged in line 2: {words}" in refused(rows_of, StoredRun(tmp_path))
    assert main(["watch", str(tmp_path), "--once"]) == 2
    (tmp_path / "metrics.jsonl").write_text(json.dumps(good) + "\n")
    assert rows_of(StoredRun(tmp_path)) == [good] and main(["watch", str(tmp_path), "--once"]) == 0


@pytest.mark.parametrize("name", [
    "checkpoints/manifest.json", "checkpoints/step-00000004.pt", "series/parts.json", "series/values-00000002.parquet",
])
def test_a_folder_where_a_run_has_a_file(tmp_path, name):
    run = RunFolder(tmp_path / "r")
    run.create("name: r\n")
    (run.path / name).mkdir(parents=True)
    assert f"{name} is a folder" in refused(run.check, {"name": "r"})


# files, configs and folders of runs


def test_a_pipe_stays_a_pipe_and_a_link_a_link(tmp_path):
    pipe, target, link, lost = (tmp_path / name for name in ("pipe", "target", "link", "lost"))
    os.mkfifo(pipe)
    assert "it is not a file" in refused(write_atomic, pipe, "new") and stat.S_ISFIFO(pipe.stat().st_mode)
    target.write_text("old")
    link.symlink_to("target")
    lost.symlink_to("later")
    for place in (link, lost): write_atomic(place, "new")
    assert target.read_text() == (tmp_path / "later").read_text() == "new"
    assert link.is_symlink() and lost.is_symlink() and len(list(tmp_path.iterdir())) == 5


def test_a_wrong_place_is_the_requests_fault_and_no_failing_disk(tmp_path):
    (tmp_path / "file").write_text("")
    for call in (lambda: write_atomic(tmp_path / "absent/x", ""), lambda: make_folder(tmp_path / "file"),
                 lambda: make_folder(tmp_path / "file/x")):
        with pytest.raises(InputError) as caught: call()
        assert type(caught.value) is InputError  # a WriteError ends a command with 1


@pytest.mark.parametrize("number", ("010", "-07", "1:30", "1:30.5", "0_7", "!!int 010"))
def test_a_number_that_yaml_reads_otherwise_than_people(number):
    assert "is no decimal number" in refused(parse_yaml, f"seed: {number}", "it")
    assert parse_yaml(f"seed: '{number}'", "it") == {"seed": number}


def test_numbers_that_all_read_alike():
    assert parse_yaml("[0, 10, -3, 0.5, 1e3, 1_000, 0x1F, 2001-01-01]", "it")[:3] == [0, 10, -3]


def test_a_format_has_one_name_in_a_config_however_it_is_typed():
    c = make_config({"format": "BFLOAT16", "activation": "e4m3  delayed", "gradient": "float8_e5m2 stochastic"})
    assert (c.format, c.activation, c.gradient) == ("bfloat16", "E4M3 delayed", "E5M2 stochastic")
    assert make_config({"format": "e4m3"}) == make_config({"format": "E4M3"}) == make_config({"format": "E4M3b7fn"})
    assert make_config({"format": None}).format is None


def test_a_head_that_no_setting_could_put_on_a_grid():
    assert "head needs the storage master" in refused(
        make_config, {"format": "E4M3", "storage": "grid_nearest", "head": "E4M3"})
    assert make_config({"format": "E4M3", "head": "E4M3"}).head == "E4M3"


@pytest.fixture
def trained(tmp_path):
    "A function that makes a run of two updates."
    for name in ("a", "b"): (tmp_path / f"{name}.txt").write_text(f"{name} line of text.\n" * 300)

    def train(name, corpus=None, **changes):
        small = dict(max_steps=2, batch_size=2, block_size=8, eval_windows=2, warmup_steps=1, device="cpu")
        config = make_config({"name": name, **small, "data": f"path:{tmp_path / 'a.txt'}", **changes})
        made = Trainer(config, tmp_path / "runs", corpus)
        made.run(progress=False)
        return made.folder

    return train


def test_a_run_trains_on_the_text_of_its_config(tmp_path, trained):
    other = load_corpus(f"path:{tmp_path / 'b.txt'}")
    assert "b.txt', and the config" in refused(trained, "run", other)
    assert "the corpus has tokenizer 'bytes'" in refused(
        trained, "run", other, data=other.name, tokenizer="bpe-300")
    mine = replace(other, name="mine")  # a text in memory has the name that the config gives it
    assert trained("run", mine, data="mine").record()["corpus"]["name"] == "mine"


def test_what_goes_on_elsewhere_says_so_and_keeps_what_made_the_steps_before(trained, monkeypatch, capsys):
    first = trained("run", checkpoint_every=1)
    whole, made = first.metrics(), first.record()
    def interrupt():
        first.write_record({**first.record(), "exit_reason": "interrupted"})
        capsys.readouterr()
    interrupt()
    assert "earlier" not in trained("run", checkpoint_every=1).record() and not capsys.readouterr().err
    for number, torch_there in enumerate(("0.1", "0.2"), 1):
        interrupt()
        monkeypatch.setattr(trainer, "versions", lambda there=torch_there: {**made["versions"], "torch": there})
        record = trained("run", checkpoint_every=1).record()
        assert len(record["earlier"]) == number and record["versions"]["torch"] == torch_there
        told = capsys.readouterr().err
        assert told.count("goes on where other software") == 1 and f"is {torch_there}" in told
    assert record["earlier"][0] == {"steps": 2, **{key: made[key] for key in ("versions", "machine", "git_commit")}}
    assert first.metrics() == whole and record["results"] == made["results"]


def test_a_checkout_that_changes_during_a_run_made_none_of_its_steps(trained, monkeypatch, capsys):
    commits = iter("abcdef")  # another one at every look
    monkeypatch.setattr(trainer, "git_commit", lambda: next(commits) * 40)
    record = trained("moving").record()
    assert record["git_commit"] == "a" * 40 and "earlier" not in record
    assert "goes on where" not in capsys.readouterr().err


def test_a_warm_up_that_does_not_end_is_told(trained, tmp_path, capsys):
    config = load_config(trained("short").path / "config.yaml")
    for name, warmup in (("long", 3), ("all", 2)):
        Trainer(replace(config, name=name, warmup_steps=warmup), tmp_path / "runs").run()
        assert ("warmup_steps 3 is above max_steps 2" in capsys.readouterr().err) == (warmup > 2)


def test_a_twin_differs_in_format_storage_and_rule_alone_and_ended_well(trained):
    trained("fast", format="bfloat16", lr=1e-2)
    stopped = trained("stopped", format="bfloat16")
    stopped.write_record({**stopped.record(), "exit_reason": "interrupted"})
    run = trained("run", format="E4M3", storage="grid_nearest", eval_every=1)
    assert autopsy(run.path).twin_name == ""
    trained("twin", format="bfloat16")
    assert autopsy(run.path).twin_name == "twin"


FOREIGN = ('{"epoch": 1}', '{"step": 1, "events": 3}', '{"step": 1, "events": [3]}', '{"step": "1"}',
           '{"step": 1, "loss": "low"}', '{"step": 1, "events": [{"kind": [1]}]}')


@pytest.mark.parametrize("line", FOREIGN)
def test_a_log_that_no_run_wrote(tmp_path, capsys, line):
    for name, text in (("bad", line), ("good", '{"step": 1, "loss": 2.0}')):
        run = RunFolder(tmp_path / name)
        run.create(f"name: {name}\nmax_steps: 1\n")
        run.metrics_file.write_text(f"{text}\n")
    for look in (autopsy, write_page):
        assert "damaged in line 1" in refused(look, tmp_path / "bad")
        look(tmp_path / "good")
    write_page(tmp_path)
    write_page(tmp_path)
    assert capsys.readouterr().err.count("passed over") == 1
    assert "good" in (tmp_path / "watch.html").read_text()


def test_a_damaged_neighbour_is_passed_over(tmp_path, trained, capsys):
    run = trained("run", format="E4M3")
    bad = run.path.parent / "bad"
    bad.mkdir()
    (bad / "config.yaml").write_text("lr: [")
    assert autopsy(run.path).twin_name == "" and capsys.readouterr().err.count("passed over") == 1
    write_page(run.path.parent)
    assert "passed over" in capsys.readouterr().err
    assert "not valid YAML" in refused(write_page, bad)


@pytest.mark.parametrize("text", ("", "[]", "{}", '{"arms": 1, "unigram_entropy": 1, "bigram_entropy": 1}',
                                  '{"arms": [], "unigram_entropy": 1, "bigram_entropy": 1}',
                                  '{"arms": [{}], "unigram_entropy": 1, "bigram_entropy": 1}'))
def test_a_comparison_that_is_damaged(tmp_path, text):
    (tmp_path / "comparison.json").write_text(text)
    assert "comparison.json is damaged" in refused(Comparison.load, tmp_path / "comparison.json")
    assert "No such file" in refused(Comparison.load, tmp_path / "absent.json")


def test_a_loss_without_a_perplexity_is_still_json():
    arm = {"config": {"name": "a", "format": "E4M3", "seed": 0},
           "record": {"exit_reason": "finished", "results": {"val_loss": 800.0}}}
    row = Comparison([arm], 1.0, 1.0).rows()[0]
    assert json.loads(json.dumps(row, allow_nan=False))["val_perplexity"] is None and row["val_loss"] == 800.0


def test_two_places_of_wandb_have_lists_of_their_own(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(workspace, "read_rows", lambda ledger: [{"run": "a"}, {"run": "b"}])
    monkeypatch.setattr(workspace, "_send_row", lambda row, **how: sent.append((how["entity"], row["run"])))
    for place, new in (("a-b/c", 2), ("a/b-c", 2), ("a-b/c", 0)):
        assert workspace.send_ledger("ledger", place, tmp_path, "offline") == new
    assert sent == [("a-b", "a"), ("a-b", "b"), ("a", "a"), ("a", "b")]


@pytest.mark.parametrize("fmt, codes", (("E4M3", "256 codes"), ("E2M3", "64 codes"), ("E2M1", "16 codes"),
                                        ("bfloat16", "256 top bytes")))
def test_codes_are_counted_among_those_of_the_format(fmt, codes):
    from matplotlib.figure import Figure

    arm = {"config": {"name": "a", "format": fmt}, "record": {"bit_histogram": [5, 3] + [0] * 254}}
    ax = Figure().subplots()
    report._plot_histogram(ax, arm, {"color": "gray"})
    assert ax.get_title().endswith(f"2 of {codes} used")


@pytest.mark.parametrize("rules, codes, said", (
    ("blocks.0.*: weight=E2M3; blocks.1.*: gradient=E5M2", "64 codes", "ordered by value"),
    ("blocks.0.*: weight=E2M3; blocks.1.*: weight=E4M3", "256 codes", "several formats"),
))
def test_codes_of_a_run_without_a_format_are_those_of_its_rules(rules, codes, said):
    from matplotlib.figure import Figure

    counts = [5] + [0] * 254 + [3]
    arm = {"config": {"name": "a", "format": None, "rules": rules}, "record": {"bit_histogram": counts}}
    ax = Figure().subplots()
    report._plot_histogram(ax, arm, {"color": "gray"})
    assert ax.get_title().endswith(f"2 of {codes} used") and said in ax.get_xlabel()
    # the last code is the negative one farthest from zero: first by value, last in order
    ends = [bar.get_height() for bar in ax.patches]
    assert (ends[0], ends[-1]) == ((3, 0) if said == "ordered by value" else (5, 3))
