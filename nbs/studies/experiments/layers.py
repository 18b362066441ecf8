"""Measures which format suits which layer and tensor for nbs/studies/layers.ipynb; what is stored
already is kept. It takes about half an hour on one thread.

python nbs/studies/experiments/layers.py --checkpoints FOLDER --corpus eurlex=path:TEXT
"""
import math
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from altgrad.numbers.choosing import profile_of
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.formats import EIGHT_BIT
from altgrad.numbers.scaling import scale_of
from altgrad.model.gpt import GPT, loss_of
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig, Quantizer, read_precision
from altgrad.model.surgery import quantize_model
from altgrad.training.data import get_batch
from altgrad.evidence.instrument import (
    Arm, Bench, frozen_loss, piece_losses, ramp, validation_pieces,
)
from studies import CHECKPOINTS, TEXT, exit_code, opened
from trained_geometry import linear_layers

OUT = Path(__file__).resolve().parents[3] / "nbs/results/layers.json"
KINDS = ("weight", "activation", "gradient")
FP32_RATE = 0.004 * 2**0.5  # of the models whose tensors are measured
RATES = tuple(0.004 * 2 ** (i / 2) for i in range(-2, 3))  # the same five for every arm
TUNE_SEEDS, CONFIRM_SEEDS = (1000, 1001, 1002), (0, 1, 2, 3)
CONVENTION = {"weight": "E4M3", "activation": "E4M3", "gradient": "E5M2"}


def short(x: float, digits: int = 5) -> float | None:
    "A number with so many significant digits; None where it is not finite."
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None


