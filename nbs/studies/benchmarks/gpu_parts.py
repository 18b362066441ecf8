"""The pieces of `make gpu`: each yields rows of what it measured, on a GPU or, far smaller, on a CPU.

python nbs/studies/benchmarks/gpu_parts.py PIECE DEVICE FILE    # one piece, as gpu.py starts it

A row is {what, value, unit}; `wants` names what gpu.yaml holds its value to, `also` says more, and
`problem` says why there is no value. A later row of the same `what` takes the place of an earlier one.
"""
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

if __name__ == "__main__" and sys.argv[2:3] == ["cpu"]:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

import bench_optim
import bench_quantize
import bench_step
import bench_without_master
import engines
from altgrad.basics import one_line, write_atomic
from altgrad.evidence.instrument import Bench, Task, blank_model, build_checkpoint, recipe_of, run_arm
from altgrad.evidence.replicas import run_arms
from altgrad.model.products import fast_bfloat16
from altgrad.numbers import kernels
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.formats import FORMATS
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.triton_kernels import triton_blocks

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
FEW = ("E4M3", "E7M0")  # formats of a dry run
SIZES = {"cuda": (1 << 26, 1 << 28), "cpu": (1 << 14,)}  # elements: 256 MB and 1 GB
CALLS = {"cuda": 10, "cpu": 1}  # in a row that are timed together
ROUNDS = {"cuda": 11, "cpu": 3}
LADDER = 210  # seconds in which runs of the ladder are begun

Rows = Iterator[dict[str, Any]]


def row(what: str, value: float | None, unit: str, wants: str | None = None, **more: Any) -> dict:
    "A row of a result."
    shown = value if value is None or isinstance(value, int) else float(f"{value:.4g}")
    return {"what": what, "value": shown, "unit": unit} | ({"wants": wants} if wants else {}) | more


def problem(what: str, unit: str, e: Exception) -> dict:
    "A row without a value; an error of CUDA is raised again, because all that follows would fail."
    if "CUDA error" in str(e): raise e
    return row(what, None, unit, problem=one_line(f"{type(e).__name__}: {e}", 200))


def peers() -> Path | None:
    "The folder of other libraries, if there is one."
    return Path(os.environ["PEERS"]) if os.environ.get("PEERS") else None


# tests


