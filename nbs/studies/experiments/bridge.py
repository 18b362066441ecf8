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
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Callable, Iterable, Mapping

import torch
from torch import nn

from altgrad.basics import InputError, tell, unknown, write_atomic
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
SEEDS = tuple(range(sizes.FIRST_SEED, sizes.FIRST_SEED + 8))
ARMS = {"master": "E7M0 master", "stochastic": "E7M0 stochastic", "S^-1": "E7M0 S^p"}
SHAPE, WIDTH = PRESETS[LARGE.model], sizes.width(SMALL.size)
WIDER = SHAPE.n_embd / WIDTH  # ten million, than the runs here
ONE_RATE = {"master": LARGE.lr, "stochastic": LARGE.lr, "S^-1": 2 * LARGE.lr}  # of ten million
BYTES = SMALL.batch * RECIPES[SMALL.recipe].block_size  # of an update


@dataclass(frozen=True)
class Setting:
    "How a model is made and trained; as in the study of sizes where nothing is said."
    layers: int = RECIPES[SMALL.recipe].n_layer
    heads: int = RECIPES[SMALL.recipe].n_head
    context: int = RECIPES[SMALL.recipe].block_size  # bytes; an update reads as many of them in every setting
    first: str = "root"  # first weights: 1 / sqrt(inputs); small: those of ten million, in proportion to that root
    loop: str = "sizes"  # linear to zero; ten_million: a cosine to a tenth, decay and clipping
    rates: str = "tuned"  # for each arm; half: half of these; alike: those of ten million, by one over the width


CHANGES: dict[str, dict[str, Any]] = {
    "first weights": {"first": "small"},
    "rates": {"rates": "alike"},
    "loop": {"loop": "ten_million"},
    "blocks": {"layers": SHAPE.n_layer, "heads": SHAPE.n_head * WIDTH // SHAPE.n_embd},  # heads as wide
    "context": {"context": LARGE.block_size},
}
ALL = Setting(**{key: value for change in CHANGES.values() for key, value in change.items()})


def undone(change: Mapping[str, Any]) -> dict[str, Any]:
    "The values that a change replaces."
    return {key: getattr(Setting(), key) for key in change}


HALVED = "with blocks at half the rates"
SETTINGS = {  # in the order of the runs
    "sizes": Setting(),
    **{f"with {name}": replace(Setting(), **change) for name, change in CHANGES.items()},
    "all": ALL,
    HALVED: Setting(**CHANGES["blocks"], rates="half"),
    **{f"all but {name}": replace(ALL, **undone(change)) for name, change in CHANGES.items()},
}


# a run


def first_model(setting: Setting, seed: int) -> GPT:
    "The model before its first update."
    recipe = replace(RECIPES[SMALL.recipe], n_layer=setting.layers, n_head=setting.heads,
                     block_size=setting.context)
    torch.manual_seed(seed)
    if setting.first == "root": return blank_model(recipe)
    model = GPT(GPTConfig(n_layer=recipe.n_layer, n_head=recipe.n_head, n_embd=recipe.n_embd,
                          block_size=recipe.block_size))
    for m in model.blocks.modules():
        if isinstance(m, nn.Linear): m.weight.data *= math.sqrt(WIDER)
    return model


@cache
def tuned() -> dict[str, float]:
    "The rates of the study of sizes."
    found = sizes.tuned_in(sizes.stored(), SMALL.tuned)
    return {arm: sizes.transferred(found[name].lr, SMALL.size, sizes.PARTS[SMALL.tuned].size)
            for arm, name in ARMS.items()}


def rates(setting: Setting, arm: str) -> tuple[float, float]:
    "The peak rates of an arm's block weights, and of the rest."
    if setting.rates == "alike": return ONE_RATE[arm] * WIDER, LARGE.lr * WIDER
    part = {"tuned": 1.0, "half": 0.5}[setting.rates]
    return part * tuned()[arm], part * RECIPES[SMALL.recipe].lr


def decay_at(setting: Setting, rate: float) -> float:
    "The decay of weights with a peak rate: an update takes as much of them as at ten million."
    return LARGE.weight_decay * LARGE.lr / rate if setting.loop == "ten_million" else 0.0


def planned(setting: Setting, arm: str, seed: int) -> Arm:
    "The run as the instrument says it."
    rate = rates(setting, arm)[0]
    return replace(sizes.ARMS[ARMS[arm]], lr=rate, weight_decay=decay_at(setting, rate), seed=seed, split="confirm",
                   checkpoint=f"{SMALL.recipe}-{seed}")


def share(setting: Setting, step: int, task: Task) -> float:
    "The share of the peak rate at an update."
    if setting.loop == "sizes": return ramp(step, task.steps, task.warmup)
    steps = {"warmup_steps": task.warmup, "max_steps": task.steps}
    return lr_at(step, replace(LARGE, lr=1.0, **steps))


def rest_rule(setting: Setting, rate: float, rest: list[nn.Parameter], task: Task) -> torch.optim.Optimizer:
    "AdamW over embeddings and norms; what has one dimension does not decay."
    decay = decay_at(setting, rate)
    groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay},
              {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(task.beta1, task.beta2), eps=task.eps, foreach=False)


