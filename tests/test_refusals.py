"""What is refused: in one line that says what is allowed, and with nothing changed before it."""
import json
import os
import random
import stat
import struct
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from altgrad.basics import (
    MESSAGE, InputError, make_folder, one_line, parse_yaml, unknown, write_atomic,
)
from altgrad.cli import main
from altgrad.evidence.instrument import Arm, Task, make_rule
from altgrad.evidence.replicas import kind_of
from altgrad.geometry import optim
from altgrad.geometry.interchange import Codes, load_codes, load_model, model_codes, save_codes
from altgrad.geometry.layouts import export_weights
from altgrad.geometry.manifold import FP8Manifold
from altgrad.geometry.optim import GridSGD, RiemannianAdamW, StiffnessAdamW
from altgrad.geometry.storage import grid_storages, make_grid_tensor, store_on_grid
from altgrad.model.gpt import PRESETS, GPTConfig
from altgrad.model.points import Precision, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.numbers.choosing import best_scale, profile_of, recommend_format
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.formats import FORMATS, FP8Format
from altgrad.numbers.kernels import rounding_key
from altgrad.numbers.quantize import dequantize, fake_quantize, quantize
from altgrad.numbers.scaling import (
    AmaxAverage, AmaxHistory, Scaling, amax_of, compute_scale, mx_scale, scale_of,
)
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

NAN, INF = float("nan"), float("inf")
X, WIDE, W = torch.tensor([1.0, 2.0, -3.0]), torch.ones(2, 2), nn.Parameter(torch.ones(3))
NOISE = torch.linspace(-1, 1, 1000, dtype=torch.float64)
E4M3, FEW = FORMATS["E4M3"], Codes.of(torch.ones(8), "E4M3")
UNSIGNED = [name for name, fmt in FORMATS.items() if not fmt.signed]


def refused(call, *args, **kwargs):
    "What the one line of the InputError says."
    with pytest.raises(InputError) as caught: call(*args, **kwargs)
    message = str(caught.value)
    assert message == message.strip() and len(message.splitlines()) == 1 and len(message) <= 300
    return message


def layers(*weights):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in weights))
    for layer, w in zip(model, weights): nn.init.constant_(layer.weight, w)
    return model


def quantized(*weights):
    quantize_model(model := layers(*weights), "E4M3", skip=())
    return model


# one table of calls, and of words of what is said


def no_tensors():
    "Calls of all that takes a tensor of floats, with what is none."
    named = (fake_quantize, quantize, quantize_stats, compute_scale, scale_of, Codes.of, best_scale)
    takers = [lambda x, f=f: f(x, "E4M3") for f in named]
    takers += [dequantize, E4M3.to_bits, E4M3.ulp, amax_of, profile_of, recommend_format]
    wrong = [[1.0], None, 1.0, np.ones(2, np.float32), WIDE.to_sparse(), WIDE.to_sparse_csr(), "x"]
    return [partial(taker, x) for taker, x in product(takers, wrong)]


SCALED = [fake_quantize, quantize, quantize_stats, lambda x, fmt, scale: dequantize(x, scale)]
BAD_SCALES = [0.0, -0.0, -1.0, NAN, INF, -INF]


def no_scales():
    "Calls of all that takes a scale, with what is no number."
    wrong = [True, None, "1", 1j, [1.0], np.ones(1), torch.tensor(True), torch.tensor(1j),
             WIDE[0].to_sparse()]
    return [partial(f, torch.ones(2), "E4M3", scale) for f, scale in product(SCALED, wrong)]


def rounded(**how):
    return partial(fake_quantize, X, "E4M3", **{"rounding": "stochastic", "key": 1, **how})


def on_grid(x=X, fmt="E4M3", storage="grid_nearest", **how):
    return partial(make_grid_tensor, x, fmt, storage, **how)


def by_rule(rule, **how): return partial(rule, [W], **{"fmt": "E4M3", "lr": 0.1, **how})


def configured(**values): return partial(make_config, {"format": "E4M3", **values})


