"""One named test for every trap of rounding, for bugs that other libraries had, and for the paths
and transforms that must not change a bit."""
import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
import torch._dynamo.testing

import altgrad.numbers.kernels as K
import altgrad.numbers.native as N
from altgrad.basics import InputError
from altgrad.numbers.counts import histogram_of, quantize_stats
from altgrad.numbers.formats import FORMATS, FP8Format, get_format
from altgrad.numbers.kernels import ROUNDING, rounding_key, set_path, uniform
from altgrad.numbers.quantize import dequantize, fake_quantize, quantize

from cases import each
from old import NO_COMPILER

needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="torch's compiler needs vectors")
DETERMINISTIC = [mode for mode in ROUNDING if mode != "stochastic"]


@pytest.fixture(params=["eager", "compiled"])
def path(request):
    "Runs a test once for each path."
    if request.param == "compiled" and NO_COMPILER: pytest.skip("torch's compiler needs vectors")
    before = set_path(request.param)
    yield request.param
    broken = K.state["broken"]
    set_path(before)
    if broken and request.param == "compiled": pytest.fail("the compiled path fell back to eager")


def rounded(values, fmt, *args, dtype=torch.float32, **kwargs):
    return fake_quantize(torch.tensor(values, dtype=dtype), fmt, *args, **kwargs).tolist()


def same_bits(a, b):
    "Equal in every bit, but for the payload of a NaN."
    views = (torch.isnan, torch.signbit, lambda t: t.nan_to_num(7e7))
    return all(torch.equal(view(a), view(b)) for view in views)


# traps


def test_double_rounding(path):
    # 1 + 2^-4 + 2^-30 is above the tie of E4M3 in float64; through float32 it would become the tie,
    # and go down
    assert rounded([1 + 2**-4 + 2**-30], "E4M3", dtype=torch.float64) == [1.125]
    assert rounded([1 + 2**-4], "E4M3", dtype=torch.float64) == [1.0]
    # through bfloat16 first, 1.0635 would become the tie 1.0625 and go down
    assert rounded([1.0635], "E4M3") == [1.125]


def test_exponent_is_not_floor_of_log2(path):
    below = [torch.tensor(2.0**e).nextafter(torch.tensor(0.0)).item() for e in range(-6, 9)]
    assert rounded(below, "E4M3", rounding="toward_zero") == [
        2.0**e - 2.0 ** (max(e - 1, -6) - 3) for e in range(-6, 9)
    ]
    assert rounded(below, "E4M3") == [2.0**e for e in range(-6, 9)]


def test_ties_without_mantissa_go_to_the_even_code(path):
    assert rounded([0.75, 1.5, 3.0, 6.0, -0.75, -6.0], "E7M0") == [0.5, 2.0, 2.0, 8.0, -0.5, -8.0]
    assert rounded([2.0**-63, 1.5 * 2**-62], "E7M0") == [0.0, 2.0**-61]  # codes 0|1 and 1|2


def test_top_of_e4m3(path):
    x = [448.0, 463.9, 464.0, 464.1, 480.0, 1e9]
    assert rounded(x, "E4M3") == [448.0] * 6
    assert [math.isnan(v) for v in rounded(x, "E4M3", overflow="special")] == [
        False, False, False, True, True, True
    ]
    assert rounded([464.1, 1e9, -1e9], "E4M3", overflow="special", rounding="toward_zero") == [
        448.0, 448.0, -448.0
    ]
    assert fake_quantize(torch.tensor([464.0]), "E4M3", overflow="raise").item() == 448
    with pytest.raises(OverflowError, match="1 of 1 values round beyond E4M3's max 448"):
        fake_quantize(torch.tensor([480.0]), "E4M3", overflow="raise")


def test_minus_zero_is_kept_and_no_underflow(path):
    for mode in DETERMINISTIC:
        y, stats = quantize_stats(torch.tensor([0.0, -0.0]), "E4M3", rounding=mode)
        assert y.signbit().tolist() == [False, True] and stats.underflow == 0
    y, stats = quantize_stats(torch.tensor([1e-9, -1e-9]), "E4M3")
    assert y.tolist() == [0.0, 0.0]
    assert y.signbit().tolist() == [False, True]
    assert stats.underflow == 2
    assert not fake_quantize(torch.tensor([-0.0, -1e-9]), "float8_e4m3fnuz").signbit().any()


