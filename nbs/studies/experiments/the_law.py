"""The law of what S^p gains: formats that it was not fitted to, its FP32 twins at every size, and from scratch
the arms that advice rests on.

python nbs/studies/experiments/the_law.py --out FOLDER [--part NAME,...] [--workers N]

Rows go to FOLDER/formats, FOLDER/levels and FOLDER/scratch, each a ledger.jsonl; the command resumes where it
was stopped. `python .ci/ledger.py FOLDER/PLACE/ledger.jsonl nbs/results/law` stores them. The predictions are
part 8 of nbs/studies/protocol_2.ipynb.
"""
import argparse
import os
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Iterable, Mapping

from altgrad.basics import InputError
from altgrad.evidence.bench import PROTOCOLS, Trial
from altgrad.evidence.instrument import Arm, Bench
from altgrad.evidence.sweep import Job, Ledger, Matrix, Plan, Sweep, loss_of_row, tuning
from altgrad.geometry.catalogue import RULES

sys.path.append(str(Path(__file__).parent))
import sizes
from loss_against_bits import METHODS, PANELS

RELATIVE = ("E5M0b15", "E4M1b7", "E3M0b3", "E3M2b3")  # formats whose spacing is relative
NEW = (*RELATIVE, "E2M3b1")
GRID = "grid_stochastic"
BENCH = PROTOCOLS["bench-1"]
LEVELS = {  # a remainder whose levels lie inside the spacing, with AdamW and with ECO
    f"{name}midrise {bits}": {"rule": rule, "storage": f"grid_midrise{bits}"}
    for bits in (2, 4) for name, rule in (("", "adamw"), ("ECO, ", "eco"))}
FINE_TUNED = "E4M3", "E5M2", "E7M0", "MXFP4", "NVFP4"  # panels of the study of loss against bits


def format_arms() -> dict[str, Arm]:
    "AdamW and S^-1 under stochastic rounding in each new format, and both in FP32."
    usual: dict[str, Any] = {"rule": "stiffness_adamw", "checkpoint": BENCH.tune[0]}
    arms = {"FP32 AdamW": Arm(storage="fp32", power=0.0, **usual)}
    for fmt in NEW:
        arms[f"{fmt} AdamW"] = Arm(format=fmt, storage=GRID, power=0.0, **usual)
        arms[f"{fmt} S^-1"] = Arm(format=fmt, storage=GRID, power=-1.0, **usual)
        arms[f"{fmt} S^-1 in FP32"] = Arm(format=fmt, storage="fp32", power=-1.0, **usual)
    return arms


def level_arms() -> dict[str, Arm]:
    "Remainders with levels inside the spacing; what they are compared with is stored by the other study."
    usual: dict[str, Any] = {"checkpoint": BENCH.tune[0]}
    return {f"{panel} {way}": Arm(**usual | PANELS[panel] | settings)
            for panel, (way, settings) in product(FINE_TUNED, LEVELS.items())}


def twin(fmt: str, power: float) -> dict[str, Any]:
    "S^p of a format on weights that stay in FP32."
    return {"format": fmt, "storage": "fp32", "rule": "stiffness_adamw", "power": power}


TWINS = {"E4M3 S^0.5 in FP32": twin("E4M3", 0.5), "E7M0 S^-1 in FP32": twin("E7M0", -1.0)}
MORE_TWINS = {"E5M2 S^-0.5 in FP32": twin("E5M2", -0.5), "E7M0 S^-0.5 in FP32": twin("E7M0", -0.5)}
WAYS = ("ECO stochastic", "ECO, residual 4", "Muon", "Muon, residual 4, 8-bit moments", "Muon, master")
ADVICE = {"FP32 Muon": {"rule": "muon", "storage": "fp32"}} | {
    f"{fmt} {way}": {"format": fmt} | METHODS[way] for way, fmt in product(WAYS, sizes.FORMATS)}
INSIDE = {f"{fmt} {way}": {"format": fmt} | settings
          for fmt, (way, settings) in product(sizes.FORMATS, LEVELS.items())}
LONG = {f"{fmt} midrise 8": {"format": fmt, "storage": "grid_midrise8"} for fmt in ("E4M3", "E7M0")}
SCRATCH = {name: Arm(**{"rule": "adamw", "checkpoint": "scratch-0.1m-0", "lr": 0.0} | settings)
           for name, settings in (TWINS | MORE_TWINS | ADVICE | INSIDE | LONG).items()}


