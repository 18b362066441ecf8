"""The README's first table: measures how far it moves between settings of one machine, and checks a
fresh `make demo` against the bounds that it states.

    .ci/first_light.py measure runs/first_light   the demo under every setting; writes the figure and
                                                  nbs/results/first_light*.json (long; goes on)
    .ci/first_light.py draw nbs/images/first_light.png   the figure again, from the stored result
    .ci/first_light.py check runs/demo            exit code 1 where a number of that demo lies outside its bound
"""
import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import t as student_t

from altgrad.basics import COLORS, INK, figure_style, write_atomic
from altgrad.training.experiment import Comparison
from altgrad.views.report import save_figure

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "nbs/results/first_light.json"
SPREAD = ROOT / "nbs/results/first_light_settings.json"
# what makes one machine sum in another order, as another machine would; and with how many of the
# demo's seeds, at most
SETTINGS = {
    "as_is": ({}, 3),
    "aten_default": ({"ATEN_CPU_CAPABILITY": "default"}, 3),
    "mkl_compatible": ({"MKL_CBWR": "COMPATIBLE"}, 1),
    "two_threads": ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}, 1),
}
KEYS = ("val_loss", "gap_nats")


def demo() -> list[str]:
    "The arguments that the Makefile gives to altgrad."
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.search(r"^DEMO := (.*)$", text, re.MULTILINE)[1].split()


def run(folder: Path, environment: dict[str, str], seeds: int) -> Comparison:
    "The demo under a setting; what is finished in the folder is used again."
    altgrad = str(Path(sys.executable).parent / "altgrad")
    own = ["--seeds", str(seeds), "--wandb", "off", "--out", str(folder)]
    # the last --seeds counts
    subprocess.run(
        [altgrad, *demo(), *own],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        check=True,
    )
    return Comparison.load(folder / "comparison.json")


def facts(result: Comparison, environment: dict[str, str]) -> dict[str, Any]:
    "The losses of a comparison and where they come from."
    record = result.baseline["record"]
    return {
        "environment": environment,
        "seeds": result.seeds,
        "losses": {row["name"]: row["val_losses"] for row in result.rows()},
        "machine": record["machine"],
        "versions": record["versions"],
        "git_commit": record["git_commit"],
        "corpus": record["corpus"]["hash"],
    }


def per_seed(measured: dict[str, Any], arm: str, key: str) -> list[float]:
    "An arm's losses, or its gaps to the first arm, one a seed, from the demo's first seed on."
    losses, base = measured["losses"][arm], next(iter(measured["losses"].values()))
    return losses if key == "val_loss" else [a - b for a, b in zip(losses, base, strict=True)]


def bound(settings: dict[str, Any], arm: str, key: str) -> float:
    """How far a mean may lie from the README's elsewhere:
    twice the largest move between settings, and at least what other seeds would do (95 %)."""
    here = per_seed(settings["as_is"], arm, key)
    # over the seeds of the setting
    moves = [
        abs(statistics.fmean(a - b for a, b in zip(per_seed(s, arm, key), here)))
        for s in settings.values()
    ]
    seeds = student_t.ppf(0.975, len(here) - 1) * statistics.stdev(here) * math.sqrt(2 / len(here))
    return math.ceil(100 * max(2 * max(moves), seeds)) / 100


LOOK = {  # name and colour of each way to keep the weights
    "master": ("FP32 master weights", INK),
    "grid_nearest": ("rounded to nearest", COLORS["E5M2"]),
    "grid_stochastic": ("stochastic rounding", COLORS["E0M7"]),
}
SMOOTH = 10  # steps of a mean


