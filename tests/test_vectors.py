"""Golden vectors, held against what was not made by the code that made them, and the package's
rounding to every format held against them, gfloat and exact fractions."""
import json
import runpy
import shutil
import subprocess
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path

import gfloat
import gfloat.formats as G
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode
from gfloat.types import Domain, FormatInfo
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from altgrad.basics import InputError
from altgrad.cli import main
from altgrad.numbers.formats import FORMATS, get_format
from altgrad.numbers.quantize import quantize, uniform
from altgrad.numbers.scaling import compute_scale, mx_scale, nvfp4_scale
from altgrad.numbers.vectors import (COLUMNS, ELEMENTS, ROUNDINGS, SCALE_RULES,
                                     VECTOR_FORMATS, Vectors, checksums, draws_outer,
                                     make_files, make_points, make_runs, policies_of, turn,
                                     write_vectors)

from cases import each
from old import OLD_TORCH

TESTS = Path(__file__).resolve().parent
STORED = TESTS.parent / "nbs/results/vectors.sha256"


@pytest.fixture(scope="module")
def files():
    return make_files()


@pytest.fixture(scope="module")
def vectors(files, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("altgrad.numbers.vectors.make_files", lambda: files)
        return Vectors(write_vectors(tmp_path_factory.mktemp("vectors")))


@pytest.fixture(scope="module")
def exact():
    "What `make verify` compares with: functions in exact fractions, which remember their answers."
    script = runpy.run_path(str(TESTS.parent / ".ci/verify.py"))["segments"].__globals__
    for name in ("real", "magnitudes"): script[name] = cache(script[name])
    return script


@cache
def table(vectors, kind, **facts):
    "A table's columns as arrays."
    return {name: np.array(column) for name, column in vectors.table(kind, **facts).items()}


def everything(vectors, name, rounding, overflow):
    "Inputs as float32, code, other and why, of all bfloat16, all float16 and the boundary."
    facts = dict(format=name, rounding=rounding, overflow=overflow)
    for kind in ("bfloat16", "float16"):
        runs = table(vectors, "runs", input=kind, **facts)
        lengths = np.diff([*runs["first"], 2**16])
        dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16
        x = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
        yield x, *(np.repeat(runs[column], lengths) for column in ("code", "other", "why"))
    at = table(vectors, "boundary", **facts)
    yield at["input"].astype(np.uint32).view(np.float32), at["code"], at["other"], at["why"]


def wrong(vectors, name, given, code, other, why, but=()):
    "Which of the given codes are no right answers; clauses in `but` are not asked."
    nan = vectors.index["formats"][name]["nan"]
    clauses = vectors.index["clauses"]
    free = np.array([c["free"] for c in clauses])[why]
    asked = np.array([c["name"] not in but for c in clauses])[why]
    allowed = np.where(np.isin(given, nan), np.isin(code, nan), free)
    return asked & (given != code) & (given != other) & ~allowed


def floats(patterns):
    "Float32 patterns as a tensor."
    return torch.from_numpy(np.asarray(patterns).astype(np.uint32).view(np.float32).copy())


POLICIES = [(n, policy) for n in VECTOR_FORMATS for policy in policies_of(get_format(n))]
JUDGED = [(n, policy) for n, policy in POLICIES if policy != "propagate"]


def codes_of(fmt, values):
    "Codes of values of a format, looked up in its table; that of NaN for NaN."
    bits = fmt.table.float().view(torch.int32).tolist()
    where = {b: code for code, b in enumerate(bits)}
    found = values.view(torch.int32)
    nan = fmt.code_nan if fmt.code_nan is not None else 0
    unique, at = found.unique(return_inverse=True)
    codes = [
        nan if v != v else where[b]
        for b, v in zip(unique.tolist(), unique.view(torch.float32).tolist())
    ]
    return np.array(codes)[at.numpy()]


@each("name, overflow", JUDGED)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_package(vectors, name, rounding, overflow):
    """The package's quantizer gives the first answer to every input, where there is no sign any
    right one, and keeps NaN in every format."""
    for x, code, other, why in everything(vectors, name, rounding, overflow):
        q = quantize(torch.from_numpy(x), name, rounding=rounding, overflow=overflow)
        given = codes_of(get_format(name), q)
        if get_format(name).signed: other = code
        bad = wrong(vectors, name, given, code, other, why) | (np.isnan(x) & ~q.isnan().numpy())
        assert not bad.any(), (x[bad][:4], given[bad][:4], code[bad][:4])


ML_DTYPES = {  # name -> what it does with what overflows: it has one policy a format
    "E4M3": "special", "E5M2": "special", "float8_e3m4": "special", "float8_e4m3": "special",
    "float8_e4m3fnuz": "special", "float8_e5m2fnuz": "special", "float8_e4m3b11fnuz": "special",
    "float6_e2m3fn": "saturate", "float6_e3m2fn": "saturate", "float4_e2m1fn": "saturate",
    "float8_e8m0fnu": "special",
}
DTYPES = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}


