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
from altgrad.numbers.triton_kernels import triton_blocks, triton_fake_quantize, triton_stats
x = torch.ones(4)
calls = [
    lambda: triton_fake_quantize(x.double(), "E4M3"), lambda: triton_fake_quantize([1.0], "E4M3"),
    lambda: triton_fake_quantize(x, "E4M4"), lambda: triton_fake_quantize(x, "E4M3", 0.0),
    lambda: triton_fake_quantize(x, "E4M3", overflow="raise"),
    lambda: triton_fake_quantize(x, "E2M1", overflow="special"),
    lambda: triton_fake_quantize(x, "E4M3", key=1),
    lambda: triton_stats(x, "E4M3", rounding="none"),
    lambda: triton_blocks(x, "E4M3", 0), lambda: triton_blocks(x, "float16"),
    lambda: triton_blocks(x * torch.nan, "E2M1"), lambda: triton_blocks(x[:0], "E4M3"),
    lambda: triton_fake_quantize(x, "E4M3"),
]
for call in calls:
    try: call()
    except InputError as e: print(e)
    else: print("accepted")
"""
WHY = ("dense float32", "dense float tensor, not list", "unknown format", "positive and finite",
       "allowed: saturate", "neither infinity nor NaN", "takes a key", "unknown rounding",
       "1 to 1024", "at most 8 bits", "no code for NaN", "with elements")


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


def test_without_triton_the_module_imports_and_says_what_is_missing():
    code = ("import sys; sys.modules['triton'] = None\n" + REFUSED.split("calls")[0]
            + "try: triton_fake_quantize(x, 'E4M3')\nexcept InputError as e: print(e)")
    assert python("-c", code, interpret=False).stdout == (
        "Triton is not installed; on Linux: pip install triton\n")


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

rounds = dict(signed=1, keeps_zero=1, scaled=1, rounding="stochastic", overflow="saturate",
              random_bits=24, SIZE=1024)
data = dict(x="*i32", scale="*fp32", y="*i32", counts="*i64", codes="*i64", squares="*fp64")
print(json.dumps([
    ptx(T._fake_quantize_kernel, data, rounds),
    ptx(T._stats_kernel, data, rounds | {"histogram": 1}),
    ptx(T._blocks_kernel, dict(x="*i32", codes="*u8", scales="*u8"),
        dict(keeps_zero=1, ROWS=32, SIZE=32)),
]))
"""


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