def test_subnormal_numbers_are_not_flushed_to_zero(path):
    tiny = 2.0**-149
    assert (
        rounded([tiny, 3 * tiny], "E4M3", 2 * tiny)
        == rounded([tiny, 3 * tiny], "E4M3", torch.tensor(2 * tiny))
        == [tiny, 3 * tiny]
    )
    assert rounded([1e-40], "E4M3", 2.0**-130)[0] > 0
    assert rounded([tiny, -tiny], "E4M3", rounding="up") == [2.0**-9, -0.0]
    assert rounded([tiny], "bfloat16") == [0.0] and rounded([2.0**-133], "bfloat16") == [2.0**-133]


def test_e1m6_is_e0m7_up_to_scale(path):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for mode in ROUNDING:
        key = 3 if mode == "stochastic" else None
        assert same_bits(
            fake_quantize(x, "E0M7", 4.0, rounding=mode, key=key),
            fake_quantize(x, "E1M6", 1.0, rounding=mode, key=key),
        ), mode


# bugs that other libraries had


def test_ties_do_not_go_away_from_zero(path):
    assert rounded([1.0625, 1.1875, -1.0625], "E4M3") == [1.0, 1.25, -1.0]
    assert rounded([1.0625, 1.1875, -1.0625], "E4M3", rounding="away") == [1.125, 1.25, -1.125]


def test_half_is_not_added_before_floor(path):
    below_half = 0.5 - 2**-25  # adding 0.5 to it gives 1 in float32
    for mode in ("nearest", "away"):
        assert rounded([below_half / 128, -below_half / 128], "E0M7", rounding=mode) == [0.0, -0.0]


def test_nan_stays_nan(path):
    for name, fmt in FORMATS.items():
        for mode in DETERMINISTIC:
            assert math.isnan(rounded([math.nan], fmt, rounding=mode)[0]), name
    assert math.isnan(rounded([math.nan], "E5M2", overflow="raise")[0])


def test_three_stays_positive(path):
    for name, fmt in FORMATS.items():
        if fmt.max >= 4: assert 2 <= rounded([3.0], fmt)[0] <= 4, name


def test_no_zero_and_no_sign(path):
    low = 2.0**-127
    assert rounded([0.0, -0.0, -5.0, low / 2, 1.5, 3.0, math.inf], "float8_e8m0fnu") == [
        low, low, low, low, 2.0, 2.0, 2.0**127
    ]
    assert [
        math.isnan(v) for v in rounded([0.0, -1.0, math.inf], "float8_e8m0fnu", overflow="special")
    ] == [False, True, True]


def test_twos_complement(path):
    assert rounded([-2.0, -9.0, 9.0, 1 / 128, 3 / 128, -1e-9], "mxint8") == [
        -2.0, -2.0, 127 / 64, 0.0, 2 / 64, 0.0
    ]


# paths


def hard_inputs(fmt):
    v = fmt.table[: fmt.last_finite + 1]
    middle = torch.cat([
        v, (v[1:] + v[:-1]) / 2,
        torch.tensor([fmt.max * 1.01, fmt.max * 2, 1e-45, 1e-39, 3e38, math.inf, math.nan]),
    ]).float()
    near = torch.cat([
        middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(math.inf))
    ])
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return torch.cat([near, -near, drawn * torch.logspace(-40, 38, 1000)])


@needs_compiler
@pytest.mark.parametrize("mode", ROUNDING)
@each("overflow", ["saturate", "special"])
def test_compiled_equals_eager(mode, overflow):
    for name, fmt in FORMATS.items():
        if overflow == "special" and fmt.specials == "none": continue
        x, key = hard_inputs(fmt), rounding_key(4) if mode == "stochastic" else None
        results = []
        for path in ("eager", "compiled"):
            before = set_path(path)
            results.append(fake_quantize(x, fmt, 0.37, rounding=mode, overflow=overflow, key=key))
            assert not K.state["broken"]
            set_path(before)
        a, b = results
        # a NaN's sign is no result where there is no -0
        if fmt.code_minus_zero is None: a, b = a.nan_to_num(7e7), b.nan_to_num(7e7)
        assert same_bits(a, b), name