@each("name", ML_DTYPES)
def test_ml_dtypes(vectors, name):
    "ml_dtypes' cast is a right answer."
    dtype = getattr(ml_dtypes, DTYPES.get(name, name))
    for x, *row in everything(vectors, name, "nearest", ML_DTYPES[name]):
        with np.errstate(all="ignore"): given = x.astype(dtype).view(np.uint8).astype(int)
        bad = wrong(vectors, name, given, *row) & ~rounded_as_if_zero(name, x)
        assert not bad.any(), (x[bad][:4], given[bad][:4], row[0][bad][:4])


def rounded_as_if_zero(name, x):
    "Where both libraries round to E8M0 as if its lowest code were 0 and not 2^-127: see the test."
    return (name == "float8_e8m0fnu") & (x > 2.0**-127) & (x < 1.5 * 2.0**-127)


def test_lowest_scales(vectors):
    """Between 2^-127 and the tie 1.5 x 2^-127 the nearest E8M0 is 2^-127;
    torch 2.13 and ml_dtypes 0.6 double it."""
    x = np.arange(0x400001, 0x600000, 997, dtype=np.uint32).view(np.float32)
    assert rounded_as_if_zero("float8_e8m0fnu", x).all()
    assert (quantize(torch.from_numpy(x), "float8_e8m0fnu") == 2.0**-127).all()
    ways = (x.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32),
            torch.from_numpy(x).to(torch.float8_e8m0fnu).float().numpy())
    for given in ways: assert len({*given.tolist()}) == 1 and given[0] in (2.0**-127, 2.0**-126)


TORCH = {
    "E4M3": "special" if OLD_TORCH else "saturate", "E5M2": "special",
    "float8_e4m3fnuz": "special", "float8_e5m2fnuz": "special", "float8_e8m0fnu": "special",
}


@each("name", TORCH)
def test_torch(vectors, name):
    "torch's cast is a right answer; that to infinity differs between its versions."
    dtype = getattr(torch, DTYPES.get(name, name))
    for x, code, other, why in everything(vectors, name, "nearest", TORCH[name]):
        given = torch.from_numpy(x).to(dtype).view(torch.uint8).int().numpy()
        bad = wrong(vectors, name, given, code, other, why, ("saturate_infinity", "infinity"))
        bad &= ~rounded_as_if_zero(name, x)
        assert not bad.any(), (x[bad][:4], given[bad][:4], code[bad][:4])


def described(fmt):
    "A format as gfloat is told of it: by our facts."
    nans = {"fn": 1, "ieee": 2**fmt.mantissa_bits - 1}.get(fmt.specials, 0)
    return FormatInfo(
        fmt.name, fmt.bits, fmt.mantissa_bits + 1, bias=fmt.bias, is_signed=fmt.signed,
        domain=Domain.Extended if fmt.specials in ("ieee", "p3109") else Domain.Finite,
        has_nz=fmt.code_minus_zero is not None, num_high_nans=nans,
        has_subnormals=fmt.subnormals, is_twos_complement=fmt.twos_complement,
    )


