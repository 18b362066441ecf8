"""The quantizer against independent oracles: a sorted table with exact midpoints, written here, and
the libraries that know a format."""
from fractions import Fraction
from functools import cache

import gfloat
import gfloat.formats
import gfloat.types
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode

from altgrad.numbers.formats import FORMATS, get_format
from altgrad.numbers.kernels import ROUNDING
from altgrad.numbers.quantize import fake_quantize
from old import OLD_TORCH

MODES = tuple(mode for mode in ROUNDING if mode != "stochastic")
CASES = [(name, mode) for name in FORMATS for mode in MODES]
every_format = pytest.mark.parametrize("name", FORMATS)
every_case = pytest.mark.parametrize("name, mode", CASES, ids=lambda part: part)


def policies(f) -> tuple[str, ...]:
    return ("saturate", "special") if f.specials != "none" else ("saturate",)


def has_minus_zero(f) -> bool:
    return f.signed and not f.twos_complement and f.specials not in ("fnuz", "p3109")


def float32(x) -> np.ndarray:
    with np.errstate(over="ignore"): return np.asarray(x, dtype=np.float32)


def differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    "Where two float32 arrays differ in a bit; one NaN is like another."
    return (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))


def assert_same(x: np.ndarray, ours: np.ndarray, theirs: np.ndarray, what: str):
    bad = np.flatnonzero(differ(ours, theirs))
    rows = [f"{x[i]!r}: ours {ours[i]!r}, theirs {theirs[i]!r}" for i in bad[:5]]
    assert not len(bad), f"{what}: {len(bad)} of {len(x)} differ, e.g. {'; '.join(rows)}"


def ours(x: np.ndarray, f, mode: str, overflow: str) -> np.ndarray:
    return fake_quantize(torch.from_numpy(x), f, rounding=mode, overflow=overflow).numpy()


# the first oracle: all values of a format on one line, and what lies between two neighbours


def magnitude(f, code: int) -> Fraction:
    "The definition: 2^(e - bias) (1 + m / 2^M), below the first normal exponent without the 1."
    e, m = code >> f.mantissa_bits, Fraction(code % 2**f.mantissa_bits, 2**f.mantissa_bits)
    normal = e > 0 or not f.subnormals
    return Fraction(2) ** ((e if normal else 1) - f.bias) * (m + normal)


