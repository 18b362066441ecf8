"""Compiled training: one graph, the losses of the eager run, and a compiler that gives up is
heard."""
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch

from altgrad.numbers.formats import EIGHT_BIT, get_format
from altgrad.numbers import counts, kernels
from altgrad.numbers.kernels import set_path
from altgrad.numbers.quantize import fake_quantize
from altgrad.model.gpt import PRESETS, GPTConfig
from altgrad.model.points import LayerPrecisionRule, Precision, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.training.config import make_config
from altgrad.training.trainer import Trainer
from altgrad.watching import sums
from old import NO_COMPILER, OLD_TORCH
from tiny import small_bench

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="torch's compiler needs vectors")

SMALL = dict(
    format="E4M3", model="nano", max_steps=3, batch_size=2, block_size=16, eval_windows=2,
    warmup_steps=1, compute_dtype="float32", device="cpu",
)


@pytest.fixture(scope="module")
def corpus(small_folder): return small_bench(small_folder).corpus("tiny")


@pytest.fixture
def run(corpus, tmp_path, monkeypatch):
    "A function that trains and returns the run's rows and record."
    monkeypatch.setitem(PRESETS, "nano", GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))

    def train(name, **changes):
        torch._dynamo.reset()
        trainer = Trainer(make_config({**SMALL, "name": name, "data": corpus.name, **changes}), tmp_path, corpus)
        return trainer.run(progress=False), trainer.folder.metrics()

    return train


def test_the_record_says_how_it_was_rounded(run):
    before = set_path("eager")
    try: eager, _ = run("eager")
    finally: set_path(before)
    usual, _ = run("usual")
    assert eager["rounding"] == "eager: by `set_path`, or ALTGRAD_PATH" != usual["rounding"]


def events(rows): return [e for row in rows for e in row.get("events", ())]


@pytest.mark.slow
@pytest.mark.skipif(
    OLD_TORCH,
    reason="torch 2.8 does not compile the hooks that round gradients; the run says so and goes on "
           "without",
)
def test_a_compiled_run_is_one_graph_with_the_losses_of_the_eager_one(run):
    points = dict(activation="E4M3", gradient="E5M2")
    said, eager = run("eager", **points)
    torch._dynamo.utils.counters.clear()
    told, compiled = run("compiled", compile="on", **points)
    assert events(compiled) == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert said["compile"] == "off" and told["compile"] == "on"
    # another order of additions moves a loss by some 1e-7; a value that then falls on the other
    # side of a rounding boundary, by some 1e-5
    torch.testing.assert_close(
        [r["loss"] for r in compiled], [r["loss"] for r in eager], rtol=1e-4, atol=0
    )


def test_rounding_inside_a_compiled_graph_gives_the_same_bits():
    g = torch.Generator().manual_seed(0)
    any_bits = (
        torch.randint(-(2**31), 2**31, (1 << 16,), generator=g).to(torch.int32).view(torch.float32)
    )
    x = torch.cat([
        any_bits, torch.randn(1 << 14, generator=g),
        torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45]),
    ])

    def every(x, scale):
        return [
            fake_quantize(x, name, scale, rounding=mode)
            for name in (*EIGHT_BIT, "bfloat16")
            for mode in ("nearest", "up")
        ]

    together = torch.compile(every, fullgraph=True)
    for scale in (torch.tensor(0.125), torch.tensor(0.3)):
        for got, want in zip(together(x, scale), every(x, scale)):
            assert torch.equal(got.isnan(), want.isnan())
            # -0 is not 0 here
            assert torch.equal(
                got.masked_fill(got.isnan(), 0).view(torch.int32),
                want.masked_fill(want.isnan(), 0).view(torch.int32),
            )


def test_what_is_rounded_inside_a_graph_was_a_bfloat16_number_before():
    def f(a, b): return fake_quantize(a * b, "E4M3", torch.tensor(0.25))

    a, b = (
        torch.randn(1 << 12, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1)
    )
    # a compiler would keep the product in float32
    assert torch.equal(torch.compile(f, fullgraph=True)(a, b), f(a, b))