GFLOAT = {name: described(fmt) for name, fmt in FORMATS.items() if fmt.subnormals} | {
    "E4M3": G.format_info_ocp_e4m3, "E5M2": G.format_info_ocp_e5m2,
    "bfloat16": G.format_info_bfloat16, "float16": G.format_info_binary16,
    "float6_e2m3fn": G.format_info_ocp_e2m3, "float6_e3m2fn": G.format_info_ocp_e3m2,
    "float4_e2m1fn": G.format_info_ocp_e2m1, "mxint8": G.format_info_ocp_int8,
    **{f"binary8p{p}": G.format_info_p3109(8, p) for p in range(1, 8)},
}
MODES = {"nearest": RoundMode.TiesToEven, "away": RoundMode.TiesToAway,
         "toward_zero": RoundMode.TowardZero, "up": RoundMode.TowardPositive,
         "down": RoundMode.TowardNegative}


@each("name, overflow", [case for case in JUDGED if case[0] in GFLOAT])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gfloat(vectors, name, rounding, overflow):
    "gfloat's rounding is a right answer."
    for x, *row in everything(vectors, name, rounding, overflow):
        keep = ~np.isnan(x)
        values = gfloat.round_ndarray(GFLOAT[name], x[keep].astype(np.float64), MODES[rounding],
                                      overflow == "saturate")
        given = codes_of(get_format(name), torch.from_numpy(values).float())
        bad = wrong(vectors, name, given, *(column[keep] for column in row))
        assert not bad.any(), (x[keep][bad][:4], given[bad][:4], row[0][keep][bad][:4])


def beside(fmt):
    "The float32 numbers at and beside every value of a format and every tie, which are exact."
    values = fmt.table[fmt.table.isfinite()].sort().values.unique()
    at = torch.cat([values, (values[1:] + values[:-1]) / 2])
    assert (at == at.float()).all()
    bits = at.float().view(torch.int32).long() % 2**32
    near = torch.cat([bits + d for d in (-1, 0, 1)]).unique()
    return floats(near[(near >= 0) & (near < 2**32)])


@each("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in VECTOR_FORMATS])
def test_wide(name, rounding):
    "To formats that have no vectors the package rounds as gfloat does."
    fmt = get_format(name)
    limit = fmt.max + fmt.ulp(torch.tensor(fmt.max)) / 2
    bfloat16, nans = floats(np.arange(2**16) << 16), floats([0x7F800001, 0xFFFFFFFF])
    x = torch.cat([bfloat16, nans, beside(fmt), limit * torch.tensor([1, -1])])
    for overflow in ("saturate", "special")[: 1 + (fmt.specials != "none")]:
        with np.errstate(invalid="ignore"):
            values = gfloat.round_ndarray(GFLOAT[name], x.double().numpy(), MODES[rounding],
                                          overflow == "saturate")
        q = quantize(x, fmt, rounding=rounding, overflow=overflow)
        theirs = torch.from_numpy(values).float()
        bad = (q.view(torch.int32) != theirs.view(torch.int32)) & ~(q.isnan() & theirs.isnan())
        assert not bad.any(), (x[bad][:4], q[bad][:4], theirs[bad][:4])


@pytest.mark.parametrize("name", FORMATS)
def test_raise(exact, name):
    "An OverflowError begins where exact fractions say; before, `raise` rounds as `saturate` does."
    fmt = get_format(name)
    for rounding in ROUNDINGS:
        starts = [exact["overflow_start"](fmt, rounding, negative) for negative in (False, True)]
        for sign, start in zip((0, 1 << 31), starts):
            for pattern in (start - 1, start, 0x7F800000, 0x7F800001, 0x7FC00000):
                over = start <= pattern <= 0x7F800000
                assert exact["raises"](fmt, rounding, sign + pattern) == over
        high, low = floats(starts) * torch.tensor([1, -1])
        x = beside(fmt)
        x = x[(low < x) & (x < high)]
        q = quantize(x, fmt, rounding=rounding, overflow="raise")
        assert torch.equal(q, quantize(x, fmt, rounding=rounding)) and len(x) > fmt.magnitudes


@each("rounding", ["nearest", "away"])
def test_one_digit_ties(vectors, rounding):
    "ml_dtypes and torch give ties in E8M0 to the larger, gfloat and the package to the even code."
    runs = table(vectors, "runs", format="float8_e8m0fnu", input="float32", rounding=rounding,
                 overflow="saturate")
    ties = runs["code"] != runs["other"]
    named = np.array([c["name"] for c in vectors.index["clauses"]])[runs["why"]] == "one_digit_tie"
    assert named.sum() == (127 if rounding == "nearest" else 0)
    x = runs["first"][named].astype(np.uint32).view(np.float32)
    torchs = torch.from_numpy(x).to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
    for theirs in (x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8), torchs):
        assert (theirs == runs["other"][named]).all()
    even = quantize(torch.from_numpy(x), "float8_e8m0fnu")
    assert (codes_of(get_format("float8_e8m0fnu"), even) == runs["code"][named]).all()
    assert ties.sum() >= named.sum()


