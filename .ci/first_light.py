"""The README's first table: measures how far it moves between settings of one machine, and checks a
fresh `make demo` against the bounds that it states.

    .ci/first_light.py measure runs/first_light   the demo under every setting; writes the figure and
                                                  nbs/results/first_light*.json (long; goes on)
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

from scipy.stats import t as student_t

from altgrad.basics import write_atomic
from altgrad.training.experiment import Comparison
from altgrad.views.report import plot_comparison, save_figure

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
    save_figure(plot_comparison(results["as_is"]), ROOT / "nbs/images/first_light.png")
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
    if len(sys.argv) != 3 or sys.argv[1] not in ("measure", "check"): sys.exit(__doc__)
    sys.exit({"measure": measure, "check": check}[sys.argv[1]](Path(sys.argv[2])))
