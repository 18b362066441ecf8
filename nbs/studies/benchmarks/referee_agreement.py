"""Asks the referee for a verdict on what others call a cast, and writes who conforms where.

python nbs/studies/benchmarks/referee_agreement.py            # minutes; nbs/studies/referee.ipynb shows it
python nbs/studies/benchmarks/referee_agreement.py --only torch,gfloat --out build/some.json
"""
import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from altgrad.basics import InputError, write_atomic
from altgrad.numbers.formats import get_format
from altgrad.numbers.referee import judge
from altgrad.training.tracking import code_commit, machine, versions
from referee_peers import E8M0, EITHER, PEERS, Case
from stored import result

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "nbs/results/referee_agreement.json"
NOT_ASKED = {  # what cannot be asked, and why
    "microxcaling": "not on PyPI",
    "llmcompressor": "it rounds with compressed-tensors",
    "bitsandbytes": "its FP4 and FP8 are tables of values of its own, none of a standard's formats",
    "heavyball": "its stochastic rounding is to bfloat16; the referee judges chance up to 8 bits",
}


def of_torch() -> Iterator[Case]:
    "Casts of the CPU: plain, with a clamp before them, and compiled."
    import torch

    casts = {
        "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2,
        "float8_e4m3fnuz": torch.float8_e4m3fnuz, "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    }
    for name, dtype in casts.items():
        top = torch.finfo(dtype).max
        compiled = torch.compile(lambda x, d=dtype: x.to(d), dynamic=True)
        yield Case("x.to(dtype)", name, lambda x, d=dtype: x.to(d), EITHER)
        yield Case("x.clamp(-max, max).to(dtype)", name,
                   lambda x, d=dtype, m=top: x.clamp(-m, m).to(d))
        yield Case("torch.compile(x.to(dtype))", name, lambda x, c=compiled: c(x), EITHER)
    for rounding in ("nearest", "away"):
        yield Case("x.to(dtype)", E8M0, lambda x: x.to(torch.float8_e8m0fnu), EITHER, rounding)
    for name in ("bfloat16", "float16"):
        dtype = getattr(torch, name)
        yield Case("x.to(dtype)", name, lambda x, d=dtype: x.to(d).float(), ("special",),
                   codes=False)


def of_numpy() -> Iterator[Case]:
    "The one narrow type that numpy has."
    yield Case("x.astype(dtype)", "float16", lambda x: x.astype(np.float16).astype(np.float32),
               ("special",), codes=False, arrays="numpy")


def of_ml_dtypes() -> Iterator[Case]:
    "Casts of numpy arrays to the types that JAX and TensorFlow use."
    import ml_dtypes

    types = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"} | {n: n for n in (
        "float8_e3m4", "float8_e4m3", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz",
        "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", E8M0)}
    for name, short in types.items():
        dtype = getattr(ml_dtypes, short)
        f = lambda x, d=dtype: x.astype(d).view(np.uint8)
        some = ("saturate",) if get_format(name).specials == "none" else EITHER
        for rounding in ("nearest", "away") if name == E8M0 else ("nearest",):
            yield Case("x.astype(dtype)", name, f, some, rounding, arrays="numpy")
    yield Case("x.astype(dtype)", "bfloat16", lambda x: x.astype(ml_dtypes.bfloat16).astype("f4"),
               ("special",), codes=False, arrays="numpy")