@each("name", [name for name, policy in POLICIES if policy == "propagate"])
@each("rounding", ROUNDINGS)
def test_propagate(vectors, name, rounding):
    "The policy saturates all that is finite and keeps infinity."
    policies = ("saturate", "propagate", "special")
    tables = (everything(vectors, name, rounding, policy) for policy in policies)
    for kept, given, special in zip(*tables, strict=True):
        finite = np.isfinite(kept[0])
        assert (given[1][finite] == kept[1][finite]).all()
        assert (given[1][~finite] == special[1][~finite]).all()


RULES = {"floor": ScaleCalculationMode.FLOOR, "ceil": ScaleCalculationMode.CEIL,
         "rceil": ScaleCalculationMode.RCEIL, "even": ScaleCalculationMode.EVEN}
TORCHAO = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "float6_e3m2fn": "fp6_e3m2",
           "float6_e2m3fn": "fp6_e2m3", "float4_e2m1fn": torch.float4_e2m1fn_x2}


@each("name", ELEMENTS)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_torchao_scales(vectors, name, rule):
    "torchao's scale of a block is a right answer, for amax on and beside every boundary."
    at = table(vectors, "scale_boundary", format=name, rule=rule)
    blocks = torch.zeros(len(at["input"]), 32)
    blocks[:, 5] = floats(at["input"])
    given = to_mx(blocks, TORCHAO[name], 32, RULES[rule])[0].view(torch.uint8).flatten().numpy()
    bad = wrong(vectors, "float8_e8m0fnu", given, at["code"], at["other"], at["why"])
    if rule == "rceil":  # its log2 in float32 loses what is less than half an ulp of the exponent
        assert (given[bad] == at["code"][bad] - 1).all()
        runs = table(vectors, "scale_runs", format=name, rule=rule)["first"]
        into = at["input"] - runs[np.searchsorted(runs, at["input"], "right") - 1]
        bad &= into > 64  # 2^-18 of an octave is 23 ulps at a power of two, 45 below the next
    assert not bad.any(), (at["input"][bad][:4], given[bad][:4], at["code"][bad][:4])


@each("name", ELEMENTS)
def test_package_scales(vectors, name):
    "The package's power of two, which lets nothing overflow, is the scale of `rceil`."
    at = table(vectors, "scale_boundary", format=name, rule="rceil")
    keep = (at["code"] > 0) & (at["code"] < 255)  # the package's begin at 2^-126
    scale = compute_scale(floats(at["input"][keep]), name)
    assert (torch.frexp(scale)[1].numpy() + 126 == at["code"][keep]).all()


@each("name", ELEMENTS)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_torchao_elements(vectors, name, rule):
    "torchao's elements are right."
    scales = table(vectors, "mx_scales", format=name, rule=rule)
    elements = table(vectors, "mx_elements", format=name, rule=rule)
    given_scales, given = to_mx(
        floats(elements["input"]).reshape(-1, 32), TORCHAO[name], 32, RULES[rule]
    )
    same = given_scales.view(torch.uint8).flatten().numpy() == scales["code"]
    given = given.view(torch.uint8).numpy()
    if name == "float4_e2m1fn": given = np.stack([given & 15, given >> 4], -1)
    given = given.reshape(-1)
    bad = wrong(vectors, name, given, *(elements[c] for c in ("code", "other", "why")))
    bad &= np.repeat(same, 32)
    assert same.mean() > 0.75
    assert not bad.any(), (elements["input"][bad][:4], given[bad][:4], elements["code"][bad][:4])