def tests_suite(device: str) -> Rows:
    "Runs the tests that are marked cuda, and counts."
    files = [p for p in sorted(TESTS.glob("test_*.py")) if "mark.cuda" in p.read_text(encoding="utf-8")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", f"--junitxml={report}", *files]
        env = os.environ | {"ALTGRAD_TEST_DEVICE": device}
        subprocess.run(command, cwd=ROOT, env=env, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    ends = {kind: [c for c in cases if c.find(kind) is not None]
            for kind in ("failure", "error", "skipped")}
    bad = ends["failure"] + ends["error"]
    if len(cases) == len(ends["skipped"]): raise RuntimeError("no test ran")
    passed = len(cases) - len(bad) - len(ends["skipped"])
    yield row("tests that pass", passed, "tests", also=f"{len(ends['skipped'])} skipped")
    yield row("tests that fail", len(bad), "tests", "failed", also=", ".join(c.get("name") for c in bad))


def referee() -> Any:
    "The script that compares kernels with the CPU's path."
    spec = importlib.util.spec_from_file_location("referee_script", ROOT / ".ci/referee.py")
    module = sys.modules["referee_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_path(path: str, kernel: Callable) -> Callable:
    "The kernel, computing by a path."
    def call(*args: Any, **kwargs: Any) -> Any:
        before = kernels.set_path(path)
        try: return kernel(*args, **kwargs)
        finally: kernels.set_path(before)
    return call


def compared(name: str, device: str, judges: Any, script: Any, cases: int | None = None) -> Rows:
    "Compares three kernels with the CPU's, on the boundary sets; a row that grows by format."
    torch.manual_seed(0)
    kernels.set_path("eager")
    answers, wrong, few = 0, [], device == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about what overflows
        warnings.filterwarnings("error", message="altgrad computes eagerly")
        for n, fmt in enumerate((FORMATS[f] for f in (FEW if few else FORMATS)), 1):
            found = script.judged(fmt, 100 if few else 2**32, judges, cases)
            answers += found["compared"]
            wrong += [f"{fmt.name} {text}" for text in found["wrong"]]
            yield row(f"{name}: calls with a bit that differs", len(wrong), "calls", "differing",
                      also=f"{n} formats, {answers:,} answers", wrong=wrong)


def tests_triton(device: str) -> Rows:
    "The Triton kernels' bits."
    script = referee()
    yield from compared("Triton", device, script.Kernels(device=device), script)


def tests_path(path: str, device: str, cases: int | None = None) -> Rows:
    "The bits of the package's own kernels by a path."
    script = referee()
    own = (fake_quantize, quantize_stats, script.plain_blocks)
    judges = script.Kernels(*(on_path(path, kernel) for kernel in own), device=device)
    yield from compared(path, device, judges, script, cases)


def tests_eager(device: str) -> Rows:
    "The bits of the path without a compiler."
    return tests_path("eager", device)


def tests_compiled(device: str) -> Rows:
    "The bits of the compiled path; a dry run compiles for one case."
    return tests_path("compiled", device, 1 if device == "cpu" else None)


# quantize


def timed(rows: list, device: str, wants: Callable, moved: Callable = lambda name: 8.0) -> Rows:
    "Times calls beside copying; `moved` are the bytes that a call reads and writes an element."
    for size in SIZES[device]:
        found = bench_quantize.case(rows, "gaussian", size, device, ROUNDS[device], CALLS[device])
        for name, r in found["rows"].items():
            what = f"{name}, {size * 4 / 1e6:.3g} MB"
            if "problem" in r: yield row(what, None, "times torch.clone", problem=r["problem"])
            else:
                speed = moved(name) * size / r["median"] / 1e9
                yield row(what, r["ratio"], f"times {r['against']}", wants(name), also=f"{speed:,.3g} GB/s")


def clone() -> Any:
    "The row that all others are compared with."
    return bench_quantize.Row("torch.clone", torch.clone, library="torch")


def quantize_ours(device: str) -> Rows:
    "Rounding and counting by every path, and others' libraries; a dry run compiles nothing."
    rows, libraries = bench_quantize.rows_for(device)
    auto = partial(fake_quantize, fmt="E4M3")
    rows.append(bench_quantize.Row("altgrad E4M3 without a setting", auto, format="E4M3"))
    if device == "cpu": rows = [replace(r, path="eager") for r in rows]

    def wants(name: str) -> str | None:
        if name.startswith("altgrad E4M3 with "): return "histogram" if "histogram" in name else "counts"
        if "stochastic" in name: return None
        return "rounding" if name.endswith(("compiled", "without a setting")) else None

    yield from timed(rows, device, wants)
    for name, state in libraries.items():
        if not state[0].isdigit(): yield row(name, None, "times torch.clone", problem=state)


def quantize_triton(device: str) -> Rows:
    "The Triton kernels beside the compiler's."
    Row, path = bench_quantize.Row, "eager" if device == "cpu" else "compiled"
    rows = [clone()]
    for fmt in FEW:
        rows += [Row(f"{fmt} rounded by the compiler's", partial(fake_quantize, fmt=fmt), path=path),
                 Row(f"{fmt} rounded by Triton's", partial(fake_quantize, fmt=fmt), path="triton")]
        for histogram, what in ((False, "counts"), (True, "histogram")):
            more = {"fmt": fmt, "histogram": histogram}
            rows += [Row(f"{fmt} {what} by the compiler's", partial(quantize_stats, **more), path=path),
                     Row(f"{fmt} {what} by Triton's", partial(quantize_stats, **more), path="triton")]
    words = {"rounded": "rounding", "counts": "counts", "histogram": "histogram"}
    yield from timed(rows, device, lambda name: words.get(name.split()[-3]) if " by " in name else None)


def quantize_blocks(device: str) -> Rows:
    "Codes and scales of MXFP8 blocks beside torchao's casts, all as speeds too."
    Row, script = bench_quantize.Row, referee()
    flat = lambda x: x.view(-1, 1024)
    rows = [clone(), Row("altgrad MXFP8 by Triton's", lambda x: triton_blocks(flat(x), "E4M3")),
            Row("altgrad MXFP8", lambda x: script.plain_blocks(flat(x), FORMATS["E4M3"], 32))]
    missing = importlib.util.find_spec("torchao") is None
    if missing: yield row("torchao", None, "times torch.clone", problem="not installed")
    else: rows += torchao_casts(device)
    narrow = lambda name: 2 if "bfloat16" in name else 4  # bytes of an element that is read
    moved = lambda name: 8.0 if name == "torch.clone" else narrow(name) + 1 + 1 / 32
    yield from timed(rows, device, lambda name: None, moved)


def torchao_casts(device: str) -> list:
    "Torchao's casts to MXFP8; its own kernels take bfloat16, and say where they cannot run."
    from torchao.prototype.mx_formats.kernels import mxfp8_quantize_cuda, triton_to_mxfp8_dim0
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    cast = partial(to_mx, elem_dtype=torch.float8_e4m3fn, block_size=32)
    compiled = cast if device == "cpu" else torch.compile(cast)
    halves: dict[int, Tensor] = {}

    def half(x: Tensor) -> Tensor:
        if x.numel() not in halves: halves[x.numel()] = x.view(-1, 1024).bfloat16()
        return halves[x.numel()]

    calls = {
        "to_mx": lambda x: cast(x.view(-1, 1024)),
        "to_mx, compiled": lambda x: compiled(x.view(-1, 1024)),
        "Triton cast of bfloat16": lambda x: triton_to_mxfp8_dim0(half(x)),
        "CUDA cast of bfloat16": lambda x: mxfp8_quantize_cuda(half(x), rowwise=True, colwise=False),
    }
    return [bench_quantize.Row(f"torchao {name}", call, library="torchao") for name, call in calls.items()]


# step


def step_options(device: str) -> Namespace:
    "The options of bench_step: a few rounds, products as the trainer has them."
    dtype = "bfloat16" if fast_bfloat16(torch.device(device)) and device == "cuda" else "float32"
    return Namespace(device=device, dtype=dtype, rounds=ROUNDS[device], peers=peers(),
                     threads=torch.get_num_threads())


def steps(device: str, model: str, batch: str, arms: list[str], kind: str) -> Rows:
    "Times steps of some arms, the first of which is the unit, in a process of their own."
    found = bench_step.run_case(step_options(device), kind, model, batch, arms, bench_step.KINDS[kind])
    for arm in arms[1:]:
        wants = "step" if arm == "all" and kind == "model" else None
        name = f"{model}, {batch}, compiled: {kind}, {arm}" if kind != "eager" else f"{model}, {batch}, {arm}"
        yield row(name, found["ratio"][arm], "times unquantized", wants,
                  also=f"{found['median_ms'][arm]:.3g} ms")


def steps_of(device: str, model: str, batch: str) -> Rows:
    "A model's steps, ours and torchao's apart, so that one that fails leaves the other."
    real = [arm for arm in bench_step.native_arms(device) if "powers" not in arm]
    real = [arm for arm in real if bench_step.NATIVE[arm]["emulate"] == (device == "cpu")]
    if not real: yield row("torchao float8", None, "times unquantized", problem="not installed, or no FP8 units")
    for kind in ("eager",) if device == "cpu" else ("model", "kernels"):
        for arms in (["none", "weights", "all"], ["none", *real]):
            if len(arms) == 1: continue
            try: yield from steps(device, model, batch, arms, kind)
            except subprocess.CalledProcessError as e:
                yield row(f"{model}, {batch}, {kind}, {arms[-1]}", None, "times unquantized",
                          problem=f"its process ended with {e.returncode}")


def step_small(device: str) -> Rows:
    "gpt-10m; in a dry run gpt-tiny."
    return steps_of(device, *(("gpt-tiny", "2 x 32") if device == "cpu" else ("gpt-10m", "64 x 256")))


def step_large(device: str) -> Rows:
    "gpt-124m; in a dry run the shape of a million parameters."
    return steps_of(device, *(("1M", "1 x 16") if device == "cpu" else ("gpt-124m", "8 x 1024")))


def step_products(device: str) -> Rows:
    "torch._scaled_mm of FP8 factors beside our products of the same factors: their sums, and speed."
    n = 256 if device == "cpu" else 4096
    make = torch.Generator().manual_seed(0)
    whole = [torch.randint(-8, 9, (n, n), generator=make).float().to(device) for _ in range(2)]
    gauss = [fake_quantize(torch.randn(n, n, generator=make), "E4M3").to(device) for _ in range(2)]
    ways = {
        "torch._scaled_mm of FP8": (torch.float8_e4m3fn, scaled_product),
        "bfloat16": (torch.bfloat16, bfloat16_product),
        "float32": (torch.float32, lambda x, w: x @ w.T),
    }
    for name, (dtype, way) in ways.items():
        try: yield from product_rows(f"{name}, {n} x {n}", dtype, way, whole, gauss)
        except Exception as e: yield problem(f"{name}, {n} x {n}", "TFLOP/s", e)


def scaled_product(x: Tensor, w: Tensor) -> Tensor:
    "The product by FP8 units."
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.float32)


def bfloat16_product(x: Tensor, w: Tensor) -> Tensor:
    "The product by bfloat16 units, its sums in float32; on a CPU they end in bfloat16."
    return torch.mm(x, w.t(), out_dtype=torch.float32) if x.is_cuda else (x @ w.T).float()


def product_rows(
    name: str, dtype: torch.dtype, way: Callable, whole: list[Tensor], gauss: list[Tensor]
) -> Rows:
    "How often sums of whole numbers are wrong, how far Gaussian ones are from float64's, the speed."
    a, b = (t.to(dtype) for t in whole)
    wrong = int((way(a, b).double() != whole[0].double() @ whole[1].double().T).sum())
    a, b = (t.to(dtype) for t in gauss)
    size = gauss[0].abs().double() @ gauss[1].abs().double().T
    error = ((way(a, b).double() - gauss[0].double() @ gauss[1].double().T).abs() / size).max().item()
    call = bench_quantize.Row(name, lambda _: way(a, b))
    took = min(bench_quantize.seconds_of(call, a, CALLS[a.device.type]) for _ in range(ROUNDS[a.device.type]))
    yield row(name, 2 * len(a) ** 3 / took / 1e12, "TFLOP/s",
              also=f"{wrong} sums of whole numbers differ; Gaussian ones are off by {error:.1e} of their terms")


# rules


def rules_times(device: str) -> Rows:
    "A step of each rule beside fused AdamW; a dry run compiles nothing."
    if device == "cpu":
        bench_optim.LAYERS = 1
        own = {name: make for name, make in bench_optim.CASES.items() if "compiled" in name or "torch" in name}
        bench_optim.CASES = own
    unit = "torch AdamW(fused=True)"
    for name, make in list(bench_optim.CASES.items()):
        try: make(bench_optim.parameters(device)).step()
        except Exception as e:
            del bench_optim.CASES[name]
            yield problem(name, "times fused AdamW", e)
    found = bench_optim.measure(ROUNDS[device], device)["rows"]
    count = sum(p.numel() for p in bench_optim.parameters("cpu"))
    for name, r in found.items():
        yield row(name, r["median_ms"] / found[unit]["median_ms"], "times fused AdamW",
                  also=f"{r['median_ms']:.3g} ms; a step holds {r['bytes'] / count:.1f} bytes a weight")


def rules_memory(device: str) -> Rows:
    "Bytes a parameter between two steps, with and without master weights: on a GPU by its allocator."
    options = Namespace(device=device, model="gpt-tiny" if device == "cpu" else "gpt-10m", lr=1e-3)
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    cases = {**bench_without_master.CASES, **(bench_without_master.ON_GPU if device == "cuda" else {})}
    kept_row("AdamW in FP32, fused", options, tokens)  # what libraries take at their first use is not a rule's
    for name in ("AdamW in FP32, fused", "the same, fused") if device == "cpu" else cases:
        gc.collect()
        try: yield kept_row(name, options, tokens)
        except Exception as e: yield problem(name, "bytes a parameter", e)


def kept_row(name: str, options: Namespace, tokens: Tensor) -> dict:
    "The bytes that three steps leave behind; what holds them ends with the call."
    on_gpu = options.device == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    run = bench_without_master.Run(name, options, lambda step: (tokens[:, :-1], tokens[:, 1:]))
    for _ in range(3): run()
    counted = run.row()
    kept = torch.cuda.memory_allocated() - before if on_gpu else counted["kept_bytes"]
    return row(name, kept / counted["parameters"], "bytes a parameter",
               also=f"{counted['bytes_a_linear_weight']:.2f} a linear weight, counted")


# replicas


def replicas_runs(device: str) -> Rows:
    """Whole runs an hour of 0.8M parameters and 300 updates. The models are untrained: what a run
    costs does not depend on their weights."""
    small = device == "cpu"
    task = Task(steps=6, warmup=2, chunks=2, windows=2, every=3) if small else Task(steps=300)
    options = Namespace(model="tiny" if small else "stdlib-0.8m", first=0)
    with tempfile.TemporaryDirectory() as folder:
        text = ROOT / "nbs/results/ledger/texts/eurlex.tar.xz"
        if small:
            text = Path(folder, "text.txt")
            text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
        name = f"{options.model}-{options.first}"
        torch.manual_seed(0)
        torch.save(blank_model(recipe_of(name)[0]).state_dict(), Path(folder, f"{name}.pt"))
        bench = Bench(folder, {"eurlex": f"path:{text}"}, task, Path(folder, "cache"))
        bench.corpus("eurlex")
        for count, compiled in ((2, False),) if small else ((64, False), (256, True)):
            yield rate(count, compiled, bench, options, device)


def rate(count: int, compiled: bool, bench: Bench, options: Namespace, device: str) -> dict:
    "The row of so many runs at once; the first update compiles."
    what, began = f"{count} runs at once{', compiled' * compiled}", time.perf_counter()
    try: run_arms(engines.timed_arms(count, options), bench, device, count, compiled)
    except Exception as e: return problem(what, "runs an hour", e)
    seconds = time.perf_counter() - began
    return row(what, 3600 * count / seconds, "runs an hour", "runs", also=f"{seconds:.3g} s for all")


# the ladder of sizes


def ladder_largest(device: str) -> Rows:
    """The largest size of sizes.py, its arms in order of worth, one seed after the other, for as long as
    the piece is expected to take; in a dry run two arms of the smallest."""
    sizes, small = ladder(), device == "cpu"
    size = sizes.SIZES[0] if small else sizes.LARGEST
    task = Task(steps=4, batch_size=2, warmup=1, every=2, chunks=2, windows=2) if small else sizes.PARTS[size].task
    jobs = sizes.runs_of(size, sizes.tuned_in(sizes.stored(), sizes.PARTS[size].tuned))
    until = time.monotonic() + LADDER
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, sizes.beside(sizes.RESULTS / "ledger")[0], task, Path(folder, "cache"), device)
        for arm, _, job in jobs[:2] if small else jobs:
            if time.monotonic() > until: break
            build_checkpoint(bench, job.arm.checkpoint)
            found = run_arm(job.arm, bench)
            yield row(f"{size}, {arm}, seed {job.arm.seed}", found["val_loss"], "nats",
                      also=f"{found['seconds']:.3g} s, peak rate {job.arm.lr:g}")


def ladder() -> Any:
    "sizes.py as a module."
    path = ROOT / "nbs/studies/experiments/sizes.py"
    spec = importlib.util.spec_from_file_location("sizes", path)
    found = sys.modules["sizes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


# batches


def batches_growing(device: str) -> Rows:
    "gpt-10m, compiled as a whole, at growing batches."
    small = device == "cpu"
    for size in (1,) if small else (8, 16, 32, 64):
        model, batch, kind = ("gpt-tiny", f"{size} x 16", "eager") if small else ("gpt-10m", f"{size} x 128", "model")
        try: yield from steps(device, model, batch, ["none", "weights", "all"], kind)
        except subprocess.CalledProcessError as e:
            yield row(f"{model}, {batch}", None, "times unquantized", problem=f"its process ended with {e.returncode}")


def main(piece: str, device: str, out: Path) -> None:
    "Writes a piece's rows whenever there is a new one."
    bench_quantize.find_peers(peers())
    rows: dict[str, dict] = {}
    for found in globals()[piece](device):
        rows[found["what"]] = found
        write_atomic(out, json.dumps(list(rows.values())))


if __name__ == "__main__": main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
