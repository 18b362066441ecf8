"""Quantizers with a planted fault, written as people write them, and quantizers without one.

Each of `MUTANTS` promises something (`asks`) and breaks it in the way that `fault` names. They were
written before the classifier of altgrad/numbers/referee.py and share no code with it; a test and
nbs/studies/benchmarks/referee_mutants.py ask it for the name of each.
"""
from functools import partial
from typing import Any, Callable, NamedTuple

import ml_dtypes
import numpy as np
import torch


class Planted(NamedTuple):
    "A quantizer and what it promises."
    fault: str  # its name; empty for a right one
    format: str
    f: Callable
    asks: dict[str, Any]  # further arguments of `judge`

    @property
    def id(self) -> str: return f"{self.format}-{self.f.__name__}"


MUTANTS: list[Planted] = []
RIGHT: list[Planted] = []
COMBINED: list[Planted] = []  # several faults at once
ARRAYS = {"arrays": "numpy"}


def keeper(kept: list[Planted], fault: str, format: str, **asks):
    "Register a quantizer with this fault."
    def keep(f):
        kept.append(Planted(fault, format, f, asks))
        return f
    return keep


planted, combined = partial(keeper, MUTANTS), partial(keeper, COMBINED)
right = partial(keeper, RIGHT, "")  # one that keeps its promise


# pieces that are right


def limits(exponent_bits, mantissa_bits, bias, limit):
    "Exponent of the smallest normal number, mantissa bits, limit."
    return 1 - bias, mantissa_bits, limit


E4M3 = limits(4, 3, 7, 448.0)
E5M2 = limits(5, 2, 15, 57344.0)
E2M3 = limits(2, 3, 1, 7.5)
E3M2 = limits(3, 2, 3, 28.0)
E2M1 = limits(2, 1, 1, 6.0)
E3M4 = limits(3, 4, 1, 124.0)


def spacing(magnitude, least, m):
    "Distance of neighbouring values at a magnitude (float64)."
    e = np.frexp(magnitude)[1] - 1
    return np.exp2(np.maximum(e, least) - m)


def even(x, kind):
    "Nearest, ties to even, saturating; float32 in and out."
    least, m, limit = kind
    with np.errstate(invalid="ignore"):
        a = np.minimum(np.abs(x.astype(np.float64)), limit)
    u = spacing(a, least, m)
    return np.copysign(np.minimum(np.rint(a / u) * u, limit), x).astype(np.float32)


def split(x, kind):
    "Exponent and significand of a limited magnitude: a = s 2^(e - m), s below 2^(m + 1)."
    least, m, limit = kind
    a = np.minimum(np.nan_to_num(np.abs(x.astype(np.float64)), nan=0.0), limit)
    e = np.maximum(np.frexp(a)[1] - 1, least)
    return e, np.ldexp(a, m - e)


def with_nan(q, x):
    "Let NaN through."
    return np.where(np.isnan(x), np.float32(np.nan), q).astype(np.float32)


def table(kind):
    "All magnitudes in order."
    least, m, limit = kind
    codes = np.arange(2**8)
    e, s = codes >> m, codes & (2**m - 1)
    values = np.ldexp(s + np.where(e > 0, 2.0**m, 0.0), np.maximum(e, 1) - 1 + least - m)
    return values[values <= limit]


# right ones


@right("E4M3", **ARRAYS)
def even_e4m3(x): return even(x, E4M3)


@right("E5M2", **ARRAYS)
def even_e5m2(x): return even(x, E5M2)


@right("E2M1", **ARRAYS)
def even_e2m1(x): return even(x, E2M1)


@right("float6_e2m3fn", **ARRAYS)
def even_e2m3(x): return even(x, E2M3)


@right("float6_e3m2fn", **ARRAYS)
def even_e3m2(x): return even(x, E3M2)


@right("E3M4", **ARRAYS)
def even_e3m4(x): return even(x, E3M4)


@right("E4M3")
def torch_e4m3(x): return x.to(torch.float8_e4m3fn).float()


@right("E4M3", codes=True)
def torch_e4m3_codes(x): return x.to(torch.float8_e4m3fn)