@each("name", ELEMENTS)
def test_package_blocks(vectors, name):
    "The package's MX scale is the floor's, and its elements are right."
    scales = table(vectors, "mx_scales", format=name, rule="floor")
    elements = table(vectors, "mx_elements", format=name, rule="floor")
    x = floats(elements["input"]).reshape(-1, 32)
    scale = mx_scale(x, name)
    exponents = torch.frexp(scale[:, 0].double())[1].numpy() - 1 + 127
    bad = wrong(
        vectors, "float8_e8m0fnu", exponents, *(scales[c] for c in ("code", "other", "why"))
    )
    assert not bad.any()
    given = codes_of(get_format(name), quantize(x, name, scale).flatten())
    assert not wrong(vectors, name, given, *(elements[c] for c in ("code", "other", "why"))).any()


def test_torchao_nvfp4(vectors):
    "torchao's scales and elements are among the answers: its operations are those of `other`."
    tensors, blocks, elements = (table(vectors, f"nvfp4_{level}")
                                 for level in ("tensors", "blocks", "elements"))
    x = floats(elements["input"]).reshape(-1, 128)
    differ = 0
    for t, pattern in enumerate(tensors["code"]):
        scales, packed = nvfp4_quantize(x[t : t + 1], 16, floats([pattern])[0])
        given = scales.view(torch.uint8).flatten().numpy()
        mine = {c: blocks[c][8 * t : 8 * t + 8] for c in ("code", "other", "why")}
        assert not wrong(vectors, "E4M3", given, **mine).any()
        packed = packed.view(torch.uint8).flatten().numpy()
        codes = np.stack([packed & 15, packed >> 4], -1).flatten()
        rows = slice(128 * t, 128 * t + 128)
        same = np.repeat(given == mine["code"], 16)
        mine = {c: elements[c][rows][same] for c in ("code", "other", "why")}
        assert (codes[same] == mine["other"]).all()
        differ += (mine["code"] != mine["other"]).sum()
    assert differ


def test_package_nvfp4(vectors):
    "The package's scales are right, and its elements are those of `third`."
    tensors, blocks, elements = (table(vectors, f"nvfp4_{level}")
                                 for level in ("tensors", "blocks", "elements"))
    x = floats(elements["input"]).reshape(-1, 128)
    scale = torch.cat([nvfp4_scale(row) for row in x[:, None]])
    ratio = scale[:, ::16].double() / floats(tensors["code"]).double()[:, None]
    given = get_format("E4M3").to_bits(ratio).flatten().numpy()
    bad = wrong(vectors, "E4M3", given, *(blocks[c] for c in ("code", "other", "why")))
    assert not bad.any(), (given[bad], blocks["code"][bad], blocks["other"][bad])
    e2m1 = get_format("float4_e2m1fn")
    given = codes_of(e2m1, quantize(x, e2m1, scale).flatten())
    assert (given == elements["third"]).all()
    assert (elements["code"] != elements["third"]).any()


def test_tensor_scale(vectors):
    "The tensor's scale by numpy's float32, which rounds each operation once."
    rows = table(vectors, "nvfp4_tensors")
    amax = floats(rows["input"]).numpy()
    assert ((amax / np.float32(2688)).view(np.uint32) == rows["code"]).all()
    assert ((1 / (np.float32(2688) / amax)).view(np.uint32) == rows["other"]).all()


STOCHASTIC = {"truncate": RoundMode.StochasticFastest, "midpoint": RoundMode.StochasticFast,
              "nearest": RoundMode.Stochastic}


@each("name", [n for n in VECTOR_FORMATS if n in GFLOAT])
@pytest.mark.parametrize("convention", STOCHASTIC)
def test_gfloat_draws(vectors, name, convention):
    "gfloat, given the same random bits, draws the same codes."
    draws = table(vectors, "stochastic_draws", format=name)
    for bits in np.unique(draws["bits"]):
        rows = draws["bits"] == bits
        x = floats(draws["input"][rows]).double().numpy()
        values = gfloat.round_ndarray(GFLOAT[name], x, STOCHASTIC[convention], sat=True,
                                      srbits=draws["random"][rows].astype(np.int64),
                                      srnumbits=int(bits))
        given = codes_of(get_format(name), torch.from_numpy(values).float())
        assert (given == draws[convention][rows]).all()