@cache
def line(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The finite values in ascending order, with one more at each end that has a sign,
    and whether each one's code is even."""
    f = FORMATS[name]
    used = 2 ** (f.exponent_bits + f.mantissa_bits) - {
        "ieee": 2**f.mantissa_bits, "fn": 1, "p3109": 1
    }.get(f.specials, 0)
    codes = list(range(used + 1))  # the last one stands for all that is beyond
    below = list(range(used + f.twos_complement, 0, -1)) if f.signed else []
    exact = [-magnitude(f, c) for c in below] + [magnitude(f, c) for c in codes]
    values = np.array([float(v) for v in exact])
    assert [Fraction(v) for v in values.tolist()] == exact and (np.diff(values) > 0).all()
    return values, np.array([c % 2 == 0 for c in below + codes])


def middles(values: np.ndarray) -> np.ndarray:
    "The midpoints between neighbours; float64 holds them exactly, which is checked."
    found = values[:-1] + np.diff(values) / 2
    exact = [
        (Fraction(a) + Fraction(b)) / 2 for a, b in zip(values[:-1].tolist(), values[1:].tolist())
    ]
    assert [Fraction(m) for m in found.tolist()] == exact
    return found


def choose_upper(x, low, high, even_low, mode) -> np.ndarray:
    "Whether `x`, strictly between two neighbouring values, goes to the upper one."
    if mode in ("down", "up"): return np.full(x.shape, mode == "up")
    if mode == "toward_zero": return x < 0
    middle = low + (high - low) / 2
    return (x > middle) | ((x == middle) & ((x > 0) if mode == "away" else ~even_low))


@cache
def by_table(name: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    "The rounded inputs (float32, saturated), and which of them lie beyond the limits before that."
    f, x, (values, even) = FORMATS[name], inputs(name), line(name)
    wide = np.where(np.isnan(x), 0, x).astype(np.float64).clip(values[0], values[-1])
    at = (np.searchsorted(values, wide, side="right") - 1).clip(0, len(values) - 2)
    low, high = values[at], values[at + 1]
    upper = np.where(
        wide == low, False,
        np.where(wide == high, True, choose_upper(wide, low, high, even[at], mode)),
    )
    q = np.where(upper, high, low)
    first, last = values[int(f.signed)], values[-2]
    over = (q > last) | ((q < first) if f.signed else (x < 0))
    q = float32(q.clip(first, last))
    q = np.copysign(q, x) if has_minus_zero(f) else q + np.float32(0)
    return np.where(np.isnan(x), np.float32(np.nan), q), over & ~np.isnan(x)


def with_specials(q: np.ndarray, over: np.ndarray, x: np.ndarray, f, mode: str) -> np.ndarray:
    """What the policy `special` makes of values beyond the limits. As in IEEE 754,
    rounding towards the inside stops at the limit, save for infinity."""
    inward = (mode == "toward_zero") | ((x > 0) & (mode == "down")) | ((x < 0) & (mode == "up"))
    return np.where(
        over & ~(inward & np.isfinite(x)),
        np.copysign(np.float32(np.inf), x)
        if f.specials in ("ieee", "p3109")
        else np.float32(np.nan),
        q,
    )


@cache
def inputs(name: str) -> np.ndarray:
    """All bfloat16 patterns, every value and every boundary with their float32 neighbours,
    both signs; NaN of both signs and another payload."""
    patterns = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    values, _ = line(name)
    edges = float32(np.concatenate([values, middles(values), values[-1:] * 2]))
    edges = edges[np.isfinite(edges)]
    near = [np.nextafter(edges, np.float32(d)) for d in (-np.inf, np.inf)]
    odd_nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32).view(
        np.float32
    )
    return np.concatenate([patterns, edges, -edges, *near, *(-n for n in near), odd_nans])


@every_case
def test_the_table_gives_the_same(name, mode):
    f, x = FORMATS[name], inputs(name)
    q, over = by_table(name, mode)
    for overflow in policies(f):
        expected = q if overflow == "saturate" else with_specials(q, over, x, f, mode)
        assert_same(x, ours(x, f, mode, overflow), expected, f"{name} {mode} {overflow}")


@every_case
def test_raise_raises_where_a_value_rounds_beyond_the_last(name, mode):
    f, x = FORMATS[name], inputs(name)
    q, over = by_table(name, mode)
    assert_same(x[~over], ours(x[~over], f, mode, "raise"), q[~over], f"{name} {mode} raise")
    for beyond in (
        x[over & (x > 0)].min(), x[over & (x < 0)].max(), np.float32(np.inf), np.float32(-np.inf)
    ):
        with pytest.raises(OverflowError):
            ours(np.array([0, beyond, 0], dtype=np.float32), f, mode, "raise")


@every_format
def test_every_code_is_a_fixed_point_of_every_mode(name):
    f = FORMATS[name]
    codes = torch.arange(2**f.bits)
    v = f.to_real(codes)
    finite = v.isfinite()
    for mode in MODES:
        q = fake_quantize(v, f, rounding=mode)
        assert_same(v[finite].numpy(), q[finite].numpy(), v[finite].numpy(), f"{name} {mode}")
        assert (f.to_bits(q[finite]).long() == codes[finite]).all() and q[v.isnan()].isnan().all()


# the second oracle: libraries


G = gfloat.formats
KNOWN = {
    "E4M3": G.format_info_ocp_e4m3,
    "E5M2": G.format_info_ocp_e5m2,
    "bfloat16": G.format_info_bfloat16,
    "float16": G.format_info_binary16,
    "float6_e2m3fn": G.format_info_ocp_e2m3,
    "float6_e3m2fn": G.format_info_ocp_e3m2,
    "float4_e2m1fn": G.format_info_ocp_e2m1,
    "mxint8": G.format_info_ocp_int8,
    **{f"binary8p{p}": G.format_info_p3109(8, p) for p in range(1, 8)},
}
MODES_OF_GFLOAT = {
    "nearest": RoundMode.TiesToEven,
    "toward_zero": RoundMode.TowardZero,
    "up": RoundMode.TowardPositive,
    "down": RoundMode.TowardNegative,
    "away": RoundMode.TiesToAway,
}


def gfloat_info(f) -> gfloat.types.FormatInfo:
    "gfloat's own description of the format where it has one, else one made of our facts."
    domain = (
        gfloat.types.Domain.Extended
        if f.specials in ("ieee", "p3109")
        else gfloat.types.Domain.Finite
    )
    high_nans = {"fn": 1, "ieee": 2**f.mantissa_bits - 1}.get(f.specials, 0)
    return KNOWN.get(f.name) or gfloat.types.FormatInfo(
        f.name, f.bits, f.mantissa_bits + 1, bias=f.bias, is_signed=f.signed, domain=domain,
        has_nz=has_minus_zero(f), num_high_nans=high_nans, has_subnormals=f.subnormals,
        is_twos_complement=f.twos_complement,
    )


@pytest.mark.parametrize("name, mode", [case for case in CASES if FORMATS[case[0]].subnormals], ids=lambda part: part)
def test_gfloat_gives_the_same(name, mode):
    f, x = FORMATS[name], inputs(name)
    for overflow in policies(f):
        with np.errstate(invalid="ignore"):
            theirs = gfloat.round_ndarray(
                gfloat_info(f), x.astype(np.float64), MODES_OF_GFLOAT[mode],
                sat=overflow == "saturate",
            )
        assert_same(x, ours(x, f, mode, overflow), float32(theirs), f"{name} {mode} {overflow}")


# of the formats that ml_dtypes and torch call otherwise
NAMES = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}
IN_ML_DTYPES = [n for n in FORMATS if n == "float16" or hasattr(ml_dtypes, NAMES.get(n, n))]
IN_TORCH = [n for n in FORMATS if hasattr(torch, NAMES.get(n, n))]


