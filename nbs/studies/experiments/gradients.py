"""Makes runs of the ledger again and watches their gradients and which weights ever move, for
nbs/studies/failure_atlas.ipynb and dashboard.ipynb. What is stored already is kept; all takes about
ten minutes on one thread.

python nbs/studies/experiments/gradients.py --checkpoints FOLDER --corpus eurlex=path:TEXT

The arms are those of the central study at their tuned rates, seed 0 on each checkpoint: all formats
with AdamW, E7M0 with the powers -1 and 1 too. Watching changes nothing: each run says whether its
final weights are those of the ledger, bit for bit.
"""
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from altgrad.numbers.formats import get_format
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import compute_scale
from altgrad.geometry.spacing import stiffness
from altgrad.model.gpt import GPT
from altgrad.evidence.instrument import Arm, Bench, Weights, run_arm
from altgrad.evidence.study import RANKED, Study
from studies import ROOT, central_study, exit_code, opened

STORAGES = ("fp32", "master", "grid_nearest", "grid_stochastic")
OCTAVES = 12  # below a tensor's largest weight; the last bin holds all that is smaller
KEPT = ("format", "storage", "power", "lr", "checkpoint", "seed")


def arms(study: Study) -> list[Arm]:
    "What is run: by format, storage and power, at the tuned rate where one is known, once on each checkpoint."
    cells = [
        study.cell(f, s, p)
        for f in RANKED
        for s in STORAGES
        for p in ((-1.0, 0.0, 1.0) if f == "E7M0" else (0.0,))
    ]
    tuned = [(cell, study.tuned[cell]) for cell in cells if not study.tuned[cell].missing]
    return [
        replace(cell, lr=t.rates[t.best], split="confirm", checkpoint=c, seed=0)
        for cell, t in tuned
        for c in study.checkpoints
    ]


def look(
    gradients: list[Tensor], weights: list[Tensor], scales: list[Tensor], name: str
) -> dict[str, float]:
    """What the format would make of a step's gradients, each under a scale from its amax;
    and the variance of the spacings' log2 within tensors."""
    fmt = get_format(name)
    scale = [compute_scale(g.abs().amax(), fmt) for g in gradients]
    rounded = [fake_quantize(g, fmt, s) for g, s in zip(gradients, scale)]
    g = torch.cat([x.flatten() for x in gradients]).double()
    q = torch.cat([x.flatten() for x in rounded]).double()
    spread = sum(
        stiffness(w / s, fmt).double().log2().var(correction=0).item() * w.numel()
        for w, s in zip(weights, scales)
    )
    over = sum((w.abs() > fmt.max * s).sum().item() for w, s in zip(weights, scales))
    return {
        "grad_norm": g.norm().item(),
        "zero": (g == 0).double().mean().item(),
        "flushed": ((q == 0) & (g != 0)).double().mean().item(),
        "cosine": (g @ q / (g.norm() * q.norm())).item(),
        "overflow": over / len(g),
        "stiffness_variance": spread / len(g),
    }


class Watched(Weights):
    """Trained weights that remember what their gradients looked like
    and which of them ever changed their code."""
    def __init__(self, model: GPT, arm: Arm, every: int):
        super().__init__(model, arm)
        self.every, self.step, self.course = every, 0, []
        self.names = {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}
        self.moved = [torch.zeros(p.shape, dtype=torch.bool) for p in self.used]
        share = [p.detach().abs() / p.detach().abs().amax() for p in self.used]
        self.size = [
            s.clamp(min=2.0**-40).log2().neg().floor().clamp(max=OCTAVES - 1).long() for s in share
        ]

    def update(self, rule: torch.optim.Optimizer) -> None:
        "One step, and what it was made of."
        self.step += 1
        old, scales = [p.detach().clone() for p in self.used], [s.clone() for s in self.scales()]
        if self.step % self.every == 0:
            self.course.append({
                "step": self.step,
                **look([p.grad for p in self.used], old, scales, self.fmt.name),
            })
        super().update(rule)
        for m, a, p, s in zip(self.moved, old, self.used, scales):
            m |= fake_quantize(a, self.fmt, s) != fake_quantize(p.detach(), self.fmt, s)

    def seen(self) -> dict[str, Any]:
        "Plain values."
        count = lambda chosen: sum(
            torch.bincount(s[m], minlength=OCTAVES) for s, m in zip(self.size, chosen)
        ).tolist()
        still = [~m for m in self.moved]
        return {
            "course": {
                key: [float(f"{row[key]:.5g}") for row in self.course] for key in self.course[0]
            },
            "weights": count([torch.ones_like(m) for m in self.moved]),
            "never_moved": count(still),
            "never_moved_by_tensor": {
                self.names[id(p)]: round(m.float().mean().item(), 5)
                for p, m in zip(self.used, still)
            },
        }


def watched(arm: Arm, bench: Bench) -> tuple[dict[str, Any], dict[str, Any]]:
    "The row of an arm's run, and what was seen in it."
    made = []
    row = run_arm(
        arm, bench, lambda model, arm: made.append(Watched(model, arm, bench.task.every)) or made[0]
    )
    return row, made[0].seen()


def main() -> int:
    bench, stored, store = opened(__doc__, ROOT / "results/gradients.json", ("runs",))
    study = central_study()
    stored["facts"] |= {"task": asdict(bench.task), "octaves": OCTAVES}
    done = {tuple(r[k] for k in KEPT) for r in stored["runs"]}
    for arm in arms(study):
        if tuple(getattr(arm, k) for k in KEPT) in done: continue
        row, seen = watched(arm, bench)
        same = row["weights_sha"] == study.rows[arm]["weights_sha"]
        stored["runs"].append({
            "run": row["run"],
            **{k: getattr(arm, k) for k in KEPT},
            "as_in_ledger": same,
            **seen,
            "weights_sha": row["weights_sha"],
        })
        store()
        print(*(getattr(arm, k) for k in KEPT), stored["runs"][-1]["as_in_ledger"], flush=True)
    return 0


if __name__ == "__main__": raise SystemExit(exit_code(main))
