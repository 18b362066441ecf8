"""The referee of rounding: planted faults are named, right quantizers are not accused, and what
cannot be judged is said in one line."""
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import gfloat
import numpy as np
import pytest
import torch
from gfloat.formats import (
    format_info_ocp_e2m1, format_info_ocp_e2m3, format_info_ocp_e3m2, format_info_ocp_e5m2,
)

import mutants
from altgrad.basics import InputError
from altgrad.cli import main
from altgrad.geometry.outside import use_function
from altgrad.numbers.formats import get_format
from altgrad.numbers.kernels import rounding_key
from altgrad.numbers.quantize import fake_quantize, quantize
from altgrad.numbers.referee import (
    HYPOTHESES, INF, Program, Quantizer, inputs, judge, judge_apart, render_verdict,
)

from cases import each
from marks import all_slow_but

SIGN = 0x80000000


@pytest.fixture(autouse=True)
def seeds():
    "The quantizers that draw random numbers take them from the global generators."
    torch.manual_seed(0)
    np.random.seed(0)


def values(*numbers: float) -> np.ndarray: return np.array(numbers, np.float32).view(np.uint32)


# faults


@pytest.mark.parametrize("planted", all_slow_but(10, mutants.MUTANTS), ids=lambda p: p.id)
def test_a_planted_fault_is_named(planted):
    verdict = judge(planted.f, planted.format, **planted.asks)
    assert verdict.names == [planted.fault], str(verdict)
    assert not verdict.conforms


@pytest.mark.parametrize("planted", mutants.COMBINED, ids=lambda p: p.id)
def test_two_faults_at_once_are_named(planted):
    verdict = judge(planted.f, planted.format, **planted.asks)
    assert sorted(verdict.names) == sorted(planted.fault.split(" + ")), str(verdict)


@pytest.mark.parametrize("planted", mutants.HALVES, ids=lambda p: p.id)
def test_a_fault_of_a_function_of_half_precision_is_named(planted):
    verdict = judge(planted.f, planted.format, **planted.asks)
    assert verdict.names == [planted.fault], str(verdict)
    assert verdict.dtype == planted.asks["dtype"] and f"of {verdict.dtype})" in str(verdict)


@pytest.mark.parametrize("planted", mutants.RIGHT_HALVES, ids=lambda p: p.id)
def test_a_right_quantizer_of_half_precision_conforms(planted):
    verdict = judge(planted.f, planted.format, **planted.asks)
    assert verdict.conforms, str(verdict)
    scales = 11 if "scale" in verdict.signature else 1
    nan = 2046 if get_format(planted.format).code_nan is None else 0  # of float16: nothing is right
    assert verdict.judged == {verdict.dtype: scales * 2**16 - nan}


@each("dtype", ("bfloat16", "float16"))
def test_a_function_of_half_precision_gets_every_number_of_it(dtype):
    "What is given, in order, is all patterns of the type; a NaN keeps its payload."
    given, own = [], getattr(torch, dtype)
    def seen(x):
        given.append(x.view(torch.int16).clone())
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert judge(seen, "E4M3", dtype=dtype).conforms
    first = given[0].int() & 0xFFFF
    assert len(first.unique()) == len(first) == 2**16
    x = given[0].view(own).double()
    assert (x[first < 0x7C00].diff() > 0).all()


def test_there_are_as_many_planted_faults_as_were_promised():
    assert len(mutants.MUTANTS) >= 40
    per_name = {name: {p.format for p in mutants.MUTANTS if p.fault == name}
                for name in {p.fault for p in mutants.MUTANTS}}
    assert len(per_name) == 17 and all(len(formats) > 1 for formats in per_name.values())


# right ones


@pytest.mark.parametrize("planted", mutants.RIGHT, ids=lambda p: p.id)
def test_a_right_quantizer_conforms(planted):
    verdict = judge(planted.f, planted.format, **planted.asks)
    assert verdict.conforms, str(verdict)
    assert verdict.mismatches == 0 and sum(verdict.judged.values()) > 20


ALL = ("E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0", "mxint8", "float8_e4m3fnuz",
       "binary8p3", "float4_e2m1fn", "float8_e8m0fnu", "float16")
