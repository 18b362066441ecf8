"""Checks the quantizer on every float32 there is: all 2^32 bit patterns, for every format, rounding
mode and overflow policy.

python .ci/verify.py                                     # everything; results that are stored already are kept
python .ci/verify.py --rounding nearest --overflow saturate --format E4M3 E5M2

Over the float32 patterns of one sign, in order, the right answer is a staircase of at most some
hundreds of steps. They are worked out in exact rational
arithmetic (`segments`); then the public function quantizes every pattern, and every step is
compared, bit for bit, with its one right answer.
"""
import argparse
import json
import sys
import time
import warnings
from bisect import bisect_right
from fractions import Fraction
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from altgrad.basics import write_atomic
from altgrad.numbers import quantize
from altgrad.numbers.formats import EIGHT_BIT, FP8Format, get_format
from altgrad.numbers.kernels import rounding_key
from altgrad.numbers.quantize import fake_quantize
from altgrad.evidence.instrument import code_hash
from altgrad.training.tracking import code_commit, machine, versions

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "nbs/results/verify.json"
JUDGES = (  # a stored result is kept while these files are what they were
    ".ci/verify.py", "altgrad/numbers/formats.py", "altgrad/numbers/quantize.py",
    "altgrad/numbers/kernels.py", "altgrad/numbers/native.py",
)
OCP = ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "mxint8", "float8_e8m0fnu")
FORMATS = EIGHT_BIT + OCP
ROUNDINGS = ("nearest", "toward_zero", "up", "down", "away")
POLICIES = ("saturate", "special", "raise")
PATTERNS, SIGN, INF, NAN = 1 << 32, 1 << 31, 0x7F800000, 0x7FC00000  # NAN stands for every NaN
BLOCK = 1 << 19  # patterns at a time: 2 MiB
EAGER_STRIDE = 1009  # the eager path sees every 1009th pattern, and every boundary
EXAMPLES = 5  # mismatches that are stored, at most
# stochastic rounding: where between two values, and how often
FRACTIONS = (1 / 32, 1 / 4, 1 / 2, 13 / 16)
KEYS = 64
COPIES = 256
STANDARD_ERRORS = 5

# the right answers


class Segment(NamedTuple):
    "A run of float32 patterns with one right answer; it ends where the next one starts."
    first: int  # pattern
    bits: int  # of the answer; NAN stands for any NaN


def real(pattern: int) -> Fraction:
    "The exact value of a float32 pattern from 0 to INF, which counts as 2^128."
    e, m = divmod(pattern, 1 << 23)
    return Fraction(m + ((e > 0) << 23)) * Fraction(2) ** (max(e, 1) - 150)


def bits_of(value: float) -> int:
    "The float32 pattern of a value."
    return torch.tensor(value, dtype=torch.float32).view(torch.int32).item() % PATTERNS


def magnitudes(fmt: FP8Format, negative: bool) -> list[Fraction]:
    """The finite values of one sign without it, in order, from the primitive facts alone;
    then the one that would come next."""
    M, first_normal = fmt.mantissa_bits, int(fmt.subnormals)
    special_codes = {"none": 0, "fn": 1, "ieee": 2**M, "fnuz": 0, "p3109": 1}[fmt.specials]
    count = 2 ** (fmt.exponent_bits + M) - special_codes + (fmt.twos_complement and negative)
    e_and_m = [divmod(code, 2**M) for code in range(count + 1)]
    return [
        Fraction(2) ** (max(e, first_normal) - fmt.bias) * (Fraction(m, 2**M) + (e >= first_normal))
        for e, m in e_and_m
    ]


def has_minus_zero(fmt: FP8Format) -> bool:
    "Whether -0 is a value of its own."
    return fmt.signed and not fmt.twos_complement and fmt.specials not in ("fnuz", "p3109")