@dataclass(frozen=True)
class Place(sizes.Part):
    "A size and a length of the study of sizes, with arms of this study."
    def matrix(self, name: str) -> Matrix:
        "Its arms as a sweep has them; tuned where the name says so."
        seeds = sizes.TUNE_SEEDS[: self.seeds] if name in TUNINGS else sizes.every_seed(self)
        cells = tuple((replace(SCRATCH[arm], checkpoint=f"{self.recipe}-{seeds[0]}"),
                       sizes.transferred(RULES[SCRATCH[arm].rule].guess, self.size, sizes.SIZES[0]))
                      for arm in self.arms)
        return Matrix(name, 0, cells, tuple(f"{self.recipe}-{seed}" for seed in seeds), seeds, (), task=self.task)


def place(part: str, arms: Iterable[str], tuned: str = "law-tune-0.4m") -> Place:
    "A part of the study of sizes with other arms."
    p = sizes.PARTS[part]
    return Place(p.size, p.updates, p.batch, p.seeds, tuple(arms), of=part, tuned=tuned)


FULL = (*TWINS, *MORE_TWINS)
TUNINGS = "law-tune", "law-tune-0.4m", "levels-tune-0.4m"
PLACES = {  # in the order of the runs
    "law-tune": place("tune", FULL),
    "law-0.1m": place("0.1m", FULL, "law-tune"),
    "law-tune-0.4m": place("tune-0.4m", (*FULL, *ADVICE)),
    "law-0.4m": place("0.4m", (*FULL, *ADVICE)),
    "law-300": place("300", FULL),
    "law-1200": place("1200", FULL),
    "law-1.6m": place("1.6m", TWINS),
    "law-4800": place("4800", TWINS),
    "law-6.4m": place("6.4m", TWINS),
    "levels-tune-0.4m": place("tune-0.4m", (*INSIDE, *LONG)),
    "levels-0.4m": place("0.4m", (*INSIDE, *LONG), "levels-tune-0.4m"),
    "levels-4800": place("4800", ("E4M3 midrise 4", "E7M0 midrise 4", *LONG), "levels-tune-0.4m"),
    "levels-6.4m": place("6.4m", ("E4M3 midrise 4", "E7M0 midrise 4"), "levels-tune-0.4m"),
}
TRIALS = {"formats": format_arms, "levels": level_arms}
PARTS = (*TRIALS, *PLACES)


def tuned_rates(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, sizes.Tuned]:
    "The rates that a finished tuning gives, by arm."
    losses = {arm: loss_of_row(row) for arm, row in sizes.by_arm(rows, name, "tune").items()}
    matrix = PLACES[name].matrix(name)
    results = {arm: tuning(cell, middle, matrix, losses.get)
               for arm, (cell, middle) in zip(PLACES[name].arms, matrix.cells)}
    return {arm: sizes.best_of(result) for arm, result in results.items() if not result.missing}


def jobs_of(name: str, rates: Mapping[str, sizes.Tuned]) -> list[Job]:
    "The confirming runs of a place, seed by seed."
    part, jobs = PLACES[name], []
    for seed, arm in product(sizes.every_seed(part), part.arms):
        lr = sizes.transferred(rates[arm].lr, part.size, PLACES[part.tuned].size)
        run = replace(SCRATCH[arm], lr=lr, split="confirm", seed=seed, checkpoint=f"{part.recipe}-{seed}")
        jobs.append(Job(run, "confirm", rates[arm].edge))
    return jobs


class Confirmed(Sweep):
    "Runs of a place whose rates are known."
    def __init__(self, name: str, out: Path, bench: Bench, rates: Mapping[str, sizes.Tuned]):
        super().__init__(PLACES[name].matrix(name), out, bench)
        self.jobs = jobs_of(name, rates)

    def plan(self) -> Plan:
        "The runs that are missing."
        jobs = [job for job in self.jobs if self.loss(job.arm) is None]
        return Plan("confirm" if jobs else "done", jobs, [], {})


def sweep_of(name: str, out: Path) -> Sweep:
    "The runs of a part; InputError before its rates are tuned."
    if name in TRIALS: return Trial(TRIALS[name](), out / name, replace(BENCH, name=f"law-{name}", compiled=False))
    out = out / "scratch"
    bench = sizes.bench_of(PLACES[name], out)
    if name in TUNINGS: return Sweep(PLACES[name].matrix(name), out, bench)
    tuned = PLACES[name].tuned
    rates = tuned_rates(Ledger(out).rows(), tuned)
    if not set(PLACES[name].arms) <= set(rates): raise InputError(f"the rates are not tuned: run --part {tuned}")
    return Confirmed(name, out, bench, rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    names, failed = args.part.split(","), 0
    if not set(names) <= set(PARTS): parser.error(f"the parts are {', '.join(PARTS)}")
    for name in names:
        sweep = sweep_of(name, args.out)
        sweep.build()
        failed += sweep.run(args.workers)
    return min(failed, 1)


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