MODES = ("toward_zero", "up", "down", "away")
OURS = [
    *((name, "nearest", "saturate") for name in ALL),
    *((name, "nearest", "special") for name in ALL if get_format(name).specials != "none"),
    *(("E4M3", mode, "saturate") for mode in MODES), *(("E5M2", mode, "special") for mode in MODES),
    *(("mxint8", mode, "saturate") for mode in MODES),
]


@each("name, rounding, overflow", OURS)
def test_this_package_conforms(name, rounding, overflow):
    ours = partial(quantize, fmt=name, rounding=rounding, overflow=overflow)
    verdict = judge(lambda x: ours(x), name, rounding, overflow)
    assert verdict.conforms, str(verdict)


def test_this_package_divides_by_its_scale():
    verdict = judge(lambda x, s: quantize(x, "E4M3", s), "E4M3", signature="x, scale")
    assert verdict.conforms, str(verdict)


@each("name", ("E0M7", "E2M1", "E4M3", "E5M2", "E7M0"))
def test_stochastic_rounding_of_this_package_conforms(name):
    def ours(x, seed): return quantize(x, name, rounding="stochastic", key=rounding_key(seed))
    verdict = judge(ours, name, "stochastic", signature="x, seed")
    assert verdict.conforms, str(verdict)


@each("seed", range(8))
def test_a_right_function_is_not_accused_by_chance(seed):
    draw = np.random.default_rng(seed)
    def between(x):
        a = np.minimum(np.abs(x.astype(np.float64)), 448)
        u = mutants.spacing(a, -6, 3)
        return np.copysign(np.floor(a / u + draw.random(x.shape)) * u, x).astype(np.float32)
    verdict = judge(between, "E4M3", "stochastic", arrays="numpy")
    assert verdict.conforms, str(verdict)


def test_a_verdict_on_chance_can_be_repeated_and_leaves_the_generators_alone():
    def biased(x):
        half = torch.rand(x.shape) * 0.9
        return torch.floor(x.clamp(0, 3) + half)
    before = torch.get_rng_state()
    first, second = (judge(biased, "E2M1", "stochastic").faults[-1] for _ in range(2))
    assert first == second and torch.equal(torch.get_rng_state(), before)


GFLOAT = {"E2M1": format_info_ocp_e2m1, "E2M3": format_info_ocp_e2m3,
          "E3M2": format_info_ocp_e3m2, "E5M2": format_info_ocp_e5m2}


@pytest.mark.parametrize("name", GFLOAT)
@each("rounding", ("nearest", "toward_zero", "up", "down", "away"))
def test_gfloat_conforms(name, rounding):
    modes = {"nearest": "TiesToEven", "toward_zero": "TowardZero", "up": "TowardPositive",
             "down": "TowardNegative", "away": "TiesToAway"}
    def round_(x):
        with np.errstate(all="ignore"):
            y = gfloat.round_ndarray(
                GFLOAT[name], np.clip(x, -1e30, 1e30).astype(np.float64),
                getattr(gfloat.RoundMode, modes[rounding]), sat=True)
        return y.astype(np.float32)
    verdict = judge(round_, name, rounding, arrays="numpy")
    assert verdict.conforms, str(verdict)


def of_torchao(mode: str, dtype: torch.dtype):
    "Its scales of blocks of 32, as a function of amax."
    logging.disable(logging.WARNING)  # it tells which of its GPU libraries it cannot load
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    def scales(amax):
        x = torch.zeros(len(amax), 32)
        x[:, 5] = -amax
        return mx.to_mx(x, dtype, 32, mx.ScaleCalculationMode[mode])[0].flatten()
    return scales


