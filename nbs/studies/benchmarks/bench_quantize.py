"""Times the quantizer against copying, against drawing random numbers, and against other libraries;
every ratio comes from interleaved rounds of one run. About 27 minutes on two cores.

python nbs/studies/benchmarks/bench_quantize.py                  # 1 and 2 threads, each in its process
python nbs/studies/benchmarks/bench_quantize.py --device cuda    # on a GPU, from 256 MB up
python nbs/studies/benchmarks/bench_quantize.py --peers FOLDER   # and the libraries that lie there

A library comes into that folder by `pip install --no-deps --target FOLDER/NAME NAME`.
torch-floating-point compiles itself when it is installed: `FORCE_CPU=1 pip install
--no-build-isolation --no-deps torch-floating-point`.
"""
import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Callable

import torch
from torch import Tensor

from altgrad.basics import InputError, write_atomic
from altgrad.numbers import quantize
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.formats import FP8Format, get_format
from altgrad.numbers.kernels import rounding_key
from altgrad.numbers.quantize import fake_quantize
from altgrad.training.tracking import code_commit, machine, versions
from stored import result

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "nbs/results/bench_quantize.json"
INSTALL = (
    "missing peers: .venv/bin/pip install -e '.[bench]' -c constraints.txt, or each, and what it needs, with "
    "--no-deps --target FOLDER/NAME and PEERS=FOLDER"
)
SIZES = {"cpu": (1 << 22, 1 << 26), "cuda": (1 << 26, 1 << 28)}  # elements
SMALL, SMALL_CALLS = 4096, 100  # elements, calls in a row that are timed together
SHAPES = ("gaussian", "student_t2")
THREADS = (1, 2)
OURS = ("E4M3", "E5M2", "E3M4", "E7M0", "E0M7")
# a row stops after so many rounds or seconds; a call that would take longer is skipped
ROUNDS = 15
ROW_SECONDS = 6.0
SKIP_SECONDS = 20.0
KEY = rounding_key(0)


@dataclass
class Row:
    "One line of the table: a call, and what it is compared with."
    name: str
    call: Callable[[Tensor], Any]
    against: str = "torch.clone"  # the row whose time, in the same round, is the unit
    path: str = "auto"  # of ours
    format: str | None = None  # whose values the call returns; None where it returns something else
    library: str = "altgrad"


# peers: each function imports its library, and returns a call from float32 to float32 and the
# format that it stands for


def from_ml_dtypes() -> dict[str, tuple[Callable, str]]:
    import ml_dtypes
    import numpy as np

    def through(dtype):
        return lambda x: torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))
    return {
        "E4M3": (through(ml_dtypes.float8_e4m3fn), "E4M3"),
        "E5M2": (through(ml_dtypes.float8_e5m2), "E5M2"),
    }


def from_gfloat() -> dict[str, tuple[Callable, str]]:
    import gfloat
    from gfloat.formats import format_info_ocp_e4m3

    return {
        "round_ndarray E4M3": (
            lambda x: torch.from_numpy(
                gfloat.round_ndarray(format_info_ocp_e4m3, x.numpy(), sat=True)
            ),
            "E4M3",
        )
    }


def from_qtorch() -> dict[str, tuple[Callable, str]]:
    from qtorch.quant import float_quantize

    return {
        "float_quantize(4, 3)": (
            lambda x: float_quantize(x, exp=4, man=3, rounding="nearest"),
            "E4M3b7",
        )
    }


def from_brevitas() -> dict[str, tuple[Callable, str]]:
    from brevitas.core.bit_width import BitWidthConst
    from brevitas.core.bit_width.float import ComputeMaxMantissa
    from brevitas.core.function_wrapper.clamp import FloatClamp, TensorClamp
    from brevitas.core.quant.float import FloatQuant
    from brevitas.core.utils import StatelessBuffer

    clamp = FloatClamp(TensorClamp(), True, nan_values=("111",), max_available_float=448.0)
    quant = FloatQuant(
        True, BitWidthConst(4), BitWidthConst(3), StatelessBuffer(torch.tensor(7.0)), clamp,
        torch.nn.Identity(), ComputeMaxMantissa(),
    )
    return {"FloatQuant(4, 3)": (lambda x: quant(x)[0], "E4M3")}


def from_torchao() -> dict[str, tuple[Callable, str]]:
    from torchao.prototype.custom_fp_utils import _f32_to_floatx_unpacked, _floatx_unpacked_to_f32

    return {
        "floatx(4, 3)": (
            lambda x: _floatx_unpacked_to_f32(_f32_to_floatx_unpacked(x, 4, 3), 4, 3),
            "E4M3b7",
        )
    }


