"""Measures the geometry of real, short training runs for nbs/studies/trained_geometry.ipynb; runs
that are stored already are kept.

python nbs/studies/experiments/trained_geometry.py            # about ten minutes on one thread
"""
import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from altgrad.geometry import optim
from altgrad.basics import write_atomic
from altgrad.numbers.formats import EIGHT_BIT, get_format
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import compute_scale
from altgrad.geometry.spacing import code_coordinate, stiffness
from altgrad.geometry.storage import GridTensor
from altgrad.model.gpt import PRESETS, GPTConfig, loss_of
from altgrad.model.surgery import SKIP
from altgrad.training.data import load_corpus, validation_windows
from altgrad.training.tracking import git_commit, machine, versions
from altgrad.training.config import TrainConfig
from altgrad.training.trainer import Trainer

OUT = Path(__file__).resolve().parents[3] / "nbs/results/trained_geometry.json"
FORMAT, STEPS, EVERY = "E4M3", 200, 10
COMMON = dict(
    format=FORMAT, model="gpt-tiny", max_steps=STEPS, batch_size=16, block_size=64, eval_every=100,
    checkpoint_every=10**6, device="cpu", compute_dtype="float32",
)
RUNS = {  # what differs between the runs; the first two are the trajectories that the others are compared with
    "fp32 adamw": dict(storage="fp32"),
    "master adamw": dict(storage="master"),
    "grid_nearest adamw": dict(storage="grid_nearest"),
    "grid_stochastic adamw": dict(storage="grid_stochastic"),
    "master stiffness_adamw": dict(rule="stiffness_adamw", power=1.0),
    "master riemannian_adamw": dict(rule="riemannian_adamw", rule_lr=0.3),
}
FIELD_LAYERS, FIELD_SIZE = ("blocks.1.attn.qkv", "blocks.1.mlp.fc"), 48
FISHER_MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32)
FISHER_STEPS, FISHER_POSITIONS, SHUFFLES = 600, 96, 20


def short(x: float, digits: int = 3) -> float | None:
    "A number with so many significant digits; None where it is not finite."
    return float(f"{float(x):.{digits}g}") if np.isfinite(float(x)) else None


# the runs


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    "The layers that are, or could be, quantized."
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and name not in SKIP
    }


def value(p: Tensor) -> Tensor:
    "A weight as a plain tensor that later steps do not change."
    return p.dequantize() if isinstance(p, GridTensor) else p.detach().clone()


def scale_of(p: Tensor) -> Tensor:
    "The scale a weight is stored or rounded with."
    return (
        p.scale.clone()
        if isinstance(p, GridTensor)
        else compute_scale(p.detach().abs().amax(), FORMAT)
    )


def correlation(a: Tensor, b: Tensor) -> float:
    "Pearson's correlation; nan where one of them does not vary."
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return (a @ b / (a.norm() * b.norm())).item()


def exponents(w: Tensor) -> Tensor:
    """floor(log2|w|); -99 for zero. The stiffness of a weight in any
    format follows from this and the tensor's amax."""
    return torch.where(w == 0, -99, torch.frexp(w.abs())[1] - 1)


def layer_row(
    old: Tensor, new: Tensor, intended: Tensor, scale: Tensor, g: Tensor, start: Tensor,
    start_scale: Tensor, path: Tensor,
) -> dict[str, float]:
    "What one update did to one layer."
    fmt = get_format(FORMAT)
    u, S = old / scale, stiffness(old / scale, FORMAT)
    both = (g != 0) & (old != 0)
    logs = [t[both].abs().log2() for t in (g, S, old)]
    step = (intended - old).abs() / (S * scale)
    # one ruler, today's
    phi = code_coordinate(new / scale, FORMAT)
    phi0 = code_coordinate(start / scale, FORMAT)
    frozen = new.abs() / start_scale / fmt.max
    return {
        "corr_g_S": correlation(logs[0], logs[1]), "corr_g_w": correlation(logs[0], logs[2]),
        "off_grid": ((u - fake_quantize(u, FORMAT)).abs() / S).mean(),
        "step_median": step.median(), "step_p99": step.quantile(0.99),
        "flips": (fake_quantize(new / scale, FORMAT) != fake_quantize(u, FORMAT)).float().mean(),
        "position": phi.abs().mean(), "net_codes": (phi - phi0).abs().mean(), "path_codes": path.mean(),
        "beyond_last": (new.abs() > fmt.max * scale).float().mean(),
        "top_frozen": frozen.max(), "beyond_frozen": (frozen > 1).float().mean(),
    }


