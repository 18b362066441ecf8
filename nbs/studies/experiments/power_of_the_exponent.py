"""Which split of seven bits suits which tensor, for nbs/studies/power_of_the_exponent.ipynb: in
theory, and in a trained GPT.

python nbs/studies/experiments/power_of_the_exponent.py            # a few minutes on one thread
"""
import argparse
import copy
import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch import Tensor, nn

from altgrad.basics import write_atomic
from altgrad.numbers.choosing import profile_of, recommend_format, sqnr_db
from altgrad.numbers.formats import EIGHT_BIT, FP8Format, get_format
from altgrad.numbers.scaling import scale_of
from altgrad.model.gpt import loss_of
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.training.data import get_batch, load_corpus
from altgrad.training.tracking import git_commit, machine, versions
from altgrad.training.config import TrainConfig
from altgrad.training.trainer import Trainer, evaluate

OUT = Path(__file__).resolve().parents[3] / "nbs/results/power_of_the_exponent.json"
FREEDOM = (2, 2.5, 3, 4, 5, 6, 8, 12, 20, 50)  # of Student's t
CONFIG = TrainConfig(
    name="power", format=None, model="gpt-tiny", max_steps=600, batch_size=16, block_size=64,
    eval_every=300, checkpoint_every=10**6, device="cpu", compute_dtype="float32",
)
SAMPLE = 2**17  # elements of a tensor that are measured, at most


def short(x: float, digits: int = 5) -> float | None:
    "A number with so many significant digits; None where it is not finite."
    return float(f"{float(x):.{digits}g}") if math.isfinite(float(x)) else None


# in theory


def gaussian(x: np.ndarray) -> np.ndarray: return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def student(freedom: float) -> Callable[[np.ndarray], np.ndarray]:
    "The density of Student's t."
    front = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(
        math.pi * freedom
    )
    return lambda x: front * (1 + x * x / freedom) ** (-(freedom + 1) / 2)


def densities() -> dict[str, tuple[Callable, float]]:
    """Symmetric densities, each with the magnitude at which it is clipped,
    as in the authors' program."""
    return {"uniform": (lambda x: np.full_like(x, 0.5), 1.0), "Gaussian": (gaussian, 10.0)} | {
        f"t{v:g}": (student(v), 100.0) for v in FREEDOM
    }


NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)


def expected_error(
    fmt: FP8Format,
    density: Callable,  # of a symmetric distribution
    limit: float,  # values beyond are put there
    scale: float,
) -> tuple[float, float]:  # mean squared error of rounding to nearest with saturation, and mean square
    """Both as integrals: Gauss-Legendre on every piece between midpoints of the
    format's values, pieces at most a quarter octave wide."""
    values = fmt.values[: fmt.last_finite + 1].double().numpy() * scale
    middle = (values[1:] + values[:-1]) / 2
    edges = np.concatenate([[0.0, limit], middle, limit * 2.0 ** -np.arange(0, 20, 0.25)])
    edges = np.unique(edges[edges <= limit])
    half, centre = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    x = centre[:, None] + half[:, None] * NODES
    mass = 2 * half[:, None] * WEIGHTS * density(x)  # both signs
    beyond = max(0.0, 1 - mass.sum())
    error = (x - values[np.searchsorted(middle, x)]) ** 2
    return (mass * error).sum() + beyond * (limit - values[np.searchsorted(middle, limit)]) ** 2, (
        mass * x * x
    ).sum() + beyond * limit**2


def best_expected(fmt: FP8Format, density: Callable, limit: float) -> dict[str, float]:
    """The smallest error over scales, to a 64th of an octave;
    the limit over the format's max is the scale that clips nothing."""
    scales = limit / fmt.max * 2.0 ** -np.arange(-1, 9, 1 / 64)
    errors = [expected_error(fmt, density, limit, s) for s in scales]
    best = min(range(len(scales)), key=lambda i: errors[i][0])
    error, square = errors[best]
    return {
        "mse": short(error, 6),
        "sqnr": short(10 * math.log10(square / error)),
        "range": short(scales[best] * fmt.max),
    }


def theory() -> dict:
    "Every density and every split; the mean square and the kurtosis of each density."
    out = {}
    for name, (density, limit) in densities().items():
        x = np.concatenate([[0], limit * 2.0 ** -np.arange(0, 24, 0.01)[::-1]])
        nodes = (x[1:] + x[:-1])[:, None] / 2 + np.diff(x)[:, None] / 2 * NODES
        mass = np.diff(x)[:, None] * WEIGHTS * density(nodes)
        beyond = max(0.0, 1 - mass.sum())
        square, fourth = ((mass * nodes**k).sum() + beyond * limit**k for k in (2, 4))
        out[name] = {"limit": limit, "mean_square": short(square), "kurtosis": short(fourth / square**2),
                     "formats": {f: best_expected(get_format(f), density, limit) for f in EIGHT_BIT}}
    return out