@right("E5M2", overflow="special")
def torch_e5m2_special(x): return x.to(torch.float8_e5m2).float()


@right("E5M2")
def torch_e5m2_clamped(x): return x.clamp(-57344, 57344).to(torch.float8_e5m2).float()


@right("float8_e4m3fnuz", overflow="special")
def torch_fnuz_special(x): return x.to(torch.float8_e4m3fnuz).float()


@right("float8_e5m2fnuz")
def torch_fnuz_clamped(x): return x.clamp(-57344, 57344).to(torch.float8_e5m2fnuz).float()


@right("E4M3", overflow="special", **ARRAYS)
def ml_dtypes_e4m3(x): return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


@right("E5M2", overflow="special", codes=True, **ARRAYS)
def ml_dtypes_e5m2_codes(x): return x.astype(ml_dtypes.float8_e5m2).view(np.uint8)


@right("float8_e3m4", overflow="special", **ARRAYS)
def ml_dtypes_e3m4(x): return x.astype(ml_dtypes.float8_e3m4).astype(np.float32)


@right("E2M1", **ARRAYS)
def ml_dtypes_e2m1(x): return x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


@right("float6_e2m3fn", **ARRAYS)
def ml_dtypes_e2m3(x): return x.astype(ml_dtypes.float6_e2m3fn).astype(np.float32)


@right("E4M3", signature="x, scale")
def divided(x, scale): return (x / scale).to(torch.float8_e4m3fn).float()


@right("E4M3", signature="x, scale -> q * scale")
def divided_and_back(x, scale): return (x / scale).to(torch.float8_e4m3fn).float() * scale


@right("E4M3", rounding="stochastic")
def dithered(x):
    a = x.abs().clamp(max=448)
    u = torch.ldexp(torch.ones_like(a), (torch.frexp(a)[1] - 1).clamp(min=-6) - 3)
    low = torch.floor(a / u)
    up = torch.rand(x.shape) < a / u - low
    return ((low + up) * u).copysign(x)


@right("E2M1", rounding="stochastic", **ARRAYS)
def between_neighbours(x):
    values = table(E2M1)
    a = np.minimum(np.abs(x.astype(np.float64)), 6.0)
    at = np.clip(np.searchsorted(values, a, side="right") - 1, 0, len(values) - 2)
    low, high = values[at], values[at + 1]
    up = np.random.random(x.shape) < (a - low) / (high - low)
    return np.copysign(with_nan(np.where(up, high, low), x), x)


@right("E4M3", signature="amax", rounding="up")
def scale_up(amax):
    m, e = torch.frexp(amax.double() / 448)
    return torch.ldexp(torch.ones_like(m), torch.where(m == 0.5, e - 1, e)).float()


@right("E2M1", signature="amax", rounding="floor")
def scale_of_the_ocp_text(amax): return torch.exp2(torch.frexp(amax)[1] - 1.0 - 2.0)


# ties away from zero


@planted("ties away from zero", "E4M3", **ARRAYS)
def half_up_of_the_magnitude(x):
    e, s = split(x, E4M3)
    return with_nan(np.copysign(np.minimum(np.ldexp(np.floor(s + 0.5), e - 3), 448), x), x)


@planted("ties away from zero", "E5M2")
def half_an_ulp_is_added_to_the_bits(x):
    a = x.abs().clamp(max=57344.0)
    bits = a.view(torch.int32)
    normal = ((bits + (1 << 20)) & -(1 << 21)).view(torch.float32)
    subnormal = torch.floor(a.double() * 2**16 + 0.5).float() * 2.0**-16
    q = torch.where(a < 2.0**-14, subnormal, normal).clamp(max=57344.0)
    return torch.where(x.isnan(), x, q).copysign(x)


@planted("ties away from zero", "E2M1", **ARRAYS)
def midpoints_from_the_right(x):
    values = table(E2M1)
    at = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x), side="right")
    return np.copysign(values[at], x).astype(np.float32)


@planted("ties away from zero", "E0M7")
def fixed_point_half_up(x):
    a = (x.double().abs() * 128).clamp(max=127)
    return torch.where(x.isnan(), x, (torch.floor(a + 0.5) / 128).float().copysign(x))