@each("name, dtype", (
    ("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2), ("E2M1", torch.float4_e2m1fn_x2)))
@pytest.mark.parametrize("mode", ("FLOOR", "CEIL", "EVEN"))
def test_scales_of_torchao_conform(mode, name, dtype):
    verdict = judge(
        of_torchao(mode, dtype), name, rounding=mode.lower(), signature="amax", codes=True)
    assert verdict.conforms, str(verdict)


# what a verdict says


def test_the_least_input_is_the_least():
    half_up = next(p for p in mutants.MUTANTS if p.f.__name__ == "codes_half_up")
    fault = judge(half_up.f, half_up.format, **half_up.asks).faults[0]
    # half of the smallest subnormal is the smallest tie whose even neighbour is below
    assert (fault.input, fault.right, fault.given) == (
        "0x3A800000 = 0.0009765625", "0x00 = 0", "0x01 = 2^-9")
    assert fault.shares["bfloat16"] == 2 * 63 / 2**16  # every other of 126 ties, of both signs
    assert fault.count == 2 * 63


def test_a_verdict_is_json_text_and_a_page():
    verdict = judge(lambda x: x.to(torch.float8_e4m3fn).float() + 0.0, "E4M3", name="<b>mine")
    stored = json.loads(json.dumps(verdict.to_dict()))
    assert stored["faults"][0]["name"] == "-0 lost" and not stored["conforms"]
    assert str(verdict).splitlines()[1].startswith("-0 lost: 0x80000000 = -0.0 becomes 0x00 = 0")
    page = render_verdict(verdict)
    assert "<svg" in page and "&lt;b&gt;mine" in page and "<b>mine" not in page
    outside = re.sub(r'xmlns="[^"]*"', "", page)
    assert not re.search(r"https?:|src=|<script|<link", outside)
    assert "-0 lost" in verdict._repr_html_() and "-0 lost" in verdict._repr_markdown_()


def test_noise_is_that_of_the_function():
    chopped = partial(quantize, fmt="E4M3", rounding="toward_zero")
    verdict = judge(lambda x: chopped(x), "E4M3")
    assert verdict.names == ["another rounding mode"]
    w = torch.from_numpy(np.random.default_rng(7).standard_normal(2**16).astype(np.float32))
    w *= 2.0 ** torch.floor(torch.log2(448 / w.abs().max()))
    for given, rounding in ((verdict.sqnr_db, "toward_zero"), (verdict.sqnr_right_db, "nearest")):
        off = quantize(w, "E4M3", rounding=rounding).double() - w
        # 2^16 squares summed in float64 in another order: 2^16 * 2^-53 relative, 4.34 dB each
        assert given == pytest.approx(
            10 * torch.log10((w.double() ** 2).sum() / (off**2).sum()).item(), abs=1e-10)


def test_what_nothing_explains_is_said_with_its_least_input():
    def odd(x):
        q = x.to(torch.float8_e4m3fn).float()
        return torch.where((q == 3.5) & (x > 3.4), 3.25, q)
    verdict = judge(odd, "E4M3")
    assert verdict.names == ["unexplained"]
    assert verdict.faults[0].right == "0x46 = 3.5" and verdict.faults[0].given == "0x45 = 3.25"


def test_other_faults_have_names_too():
    fnuz = judge(lambda x: x.clamp(-240, 240).to(torch.float8_e4m3fnuz).float(), "E4M3")
    assert fnuz.names[0] == "another format"
    assert judge(lambda x: x.clone(), "E4M3").names[-1] == "no value of the format"
    def beyond(x): return get_format("E2M1").to_bits(x.nan_to_num(0.0)) + 16 * (x == 3)
    assert judge(beyond, "E2M1", codes=True).names == ["no value of the format"]
    assert judge(lambda x: x.clamp(-240, 240).to(torch.float8_e4m3fn).float(), "E4M3").names == [
        "limit too low"]
    unsigned = judge(lambda x: x.abs().to(torch.float8_e4m3fn).float(), "E4M3")
    assert unsigned.names == ["-0 lost", "sign lost"]
    assert judge(torch.zeros_like, "E4M3").names == ["constant"]
    def ignored(x, scale): return x.to(torch.float8_e4m3fn).float()
    assert judge(ignored, "E4M3", signature="x, scale").names == ["scale ignored"]
    def times(x, scale): return (x * scale).to(torch.float8_e4m3fn).float()
    assert judge(times, "E4M3", signature="x, scale").names == ["multiplied by the scale"]


def test_answers_need_no_search_where_they_come_in_runs():
    from altgrad.numbers.referee import _run_answers
    for name, mode in (("E4M3", "even"), ("E5M2", "up"), ("mxint8", "away"), ("E0M7", "down")):
        q = Quantizer(get_format(name), mode, "saturate", "saturate")
        for start in (0, 0x3F800000, INF - 2**10, SIGN - 2**10, SIGN + 0x3F000000, 2**32 - 2**11):
            bits = np.arange(start, start + 2**11, dtype=np.uint32)
            assert np.array_equal(_run_answers(q, bits), q.answers(bits))


def test_a_half_that_is_added_in_float32_is_told_from_ties():
    def half_added(x):
        a = x.abs().clamp(max=448)
        u = torch.exp2(torch.frexp(a)[1].clamp(min=-5) - 4.0)
        return (torch.floor(a / u + 0.5) * u).clamp(max=448).copysign(x)
    fault, = judge(half_added, "E4M3").faults
    assert fault.name == "ties away from zero" and "float32" in fault.detail
    assert fault.input == "0x3A7FFFFF = 0.00097656244"


def test_codes_that_wrap_around_overflow():
    def wraps(x):
        low = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(x.abs() >= 464.5, low & 0x80 | 0x10, low)
    assert judge(wraps, "E4M3", codes=True).names == ["overflow by another policy"]


def test_every_way_to_be_wrong_is_wrong_somewhere():
    fmt = get_format("E4M3")
    scale = float(np.float32(1 / 37))
    bits = np.concatenate([*inputs(fmt).values(), *inputs(fmt, scale).values()])
    for h in HYPOTHESES:
        policy = "special" if "begins" in h.change else "saturate"
        right = Quantizer(fmt, over=policy, infinite=policy)
        if h.change.get("tiny") in ("bfloat16", "float16"): right = replace(right, step="up")
        wrong = replace(right, **h.change)
        if wrong == right or h.change == {"through": "ignored"}: continue
        s = scale if "scale" in h.name or h.detail == "the quotient" else 1.0
        assert (wrong.answers(bits, s) != right.answers(bits, s)).any(), h


# what cannot be judged


def print_and_round(x):
    print("one\ntwo")
    return x


HOSTILE = {
    "raises": (lambda x: {}["u"], "raises KeyError: 'u'"),
    "raises what is no exception": (lambda x: sys.exit(3), "ends the process"),
    "shape": (lambda x: x[None], r"returns the shape \(1, \d+\) for"),
    "dtype": (lambda x: x.half(), "returns float16, not float32"),
    "float8": (lambda x: x.to(torch.float8_e5m2), "returns float8_e5m2, not float32; codes need"),
    "kind": (lambda x: x.numpy(), "returns ndarray, not a torch tensor"),
    "nothing": (lambda x: None, "returns NoneType"),
    "device": (lambda x: x.to("meta"), "returns a tensor on meta"),
    "in place": (lambda x: x.mul_(2), "changes its input"),
    "random": (lambda x: x + torch.rand(x.shape), "is not deterministic"),
    "largest": (lambda x: x / x.abs().max(), "depends on more than"),
    "largest finite": (lambda x: x * (448 / x[x.isfinite()].abs().max()), "depends on more than"),
    "says nothing": (lambda x: (_ for _ in ()).throw(MemoryError()), "raises MemoryError$"),
    "own scale": (lambda x: x / x[:5].nan_to_num(0, 0, 0).abs().sum(), "depends on more than"),
    "prints": (print_and_round, r"prints \(one two\); a quantizer must not"),
    "scale": (lambda x, scale: x, r"takes \(x, scale\) and would be given \(x\)"),
    "keyword": (lambda x, *, block: x, "block"),
}


@each("case", HOSTILE)
def test_what_cannot_be_judged_is_said_in_one_line(case):
    f, why = HOSTILE[case]
    with pytest.raises(InputError, match=why) as e: judge(f, "E4M3")
    assert len(str(e.value).splitlines()) == 1


@each("f, why", (
    (lambda x: x.mul_(2), "changes its input"),
    (lambda x: x.double(), "returns float64, not bfloat16"),
    (lambda x: x.half(), "returns float16, not bfloat16"),
    (lambda x: x.to(torch.float8_e4m3fn), "codes need --codes"),
    (lambda x: x * torch.rand(1), "is not deterministic"),
))
def test_a_function_of_half_precision_that_cannot_be_judged(f, why):
    with pytest.raises(InputError, match=why): judge(f, "E4M3", dtype="bfloat16")


@each("asks, why", (
    (dict(format="E4M4"), "unknown format"),
    (dict(dtype="bfloat61"), "did you mean bfloat16"),
    (dict(dtype="bfloat16", arrays="numpy"), "numpy has no bfloat16"),
    (dict(dtype="float16", signature="amax", rounding="up"), "signatures 'x' and 'x, scale'"),
    (dict(dtype="float16", rounding="stochastic"), "that are deterministic"),
    (dict(dtype="float16", everything=Path("none")), "asked for anyway"),
    (dict(rounding="neaerst"), "did you mean nearest"),
    (dict(rounding="floor"), "unknown rounding"),
    (dict(overflow="raise"), "unknown overflow"),
    (dict(signature="scale, x"), "unknown signature 'scale, x'; allowed: x; x, scale; "),
    (dict(signature="amax"), "unknown rounding"),
    (dict(signature="amax", rounding="up", overflow="special"), "scales have no overflow"),
    (dict(arrays="jax"), "unknown kind of arrays"),
    (dict(format="E2M1", overflow="special"), "neither infinity nor NaN"),
    (dict(rounding="stochastic", signature="x, scale"), "stochastic rounding is judged for"),
    (dict(signature="x, scale", everything=Path("none")), "all float32 numbers"),
))
def test_a_request_that_nobody_can_meet_is_refused(asks, why):
    with pytest.raises(InputError, match=why): judge(lambda x: x, **({"format": "E4M3"} | asks))


def test_values_times_their_scale_are_told_from_values():
    def back(x, scale): return (x / scale).to(torch.float8_e4m3fn).float() * scale
    with pytest.raises(InputError, match="values times the scale; allowed: --signature"):
        judge(back, "E4M3", signature="x, scale")
    assert judge(back, "E4M3", signature="x, scale -> q * scale").conforms


def test_a_nan_that_becomes_a_number_is_seen_in_products():
    def lost(x, scale): return torch.where(x.isnan(), 0.1234567, fake_quantize(x, "E4M3", scale))
    assert not judge(lost, "E4M3", signature="x, scale -> q * scale").conforms


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["E8M0", "bfloat16"])
def test_a_product_beyond_float32_is_held_against_nobody(fmt):
    def right(x, scale): return fake_quantize(x, fmt, scale)
    assert judge(right, fmt, signature="x, scale -> q * scale").conforms


@each("f, arrays, hint", (
    (lambda x: x.astype("f4"), "torch", "with --numpy it gets an array"),
    (lambda x: x.clamp(0), "numpy", "without --numpy it gets a torch tensor"),
))
def test_who_was_given_other_arrays_is_told(f, arrays, hint):
    with pytest.raises(InputError, match=hint): judge(f, "E4M3", arrays=arrays)


def test_chance_is_measured_against_chance():
    "The expected noise of fair rounding, not that of rounding to nearest, is what is right."
    dithered = next(p for p in mutants.RIGHT if p.f.__name__ == "dithered")
    verdict = judge(dithered.f, dithered.format, **dithered.asks)
    assert abs(verdict.sqnr_db - verdict.sqnr_right_db) < 0.2  # 2^16 draws; nearest is 3 dB better


FOREIGN = """
import os, time
import torch

def right(x): return x.to(torch.float8_e4m3fn).float()
def wrong(x): return x.bfloat16().to(torch.float8_e4m3fn).float()
def hangs(x): time.sleep(600)
def dies(x): os.abort()
def prints_below_python(x):
    os.write(1, b"not JSON")
    return right(x)
"""


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    "A folder with a file of functions."
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FOREIGN)
    return tmp_path


def test_a_function_that_hangs_or_dies_is_said(foreign, monkeypatch):
    # here the second process begins as it does for users
    monkeypatch.setattr("altgrad.numbers.referee.get_context", multiprocessing.get_context)
    with pytest.raises(InputError, match="hangs: a call takes more than 1 seconds"):
        judge_apart(partial(use_function, "mine.py:hangs"), "f", seconds=1, format="E4M3")
    with pytest.raises(InputError, match=r"ends its process \(signal 6\)"):
        judge_apart(partial(use_function, "mine.py:dies"), "f", format="E4M3")


@pytest.mark.slow
def test_a_program_that_hangs_is_gone_with_its_judge(tmp_path):
    script, pids = tmp_path / "hangs.py", tmp_path / "pids"
    script.write_text("import os, pathlib, sys, time\nos.fork()\n"
                      "with open(sys.argv[1], 'a') as file: file.write(f'{os.getpid()}\\n')\n"
                      "time.sleep(600)\n")
    command = shlex.join([sys.executable, str(script), str(pids)])
    with pytest.raises(InputError, match="hangs"):
        judge_apart(partial(Program, command, get_format("E4M3")), "hangs", seconds=1,
                    format="E4M3", codes=True, arrays="numpy")
    assert len(pids.read_text().split()) == 2
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError): wait_until_gone(int(pid))


