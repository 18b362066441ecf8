"""The law of what S^p gains: formats that it was not fitted to, its FP32 twins at every size, and from scratch
the arms that advice rests on.

python nbs/studies/experiments/the_law.py --out FOLDER [--part NAME,...] [--workers N]

Rows go to FOLDER/formats, FOLDER/levels and FOLDER/scratch, each a ledger.jsonl; stored rows are put in first,
and the command resumes where it was stopped. `python .ci/ledger.py FOLDER/PLACE/ledger.jsonl nbs/results/law`
stores them. The predictions are part 8 of nbs/studies/protocol_2.ipynb.
"""
import argparse
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Iterable, Mapping, NamedTuple

import pandas as pd
import torch

from altgrad.basics import INK, InputError
from altgrad.evidence.bench import PROTOCOLS, Trial
from altgrad.evidence.instrument import Arm, Bench
from altgrad.evidence.sweep import Job, Ledger, Matrix, Plan, Sweep, loss_of_row, read_rows, tuning
from altgrad.geometry.catalogue import RULES
from altgrad.geometry.spacing import stiffness_floor
from altgrad.numbers.formats import EIGHT_BIT, get_format, ulp
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import scale_of
from altgrad.training.experiment import Interval, interval

sys.path.append(str(Path(__file__).parent))
import sizes
from loss_against_bits import METHODS, PANELS
from other_reasons import GRID, MARGIN, Claim, Losses, Part, gap

STORE = sizes.RESULTS / "law"
FITTED = ("E3M4", "E4M3", "E5M2", "E6M1", "E7M0")  # the formats that the share is of
RELATIVE = ("E5M0b15", "E4M1b7", "E3M0b3", "E3M2b3")  # formats whose spacing is relative
NEW = (*RELATIVE, "E2M3b1")
SHARE, FEW = 0.425, 0.15  # of the cost that S^-1 takes back: in formats of relative spacing, and at most in others
SAID = {"E5M0b15": 0.037, "E4M1b7": 0.002, "E3M0b3": 0.05, "E3M2b3": -0.013, "E2M3b1": 0.0}  # gains of S^-1, nats
FLOOR = 8.0  # octaves, of every power
SLOPE, INTERCEPT = 0.414, -0.028  # of the gain of S^-1 over the cost, fitted to eight bits before the new formats
SIZE_MARGIN = 0.015  # nats
STORED = "master", "residual"  # arms of the study of loss against bits, which are not made again
BENCH = PROTOCOLS["bench-1"]
LEVELS = {  # a remainder whose levels lie inside the spacing, with AdamW and with ECO
    f"{name}midrise {bits}": {"rule": rule, "storage": f"grid_midrise{bits}"}
    for bits in (2, 4) for name, rule in (("", "adamw"), ("ECO, ", "eco"))}
FINE_TUNED = "E4M3", "E5M2", "E7M0", "MXFP4", "NVFP4"  # panels of the study of loss against bits


def bent(power: float) -> dict[str, Any]:
    "The settings of S^p; of AdamW at power 0."
    return {"rule": "stiffness_adamw", "power": power}


def excess(losses: Losses, fmt: str, share: float) -> Interval:
    "The gain of S^-1, minus its gain in FP32, minus a share of the cost of stochastic rounding; nats."
    names = (f"{fmt} AdamW", f"{fmt} S^-1", "FP32 AdamW", f"{fmt} S^-1 in FP32")
    rows = zip(*(losses[name] for name in names), strict=True)
    return interval(plain - rule - (plain32 - rule32) - share * (plain - plain32)
                    for plain, rule, plain32, rule32 in rows)


def gain(losses: Losses, fmt: str) -> Interval:
    "How far S^-1 ends below AdamW, both under stochastic rounding; nats."
    return gap(losses, f"{fmt} AdamW", f"{fmt} S^-1")


def format_claims() -> list[Claim]:
    "Predictions 1 to 4."
    law = [Claim(f"{fmt}: the law holds within 0.01 nats", partial(excess, fmt=fmt, share=SHARE),
                 lambda d: d.within(-MARGIN, MARGIN)) for fmt in RELATIVE]
    sizes_ = [Claim(f"{fmt}: S^-1 gains {said:+.3f}, within {SIZE_MARGIN} nats", partial(gain, fmt=fmt),
                    lambda d, said=said: d.within(said - SIZE_MARGIN, said + SIZE_MARGIN))
              for fmt, said in SAID.items()]
    wins = [Claim(f"{fmt}: S^-1 gains", partial(gain, fmt=fmt), lambda d: d.within(0.0))
            for fmt in ("E5M0b15", "E3M0b3")]
    loses = Claim("E3M2b3: S^-1 loses", partial(gain, fmt="E3M2b3"), lambda d: d.within(most=0.0))
    few = Claim("E2M3b1: S^-1 takes back at most 0.15 of the cost", partial(excess, fmt="E2M3b1", share=FEW),
                lambda d: d.within(most=0.0))
    return [*law, *sizes_, *wins, loses, few]