def test_transforms_inside_a_compiled_function_keep_the_gradient():
    x, whole = torch.linspace(-3, 3, 9), lambda x: (fake_quantize(x, "E0M7") * 2).sum()
    try: got = torch.compile(torch.func.grad(whole), backend="eager", fullgraph=True)(x)
    except torch._dynamo.exc.TorchDynamoException:
        pytest.skip("this compiler gives up, and says so; a wrong gradient would not")
    assert torch.equal(got, torch.full((9,), 2.0))


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.8 compiles no hooks")
def test_an_overflow_is_found_behind_a_compiled_point_and_the_output_may_be_written_into():
    def network():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.ReLU(inplace=True))
        rule = LayerPrecisionRule("*", weight="E4M3", activation="E4M3", gradient="E5M2")
        quantize_model(model, config=PrecisionConfig(default=rule))
        return model

    torch._dynamo.reset()
    x, dy = torch.ones(2, 3, 16), torch.ones(2, 3, 16)
    for put in (1.0, torch.inf):
        dy[0] = put
        found = []
        for model in (network(), torch.compile(network(), fullgraph=True)):
            ours = x.clone().requires_grad_()
            model(ours).backward(dy)
            found.append(ours.grad.isfinite().all(2).all(1).tolist())
        assert found == [[put == 1.0, True]] * 2


ARMS = (
    dict(storage="grid_stochastic"), dict(storage="bf16", rule="madam", rule_lr=0.01),
    dict(activation="E4M3 delayed", head="E5M2", grad_accum=2),
    dict(residual_clamp=2.0, format="bfloat16"), dict(activation="E4M3", monitor_every=2),
)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_kind_of_run_is_traced_without_a_break(run, arm, monkeypatch):
    whole = run("eager", **arm)[1]
    # the graph, run as it is: equal to the last bit
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    traced = run("traced", compile="on", **arm)[1]
    assert not [e for e in events(traced) if e["metric"] == "compile"]
    assert [r["loss"] for r in traced] == [r["loss"] for r in whole]
    assert traced[-1]["val_loss"] == whole[-1]["val_loss"]


def heard(rows):
    return [
        (row["step"], e["kind"])
        for row in rows
        for e in row.get("events", ())
        if e["metric"] == "compile"
    ]


def test_too_many_graphs_are_a_warning_and_the_run_goes_on(run, monkeypatch):
    # every weight is rounded at its first use, and found rounded at the second: two graphs
    monkeypatch.setattr("altgrad.model.surgery.CHUNK", 0)
    whole = run("eager", grad_accum=2)[1]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1):
        rows = run("limited", compile="on", grad_accum=2)[1]
    assert heard(rows) == [(1, "warning")]
    assert [r["loss"] for r in rows] == [r["loss"] for r in whole]


def test_a_missing_compiler_is_a_warning_and_the_run_goes_on(run):
    whole = run("eager")[1]
    import torch._inductor.config as inductor
    with inductor.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        record, rows = run("alone", compile="on")
    assert heard(rows) == [(1, "warning")]
    assert [r["loss"] for r in rows] == [r["loss"] for r in whole]
    assert record["exit_reason"] == "finished"


def compiled_code(size, random_bits):
    "The compiled kernel's code for stochastic rounding; its bits are those of the eager path."
    from torch._inductor.utils import run_and_get_code

    x, key = torch.randn(size, generator=torch.Generator().manual_seed(3)), kernels.rounding_key(5, 9, 2)
    g, how, _ = kernels.plan(get_format("E4M3"), x.dtype, "stochastic", "saturate", random_bits, True, "none")
    coins = kernels.key_tensor(kernels.words_of(key), x.device)
    call = kernels._compiled(how, "cpu", size >= kernels.LARGE)
    found, code = run_and_get_code(call, x, None, None, kernels.numbers_of(g, how.wide, x.device), coins)
    before = set_path("eager")
    want = fake_quantize(x, "E4M3", rounding="stochastic", key=key, random_bits=random_bits)
    set_path(before)
    assert torch.equal(found.view(size).view(torch.int32), want.view(torch.int32))
    return "".join(code)


@pytest.mark.slow
def test_few_random_bits_are_a_number_of_the_compiled_code():
    "As a number that varies they were a power in float64, which does not compile for a GPU."
    torch._dynamo.reset()
    for random_bits in (8, 3): assert "pow(" not in compiled_code(4096, random_bits)


def test_whole_rows_are_one_loop_whose_length_is_known_to_be_a_multiple_of_16():
    torch._dynamo.reset()
    loop = re.compile(r"for\(int64_t x0=.*?x0<static_cast<int64_t>\((.*?)\); x0")
    for size, length in ((4096, "16L*(c10::div_floor_integer"), (8192, "16L*("), (4100, "ks")):
        (found,) = loop.findall(compiled_code(size, 24))
        assert found.startswith(length)


