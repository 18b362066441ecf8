"""The Triton kernels: bit for bit the CPU path under Triton's interpreter, compiled for a GPU
without one, refused in one line where they cannot run, and imported by nobody who did not ask."""
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("referee_script", ROOT / ".ci/referee.py")
HERE = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HERE, reason="Triton is not installed; it is made for Linux")


def python(*argv: str, interpret: bool) -> subprocess.CompletedProcess:
    "A process of its own, because Triton decides once how kernels run."
    more = {"TRITON_INTERPRET": "1"} if interpret else {}
    rest = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *argv], env=rest | more, cwd=ROOT, text=True,
                          capture_output=True, timeout=600)


@pytest.mark.slow
@needs_triton
def test_kernels_give_the_bits_of_the_cpu_path():
    done = python(".ci/referee.py", "--sample", interpret=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 8, done.stderr[-2000:]
    assert [r["wrong"] for r in found] == [[]] * len(found)
    assert all(r["compared"] > 10_000 for r in found)
    assert done.returncode == 0


def test_the_comparison_sees_one_bit(monkeypatch):
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "referee_script", script)
    spec.loader.exec_module(script)
    x = torch.tensor([1.0, 0.0, torch.nan, 2.0])
    y = torch.tensor([1.0, -0.0, -torch.nan, torch.nextafter(torch.tensor(2.0), x[0])])
    assert script.differing(x, y).tolist() == [False, True, False, True]
    assert not script.differing(x, x.clone()).any()


REFUSED = """
import torch
from altgrad.basics import InputError
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.formats import FP8Format
from altgrad.numbers.kernels import set_path
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.triton_kernels import triton_blocks
x = torch.ones(4)
unsigned = FP8Format("u", 4, 4, bias=7, specials="none", signed=False)
draw = lambda x, key: fake_quantize(x, "E4M3", rounding="stochastic", key=key)
calls = [
    lambda: fake_quantize(x.double(), "E4M3"), lambda: fake_quantize([1.0], "E4M3"),
    lambda: fake_quantize(x, "E4M4"), lambda: fake_quantize(x, "E4M3", 0.0),
    lambda: fake_quantize(x * 500, "E4M3", overflow="raise"),
    lambda: fake_quantize(x, "E2M1", overflow="special"),
    lambda: fake_quantize(x, "E4M3", key=1), lambda: fake_quantize(x, unsigned),
    lambda: fake_quantize(x.to("meta"), "E4M3"),
    lambda: torch.func.vmap(draw)(x.view(2, 2), torch.arange(2)),
    lambda: quantize_stats(x, "E4M3", rounding="none"), lambda: quantize_stats(x.half(), "E4M3"),
    lambda: triton_blocks(x, "E4M3", 0), lambda: triton_blocks(x, "float16"),
    lambda: triton_blocks(x * torch.nan, "E2M1"), lambda: triton_blocks(x[:0], "E4M3"),
    lambda: fake_quantize(x, "E4M3"),
]
set_path("triton")
for call in calls:
    try: call()
    except (InputError, OverflowError) as e: print(e)
    else: print("accepted")
"""
WHY = ("dense float32 .or half. tensor, not torch.float64", "dense float tensor, not list",
       "unknown format", "positive and finite", "4 of 4 values round beyond E4M3",
       "neither infinity nor NaN", "takes a key", "cannot round to u; allowed: the registered",
       "run on CUDA, not on meta", "no numbers for a batch of keys", "unknown rounding",
       "dense float32 tensor, not torch.float16", "1 to 1024", "at most 8 bits", "no code for NaN",
       "with elements")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("interpret", (True, False))
def test_what_they_cannot_do_is_refused_in_one_line(interpret):
    done = python("-c", REFUSED, interpret=interpret)
    lines = done.stdout.splitlines()
    assert len(lines) == len(WHY) + 1, done.stderr[-2000:]
    if not interpret: assert all("set TRITON_INTERPRET=1" in line for line in lines[-1:])
    else:
        assert lines[-1] == "accepted"
        for line, why in zip(lines, WHY): assert re.search(why, line), line