def format_part() -> Part:
    "AdamW and S^-1 under stochastic rounding in each new format, and both in FP32."
    arms = {"FP32 AdamW": {"storage": "fp32"} | bent(0.0)}
    for fmt in NEW:
        arms[f"{fmt} AdamW"] = {"format": fmt} | bent(0.0)
        arms[f"{fmt} S^-1"] = {"format": fmt} | bent(-1.0)
        arms[f"{fmt} S^-1 in FP32"] = {"format": fmt, "storage": "fp32"} | bent(-1.0)
    return Part(arms, format_claims())


def level_part() -> Part:
    "Remainders with levels inside the spacing, beside the stored arms of the study of loss against bits."
    ways = {way: METHODS[way] for way in ("master", "residual 2", "residual 4")} | LEVELS
    arms = {f"{panel} {way}": PANELS[panel] | settings
            for panel, (way, settings) in product(FINE_TUNED, ways.items())}
    return Part(arms, level_claims())


def level_claims() -> list[Claim]:
    "Predictions 10 to 12."
    def above(panel: str, way: str, other: str, most: float) -> Claim:
        text = f"{panel}: {way} ends at most {most:g} nats above {other}"
        return Claim(text, partial(gap, arm=f"{panel} {way}", other=f"{panel} {other}"), lambda d: d.within(most=most))
    return [*(above(panel, "midrise 2", "residual 2", -MARGIN) for panel in FINE_TUNED[1:]),
            *(above(panel, "midrise 4", "residual 4", MARGIN / 2) for panel in FINE_TUNED),
            *(above(panel, "midrise 4", "master", MARGIN) for panel in FINE_TUNED)]


def twin(fmt: str, power: float) -> dict[str, Any]:
    "S^p of a format on weights that stay in FP32."
    return {"format": fmt, "storage": "fp32"} | bent(power)


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
TRIALS = {"formats": format_part, "levels": level_part}
PARTS = (*TRIALS, *PLACES)


# what the page shows


class Point(NamedTuple):
    "A format in the figure of the law; nats."
    format: str
    cost: float  # of stochastic rounding, above AdamW in FP32
    gain: float  # of S^-1 under stochastic rounding
    in_fp32: float  # gain of S^-1 in FP32
    seen: bool  # when the line was drawn

    @property
    def expected(self) -> float: return SHARE * self.cost + self.in_fp32


def known_points() -> list[Point]:
    "The formats of eight bits, to which the line was fitted: means over three checkpoints and eight seeds."
    rows = pd.read_parquet(sizes.RESULTS / "ledger/tier1.parquet")
    rows = rows[(rows.stage == "confirm") & rows.error.isna() & rows.power.isin([-1.0, 0.0])]
    loss = rows.groupby(["format", "storage", "power"]).val_loss.mean()
    formats = [fmt for fmt in EIGHT_BIT if (fmt, GRID, -1.0) in loss.index]
    return [Point(fmt, loss[fmt, GRID, 0] - loss[fmt, "fp32", 0], loss[fmt, GRID, 0] - loss[fmt, GRID, -1],
                  loss[fmt, "fp32", 0] - loss[fmt, "fp32", -1], True) for fmt in formats]


def new_points(losses: Losses) -> list[Point]:
    "The formats that the law had not seen: means over ten checkpoints."
    mean = {arm: fmean(values) for arm, values in losses.items()}
    return [Point(fmt, mean[f"{fmt} AdamW"] - mean["FP32 AdamW"], mean[f"{fmt} AdamW"] - mean[f"{fmt} S^-1"],
                  mean["FP32 AdamW"] - mean[f"{fmt} S^-1 in FP32"], False) for fmt in NEW]


def plot_law(points: Iterable[Point], ax: Any) -> None:
    "Draw what S^-1 gains against what stochastic rounding costs AdamW, and the line of the protocol."
    ax.axline((0, INTERCEPT), slope=SLOPE, color=INK, lw=1)
    ax.axhline(0, color=INK, lw=0.5)
    for p in points:
        ax.plot(p.cost, p.gain, "o" if p.seen else "D", color=INK, mfc=INK if p.seen else "none", ms=5)
        offset, side = ((6, -4), "left") if p.seen else ((-6, 3), "right")
        name = p.format.partition("b")[0]
        ax.annotate(name, (p.cost, p.gain), offset, textcoords="offset points", ha=side, va="center", fontsize=8)
    ax.plot([], [], "o", color=INK, label="known before")
    ax.plot([], [], "D", color=INK, mfc="none", label="run afterwards")
    ax.legend(loc="upper left")
    ax.set(xlabel="cost of stochastic rounding for AdamW, nats", ylabel="gain of $S^{-1}$, nats")


