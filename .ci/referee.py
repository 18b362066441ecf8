"""Compares the Triton kernels with the CPU path, bit by bit, under Triton's interpreter:
python .ci/referee.py            # every number of the boundary set of every format (minutes)
python .ci/referee.py --sample   # some of them, and fewer formats, for the tests
It prints one line of JSON for each format, and ends with exit code 1 if a bit differs."""
import argparse
import json
import os
import time
import warnings
from itertools import chain, islice
from typing import Any, Callable, Iterator, NamedTuple

if __name__ == "__main__": os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
from torch import Tensor

from altgrad.numbers.blocks import BlockScales, NVFP4Scales
from altgrad.numbers.counts import QuantStats, quantize_stats
from altgrad.numbers.formats import FORMATS, FP8Format
from altgrad.numbers.kernels import set_path
from altgrad.numbers.quantize import fake_quantize, quantize, rounding_key
from altgrad.numbers.referee import SCALES, inputs
from altgrad.numbers.triton_kernels import triton_blocks

SAMPLE = ("E0M7", "E4M3", "E5M2", "E7M0", "float4_e2m1fn", "mxint8", "float8_e4m3fnuz", "binary8p1",
          "float8_e8m0fnu", "bfloat16")
MODES = ("nearest", "toward_zero", "up", "down", "away", "stochastic")
EXTREMES = (2.0**-149, 2.0**-126, 1e-38, 2.0**127, 3e38)  # scales, as float32
COUNTED = ("count", "overflow", "underflow", "nan", "inf", "amax", "histogram")


def by_triton(kernel: Callable) -> Callable:
    "The kernel, computing by the path of the Triton kernels, which refuses what they cannot do."
    def call(*args: Any, **kwargs: Any) -> Any:
        before = set_path("triton")
        try: return kernel(*args, **kwargs)
        finally: set_path(before)
    return call


class Kernels(NamedTuple):
    "What is judged, and the device on which it computes."
    fake_quantize: Callable = by_triton(fake_quantize)
    stats: Callable = by_triton(quantize_stats)
    blocks: Callable = triton_blocks
    device: str = "cpu"

    def call(self, kernel: Callable, *args: Any, **kwargs: Any) -> Any:
        "The answer of one of the three, its tensors given there."
        there = [a.to(self.device) if isinstance(a, Tensor) else a for a in args]
        return kernel(*there, **kwargs)


TRITON = Kernels()


class Case(NamedTuple):
    "What was given, and what the CPU path gives."
    name: str
    given: Tensor
    right: Tensor


def differing(given: Tensor, right: Tensor) -> Tensor:
    "Where bits differ; the bits of a NaN are no result."
    if not given.is_floating_point(): return given != right
    bits = torch.int32 if given.dtype == torch.float32 else torch.int16
    if given.dtype == torch.float64: bits = torch.int64
    return (given.view(bits) != right.view(bits)) & ~(given.isnan() & right.isnan())