def threshold(
    low: Fraction, high: Fraction, odd: bool, rounding: str, negative: bool
) -> tuple[Fraction, bool]:
    """Where, between two neighbouring magnitudes, rounding goes to the upper one:
    beyond which value, and whether at it too. `odd`: the lower one's code is."""
    if rounding == "nearest": return (low + high) / 2, odd
    if rounding == "away": return (low + high) / 2, True
    outward = rounding == ("down" if negative else "up")
    return (low, False) if outward else (high, True)


def first_pattern(value: Fraction, including: bool) -> int:
    "The first pattern with a real value beyond (or at) `value`, INF at the most."
    low, high = 0, INF
    while low < high:
        middle = (low + high) // 2
        if real(middle) > value or (including and real(middle) == value): high = middle
        else: low = middle + 1
    return low


def overflow_start(fmt: FP8Format, rounding: str, negative: bool) -> int:
    "The first pattern of one sign that rounds beyond the last finite value."
    if negative and not fmt.signed: return 1
    *finite, last, beyond = magnitudes(fmt, negative)
    return first_pattern(*threshold(last, beyond, len(finite) % 2 == 1, rounding, negative))


def staircase(fmt: FP8Format, rounding: str, overflow: str, negative: bool) -> Iterator[Segment]:
    "The segments of one sign, without NaN."
    sign = SIGN * negative
    values = magnitudes(fmt, negative)
    # all is below the smallest value
    if negative and not fmt.signed: values = magnitudes(fmt, False)[:1] + [Fraction(1)]
    answers = [
        bits_of(float(v)) | (sign if fmt.signed and v or has_minus_zero(fmt) else 0)
        for v in values[:-1]
    ]
    yield Segment(sign, answers[0])
    for code in range(1, len(answers)):
        yield Segment(
            sign
            + first_pattern(
                *threshold(values[code - 1], values[code], code % 2 == 0, rounding, negative)
            ),
            answers[code],
        )
    if overflow == "special":
        # stops at the last finite value, as in IEEE 754; infinity does not
        inward = rounding in ("toward_zero", "up" if negative else "down")
        infinity = sign + INF if fmt.specials in ("ieee", "p3109") else NAN
        yield Segment(sign + (INF if inward else overflow_start(fmt, rounding, negative)), infinity)


def segments(fmt: FP8Format, rounding: str, overflow: str) -> list[Segment]:
    "The right answers for all 2^32 patterns, in order."
    found = []
    for negative in (False, True):
        found += staircase(fmt, rounding, overflow, negative)
        found.append(Segment(SIGN * negative + INF + 1, NAN))
    return found


# comparing


def as_int32(pattern: int) -> int:
    "A pattern as the number that torch's int32 holds."
    return pattern - PATTERNS if pattern >= SIGN else pattern


def is_wrong(got: Tensor, expected: Tensor | int) -> Tensor:
    """Which results (int32 patterns) differ from what is expected;
    where that is NAN, every NaN is right."""
    nan = (got & 0x7FFFFFFF) > INF
    return torch.where(torch.as_tensor(expected == NAN), ~nan, got != expected)


def is_constant(got: Tensor, expected: int) -> bool:
    "Whether all results are the expected one; seen from their smallest and largest pattern."
    low, high = (t.item() for t in got.aminmax())
    if expected == NAN: return low > INF or as_int32(SIGN + INF) < low <= high < 0
    return low == high == expected


class Found(NamedTuple):
    "What a comparison found."
    mismatches: int
    examples: list[dict[str, str]]  # the first few


def describe(patterns: Tensor, got: Tensor, expected: Tensor) -> list[dict[str, str]]:
    "The first few wrong results, in hexadecimal."
    rows = zip(*(t[:EXAMPLES].tolist() for t in (patterns, got, expected)))
    return [
        {
            "input": f"{p % PATTERNS:08x}", "got": f"{g % PATTERNS:08x}",
            "expected": f"{e % PATTERNS:08x}",
        }
        for p, g, e in rows
    ]