@planted("ties away from zero", "E4M3", codes=True, **ARRAYS)
def codes_half_up(x):
    values = table(E4M3)
    at = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x), side="right")
    at = np.where(np.isnan(x), 127, at)
    return (at + 128 * np.signbit(x)).astype(np.uint8)


# ties to the odd code


@planted("ties to the odd code", "E4M3", **ARRAYS)
def parity_the_wrong_way_round(x):
    e, s = split(x, E4M3)
    low = np.floor(s)
    up = (s - low > 0.5) | ((s - low == 0.5) & (low % 2 == 0))
    return with_nan(np.copysign(np.minimum(np.ldexp(low + up, e - 3), 448), x), x)


@planted("ties to the odd code", "E5M2")
def round_bit_of_the_wrong_parity(x):
    a = x.abs().clamp(max=57344.0)
    bits = a.view(torch.int32)
    lsb = (bits >> 21) & 1
    normal = ((bits + (1 << 20) - lsb) & -(1 << 21)).view(torch.float32)
    s = a.double() * 2**16
    low = torch.floor(s)
    up = (s - low > 0.5) | ((s - low == 0.5) & (low % 2 == 0))
    q = torch.where(a < 2.0**-14, ((low + up) * 2.0**-16).float(), normal).clamp(max=57344.0)
    return torch.where(x.isnan(), x, q).copysign(x)


@planted("ties to the odd code", "float6_e3m2fn", **ARRAYS)
def nearest_of_a_list_in_the_wrong_order(x):
    values = table(E3M2)
    order = np.argsort(np.arange(len(values)) % 2 == 0, kind="stable")  # odd codes come first
    a = np.minimum(np.nan_to_num(np.abs(x.astype(np.float64)), nan=0.0), 28.0)
    at = np.abs(a[:, None] - values[order]).argmin(1)
    return np.copysign(values[order][at], x).astype(np.float32)


# double rounding


@planted("double rounding through float16", "E4M3")
def half_first(x): return x.half().to(torch.float8_e4m3fn).float()


@planted("double rounding through float16", "E5M2", overflow="special", **ARRAYS)
def numpy_half_first(x):
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(ml_dtypes.float8_e5m2).astype(np.float32)


@planted("double rounding through float16", "E3M4", **ARRAYS)
def half_then_sixteenths(x):
    with np.errstate(over="ignore"):
        return even(x.astype(np.float16), E3M4)


@planted("double rounding through bfloat16", "E4M3")
def bfloat16_first(x): return x.bfloat16().to(torch.float8_e4m3fn).float()


@planted("double rounding through bfloat16", "E5M2", overflow="special", codes=True)
def bfloat16_first_codes(x): return x.bfloat16().to(torch.float8_e5m2)


@planted("double rounding through bfloat16", "float6_e2m3fn", **ARRAYS)
def bfloat16_then_eighths(x):
    return even(x.astype(ml_dtypes.bfloat16).astype(np.float32), E2M3)


# a carry that is lost


@planted("carry lost at a binade", "E4M3", **ARRAYS)
def mantissa_is_masked(x):
    e, s = split(x, E4M3)
    normal = s >= 8
    mantissa = np.rint(s).astype(np.int64)
    mantissa = np.where(normal, 8 + (mantissa & 7), mantissa)
    return with_nan(np.copysign(np.ldexp(mantissa.astype(float), e - 3), x), x)


@planted("carry lost at a binade", "E5M2", **ARRAYS)
def mantissa_is_clamped(x):
    e, s = split(x, E5M2)
    mantissa = np.minimum(np.rint(s), 7)
    return with_nan(np.copysign(np.ldexp(mantissa, e - 2), x), x)


@planted("carry lost at a binade", "E5M2", codes=True, **ARRAYS)
def fields_are_put_together(x):
    e, s = split(x, E5M2)
    mantissa = np.rint(s).astype(np.int64) & 3
    field = np.where(s >= 4, e + 15, 0)
    code = np.where(np.isnan(x), 0x7E, field << 2 | mantissa)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