def table(points: Iterable[Point], losses: Losses) -> str:
    "A Markdown table: what was expected of each new format, and what came out."
    columns = "format", "cost", "gain in FP32", "gain expected", "gain", "gain minus expected", "verdict"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for p in points:
        d = excess(losses, p.format, SHARE)
        verdict = d.within(-MARGIN, MARGIN) if p.format in RELATIVE else "few spacings"
        lines.append(f"| {p.format.partition('b')[0]} | {p.cost:.3f} | {p.in_fp32:+.3f} | {p.expected:+.3f} "
                     f"| {p.gain:+.3f} | {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] | {verdict} |")
    return "\n".join(lines)


def share_in_weights(fmt: str, power: float, checkpoint: str = BENCH.confirm[0]) -> float:
    """The share of the noise of steps of one size that S^p takes away at a checkpoint's block weights, negative where
    it adds: the noise of a step is its length times the spacing, and S^p keeps the length of all steps together."""
    plain, moved = 0.0, 0.0
    state, _ = BENCH.bench().state(checkpoint)
    for name, w in state.items():
        if w.dim() != 2 or not name.startswith("blocks."): continue
        scale = scale_of(w, fmt, "tensor")
        q = fake_quantize(w, fmt, scale) / scale
        spacing, floor = ulp(get_format(fmt), q).double(), stiffness_floor(q, get_format(fmt), 0.0, FLOOR)
        stiffness = (torch.maximum(spacing, floor) * scale) ** power
        spacing *= scale
        plain += spacing.sum().item()
        moved += (spacing * stiffness / stiffness.square().mean().sqrt()).sum().item()
    return 1 - moved / plain


def share_in_runs(power: float, column: str) -> tuple[float, float]:
    "The lowest and the highest share of E3M4 to E7M0 in the tuned runs: of `noise`, or of the `val_loss` above FP32."
    rows = pd.read_parquet(sizes.RESULTS / "ledger/tier1.parquet")
    rows = rows[(rows.stage == "confirm") & rows.error.isna()]
    mean = rows.groupby(["format", "storage", "power"])[column].mean()
    over = mean.xs(GRID, level="storage")
    if column == "val_loss": over = over - mean.xs("fp32", level="storage")
    shares = [1 - over[fmt, power] / over[fmt, 0] for fmt in FITTED]
    return min(shares), max(shares)


def share_table() -> str:
    "A Markdown table: the share of the noise that S^p takes away, and the share of the cost."
    lines = ["| p | noise, from one checkpoint's weights | noise, in the runs | cost, in the runs |", "|---" * 4 + "|"]
    for power in (-1.0, -0.5, 0.5, 1.0):
        shares = [share_in_weights(fmt, power) for fmt in FITTED]
        pairs = (min(shares), max(shares)), share_in_runs(power, "noise"), share_in_runs(power, "val_loss")
        lines.append(f"| {power:g} | " + " | ".join(f"{low:+.2f} to {high:+.2f}" for low, high in pairs) + " |")
    return "\n".join(lines)


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
    def __init__(
        self, name: str, out: Path, bench: Bench, rates: Mapping[str, sizes.Tuned], accept: Iterable[str] = (),
    ):
        super().__init__(PLACES[name].matrix(name), out, bench, accept)
        self.jobs = jobs_of(name, rates)

    def plan(self) -> Plan:
        "The runs that are missing."
        jobs = [job for job in self.jobs if self.loss(job.arm) is None]
        return Plan("confirm" if jobs else "done", jobs, [], {})


def begin(out: Path, matrices: Iterable[str]) -> set[str]:
    "Put the stored rows that a ledger lacks into it, and return the codes of its rows."
    ledger = Ledger(out)
    known = {row["run"] for row in ledger.rows()}
    stored = [row for name in matrices if (path := STORE / f"{name}.parquet").is_file() for row in read_rows(path)]
    if lacking := [row for row in stored if row["run"] not in known]:
        with ledger.writing() as append:
            for row in lacking: append(row)
    return {row["code"] for row in ledger.rows()}


def sweep_of(name: str, out: Path) -> Sweep:
    "The runs of a part; InputError before its rates are tuned."
    if name in TRIALS:
        codes = begin(out / name, [f"law-{name}"])
        arms = TRIALS[name]().made()
        new = {arm: arms[arm] for arm in arms if not any(word in arm for word in STORED)}
        return Trial(new, out / name, replace(BENCH, name=f"law-{name}", compiled=False), codes)
    out = out / "scratch"
    codes = begin(out, PLACES)
    bench = sizes.bench_of(PLACES[name], out)
    if name in TUNINGS: return Sweep(PLACES[name].matrix(name), out, bench, codes)
    tuned = PLACES[name].tuned
    rates = tuned_rates(Ledger(out).rows(), tuned)
    if not set(PLACES[name].arms) <= set(rates): raise InputError(f"the rates are not tuned: run --part {tuned}")
    return Confirmed(name, out, bench, rates, codes)


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