def sweep(
    quantizer: Callable[[Tensor], Tensor],  # float32 to float32
    answers: list[Segment],
    first: int = 0,  # the first pattern that is tried
    stop: int = PATTERNS,  # the first that is not tried again
    progress: Callable[[int], None] = lambda patterns: None,  # called after each block
) -> Found:
    "Quantizes every pattern of a range, in order, and compares all bits of all results."
    base, buffer = torch.arange(BLOCK, dtype=torch.int32), torch.empty(BLOCK, dtype=torch.int32)
    starts = [s.first for s in answers]
    mismatches, examples = 0, []
    for start in range(first, stop, BLOCK):
        size = min(BLOCK, stop - start)
        patterns = torch.add(base[:size], as_int32(start), out=buffer[:size])
        got = quantizer(patterns.view(torch.float32)).view(torch.int32)
        begin, at = start, bisect_right(starts, start) - 1
        while begin < start + size:
            end = min(start + size, starts[at + 1] if at + 1 < len(starts) else PATTERNS)
            part, expected = slice(begin - start, end - start), as_int32(answers[at].bits)
            if end > begin and not is_constant(got[part], expected):
                wrong = is_wrong(got[part], expected)
                mismatches += int(wrong.sum())
                if len(examples) < EXAMPLES:
                    examples += describe(
                        patterns[part][wrong], got[part][wrong],
                        torch.full_like(got[part][wrong], expected),
                    )
            begin, at = max(begin, end), at + 1
        progress(size)
    return Found(mismatches, examples[:EXAMPLES])


def sample(
    quantizer: Callable[[Tensor], Tensor], answers: list[Segment], stride: int = EAGER_STRIDE
) -> tuple[int, Found]:
    """Compares every so-many-th pattern, and the patterns on both sides of every boundary;
    returns how many they were."""
    starts = torch.tensor([s.first for s in answers])
    near = (starts[:, None] + torch.tensor([-1, 0])).flatten() % PATTERNS
    patterns = torch.cat([torch.arange(0, PATTERNS, stride), near])
    expected = torch.tensor([as_int32(s.bits) for s in answers], dtype=torch.int32)[
        torch.searchsorted(starts, patterns, right=True) - 1
    ]
    patterns = torch.where(patterns >= SIGN, patterns - PATTERNS, patterns).int()
    got = quantizer(patterns.view(torch.float32)).view(torch.int32)
    wrong = is_wrong(got, expected)
    return len(patterns), Found(
        int(wrong.sum()), describe(patterns[wrong], got[wrong], expected[wrong])
    )


# what is checked


def on_path(path: str):
    "Every call takes this path from now on."
    quantize.set_path(path)


def allowed(fmt: FP8Format, overflow: str) -> bool:
    "Whether the format knows the policy: `special` needs a code for infinity or NaN."
    return overflow != "special" or fmt.specials != "none"


def check_patterns(fmt: FP8Format, rounding: str, overflow: str, progress) -> dict:
    "Every pattern through the compiled path, a sample through the eager one."
    def quantizer(x): return fake_quantize(x, fmt, rounding=rounding, overflow=overflow)

    answers = segments(fmt, rounding, overflow)
    began = time.perf_counter()
    on_path("compiled")
    for _ in range(2): quantizer(torch.zeros(BLOCK))
    compiled = time.perf_counter()
    every = sweep(quantizer, answers, progress=progress)
    swept = time.perf_counter()
    on_path("eager")
    eager, some = sample(quantizer, answers)
    return {"patterns": PATTERNS, "segments": len(answers), "mismatches": every.mismatches, "examples": every.examples,
            "eager": {"patterns": eager, "mismatches": some.mismatches, "examples": some.examples},
            "seconds": {"compile": compiled - began, "sweep": swept - compiled, "eager": time.perf_counter() - swept}}