def test_chunks_and_layouts_change_nothing():
    x, key = torch.randn(700, 400, generator=torch.Generator().manual_seed(0)), rounding_key(1)
    for mode in ROUNDING:
        asked = dict(rounding=mode, key=key if mode == "stochastic" else None)
        whole = fake_quantize(x, "E4M3", 0.1, **asked)
        turned = fake_quantize(x.t().contiguous().t(), "E4M3", 0.1, **asked)
        assert torch.equal(turned, whole), mode
        for shape in ((700, 1), (1, 400)):
            spread = fake_quantize(x, "E4M3", torch.full(shape, 0.1), **asked)
            assert torch.equal(spread, whole), (mode, shape)
        assert torch.equal(fake_quantize(x[:10], "E4M3", 0.1, **asked), whole[:10]), mode
    assert fake_quantize(x.t(), "E4M3").stride() == x.t().stride()
    assert torch.equal(
        uniform(torch.Size([700, 400]), key)[:3], uniform(torch.Size([3, 400]), torch.tensor(key))
    )


def test_no_compiler_means_eager_and_one_warning():
    code = (
        "import warnings, torch\nfrom altgrad.numbers.quantize import *\nset_path('compiled')\nx = "
        "torch.linspace(-1, 1, 4096)\n"
        "with warnings.catch_warnings(record=True) as seen:\n    warnings.simplefilter('always')\n "
        "   ys = [fake_quantize(x, 'E4M3') for _ in range(3)]\n"
        "mine = [w for w in seen if 'altgrad computes eagerly' in "
        "str(w.message)]\nset_path('eager')\n"
        "assert len(mine) == 1, len(mine)\nassert all(torch.equal(y, fake_quantize(x, 'E4M3')) for "
        "y in ys)"
    )
    env = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert not done.returncode, done.stderr[-1500:]


def test_unknown_path_is_refused():
    with pytest.raises(InputError, match="allowed: auto, eager, compiled, triton"): set_path("fast")


# gradients and transforms


def test_gradients_are_the_stated_ones():
    incoming = torch.randn(6, generator=torch.Generator().manual_seed(0))
    for name, fmt in FORMATS.items():
        for function, factor in ((fake_quantize, 1.0), (quantize, 0.25)):
            x = torch.tensor([0.3, 3.0, 1e-3, -0.2, math.inf, math.nan]) * fmt.max
            x = x.clamp(max=1e38).requires_grad_()
            scale = torch.tensor(1 / factor, requires_grad=True)
            function(x, fmt, scale).backward(incoming)
            assert torch.equal(x.grad, incoming / (1 / factor)) and scale.grad is None, name
    x, scale = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(0.3, requires_grad=True)
    dequantize(x, scale).backward(incoming[:2])
    assert torch.equal(x.grad, incoming[:2] * 0.3) and scale.grad is None


def test_operator_and_bypass_have_the_same_gradient():
    x = torch.tensor([1.0, 464.0, 465.0, -1e9, math.nan])
    for gradient in ("straight_through", "clipped"):
        for multiply in (True, False):
            grads = []
            for call in (torch.ops.altgrad.fake_quantize, K._Estimator.apply):
                leaf = x.clone().requires_grad_()
                call(
                    leaf, torch.tensor(1.0), None, "E4M3b7fn", "nearest", "saturate", 24, 0,
                    multiply, gradient,
                ).sum().backward()
                grads.append(leaf.grad)
            assert torch.equal(*grads)
            assert grads[0].tolist() == ([1, 1, 0, 0, 1] if gradient == "clipped" else [1] * 5)


def test_compiled_training_step_has_one_graph_for_all_keys():
    counter = torch._dynamo.testing.CompileCounter()
    def eager(x, key): return fake_quantize(x, "E4M3", 0.5, rounding="stochastic", key=key)
    step, x = torch.compile(eager, fullgraph=True, backend=counter), torch.randn(8, 8)
    for i in range(5):
        key = rounding_key(0, torch.tensor(i))
        assert torch.equal(step(x, key), eager(x, rounding_key(0, i)))
    assert counter.frame_count == 1