def wait_until_gone(pid: int):
    "Wait until a process ends; ProcessLookupError as soon as it has."
    for _ in range(100):
        os.kill(pid, 0)
        # one that nobody waits for any more counts as gone
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.1)


def test_a_hash_is_that_of_the_text(foreign):
    sha = hashlib.sha256(FOREIGN.encode()).hexdigest()[:12]
    assert callable(use_function(f"mine.py:right@{sha}"))
    with pytest.raises(InputError, match="has another text than mine.py:right@0123456789ab"):
        use_function("mine.py:right@0123456789ab")
    text = Path(json.__file__).read_text(encoding="utf-8")
    assert use_function(f"json:dumps@{hashlib.sha256(text.encode()).hexdigest()[:12]}")
    with pytest.raises(InputError, match="has another text"): use_function(f"json:dumps@{sha}")


def test_a_sweep_of_another_program_has_another_state(foreign, monkeypatch):
    from altgrad.cli import _state_file
    monkeypatch.syspath_prepend(foreign)
    def state(function=None, binary=None):
        return _state_file(Namespace(function=function, binary=binary), {"name": ""})
    Path("sim.py").write_text("1")
    Path("tool").write_text("1")
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise SystemExit('imported')")
    Path("package/inner.py").write_text("1")
    asks = [dict(binary=f"{sys.executable} ./sim.py"), dict(binary="./tool x"),
            dict(function="package.inner:f"), dict(function="mine.py:right"), dict(binary="cat")]
    before = [state(**a) for a in asks]
    assert before == [state(**a) for a in asks]
    for file in ("sim.py", "tool", "package/inner.py", "mine.py"): Path(file).write_text("2")
    importlib.invalidate_caches()
    assert [a != state(**b) for a, b in zip(before, asks)] == [True] * 4 + [False]
    inner, cat = state(function="package.inner:f"), state(binary="cat")
    Path("package/helper.py").write_text("what inner.py may import")
    assert state(function="package.inner:f") != inner and state(binary="cat") == cat
    assert state(binary="cat") != state(binary="true")
    for name in ("nowhere.at.all:f", "math:sqrt", "no.py:f", "right"): assert state(name)
    with pytest.raises(InputError, match="cannot run"): state(binary="'")


