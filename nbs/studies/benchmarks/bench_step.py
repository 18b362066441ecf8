"""Times training steps of GPTs whose linear layers round, against the same step unquantized, and
the memory they need; writes nbs/results/bench_step.json. About 30 minutes on two cores.

python nbs/studies/benchmarks/bench_step.py                  # two models, several batches
python nbs/studies/benchmarks/bench_step.py --kinds growth   # 1M to 100M parameters, weights and all points
python nbs/studies/benchmarks/bench_step.py --peers FOLDER   # beside torchao, which lies in that folder

Each case runs in a process of its own; stored cases of other kinds stay. torchao comes from
`pip install --no-deps --target FOLDER/torchao torchao`.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from altgrad.basics import write_atomic
from altgrad.numbers import kernels
from altgrad.model import surgery
from altgrad.model.gpt import GPT, GPTConfig, loss_of, preset
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig, Quantizer
from altgrad.model.products import fast_bfloat16
from altgrad.model.surgery import quantize_model, rounded_once
from altgrad.watching.monitors import memory_bytes
from altgrad.training.tracking import code_commit, machine, versions
from bench_monitors import seconds
from bench_quantize import add_peers_option, find_peers
from stored import add, add_out, read

POINTS = {"none": {}, "weights": dict(weight="E4M3"), "weights and activations": dict(weight="E4M3", activation="E4M3"),
          "all": dict(weight="E4M3", activation="E4M3", gradient="E5M2")}
NATIVE = {
    f"torchao {how}{scale}": dict(
        emulate=how == "emulated", round_scales_to_power_of_2=bool(scale)
    )  # float8 multiplies in FP8, on a GPU that can
    for how in ("emulated", "float8")
    for scale in ("", ", powers of two")
}
# what is compiled: nothing, the quantizer, the whole model; and the quantizer's path
KINDS = {"eager": "eager", "kernels": "compiled", "model": "compiled"}
PARTS = {  # operators and marked calls, by the beginning of their names
    "products": ("aten::mm", "aten::addmm"),
    "attention": ("aten::_scaled_dot_product",),
    "amax and scale": ("amax and scale",),
    "rounding": ("rounding",),
    "GELU and LayerNorm": ("aten::gelu", "aten::native_layer_norm"),
    "optimizer": ("Optimizer.step",),
}
BATCHES = {"demo": (32, 64)}  # sequences and tokens of each; the others say both in their names
SIZES = {
    "cpu": {
        "gpt-tiny": ("demo", "16 x 128", "8 x 128", "32 x 128", "64 x 128"),
        "gpt-10m": ("demo", "16 x 128"),
    },
    "cuda": {
        "gpt-tiny": ("demo", "16 x 128"),
        "gpt-10m": ("8 x 128", "16 x 128", "32 x 128", "64 x 128", "64 x 256", "256 x 256"),
    },
}
LARGE = {"gpt-124m": GPTConfig(12, 12, 768, block_size=1024, vocab_size=50304)}  # for a GPU
GROWTH = {
    "1M": GPTConfig(5, 4, 128), "3M": GPTConfig(4, 8, 256), "10M": preset("gpt-10m"),
    "25M": GPTConfig(8, 8, 512), "100M": GPTConfig(14, 12, 768),
}


def convert(model: GPT, arm: str) -> None:
    """Gives the model the points of an arm, ours or torchao's with the same
    formats and one scale a tensor from its own amax."""
    if arm in NATIVE:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model, config=Float8LinearConfig(**NATIVE[arm]),
            module_filter_fn=lambda _, name: "lm_head" not in name,
        )
    elif POINTS[arm]:
        quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("*", **POINTS[arm])]))


def native_arms(device: str) -> list[str]:
    "Those of torchao's arms that can run here."
    if importlib.util.find_spec("torchao") is None: return []
    real = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    return [arm for arm, how in NATIVE.items() if how["emulate"] or real]


def make_step(
    config: GPTConfig, points: str, batch: tuple[int, int], device: str, dtype: torch.dtype,
    compiled: bool,
):
    "A training step: forward, backward, clipping, fused AdamW."
    torch.manual_seed(0)
    model = GPT(config).to(device)
    convert(model, points)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (batch[0], batch[1] + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with rounded_once(model):
            with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = loss_of(run, tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measure(
    config: GPTConfig, batch: tuple[int, int], names: list[str], options: argparse.Namespace,
    compiled: bool,
) -> dict:
    """Medians over rounds in which the arms take turns,
    and of the ratios to the first arm in the same round."""
    steps = {
        name: make_step(
            config, name, batch, options.device, getattr(torch, options.dtype), compiled
        )
        for name in names
    }
    for _ in range(2):
        for step in steps.values(): step()
    times = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, step in steps.items(): times[name].append(1e3 * seconds(step, options.device))
    ratio = {
        name: round(statistics.median(a / b for a, b in zip(t, times[names[0]])), 3)
        for name, t in times.items()
    }
    return {
        "median_ms": {name: round(statistics.median(t), 2) for name, t in times.items()},
        "ratio": ratio,
    }


def marked(owner: object, name: str, mark: str) -> None:
    "Lets the profiler see the calls of a function under a name."
    function = getattr(owner, name)

    def call(*args, **more):
        with torch.profiler.record_function(mark): return function(*args, **more)

    setattr(owner, name, call)


def profile(step, device: str, steps: int = 5) -> dict[str, float]:
    "Milliseconds a step by part, and of everything else."
    marked(Quantizer, "scale", "amax and scale")
    marked(kernels, "_run", "rounding")
    marked(surgery, "scale_of", "amax and scale")
    for _ in range(2): step()
    with torch.profiler.profile() as seen:
        began = time.perf_counter()
        for _ in range(steps): step()
        if device == "cuda": torch.cuda.synchronize()
        whole = time.perf_counter() - began
    spent = [
        (e.key, e.device_time_total if device == "cuda" else e.cpu_time_total)
        for e in seen.key_averages()
    ]
    parts = {
        part: sum(t for key, t in spent if key.startswith(names)) / 1e6
        for part, names in PARTS.items()
    }
    return {
        part: round(1e3 * t / steps, 2)
        for part, t in (parts | {"other": whole - sum(parts.values())}).items()
    }


def case(options: argparse.Namespace) -> dict:
    "One case, in this process."
    kind, model, batch, names = options.case
    more = {**GROWTH, **LARGE}
    config = more[model] if model in more else preset(model)
    size = BATCHES.get(batch) or tuple(map(int, batch.split(" x ")))
    names = names.split(",")
    if kind == "memory":
        step = make_step(
            config, names[0], size, options.device, getattr(torch, options.dtype), False
        )
        for _ in range(3): step()
        return {"bytes": memory_bytes(torch.device(options.device))}
    if kind == "profile":
        return {
            "ms": profile(
                make_step(
                    config, names[0], size, options.device, getattr(torch, options.dtype), False
                ),
                options.device,
            )
        }
    return measure(config, size, names, options, kind == "model")


def run_case(
    options: argparse.Namespace, kind: str, model: str, batch: str, names: list[str],
    path: str = "auto",
) -> dict:
    "A case in a process of its own, so that none finds another's memory or kernels."
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, __file__, "--case", kind, model, batch, ",".join(names), "--rounds",
            str(options.rounds), "--device", options.device, "--dtype", options.dtype, "--out",
            f"{folder}/case.json",
        ]
        if options.peers: command += ["--peers", str(options.peers.resolve())]
        env = {**os.environ, "ALTGRAD_PATH": path, "OMP_NUM_THREADS": str(options.threads)}
        subprocess.run(command, env=env, check=True)
        return json.loads(Path(folder, "case.json").read_text())


def cases(options: argparse.Namespace):
    "Every case, as it is measured."
    names = [
        *POINTS,
        *(
            arm
            for arm in native_arms(options.device)
            if not NATIVE[arm]["round_scales_to_power_of_2"]
        ),
    ]
    for model, batches in SIZES[options.device].items():
        if model not in options.models: continue
        for batch in batches:
            for kind in (k for k in KINDS if k in options.kinds):
                row = {
                    "model": model,
                    "batch": batch,
                    "kind": kind,
                    **run_case(options, kind, model, batch, names, KINDS[kind]),
                }
                ratios = "  ".join(f"{k} {v:.2f}" for k, v in row["ratio"].items())
                print(
                    f"{model:>8} {batch:>9} {kind:<8} {ratios}  ({row['median_ms']['none']:.0f} "
                    "ms)",
                    flush=True,
                )
                yield row
        for kind, unit, arms in (
            ("memory", "bytes", names),
            ("profile", "ms", ("none", "weights", "all")),
        ):
            if kind not in options.kinds: continue
            path = "compiled" if kind == "profile" else "auto"
            found = {
                arm: run_case(options, kind, model, batches[0], [arm], path)[unit] for arm in arms
            }
            yield {"model": model, "batch": batches[0], "kind": kind, unit: found}
    for model in GROWTH if "growth" in options.kinds else ():
        yield {
            "model": model,
            "batch": "8 x 128",
            "kind": "growth",
            **run_case(
                options, "kernels", model, "8 x 128", ["none", "weights", "all"], "compiled"
            ),
        }


def same(case: dict) -> tuple:
    "What two measurements of one case have in common."
    return case["model"], case["batch"], case["kind"]


def products_of(device: str) -> str:
    "The type in which the trainer multiplies on a device."
    return "bfloat16" if fast_bfloat16(torch.device(device)) else "float32"


def store(path: Path, place: str, facts: dict, row: dict) -> None:
    "Puts a case with those that were measured under the same facts, in place of an older one."
    parts = [
        part | {"cases": [c for c in part["cases"] if same(c) != same(row)]}
        for part in read(path).get(place, [])
    ]
    mine = next((part for part in parts if part | {"cases": 0} == facts | {"cases": 0}), None)
    if mine is None: parts.append(mine := facts | {"cases": []})
    mine["cases"].append(row)
    add(path, place, [part for part in parts if part["cases"]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"),
        help="of the products in both arms (default: as the trainer does)",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--kinds", nargs="+", default=(*KINDS, "memory", "profile"),
        choices=(*KINDS, "memory", "profile", "growth"),
    )
    models = sorted({model for sizes in SIZES.values() for model in sizes})
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    add_peers_option(parser)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    add_out(parser, "bench_step.json")
    options = parser.parse_args()
    options.dtype = options.dtype or products_of(options.device)
    find_peers(options.peers)
    if options.case:
        write_atomic(options.out, json.dumps(case(options)))
        return
    commit, place = code_commit(), f"{options.device} {options.dtype}"
    facts = {"machine": machine(torch.device(options.device)), "versions": versions(), "git_commit": commit,
             "rounds": options.rounds, "threads": options.threads}
    if native_arms(options.device):
        facts["versions"]["torchao"] = importlib.metadata.version("torchao")
    for row in cases(options): store(options.out, place, facts, row)


if __name__ == "__main__": main()