@each("name", [n for n in VECTOR_FORMATS if get_format(n).signed])
def test_odds(vectors, name):
    "The expected value is the input, wherever it is within the limits."
    odds = table(vectors, "stochastic_odds", format=name)
    values = get_format(name).table.numpy()
    x = floats(odds["input"]).double().numpy()
    p = odds["numerator"] / 2.0 ** odds["log2_denominator"]
    inner, outer = values[odds["inner"]], values[odds["outer"]]
    within = (x >= values.min(where=np.isfinite(values), initial=0)) & (
        x <= values.max(where=np.isfinite(values), initial=0))
    assert within.sum() > 20 and len(x) > within.sum()
    # both products and the sum are exact: 8 + 17 significant bits, and neighbours
    assert (inner * (1 - p) + outer * p == x)[within].all()
    assert (inner == outer)[~within & (p > 0)].all()


@pytest.mark.parametrize("bits, convention", [(8, "midpoint"), (16, "midpoint"), (24, "truncate")])
def test_package_draws(bits, convention):
    "The package's stochastic rounding goes outwards where the complement of its own bits says so."
    key, place = 12345, list(STOCHASTIC).index(convention)
    r = (uniform(torch.Size([512]), key) * 2**bits).floor().long().tolist()  # the upper bits of 24
    for point in make_points(get_format("E4M3")):
        if point.f * 2**bits % 1 == Fraction(1, 2): continue  # it goes inwards, gfloat outwards
        x = floats([point.input]).expand(512).contiguous()
        q = quantize(x, "E4M3", rounding="stochastic", key=key, random_bits=bits)
        outer = [draws_outer(point.f, bits, 2**bits - 1 - i)[place] for i in r]
        expected = np.where(outer, point.outer, point.inner)
        assert (codes_of(get_format("E4M3"), q) == expected).all(), point


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    "Compiles the C program with some flags."
    if shutil.which("cc") is None: pytest.skip("no C compiler: cc is not installed")
    folder = tmp_path_factory.mktemp("c")

    def build(*flags):
        out = folder / "-".join(["check", *flags])
        command = [
            "cc", "-O2", "-Wall", "-Werror", *flags, "-o", str(out), str(TESTS / "vectors.c")
        ]
        subprocess.run(command, check=True, capture_output=True)
        return str(out)

    return build


@each("fault, found", [
    (0, "0 of 4"), (1, "3a800000 gives 01, not 00"),  # 2^-10, half of the smallest
    (2, "3a800001 gives 00, not 01")])
def test_c_program(vectors, program, tmp_path, fault, found):
    "A program in C reads the runs, passes a right quantizer, and finds a planted fault."
    entry, = (t for t in vectors.index["tables"] if t["kind"] == "runs" and t["format"] == "E4M3"
              and (t["input"], t["rounding"], t["overflow"]) == ("float32", "nearest", "saturate"))
    (tmp_path / "file").write_bytes(vectors.files[entry["file"]])
    numbers = str(entry["offset"]), str(entry["rows"])
    command = [program(f"-DFAULT={fault}"), str(tmp_path / "file"), *numbers]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (fault > 0)
    assert done.stdout.startswith(found) and " wrong" in done.stdout


PLAIN = """
import json, struct, sys
folder, tables = sys.argv[1], []
index = json.load(open(folder + "/index.json"))
for which in json.loads(sys.argv[2]):
    table, = (t for t in index["tables"] if which.items() <= t.items())
    at, data = table["offset"], open(folder + "/" + table["file"], "rb").read()
    columns = {}
    for name, letter in index["columns"][table["kind"]].items():
        layout = "<%d%s" % (table["rows"], {"u1": "B", "u4": "I"}[letter])
        columns[name] = struct.unpack_from(layout, data, at)
        at += struct.calcsize(layout)
    tables.append(columns)
assert not {"torch", "numpy", "altgrad"} & set(sys.modules)
json.dump(tables, sys.stdout)
"""