def drift_row(
    weights: list[Tensor], grid: list[Tensor], reference: list[Tensor], start: list[Tensor]
) -> dict[str, float]:
    """The distance to another run's weights at the same step, all layers together:
    relative, and in ulps of the format."""
    size = lambda tensors: torch.stack([t.norm() for t in tensors]).norm()
    difference = [a - b for a, b in zip(weights, reference)]
    ulps = [
        d.abs() / (stiffness(r / s, FORMAT) * s) for d, r, s in zip(difference, reference, grid)
    ]
    return {"relative": size(difference) / size([r - s for r, s in zip(reference, start)]),
            "ulps": torch.cat([x.flatten() for x in ulps]).median()}


def train(name: str, corpus, trajectories: dict) -> dict:
    "One run, measured; its weights at the measured steps go into `trajectories`."
    config = TrainConfig(name=name.replace(" ", "_"), **COMMON, **RUNS[name])
    rows, drift, asked = [], [], {}

    def write(to, w):
        asked[id(to)] = w
        original(to, w)

    original, optim.write = optim.write, write
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(config, folder, corpus)
            layers = linear_layers(trainer.model)
            start, start_scale = (
                {n: f(m.weight) for n, m in layers.items()} for f in (value, scale_of)
            )
            field = {"before": fields_of(start)}
            old = dict(start)
            scale = dict(start_scale)
            path = {n: torch.zeros_like(w) for n, w in start.items()}
            trajectories[name] = {0: list(start.values())}
            losses, val = [], {}
            for row in trainer.steps():
                step = row["step"]
                losses.append(short(row["loss"], 5))
                if "val_loss" in row: val[step] = row["val_loss"]
                new, new_scale = (
                    {n: f(m.weight) for n, m in layers.items()} for f in (value, scale_of)
                )
                for n in layers:
                    path[n] += (
                        code_coordinate(new[n] / new_scale[n], FORMAT)
                        - code_coordinate(old[n] / new_scale[n], FORMAT)
                    ).abs()
                if step == 1 or step % EVERY == 0:
                    for n, m in layers.items():
                        intended = asked.get(id(m.weight), new[n])
                        found = layer_row(
                            old[n], new[n], intended, scale[n], m.weight.grad, start[n],
                            start_scale[n], path[n],
                        )
                        rows.append(
                            {"step": step, "layer": n} | {k: short(v) for k, v in found.items()}
                        )
                    trajectories[name][step] = list(new.values())
                    for other in list(RUNS)[:2]:
                        if other == name or other not in trajectories: continue
                        found = drift_row(
                            list(new.values()), list(new_scale.values()), trajectories[other][step],
                            trajectories[other][0],
                        )
                        drift.append(
                            {"step": step, "from": other} | {k: short(v) for k, v in found.items()}
                        )
                old, scale = new, new_scale
            field["after"] = fields_of(new)
    finally: optim.write = original
    columns = {
        n: {
            key: [row[key] for row in rows if row["layer"] == n]
            for key in rows[0]
            if key not in ("step", "layer")
        }
        for n in layers
    }
    steps = [row["step"] for row in rows if row["layer"] == next(iter(layers))]
    if name != "master adamw":
        field = {
            when: {n: {**f, "slice": None} for n, f in part.items()} for when, part in field.items()
        }
    return {
        "config": asdict(config), "loss": losses, "val_loss": val, "steps": steps,
        "layers": columns, "drift": drift, "field": field, **circumstances(corpus),
    }


