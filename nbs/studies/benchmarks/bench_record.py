"""Times a training step in a recorder and without one, in turn. Writes nbs/results/bench_record.json.
About 3 minutes on two cores."""
import argparse
import statistics
import time
from pathlib import Path

import torch

from altgrad.model.gpt import GPT, loss_of, preset
from altgrad.training.config import TrainConfig
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.watching.record import EVERY, record
from stored import add, add_out

DEFAULT = TrainConfig()


class Step:
    "A model, its optimizer, and one training step."
    def __init__(self, name: str, batch: tuple[int, int], device: str):
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(preset(name)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(256, (batch[0], batch[1] + 1), device=device)

    def seconds(self) -> float:
        "The time of one step."
        if self.device != "cpu": torch.cuda.synchronize()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss_of(self.model, self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.optimizer.step()
        if self.device != "cpu": torch.cuda.synchronize()
        return time.perf_counter() - began

    def recorded(self, every: int, dump: bool) -> float:
        """The time of the second of two recorded steps, with what ends the first; and what ends it.
        It is measured at every=1, and glanced at else."""
        how = {"folder": Path("unwritten"), "every": every, "dump": dump}
        recorder = record(self.model, self.optimizer, **how).start()
        recorder.saved = "nowhere"  # stop writes nothing
        self.seconds()
        took = self.seconds()
        recorder.stop()
        assert not recorder.stopped
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="gpt-10m")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("SIZE", "TOKENS"),
                        default=(DEFAULT.batch_size, DEFAULT.block_size))
    add_out(parser, "bench_record.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit = code_commit()
    step = Step(options.model, tuple(options.batch), options.device)
    arms = {
        "none": step.seconds, "glanced": lambda: step.recorded(EVERY, False),
        "measured": lambda: step.recorded(1, False), "with_dump": lambda: step.recorded(1, True),
    }
    for arm in arms.values(): arm()
    times = {name: [] for name in arms}
    for _ in range(options.rounds):
        for name, arm in arms.items(): times[name].append(1e3 * arm())
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(times[name], times["none"])), 3)
        for name in times
    }
    ratios["usual"] = round((ratios["measured"] + (EVERY - 1) * ratios["glanced"]) / EVERY, 3)
    add(options.out, options.device, {
        "machine": machine(options.device), "versions": versions(), "git_commit": commit,
        "model": options.model, "batch": list(options.batch), "rounds": options.rounds,
        "median_ms": {name: round(statistics.median(t), 3) for name, t in times.items()},
        "ratio": ratios,
    })
    print(ratios)


if __name__ == "__main__": main()