def train(setting: Setting, run: Arm, rest_lr: float, bench: Bench) -> tuple[GPT, list[float]]:
    "The model after its updates, and the loss of each batch, to the first that is not finite."
    task, losses, seed = bench.task, [], run.seed
    model = first_model(setting, seed)
    weights = Weights(model, run)
    rule, rest = make_rule(run, weights.stored, task), rest_rule(setting, rest_lr, weights.rest, task)
    tokens, both = bench.corpus(run.corpus).train, weights.used + weights.rest
    for step in range(1, task.steps + 1):
        part = share(setting, step, task)
        for group in rule.param_groups: group["lr"] = run.lr * part
        for group in rest.param_groups: group["lr"] = rest_lr * part
        for p in both: p.grad = None
        loss = loss_of(model, *get_batch(tokens, BYTES // setting.context, setting.context, seed, step))
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


def make_run(run: Run, bench: Bench | None = None, commit: str | None = None) -> dict[str, Any]:
    "The row of a run; a loss that is not finite counts as that of a model that knows nothing."
    (name, arm, seed), began, bench = run, time.perf_counter(), bench or bench_of()
    setting, plan = SETTINGS[name], planned(SETTINGS[name], arm, seed)
    model, losses = train(setting, plan, rates(setting, arm)[1], bench)
    loss = validate(model, plan, bench)
    ended = math.isfinite(losses[-1]) and math.isfinite(loss)
    return {
        "run": run_id(run), "setting": name, "arm": arm, **asdict(plan), "rest_lr": rates(setting, arm)[1],
        "how": asdict(setting), "task": asdict(bench.task), "diverged": not ended,
        "val_loss": loss if ended else math.log(256), "steps": len(losses),
        "corpus_sha": bench.corpus(plan.corpus).hash, "seconds": round(time.perf_counter() - began, 3),
        "commit": commit, "machine": machine("cpu"), "versions": versions(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# all runs


def stored(path: Path = HERE) -> list[dict[str, Any]]:
    "The rows that the page shows."
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def every_run(names: Iterable[str] = SETTINGS) -> list[Run]:
    """The runs of settings: first of one end, single changes and all of them, then of all but one,
    seed by seed; InputError for a name that is none."""
    for name in (names := list(names)):
        if name not in SETTINGS: raise unknown("setting", name, SETTINGS)
    def first(name: str) -> bool: return not name.startswith("all but")
    groups = [name for name in names if first(name)], [name for name in names if not first(name)]
    return [(name, arm, seed) for group in groups for seed, name, arm in product(SEEDS, group, ARMS)]


def known_runs(*rows: Iterable[Mapping[str, Any]]) -> set[str]:
    "The runs that are made; InputError where one was made in another way than the plan has it."
    found = {row["run"]: row for row in chain(*rows)}
    for run in every_run():
        if (row := found.get(run_id(run))) is None: continue
        setting, plan = SETTINGS[run[0]], planned(SETTINGS[run[0]], *run[1:])
        for key, value in {"how": asdict(setting), "lr": plan.lr, "weight_decay": plan.weight_decay}.items():
            if row[key] != value:
                raise InputError(f"{row['run']} was made with {key} {row[key]}, not {value}: choose another --out")
    return set(found)


def make_runs(out: Path, names: Iterable[str], workers: int, path: Path = HERE) -> None:
    "Makes the runs that are missing, and keeps each as it ends."
    ledger, commit = Ledger(out), code_commit()
    known = known_runs(stored(path), ledger.rows())
    jobs = [run for run in every_run(names) if run_id(run) not in known]
    bench_of().corpus("eurlex")  # prepared once, before the workers ask for it
    pool = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
    with ledger.writing() as append, pool:
        waiting = [pool.submit(make_run, run, commit=commit) for run in jobs]
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                append(row := future.result())
                tell(f"{number} of {len(jobs)}: {row['run']} ends at {row['val_loss']:.4f}, {row['seconds']:.0f} s")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


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
    "The losses of the seeds that all arms of a setting have, none of which diverged; where they are two or more."
    found: dict[str, dict[str, dict[int, float]]] = {name: {arm: {} for arm in ARMS} for name in SETTINGS}
    for row in rows:
        if not row["diverged"]: found[row["setting"]][row["arm"]][row["seed"]] = row["val_loss"]
    there = {name: [seed for seed in SEEDS if all(seed in by for by in arms.values())]
             for name, arms in found.items()}
    return {name: {arm: {seed: by[seed] for seed in there[name]} for arm, by in arms.items()}
            for name, arms in found.items() if len(there[name]) > 1}


BySeed = Mapping[int, float]


def difference(losses: Losses, name: str, arm: str, other: str) -> BySeed:
    "How far an arm ends above another, for each seed."
    return {seed: loss - losses[name][other][seed] for seed, loss in losses[name][arm].items()}


def costs(losses: Losses, name: str) -> BySeed: return difference(losses, name, "stochastic", "master")
def gains(losses: Losses, name: str) -> BySeed: return difference(losses, name, "stochastic", "S^-1")


def whole(losses: Losses, *names: str) -> None:
    "KeyError before all runs of settings are made."
    if any(len(losses[name]["master"]) < len(SEEDS) for name in names): raise KeyError(*names)


Number = Callable[[Losses], Interval]  # KeyError before its runs are made


def lower_at_half(losses: Losses) -> Interval:
    "How far master weights with six blocks end above, with half the rates, what they do with the whole."
    whole(losses, HALVED, "with blocks")
    there, here = losses[HALVED]["master"], losses["with blocks"]["master"]
    return interval([there[seed] - here[seed] for seed in SEEDS])


def excess(of: Callable[[Losses, str], BySeed], name: str, most: float, sign: int = 1) -> Number:
    "How far a cost or a gain lies above a number; below it with sign -1."
    def found(losses: Losses) -> Interval:
        whole(losses, name)
        return interval([sign * (value - most) for value in of(losses, name).values()])
    return found


def left(name: str, part: float, sign: int = 1) -> Number:
    "How far what a setting leaves of the cost lies above a part of it; below it with sign -1."
    def found(losses: Losses) -> Interval:
        whole(losses, name, "sizes")
        there, here = costs(losses, name), costs(losses, "sizes")
        return interval([sign * (there[seed] - part * here[seed]) for seed in SEEDS])
    return found


def decided(losses: Losses, name: str) -> str:
    "How much of the cost a setting is shown to leave: at most half, at least half, or neither is shown."
    if left(name, HALF)(losses).high < 0: return "at most half"
    return "at least half" if left(name, HALF, -1)(losses).high < 0 else "not decided"


def alone(losses: Losses) -> dict[str, list[str]]:
    "The changes by what each alone is shown to leave of the cost; KeyError before all are run."
    found: dict[str, list[str]] = {}
    for name in CHANGES: found.setdefault(decided(losses, f"with {name}"), []).append(name)
    return found


LENGTHS = "300", "0.4m", "1200", "4800"  # parts of the study of sizes that train its model here, by their updates


def place(losses: Losses, name: str) -> tuple[float, Interval]:
    "The loss under master weights of a setting, which tells how far it came, and its cost."
    return fmean(losses[name]["master"].values()), interval(costs(losses, name).values())


def place_in_sizes(found: sizes.Losses, part: str) -> tuple[float, Interval]:
    "The same of a part of the study of sizes."
    master = found[part, ARMS["master"]].values()
    return fmean(master), interval(sizes.above(found, part, ARMS["stochastic"], ARMS["master"]))


def slow(losses: Losses, found: sizes.Losses) -> list[str]:
    "The settings that come no further than the second of `LENGTHS`, but further than the first."
    few, more = (place_in_sizes(found, part)[0] for part in LENGTHS[:2])
    return [name for name in losses if name != "sizes" and more < place(losses, name)[0] < few]


def below_zero(found: Interval) -> str: return found.within(most=0.0)


CLAIMS = tuple(sizes.Claim(text, numbers, below_zero) for text, numbers in {
    f"With all changes stochastic rounding ends at most {MARGIN} nats above master weights":
        [excess(costs, "all", MARGIN)],
    f"With all changes S^-1 gains at most {MARGIN} nats": [excess(gains, "all", MARGIN)],
    "First weights alone leave at most half of the cost": [left("with first weights", HALF)],
    **{f"Changing {name} alone leaves half to one and a half times the cost":
       [left(f"with {name}", 1 + HALF), left(f"with {name}", HALF, -1)]
       for name in CHANGES if name != "first weights"},
    "All changes but that of first weights leave at least half of the cost":
        [left("all but first weights", HALF, -1)],
    "With six blocks master weights end lower at half the rates": [lower_at_half],
    "With six blocks at half the rates stochastic rounding ends above master weights": [excess(costs, HALVED, 0.0, -1)],
}.items())


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