def from_pychop() -> dict[str, tuple[Callable, str]]:
    import pychop

    pychop.backend("torch")
    return {
        "Chop(4, 3)": (pychop.Chop(exp_bits=4, sig_bits=3, subnormal=True, rmode=1), "float8_e4m3")
    }


def from_torch_floating_point() -> dict[str, tuple[Callable, str]]:
    from floating_point import FloatingPoint, Round

    data_type = FloatingPoint(
        1, 4, 3, 7, 8, max_mantissa_at_max_exponent=6, reserved_exponent=False
    )
    return {"Round(E4M3)": (Round(data_type), "E4M3")}


PEERS = {  # distribution, what to import, how to use it
    "ml_dtypes": ("ml_dtypes", from_ml_dtypes), "gfloat": ("gfloat", from_gfloat), "qtorch": ("qtorch", from_qtorch),
    "brevitas": ("brevitas", from_brevitas), "torchao": ("torchao", from_torchao), "pychop": ("pychop", from_pychop),
    "torch-floating-point": ("floating_point", from_torch_floating_point),
}
# the others take NumPy arrays
ON_GPU = ("qtorch", "brevitas", "torchao", "pychop", "torch-floating-point")


def peers(device: str) -> tuple[list[Row], dict[str, str]]:
    """Rows for every library that is there, and for every library its version,
    or why it is not measured."""
    rows, found = [], {}
    for name, (module, make) in PEERS.items():
        if importlib.util.find_spec(module) is None: found[name] = "not installed"
        elif device == "cuda" and name not in ON_GPU: found[name] = "has no GPU code"
        else:
            try:
                calls = make()
                found[name] = importlib.metadata.version(name)
            except Exception as e:  # someone else's code, which may fail in any way
                found[name] = (
                    f"failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
                )
            else:
                rows += [
                    Row(f"{name} {what}", call, format=fmt, library=name)
                    for what, (call, fmt) in calls.items()
                ]
    return rows, found


# rows