def odd(**values):
    """An arm with values that its own check does not let through,
    as if a name had been added to a table and forgotten elsewhere."""
    arm = Arm(checkpoint="tiny-0", corpus="tiny")
    for key, value in values.items(): object.__setattr__(arm, key, value)
    return arm


def with_one(value):
    "Twelve numbers, the last of them this one."
    return torch.tensor([1.0] * 11 + [value], dtype=torch.float64)


def alike(words, calls):
    "Rows of the table that say the same."
    return [(call, words) for call in calls]


IDLE = "*: weight=E5M2; blocks.0.mlp.fc: weight=E4M3"
REFUSED = [
    # formats
    (lambda: FP8Format("x", True, 3), "exponent_bits must be a whole number from 0 to 8, not True"),
    (lambda: FP8Format("x", 4, False), "mantissa_bits must be a whole number"),
    (lambda: FP8Format("x", 4, 3, True), "bias must be a whole number, not True"),
    (lambda: FP8Format("x", 4, 3, 7.0), "bias must be a whole number, not 7.0"),
    *alike("name", (partial(FP8Format, name, 4, 3) for name in ("", " ", None, 7))),
    (lambda: FP8Format("x", 4, 3, 7, "none", True, 0), "subnormals must be True or False, not 0"),
    *alike("dense tensor of integers", (
        partial(E4M3.to_real, codes)
        for codes in ([1], 3, None, np.array([1]), WIDE.int().to_sparse()))),
    # rounding
    *alike("takes a dense float tensor, not", no_tensors()),
    *alike("positive number or a dense tensor of them", no_scales()),
    (lambda: fake_quantize(X, "E4M3", torch.tensor(1e-60).double()), "positive and finite"),
    (lambda: fake_quantize(W, "E4M3", torch.tensor(0.0)), "positive and finite"),
    (lambda: torch.func.vmap(lambda x, s: fake_quantize(x, "E4M3", s))(
        torch.ones(2, 3), torch.tensor([[1.0], [0.0]])), "positive and finite"),
    (lambda: torch.func.grad(lambda x: fake_quantize(x, "E4M3", torch.tensor(0.0)).sum())(X),
     "positive and finite"),
    *alike("a key is an int of 64 bits or an int64 tensor of no dimensions", (
        rounded(key=key) for key in (
            1.5, "a", True, [1], np.int64(3), 2**63, torch.tensor(1.0), torch.tensor([1])))),
    *alike("random_bits must be a whole number from 1 to 24", (
        rounded(random_bits=bits) for bits in (True, 0, 25, 8.0, "8", None))),
    # scales
    (lambda: amax_of(X, True), "a block's length"),
    (lambda: mx_scale(X, "E2M1", block=True), "a block's length"),
    (lambda: AmaxHistory(True), "length must be"),
    (lambda: AmaxAverage("0.9"), "momentum must be"),
    (lambda: AmaxAverage(None), "momentum must be"),
    *alike("margin must be", (partial(Scaling, "E4M3", margin=m) for m in (NAN, "1", 1e9, True))),
    (lambda: recommend_format(X, []), "at least one format"),
    (lambda: recommend_format(X, sample=0), "sample must be"),
    (lambda: recommend_format(X, sample=2.5), "sample must be"),
    (lambda: best_scale(X * 0, "E4M3"), "nonzero"),
    *alike("float32 holds", (
        partial(call, NOISE * size)
        for call in (recommend_format, profile_of, lambda x: best_scale(x, "E4M3"))
        for size in (1e-100, 1e100, 1e-310))),
    # the geometry
    *alike("has no sign", (
        call for name in UNSIGNED for call in (
            on_grid(W, name), partial(FP8Manifold, name),
            by_rule(StiffnessAdamW, fmt=name, floor_octaves=8)))),
    *alike("scale must be", (
        partial(FP8Manifold, "E4M3", scale=scale)
        for scale in (NAN, "1", None, True, WIDE.int(), torch.ones(0)))),
    *alike("float32 does not hold the scale", (
        partial(getattr(FP8Manifold("E4M3", scale=scale), name), X)
        for scale in (1e-50, 1e300) for name in ("stiffness", "projx"))),
    (by_rule(GridSGD, seed=1.5), "seed"),
    (by_rule(GridSGD, seed=True), "seed"),
    (by_rule(StiffnessAdamW, betas=0.9), "betas"),
    (by_rule(StiffnessAdamW, compiled="no"), "compiled"),
    (by_rule(StiffnessAdamW, normalize=1), "normalize"),
    (by_rule(StiffnessAdamW, skip_nonfinite="no"), "skip_nonfinite"),
    (by_rule(StiffnessAdamW, damping="1"), "damping"),
    (by_rule(StiffnessAdamW, lr=True), "lr"),
    (by_rule(StiffnessAdamW, floor_octaves="8"), "floor_octaves"),
    (by_rule(RiemannianAdamW, floor_octaves=NAN), "floor_octaves"),
    (lambda: make_rule(odd(rule="lions"), [W], Task()), "unknown rule 'lions'"),
    (lambda: kind_of(odd(rule="lions")), "unknown rule 'lions'"),
    (configured(rule="lions"), "unknown rule 'lions'"),
    # weights on a grid
    *alike("1 of 12 are not", (
        on_grid(with_one(wrong), storage=storage)
        for wrong in (NAN, INF, -INF) for storage in grid_storages())),
    *alike("empty", (on_grid(torch.ones(0, 4), storage=name) for name in grid_storages())),
    *alike("dense float tensor", (
        on_grid(torch.ones(2).to(dtype)) for dtype in (torch.complex64, torch.int8, torch.bool))),
    (on_grid(storage="grid_up"), "grid_up"),
    (lambda: store_on_grid(quantized(1.0), "grid_up"), "grid_up"),
    (lambda: kind_of(odd(storage="grid_up")), "grid_up"),
    *alike("seed", (on_grid(storage="grid_stochastic", seed=seed) for seed in (1.5, -1))),
    *alike("tensor", (on_grid(storage="grid_stochastic", tensor=n) for n in (0.5, 2**32))),
    # files of codes
    (lambda: load_codes("absent"), "there is no such file"),
    (lambda: load_model(layers(1.0), "absent"), "there is no such file"),
    (lambda: load_codes("x" * 5000), "there is no such file"),
    *alike("no path of a file", (partial(load_codes, path) for path in (".", None, 3, "a\0b", ""))),
    *alike("no path of a file", (partial(save_codes, {"w": X}, path) for path in (".", "", None))),
    (lambda: save_codes({"w": X}, "absent/file"), "cannot write"),
    *((partial(load_codes, "file", device), repr(str(device)))
      for device in ("tpu", "cuda:99", "", "cpu:x", -1, 2.5)),
    *alike("metadata", (
        partial(save_codes, {"w": X}, "file", metadata)
        for metadata in ({"a": 1}, {1: "a"}, {"altgrad": "x"}, ["a"], {"a": None}))),
    (lambda: save_codes(3, "file"), "takes a model"),
    (lambda: save_codes([("w", X)], "file"), "takes a model"),
    (lambda: save_codes({3: X}, "file"), "name is a text"),
    (lambda: save_codes({"__metadata__": X}, "file"), "name is a text"),
    (lambda: save_codes({"\ud800": X}, "file"), "Unicode"),
    *alike("dense tensors", (
        partial(save_codes, {"w": wrong}, "file")
        for wrong in (3, None, WIDE.to_sparse(), X.to(torch.complex128)))),
    (lambda: save_codes({"w": X.to("meta")}, "file"), "without data"),
    (lambda: save_codes({"w": Codes.of(X, "E4M3"), "w_scale": X}, "file"), "two tensors"),
    (lambda: save_codes({"w": Codes.of(X, FP8Format("E5M2", 4, 3, 7))}, "file"), "E5M2"),
    (lambda: Codes(FEW.codes.float(), FEW.scale, E4M3), "not torch.float32"),
    (lambda: Codes(FEW.bits(), FEW.scale, E4M3), "not torch.uint8"),
    (lambda: Codes([1], FEW.scale, E4M3), "not list"),
    (lambda: Codes(WIDE.int(), FEW.scale, FORMATS["E2M5"]), "not torch.int32"),
    (lambda: Codes(FEW.codes, FEW.scale * 0, E4M3), "positive and finite"),
    (lambda: Codes(FEW.codes, 1.0, E4M3), "a scale takes a dense float tensor"),
    (lambda: Codes(FEW.codes, torch.ones(2), E4M3, 3), "do not fit codes"),
    (lambda: Codes(FEW.codes, FEW.scale, "E4M3"), "FP8Format"),
    (lambda: Codes(FEW.codes, FEW.scale, E4M3, 0), "a whole number from 1"),
    (lambda: export_weights(quantized(1.0), "out", ["fp8"]), "unknown layout"),
    # models, monitors and runs
    (lambda: Precision("E4M4b7u"), "E4M4b7u has no sign"),
    (lambda: Monitors(layers(1.0), every=2.5), "every"),
    (lambda: Monitors(layers(1.0), every=NAN), "every"),
    (lambda: Monitors(layers(1.0), histogram_every=0), "histogram_every"),
    (lambda: Monitors(layers(1.0), health_every=True), "health_every"),
    (lambda: Monitors(layers(1.0), optimizers=["a"]), "optimizers"),
    (lambda: Comparison.load("absent.json"), "No such file"),
    *alike("is no decimal number", (
        partial(parse_yaml, f"seed: {number}", "it") for number in ("-07", "0_7", "!!int 010"))),
    (configured(storage="grid_nearest", head="E4M3"), "head needs the storage master"),
    (configured(placement="nowhere"), "unknown placement"),
    (configured(placement="gradient"), "placement"),
    (configured(rule="madam", damping=0.1), "damping"),
    (configured(rule="riemannian_adamw", power=2.0), "power"),
    (configured(rule="stiffness_sgd", placement="gradient"), "placement"),
    (configured(floor_octaves=3), "floor_octaves"),
    (configured(rule="muon", rule_lr=1e300), "rule_lr"),
    (configured(rule="stiffness_adamw", damping=1e300), "damping"),
    *alike("lr", (configured(lr=lr) for lr in (1e39, 10**400))),
    *alike("batch_size", (
        configured(batch_size=size) for size in (1e23, 2**62, 10**400, "9" * 5000))),
    (configured(batch_size=2**30), "tokens"),
    (configured(eval_windows=2**62), "eval_windows"),
    (lambda: trainer.make_model(configured(rules=IDLE)(), 256, torch.device("cpu")),
     "'blocks.0.mlp.fc' decides no layer"),
]