def of_gfloat() -> Iterator[Case]:
    "Every rounding mode, with and without saturation."
    from gfloat import RoundMode, encode_ndarray, round_ndarray
    from gfloat import formats as g

    modes = {"nearest": RoundMode.TiesToEven, "away": RoundMode.TiesToAway,
             "toward_zero": RoundMode.TowardZero, "up": RoundMode.TowardPositive,
             "down": RoundMode.TowardNegative}
    infos = {"E4M3": g.format_info_ocp_e4m3, "E5M2": g.format_info_ocp_e5m2,
             "float6_e2m3fn": g.format_info_ocp_e2m3, "float6_e3m2fn": g.format_info_ocp_e3m2,
             "float4_e2m1fn": g.format_info_ocp_e2m1, E8M0: g.format_info_ocp_e8m0,
             **{f"binary8p{p}": g.format_info_p3109(8, p) for p in range(1, 8)}}
    for name, info in infos.items():
        some = ("saturate",) if get_format(name).specials == "none" else EITHER
        p3109 = name.startswith("binary8")  # to nearest alone
        for rounding, mode in [*modes.items()][: 1 if p3109 else None]:
            for policy in some:
                def f(x, i=info, m=mode, sat=policy == "saturate"):
                    return encode_ndarray(i, round_ndarray(i, x.astype(np.float64), m, sat))
                yield Case(f"round_ndarray({mode.name}, sat={policy == 'saturate'})", name, f,
                           (policy,), rounding, arrays="numpy")
    for mode in (RoundMode.Stochastic, RoundMode.StochasticOdd, RoundMode.StochasticFast,
                 RoundMode.StochasticFastest):
        def f(x, m=mode, i=g.format_info_ocp_e4m3):
            bits = np.random.randint(0, 2**16, x.shape)
            y = round_ndarray(i, x.astype(np.float64), m, True, bits, 16)
            return y.astype(np.float32)
        yield Case(f"round_ndarray({mode.name}, 16 bits)", "E4M3", f, rounding="stochastic",
                   codes=False, arrays="numpy")


def of_torchao() -> Iterator[Case]:
    "Its casts, the four rules for MX scales, and NVFP4."
    import torch
    from torchao.float8.float8_utils import to_fp8_saturated
    from torchao.prototype.mx_formats import kernels, mx_tensor

    for name, dtype in {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}.items():
        yield Case("to_fp8_saturated", name, lambda x, d=dtype: to_fp8_saturated(x, d))
    for name, short in {"float4_e2m1fn": "f4", "float6_e2m3fn": "f6_e2m3",
                        "float6_e3m2fn": "f6_e3m2"}.items():
        f = getattr(kernels, f"f32_to_{short}_unpacked")
        yield Case(f.__name__, name, lambda x, f=f: f(x))
    elements = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2,
                "float6_e2m3fn": mx_tensor.DTYPE_FP6_E2M3,
                "float6_e3m2fn": mx_tensor.DTYPE_FP6_E3M2,
                "float4_e2m1fn": torch.float4_e2m1fn_x2}
    for name, element in elements.items():
        for mode, rule in {"FLOOR": "floor", "CEIL": "ceil", "EVEN": "even", "RCEIL": "up"}.items():
            def f(amax, e=element, m=mx_tensor.ScaleCalculationMode[mode]):
                pair = amax.repeat_interleave(2).reshape(-1, 2)
                return mx_tensor.to_mx(pair, e, 2, m)[0].view(torch.uint8).reshape(amax.shape)
            yield Case(f"to_mx({mode})", name, f, rounding=rule, signature="amax")
    yield Case("nvfp4_quantize, x / scale", "float4_e2m1fn", _nvfp4, signature="x, scale")