@needs_compiler
def test_one_library_serves_formats_lengths_and_scales(monkeypatch):
    before = set_path("compiled")
    fake_quantize(torch.randn(10), "E4M3")
    library = N.state["library"]
    assert library is not None
    monkeypatch.setattr(N, "start_build", lambda target: pytest.fail("built again"))
    for n, name, scale in ((1000, "E4M3", 0.3), (2000, "E2M5", 0.7), (777, "E0M7", 0.9)):
        fake_quantize(torch.randn(n), name, scale)
    assert N.state["library"] is library
    set_path(before)


@needs_compiler
@each("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_library_takes_other_dtypes_and_scales_of_rows(dtype):
    x = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.rand(300, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    for scale, mode, key in product((0.25, 0.3, rows), ("nearest", "stochastic"), (3,)):
        asked = dict(rounding=mode, key=key if mode == "stochastic" else None)
        a, b = by_path("eager", x, scale, asked), by_path("compiled", x, scale, asked)
        assert torch.equal(a, b) and a.dtype == dtype


def by_path(path, x, scale, asked):
    before = set_path(path)
    try: y = fake_quantize(x, "E4M3", scale, **asked)
    finally:
        broken = K.state["broken"]
        set_path(before)
    assert path == "eager" or N.state["library"] and not broken
    return y


@needs_compiler
def test_numbers_that_are_not_in_memory_are_read_by_torch():
    x = torch.tensor([1.07, -300.0, 5e-4])
    for odd in (torch._neg_view(x), torch._efficientzerotensor(3), torch.complex(x, x).conj().imag):
        before = set_path("compiled")
        try:
            assert torch.equal(fake_quantize(odd, "E4M3"), fake_quantize(odd.clone() + 0, "E4M3"))
            assert torch.equal(quantize_stats(odd, "E4M3")[0], fake_quantize(odd.clone() + 0, "E4M3"))
        finally: set_path(before)


@needs_compiler
def test_a_default_device_does_not_move_what_the_library_reads():
    code = """
import torch
with torch.device("meta"): import altgrad.numbers.kernels as K
from altgrad.numbers.counts import histogram_of, quantize_stats
from altgrad.numbers.quantize import fake_quantize
from altgrad.model.points import Precision
from altgrad.watching.sums import round_and_sum
K.set_path("compiled")
x = torch.tensor([1.07, 500.0])
with torch.device("meta"):
    y, stats = quantize_stats(x, "E4M3", histogram=False)
    z, sums = round_and_sum(x, Precision("E4M3"), torch.tensor(1.0, device="cpu"))
assert y.tolist() == z.tolist() == fake_quantize(x, "E4M3").tolist() == [1.125, 448.0]
assert stats.overflow == 1 and sums.device.type == "cpu" and K.state["proved"] and not K.state["broken"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-1500:]


@pytest.fixture
def quick(tmp_path):
    "An environment with an empty cache and a compiler that does not optimize: it takes a seventh of the time."
    (compiler := tmp_path / "c++").write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    return {**os.environ, "ALTGRAD_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}


@needs_compiler
def test_a_damaged_library_is_built_again(quick):
    code = """
import torch, warnings
from altgrad.numbers import native as N
from altgrad.numbers.quantize import fake_quantize, set_path
N.library_path().parent.mkdir(parents=True)
N.library_path().write_bytes(b"no library")
set_path("compiled")
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert fake_quantize(torch.tensor([1.07]), "E4M3").item() == 1.125
assert N.state["library"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=quick)
    assert not done.returncode, done.stderr[-1500:]


@needs_compiler
def test_a_child_does_not_wait_for_the_compiler_of_its_parent(quick):
    code = """
import os, torch
from altgrad.numbers import native as N
from altgrad.numbers.quantize import fake_quantize, set_path
assert N.build_library() is None  # begun, and not waited for
child = os.fork()
set_path("compiled")
y = fake_quantize(torch.tensor([1.07]), "E4M3")
if not child: os._exit(0 if N.state["library"] and y.item() == 1.125 else 1)
assert os.waitpid(child, 0)[1] == 0 and N.state["library"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=quick)
    assert not done.returncode, done.stderr[-1500:]


@needs_compiler
def test_rounding_goes_on_while_the_interpreter_ends():
    code = """
import threading, time, torch
from altgrad.numbers import native as N
from altgrad.numbers.quantize import fake_quantize, set_path
torch.set_num_threads(2); set_path("compiled"); N.SHARED = 1000
x = torch.randn(100_000)
fake_quantize(x[:10], "E4M3")
main = threading.main_thread()
def late():
    main.join()
    print(fake_quantize(x, "E4M3").shape[0])
threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "100000\n", done.stderr[-1500:]


@needs_compiler
def test_threads_share_a_large_tensor_and_change_nothing(monkeypatch):
    monkeypatch.setattr(N, "SHARED", 1000)
    x, asked = torch.randn(5, 9001), dict(rounding="stochastic", key=9)
    threads = torch.get_num_threads()
    for shaped, scale in ((x, 0.3), (x, torch.rand(5, 1) + 0.1), (x.view(-1), 0.5)):
        torch.set_num_threads(3)
        try: shared = by_path("compiled", shaped, scale, asked)
        finally: torch.set_num_threads(threads)
        assert torch.equal(shared, by_path("eager", shaped, scale, asked))


@needs_compiler
def test_a_child_after_a_fork_has_threads_of_its_own():
    code = """
import os, torch
from altgrad.numbers import native as N
from altgrad.numbers.quantize import fake_quantize, set_path
torch.set_num_threads(2); set_path("compiled"); N.SHARED = 1000
x = torch.randn(10000)
y = fake_quantize(x, "E4M3")
child = os.fork()
if not child: os._exit(0 if torch.equal(fake_quantize(x, "E4M3"), y) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-1500:]


@pytest.mark.slow
@needs_compiler
def test_a_compiler_that_changes_values_is_found_out(tmp_path):
    code = """
import warnings, torch
from altgrad.numbers.quantize import fake_quantize, set_path
x = torch.randn(4096)
set_path("eager"); y = fake_quantize(x, "E4M3")
set_path("compiled")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert torch.equal(fake_quantize(x, "E4M3"), y)
assert "compute other bits" in str(seen[0].message), seen
"""
    env = os.environ | {"CXX": "c++ -ffast-math -fassociative-math", "ALTGRAD_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert not done.returncode, done.stderr[-1500:]


def test_export_holds_the_operator():
    class Layer(torch.nn.Module):
        def forward(self, x): return fake_quantize(x, "E4M3", 0.5) + 1

    x = torch.randn(3, 4)
    program = torch.export.export(Layer(), (x,))
    assert torch.ops.altgrad.fake_quantize.default in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(x), Layer()(x))


def test_fake_tensors_and_inference_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert fake_quantize(torch.empty(3, 4, dtype=torch.bfloat16), "E4M3", 0.5).shape == (3, 4)
    with torch.inference_mode(): assert rounded([1.07], "E4M3") == [1.125]
    x = torch.ones(2, 3)
    assert torch.equal(torch.func.vmap(lambda row: fake_quantize(row, "E4M3"))(x), x)


def test_nested_vmap_draws_what_each_draws_alone():
    x, keys = torch.randn(3, 2, 50), torch.tensor([rounding_key(i) for i in range(4)])
    one = lambda x, k: fake_quantize(x, "E2M5", 0.1, rounding="stochastic", key=k)
    nested = torch.func.vmap(torch.func.vmap(one, in_dims=(0, None)), in_dims=(None, 0))(x, keys)
    alone = torch.stack([torch.stack([one(m, int(k)) for m in x]) for k in keys])
    assert torch.equal(nested, alone)


def test_unregistered_format_travels_through_the_operator():
    fmt, x = FP8Format("mine", 4, 2, bias=3, specials="fn"), torch.randn(100)
    compiled = torch.compile(lambda x: fake_quantize(x, fmt), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), fake_quantize(x, fmt))


@pytest.mark.slow
@needs_compiler
def test_auto_builds_after_many_in_the_background_and_keeps_the_library(quick):
    code = """
import time, torch
from altgrad.numbers import kernels as K, native as N
from altgrad.numbers.quantize import fake_quantize, set_path
set_path("auto"); K._LEAST, K._AFTER = 1000, 4500  # a small tensor counts as 1000 elements
said = [K.path_text("cpu")]
for n in (999, 1000, 999, 1500):
    fake_quantize(torch.zeros(n), "E4M3")
    assert not N.state["build"] and not N.state["library"]
x = torch.randn(5000)
first = fake_quantize(x, "E4M3")  # starts the compiler, and does not wait for it
assert N.state["build"] and not N.state["library"]
N.state["build"].wait()
assert torch.equal(fake_quantize(x, "E4M3"), first) and N.state["library"]
assert said == [K.path_text("cpu")] and said[0].startswith("C++ kernels for")  # the same before and after
print(N.library_path().is_file())
"""
    env = quick | {"ALTGRAD_PATH": "auto"}
    run = lambda code: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    done = run(code)
    assert done.stdout == "True\n", done.stderr[-1500:]
    # another process finds it, and uses it for small tensors from the first call on
    again = run("import torch\nfrom altgrad.numbers import native as N\n"
                "from altgrad.numbers.quantize import fake_quantize\n"
                "N.start_build = None\nfake_quantize(torch.ones(3), 'E4M3')\nprint(bool(N.state['library']))")
    assert again.stdout == "True\n", again.stderr[-1500:]


@each("overflow", ["saturate", "special"])
@each("name", ["E4M3", "E5M2", "float8_e4m3fnuz", "float8_e3m4"])
def test_a_histogram_counts_the_codes_of_the_result(name, overflow, path):
    "Whatever an input was: what became NaN has NaN's code, and not that of zero."
    fmt, g = FORMATS[name], torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=g) * torch.logspace(-12, 12, 4096, 2.0)
    x[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    y, found = quantize_stats(x, fmt, overflow=overflow)
    assert torch.allclose(y, fake_quantize(x, fmt, overflow=overflow), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.histogram, torch.bincount(fmt.to_bits(y).long(), minlength=256))
    assert found.nan == 1 and found.inf == 2


SMALL = FP8Format("no zero", 4, 3, 7, "none", False, False)


@each("spec", [
    "E2M1b-20", "E2M1b-30", "E4M3b-60", "E1M2b-125", "E4M3b100", "E4M3b126", "E2M3b140", "E7M3b130",
    SMALL,
])
@each("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", ["auto", "eager", "compiled"], indirect=True)
def test_every_code_of_any_bias_is_counted_once(spec, dtype, path):
    fmt = get_format(spec)
    values = fmt.values[~fmt.values.isnan()].to(dtype)
    y, found = quantize_stats(values, fmt, overflow="saturate" if fmt.specials == "none" else "special")
    assert torch.equal(y, values)
    once = torch.bincount(fmt.to_bits(values).long(), minlength=2**fmt.bits)
    assert torch.equal(found.histogram, once) and once.max() == 1
    assert torch.equal(histogram_of(values.float(), fmt), once)


FLUSHED = """
import torch
from altgrad.numbers import kernels, native
from altgrad.numbers.counts import histogram_of, quantize_stats
from altgrad.numbers.formats import FORMATS, get_format
kernels.native_now()
formats = [f for f in FORMATS.values() if f.min_spacing >= 2.0**-126] + [get_format("E2M1b-10")]
def counted():
    found = []
    for path in ("auto", "eager"):
        kernels.set_path(path)
        for f in formats: found.append(quantize_stats(f.values[~f.values.isnan()], f)[1].histogram)
    return found
before = counted()
assert torch.set_flush_denormal(True)
print(len(formats) > 25 and all(map(torch.equal, counted(), before)))
"""


def test_a_histogram_is_the_same_where_subnormal_numbers_are_flushed():
    "Values of a format that are float32's normal numbers have their codes there, too."
    done = subprocess.run([sys.executable, "-c", FLUSHED], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr[-1500:]