def test_plain_reader(vectors, tmp_path):
    "A dozen lines of the standard library read a table of every kind."
    for name, data in vectors.files.items(): (tmp_path / name).write_bytes(data)
    (tmp_path / "index.json").write_text(json.dumps(vectors.index))
    firsts = [next(t for t in vectors.index["tables"] if t["kind"] == kind) for kind in COLUMNS]
    asked = [{k: v for k, v in t.items() if k not in ("file", "offset", "rows")} for t in firsts]
    command = [sys.executable, "-I", "-c", PLAIN, str(tmp_path), json.dumps(asked)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for first, facts, columns in zip(firsts, asked, json.loads(done.stdout), strict=True):
        assert {k: tuple(v) for k, v in columns.items()} == vectors.table(**facts), facts
        assert all(len(column) == first["rows"] for column in columns.values()), facts


def test_index(vectors):
    "Every table lies in its file, after the one before it; runs are in order; clauses are used."
    index, ends, used = vectors.index, {}, set()
    for t in index["tables"]:
        size = t["rows"] * sum({"u1": 1, "u4": 4}[c] for c in index["columns"][t["kind"]].values())
        assert t["offset"] == ends.get(t["file"], 0)
        ends[t["file"]] = t["offset"] + size
        facts = {k: v for k, v in t.items() if k not in ("kind", "file", "offset", "rows")}
        columns = vectors.table(t["kind"], **facts)
        used |= set(columns.get("why", ()))
        if "first" not in columns: continue
        assert columns["first"][0] == 0 and (np.diff(columns["first"]) > 0).all()
    assert ends == {name: len(data) for name, data in vectors.files.items()}
    assert used == set(range(len(index["clauses"])))
    for clause in index["clauses"]: assert clause["text"] and clause["source"]


def test_boundary(vectors):
    "The boundary holds every value, every tie and their neighbours, exactly."
    for name in VECTOR_FORMATS:
        at = table(vectors, "boundary", format=name, rounding="nearest", overflow="saturate")
        have = set(at["input"].tolist())
        assert {p % 2**32 for p in beside(get_format(name)).view(torch.int32).tolist()} <= have
        assert {0, 1 << 31, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFA5A5A5} <= have


def test_checksums(files, tmp_path, capsys, monkeypatch):
    """The command writes the same bytes as ever, and says their checksums;
    once more changes nothing."""
    monkeypatch.setattr("altgrad.numbers.vectors.make_files", lambda: files)
    stored = STORED.read_text(encoding="utf-8")
    for _ in range(2):
        assert main(["vectors", "--out", str(tmp_path / "new")]) == 0
        assert capsys.readouterr().out == stored
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    folder, = (tmp_path / "new").iterdir()
    assert checksums(folder) == dict(line.split()[::-1] for line in stored.splitlines())


def one_line_of(capsys, out):
    "The error of the command, which must be one line and exit code 2."
    assert main(["vectors", "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err


def test_hostile_folders(tmp_path, capsys, monkeypatch):
    "What cannot be written is one line, and leaves nothing behind."
    monkeypatch.setattr(
        "altgrad.numbers.vectors.make_files", lambda: {"index.json": b"{}", "a": b"b"}
    )
    folder = tmp_path / "altgrad-vectors-1"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert "exists with other content" in one_line_of(capsys, tmp_path)
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]
    file = tmp_path / "file"
    file.write_text("x")
    assert "cannot write" in one_line_of(capsys, file)
    assert "cannot write" in one_line_of(capsys, file / "below")
    assert "is empty" in one_line_of(capsys, "")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "altgrad-vectors-1").write_text("a file")
    assert "exists with other content" in one_line_of(capsys, tmp_path / "other")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "altgrad-vectors-1").symlink_to("nowhere")
    assert "exists with other content" in one_line_of(capsys, tmp_path / "linked")


def test_disk_full(tmp_path, capsys, monkeypatch):
    "A disk that is full in the middle leaves no folder, whole or half."
    def full(handle): raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "altgrad.numbers.vectors.make_files", lambda: {"index.json": b"{}", "a": b"b"}
    )
    monkeypatch.setattr("altgrad.numbers.vectors.os.fsync", full)
    assert "No space left" in one_line_of(capsys, tmp_path)
    assert not list(tmp_path.iterdir())