def fine_tune(model: GPT, bench: Bench, rate: float, seed: int) -> bool:
    "AdamW on the linear layers' weights as the instrument does it; whether every loss was finite."
    task = bench.task
    corpus = bench.corpus(TEXT)
    weights = [m.weight for m in linear_layers(model).values()]
    for p in model.parameters(): p.requires_grad_(False)
    for p in weights: p.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        weights, betas=(task.beta1, task.beta2), eps=task.eps, weight_decay=0.0
    )
    for step in range(1, task.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * ramp(step, task.steps, task.warmup)
        optimizer.zero_grad()
        loss = loss_of(
            model, *get_batch(corpus.train, task.batch_size, model.config.block_size, seed, step)
        )
        if not math.isfinite(loss.item()): return False
        loss.backward()
        optimizer.step()
    return True


def validate(model: GPT, bench: Bench, split: str) -> float:
    "Mean loss of a split, nats per token."
    x, y = validation_pieces(bench.corpus(TEXT).val, split, model.config.block_size, bench.task)
    model.eval()
    return float(np.mean(piece_losses(model, x, y, bench.task.chunks)))


# the tensors of a trained model


def tensors_of(model: GPT, bench: Bench) -> dict[tuple[str, str], Tensor]:
    """By layer and kind, over four batches of the tuning split: weights, inputs,
    and gradients of the outputs for the mean loss of a batch."""
    x, y = validation_pieces(bench.corpus(TEXT).val, "tune", model.config.block_size, bench.task)
    found = {(name, kind): [] for name in linear_layers(model) for kind in KINDS}

    def watch(name: str, m: nn.Linear):
        def note(m, args, y):
            found[name, "activation"].append(args[0].detach().clone())
            y.register_hook(lambda g: found[name, "gradient"].append(g.detach().clone()))
        return m.register_forward_hook(note)

    hooks = [watch(name, m) for name, m in linear_layers(model).items()]
    for i in range(4):
        loss_of(model, x[i * 128 : i * 128 + 64], y[i * 128 : i * 128 + 64]).backward()
    for hook in hooks: hook.remove()
    for name, m in linear_layers(model).items(): found[name, "weight"].append(m.weight.detach())
    return {key: torch.cat([t.flatten(0, -2) for t in parts]) for key, parts in found.items()}


def tensor_rows(model: GPT, bench: Bench, checkpoint: str) -> list[dict]:
    "What each format keeps of each tensor, under its own power-of-two scale and under none."
    rows = []
    for (layer, kind), x in tensors_of(model, bench).items():
        row = {
            "checkpoint": checkpoint,
            "layer": layer,
            "kind": kind,
            "amax": short(x.abs().amax().item()),
        }
        row |= {k: short(v) for k, v in asdict(profile_of(x)).items()}
        for fmt, scaled in product(EIGHT_BIT, (True, False)):
            s = quantize_stats(x, fmt, scale_of(x, fmt) if scaled else 1.0)[1]
            row[f"{fmt}{'' if scaled else ' unscaled'}"] = [
                short(s.sqnr_db), short(s.overflow_rate), short(s.underflow_rate)
            ]
        rows.append(row)
    return rows


# rounding one tensor at a time


def weight_gradients(model: GPT, batches: list) -> Tensor:
    "The gradients of all rounded layers' weights, as one vector."
    weights = [m.weight for m in linear_layers(model).values()]
    total = torch.autograd.grad(
        sum(loss_of(model, x, y) for x, y in batches) / len(batches), weights
    )
    return torch.cat([g.flatten() for g in total])


def effect_rows(model: GPT, bench: Bench, checkpoint: str) -> list[dict]:
    """Loss with one tensor rounded minus loss with none (tuning split);
    1 - cosine to the unrounded weight gradients, for each kind."""
    x, y = validation_pieces(bench.corpus(TEXT).val, "tune", model.config.block_size, bench.task)
    batches = list(zip(x[:128].split(64), y[:128].split(64)))
    for m in linear_layers(model).values(): m.requires_grad_(True)
    quantize_model(model, "E4M3")
    layers = linear_layers(model)
    for m in layers.values(): m.points = {}
    base, g0 = validate(model, bench, "tune"), weight_gradients(model, batches)
    rows = []
    for (name, m), kind, fmt in product(layers.items(), KINDS, EIGHT_BIT):
        m.points = {kind: Quantizer(read_precision(fmt))}
        g = weight_gradients(model, batches)
        rise = validate(model, bench, "tune") - base if kind != "gradient" else 0.0
        rows.append({"checkpoint": checkpoint, "layer": name, "kind": kind, "format": fmt, "loss_rise": short(rise),
                     "angle": short(1 - torch.cosine_similarity(g.double(), g0.double(), dim=0).item())})
        m.points = {}
    return rows


# assignments


def assignments(tensors: list[dict]) -> dict[str, dict[str, dict[str, str]] | None]:
    """By arm: a format for each layer and kind; chosen, where there is a choice,
    by the mean SQNR of the tensors over the checkpoints."""
    layers = list(dict.fromkeys(r["layer"] for r in tensors))
    sqnr = lambda fmt, kind, layer=None: np.mean([
        r[fmt][0] for r in tensors if r["kind"] == kind and layer in (None, r["layer"])
    ])
    best = lambda kind, layer=None: max(EIGHT_BIT, key=lambda f: sqnr(f, kind, layer))
    everywhere = lambda by_kind: {layer: by_kind for layer in layers}
    arms = {
        "FP32": None,
        **{f: everywhere(dict.fromkeys(KINDS, f)) for f in EIGHT_BIT if f != "E1M6"},
        "E4M3, E5M2 gradients": everywhere(CONVENTION),
    }
    arms["by kind"] = everywhere({kind: best(kind) for kind in KINDS})
    arms["by layer and kind"] = {
        layer: {kind: best(kind, layer) for kind in KINDS} for layer in layers
    }
    return arms


def prepared(bench: Bench, checkpoint: str, assignment: dict | None) -> GPT:
    "The checkpoint's model, rounding as assigned."
    model = bench.model(checkpoint)
    if assignment:
        quantize_model(
            model,
            config=PrecisionConfig([
                LayerPrecisionRule(layer, **points) for layer, points in assignment.items()
            ]),
        )
    return model


def run(
    bench: Bench, assignment: dict | None, checkpoint: str, rate: float, seed: int, split: str
) -> dict:
    """One fine-tuning with these points rounded;
    a run that is not finite or ends above the frozen model counts as the frozen one."""
    began, model = time.perf_counter(), prepared(bench, checkpoint, assignment)
    start = validate(model, bench, split)
    model.train()
    finite = fine_tune(model, bench, rate, seed)
    loss = validate(model, bench, split)
    frozen = frozen_loss(Arm(checkpoint=checkpoint, corpus=TEXT, split=split), bench)
    diverged = not finite or not loss <= frozen
    return {
        "checkpoint": checkpoint,
        "lr": rate,
        "seed": seed,
        "split": split,
        "start_loss": start,
        "val_loss": frozen if diverged else loss,
        "diverged": diverged,
        "frozen_loss": frozen,
        "seconds": round(time.perf_counter() - began, 2),
    }


def tuned_rate(runs: list[dict], arm: str) -> float:
    "The rate with the least mean tuning loss; the smaller one of equals."
    mean = lambda rate: np.mean([
        r["val_loss"] for r in runs if r["arm"] == arm and r["split"] == "tune" and r["lr"] == rate
    ])
    return min(RATES, key=lambda rate: (mean(rate), rate))


def main() -> int:
    bench, stored, store = opened(__doc__, OUT, ("tensors", "effects", "runs"))
    stored["facts"] |= {
        "task": asdict(bench.task), "fp32_rate": FP32_RATE, "rates": RATES,
        "tune_seeds": TUNE_SEEDS, "confirm_seeds": CONFIRM_SEEDS,
    }
    for number, c in enumerate(CHECKPOINTS):
        if any(r["checkpoint"] == c for r in stored["effects"]): continue
        print(f"tensors of {c}", flush=True)
        model = bench.model(c)
        fine_tune(model, bench, FP32_RATE, TUNE_SEEDS[number])
        rows = tensor_rows(model, bench, c)
        model.zero_grad()
        stored["effects"] += effect_rows(model, bench, c)
        stored["tensors"] += rows
        store()
    stored["arms"] = assignments(stored["tensors"])
    done = {(r["arm"], r["checkpoint"], r["lr"], r["seed"], r["split"]) for r in stored["runs"]}
    for split in ("tune", "confirm"):
        for arm, assignment in stored["arms"].items():
            if split == "tune":
                jobs = [
                    (c, rate, seed) for rate in RATES for c, seed in zip(CHECKPOINTS, TUNE_SEEDS)
                ]
            else:
                jobs = [
                    (c, tuned_rate(stored["runs"], arm), seed)
                    for c in CHECKPOINTS
                    for seed in CONFIRM_SEEDS
                ]
            for c, rate, seed in jobs:
                if (arm, c, rate, seed, split) in done: continue
                stored["runs"].append({"arm": arm, **run(bench, assignment, c, rate, seed, split)})
                store()
            print(f"{split}: {arm}", flush=True)
    return 0


if __name__ == "__main__": raise SystemExit(exit_code(main))