def training_gap(result: Comparison, arm: dict[str, Any]) -> np.ndarray:
    "The training loss minus that of master weights, mean over seeds and over `SMOOTH` steps."
    runs, base = ([run["loss"] for run in result.runs(a)] for a in (arm, result.baseline))
    gap = np.subtract(runs, base).mean(0)
    return gap[: len(gap) // SMOOTH * SMOOTH].reshape(-1, SMOOTH).mean(1)


def draw_gap(ax: Any, result: Comparison) -> None:
    "The gap over the steps, and at the end that of the validation loss with its interval."
    ax.plot([0, len(result.baseline["loss"])], [0, 0], color=INK, lw=1)
    for arm, row in zip(result.arms, result.rows()):
        name, color = LOOK[arm["config"]["storage"]]
        if row["is_baseline"]: continue
        gap = training_gap(result, arm)
        end = SMOOTH * len(gap)
        ax.plot(SMOOTH * np.arange(1, len(gap) + 1), gap, color=color, lw=2.5)
        reach = [[row["gap_nats"] - row["gap_low"]], [row["gap_high"] - row["gap_nats"]]]
        ax.errorbar(1.04 * end, row["gap_nats"], reach, fmt="o", color=color, ms=8, lw=2)
        ax.annotate(
            f"{name}\n{row['gap_nats']:+.2f} nats", (1.08 * end, row["gap_nats"]), color=color,
            va="center",
        )
    ax.set_xlim(0, 1.7 * len(result.baseline["loss"]))
    ax.set_xticks(range(0, len(result.baseline["loss"]) + 1, 50))
    ax.set_xlabel("step")
    ax.set_title("loss above master weights' (nats)", loc="left")


def draw_moves(ax: Any, result: Comparison) -> None:
    "The share of the weights that change their code in a step."
    for y, (arm, row) in enumerate(zip(result.arms, result.rows())):
        name, color = LOOK[arm["config"]["storage"]]
        moved = 100 * (1 - row["bit_stall_rate"])
        ax.barh(y, moved, color=color, height=0.5)
        ax.annotate(f" {moved:.1f} %", (moved, y), va="center", color=color)
        ax.annotate(name, (0, y - 0.3), va="bottom", color=color)
    ax.set_ylim(2.5, -0.8)
    ax.set_axis_off()
    ax.set_title("weights whose code changes in a step", loc="left")


def draw(result: Comparison) -> Any:
    "A slide: what each way to keep the weights loses, and how many weights move."
    rows = {a["config"]["storage"]: row for a, row in zip(result.arms, result.rows())}
    row = rows["grid_nearest"]
    finding = f"Rounded to nearest, the weights stand still: {row['gap_nats']:.2f} nats lost"
    if row["within_noise"]: finding = "Three ways to keep 8-bit weights"
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=[3, 2])
    fig.suptitle(finding, fontsize=18)
    draw_gap(axes[0], result)
    draw_moves(axes[1], result)
    return fig


def draw_stored(path: Path) -> int:
    "Draws the figure from the stored result."
    with plt.rc_context({**figure_style(), "font.size": 15, "axes.titlesize": 15}):
        save_figure(draw(Comparison.load(RESULT)), path)
    return 0


def measure(out: Path) -> int:
    "Makes the runs, and stores them with the bounds that follow."
    results = {name: run(out / name, *how) for name, how in SETTINGS.items()}
    settings = {name: facts(result, SETTINGS[name][0]) for name, result in results.items()}
    bounds = {
        row["name"]: {
            key: bound(settings, row["name"], key) for key in KEYS if row[key] is not None
        }
        for row in results["as_is"].rows()
    }
    results["as_is"].save(RESULT)
    draw_stored(ROOT / "nbs/images/first_light.png")
    write_atomic(
        SPREAD,
        json.dumps({"command": " ".join(demo()), "bounds": bounds, "settings": settings}, indent=1)
        + "\n",
    )
    return 0


def check(folder: Path) -> int:
    "Compares a demo with the README's table; one line a number."
    if not (folder / "comparison.json").is_file():
        sys.exit(f"there is no comparison in {folder}: run `make demo` first")
    there = Comparison.load(folder / "comparison.json")
    here = Comparison.load(RESULT)
    stored = json.loads(SPREAD.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in here.rows()}
    if [(row["name"], row["seeds"]) for row in there.rows()] != [
        (name, row["seeds"]) for name, row in rows.items()
    ]:
        print(f"{folder} holds other runs than `make demo` makes", file=sys.stderr)
        return 2
    if there.baseline["record"]["corpus"]["hash"] != here.baseline["record"]["corpus"]["hash"]:
        print("another text (that of another Python): the bounds are for the same text")
    outside = 0
    for row in there.rows():
        for key, allowed in stored["bounds"][row["name"]].items():
            found, stated = row[key], rows[row["name"]][key]
            holds = found is not None and abs(found - stated) <= allowed
            outside += not holds
            value = "none" if found is None else f"{found:.4f}"
            print(
                f"{row['name']:<26} {key:<9} {value}, README {stated:.4f}, may differ by "
                f"{allowed:.2f}: {'holds' if holds else 'OUTSIDE'}"
            )
    return 1 if outside else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("measure", "draw", "check"): sys.exit(__doc__)
    sys.exit({"measure": measure, "draw": draw_stored, "check": check}[sys.argv[1]](Path(sys.argv[2])))
