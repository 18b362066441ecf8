"""From the runs of sizes to those of ten million: which of their differences ends the cost of noise?

python nbs/studies/experiments/bridge.py --out FOLDER [--settings NAME,...] [--workers N]
python nbs/studies/experiments/bridge.py --out FOLDER --store

The first makes the runs that are neither stored nor in FOLDER/ledger.jsonl, in the order of the
protocol, and goes on where it was stopped. The second adds them to nbs/results/bridge.jsonl, for the page
nbs/studies/bridge.ipynb, which says what is expected.
"""
import argparse
import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import torch
from torch import nn

from altgrad.basics import tell, unknown, write_atomic
from altgrad.evidence.instrument import (
    RECIPES, Arm, Bench, Task, Weights, blank_model, make_rule, piece_losses, ramp, validation_pieces,
)
from altgrad.evidence.sweep import Ledger, beside
from altgrad.model.gpt import GPT, PRESETS, GPTConfig, loss_of
from altgrad.training.data import get_batch
from altgrad.training.experiment import Interval, find_config, interval
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.training.trainer import lr_at

sys.path.append(str(Path(__file__).parent))
import sizes

HERE = Path(__file__).resolve().parents[2] / "results/bridge.jsonl"
SMALL, LARGE = sizes.PARTS["1200"], find_config("ten_million/bf16_baseline")  # the two ends
SEEDS = sizes.every_seed(SMALL)
ARMS = {"master": "E7M0 master", "stochastic": "E7M0 stochastic", "S^-1": "E7M0 S^p"}
WIDER = PRESETS[LARGE.model].n_embd / sizes.width(SMALL.size)  # so much, than the runs here
ONE_RATE = {"master": LARGE.lr, "stochastic": LARGE.lr, "S^-1": 2 * LARGE.lr}  # of ten million


@dataclass(frozen=True)
class Setting:
    "How a model of 0.4M is made and trained; as in the study of sizes where nothing is said."
    layers: int = RECIPES[SMALL.recipe].n_layer
    context: int = RECIPES[SMALL.recipe].block_size  # bytes
    first: str = "root"  # first weights of 1 / sqrt(inputs); small: 0.02, and less where a branch ends
    loop: str = "sizes"  # linear to zero; ten_million: a cosine to a tenth, decay and clipping
    rates: str = "tuned"  # for each arm; alike: those of ten million, in proportion to one over the width


CHANGES: dict[str, dict[str, Any]] = {
    "first weights": {"first": "small"},
    "rates": {"rates": "alike"},
    "loop": {"loop": "ten_million"},
    "layers": {"layers": PRESETS[LARGE.model].n_layer},
    "context": {"context": LARGE.block_size},
}
ALL = Setting(**{key: value for change in CHANGES.values() for key, value in change.items()})


def undone(change: Mapping[str, Any]) -> dict[str, Any]:
    "The values that a change replaces."
    return {key: getattr(Setting(), key) for key in change}


SETTINGS = {  # in the order of the runs
    "sizes": Setting(),
    **{f"with {name}": replace(Setting(), **change) for name, change in CHANGES.items()},
    "all": ALL,
    **{f"all but {name}": replace(ALL, **undone(change)) for name, change in CHANGES.items()},
}


# a run


def first_model(setting: Setting, seed: int) -> GPT:
    "The model before its first update."
    recipe = replace(RECIPES[SMALL.recipe], n_layer=setting.layers, block_size=setting.context)
    torch.manual_seed(seed)
    if setting.first == "root": return blank_model(recipe)
    return GPT(GPTConfig(n_layer=recipe.n_layer, n_head=recipe.n_head, n_embd=recipe.n_embd,
                         block_size=recipe.block_size))


@cache
def tuned() -> dict[str, float]:
    "The rates of the study of sizes."
    found = sizes.tuned_in(sizes.stored(), SMALL.tuned)
    return {arm: sizes.transferred(found[name].lr, SMALL.size, sizes.PARTS[SMALL.tuned].size)
            for arm, name in ARMS.items()}