# the command


def told(capsys, *argv: str) -> tuple[int, str, str]:
    try: code = main(list(argv))
    except SystemExit as e: code = e.code
    return (code, *capsys.readouterr())


def test_the_command_says_conforms_or_what_is_wrong(foreign, capsys):
    code, out, err = told(capsys, "conform", "mine.py:right", "--format", "E4M3")
    assert (code, err) == (0, "") and out.startswith("mine.py:right conforms (E4M3, nearest")
    code, out, err = told(capsys, "conform", "mine.py:wrong", "--format", "E4M3", "--html", "v.html")
    assert code == 1 and "double rounding through bfloat16: 0x" in out
    code, out, _ = told(capsys, "conform", "mine.py:wrong", "--format", "E4M3", "--dtype", "bfloat16")
    assert code == 0 and "of bfloat16): 65,536 inputs" in out  # it rounds nothing there
    assert "double rounding" in Path("v.html").read_text()


def test_a_module_of_this_folder_is_found_after_those_that_are_installed(foreign, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    Path("mine_too.py").write_text(FOREIGN)
    Path("json.py").write_text("raise SystemExit('imported')")
    code, out, _ = told(capsys, "conform", "mine_too:right", "--format", "E4M3")
    assert code == 0 and out.startswith("mine_too:right conforms")
    assert "raises" in told(capsys, "conform", "json:dumps", "--format", "E4M3")[2]


def test_json_is_json_whatever_a_function_writes(foreign, capfd):
    code, out, _ = told(capfd, "conform", "mine.py:prints_below_python", "--format", "E4M3", "--json")
    assert code == 0 and json.loads(out)["conforms"] is True


@each("argv, why", (
    ((), "--format"),
    (("--format", "E4M3"), "name one of the two"),
    (("mine.py:right", "--format", "E4M3", "--binary", "cat"), "name one of the two"),
    (("mine.py:rihgt", "--format", "E4M3"), "did you mean right"),
    (("none.py:right", "--format", "E4M3"), "cannot read none.py"),
    (("right", "--format", "E4M3"), "names no function"),
    (("nowhere.at.all:f", "--format", "E4M3"), "does not import"),
    (("mine.py:right", "--format", "E9"), "unknown format"),
    (("mine.py:dies", "--format", "E4M3"), "ends its process"),
    (("mine.py:right", "--format", "E4M3", "--html", "no/v.html"), "folder does not exist"),
    (("mine.py:right", "--format", "E4M3", "--html", "."), "cannot write"),
    (("--binary", "./none", "--format", "E4M3"), "cannot run ./none"),
    (("--binary", "cat", "--format", "E4M3", "--dtype", "float16"), "reads float32 numbers"),
    (("--binary", "true", "--format", "E4M3"), "writes 0 bytes for"),
    (("--binary", "cat", "--format", "E4M3", "--signature", "amax"), "takes numbers alone"),
))
def test_a_wrong_request_is_one_line_and_exit_code_2(foreign, capsys, argv, why):
    code, out, err = told(capsys, "conform", *argv)
    assert code == 2 and why in err
    assert len(err.splitlines()) == 1


# programs

C = """
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* E4M3, nearest, ties to even, saturating */
static unsigned char code(float x) {
    float a = fabsf(x);
    unsigned char sign = signbit(x) ? 0x80 : 0;
    if (isnan(x)) return 0x7F;
    if (CRASH) abort();
    if (a > 448) a = 448;
    int e = -6;
    if (a >= 0.015625f) { frexpf(a, &e); e -= 1; }
    int s = (int)ROUND(ldexp((double)a, 3 - e));
    if (s == 16) { s = 8; e += 1; }
    return sign | (s < 8 ? s : ((e + 7) << 3 | (s - 8)));
}

int main(void) {
    float x;
    while (fread(&x, 4, 1, stdin) == 1) putchar(code(x));
    return 0;
}
"""
BUILDS = {"right": ("rint", "0"), "away": ("round", "0"), "crash": ("rint", "x == -3.0f")}


@pytest.fixture(scope="module")
def simulators(tmp_path_factory):
    "Programs compiled from C: name -> command."
    if shutil.which("cc") is None: pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("c")
    (folder / "sim.c").write_text(C)
    for name, (round_, crash) in BUILDS.items():
        subprocess.run(
            ["cc", "-O1", f"-DROUND={round_}", f"-DCRASH=({crash})", "-o", folder / name,
             folder / "sim.c", "-lm"], check=True)
    return {name: shlex.quote(str(folder / name)) for name in BUILDS}


def test_a_program_in_c_is_judged(simulators, capsys):
    conform = partial(told, capsys, "conform", "--format", "E4M3", "--binary")
    assert conform(simulators["right"])[0] == 0
    code, out, _ = conform(simulators["away"])
    assert code == 1 and "ties away from zero" in out and "0x3A800000" in out


def test_the_input_that_crashes_a_program_is_found(simulators, capsys):
    code, out, _ = told(
        capsys, "conform", "--format", "E4M3", "--binary", simulators["crash"], "--json")
    fault = json.loads(out)["faults"][0]
    assert code == 1 and fault["name"] == "crash" and fault["input"] == "0xC0400000 = -3.0"
    _, out, _ = told(capsys, "conform", "--format", "E4M3", "--binary", simulators["crash"])
    assert out.splitlines()[1:] == ["crash (ended by signal 6): 0xC0400000 = -3.0"]
    assert "ended by signal 6" in fault["detail"]


def test_wide_formats_have_two_bytes(tmp_path):
    (tmp_path / "half.py").write_text(
        "import sys, numpy as np\n"
        "x = np.frombuffer(sys.stdin.buffer.read(), '<f4').clip(-65504, 65504)\n"
        "sys.stdout.buffer.write(x.astype('<f2').tobytes())\n")
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / 'half.py'))}"
    program = Program(command, get_format("float16"))
    assert judge(program, "float16", codes=True, arrays="numpy").conforms


