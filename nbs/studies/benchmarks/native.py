"""Trains one GPT on the same batches with our rounding and with torchao's float8 layers (emulated
on a CPU); writes nbs/results/native.json.

python nbs/studies/benchmarks/native.py --peers FOLDER

torchao comes from there: `pip install --no-deps --target FOLDER/torchao torchao`.
"""
import argparse
import json
import sys
import time

import torch

from altgrad.basics import write_atomic
from altgrad.model.gpt import GPT, GPTConfig, loss_of, preset
from altgrad.model.surgery import rounded_once
from altgrad.training.data import Corpus, load_corpus
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.training.config import TrainConfig, make_config
from altgrad.training.trainer import lr_at
from bench_quantize import add_peers_option, find_peers
from bench_step import NATIVE, convert, native_arms
from stored import add_out, read


def made(arm: str, shape: GPTConfig, seed: int, device: str) -> GPT:
    "The model of an arm, before training."
    torch.manual_seed(seed)
    model = GPT(shape).to(device)
    convert(model, arm)
    return model


def loss_at(model: GPT, x: torch.Tensor, y: torch.Tensor, device: str) -> torch.Tensor:
    "The loss of a batch, with bfloat16 products on a GPU."
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return loss_of(model, x.to(device), y.to(device))


@torch.no_grad()
def validation(model: GPT, corpus: Corpus, c: TrainConfig, device: str) -> float:
    "The mean loss over the corpus's validation windows."
    model.eval()
    batches = zip(*(t.split(c.batch_size) for t in corpus.validation(c.block_size, c.eval_windows)))
    losses = [(loss_at(model, x, y, device).item(), len(x)) for x, y in batches]
    model.train()
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def train(arm: str, shape: GPTConfig, corpus: Corpus, c: TrainConfig, device: str) -> dict:
    "One run: the loss of every step, and of the validation text now and then."
    model = made(arm, shape, c.seed, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=c.lr, betas=(c.beta1, c.beta2), weight_decay=c.weight_decay,
        fused=True,
    )
    losses, checked, began = [], {}, time.perf_counter()
    for step in range(1, c.max_steps + 1):
        for group in optimizer.param_groups: group["lr"] = lr_at(step, c)
        optimizer.zero_grad()
        with rounded_once(model):
            loss = loss_at(
                model, *corpus.batch(c.batch_size, c.block_size, c.seed, step, 0), device
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        losses.append(round(loss.item(), 5))
        if step % c.eval_every == 0 or step == c.max_steps:
            checked[step] = round(validation(model, corpus, c, device), 5)
    print(
        f"{arm:<34} seed {c.seed}: {checked[c.max_steps]:.4f} after "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return {"arm": arm, "seed": c.seed, "loss": losses, "val_loss": checked}


def first_gradients(
    arms: list[str], shape: GPTConfig, corpus: Corpus, c: TrainConfig, device: str
) -> dict[str, float]:
    "How far every arm's first gradient is from ours, relative to ours, in the worst tensor."
    found = {}
    for arm in arms:
        model = made(arm, shape, c.seed, device)
        loss_at(model, *corpus.batch(c.batch_size, c.block_size, c.seed, 1, 0), device).backward()
        found[arm] = [p.grad for p in model.parameters()]
    return {
        arm: max(((g - h).norm() / h.norm()).item() for g, h in zip(grads, found["all"]))
        for arm, grads in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="stdlib", help="the text: one of `altgrad train`'s corpora"
    )
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_peers_option(parser)
    add_out(parser, "native.json")
    options = parser.parse_args()
    find_peers(options.peers)
    commit, corpus = code_commit(), load_corpus(options.data)
    real = [arm for arm in native_arms(options.device) if not NATIVE[arm]["emulate"]]
    arms = ["none", "all", *(real or native_arms(options.device))]
    if len(arms) == 2:
        raise SystemExit(
            "torchao is not here: pip install --no-deps --target FOLDER/torchao torchao, then "
            "--peers FOLDER"
        )
    c = make_config(
        dict(
            name="native", format="E4M3", activation="E4M3", gradient="E5M2", model=options.model,
            max_steps=options.steps, device=options.device,
        )
    )
    shape = preset(options.model)
    rows = [
        train(arm, shape, corpus, make_config({**vars(c), "seed": seed}), options.device)
        for seed in options.seeds
        for arm in arms
    ]
    found = {
        "machine": machine(torch.device(options.device)),
        "versions": versions() | {"torchao": sys.modules["torchao"].__version__},
        "git_commit": commit,
        "config": {k: v for k, v in vars(c).items() if isinstance(v, (int, float, str))},
        "corpus_sha": corpus.hash,
        "first_gradient": first_gradients(arms, shape, corpus, c, options.device),
        "rows": rows,
    }
    everything = read(options.out) | {f"{options.device} {options.model}": found}
    write_atomic(options.out, json.dumps(everything) + "\n")


if __name__ == "__main__": main()