def round_trip(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    "torch's own cast and back."
    return lambda x: x.to(dtype).float()


def stats_rows() -> list[Row]:
    "What counting costs, in one pass."
    levels = {"with overflow, underflow and amax": False, "with codes and histogram too": True}
    return [
        Row(
            f"altgrad E4M3 {what}",
            lambda x, h=h: quantize_stats(x, "E4M3", histogram=h),
            path="compiled",
        )
        for what, h in levels.items()
    ]


def rows_for(device: str) -> tuple[list[Row], dict[str, str]]:
    "Every row but those for small tensors."
    others, found = peers(device)
    ours = [
        Row(
            f"altgrad {fmt} {path}", lambda x, fmt=fmt: fake_quantize(x, fmt), path=path, format=fmt
        )
        for fmt in OURS
        for path in ("compiled", "eager")
    ]
    casts = [Row(f"torch {name} round trip", round_trip(dtype), format=name, library="torch")
             for name, dtype in (("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2))]
    chance = [
        Row(
            f"altgrad E4M3 stochastic {path}",
            lambda x: fake_quantize(x, "E4M3", rounding="stochastic", key=KEY),
            "torch.rand",
            path,
        )
        for path in ("compiled", "eager")
    ]
    units = [
        Row("torch.clone", torch.clone, library="torch"),
        Row("torch.rand", torch.rand_like, library="torch"),
    ]
    return units + ours + stats_rows() + chance + casts + others, found


def small_rows() -> list[Row]:
    "4,096 elements: what counts is the overhead of a call."
    against = "torch E4M3 round trip"
    ours = [
        Row(f"altgrad {fmt} {path}", lambda x, fmt=fmt: fake_quantize(x, fmt), against, path)
        for fmt in ("E4M3", "E3M4")
        for path in ("auto", "compiled")
    ]
    return [
        Row(against, round_trip(torch.float8_e4m3fn), against, library="torch"),
        Row("torch.clone", torch.clone, against, library="torch"), *ours,
    ]


UNSET = "without a setting"
SETTLE = 60.0  # seconds at most in which these round first: what is to be compiled is compiled then


def unset_rows() -> list[Row]:
    "What is had without a setting; timed in a process in which nothing is set."
    counted = [
        Row(f"{row.name}, {UNSET}", row.call, format=row.format) for row in stats_rows()
    ]
    ours = [
        Row(f"altgrad {fmt} {UNSET}", lambda x, fmt=fmt: fake_quantize(x, fmt), format=fmt)
        for fmt in OURS
    ]
    return [Row("torch.clone", torch.clone, library="torch"), *ours, *counted]


def unset_small_rows() -> list[Row]:
    "The same for 4,096 elements."
    unit, _, *ours = small_rows()
    return [unit, *(
        Row(row.name.replace(" auto", f" {UNSET}"), row.call, row.against)
        for row in ours if row.path == "auto"
    )]


def settle(rows: list[Row], x: Tensor, seconds: float) -> None:
    "Calls rows in turns for so long, as a user's process does before anybody looks at a clock."
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for row in rows: seconds_of(row, x, 1)


def data(shape: str, size: int, device: str) -> Tensor:
    "A tensor with a fixed seed: standard normal, or Student's t with two degrees of freedom."
    make = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=make)
    # chi-squared with 2 degrees of freedom, over 2, is exponential
    if shape == "student_t2": x /= torch.empty(size).exponential_(generator=make).sqrt_()
    return x.to(device)


# correctness of what is timed


def share_of_differences(call: Callable, fmt: FP8Format, x: Tensor) -> dict:
    """The share of elements that differ in a bit from ours (-0 is not 0; NaN is NaN),
    under the policy of ours that is nearer, and an example."""
    theirs, best = call(x.clone()).float(), None
    for overflow in ("saturate", "special") if fmt.specials != "none" else ("saturate",):
        ours = fake_quantize(x, fmt, overflow=overflow)
        wrong = (ours.view(torch.int32) != theirs.view(torch.int32)) & ~(
            ours.isnan() & theirs.isnan()
        )
        share = wrong.double().mean().item()
        if best is not None and share >= best["share"]: continue
        example = [t[wrong][0].item() for t in (x, ours, theirs)] if share else None
        best = {
            "share": share,
            "policy": overflow,
            "example": example and dict(zip(("input", "ours", "theirs"), map(repr, example))),
        }
    return best


def differences(row: Row, device: str) -> dict:
    """How often a row's result differs from ours: on the data,
    and on all finite bfloat16 patterns of which many are ties, tiny or huge."""
    quantize.set_path("eager")
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    sets = {shape: data(shape, 1 << 20, device) for shape in SHAPES} | {
        "bfloat16": patterns[patterns.isfinite()].to(device)
    }
    fmt = get_format(row.format)
    return {name: share_of_differences(row.call, fmt, x) for name, x in sets.items()}


# timing


def seconds_of(row: Row, x: Tensor, calls: int) -> float:
    "One measurement: the mean of so many calls."
    quantize.set_path(row.path)
    if x.is_cuda: torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls): row.call(x)
    if x.is_cuda: torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def warm_up(row: Row, x: Tensor, calls: int) -> float:
    "Compiles what is to be compiled; then the time of one call."
    quantize.set_path(row.path)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", UserWarning
        ) if row.library == "altgrad" and row.path == "compiled" else None
        row.call(x)
    return seconds_of(row, x, calls)


def interleave(rows: list[Row], x: Tensor, rounds: int, calls: int = 1) -> dict[str, dict]:
    """Times all rows in turns; a row's ratio is the median, over the rounds,
    of its time by that of its unit in the same round."""
    times, problems = {row.name: [] for row in rows}, {}
    for row in rows:
        try: cost = warm_up(row, x, calls)
        except Exception as e:
            problems[row.name] = (
                f"failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
            )
        else:
            if cost * calls > SKIP_SECONDS: problems[row.name] = f"skipped: {cost:.0f} s a call"
        gc.collect()
    for _ in range(rounds):
        for row in rows:
            if row.name in problems or (
                sum(times[row.name]) * calls > ROW_SECONDS and len(times[row.name]) >= 3
            ):
                continue
            times[row.name].append(seconds_of(row, x, calls))
    return {
        row.name: {"problem": problems[row.name]}
        if row.name in problems
        else summary(times[row.name], times[row.against], row, x.numel())
        for row in rows
    }


def summary(own: list[float], unit: list[float], row: Row, elements: int) -> dict:
    "Medians and minima of a row."
    ratios = [a / b for a, b in zip(own, unit)]
    return {
        "against": row.against,
        "ratio": round(median(ratios), 4),
        "ratio_of_minima": round(min(own) / min(unit), 4),
        "rounds": len(own),
        "median": median(own),
        "min": min(own),
        "ns_per_element": round(median(own) / elements * 1e9, 4),
    }


def case(rows: list[Row], shape: str, size: int, device: str, rounds: int, calls: int = 1) -> dict:
    "One tensor, all rows."
    x = data(shape, size, device)
    slow = [row for row in rows if size > 1 << 24 and row.name in TOO_SLOW]
    found = interleave([row for row in rows if row not in slow], x, rounds, calls)
    found |= {row.name: {"problem": "skipped: too slow at this size"} for row in slow}
    if size <= 1 << 22:
        TOO_SLOW.update(name for name, r in found.items() if r.get("min", 0) > SKIP_SECONDS / 40)
    return {
        "data": shape,
        "elements": size,
        "device": device,
        "threads": torch.get_num_threads(),
        "rows": found,
    }


TOO_SLOW: set[str] = set()  # rows that took so long on a small tensor that a large one is not tried


# the processes


def worker(args: argparse.Namespace):
    "All cases with one number of threads."
    torch.set_num_threads(args.threads)
    rows, found = (unset_rows(), {}) if args.unset else rows_for(args.device)
    small = unset_small_rows() if args.unset else small_rows()
    if args.unset:
        x = data("gaussian", (args.sizes or SIZES[args.device])[-1], args.device)
        settle(rows, x, min(SETTLE, 4.0 * args.rounds))
    cases = [case(small, "gaussian", SMALL, args.device, args.rounds * 2, SMALL_CALLS)]
    for size in args.sizes or SIZES[args.device]:
        for shape in SHAPES:
            print(f"  {args.threads} thread(s), {size:,} elements, {shape}", flush=True)
            cases.append(case(rows, shape, size, args.device, args.rounds))
    compared = [
        row
        for row in rows
        if row.format
        and row.library != "altgrad"
        and args.threads == 1
        and "problem" not in cases[1]["rows"][row.name]
    ]
    check = {row.name: {"format": row.format, **differences(row, args.device)} for row in compared}
    quantize.set_path("auto")
    Path(args.part).write_text(
        json.dumps({
            "cases": cases, "libraries": found, "differences": check,
            "machine": machine(args.device),
        }),
        encoding="utf-8",
    )


def run_worker(args: argparse.Namespace, threads: int, part: Path, unset: bool = False) -> dict:
    "A process with so many threads, and what it measured."
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [
        sys.executable, __file__, "--part", part, "--threads", threads, "--device", args.device,
        "--rounds", args.rounds,
    ]
    if unset: command += ["--unset"]
    if args.sizes: command += ["--sizes", *args.sizes]
    if args.peers: command += ["--peers", args.peers.resolve()]
    subprocess.run([str(word) for word in command], env=env, check=True)
    return json.loads(part.read_text(encoding="utf-8"))


def measured(args: argparse.Namespace, threads: int, folder: Path) -> dict:
    "What a process measured, and with it what another did in which nothing is set."
    part = run_worker(args, threads, folder / f"{threads}.json")
    unset = run_worker(args, threads, folder / f"{threads}_unset.json", unset=True)
    for one, more in zip(part["cases"], unset["cases"]):
        one["rows"] |= {name: row for name, row in more["rows"].items() if name.endswith(UNSET)}
    return part


def add_peers_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=Path, default=os.environ.get("PEERS") or None,
        help="a folder of folders with one library each (or the variable PEERS)",
    )