# all of them


def chunks_of(f, seen: list[int], stop: int | None = None):
    "A function that notes the chunks of a sweep that it is given, and fails after some."
    def noting(x):
        if len(x) == 2**20:
            if len(seen) == stop: raise RuntimeError("killed")
            seen.append(int(x.view(np.uint32)[0]))
        return f(x)
    return noting


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("altgrad.numbers.referee._CHUNK", 2**20)
    monkeypatch.setattr("altgrad.numbers.referee._SAVE", 0.0)
    return 5 * 2**20


def flushed(x):
    "Right but for two faults in the first 5 * 2^20 patterns, one of which no boundary shows."
    q = Quantizer(get_format("bfloat16")).answers(x.view(np.uint32))
    return np.where(x.view(np.uint32) == 0x00312345, np.uint32(0x3F800000), q).view(np.float32)


def test_a_sweep_resumes_where_it_was_killed(tmp_path, short):
    state, first, second = tmp_path / "state.json", [], []
    ask = partial(judge, format="bfloat16", arrays="numpy", everything=state, last=short)
    with pytest.raises(InputError, match="killed"): ask(chunks_of(flushed, first, stop=3))
    assert first == [0, 2**20, 2 * 2**20] and json.loads(state.read_text())["next"] == 3 * 2**20
    shares = []
    verdict = ask(chunks_of(flushed, second), beat=shares.append)
    assert second == [3 * 2**20, 4 * 2**20] and not state.exists()
    assert shares[-3:-1] != [0.0, 0.0] and max(shares) == pytest.approx(0.8)
    assert verdict.patterns == {"judged": short, "mismatches": 1, "unexplained": 1}
    assert verdict.names == ["unexplained"]
    fault = verdict.faults[0]
    assert fault.input.startswith("0x00312345") and fault.given == "0x3F80 = 1"