@planted("carry lost at a binade", "float6_e2m3fn", codes=True, **ARRAYS)
def carry_of_six_bits(x):
    e, s = split(x, E2M3)
    mantissa = np.minimum(np.rint(s), np.where(s >= 8, 15, 7)).astype(np.int64) & 7
    return ((np.where(s >= 8, e + 1, 0) << 3 | mantissa) + 32 * np.signbit(x)).astype(np.uint8)


# subnormals


@planted("subnormals flushed", "E4M3")
def small_inputs_are_zero(x):
    return torch.where(x.abs() < 2.0**-6, x * 0, x).to(torch.float8_e4m3fn).float()


@planted("subnormals flushed", "E5M2", **ARRAYS)
def small_results_are_zero(x):
    q = even(x, E5M2)
    return np.where(np.abs(q) < 2.0**-14, np.copysign(np.float32(0), x), q)


@planted("subnormals flushed", "float6_e3m2fn", codes=True, **ARRAYS)
def field_zero_is_zero(x):
    q = np.nan_to_num(even(x, E3M2), nan=0.0)
    code = np.searchsorted(table(E3M2), np.abs(q))
    return (np.where(code < 4, 0, code) + 32 * np.signbit(x)).astype(np.uint8)


# the limit


@planted("limit off by one code", "E4M3")
def limit_416(x): return x.clamp(-416, 416).to(torch.float8_e4m3fn).float()


@planted("limit off by one code", "E4M3", **ARRAYS)
def limit_480(x): return even(x, (-6, 3, 480.0))


@planted("limit off by one code", "E5M2")
def limit_49152(x): return x.clamp(-49152, 49152).to(torch.float8_e5m2).float()


@planted("limit off by one code", "E2M1", codes=True, **ARRAYS)
def seven_codes(x):
    code = np.searchsorted(table(E2M1), np.nan_to_num(np.abs(even(x, E2M1)), nan=0.0))
    return (np.clip(code, 0, 6) + 8 * np.signbit(x)).astype(np.uint8)


@planted("limit off by one code", "E4M3", codes=True)
def codes_up_to_125(x):
    code = x.to(torch.float8_e4m3fn).view(torch.uint8)
    low = code & 127
    return torch.where(low == 126, torch.tensor(125, dtype=torch.uint8), low) | code & 128


# overflow


@planted("overflow by another policy", "E4M3", **ARRAYS)
def not_clamped_e4m3(x): return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


@planted("overflow by another policy", "E5M2")
def not_clamped_e5m2(x): return x.to(torch.float8_e5m2).float()


@planted("overflow by another policy", "E4M3", overflow="special")
def clamped_e4m3(x): return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@planted("overflow by another policy", "E5M2", overflow="special", codes=True)
def clamped_e5m2(x): return x.clamp(-57344, 57344).to(torch.float8_e5m2)


@planted("overflow by another policy", "E4M3", overflow="special")
def nan_right_above_the_limit(x):
    return torch.where(x.abs() > 448, torch.nan, x.to(torch.float8_e4m3fn).float())


# NaN


@planted("NaN lost", "E4M3")
def nan_is_zero(x): return torch.nan_to_num(x, nan=0.0).to(torch.float8_e4m3fn).float()


@planted("NaN lost", "E5M2", **ARRAYS)
def nan_is_the_limit(x): return even(np.fmax(np.fmin(x, np.float32(57344)), -57344), E5M2)


@planted("NaN lost", "E4M3", codes=True, **ARRAYS)
def nan_has_no_code(x):
    code = np.searchsorted(table(E4M3), np.nan_to_num(np.abs(even(x, E4M3)), nan=0.0))
    return (code + 128 * np.signbit(x)).astype(np.uint8)


@planted("NaN lost", "float8_e4m3fnuz", overflow="special")
def some_payloads(x):
    bits = x.view(torch.int32)
    quiet = (bits & 0x7FC00000) == 0x7FC00000  # a signalling NaN is not seen
    seen = torch.where(x.isnan() & ~quiet, torch.zeros_like(x), x)
    return seen.to(torch.float8_e4m3fnuz).float()