@pytest.mark.parametrize("function", SCALED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_scale_tensor_that_is_not_positive_and_finite(function, dtype):
    x = torch.randn(8, 4).to(dtype)
    for bad, shape in product(BAD_SCALES, ((), (1,), (8, 1), (1, 4), (8, 4))):
        scale = torch.ones(shape, dtype=dtype)
        scale.flatten()[-1:].fill_(bad)
        message = refused(function, x, "E4M3", scale)
        assert "a scale must be positive and finite, not" in message


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_a_call_is_refused_and_leaves_nothing(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused(call) and not any(tmp_path.iterdir())


# models, which stay as they were

LAZY = nn.Sequential(nn.LazyLinear(4))
TRACED = torch.jit.trace(nn.Linear(8, 2), torch.ones(1, 8))


def of_type(dtype):
    "Two layers, the second with weights of that type."
    model = layers(1.0, 1.0)
    model[1].weight = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    return model


def by_default(name): return {"format": None, "config": PrecisionConfig(default=name)}


NO_SIGN = "E4M4b7u has no sign"
MODELS = [
    (LAZY, {}, "no shape yet"),
    (None, {}, "not NoneType"),
    ("model", {}, "not str"),
    (nn.Linear, {}, "the class Linear"),
    (TRACED, {}, "torch.jit"),
    *((of_type(t), {}, f"1 has weights of {t}") for t in (torch.complex64, torch.int8, torch.bool)),
    (layers(1.0), {"format": "float8_e8m0fnu"}, "float8_e8m0fnu has no sign"),
    (layers(1.0), {"format": "E4M4b7u"}, NO_SIGN),
    (layers(1.0), by_default("E4M4b7u"), NO_SIGN),
    (layers(1.0), {"skip": 3}, "skip takes globs"),
    (layers(1.0), {"skip": [3]}, "skip takes globs"),
    (layers(1.0), {"seed": -1}, "seed must be a whole number from 0 to 2^63 - 1"),
    *((layers(1.0), {"manifold": wrong}, "manifold must be") for wrong in (None, 1, "yes")),
    *((layers(1.0), {"manifold": {"scale": torch.ones(shape)}}, "does not broadcast")
      for shape in (3, (1, 1, 1))),
    (layers(1.0), {"manifold": {"scale": 1e-50}}, "float32 does not hold the scale"),
]


def state_of(model):
    "Kinds of modules and of weights, and what they hold."
    if not isinstance(model, nn.Module) or model is LAZY: return None
    kinds = [type(m) for m in model.modules()] + [type(p.data) for p in model.parameters()]
    return kinds, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(("model", "how", "words"), MODELS, ids=str)
def test_a_model_that_cannot_be_quantized_stays_as_it_was(model, how, words):
    before = state_of(model)
    assert words in refused(quantize_model, model, **{"format": "E4M3", "skip": (), **how})
    assert state_of(model) == before


@pytest.mark.parametrize("storage", grid_storages())
def test_what_is_not_finite_is_no_weight_on_a_grid(storage):
    model = quantized(1.0, NAN)
    message = refused(store_on_grid, model, storage)
    assert message.startswith("1.weight: weights on a grid must be finite")
    assert all(type(p.data) is torch.Tensor for p in model.parameters())  # the first layer's, too


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_is_not_traced():
    words = "torch.compile or torch.export"
    assert words in refused(torch.jit.trace, quantized(1.0), torch.ones(2, 4))


def test_a_placement_without_a_branch(monkeypatch):
    monkeypatch.setattr(optim, "PLACEMENTS", (*optim.PLACEMENTS, "nowhere"))
    w = nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    assert "nowhere" in refused(StiffnessAdamW([w], "E4M3", placement="nowhere").step)


def test_a_compiled_call_refuses_a_scale_too():
    operator = torch.compile(
        lambda x, s, k: fake_quantize(x, "E4M3", s, rounding="stochastic", key=k),
        backend="eager",
        fullgraph=True,
    )
    assert operator(X, torch.tensor(0.5), torch.tensor(3)).shape == X.shape
    assert "positive and finite" in refused(operator, X, torch.tensor(-1.0), torch.tensor(3))


# what is right beside it


def test_a_message_is_one_short_line_whatever_it_tells():
    for text in ("a\nb", "x" * 10**6, "a\u2028b\rc", "", "x" * MESSAGE):
        assert len(str(InputError(text)).splitlines()) <= 1
        assert len(str(InputError(text))) <= MESSAGE
    assert str(InputError("as  it is")) == one_line("as  it is") == "as  it is"
    long = str(unknown("format", "E4M33" + "x" * 1000, ["E4M3"] * 500))
    assert long.startswith("unknown format 'E4M33xxx")
    assert long.endswith("E4M3, E4M3")
    assert len(long) == MESSAGE


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
    x, scale = torch.tensor([[3e-60], [1e-60]], dtype=torch.float64)
    assert fake_quantize(x, "E4M3", scale).item() == 3 * 1e-60
    key = rounding_key(3)
    assert torch.equal(rounded(key=key)(), rounded(key=torch.tensor(key))())


def test_settings_that_the_rule_reads_are_taken():
    update = dict(power=-0.5, placement="gradient", damping=0.5, floor_octaves=4)
    configured(rule="stiffness_adamw", **update)()
    configured(rule="stiffness_sgd", power=0.5, damping=0.5)()
    configured(rule="grid_sgd", floor_octaves=4)()
    configured(storage="fp32", rule="riemannian_adamw", floor_octaves=4)()
    configured(head="E4M3")()


def test_a_layer_that_is_no_float_is_left_out():
    quantize_model(of_type(torch.int8), "E4M3", skip="1")


def test_a_block_longer_than_the_row_is_the_row():
    x = torch.randn(4, 10)
    for block in (10, 11, 10**9, 10**30):
        assert torch.equal(scale_of(x, "E4M3", block), scale_of(x, "E4M3", "channel").expand(4, 10))
        assert torch.equal(mx_scale(x, "E2M1", block=block), mx_scale(x, "E2M1", block=10))


# files


def a_model(seed=0, storage=None, fmt="E4M3"):
    "Two layers and a norm, in E4M3 or on its grid."
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    quantize_model(model, fmt)
    if storage: store_on_grid(model, storage)
    return model


def bits_of(value):
    "What a tensor or codes are, to the last bit."
    if isinstance(value, Codes):
        return bits_of(value.codes), bits_of(value.scale), value.fmt, value.block
    return value.dtype, value.shape, value.detach().flatten().view(torch.uint8).tolist()


def same_state(a, b):
    "Whether two states are equal in names, kinds and every bit."
    return {name: bits_of(a[name]) for name in a} == {name: bits_of(b[name]) for name in b}


@pytest.fixture
def file(tmp_path):
    "A file with a model's codes."
    path = tmp_path / "model.safetensors"
    save_codes(a_model(), path, {"made by": "a test"})
    return path


def rewrite(path, change=None, tensors=None):
    """Writes a file again, after changes to its facts and tensors;
    without the SHA-256, which would find any of them."""
    with safe_open(path, "pt") as f: words = f.metadata()
    content, facts = load_file(path), json.loads(words["altgrad"])
    facts.pop("sha256")
    if tensors: tensors(content)
    if change: facts = change(facts)
    text = facts if isinstance(facts, str) else json.dumps(facts)
    save_file(content, path, {**words, "altgrad": text})


def put(key, value):
    "Sets an item at a path of keys, and returns the whole."
    def change(facts):
        at = facts
        for part in key[:-1]: at = at[part]
        at[key[-1]] = value
        return facts
    return change


def in_bytes(change): return lambda path: path.write_bytes(change(path.read_bytes()))


def in_facts(change): return lambda path: rewrite(path, change)


def in_tensors(change): return lambda path: rewrite(path, tensors=change)


def replaced(name, make):
    def change(tensors): tensors[name] = make(tensors[name])
    return change


def in_scale(make): return in_tensors(replaced("0.weight_scale", make))


def in_codes(make): return in_tensors(replaced("0.weight", make))


SPEC, DEEP = E4M3.spec, "[" * 100_000 + "]" * 100_000
PLAIN = {"format": SPEC, "block": None}
CODE_TYPES = (torch.float32, torch.float8_e5m2, torch.bfloat16, torch.int64)
SPOILT = [
    *((in_bytes(change), "not a whole safetensors file") for change in (
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: struct.pack("<Q", 2**63) + data[8:],
        lambda data: bytes(range(256)) * 8,
        lambda data: data[:40] + b"\xff" + data[41:],
        lambda data: data + b"x",
    )),
    (in_bytes(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "SHA-256"),
    *((in_facts(lambda facts, text=text: text), "")
      for text in ("{", "[]", "null", "1", DEEP, "{}", "NaN", '"x"')),
    (in_facts(lambda facts: {"weights": facts["weights"]}), ""),
    *((in_facts(put(key, value)), "") for key, value in [
        (("formats",), {}),
        (("formats",), []),
        (("more",), 1),
        (("weights",), ["0.weight"]),
        (("sha256",), 1),
        (("formats", SPEC, "z"), 1),
        (("formats", SPEC), None),
        (("formats", SPEC, "name"), None),
        (("formats", SPEC, "signed"), 1),
        (("formats", SPEC, "exponent_bits"), 10**400),
        (("formats", SPEC, "bias"), 3),
        (("formats", SPEC), asdict(FORMATS["E5M2"])),
        (("formats", SPEC, "name"), "E5M2"),
        (("formats", SPEC, "name"), "float8_e4m3"),
        (("weights", "zz"), PLAIN),
        (("weights", "0.weight", "format"), "E4M3"),
        (("weights", "0.weight", "format"), ["E4M3"]),
        *((("weights", "0.weight", "block"), size) for size in (0, -3, "4", True, 4.0, 10**9, 4)),
        (("weights", "0.weight"), {"format": SPEC}),
        (("weights", "0.weight_scale"), PLAIN),
        (("weights", "1.weight"), PLAIN),
    ]),
    (in_tensors(lambda tensors: tensors.pop("0.weight_scale")), ""),
    (in_tensors(lambda tensors: tensors.pop("0.weight")), ""),
    *((in_scale(lambda s, bad=bad: torch.full_like(s, bad)), "") for bad in BAD_SCALES),
    *((in_scale(lambda s, shape=shape: torch.ones(shape)), "")
      for shape in (7, (16, 8, 1), (2, 16, 8))),
    *((in_scale(lambda s, t=t: s.to(t)), "") for t in (torch.int32, torch.bool, torch.complex64)),
    *((in_codes(lambda c, t=t: c.float().to(t)), "") for t in CODE_TYPES),
    (in_codes(lambda c: c.view(torch.uint8)), ""),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_a_file_that_is_not_what_was_written(file, spoil, words):
    spoil(file)
    model = a_model(seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = refused(load_codes, file)
    assert str(file)[:20] in message and words in message
    refused(load_model, model, file)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_codes_beyond_the_format(tmp_path):
    path = tmp_path / "codes.safetensors"
    save_codes({"w": Codes.of(torch.ones(4), "E2M1")}, path)
    rewrite(path, tensors=replaced("w", lambda c: c + 16))
    assert "codes of float4_e2m1fn lie between 0 and 15" in refused(load_codes, path)


def test_a_file_without_facts_or_digest(file):
    state = load_codes(file)
    refused(save_codes, {3: X}, file)
    assert same_state(load_codes(file, torch.device("cpu")), state)
    rewrite(file)
    # others may write a file without a digest
    assert same_state(load_codes(file), model_codes(a_model()))
    save_file({"x": torch.ones(2)}, file)
    assert "no key 'altgrad'" in refused(load_codes, file)


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


@pytest.mark.parametrize("scale", (1e-50, 1e300))
def test_a_scale_of_float64_is_for_points_of_float64(scale):
    points = torch.ones(3) * 0.5
    stiffness = FP8Manifold("E4M3", scale=scale).stiffness(points.double() * scale)
    assert torch.equal(stiffness, FP8Manifold("E4M3").stiffness(points).double() * scale)


def test_the_last_tensor_draws_as_no_other():
    w = torch.full((1000,), 1.03)
    grids = [make_grid_tensor(w, "E4M3", "grid_stochastic", tensor=n) for n in (0, 1, 2**32 - 1)]
    for grid in grids: grid.add_(0.01)
    codes = [grid.codes.tolist() for grid in grids]
    assert codes[0] != codes[1] != codes[2] != codes[0]


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
        path.unlink()  # a file that is cut to nothing is slow
        path.write_bytes(mutated(whole, rng))
        try: content = load_codes(path)
        except InputError as e:
            refusals += 1
            assert len(str(e).splitlines()) == 1 and len(str(e)) <= MESSAGE
        else: assert same_state(content, state)
    assert refusals > 1500


# run folders


def test_a_line_of_metrics_that_is_too_deep_to_read_is_damage(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics_file.write_bytes(b'{"step": 1}\n' + b"[" * 100_000 + b"\n")
    assert run.whole_steps() == 1
    assert "damaged in line 2" in refused(run.metrics)


@pytest.mark.parametrize(("line", "words"), [
    ('{"epoch": 2}', "step must be a whole number, not None"),
    ('{"step": "2"}', "step must be"),
    ('{"step": 2, "loss": "low"}', "loss cannot be 'low'"),
    ('{"step": 2, "lr": [1.0]}', "lr cannot be"),
    *((f'{{"step": 2, "events": {events}}}', "events cannot be")
      for events in ("3", "[3]", '[{"kind": [1]}]')),
])
def test_a_log_that_no_run_wrote(tmp_path, capsys, line, words):
    row = {"step": 1, "loss": None, "lr": 1e-3, "nonfinite": ["loss"], "events": [{"kind": "nan"}]}
    bad, good = (RunFolder(tmp_path / name) for name in ("bad", "good"))
    for run, more in ((bad, f"{line}\n"), (good, "")):
        run.create(f"name: {run.path.name}\nmax_steps: 1\n")
        run.metrics_file.write_text(f"{json.dumps(row)}\n{more}")
    for look in (autopsy, write_page, lambda path: rows_of(StoredRun(path))):
        message = f"{bad.metrics_file} is damaged in line 2: {words}"
        assert message in refused(look, bad.path)
        look(good.path)
    assert rows_of(StoredRun(good.path)) == [row]
    assert [main(["watch", str(run.path), "--once"]) for run in (bad, good)] == [2, 0]
    for _ in range(2): write_page(tmp_path)
    assert capsys.readouterr().err.count("passed over") == 1
    assert "good" in (tmp_path / "watch.html").read_text()


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


def test_numbers_that_all_read_alike():
    assert parse_yaml("[0, 10, -3, 0.5, 1e3, 1_000, 0x1F, 2001-01-01]", "it")[:3] == [0, 10, -3]
    assert parse_yaml("seed: '010'", "it") == {"seed": "010"}


def test_a_format_has_one_name_in_a_config_however_it_is_typed():
    c = make_config({"format": "BFLOAT16", "activation": "e4m3  delayed", "gradient": "float8_e5m2 stochastic"})
    assert (c.format, c.activation, c.gradient) == ("bfloat16", "E4M3 delayed", "E5M2 stochastic")
    assert make_config({"format": "e4m3"}) == make_config({"format": "E4M3"}) == make_config({"format": "E4M3b7fn"})
    assert make_config({"format": None}).format is None


@pytest.fixture
def trained(tmp_path, monkeypatch):
    "A function that makes a run of two updates of a small model."
    monkeypatch.setitem(PRESETS, "gpt-tiny", GPTConfig(1, 2, 16, 16))
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
        error = capsys.readouterr().err
        assert error.count("goes on where other software") == 1 and f"is {torch_there}" in error
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


@pytest.mark.parametrize("rules, codes, order", (
    ("blocks.0.*: weight=E2M3; blocks.1.*: gradient=E5M2", "64 codes", "ordered by value"),
    ("blocks.0.*: weight=E2M3; blocks.1.*: weight=E4M3", "256 codes", "several formats"),
))
def test_codes_of_a_run_without_a_format_are_those_of_its_rules(rules, codes, order):
    from matplotlib.figure import Figure

    counts = [5] + [0] * 254 + [3]
    arm = {"config": {"name": "a", "format": None, "rules": rules}, "record": {"bit_histogram": counts}}
    ax = Figure().subplots()
    report._plot_histogram(ax, arm, {"color": "gray"})
    assert ax.get_title().endswith(f"2 of {codes} used") and order in ax.get_xlabel()
    # the last code is the negative one farthest from zero: first by value, last in order
    ends = [bar.get_height() for bar in ax.patches]
    assert (ends[0], ends[-1]) == ((3, 0) if order == "ordered by value" else (5, 3))
