"""Times a training step of gpt-10m in a meter that measures, in one that rests, and without one, in
turn; and counts what the meter keeps in memory at most. Writes nbs/results/bench_stall.json.
About 4 minutes on two cores."""
import argparse
import statistics
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from altgrad.model.gpt import GPT, loss_of, preset
from altgrad.training.config import TrainConfig
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.watching.stall import Meter, stall
from stored import add, add_out

DEFAULT = TrainConfig()
BATCH = DEFAULT.batch_size, DEFAULT.block_size
OPTIMIZERS = {"fused": {"fused": True}, "foreach": {"foreach": True}}
EVERY = 20
NEVER = 10**9


class NewBytes(TorchDispatchMode):
    "Bytes of the tensors that are made within and still alive, and the most there were."
    def __init__(self):
        super().__init__()
        self.alive = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        old = {t.untyped_storage().data_ptr() for t in given}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor): continue
            if t.untyped_storage().data_ptr() not in old: self.add(t)
        return out

    def add(self, t: torch.Tensor) -> None:
        "Count a tensor until it is gone; a view of it that lives longer is not seen."
        self.alive += t.untyped_storage().nbytes()
        self.most = max(self.most, self.alive)
        weakref.finalize(t, self.remove, t.untyped_storage().nbytes())

    def remove(self, size: int) -> None: self.alive -= size


class Step:
    "A model, its optimizer, and one training step."
    def __init__(self, name: str, dtype: torch.dtype, optimizer: dict, batch: tuple, device: str):
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(preset(name)).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **optimizer)
        self.tokens = torch.randint(256, (batch[0], batch[1] + 1), device=device)

    def now(self) -> float:
        if self.device != "cpu": torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    def __call__(self) -> tuple[float, float]:  # ms of a step, and of the optimizer's part of it
        self.optimizer.zero_grad()
        began = self.now()
        loss_of(self.model, self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        middle = self.now()
        self.optimizer.step()
        ended = self.now()
        return ended - began, ended - middle


def in_meter(step: Step, every: int) -> tuple[float, float]:
    "The time of a step in a meter, without its start; the second step, for the first is measured."
    meter = stall(step.model, step.optimizer, NEVER).start()
    step()
    for watch in meter._watches: watch.every = every
    took = step()
    meter.stop()
    assert meter.measured == 1 + (every == 1) and not meter.stopped
    return took


def kept(step: Step) -> dict[str, int]:
    "The most bytes that a meter has at once beyond model and optimizer, beside their sizes."
    step()
    with NewBytes() as new:
        meter: Meter = stall(step.model, step.optimizer, 1).start()
        began = new.alive
        for watch in meter._watches: assert watch.enter() and watch.leave()
    meter.stop()
    sizes = [p.numel() * p.element_size() for p in step.model.parameters()]
    return {
        "peak_bytes": new.most, "kept_bytes": began, "largest_tensor_bytes": max(sizes),
        "model_bytes": sum(sizes), "largest_tensor_float32_bytes": 4 * max(
            p.numel() for p in step.model.parameters()
        ),
    }


def measure(step: Step, rounds: int) -> dict:
    """Medians over rounds in which all take turns. A meter works in the optimizer's part of a step
    alone, so what it adds is taken from that part: the rest varies by more from step to step."""
    arms = {
        "none": step,
        "resting": lambda: in_meter(step, NEVER),
        "measuring": lambda: in_meter(step, 1),
    }
    for arm in arms.values(): arm()
    times = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items(): times[name].append(arm())
    whole = {name: [t for t, _ in pairs] for name, pairs in times.items()}
    def ratio(name: str) -> float:
        added = (a - b for (_, a), (_, b) in zip(times[name], times["none"]))
        return 1 + statistics.median(added) / statistics.median(whole["none"])
    at_20 = (ratio("measuring") + (EVERY - 1) * ratio("resting")) / EVERY
    return {
        "median_ms": {name: round(statistics.median(t), 3) for name, t in whole.items()},
        "fastest_ms": {name: round(min(t), 3) for name, t in whole.items()},
        "ratio_every_1": round(ratio("measuring"), 4),
        f"ratio_every_{EVERY}": round(at_20, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="gpt-10m")
    parser.add_argument("--batch", type=int, nargs=2, default=BATCH, metavar=("SIZE", "TOKENS"))
    add_out(parser, "bench_stall.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit, cases = code_commit(), []
    for dtype in (torch.bfloat16, torch.float32):
        for name, settings in OPTIMIZERS.items():
            step = Step(options.model, dtype, settings, options.batch, options.device)
            row = {**measure(step, options.rounds), **kept(step)}
            stored = str(dtype).removeprefix("torch.")
            cases.append({"stored": stored, "optimizer": name, **row})
            print(
                f"{stored:<9} {name:<8} every step {row['ratio_every_1']:.3f}  "
                f"every {EVERY} {row[f'ratio_every_{EVERY}']:.4f}  "
                f"({row['median_ms']['none']:.0f} ms)  extra {row['peak_bytes'] / 2**20:.1f} MiB",
                flush=True,
            )
    add(options.out, options.device, {
        "machine": machine(options.device),
        "versions": versions(),
        "git_commit": commit,
        "model": options.model,
        "batch": list(options.batch),
        "rounds": options.rounds,
        "cases": cases,
    })


if __name__ == "__main__": main()