def cast_by_ml_dtypes(x: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(getattr(ml_dtypes, NAMES.get(name, name), np.float16)).astype(np.float32)


def cast_by_torch(x: np.ndarray, name: str) -> np.ndarray:
    return torch.from_numpy(x).to(getattr(torch, NAMES.get(name, name))).float().numpy()


TIES = {"float8_e8m0fnu": "away"}  # how both libraries round ties, where not to the even code


def known_to_differ(x: np.ndarray, name: str) -> np.ndarray:
    "Inputs whose result differs by definition; see DISAGREEMENTS."
    f = FORMATS[name]
    if f.specials == "none": return np.isnan(x)
    return x < 2.0**-126 if not f.subnormals else np.zeros(x.shape, dtype=bool)


@pytest.mark.parametrize("name", IN_ML_DTYPES)
def test_ml_dtypes_gives_the_same(name):
    # it never saturates where a format has infinity or NaN, so it is the peer of `special`
    x = inputs(name)
    x = x[~known_to_differ(x, name)]
    assert_same(
        x, ours(x, FORMATS[name], TIES.get(name, "nearest"), policies(FORMATS[name])[-1]),
        cast_by_ml_dtypes(x, name), name,
    )


@pytest.mark.parametrize("name", IN_TORCH)
def test_torch_gives_the_same_inside_the_range(name):
    x = inputs(name)
    x = x[(np.abs(x) <= FORMATS[name].max) & ~known_to_differ(x, name)]
    assert_same(
        x, ours(x, FORMATS[name], TIES.get(name, "nearest"), "saturate"), cast_by_torch(x, name),
        name,
    )


# where libraries disagree with us, or with each other


DISAGREEMENTS = [  # format, input, policy of ours, our result, library, its result
    *(
        [] if OLD_TORCH else [("E4M3", 500.0, "special", float("nan"), "torch", 448.0)]
    ),  # an old cast does not saturate either
    ("E4M3", 500.0, "saturate", 448.0, "ml_dtypes", float("nan")),
    ("E5M2", 1e5, "saturate", 57344.0, "torch", float("inf")),
    ("E5M2", 1e5, "saturate", 57344.0, "ml_dtypes", float("inf")),
    ("float8_e4m3fnuz", 500.0, "saturate", 240.0, "torch", float("nan")),
    ("float8_e4m3fnuz", 500.0, "saturate", 240.0, "ml_dtypes", float("nan")),
    ("float6_e2m3fn", float("nan"), "saturate", float("nan"), "ml_dtypes", 0.0),
    ("float4_e2m1fn", float("nan"), "saturate", float("nan"), "ml_dtypes", 0.0),
    ("bfloat16", float("inf"), "saturate", FORMATS["bfloat16"].max, "torch", float("inf")),
    ("float8_e8m0fnu", 3.0, "saturate", 2.0, "torch", 4.0),
    ("float8_e8m0fnu", 3.0, "saturate", 2.0, "ml_dtypes", 4.0),
    ("float8_e8m0fnu", 0.0, "saturate", 2.0**-127, "ml_dtypes", float("nan")),
    ("float8_e8m0fnu", -5.0, "special", float("nan"), "torch", 4.0),
    ("float8_e8m0fnu", 6e-39, "saturate", 2.0**-127, "torch", 2.0**-126),
]
CASTS = {"torch": cast_by_torch, "ml_dtypes": cast_by_ml_dtypes}


@pytest.mark.parametrize("name, x, overflow, expected, library, theirs", DISAGREEMENTS)
def test_the_table_of_disagreements_is_true(name, x, overflow, expected, library, theirs):
    x, expected, theirs = (float32([v]) for v in (x, expected, theirs))
    assert_same(x, ours(x, get_format(name), "nearest", overflow), expected, "ours")
    assert_same(
        x, np.abs(CASTS[library](x, name)) if theirs == 0 else CASTS[library](x, name), theirs,
        library,
    )
    assert differ(expected, theirs).all()