def numbers(fmt: FP8Format, scale: float, most: int) -> Tensor:
    "The boundary set, or so many numbers evenly from it; both zeros, infinities and NaN."
    few = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001], np.uint32)
    bits = inputs(fmt, scale)["boundary"]
    if not fmt.signed: bits = np.concatenate([bits, bits ^ np.uint32(1 << 31)])
    bits = np.concatenate([bits[:: len(bits) // most + 1], few])
    return torch.from_numpy(bits.view(np.float32))


def both(kernels: Kernels, *args: Any, **kwargs: Any) -> Case:
    "One call on both paths."
    given = kernels.call(kernels.fake_quantize, *args, **kwargs).cpu()
    return Case(f"fake_quantize {kwargs}", given, fake_quantize(*args, **kwargs))


def rounded(fmt: FP8Format, most: int, kernels: Kernels) -> Iterator[Case]:
    "Modes and policies, scales of every shape, and numbers of random bits."
    x, key = numbers(fmt, 1.0, most), rounding_key(5, 9, 2)
    policies = ("saturate",) if fmt.specials == "none" else ("saturate", "special")
    for rounding in MODES:
        more = {"key": key} if rounding == "stochastic" else {}
        for overflow in policies:
            yield both(kernels, x, fmt, rounding=rounding, overflow=overflow, **more)
    for bits in (1, 8, 23):
        yield both(kernels, x, fmt, rounding="stochastic", key=key, random_bits=bits)
    for i, scale in enumerate(map(float, np.array((*SCALES, *EXTREMES), np.float32))):
        near = numbers(fmt, scale, most) if i < len(SCALES) else x
        for overflow in policies: yield both(kernels, near, fmt, scale, overflow=overflow)
    rows = x[: len(x) // 8 * 8].view(8, -1)
    for scale in (torch.rand(8, 1), torch.rand(rows.shape[1]), torch.rand(rows.shape)):
        yield both(kernels, rows, fmt, scale + 0.1)
    yield both(kernels, rows.t(), fmt)
    yield from halves(fmt, x, kernels)


def halves(fmt: FP8Format, x: Tensor, kernels: Kernels) -> Iterator[Case]:
    "Half precision: unscaled, and with scales that drive products beyond what it holds."
    for dtype in (torch.bfloat16, torch.float16):
        for scale in (1.0, 0.3, 1e-6, 3e4): yield both(kernels, x.to(dtype), fmt, scale)


def counted(fmt: FP8Format, most: int, kernels: Kernels) -> Iterator[Case]:
    "Results, counts and histograms; sums of squares, added in another order."
    x = numbers(fmt, 1.0, most)
    special = [] if fmt.specials == "none" else [
        (0.7, dict(overflow="special")), (3.0, dict(overflow="special", rounding="toward_zero"))]
    for scale, more in ((1.0, {}), (0.7, {}), (1.0, dict(rounding="stochastic", key=3)), *special):
        y, given = kernels.call(kernels.stats, x, fmt, scale, **more)
        right_y, right = quantize_stats(x, fmt, scale, **more)
        yield Case(f"stats {scale} {more}", y.cpu(), right_y)
        for name in COUNTED: yield Case(name, getattr(given, name).cpu(), getattr(right, name))
        yield from squares(given, right)


def squares(given: QuantStats, right: QuantStats) -> Iterator[Case]:
    "Whether sums are the same but for the order in which they are added."
    for name in ("squared_error", "squares"):
        a, b = getattr(given, name).cpu(), getattr(right, name)
        # n terms of one sign, in any order: within n 2^-52 of each other, relatively
        near = (a - b).abs() <= int(right.count) * 2.0**-52 * b.abs()
        yield Case(name, near | (a == b), torch.tensor(True))


def plain_blocks(
    x: Tensor, fmt: FP8Format, block: int, whole: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    "Codes and scales of blocks by the path of any device; of two levels under a tensor's number."
    if whole is None:
        kind = BlockScales(block)
        kept = kind.start(x, fmt)
    else:
        kind = NVFP4Scales(block)
        kept = kind._rounded(kind.amax(x) / fmt.max, whole, "nearest")
    return fmt.to_bits(quantize(x, fmt, kind.divisor(kept, x.shape))), kept["scale"]


def in_blocks(fmt: FP8Format, most: int, kernels: Kernels) -> Iterator[Case]:
    "Codes and scales of blocks: mixed numbers, Gaussian ones of every size, subnormal ones."
    x = numbers(fmt, 1.0, most)
    if fmt.code_nan is None: x = x.nan_to_num(0.0, torch.inf, -torch.inf)
    sizes = torch.exp2(torch.arange(-148, 120, 7).float())[:, None]
    small = torch.arange(1, 2**24, 2**13 - 1, dtype=torch.int32).view(torch.float32)
    for part in (x[torch.randperm(len(x))][None], torch.randn(len(sizes), 70) * sizes, small[None]):
        for block in (1, 5, 16, 32):
            given, right = kernels.call(kernels.blocks, part, fmt, block), plain_blocks(part, fmt, block)
            for what, a, b in zip(("codes", "scales"), given, right):
                yield Case(f"{what} of {block}", a.cpu(), b)
        yield from in_two_levels(fmt, part, kernels)


def in_two_levels(fmt: FP8Format, x: Tensor, kernels: Kernels) -> Iterator[Case]:
    "Codes and scales of NVFP4, under its tensor's number and others."
    kind = NVFP4Scales(16)
    x = x.nan_to_num().clamp(-(2.0**90), 2.0**90)  # times 2^20, a scale is still finite
    kept = kind.start(x, fmt)
    for factor in (1.0, 1 / 3, 2.0**20):
        whole = kept["whole"] * factor
        right = plain_blocks(x, fmt, 16, whole)
        given = kernels.call(kernels.blocks, x, fmt, 16, whole)
        for what, a, b in zip(("codes", "scales"), given, right):
            yield Case(f"{what} of two levels", a.cpu(), b)


def judged(
    fmt: FP8Format, most: int, kernels: Kernels = TRITON, cases: int | None = None,
) -> dict[str, Any]:
    "How many answers of all cases, or the first so many, were compared, and what differs."
    start, compared, wrong = time.perf_counter(), 0, list[str]()
    every = chain(rounded(fmt, most, kernels), counted(fmt, most, kernels),
                  in_blocks(fmt, most, kernels) if fmt.signed and fmt.bits <= 8 else ())
    for case in islice(every, cases):
        compared += case.given.numel()
        bad = differing(case.given, case.right).flatten().nonzero().flatten()
        if len(bad):
            i = int(bad[0])
            wrong.append(f"{case.name}: {len(bad)} differ; {case.given.flatten()[i].item()} is not "
                         f"{case.right.flatten()[i].item()}")
    return {"format": fmt.name, "compared": compared, "wrong": wrong,
            "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", action="store_true", help="a part of it")
    sample = parser.parse_args().sample
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # of numpy, about what overflows
    failed = False
    for fmt in FORMATS.values():
        if sample and fmt.name not in SAMPLE: continue
        found = judged(fmt, 600 if sample else 2**32)
        print(json.dumps(found), flush=True)
        failed |= bool(found["wrong"])
    return int(failed)


if __name__ == "__main__": raise SystemExit(main())