def raises(fmt: FP8Format, rounding: str, pattern: int) -> bool:
    "Whether one pattern, among zeros, overflows."
    x = torch.zeros(5)
    x[3] = torch.tensor(as_int32(pattern), dtype=torch.int32).view(torch.float32)
    try: fake_quantize(x, fmt, rounding=rounding, overflow="raise")
    except OverflowError: return True
    return False


def check_raise(fmt: FP8Format, rounding: str, progress) -> dict:
    """The last pattern that fits and the first that does not,
    infinity and NaN, of both signs, on both paths."""
    began, wrong, cases = time.perf_counter(), [], 0
    for path in ("compiled", "eager"):
        on_path(path)
        for negative in (False, True):
            start = overflow_start(fmt, rounding, negative)
            for pattern, expected in (
                (0, False),
                (start - 1, False),
                (start, True),
                (INF, True),
                (INF + 1, False),
                (NAN, False),
            ):
                cases += 1
                if raises(fmt, rounding, SIGN * negative + pattern) != expected:
                    wrong.append({"input": f"{SIGN * negative + pattern:08x}", "path": path})
    return {
        "patterns": cases,
        "mismatches": len(wrong),
        "examples": wrong[:EXAMPLES],
        "seconds": {"sweep": time.perf_counter() - began},
    }


def check_stochastic(fmt: FP8Format, overflow: str, progress) -> dict:
    """Points between all neighbouring values, many keys: only neighbours come out,
    their mean is x and their variance (x - lo)(hi - x); values stay themselves."""
    began = time.perf_counter()
    on_path("compiled")
    values = torch.tensor([float(v) for v in magnitudes(fmt, False)[:-1]], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0] if fmt.signed else [1.0], dtype=torch.float64)[:, None, None]
    f = torch.tensor(FRACTIONS, dtype=torch.float64)[None, :, None]
    low = (values[:-1] * signs).expand(-1, f.numel(), -1)
    gap = (values.diff() * signs).expand(-1, f.numel(), -1)
    x = (low + f * gap).float()
    total, squares, wrong, N = torch.zeros_like(low), torch.zeros_like(low), 0, KEYS * COPIES
    exact = torch.cat([values.float(), -values.float()] if fmt.signed else [values.float()])
    for key in (rounding_key(0, step) for step in range(KEYS)):
        y = fake_quantize(
            x.expand(COPIES, *x.shape).contiguous(), fmt, rounding="stochastic", key=key
        ).double()
        wrong += int(((y != low) & (y != low + gap)).sum())
        error = (y - x.double()) / gap
        total += error.sum(0)
        squares += error.square().sum(0)
        kept = fake_quantize(exact, fmt, rounding="stochastic", key=key)
        wrong += int(
            (
                is_wrong(
                    kept.view(torch.int32),
                    (exact if has_minus_zero(fmt) else exact + 0.0).view(torch.int32),
                )
            ).sum()
        )
    variance = f * (1 - f)
    bias = (total / N).abs() / (variance / N).sqrt()
    off = (squares / N - variance).abs()
    # at f = 1/2 both errors are equal, and so is their square
    spread = off / ((1 - 2 * f).abs() * (variance / N).sqrt()).clamp(min=1e-9)
    worst = {"bias": bias.max().item(), "variance": spread.max().item()}
    bad = int((bias > STANDARD_ERRORS).sum() + (spread > STANDARD_ERRORS).sum())
    return {
        "points": x.numel(),
        "draws": N,
        "patterns": x.numel() * N,
        "standard_errors": worst,
        "mismatches": wrong + bad,
        "examples": [],
        "seconds": {"sweep": time.perf_counter() - began},
    }


# the file of results


def digest() -> str:
    "A fingerprint of what the code that a result depends on computes; its words do not matter."
    return code_hash((ROOT / name).read_text(encoding="utf-8") for name in JUDGES)