def find_peers(folder: Path | None) -> None:
    "Lets Python find the libraries of a folder of folders."
    if not folder: return
    sys.path += [str(each) for each in sorted(folder.iterdir())]
    # ninja, for libraries that compile themselves
    os.environ["PATH"] += "".join(os.pathsep + str(each / "bin") for each in folder.iterdir())


def parse_args() -> argparse.Namespace:
    "The command line."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sizes", type=int, nargs="+", help="elements of the large tensors")
    parser.add_argument("--threads", type=int, help="only this number of threads")
    add_peers_option(parser)
    parser.add_argument(
        "--out", type=result,
        help="the file of results (default: nbs/results/bench_quantize.json, for cuda "
             "bench_quantize_cuda.json)",
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--unset", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no GPU; allowed: --device cpu")
    find_peers(args.peers)
    if args.part:
        worker(args)
        return 0
    out = args.out or (OUT if args.device == "cpu" else OUT.with_name("bench_quantize_cuda.json"))
    commit, began, parts = code_commit(), time.time(), []
    print(f"{machine(args.device)['cpu']}; {INSTALL}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for threads in (
            [args.threads] if args.threads else THREADS if args.device == "cpu" else (1,)
        ):
            parts.append(measured(args, threads, Path(folder)))
    found = {
        "git_commit": commit,
        "machine": parts[0]["machine"],
        "versions": versions(),
        "rounds": args.rounds,
        "seconds": round(time.time() - began),
        "load": os.getloadavg(),
        "libraries": parts[0]["libraries"],
        "differences": {k: v for part in parts for k, v in part["differences"].items()},
        "cases": [case for part in parts for case in part["cases"]],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, json.dumps(found, indent=1) + "\n")
    for name, state in found["libraries"].items(): print(f"  {name}: {state}")
    print(f"wrote {out.name}")
    return 0


if __name__ == "__main__":
    try: sys.exit(main())
    except InputError as e: sys.exit(str(e))
