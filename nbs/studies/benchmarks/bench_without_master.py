"""Trains gpt-10m with and without master weights, beside optimizers of others: bytes that stay
between two steps, the most within one, times; losses are of one seed and a few steps, and say nothing.
FlashOptim is not among them: it refuses a machine without a CUDA device. What computes in bfloat16 is timed
where that is fast: Muon, and torch-optimi, on which nothing else here depends, where --peers names a folder
of folders with it (or it is installed).
Writes nbs/results/bench_without_master.json. About 20 minutes on two cores."""
import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import altgrad
from altgrad.geometry.rivals.lion import Lion
from altgrad.model.gpt import GPT, loss_of, preset
from altgrad.model.products import fast_bfloat16
from altgrad.training.data import get_batch, load_corpus
from altgrad.training.tracking import code_commit, machine, versions
from bench_optim import peak
from bench_quantize import add_peers_option, find_peers
from stored import add, add_out

AdamW = torch.optim.AdamW


def torchao_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    "Torchao's AdamW with moments in eight bits, weights in FP32."
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=lr, weight_decay=0.01)


def optimi_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    "That of torch-optimi: weights and moments in bfloat16, and what rounding lost beside each weight."
    from optimi import AdamW as Kahan

    settings = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, kahan_sum=True)  # torch's defaults
    return Kahan(model.bfloat16().parameters(), lr=lr, **settings)


def bitsandbytes_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    "That of bitsandbytes, which moves its parameters on a GPU only."
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=lr, weight_decay=0.01)


def without(rule: type, **settings) -> Callable:
    "Without master weights."
    return lambda model, lr: altgrad.without_master(model, rule, lr=lr, **settings)


CASES: dict[str, Callable] = {
    "AdamW in FP32, fused": lambda model, lr: AdamW(model.parameters(), lr, fused=True),
    "AdamW in FP32, foreach": lambda model, lr: AdamW(model.parameters(), lr, foreach=True),
    "torchao AdamW8bit": torchao_adamw,
    "without master weights, 8 bits beside a code": without(AdamW, bits=8),
    "without master weights, 4 bits": without(AdamW, bits=4),
    "the same, fused": without(AdamW, bits=4, fused=True),
    "the same, gradients released": without(AdamW, bits=4, fused=True, release_gradients=True),
    "without master weights, 2 bits": without(AdamW, bits=2),
    "without master weights, stochastic rounding": without(AdamW, bits=0),
    "without master weights, 4 bits, Lion": without(Lion, bits=4),
}
IN_BFLOAT16 = {
    "without master weights, 4 bits, Muon": without(torch.optim.Muon, bits=4),
    "torch-optimi AdamW, bfloat16 and Kahan": optimi_adamw,
}
ON_GPU = {"bitsandbytes AdamW8bit": bitsandbytes_adamw}
WARMUP = 20  # steps in which rates rise
SLOWER = {"without master weights, 4 bits, Lion": 0.3}  # rates of rules that take other ones


def plain(t: torch.Tensor) -> Iterator[torch.Tensor]:
    "The plain tensors of which a tensor consists."
    if not hasattr(t, "__tensor_flatten__"):
        yield t
        return
    for name in t.__tensor_flatten__()[0]: yield from plain(getattr(t, name))


def size(tensors: list) -> int:
    "Bytes of tensors, each storage counted once."
    found = [t for x in tensors if isinstance(x, torch.Tensor) for t in plain(x.detach())]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in found)}
    return sum(storages.values())


class Run:
    "A model, its optimizer, and one training step."
    def __init__(self, name: str, options: argparse.Namespace, batches: Callable):
        torch.manual_seed(0)
        self.device, self.batches, self.step = options.device, batches, 0
        self.model = GPT(preset(options.model)).to(self.device)
        layers = [m for m in self.model.blocks.modules() if isinstance(m, nn.Linear)]
        make = {**CASES, **IN_BFLOAT16, **ON_GPU}[name]
        self.optimizer = make(self.model, options.lr * SLOWER.get(name, 1.0))
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.weights = [m.weight for m in layers]
        self.losses: list[float] = []
        self.times: dict[str, list[float]] = {"step": [], "optimizer": []}

    def synchronize(self) -> float:
        if self.device != "cpu": torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self) -> None:
        self.step += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * min(1.0, self.step / WARMUP)
        began = self.synchronize()
        x, y = self.batches(self.step)
        loss = loss_of(self.model, x.to(self.device), y.to(self.device))
        loss.backward()
        middle = self.synchronize()
        self.optimizer.step()
        ended = self.synchronize()
        self.gradients = size([p.grad for p in self.model.parameters()])
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.times["step"].append(1e3 * (ended - began))
        self.times["optimizer"].append(1e3 * (ended - middle))

    def row(self) -> dict:
        "What was measured, and counted."
        every = list(self.model.parameters())
        kept = size([*every, *tree_leaves(list(self.optimizer.state.values()))])
        states = [self.optimizer.state[w] for w in self.weights]
        linear = size([*self.weights, *tree_leaves(states)])
        count = sum(w.numel() for w in self.weights)
        return {
            "bytes_a_linear_weight": round(linear / count, 4),
            "kept_bytes": kept, "linear_weights": count,
            "parameters": sum(p.numel() for p in every),
            "gradient_bytes": self.gradients, "peak_bytes_of_a_step": peak(self, self.device),
            **{f"{key}_ms": round(statistics.median(t), 3) for key, t in self.times.items()},
            **{f"fastest_{key}_ms": round(min(t), 3) for key, t in self.times.items()},
            "loss": round(statistics.fmean(self.losses[-20:]), 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", "--steps", dest="steps", type=int, default=200,
        help="steps of each case; all take turns",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="gpt-10m")
    parser.add_argument("--batch", type=int, nargs=2, default=(4, 128), metavar=("SIZE", "TOKENS"))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", default="stdlib")
    add_out(parser, "bench_without_master.json")
    add_peers_option(parser)
    options = parser.parse_args()
    find_peers(options.peers)
    torch.set_num_threads(options.threads)
    commit = code_commit()
    corpus = load_corpus(options.data)
    batches = lambda step: get_batch(corpus.train, *options.batch, 0, step)
    names = [*CASES, *(ON_GPU if options.device != "cpu" else ())]
    if fast_bfloat16(torch.device(options.device)): names += IN_BFLOAT16
    if not importlib.util.find_spec("optimi"): names = [name for name in names if "optimi" not in name]
    runs = {name: Run(name, options, batches) for name in names}
    for _ in range(options.steps):
        for run in runs.values(): run()
    rows = {name: run.row() for name, run in runs.items()}
    for name, row in rows.items():
        print(
            f"{name:<45} {row['bytes_a_linear_weight']:6.3f} B  "
            f"and {row['gradient_bytes'] / row['parameters']:.0f} of gradients  "
            f"optimizer {row['optimizer_ms']:8.1f} ms  step {row['step_ms']:8.1f} ms  "
            f"loss {row['loss']:.4f}", flush=True,
        )
    add(options.out, options.device, {
        "machine": machine(options.device), "versions": versions(), "git_commit": commit,
        "model": options.model, "batch": list(options.batch), "steps": options.steps,
        "lr": options.lr, "text": corpus.hash, "rows": rows,
    })


if __name__ == "__main__": main()
