"""Makes runs of the ledger again and watches their gradients and which weights ever move, for nbs/studies/failure_atlas.ipynb and dashboard.ipynb.

python .ci/gradients.py --checkpoints FOLDER --corpus eurlex=path:TEXT     # about ten minutes on one thread; what is stored already is kept
The arms are those of the central study at their tuned rates, seed 0 on each checkpoint: all formats with AdamW, E7M0 with the powers -1 and 1 too. Watching
changes nothing: each run says whether its final weights are those of the ledger, bit for bit.
"""
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from altgrad.data import get_batch
from altgrad.evidence import Study, build_study, read_ledger
from altgrad.formats import EIGHT_BIT, get_format
from altgrad.geometry import stiffness
from altgrad.instrument import Arm, Bench, Weights, make_rule, ramp, state_hash
from altgrad.model import loss_of
from altgrad.quantize import fake_quantize
from altgrad.scaling import compute_scale
from altgrad.sweep import read_matrix
from studies import opened

ROOT = Path(__file__).resolve().parent.parent / "nbs"
STORAGES = ("fp32", "master", "grid_nearest", "grid_stochastic")
OCTAVES = 12  # below a tensor's largest weight; the last bin holds all that is smaller
KEPT = ("format", "storage", "power", "lr", "checkpoint", "seed")


def arms(study: Study) -> list[Arm]:
    "What is run: by format, storage and power, at the tuned rate, once on each checkpoint."
    cells = [study.cell(f, s, p) for f in EIGHT_BIT if f != "E1M6" for s in STORAGES for p in ((-1.0, 0.0, 1.0) if f == "E7M0" else (0.0,))]
    tuned = [(cell, study.tuned[cell]) for cell in cells]
    return [replace(cell, lr=t.rates[t.best], split="confirm", checkpoint=c, seed=0) for cell, t in tuned for c in study.checkpoints]


def look(gradients: list[Tensor], weights: list[Tensor], scales: list[Tensor], name: str) -> dict[str, float]:
    "What the format would make of a step's gradients, each under a scale from its amax; and the variance of the spacings' log2 within tensors."
    fmt = get_format(name)
    scale = [compute_scale(g.abs().amax(), fmt) for g in gradients]
    rounded = [fake_quantize(g, fmt, s) for g, s in zip(gradients, scale)]
    g, q = torch.cat([x.flatten() for x in gradients]).double(), torch.cat([x.flatten() for x in rounded]).double()
    spread = sum(stiffness(w / s, fmt).double().log2().var(correction=0).item() * w.numel() for w, s in zip(weights, scales))
    over = sum((w.abs() > fmt.max * s).sum().item() for w, s in zip(weights, scales))
    return {"grad_norm": g.norm().item(), "zero": (g == 0).double().mean().item(), "flushed": ((q == 0) & (g != 0)).double().mean().item(),
            "cosine": (g @ q / (g.norm() * q.norm())).item(), "overflow": over / len(g), "stiffness_variance": spread / len(g)}


def watched(arm: Arm, bench: Bench) -> dict[str, Any]:
    "The run of an arm, as `run_arm` makes it, and what was seen."
    model, task, corpus = bench.model(arm.checkpoint), bench.task, bench.corpus(arm.corpus)
    weights, fmt = Weights(model, arm), get_format(arm.format)
    rule, course = make_rule(arm, weights.stored, task), []
    moved = [torch.zeros(p.shape, dtype=torch.bool) for p in weights.used]
    size = [(p.detach().abs() / p.detach().abs().amax()).clamp(min=2.0**-40).log2().neg().floor().clamp(max=OCTAVES - 1).long() for p in weights.used]
    for step in range(1, task.steps + 1):
        for group in rule.param_groups: group["lr"] = arm.lr * ramp(step, task.steps, task.warmup)
        for p in weights.used: p.grad = None
        loss = loss_of(model, *get_batch(corpus.train, task.batch_size, model.config.block_size, arm.seed, step))
        if not math.isfinite(loss.item()): break
        loss.backward()
        old, scales = [p.detach().clone() for p in weights.used], [s.clone() for s in weights.scales()]
        if step % task.every == 0: course.append({"step": step, **look([p.grad for p in weights.used], old, scales, arm.format)})
        weights.update(rule)
        for m, a, p, s in zip(moved, old, weights.used, scales): m |= fake_quantize(a, fmt, s) != fake_quantize(p.detach(), fmt, s)
    names = {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}
    counts = sum(torch.bincount(s.flatten(), minlength=OCTAVES) for s in size)
    still = sum(torch.bincount(s[~m], minlength=OCTAVES) for s, m in zip(size, moved))
    return {"course": {key: [float(f"{row[key]:.5g}") for row in course] for key in course[0]}, "weights": counts.tolist(), "never_moved": still.tolist(),
            "never_moved_by_tensor": {names[id(p)]: round((~m).float().mean().item(), 5) for p, m in zip(weights.used, moved)},
            "weights_sha": state_hash({str(i): p for i, p in enumerate(weights.used)})[:16]}


def main() -> int:
    bench, stored, store = opened(__doc__, ROOT / "results/gradients.json", ("runs",))
    study = build_study(read_ledger(ROOT / "results/ledger"), [read_matrix((ROOT / f"studies/matrices/tier{i}.yaml").read_text()) for i in (1, 2, 3)])
    stored["facts"] |= {"task": asdict(bench.task), "octaves": OCTAVES}
    done = {tuple(r[k] for k in KEPT) for r in stored["runs"]}
    for arm in arms(study):
        if tuple(getattr(arm, k) for k in KEPT) in done: continue
        row, seen = study.rows[arm], watched(arm, bench)
        stored["runs"].append({"run": row["run"], **{k: getattr(arm, k) for k in KEPT}, "as_in_ledger": seen["weights_sha"] == row["weights_sha"], **seen})
        store()
        print(*(getattr(arm, k) for k in KEPT), stored["runs"][-1]["as_in_ledger"], flush=True)
    return 0


if __name__ == "__main__": raise SystemExit(main())