def fields_of(weights: dict[str, Tensor]) -> dict:
    """For every layer its amax and how many weights have which binary exponent;
    for some a corner of the matrix of exponents."""
    out = {}
    for name, w in weights.items():
        e, count = exponents(w).unique(return_counts=True)
        corner = exponents(w)[:FIELD_SIZE, :FIELD_SIZE].tolist() if name in FIELD_LAYERS else None
        out[name] = {
            "amax": w.abs().amax().item(),
            "exponents": dict(zip(e.tolist(), count.tolist())),
            "slice": corner,
        }
    return out


def circumstances(corpus) -> dict:
    return {
        "corpus": corpus.facts(), "versions": versions(), "machine": machine(),
        "git_commit": git_commit(),
    }


# the Fisher information


def diagonal_fisher(
    model: nn.Module,  # tokens [1, T] to logits [1, T, V]
    x: Tensor,  # int64 [N, T]
    positions: Tensor,  # int64 [N]: which position's prediction counts, one a sequence
    names: list[str],  # of the parameters
    chunk: int = 64,  # classes at a time
) -> list[dict[str, Tensor]]:  # one a sequence; their mean is the Fisher information over these contexts
    """Sum over all classes y of p(y|x) (d log p(y|x) / dw)^2:
    the expectation over y is exact, nothing is sampled."""
    everything = {n: p.detach() for n, p in model.named_parameters()}
    chosen, out = {n: everything[n] for n in names}, []
    for tokens, t in zip(x, positions.tolist()):
        def log_p(w, tokens=tokens, t=t):
            return functional_call(model, {**everything, **w}, (tokens[None, : t + 1],))[
                0, t
            ].log_softmax(-1)
        with sdpa_kernel(SDPBackend.MATH):
            value, pull = vjp(log_p, chosen)
            total = {n: torch.zeros_like(p) for n, p in chosen.items()}
            # sqrt(p) on the diagonal: the square of the gradient then carries p
            roots = (value / 2).exp().diag()
            for part in roots.split(chunk):
                for n, gradient in vmap(pull)(part)[0].items(): total[n] += gradient.square().sum(0)
        out.append(total)
    return out


def ranks(x: np.ndarray) -> np.ndarray:
    "Ranks, equal values with their mean rank."
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    "Spearman's rank correlation; nan where one of them is constant."
    a, b = ranks(a) - ranks(a).mean(), ranks(b) - ranks(b).mean()
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if size else float("nan")


def rows_and_columns(z: np.ndarray) -> np.ndarray:
    "The part of a matrix that row and column effects explain."
    return z.mean(0, keepdims=True) + z.mean(1, keepdims=True) - z.mean()


