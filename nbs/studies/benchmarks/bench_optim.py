"""Times every update rule, compiled and without a setting, against torch's AdamW on the weights of a
GPT with 10M parameters; writes nbs/results/bench_optim.json. About 8 minutes on two cores."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

from altgrad.basics import write_atomic
from altgrad.geometry.optim import GridSGD, Madam, RiemannianAdamW, StiffnessAdamW, StiffnessSGD
from altgrad.numbers.kernels import set_path
from altgrad.training.tracking import code_commit, machine, versions
from stored import add_out

LAYERS, SHAPES = 6, ((1152, 384), (384, 384), (1536, 384), (384, 1536))

CASES: dict[str, Callable] = {
    "torch AdamW(foreach=True)": lambda p: torch.optim.AdamW(p, foreach=True),
    "torch AdamW(fused=True)": lambda p: torch.optim.AdamW(p, fused=True),
    "torch Muon": lambda p: torch.optim.Muon(p),
    "StiffnessAdamW(power=0)": lambda p: StiffnessAdamW(p, "E4M3", power=0.0, compiled=True),
    "StiffnessAdamW(power=1)": lambda p: StiffnessAdamW(p, "E4M3", compiled=True),
    "StiffnessAdamW(power=1, normalize=False)": lambda p: StiffnessAdamW(
        p, "E4M3", normalize=False, compiled=True
    ),
    "StiffnessAdamW(power=0.5)": lambda p: StiffnessAdamW(p, "E4M3", power=0.5, compiled=True),
    "StiffnessAdamW(power=-1, floor_octaves=4)": lambda p: StiffnessAdamW(
        p, "E4M3", power=-1.0, floor_octaves=4, compiled=True
    ),
    "StiffnessAdamW(power=0.3)": lambda p: StiffnessAdamW(p, "E4M3", power=0.3, compiled=True),
    "StiffnessAdamW(placement='gradient')": lambda p: StiffnessAdamW(
        p, "E4M3", placement="gradient", compiled=True
    ),
    "StiffnessSGD(momentum=0.9)": lambda p: StiffnessSGD(p, "E4M3", momentum=0.9, compiled=True),
    "RiemannianAdamW": lambda p: RiemannianAdamW(p, "E4M3", compiled=True),
    "RiemannianAdamW(floor_octaves=4)": lambda p: RiemannianAdamW(
        p, "E4M3", floor_octaves=4, compiled=True
    ),
    "Madam": lambda p: Madam(p, "E4M3", compiled=True),
    "GridSGD": lambda p: GridSGD(p, "E4M3", compiled=True),
    "StiffnessAdamW(power=1), by torch's operations": lambda p: StiffnessAdamW(p, "E4M3"),
    "RiemannianAdamW, by torch's operations": lambda p: RiemannianAdamW(p, "E4M3"),
    "StiffnessAdamW(power=1), without a setting": lambda p: StiffnessAdamW(p, "E4M3"),
    "RiemannianAdamW, without a setting": lambda p: RiemannianAdamW(p, "E4M3"),
    "GridSGD, without a setting": lambda p: GridSGD(p, "E4M3"),
    "Madam, without a setting": lambda p: Madam(p, "E4M3"),
}
UNSET, EAGER = "without a setting", "by torch's operations"
SETTLE = 60.0  # seconds at most in which those take steps first: what they compile is compiled then


def parameters(device: str) -> list[nn.Parameter]:
    "Weights and gradients of the linear layers, the same for every case."
    generator = torch.Generator().manual_seed(0)
    made = [
        nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        for shape in SHAPES * LAYERS
    ]
    for p in made: p.grad = (torch.randn(p.shape, generator=generator) * 1e-3).to(device)
    return made


def seconds(step: Callable, device: str) -> float:
    "The time of one step."
    began = time.perf_counter()
    step()
    if device != "cpu": torch.cuda.synchronize()
    return time.perf_counter() - began


def step_of(name: str, optimizer: torch.optim.Optimizer) -> Callable:
    "What takes a step of a case, on the path that its name says."
    if not name.endswith(EAGER): return optimizer.step

    def step() -> None:
        before = set_path("eager")
        try: optimizer.step()
        finally: set_path(before)

    return step


def peak(step: Callable, device: str) -> int:
    "The most bytes that a step holds beyond those that it found."
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile: step()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    return max(accumulate((e["args"]["Bytes"] for e in changes), initial=0))


def memory(optimizer: torch.optim.Optimizer, step: Callable, device: str) -> int:
    """Bytes while a step runs: weights, gradients, the optimizer's state,
    and the most that the step itself holds."""
    kept = sum(t.numel() * t.element_size() for group in optimizer.param_groups for p in group["params"]
               for t in (p, p.grad, *optimizer.state[p].values()) if torch.is_tensor(t))
    return kept + peak(step, device)


def measure(rounds: int, device: str, settle: float = 0.0) -> dict:
    """Median milliseconds and the memory of a step; the cases take turns,
    so that what else the machine does meets all of them alike.
    Those without a setting take steps for so many seconds before that."""
    cases = {name: make(parameters(device)) for name, make in CASES.items()}
    steps = {name: step_of(name, optimizer) for name, optimizer in cases.items()}
    for step in steps.values():
        for _ in range(3): seconds(step, device)
    until = time.monotonic() + settle
    while time.monotonic() < until:
        for name, step in steps.items():
            if name.endswith(UNSET): seconds(step, device)
    times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, step in steps.items(): times[name].append(1e3 * seconds(step, device))
    rows = {name: {"median_ms": round(statistics.median(t), 3), "fastest_ms": round(min(t), 3),
                   "bytes": memory(cases[name], steps[name], device)} for name, t in times.items()}
    return {"machine": machine(device), "device": device, "rounds": rounds, "rows": rows}


def in_new_process(threads: int, rounds: int, device: str) -> dict:
    "The measurement with so many threads: compiled code keeps the number that it was compiled for."
    command = [sys.executable, __file__, "--rounds", str(rounds), "--device", device, "--print"]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return json.loads(
        subprocess.run(
            command, env=env, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.splitlines()[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cpu")
    add_out(parser, "bench_optim.json")
    parser.add_argument(
        "--print", action="store_true",
        help="measure in this process and print, instead of writing the result",
    )
    args = parser.parse_args()
    if args.print:
        found = measure(args.rounds, args.device, min(SETTLE, 4.0 * args.rounds))
        return print(json.dumps(found))
    commit = code_commit()
    runs = [in_new_process(t, args.rounds, args.device) for t in args.threads]
    size = sum(p.numel() for p in parameters("cpu"))
    found = {"parameters": size, "versions": versions(), "commit": commit, "runs": runs}
    write_atomic(args.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