def crossing(few: str = "E2M5", more: str = "E3M4") -> dict[str, float]:
    """Degrees of freedom of the Student's t at which two splits keep the same;
    heavier tails than that want the one with more range."""
    low, high = 5.0, 20.0
    for _ in range(12):
        at = (low + high) / 2
        kept = [best_expected(get_format(f), student(at), 100.0)["sqnr"] for f in (few, more)]
        low, high = (at, high) if kept[0] < kept[1] else (low, at)
    return {"formats": [few, more], "freedom": short(at, 4), "kurtosis": short(3 + 6 / (at - 4), 4)}


# in a trained model


def tensors_of(trainer: Trainer) -> dict[tuple[str, str], Tensor]:
    """The weight, the input and the gradient of the output of every linear layer,
    on a batch that training did not reach."""
    c, found, hooks = trainer.config, {}, []
    for name, m in trainer.model.named_modules():
        if not isinstance(m, nn.Linear): continue
        found[name, "weight"] = m.weight.detach().clone()
        hooks.append(
            m.register_forward_pre_hook(
                lambda m, x, name=name: found.__setitem__((name, "activation"), x[0].detach())
            )
        )
        hooks.append(
            m.register_full_backward_hook(
                lambda m, gi, go, name=name: found.__setitem__((name, "gradient"), go[0].detach())
            )
        )
    x, y = get_batch(trainer.corpus.train, c.batch_size, c.block_size, c.seed, c.max_steps + 1, 0)
    loss_of(trainer.model, x, y).backward()
    for hook in hooks: hook.remove()
    trainer.model.zero_grad(set_to_none=True)
    return found


def measure(x: Tensor) -> dict:
    """What each format keeps of a tensor: under its best scale, amax's power of two,
    and exact amax scales of rows and of blocks of 32."""
    scores = {row.format: row for row in recommend_format(x, sample=SAMPLE)}
    rows = x.flatten(0, -2)
    fine = {
        g: {f: sqnr_db(rows, f, scale_of(rows, f, g, kind="exact")) for f in EIGHT_BIT}
        for g in ("channel", 32)
    }
    return {"elements": x.numel(), "profile": {k: short(v, 4) for k, v in asdict(profile_of(x)).items()},
            "best": [short(scores[f].sqnr) for f in EIGHT_BIT], "amax": [short(scores[f].at_amax) for f in EIGHT_BIT],
            "row": [short(fine["channel"][f]) for f in EIGHT_BIT], "block": [short(fine[32][f]) for f in EIGHT_BIT]}


def measure_all(trainer: Trainer) -> list[dict]:
    found = []
    for (layer, kind), x in sorted(tensors_of(trainer).items(), key=lambda item: item[0][1]):
        print(" ", kind, layer, flush=True)
        found.append({"layer": layer, "kind": kind} | measure(x))
    return found


def losses(trainer: Trainer, measured: list[dict]) -> dict[str, float]:
    """Validation loss with the linear weights rounded to one format after training,
    and with each layer in its weight's best one."""
    plain, out = trainer.model, {"float32": evaluate(trainer)["val_loss"]}
    best = {
        row["layer"]: EIGHT_BIT[int(np.argmax(row["amax"]))]
        for row in measured
        if row["kind"] == "weight" and row["layer"] != "lm_head"
    }
    mixed = PrecisionConfig([LayerPrecisionRule(layer, fmt) for layer, fmt in best.items()])
    for name, how in [*((f, {"format": f}) for f in EIGHT_BIT), ("mixed", {"config": mixed})]:
        trainer.model = copy.deepcopy(plain)
        quantize_model(trainer.model, **how)
        out[name] = evaluate(trainer)["val_loss"]
    trainer.model = plain
    return {k: short(v, 7) for k, v in out.items()}


def trained() -> dict:
    "A short training run without quantization, its tensors measured before and after."
    corpus = load_corpus(CONFIG.data)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(CONFIG, folder, corpus)
        out = {"config": asdict(CONFIG), "before": measure_all(trainer)}
        for row in trainer.steps():
            if row["step"] % 100 == 0:
                print(f"step {row['step']}: loss {row['loss']:.3f}", flush=True)
        out |= {"val_loss": row["val_loss"], "after": measure_all(trainer)}
        return out | {
            "rounded": losses(trainer, out["after"]),
            "sample": SAMPLE,
            "corpus": corpus.facts(),
            "seed": CONFIG.seed,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the file of results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stored = {"formats": list(EIGHT_BIT), "theory": theory(), "crossing": crossing(), "model": trained(),
              "versions": versions(), "machine": machine(), "git_commit": git_commit()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out, json.dumps(stored, separators=(",", ":"), allow_nan=False) + "\n")
    return 0


if __name__ == "__main__": raise SystemExit(main())