def tasks(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Every format with every mode and policy that is asked for;
    the most used ones first, stochastic rounding last."""
    wanted = [(f, r, o) for o in POLICIES for r in ROUNDINGS for f in FORMATS] + [
        (f, "stochastic", "saturate") for f in FORMATS
    ]
    return [
        (f, r, o)
        for f, r, o in wanted
        if f in args.format
        and r in args.rounding
        and o in args.overflow
        and allowed(get_format(f), o)
    ]


def is_bad(result: dict) -> bool:
    "Whether something was wrong, on either path."
    return bool(result["mismatches"] or result.get("eager", {}).get("mismatches"))


def run(task: tuple[str, str, str], progress) -> dict:
    "One format, mode and policy."
    name, rounding, overflow = task
    fmt = get_format(name)
    check = (
        (lambda: check_stochastic(fmt, overflow, progress))
        if rounding == "stochastic"
        else (lambda: check_raise(fmt, rounding, progress))
        if overflow == "raise"
        else lambda: check_patterns(fmt, rounding, overflow, progress)
    )
    return {"format": name, "spec": fmt.spec, "rounding": rounding, "overflow": overflow, **check()}


def load(path: Path, code: str) -> dict[str, dict]:
    "The stored results that this code made."
    stored = json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}
    return {key: result for key, result in stored.items() if result["code"] == code}


def store(path: Path, results: dict[str, dict]):
    "Writes the file in one step, one result a line."
    head = {"machine": machine(), "versions": versions(), "path": "compiled", "block": BLOCK}
    lines = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(result)}" for key, result in results.items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(head)[:-1] + ', "results": {\n' + lines + "\n}}\n")


def parse_args() -> argparse.Namespace:
    "The command line."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--format", nargs="+", default=FORMATS, choices=FORMATS, metavar="FORMAT",
        help=f"of {', '.join(FORMATS)}",
    )
    parser.add_argument(
        "--rounding", nargs="+", default=(*ROUNDINGS, "stochastic"),
        choices=(*ROUNDINGS, "stochastic"),
    )
    parser.add_argument("--overflow", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument(
        "--out", type=Path, default=OUT,
        help="the file of results; what it holds already is not repeated",
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    # the proof is of the compiled path
    warnings.filterwarnings("error", message="altgrad computes eagerly")
    code, commit = digest(), code_commit()
    results = load(args.out, code)
    todo = [task for task in tasks(args) if "/".join(task) not in results]
    print(
        f"{len(todo)} to check, {len(results)} stored; {machine()['cpu']}, one thread", flush=True
    )
    columns = (
        TextColumn("{task.description:32}"), BarColumn(bar_width=20),
        TextColumn("{task.percentage:>5.1f}%"), TimeElapsedColumn(), TimeRemainingColumn(),
    )
    with Progress(*columns, speed_estimate_period=120) as bar:
        blocks = bar.add_task(
            "all",
            total=sum(
                PATTERNS // BLOCK if o != "raise" and r != "stochastic" else 1 for _, r, o in todo
            ),
        )
        for task in todo:
            bar.update(blocks, description=" ".join(task))
            found = run(task, lambda patterns: bar.advance(blocks))
            if task[2] == "raise" or task[1] == "stochastic": bar.advance(blocks)
            results["/".join(task)] = {**found, "code": code, "commit": commit}
            store(args.out, results)
            if is_bad(found):
                bar.console.print(
                    f"{' '.join(task)}: {found['mismatches']} mismatches, for example "
                    f"{found['examples'][:1]}"
                )
            elif not bar.console.is_terminal:
                print(f"{' '.join(task)}: {sum(found['seconds'].values()):.1f} s", flush=True)
    wrong = [key for key, result in results.items() if is_bad(result)]
    tried = sum(r["patterns"] + r.get("eager", {}).get("patterns", 0) for r in results.values())
    print(
        f"{len(results)} results, {tried:,} comparisons, mismatches in {len(wrong)}: "
        f"{', '.join(wrong) or 'none'}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    try: sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: what was finished is stored; run it again to go on", file=sys.stderr)
        sys.exit(130)