SIZES = """
import sys, torch
from torch._dynamo.utils import counters
from altgrad.numbers import kernels as K
from altgrad.numbers.formats import get_format

g, how, _ = K.plan(get_format("E4M3"), torch.float32, "nearest", "saturate", 24, True, "none")
for size in map(int, sys.argv[1:]):
    call = K._compiled(how, "cpu", size >= K.LARGE)
    with torch.no_grad(): call(torch.randn(size), None, None, K.numbers_of(g, False, torch.device("cpu")), None)
    found = counters["inductor"]
    print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_the_kernel_of_a_small_tensor_is_not_found_on_disk_for_a_large_one(tmp_path):
    "The compiler keeps the tiles that it chose for the first tensor with the kernel."
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
           "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

    def found(*sizes):
        words = [sys.executable, "-c", SIZES, *map(str, sizes)]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]

    large = kernels.LARGE
    assert found(4096, large) == ["1 0", "2 0"]
    assert found(2 * large, 8192) == ["0 1", "0 2"]


@pytest.mark.slow
@pytest.mark.parametrize("name, shape, scale", [
    ("E4M3", (8192,), None), ("E4M3", (8200,), 0.37), ("E4M3", (3, 4096), 0.37), ("E7M0", (30, 16), None),
    ("E7M0", (8192,), 0.37), ("E7M0", (kernels.LARGE,), None),
])
def test_compiled_counts_are_those_of_the_eager_path_in_rows_or_not(name, shape, scale):
    torch._dynamo.reset()
    fmt, x = get_format(name), torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 10
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30])
    s = None if scale is None else torch.tensor(scale)
    scaling, _, inverse = kernels.scaling_of(s)
    g, how, _ = kernels.plan(fmt, x.dtype, "nearest", "saturate", 24, False, scaling)
    call = counts._compiled(how, "cpu", True, x.numel() >= kernels.LARGE)
    out, tensors = torch.empty_like(x), counts._layout(fmt, x.device)[1]
    numbers = kernels.numbers_of(g, how.wide, x.device)
    with torch.no_grad(): bins, sums = call(x, out, s, inverse, numbers, *tensors)
    before = set_path("eager")
    want, told = counts.quantize_stats(x, fmt, 1.0 if scale is None else scale)
    set_path(before)
    assert torch.equal(out.nan_to_num(7e7), want.nan_to_num(7e7))
    assert sums[:4].tolist() == [told.overflow, told.underflow, told.nan, told.inf]
    assert sums[6] == told.amax
    # float64 sums of n positive terms in any order; the terms of the first are rounded in float32
    assert torch.allclose(sums[4], told.squared_error, rtol=8 * 2.0**-24, atol=0)
    assert torch.allclose(sums[5], told.squares, rtol=2 * x.numel() * 2.0**-53, atol=0)
    places = counts._count_bins(bins, 2 * fmt.magnitudes + 2)
    assert torch.equal(counts._histogram(places, told.nan, fmt), told.histogram)


@pytest.mark.parametrize("shape, scale", [
    ((300, 70), torch.tensor(0.25)), ((64, 64), torch.tensor([0.25, 0.5]).repeat(32).view(64, 1)),
    ((kernels.LARGE + 3,), torch.tensor(0.5)),
])
def test_compiled_sums_are_those_of_the_eager_path(monkeypatch, shape, scale):
    "What a GPU is given, made by a CPU's compiler; the wrapper is compiled once for each side of `LARGE`."
    torch._dynamo.reset()
    x, p = torch.randn(shape, generator=torch.Generator().manual_seed(0)), Precision("E4M3")
    before = set_path("eager")
    want, told = sums.round_and_sum(x, p, scale)
    set_path(before)
    compiled = []
    monkeypatch.setattr(kernels, "native", lambda x: None)
    monkeypatch.setattr(sums, "_takes_compiler", lambda x: True)
    monkeypatch.setattr(sums, "_call_compiled", lambda body, *parts, call=sums._call_compiled: (
        compiled.append(body.__name__), call(body, *parts))[1])
    y, found = sums.round_and_sum(x, p, scale)
    assert compiled and torch.equal(y, want)
    counted = [sums.PLACE[name] for name in ("overflow", "underflow", "nonfinite", "amax", "elements")]
    assert torch.equal(found[counted], told[counted])
    # sums in float32 of n terms, in any order: an error of n / 2 roundings of the sum of magnitudes at most
    most = 0.5 * x.numel() * 2.0**-24
    for name, size in (("error", told[sums.PLACE["error"]]), ("power_2", x.double().pow(2).sum()),
                       ("power_1", x.double().abs().sum()), ("power_4", x.double().pow(4).sum()),
                       ("power_3", x.double().abs().pow(3).sum())):
        assert abs(found[sums.PLACE[name]] - told[sums.PLACE[name]]) <= most * size, name