@pytest.mark.slow
def test_without_triton_the_module_imports_and_says_what_is_missing():
    code = ("import sys; sys.modules['triton'] = None\n" + REFUSED.split("calls")[0]
            + "for call in (lambda: triton_blocks(x, 'E4M3'), lambda: set_path('triton')):\n"
            + "    try: call()\n    except InputError as e: print(e)\n"
            + "print(fake_quantize(x, 'E4M3').tolist())")
    why = "Triton is not installed; on Linux: pip install triton\n"
    assert python("-c", code, interpret=False).stdout == why + why + "[1.0, 1.0, 1.0, 1.0]\n"


def test_nobody_imports_triton_who_did_not_ask():
    code = """
import pkgutil, sys, importlib, torch
import altgrad
before = set(sys.modules)
for m in pkgutil.walk_packages(altgrad.__path__, "altgrad."):
    if m.name != "altgrad.numbers.triton_kernels": importlib.import_module(m.name)
print(*[m for m in set(sys.modules) - before if m.split(".")[0] == "triton"], sep="")
"""
    assert python("-c", code, interpret=False).stdout == "\n"


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from altgrad.numbers import triton_kernels as T

def ptx(kernel, pointers, choices):
    signature = {p.name: "constexpr" if p.name in choices else pointers.get(p.name, "i32")
                 for p in kernel.params}
    constants = {(kernel.arg_names.index(k),): v for k, v in choices.items()}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32),
                          options={"enable_fp_fusion": False}).asm["ptx"]

rounds = dict(signed=1, keeps_zero=1, scaled=1, multiply=1, rounding="stochastic",
              overflow="saturate", random_bits=24, SIZE=1024)
data = dict(x="*i32", scale="*fp32", words="*i32", y="*i32", counts="*i32", bins="*i32",
            squares="*fp64")
blocks = dict(x="*i32", codes="*u8", scales="*u8", whole="*fp32")
print(json.dumps([
    ptx(T._fake_quantize_kernel, data, rounds),
    ptx(T._stats_kernel, data, rounds | {"histogram": 1}),
    ptx(T._fake_quantize_kernel, data, rounds | dict(rounding="nearest", overflow="mask")),
    ptx(T._stats_kernel, data, rounds | dict(overflow="special", histogram=1)),
    ptx(T._blocks_kernel, blocks, dict(keeps_zero=1, two_levels=0, ROWS=32, SIZE=32)),
    ptx(T._blocks_kernel, blocks, dict(keeps_zero=1, two_levels=1, ROWS=64, SIZE=16)),
]))
"""


COPY = """
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def copy(out, x, n, BLOCK: tl.constexpr):  # masked as the kernels of torch.compile are
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:]
    tl.store(out + i, tl.load(x + i, i < n), i < n)

names = {"out": "*fp32", "x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
for known in ((0, 1), (0, 1, 2)):  # addresses, or the length too, as multiples of 16
    whole = {(i,): [["tt.divisibility", 16]] for i in known}
    code = triton.compile(ASTSource(copy, names, {(3,): 1024}, whole), target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": 4}).asm["ptx"]
    print(len(re.findall(r"ld.global.v4", code)), len(re.findall(r"ld.global.b32", code)))
"""


@needs_triton
def test_a_thread_reads_vectors_only_where_the_length_is_a_multiple_of_16(tmp_path):
    "Why the compiled kernels work in rows of 16: 8 numbers of a thread are 8 loads, or 2 of four each."
    script = tmp_path / "copy_.py"
    script.write_text(COPY)
    done = python(str(script), interpret=False)
    assert done.stdout.split() == ["0", "8", "2", "0"], done.stderr[-2000:]


@pytest.mark.slow
@needs_triton
def test_what_a_gpu_would_run_fuses_and_flushes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = python("-c", COMPILE, interpret=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for text in json.loads(done.stdout):
        floats = set(re.findall(r"\b[a-z]+[\w.]*\.f(?:16|16x2|32|64)\b", text))
        # what only moves and compares rounds nothing
        used = {op for op in floats if not re.match("mov|ld|st|abs|setp|selp", op)}
        assert used and used <= {
            *(f"{op}{how}.{kind}" for op in ("add", "sub", "mul") for how in ("", ".rn")
              for kind in ("f32", "f64")), "div.rn.f32", "cvt.f64.f32"}, used
        assert "ftz" not in text and "fma" not in text and "approx" not in text


PATHS = """
import os, sys, warnings
import torch
import altgrad, altgrad.cli
assert "triton" not in sys.modules
from altgrad.numbers import kernels as K
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.quantize import fake_quantize, rounding_key
assert K.state["path"] == "triton" and "triton" not in sys.modules

import altgrad.numbers.triton_kernels as T
calls = []
for name in ("triton_round", "triton_count"):
    def counting(*args, kernel=getattr(T, name), name=name):
        calls.append(name)
        return kernel(*args)
    setattr(T, name, counting)

def by(path, f):
    before = K.set_path(path)
    try: return f()
    finally: K.set_path(before)

def same(f):
    a, b = by("triton", f), by("eager", f)
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert a.dtype == b.dtype and a.stride() == b.stride()

x = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)) * 300
one = torch.tensor(rounding_key(1))
for y in (x, x.t(), x.bfloat16(), x.half(), x[:, ::2], x[:0], x[0, 0]):
    for fmt in ("E4M3", "E5M2"):
        for more in (dict(), dict(scale=0.3), dict(rounding="stochastic", key=one),
                     dict(overflow="special"), dict(gradient="clipped")):
            same(lambda: fake_quantize(y, fmt, **more))