@each("middle", (INF, SIGN, SIGN + INF))
def test_a_sweep_passes_infinity_nan_and_minus_zero(tmp_path, short, middle):
    state, start = tmp_path / "s", middle - 2**20
    ask = partial(judge, format="E4M3", everything=state, last=middle + 2**20)
    begin = {"next": start, "judged": 0, "mismatches": 0, "unexplained": 0}
    def cast(x): return x.to(torch.float8_e4m3fn).float()
    state.write_text(json.dumps(begin))
    assert ask(cast).patterns == {"judged": 2**21, "mismatches": 0, "unexplained": 0}
    state.write_text(json.dumps(begin))
    nans = {INF: 2**20 - 1, SIGN: 2**20, SIGN + INF: 2**20 - 1}[middle]
    lost = ask(lambda x: cast(x.nan_to_num(0.0, torch.inf, -torch.inf)))
    assert lost.patterns == {"judged": 2**21, "mismatches": nans, "unexplained": 0}


GOOD = {"next": 9, "judged": 8, "mismatches": 3, "unexplained": 1,
        "input": 7, "right": 2**32 - 1, "given": 0}
BAD = [{"next": -1}, {"next": 2**32 + 1}, {"judged": 10}, {"mismatches": "3"}, {"unexplained": True},
       {"unexplained": 4}, {"unexplained": 0}, {"input": 2**32}, {"given": None}, {"more": 1}]