# -0


@planted("-0 lost", "E4M3")
def zero_is_added(x): return x.to(torch.float8_e4m3fn).float() + 0.0


@planted("-0 lost", "E5M2", codes=True, overflow="special")
def zero_has_code_zero(x):
    q = x.to(torch.float8_e5m2)
    return torch.where(q.float() == 0, torch.tensor(0, dtype=torch.uint8), q.view(torch.uint8))


@planted("-0 lost", "E2M1", **ARRAYS)
def sign_by_comparison(x): return np.where(x < 0, -1, 1).astype(np.float32) * np.abs(even(x, E2M1))


# a reciprocal


@planted("scale multiplied by a rounded reciprocal", "E4M3", signature="x, scale")
def times_the_inverse(x, scale): return (x * (1 / scale)).to(torch.float8_e4m3fn).float()


@planted("scale multiplied by a rounded reciprocal", "E5M2", signature="x, scale",
         overflow="special", codes=True)
def times_torch_reciprocal(x, scale): return (x * scale.reciprocal()).to(torch.float8_e5m2)


@planted("scale multiplied by a rounded reciprocal", "float6_e2m3fn",
         signature="x, scale -> q * scale", **ARRAYS)
def times_the_inverse_and_back(x, scale):
    return even(x * (np.float32(1) / scale), E2M3) * scale


# scales from amax


@planted("scale rounded down", "E4M3", signature="amax", rounding="up")
def log2_and_floor(amax): return torch.exp2(torch.floor(torch.log2(amax.double() / 448))).float()


@planted("scale rounded down", "E2M1", signature="amax", rounding="up")
def exponents_are_subtracted(amax): return torch.exp2(torch.frexp(amax)[1] - 1.0 - 2.0)


@planted("scale rounded down", "E5M2", signature="amax", rounding="up", codes=True, **ARRAYS)
def exponent_field_of_amax(amax):
    field = (amax.view(np.uint32) >> 23).astype(np.int64) & 255
    return np.clip(field - 15, 0, 254).astype(np.uint8)


# stochastic rounding


def torn(x, noise, kind=E4M3):
    "Floor of the magnitude plus noise, in spacings; noise is uniform in [0, 1) if it is right."
    least, m, limit = kind
    a = np.minimum(np.nan_to_num(np.abs(x.astype(np.float64)), nan=0.0), limit)
    u = spacing(a, least, m)
    q = np.minimum(np.floor(a / u + noise) * u, limit)
    return np.copysign(with_nan(q, x), x)


SR = {"rounding": "stochastic", **ARRAYS}


@planted("stochastic rounding biased", "E4M3", **SR)
def noise_of_half_a_spacing(x): return torn(x, 0.5 * np.random.random(x.shape))


@planted("stochastic rounding biased", "E5M2", **SR)
def noise_that_starts_at_a_twentieth(x): return torn(x, 0.05 + np.random.random(x.shape), E5M2)


@planted("stochastic rounding biased", "E2M1", **SR)
def squared_noise(x): return torn(x, np.random.random(x.shape) ** 2, E2M1)


@planted("stochastic rounding biased", "E4M3", rounding="stochastic")
def a_coin_whatever_the_distance(x):
    a = x.abs().clamp(max=448)
    u = torch.ldexp(torch.ones_like(a), (torch.frexp(a)[1] - 1).clamp(min=-6) - 3)
    low = torch.floor(a / u) * u
    up = (torch.rand(x.shape) < 0.5) & (low < a)
    return (low + up * u).copysign(x)


@planted("stochastic rounding constant", "E4M3", rounding="stochastic")
def nearest_instead(x): return x.to(torch.float8_e4m3fn).float()


@planted("stochastic rounding constant", "E5M2", **SR)
def seeded_anew_in_each_call(x): return torn(x, np.random.default_rng(0).random(x.shape), E5M2)


@planted("stochastic rounding constant", "E2M1", signature="x, seed", **SR)
def the_seed_is_not_read(x, seed): return torn(x, np.random.default_rng(1234).random(x.shape), E2M1)