assert set(calls) == {"triton_round"}
count = len(calls)
def gradient(how):
    w = (x * 4).requires_grad_()
    (fake_quantize(w, "E4M3", 0.7, gradient=how) * x).sum().backward()
    return w.grad
for how in ("straight_through", "clipped"): same(lambda: gradient(how))
assert len(calls) == count + 3  # the clipped gradient asks what overflowed, too
try: by("triton", lambda: fake_quantize(x, "E2M1", overflow="raise"))
except OverflowError as e: assert "of 420 values" in str(e)
else: raise AssertionError
for overflow in ("saturate", "special"):
    a, b = (by(p, lambda: quantize_stats(x, "E5M2", 0.001, overflow=overflow)[1])
            for p in ("triton", "eager"))
    assert a.overflow == b.overflow > 0 and torch.equal(a.histogram, b.histogram)
assert calls.count("triton_count") == 2
assert torch.equal(by("triton", lambda: quantize_stats(x[:0], "E4M3")[1]).histogram, torch.zeros(256))

# what `auto` does on a GPU where compiling fails, on a CPU that passes for one
K.set_path("auto")
assert K.path_text("cpu").startswith("C++ kernels for")
K._WRITTEN_FOR, K._FROM, K._AFTER = ("cpu",), 100, 0
def fails(*args): raise RuntimeError("no compiler")
K.N.find_library, K.state["proved"], calls[:] = fails, False, []
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for y in (x, x, x[0], x.double()): fake_quantize(y, "E4M3")
assert len(said) == 1 and "because compiling C++ failed (RuntimeError)" in str(said[0].message)
assert calls == ["triton_round"]  # from the second call on; not what is small, and not float64
assert K.path_text("cpu") == (
    "Triton's kernels for tensors from 100 elements on, else eager: compiling failed")
T.triton_round = fails
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    ys = [fake_quantize(x, "E4M3") for _ in range(3)]
assert len(said) == 1 and "eagerly, because Triton failed" in str(said[0].message)
assert K.path_text("cpu") == "eager: compiling failed"
assert all(torch.equal(y, by("eager", lambda: fake_quantize(x, "E4M3"))) for y in ys)
K.set_path("auto")
K._MOST = 400
assert not K.worth_compiling(x) and K._wants_triton(x)
print("fine")
"""


@pytest.mark.slow
@needs_triton
def test_triton_is_a_path(monkeypatch):
    monkeypatch.setenv("ALTGRAD_PATH", "triton")
    done = python("-c", PATHS, interpret=True)
    assert done.stdout == "fine\n", done.stderr[-2000:]


@needs_triton
def test_rounding_by_triton_conforms():
    code = """
from functools import partial
from altgrad.numbers.kernels import set_path
from altgrad.numbers.quantize import quantize
from altgrad.numbers.referee import judge
set_path("triton")
for name in ("E4M3", "E2M1", "E7M0"): print(judge(lambda x: quantize(x, name), name).names)
"""
    done = python("-c", code, interpret=True)
    assert done.stdout == "[]\n" * 3, done.stderr[-2000:]