def rates(setting: Setting, arm: str) -> tuple[float, float]:
    "The peak rates of an arm's block weights, and of the rest."
    if setting.rates == "tuned": return tuned()[arm], RECIPES[SMALL.recipe].lr
    return ONE_RATE[arm] * WIDER, LARGE.lr * WIDER


def planned(setting: Setting, arm: str, seed: int) -> Arm:
    "The run as the instrument says it."
    rate, base = rates(setting, arm)[0], LARGE.lr * WIDER
    decay = LARGE.weight_decay * base / rate if setting.loop == "ten_million" else 0.0  # as fast for all
    return replace(sizes.ARMS[ARMS[arm]], lr=rate, weight_decay=decay, seed=seed, split="confirm",
                   checkpoint=f"{SMALL.recipe}-{seed}")


def share(setting: Setting, step: int, task: Task) -> float:
    "The share of the peak rate at an update."
    if setting.loop == "sizes": return ramp(step, task.steps, task.warmup)
    steps = {"warmup_steps": task.warmup, "max_steps": task.steps}
    return lr_at(step, replace(LARGE, lr=1.0, **steps))


def rest_rule(setting: Setting, rest: list[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    "AdamW over embeddings and norms; what has one dimension does not decay."
    decay = LARGE.weight_decay if setting.loop == "ten_million" else 0.0
    groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay},
              {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(task.beta1, task.beta2), eps=task.eps, foreach=False)


def train(setting: Setting, arm: str, seed: int, bench: Bench) -> tuple[GPT, list[float]]:
    "The model after its updates, and the loss of each batch, to the first that is not finite."
    run, task, losses = planned(setting, arm, seed), bench.task, []
    model = first_model(setting, seed)
    weights = Weights(model, run)
    rule, rest = make_rule(run, weights.stored, task), rest_rule(setting, weights.rest, task)
    tokens, both = bench.corpus(run.corpus).train, weights.used + weights.rest
    for step in range(1, task.steps + 1):
        for group in rule.param_groups: group["lr"] = run.lr * share(setting, step, task)
        for group in rest.param_groups: group["lr"] = rates(setting, arm)[1] * share(setting, step, task)
        for p in both: p.grad = None
        loss = loss_of(model, *get_batch(tokens, task.batch_size, setting.context, seed, step))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]): break
        loss.backward()
        if setting.loop == "ten_million": nn.utils.clip_grad_norm_(both, LARGE.grad_clip)
        weights.update(rule)
        rest.step()
    return model, losses


def validate(model: GPT, run: Arm, bench: Bench) -> float:
    "Validation loss in nats a byte."
    pieces = validation_pieces(bench.corpus(run.corpus).val, run.split, model.config.block_size, bench.task)
    return sum(piece_losses(model.eval(), *pieces, bench.task.chunks)) / bench.task.chunks


def bench_of(task: Task = SMALL.task) -> Bench:
    "The text of the study of sizes; no checkpoint is read."
    return Bench(data=beside(sizes.RESULTS / "ledger")[0], task=task)


Run = tuple[str, str, int]  # setting, arm and seed


def run_id(run: Run) -> str: return "/".join(map(str, run))