def _nvfp4(x, scale):
    "Codes of x / scale: each block's largest magnitude is 6 scales, so that its own scale is 1."
    import torch
    from torchao.prototype.mx_formats import kernels, nvfp4_tensor

    rows = -(-x.numel() // 15)
    blocks = torch.zeros(rows, 16)
    blocks[:, 1:].view(rows, 15)[:] = torch.nn.functional.pad(
        x.ravel().clamp(-6 * scale, 6 * scale), (0, rows * 15 - x.numel())).view(rows, 15)
    blocks[:, 0] = 6 * scale
    codes = kernels.unpack_uint4(nvfp4_tensor.nvfp4_quantize(blocks, 16, scale)[1])
    return codes.view(rows, 16)[:, 1:].reshape(-1)[: x.numel()].reshape(x.shape)


def of_altgrad() -> Iterator[Case]:
    "This package."
    from altgrad.numbers.formats import EIGHT_BIT
    from altgrad.numbers.quantize import fake_quantize

    names = (*EIGHT_BIT, "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
    for name in names:
        for rounding in ("nearest", "toward_zero"):
            yield Case("fake_quantize", name,
                       lambda x, n=name, r=rounding: fake_quantize(x, n, rounding=r),
                       rounding=rounding, codes=False)
    yield Case("fake_quantize, x / scale", "E4M3",
               lambda x, scale: fake_quantize(x, "E4M3", scale),
               signature="x, scale -> q * scale", codes=False)
    yield Case("fake_quantize", "E4M3",
               lambda x, seed: fake_quantize(x, "E4M3", rounding="stochastic", key=seed),
               rounding="stochastic", signature="x, seed", codes=False)


TABLE: dict[str, tuple[str, Callable[[], Iterator[Case]]]] = {  # distribution -> module, cases
    "torch": ("torch", of_torch), "numpy": ("numpy", of_numpy),
    "ml_dtypes": ("ml_dtypes", of_ml_dtypes), "gfloat": ("gfloat", of_gfloat),
    "torchao": ("torchao", of_torchao), **PEERS, "altgrad": ("altgrad", of_altgrad),
}


def rows_of(name: str, case: Case) -> Iterator[dict]:
    "A verdict for each policy."
    for policy in case.policies:
        start = time.perf_counter()
        row: dict[str, Any] = {
            "implementation": name, "function": case.function, "format": case.format,
            "rounding": case.rounding, "overflow": policy, "signature": case.signature,
        }
        try:
            v = judge(case.f, case.format, case.rounding, policy, case.signature, case.codes,
                      case.arrays, name=case.function)
            row |= {"conforms": v.conforms, "inputs": sum(v.judged.values()),
                    "mismatches": v.mismatches, "faults": [asdict(f) for f in v.faults]}
        except InputError as e: row |= {"refused": str(e)}
        yield row | {"seconds": round(time.perf_counter() - start, 2)}


def judged(only: list[str]) -> tuple[list[dict], dict[str, str], dict[str, str]]:
    "Verdicts, versions of what was judged, and why others were not."
    rows, found, absent = list[dict](), dict[str, str](), dict(NOT_ASKED)
    for name in only:
        module, cases_of = TABLE[name]
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            absent[name] = "not installed"
            continue
        try: found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # TensorFlow has several distributions
            found[name] = importlib.import_module(module).__version__
        try: cases = list(cases_of())
        except (ImportError, AttributeError) as e:
            absent[name] = f"{found[name]} has no such function: {e}"
            continue
        for case in cases: rows += rows_of(name, case)
    return rows, found, absent


def apart(only: list[str]) -> tuple[list[dict], dict[str, str], dict[str, str]]:
    "The same, each package in a process of its own: some of them do not get on with others."
    rows, found, absent = list[dict](), dict[str, str](), dict(NOT_ASKED)
    for name in only:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "one.json")
            done = subprocess.run([sys.executable, __file__, "--only", name, "--out", out],
                                  capture_output=True, text=True)
            if done.returncode:
                absent[name] = f"fails: {(done.stderr.splitlines() or ['no message'])[-1][:120]}"
                continue
            one = json.loads(out.read_text())
        rows += one["rows"]
        absent |= one["absent"]
        if name in one["versions"]: found[name] = one["versions"][name]
    return rows, found, absent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TABLE), help="names of the table, with commas")
    parser.add_argument("--out", type=result, help="the file of results (default: nbs/results/referee_agreement.json, "
                        "which is of all names)")
    options = parser.parse_args()
    only = options.only.split(",")
    unknown = set(only) - set(TABLE)
    if unknown: parser.error(f"unknown: {', '.join(unknown)}; allowed: {', '.join(TABLE)}")
    if only != list(TABLE) and not options.out: parser.error("--only needs --out: what is stored is of all names")
    warnings.simplefilter("ignore")  # of numpy, about casts of NaN
    commit = code_commit()
    rows, found, absent = judged(only) if len(only) == 1 else apart(only)
    write_atomic(options.out or OUT, json.dumps({
        "config": {"only": only}, "git_commit": commit, "machine": machine(),
        "versions": versions() | found, "absent": absent,
        "seconds": round(sum(r["seconds"] for r in rows), 1), "rows": rows,
    }, indent=1) + "\n")
    print(f"{sum(r.get('conforms', False) for r in rows)} of {len(rows)} verdicts: conforms")


if __name__ == "__main__": main()