def compare(
    w: np.ndarray, F: np.ndarray, halves: list[np.ndarray], rng: np.random.Generator
) -> dict:
    """One layer: the rank correlation and slope of log F against log 1/S^2 for every format,
    and what to compare them with."""
    seen = (F > 0) & (w != 0)
    logs = np.log2(np.where(F > 0, F, F[F > 0].min()))
    frame = rows_and_columns(logs)
    out = {
        "zero_fisher": float((F == 0).mean()),
        "spread_octaves": float(np.subtract(*np.quantile(logs, [0.95, 0.05]))),
        "halves": spearman(*[h[seen] for h in halves]),
        "rows_columns": float(frame.var() / logs.var()),
        "size": spearman(F[seen], -np.abs(w[seen])),
        "size_within": spearman((logs - frame)[seen], -np.abs(w[seen])),
        "formats": {},
    }
    for name in EIGHT_BIT:
        scale = compute_scale(torch.tensor(np.abs(w).max()), name).item()
        metric = -2 * np.log2(stiffness(torch.from_numpy(w / scale), name).numpy() * scale)
        x, y = metric[seen], logs[seen]
        null = [spearman(y, rng.permutation(x)) for _ in range(SHUFFLES)]
        varies = x.std() > 0
        out["formats"][name] = {
            "spearman": spearman(y, x),
            "within": spearman((logs - frame)[seen], x),
            "slope": np.polyfit(x, y, 1)[0] if varies else np.nan,
            "r2": np.corrcoef(x, y)[0, 1] ** 2 if varies else np.nan,
            "null_std": np.std(null),
            "null_max": np.abs(null).max(),
            "spread": np.subtract(*np.quantile(x, [0.95, 0.05])),
        }
        out["formats"][name] = {k: short(v) for k, v in out["formats"][name].items()}
    x, y = np.floor(2 * np.log2(np.abs(w[seen]))) / 2, np.floor(logs[seen])
    xs, ys = np.arange(x.min(), x.max() + 1, 0.5).clip(-18), np.arange(y.min(), y.max() + 1)
    xs = xs[xs > -18] if (xs > -18).any() else xs
    table = [[int(((x == a) & (y == b)).sum()) for a in xs] for b in ys]
    return {k: v if isinstance(v, dict) else short(v) for k, v in out.items()} | {
        "x": xs.tolist(), "y": ys.tolist(), "table": table
    }


def fisher(corpus) -> dict:
    """The Fisher information of a small GPT before and after training without quantization,
    against every format's metric."""
    PRESETS["study-2x64"] = FISHER_MODEL
    config = TrainConfig(
        name="fisher", format=None, model="study-2x64", max_steps=FISHER_STEPS, batch_size=32,
        block_size=32, eval_every=FISHER_STEPS, checkpoint_every=10**6, device="cpu",
        compute_dtype="float32",
    )
    x, y = validation_windows(corpus.val, config.block_size, FISHER_POSITIONS)
    positions = torch.arange(len(x)) % config.block_size
    positions = positions[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    out = {
        "config": asdict(config), "shape": asdict(FISHER_MODEL), "positions": len(x),
        "shuffles": SHUFFLES, **circumstances(corpus),
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, folder, corpus)
        out["before"] = fisher_of(trainer.model, x, y, positions)
        # only the trained model's is drawn
        for layer in out["before"]["layers"].values(): layer["table"] = None
        *_, row = trainer.steps()
        out["val_loss"] = row["val_loss"]
        out["after"] = fisher_of(trainer.model, x, y, positions)
    return out


def fisher_of(model: nn.Module, x: Tensor, y: Tensor, positions: Tensor) -> dict:
    "Every linear layer compared, and the loss of the model on the same windows."
    model.eval()
    names, rng = [f"{n}.weight" for n in linear_layers(model)], np.random.default_rng(0)
    each = diagonal_fisher(model, x, positions, names)
    mean = lambda part, n: torch.stack([f[n].double() for f in part]).mean(0).numpy()
    weights = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
    with torch.no_grad(): loss = loss_of(model, x, y).item()
    layers = {
        n: compare(weights[n], mean(each, n), [mean(each[0::2], n), mean(each[1::2], n)], rng)
        for n in names
    }
    model.train()
    return {"loss": loss, "layers": layers}


# everything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=OUT,
        help="the file of results; runs that it holds are not repeated",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    stored = (
        json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {"runs": {}}
    )
    corpus, trajectories = load_corpus("stdlib"), {}

    def store():
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.out, json.dumps(stored, separators=(",", ":"), allow_nan=False) + "\n")

    if "fisher" not in stored:
        stored["fisher"] = fisher(corpus)
        store()
    for number, name in enumerate(RUNS):
        missing = [n for n in RUNS if n not in stored["runs"]]
        # the first two are made again where others need their weights
        if name not in missing and not (number < 2 and missing): continue
        print(name, flush=True)
        found = train(name, corpus, trajectories)
        if name in missing: stored["runs"][name] = found
        store()
    return 0


if __name__ == "__main__": raise SystemExit(main())