def test_a_state_that_is_none_is_refused(tmp_path):
    from altgrad.numbers.referee import _stored
    (tmp_path / "s").write_text(json.dumps(GOOD))
    assert _stored(tmp_path / "s") == GOOD
    less = [json.dumps({k: v for k, v in GOOD.items() if k != gone}) for gone in GOOD]
    for text in ("", "[]", "x", *(json.dumps(GOOD | bad) for bad in BAD), *less):
        (tmp_path / "s").write_text(text)
        with pytest.raises(InputError, match="is no state of a sweep"):
            judge(lambda x: x.to(torch.float8_e4m3fn).float(), "E4M3", everything=tmp_path / "s")


def test_a_sweep_counts_what_the_names_explain(tmp_path, short):
    # bfloat16's subnormals: all patterns below 2^-126 that do not round to zero anyway
    def no_subnormals(x):
        q = Quantizer(get_format("bfloat16")).answers(x.view(np.uint32))
        small = (q & np.uint32(SIGN - 1)) < (1 << 23)
        return np.where(small, q & np.uint32(SIGN), q).view(np.float32)
    verdict = judge(no_subnormals, "bfloat16", arrays="numpy", everything=tmp_path / "s", last=short)
    assert verdict.names == ["subnormals flushed"]
    # half of the least subnormal, 2^15 patterns, is a tie and goes to zero
    assert verdict.patterns == {
        "judged": short, "mismatches": short - 2**15 - 1, "unexplained": 0}