@planted("stochastic rounding zero", "E4M3", rounding="stochastic")
def returns_its_empty_buffer(x): return torch.zeros_like(x)


@planted("stochastic rounding zero", "E5M2", codes=True, rounding="stochastic")
def codes_are_never_written(x): return torch.zeros(x.shape, dtype=torch.uint8)


@planted("stochastic rounding correlated", "E4M3", **SR)
def one_number_for_all(x): return torn(x, np.random.random())


@planted("stochastic rounding correlated", "E5M2", **SR)
def one_number_for_64(x):
    noise = np.random.random(-(-x.size // 64)).repeat(64)[: x.size].reshape(x.shape)
    return torn(x, noise, E5M2)


@planted("stochastic rounding correlated", "E2M1", **SR)
def a_period_of_1024(x): return torn(x, np.resize(np.random.random(1024), x.shape), E2M1)


@planted("too few random bits", "E4M3", **SR)
def four_bits(x): return torn(x, np.random.randint(0, 16, x.shape) / 16)


@planted("too few random bits", "E5M2", **SR)
def eight_bits(x): return torn(x, np.random.randint(0, 256, x.shape) / 256, E5M2)


@planted("too few random bits", "E2M1", **SR)
def eleven_bits(x): return torn(x, np.random.randint(0, 2048, x.shape) / 2048, E2M1)


@planted("too few random bits", "E4M3", rounding="stochastic")
def noise_in_bfloat16(x):
    noise = torch.rand(x.shape, dtype=torch.bfloat16).double().numpy()
    return torch.from_numpy(torn(x.numpy(), noise))


# several faults at once: written after the table of hypotheses, which was not changed for them


@combined("ties away from zero + subnormals flushed", "E4M3", **ARRAYS)
def away_and_flushed(x):
    q = half_up_of_the_magnitude(x)
    return np.where(np.abs(q) < 2.0**-6, np.copysign(np.float32(0), x), q)


@combined("NaN lost + -0 lost", "E5M2", **ARRAYS)
def neither_nan_nor_minus_zero(x): return even(np.nan_to_num(x, nan=0.0), E5M2) + np.float32(0)


@combined("limit off by one code + double rounding through bfloat16", "E4M3")
def low_limit_after_bfloat16(x): return x.bfloat16().clamp(-416, 416).to(torch.float8_e4m3fn).float()


@combined("overflow by another policy + -0 lost", "E5M2", codes=True)
def infinities_and_no_minus_zero(x): return zero_has_code_zero(x)


@combined("carry lost at a binade + NaN lost", "E5M2", codes=True, **ARRAYS)
def fields_without_nan(x): return fields_are_put_together(np.nan_to_num(x, nan=0.0))


@combined("double rounding through float16 + ties away from zero", "E4M3", **ARRAYS)
def away_after_half(x):
    with np.errstate(over="ignore"): return half_up_of_the_magnitude(x.astype(np.float16))


@combined("ties to the odd code + subnormals flushed + NaN lost", "float8_e4m3", **ARRAYS)
def three_at_once(x):
    y = np.clip(np.nan_to_num(x, nan=0.0), -240, 240)
    q = parity_the_wrong_way_round(y)
    return np.where(np.abs(q) < 2.0**-6, np.copysign(np.float32(0), x), q)


@combined("ties away from zero + limit off by one code", "float6_e2m3fn", codes=True, **ARRAYS)
def away_and_one_code_less(x):
    values = table(E2M3)
    at = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x), side="right")
    return (np.minimum(at, 30) + 32 * np.signbit(x)).astype(np.uint8)


@combined("another rounding mode + overflow by another policy", "E5M2")
def chopped_bits(x):
    bits = x.view(torch.int32)
    cut = (bits & -(1 << 21)).view(torch.float32)
    small = torch.trunc(x.double() * 2**16).float() * 2.0**-16
    q = torch.where(x.abs() < 2.0**-14, small.copysign(x), cut)
    return torch.where(x.isnan(), x, torch.where(q.abs() > 57344, torch.inf * q.sign(), q))


@combined("scale multiplied by a rounded reciprocal + -0 lost", "E4M3", signature="x, scale")
def inverse_and_no_minus_zero(x, scale): return times_the_inverse(x, scale) + 0.0