def make_run(run: Run, bench: Bench | None = None) -> dict[str, Any]:
    "The row of a run."
    (name, arm, seed), began, bench = run, time.perf_counter(), bench or bench_of()
    setting, plan = SETTINGS[name], planned(SETTINGS[name], arm, seed)
    model, losses = train(setting, arm, seed, bench)
    ended = math.isfinite(losses[-1])
    return {
        "run": run_id(run), "setting": name, "arm": arm, **asdict(plan), "rest_lr": rates(setting, arm)[1],
        "how": asdict(setting), "task": asdict(bench.task), "diverged": not ended,
        "val_loss": validate(model, plan, bench) if ended else math.log(256), "steps": len(losses),
        "corpus_sha": bench.corpus(plan.corpus).hash, "seconds": round(time.perf_counter() - began, 3),
        "commit": code_commit(), "machine": machine("cpu"), "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# all runs


def stored(path: Path = HERE) -> list[dict[str, Any]]:
    "The rows that the page shows."
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def every_run(names: Iterable[str] = SETTINGS) -> list[Run]:
    "The runs of settings, seed by seed; InputError for a name that is none."
    for name in (names := list(names)):
        if name not in SETTINGS: raise unknown("setting", name, SETTINGS)
    return [(name, arm, seed) for name, seed, arm in product(names, SEEDS, ARMS)]


def make_runs(out: Path, names: Iterable[str], workers: int, path: Path = HERE) -> None:
    "Makes the runs that are missing, and keeps each as it ends."
    ledger = Ledger(out)
    known = {row["run"] for row in (*stored(path), *ledger.rows())}
    jobs = [run for run in every_run(names) if run_id(run) not in known]
    bench_of().corpus("eurlex")  # prepared once, before the workers ask for it
    pool = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
    with ledger.writing() as append, pool:
        waiting = [pool.submit(make_run, run) for run in jobs]
        for number, future in enumerate(as_completed(waiting), 1):
            append(row := future.result())
            tell(f"{number} of {len(jobs)}: {row['run']} ends at {row['val_loss']:.4f}, {row['seconds']:.0f} s")


def store(out: Path, path: Path = HERE) -> None:
    "Adds the rows of a folder to those that are stored, in the order of the plan."
    rows = {row["run"]: row for row in (*stored(path), *Ledger(out).rows())}
    order = [run_id(run) for run in every_run()]
    lines = [json.dumps(rows[run]) for run in order if run in rows]
    write_atomic(path, "".join(f"{line}\n" for line in lines))


# what was said, and what was found

Losses = Mapping[str, Mapping[str, Mapping[int, float]]]  # by setting, arm and seed
MARGIN = sizes.MARGIN
HALF = 0.5  # of the cost at `sizes`: a change that takes away more, or adds more, decides


def losses_of(rows: Iterable[Mapping[str, Any]]) -> Losses:
    "The losses of the settings whose runs are all there."
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        arms = found.setdefault(row["setting"], {arm: {} for arm in ARMS})
        arms[row["arm"]][row["seed"]] = row["val_loss"]
    whole = {name for name, arms in found.items() if all(set(by) == set(SEEDS) for by in arms.values())}
    return {name: found[name] for name in SETTINGS if name in whole}


def differences(losses: Losses, name: str, arm: str, other: str) -> list[float]:
    "How far an arm ends above another, for each seed."
    return [losses[name][arm][seed] - losses[name][other][seed] for seed in SEEDS]


def costs(losses: Losses, name: str) -> list[float]: return differences(losses, name, "stochastic", "master")
def gains(losses: Losses, name: str) -> list[float]: return differences(losses, name, "stochastic", "S^-1")


def left(losses: Losses, name: str) -> list[float]:
    "The cost in a setting as a share of that in `sizes`, for each seed."
    return [there / here for there, here in zip(costs(losses, name), costs(losses, "sizes"))]


@dataclass(frozen=True)
class Claim:
    "A sentence that runs can refute: numbers, one for each seed, and where their mean is said to lie."
    text: str
    setting: str
    numbers: Callable[[Losses, str], list[float]]
    least: float = -math.inf
    most: float = math.inf

    def found(self, losses: Losses) -> Interval | None:
        "What was found; None before the runs are made."
        if not {self.setting, "sizes"} <= set(losses): return None
        return interval(self.numbers(losses, self.setting))

    def verdict(self, losses: Losses) -> str:
        found = self.found(losses)
        return found.within(self.least, self.most) if found else "not run"


CLAIMS = (
    Claim(f"With all changes stochastic rounding ends at most {MARGIN} nats above master weights",
          "all", costs, most=MARGIN),
    Claim(f"With all changes S^-1 gains at most {MARGIN} nats", "all", gains, most=MARGIN),
    Claim("First weights alone leave at most half of the cost", "with first weights", left, most=HALF),
    *(Claim(f"The change of {name} alone leaves half to one and a half times the cost", f"with {name}", left,
            HALF, 1 + HALF) for name in CHANGES if name != "first weights"),
    Claim("All changes but that of first weights leave at least half of the cost", "all but first weights", left,
          least=HALF),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--store", action="store_true", help="add what is finished to the stored rows")
    args = parser.parse_args()
    if args.store: store(args.out)
    else: make_runs(args.out, args.settings.split(","), args.workers)
    return 0


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