def test_damaged(files, vectors, tmp_path):
    "A folder that is no folder of vectors, or not whole, is one clear line."
    for name in files:
        for damage in (b"", files[name][:-1], files[name].replace(b"1", b"2", 1)):
            for file, content in files.items(): (tmp_path / file).write_bytes(content)
            (tmp_path / name).write_bytes(damage)
            with pytest.raises(InputError, match=f"{name} is damaged"): Vectors(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(InputError, match=f"cannot read .*{name}"): Vectors(tmp_path)
    with pytest.raises(InputError, match="cannot read"): Vectors(tmp_path / "nothing")
    with pytest.raises(InputError, match="75 tables"):
        vectors.table("runs", rounding="up", overflow="saturate")
    with pytest.raises(InputError, match="0 tables"): vectors.table("runs", format="E9")


def test_named_answers(vectors):
    "Answers that clauses name as known are given by the libraries they name."
    x = np.array([0.0, -5.0, 1e-40], np.float32)
    assert (x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8) == [255, 255, 0]).all()
    assert torch.from_numpy(x).to(torch.float8_e8m0fnu).view(torch.uint8).tolist() == [0, 129, 0]
    nan = np.array([np.nan, np.copysign(np.nan, -1)], np.float32)
    for name in ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"):
        minus_zero = get_format(name).code_minus_zero
        given = nan.astype(getattr(ml_dtypes, name)).view(np.uint8).tolist()
        assert given == [minus_zero, 0]
        with pytest.raises(ValueError, match="No NaN"):
            gfloat.round_float(GFLOAT[name], float("nan"), sat=True)


def test_is_right(vectors):
    "NaN stands for any NaN, and a free clause for any code but NaN."
    clauses = {c["name"]: i for i, c in enumerate(vectors.index["clauses"])}
    nan, zero, nearest = clauses["nan"], clauses["zero_block"], clauses["nearest"]
    assert vectors.is_right("E5M2", 0xFE, 0x7D, 0x7D, why=nan)
    assert not vectors.is_right("E5M2", 0x7C, 0x7D, 0x7D, why=nan)
    assert vectors.is_right("float8_e8m0fnu", 5, 0, 127, why=zero)
    assert not vectors.is_right("float8_e8m0fnu", 255, 0, 127, why=zero)
    assert vectors.is_right("E7M0", 2, 1, 2, why=nearest)
    assert not vectors.is_right("E7M0", 3, 1, 2, why=nearest)


@each("name, overflow", JUDGED)
@pytest.mark.parametrize("rounding", ("nearest", "up"))
def test_proof(vectors, exact, name, rounding, overflow):
    "All 2^32 answers are those that `make verify` compared the package with."
    fmt = get_format(name)
    steps = exact["segments"](fmt, rounding, overflow)
    runs = table(
        vectors, "runs", format=name, input="float32", rounding=rounding, overflow=overflow
    )
    at = np.union1d([s.first for s in steps], runs["first"])  # between these both are constant
    theirs = torch.tensor([s.bits for s in steps])[
        np.searchsorted([s.first for s in steps], at, "right") - 1
    ]
    rows = np.searchsorted(runs["first"], at, "right") - 1
    given = codes_of(fmt, theirs.to(torch.int64).to(torch.int32).view(torch.float32))
    assert not wrong(vectors, name, given, *(runs[c][rows] for c in ("code", "other", "why"))).any()


@each("call", [
    lambda: make_runs(get_format("E4M3"), "nearest", "clip", "float16"),
    lambda: make_runs(get_format("E4M3"), "nearest", "propagate", "float16"),
    lambda: make_runs(get_format("E7M0"), "nearest", "special", "float16"),
    lambda: make_runs(get_format("E4M3"), "odd", "saturate", "float16"),
    lambda: make_runs(get_format("E4M3"), "nearest", "saturate", "float64"),
    lambda: turn(1, 2, True, "bogus", False),
    lambda: draws_outer(Fraction(3, 2), 8, 0),
    lambda: draws_outer(Fraction(1, 2), 8, 300),
])
def test_what_has_no_answer_is_refused(call):
    with pytest.raises(InputError): call()