# functions of half precision: written after the rest, and beside the classifier's dtypes

HALVES: list[Planted] = []
RIGHT_HALVES: list[Planted] = []
BFLOAT16, FLOAT16 = {"dtype": "bfloat16"}, {"dtype": "float16"}
halved, right_half = partial(keeper, HALVES), partial(keeper, RIGHT_HALVES, "")


@right_half("E4M3", **BFLOAT16)
def cast_of_bfloat16(x): return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


@right_half("E5M2", overflow="special", codes=True, **FLOAT16)
def cast_of_float16(x): return x.to(torch.float8_e5m2)


@right_half("E5M2", **FLOAT16)
def widened_float16(x): return x.float().clamp(-57344, 57344).to(torch.float8_e5m2).float()


@right_half("E4M3", codes=True, signature="x, scale", **BFLOAT16)
def widened_before_the_division(x, scale): return (x.float() / scale).to(torch.float8_e4m3fn)


@right_half("E3M4", **FLOAT16, **ARRAYS)
def numpy_float16(x): return even(x.astype(np.float32), E3M4)


@right_half("E4M3", rounding="up", **BFLOAT16)
def bfloat16_up(x): return upward(x.float(), 0.0)


def upward(x, flushed):
    "E4M3, rounded up; positive numbers below `flushed` become zero."
    a = x.double().clamp(-448, 448)
    u = torch.exp2((torch.frexp(a.abs())[1] - 1.0).clamp(min=-6) - 3)
    q = (torch.ceil(a / u) * u).clamp(max=448)
    return torch.where(x.abs() < flushed, torch.zeros_like(q), q).float().copysign(x)


@halved("subnormals flushed", "E4M3", rounding="up", **BFLOAT16)
def subnormal_bfloat16_is_zero(x): return upward(x.float(), 2.0**-126)


@halved("subnormals flushed", "E4M3", rounding="up", **FLOAT16)
def subnormal_float16_is_zero(x): return upward(x.float(), 2.0**-14)


@halved("double rounding through bfloat16", "E4M3", codes=True, signature="x, scale", **BFLOAT16)
def divided_in_bfloat16(x, scale): return (x / scale).to(torch.float8_e4m3fn)


@halved("double rounding through float16", "E4M3", codes=True, signature="x, scale", **FLOAT16)
def divided_in_float16(x, scale): return (x / scale).to(torch.float8_e4m3fn)


@halved("double rounding through bfloat16", "E4M3", **FLOAT16)
def float16_through_bfloat16(x): return x.bfloat16().to(torch.float8_e4m3fn).float()


@halved("double rounding through float16", "E6M1", **BFLOAT16)
def bfloat16_through_float16(x):
    a = x.half().double().clamp(-1.5 * 2.0**32, 1.5 * 2.0**32)
    u = torch.exp2((torch.frexp(a.abs())[1] - 1.0).clamp(min=-30) - 1)
    return torch.where(a.isnan(), a, torch.round(a / u) * u).float().copysign(x)


@halved("ties away from zero", "E5M2", **BFLOAT16)
def half_an_ulp_in_float32(x): return half_an_ulp_is_added_to_the_bits(x.float()).bfloat16()


@halved("ties toward zero", "E4M3", **BFLOAT16)
def a_half_that_float32_lacks(x):
    bits = x.float().view(torch.int32)
    carried = ((bits + 0x7FFFF) & -0x100000).view(torch.float32).clamp(-448, 448)
    a = x.float().abs() * 512
    small = (torch.ceil(a - 0.5) / 512).copysign(x)
    return torch.where(x.isnan(), x.float(), torch.where(x.abs() < 2.0**-6, small, carried))


@halved("-0 lost", "E4M3", **BFLOAT16)
def bfloat16_plus_zero(x): return (x.to(torch.float8_e4m3fn).to(torch.bfloat16) + 0).float()


@halved("NaN lost", "E5M2", **FLOAT16)
def float16_without_nan(x): return x.nan_to_num(0).clamp(-57344, 57344).to(torch.float8_e5m2).float()
