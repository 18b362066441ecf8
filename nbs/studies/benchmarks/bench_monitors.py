"""Times a quantized training step of gpt-10m with all monitors, with monitors that rest, and with
none; writes nbs/results/bench_monitors.json. About 15 minutes on two cores."""
import argparse
import statistics
import time

import torch

from altgrad.numbers.kernels import set_path
from altgrad.model.gpt import GPT, loss_of, preset
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.products import fast_bfloat16
from altgrad.model.surgery import quantize_model
from altgrad.watching.monitors import Monitors
from altgrad.watching.sums import compiles
from altgrad.watching.updates import WeightMonitor
from altgrad.training.config import TrainConfig
from altgrad.training.tracking import code_commit, machine, versions
from stored import add, add_out

DEFAULT = TrainConfig()
BATCHES = {
    "16 x 128": (16, 128),
    "default": (DEFAULT.batch_size, DEFAULT.block_size),
    "32 x 256": (32, 256),
}
POINTS = {
    "weights": dict(weight="E4M3"),
    "all points": dict(weight="E4M3", activation="E4M3", gradient="E5M2", weight_gradient="E5M2"),
}
HISTOGRAM_EVERY, HEALTH_EVERY = 10, 100


class Step:
    "A model, its optimizer, and one training step with or without monitors."
    def __init__(self, points: dict, batch: tuple[int, int], device: str):
        torch.manual_seed(0)
        self.device, self.bfloat16 = device, fast_bfloat16(torch.device(device))
        self.model = GPT(preset("gpt-10m")).to(device)
        quantize_model(self.model, config=PrecisionConfig([LayerPrecisionRule("*", **points)]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(256, (batch[0], batch[1] + 1), device=device)
        self.monitors = Monitors(
            self.model, [self.optimizer], every=1, histogram_every=10**9, health_every=10**9
        )
        self.weights = WeightMonitor(self.model)

    def __call__(self, monitors: Monitors | None = None, step: int = 2) -> None:
        if monitors: monitors.begin(step)
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
            loss = loss_of(self.model, self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        if monitors: monitors.gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if monitors: monitors.end()

    def arms(self) -> dict:
        "What is timed: a call for each arm."
        m, resting = self.monitors, Monitors(self.model, [self.optimizer], every=10**9)

        def with_histograms():
            m.histogram_every = 1
            self(m)
            m.histogram_every = 10**9

        def with_health():
            m.health_every = 1
            self(m)
            m.health_every = 10**9

        return {
            "none": self,
            "resting": lambda: self(resting),
            "weight monitor": lambda: (self(), self.weights.measure()),
            "all": lambda: self(m),
            "all and histograms": with_histograms,
            "all and health": with_health,
        }


def seconds(call, device: str) -> float:
    "The time of one call."
    if device != "cpu": torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device != "cpu": torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(points: dict, batch: tuple[int, int], rounds: int, device: str) -> dict:
    """Medians of each arm over rounds in which all take turns,
    and the ratio of a step with everything, on the average over 100 steps."""
    arms = Step(points, batch, device).arms()
    for _ in range(2):
        for call in arms.values(): call()
    times = {name: [] for name in arms}
    for _ in range(rounds):
        for name, call in arms.items(): times[name].append(1e3 * seconds(call, device))
    ratio = lambda name: statistics.median(a / b for a, b in zip(times[name], times["none"]))
    every = 1 if compiles() else 10  # as Monitors does
    on = (
        ratio("resting")
        + (ratio("all") - ratio("resting")) / every
        + (ratio("all and histograms") - ratio("all")) / max(every, HISTOGRAM_EVERY)
        + (ratio("all and health") - ratio("all")) / max(every, HEALTH_EVERY)
    )
    return {
        "every": every,
        "median_ms": {name: round(statistics.median(t), 2) for name, t in times.items()},
        "fastest_ms": {name: round(min(t), 2) for name, t in times.items()},
        "ratio_all": round(on, 3),
        "ratio_resting": round(ratio("resting"), 3),
        "ratio_weight_monitor": round(ratio("weight monitor"), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    add_out(parser, "bench_monitors.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit, cases = code_commit(), []
    for path in ("auto", "eager"):
        before = set_path(path)
        for batch in options.batches:
            for name, points in POINTS.items():
                if path == "eager" and (batch != "16 x 128"): continue
                row = measure(
                    points, BATCHES[batch],
                    options.rounds if path == "auto" else max(3, options.rounds // 3),
                    options.device,
                )
                cases.append({"batch": batch, "points": name, "compiled": row["every"] == 1, **row})
                print(
                    f"{batch:>9}  {name:<10}  {'compiled' if path == 'auto' else 'eager':<8}  all "
                    f"{row['ratio_all']:.3f}  "
                    f"resting {row['ratio_resting']:.3f}  weight monitor "
                    f"{row['ratio_weight_monitor']:.3f}  ({row['median_ms']['none']:.0f} ms)",
                    flush=True,
                )
        set_path(before)
    add(options.out, options.device, {
        "machine": machine(options.device),
        "versions": versions(),
        "git_commit": commit,
        "rounds": options.rounds,
        "bfloat16": fast_bfloat16(torch.device(options.device)),
        "cases": cases,
    })


if __name__ == "__main__": main()
