"""Training from scratch at four sizes and three lengths: does what formats cost grow, or vanish?

python nbs/studies/experiments/sizes.py --out FOLDER [--part NAME,...] [--workers N] [--device cuda] [--plan]

All rows go to FOLDER/ledger.jsonl; the command goes on where it was stopped. Rows that are stored are
put into it first, so that only what they lack is run. `--plan` measures a few updates of
each size and prints what is left to do, in hours; nothing is run.
`python .ci/ledger.py FOLDER/ledger.jsonl nbs/results/sizes` stores the rows for the page,
nbs/studies/sizes.ipynb, which says what is expected.
"""
import argparse
import math
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import torch

from altgrad.basics import InputError
from altgrad.evidence.instrument import (
    RECIPES, Arm, Bench, Task, Weights, blank_model, make_rule, rest_rule,
)
from altgrad.evidence.study import rows_by_arm
from altgrad.evidence.sweep import (
    Job, Ledger, Matrix, Plan, Sweep, Tuning, beside, loss_of_row, read_rows, tuning,
)
from altgrad.geometry.catalogue import RULES
from altgrad.model.gpt import loss_of
from altgrad.training.experiment import HOLDS, OPEN, REFUTED, Interval, interval
from altgrad.training.trainer import resolve_device

sys.path.append(str(Path(__file__).parent))
from loss_against_bits import Asked

RESULTS = Path(__file__).resolve().parents[2] / "results"
MARGIN = 0.01  # nats: arms that are closer are equal
FORMATS = ("E4M3", "E5M2", "E7M0")
BEST_POWER = {"E4M3": 0.5, "E5M2": -0.5, "E7M0": -1.0}  # but 0, under stochastic rounding in tier 1
KINDS: dict[str, dict[str, Any]] = {  # what keeps and what moves the weights; with AdamW if nothing is said
    "master": {"storage": "master"},
    "stochastic": {"storage": "grid_stochastic"},
    "nearest": {"storage": "grid_nearest"},
    "S^p": {"storage": "grid_stochastic", "rule": "stiffness_adamw"},
    "residual 4": {"storage": "grid_residual4"},
    "residual 8": {"storage": "grid_residual8"},
    "ECO": {"storage": "grid_nearest", "rule": "eco"},
    "bf16 stochastic": {"storage": "bf16_stochastic"},
}
HALF = "E7M0 S^-0.5"  # of the prediction, beside the best power


def how(name: str) -> dict[str, Any]:
    "What an arm says, by its name: FP32, or a format and a kind."
    if name == "FP32": return {"storage": "fp32"}
    if name == HALF: return {"format": "E7M0", **KINDS["S^p"], "power": -0.5}
    fmt, kind = name.split(" ", 1)
    power = {"power": BEST_POWER[fmt]} if kind == "S^p" else {}
    return {"format": fmt, **KINDS[kind], **power}


FIRST = ("FP32", *(f"{fmt} {kind}" for fmt in ("E4M3", "E7M0") for kind in
                   ("master", "stochastic", "nearest", "S^p", "residual 4")))  # worth most
LATER = tuple(name for name in (*(f"{fmt} {kind}" for kind in KINDS for fmt in FORMATS), HALF)
              if name not in FIRST)
ARMS = {name: Arm(**{"rule": "adamw", "checkpoint": "scratch-0.1m-0", "lr": 0.0} | how(name))
        for name in FIRST + LATER}
CHECKED = ("E4M3 master", "E7M0 stochastic")  # at the neighbours of their rates

TUNE_SEEDS, FIRST_SEED = (1000, 1001, 1002), 10  # of first weights and of batches alike
TUNINGS = "tune", "tune-0.4m"  # parts that look for rates


@dataclass(frozen=True)
class Part:
    "Runs of one size and one length; a seed is that of first weights and batches."
    size: str
    updates: int
    batch: int
    seeds: int
    arms: tuple[str, ...] = FIRST + LATER
    octaves: tuple[int, ...] = (0,)  # from the transferred rate
    of: str = ""  # the part whose other arms these are
    tuned: str = "tune-0.4m"  # the part that finds its rates

    @property
    def recipe(self) -> str: return f"scratch-{self.size}"

    @property
    def task(self) -> Task:
        "The settings of its runs: a tenth of the updates warms up."
        tenth = max(1, self.updates // 10)
        return Task(steps=self.updates, batch_size=self.batch, warmup=tenth, every=tenth)

    def matrix(self, name: str) -> Matrix:
        "Its arms as a sweep has them; tuned where the name says so."
        seeds = TUNE_SEEDS[: self.seeds] if name in TUNINGS else every_seed(self)
        cells = tuple((replace(ARMS[arm], checkpoint=f"{self.recipe}-{seeds[0]}"),
                       transferred(RULES[ARMS[arm].rule].guess, self.size, SIZES[0])) for arm in self.arms)
        return Matrix(name, 0, cells, tuple(f"{self.recipe}-{seed}" for seed in seeds), seeds, (),
                      task=self.task)


# batches and updates double where parameters are four times as many: 1.04 bytes a parameter
PARTS = {  # in the order of the runs
    "tune": Part("0.1m", 400, 4, 3),
    "0.1m": Part("0.1m", 400, 4, 12, tuned="tune"),
    "tune-0.4m": Part("0.4m", 800, 8, 2),
    "0.4m": Part("0.4m", 800, 8, 8),
    "300": Part("0.4m", 300, 8, 4),
    "1200": Part("0.4m", 1200, 8, 4),
    "1.6m": Part("1.6m", 1600, 16, 4, FIRST),
    "check-1.6m": Part("1.6m", 1600, 16, 4, CHECKED, (-1, 1)),
    "4800": Part("0.4m", 4800, 8, 4, FIRST),
    "1.6m-rest": Part("1.6m", 1600, 16, 4, LATER, of="1.6m"),
    "6.4m": Part("6.4m", 3200, 32, 2, FIRST),
    "check-6.4m": Part("6.4m", 3200, 32, 2, CHECKED, (-1, 1)),
    "4800-rest": Part("0.4m", 4800, 8, 4, LATER, of="4800"),
    "6.4m-rest": Part("6.4m", 3200, 32, 2, LATER, of="6.4m"),
    "25m": Part("25m", 6400, 64, 2, FIRST),  # only where it is asked for: no run for two cores
}
ASKED = tuple(name for name in PARTS if name != "25m")
SIZES, LENGTHS, CHECKS = (
    ("0.1m", "0.4m", "1.6m", "6.4m"), ("300", "1200", "4800"), ("check-1.6m", "check-6.4m"))
LARGEST = SIZES[-1]


def every_seed(part: Part) -> tuple[int, ...]:
    "The seeds that a part confirms with."
    return tuple(range(FIRST_SEED, FIRST_SEED + part.seeds))


def width(size: str) -> int: return RECIPES[f"scratch-{size}"].n_embd


def parameters(size: str) -> int:
    "The block weights, which are what a format holds."
    recipe = RECIPES[f"scratch-{size}"]
    return 12 * recipe.n_layer * recipe.n_embd**2


def transferred(lr: float, size: str, tuned: str, octave: int = 0) -> float:
    "The rate at a size: in proportion to one over the width, from the size that is tuned."
    return float(f"{lr * width(tuned) / width(size) * 2.0**octave:.6g}")


class Tuned(NamedTuple):
    "The peak rate of an arm at a size that is tuned."
    lr: float
    edge: str  # `Tuning.edge`


def best_of(found: Tuning) -> Tuned: return Tuned(found.rates[found.best], found.edge)


def plain(arm: Arm) -> Arm:
    "An arm without what it is repeated over."
    return replace(arm, lr=0.0, seed=0, split="tune", checkpoint="scratch-0.1m-0")


NAMES = {plain(arm): name for name, arm in ARMS.items()}
Row = Mapping[str, Any]


def by_arm(rows: Iterable[Row], name: str, stage: str) -> dict[Arm, Row]:
    "`rows_by_arm` of a part's stage, without failed ones."
    there = [row for row in rows if (row["matrix"], row["stage"]) == (name, stage) and not row.get("error")]
    return dict(rows_by_arm(there))


def tuned_in(rows: Iterable[Row], name: str) -> dict[str, Tuned]:
    "The rates that stored rows of a tuning give, by arm; without those that are not done."
    known = {arm: loss_of_row(row) for arm, row in by_arm(rows, name, "tune").items()}
    matrix = PARTS[name].matrix(name)
    found = {arm: tuning(arm, middle, matrix, known.get) for arm, middle in matrix.cells}
    return {NAMES[plain(arm)]: best_of(t) for arm, t in found.items() if not t.missing}


def runs_of(name: str, rates: Mapping[str, Tuned]) -> list[tuple[str, int, Job]]:
    "A part's runs with arm and octave, seed by seed."
    part, found = PARTS[name], []
    known = [(arm, octave) for arm in part.arms if arm in rates for octave in part.octaves]
    for seed, (arm, octave) in product(every_seed(part), known):
        lr, edge = rates[arm]
        here = transferred(lr, part.size, PARTS[part.tuned].size, octave)
        run = replace(ARMS[arm], lr=here, split="confirm", seed=seed, checkpoint=f"{part.recipe}-{seed}")
        found.append((arm, octave, Job(run, "confirm", edge)))
    return found


Losses = Mapping[tuple[str, str], Mapping[int, float]]  # by part and arm, then by seed


def losses_of(rows: Sequence[Row], least: int = 2) -> dict[tuple[str, str], dict[int, float]]:
    "The confirmed losses of so many seeds or more at the rates of the plan; `ARM, x2` beside them."
    rates = {name: tuned_in(rows, name) for name in TUNINGS}
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for name, part in PARTS.items():
        if name in TUNINGS: continue
        ends = by_arm(rows, name, "confirm")
        for arm, octave, job in runs_of(name, rates[part.tuned]):
            key = part.of or name, arm if octave == 0 else f"{arm}, x{2.0**octave:g}"
            if job.arm in ends: losses.setdefault(key, {})[job.arm.seed] = ends[job.arm]["val_loss"]
    return {key: found for key, found in losses.items() if len(found) >= least}


def by_seed(losses: Losses, part: str, arm: str, other: str, there: str = "") -> dict[int, float]:
    "How far an arm ends above another, for each seed that both have; the other's part may differ."
    a, b = losses[part, arm], losses[there or part, other]
    return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}


def enough(found: Mapping[int, float]) -> list[float]:
    "The values of two seeds or more; KeyError for fewer, which tell no interval."
    if len(found) < 2: raise KeyError(*found)
    return list(found.values())


def above(losses: Losses, part: str, arm: str, other: str, there: str = "") -> list[float]:
    "The values of `by_seed`, which tell an interval; KeyError for one that was not run, or fewer than two."
    return enough(by_seed(losses, part, arm, other, there))


Terms = Sequence[tuple[float, Sequence[float]]]  # weights, and the values whose means are weighted


def scatter(terms: Terms, fresh: int = 0) -> list[tuple[float, int]]:
    """The variance that each term gives to a weighted sum of independent means, and its degrees of freedom;
    `fresh` values more, as scattered as the last term's, are what the sum foretells the mean of."""
    shares = [weight**2 / len(values) for weight, values in terms]
    if fresh: shares[-1] += 1 / fresh
    return [(share * statistics.variance(values), len(values) - 1) for share, (_, values) in zip(shares, terms)]


def welch(parts: Sequence[tuple[float, int]]) -> float:
    "Welch's degrees of freedom of a sum whose `scatter` this is."
    return sum(v for v, _ in parts) ** 2 / sum(v * v / n for v, n in parts)


def combined(terms: Terms, fresh: int = 0) -> Interval:
    "A weighted sum of independent means and its 95 % t interval, with Welch's degrees of freedom; `fresh` as above."
    from scipy.stats import t as student

    mean = sum(weight * statistics.fmean(values) for weight, values in terms)
    parts = scatter(terms, fresh)
    total = sum(v for v, _ in parts)
    if not total: return Interval(mean, mean, mean)
    half = float(student.ppf(0.975, welch(parts))) * math.sqrt(total)
    return Interval(mean, mean - half, mean + half)


def line_weights(at: Sequence[float], to: float) -> list[float]:
    "What the least-squares line through points at these places makes of each at another place."
    middle = statistics.fmean(at)
    squares = sum((x - middle) ** 2 for x in at)
    return [1 / len(at) + (to - middle) * (x - middle) / squares for x in at]


def foretold(values: Mapping[str, Sequence[float]], fresh: int) -> Interval:
    """What a line in the logarithm of the size says of the largest from the three below:
    its interval is of chance alone, so a bend of the line refutes it."""
    smaller = SIZES[:-1]
    weights = line_weights([math.log(parameters(s)) for s in smaller], math.log(parameters(LARGEST)))
    return combined([(w, values[s]) for w, s in zip(weights, smaller)], fresh)


def quantities() -> dict[str, tuple[str, str]]:
    "What is foretold: (a, b) is how far a ends above b."
    found = {}
    for fmt in FORMATS:
        found[f"{fmt}: gap of master weights to FP32"] = f"{fmt} master", "FP32"
        for kind in KINDS:
            if kind != "master":
                found[f"{fmt}: gap of {kind}"] = f"{fmt} {kind}", f"{fmt} master"
        found[f"{fmt}: gain of S^p"] = f"{fmt} stochastic", f"{fmt} S^p"
    found["E7M0: gain of S^-0.5"] = "E7M0 stochastic", HALF
    return found


class Foretold(NamedTuple):
    "A quantity at the largest size."
    said: Interval
    found: Interval | None  # None where it was not run

    @property
    def sign(self) -> bool: return self.found is not None and self.said.mean * self.found.mean > 0

    @property
    def covered(self) -> bool:
        return self.found is not None and self.said.low <= self.found.mean <= self.said.high


def predictions(losses: Losses) -> dict[str, Foretold]:
    "What the three smaller sizes say of the largest, where all three have it; KeyError where nothing is in all."
    found = {}
    for text, (a, b) in quantities().items():
        there = None
        with suppress(KeyError): there = interval(above(losses, LARGEST, a, b))
        with suppress(KeyError):
            values = {size: above(losses, size, a, b) for size in SIZES[:-1]}
            found[text] = Foretold(foretold(values, PARTS[LARGEST].seeds), there)
    if not found: raise KeyError(LARGEST)
    return found


class Score(NamedTuple):
    "How many of the predictions came true."
    made: int  # quantities that are known at the largest size
    signs: int
    covered: int


def score(found: Mapping[str, Foretold]) -> Score:
    "Counts the predictions that can be checked."
    known = [f for f in found.values() if f.found is not None]
    return Score(len(known), sum(f.sign for f in known), sum(f.covered for f in known))


@dataclass(frozen=True)
class Claim:
    "A sentence that runs can refute: in one place, or in several at once."
    text: str
    places: Sequence[Callable[[Losses], Interval]]  # KeyError for one that was not run
    judge: Callable[[Interval], str]

    def found(self, losses: Losses) -> list[Interval]:
        "What was found in the places that were run."
        known = []
        for place in self.places:
            with suppress(KeyError): known.append(place(losses))
        return known

    def verdict(self, losses: Losses) -> str | None:
        "Refuted where one place refutes it, and holds where it does in all; None before all are run."
        verdicts = list(map(self.judge, self.found(losses)))
        if REFUTED in verdicts: return REFUTED
        if len(verdicts) < len(self.places): return None
        return OPEN if OPEN in verdicts else HOLDS


def zero_or_more(found: Interval) -> str: return found.within(0.0)


def within_margin(found: Interval) -> str: return found.within(most=MARGIN)


def size_claims() -> Iterator[Claim]:
    "Predictions 1 and 3: what stochastic and nearest rounding cost at the ends of the sizes."
    def ends(fmt: str, a: str, b: str, weights: tuple[float, float]) -> list[Callable[[Losses], Interval]]:
        def found(losses: Losses) -> Interval:
            pairs = zip(weights, (LARGEST, SIZES[0]))
            return combined([(w, above(losses, s, a, b)) for w, s in pairs])
        return [found]
    for fmt in FORMATS:
        cost = f"{fmt} stochastic", "FP32"
        yield Claim(f"{fmt}: stochastic rounding costs at most three times as much at 6.4M as at 0.1M",
                    ends(fmt, *cost, (-1.0, 3.0)), zero_or_more)
        yield Claim(f"{fmt}: stochastic rounding costs at least a third as much at 6.4M as at 0.1M",
                    ends(fmt, *cost, (1.0, -1 / 3)), zero_or_more)
    for fmt in ("E4M3", "E5M2"):
        cost = f"{fmt} nearest", f"{fmt} stochastic"
        yield Claim(f"{fmt}: nearest rounding ends further above stochastic at 6.4M than at 0.1M",
                    ends(fmt, *cost, (1.0, -1.0)), zero_or_more)


def doubled(losses: Losses) -> Interval:
    "The gap of stochastic rounding in E7M0 after 4,800 updates, less twice that after 300."
    short, long = (by_seed(losses, n, "E7M0 stochastic", "FP32") for n in ("300", "4800"))
    return interval(enough({seed: long[seed] - 2 * short[seed] for seed in sorted(short.keys() & long.keys())}))


def at(place: str, a: str, b: str, there: str = "") -> Callable[[Losses], Interval]:
    "How far an arm ends above another in a place; the other's may differ."
    return lambda losses: interval(above(losses, place, a, b, there))


def place_claims() -> Iterator[Claim]:
    "Predictions 2, 4 and 5: lengths, and what is said of every size."
    def everywhere(a: str, b: str, places: Sequence[str]) -> list[Callable[[Losses], Interval]]:
        return [at(place, a, b) for place in places]
    yield Claim("E7M0: from 300 to 4,800 updates the cost of stochastic rounding at least doubles",
                [doubled], zero_or_more)
    for fmt in FORMATS:
        for kind in ("residual 4", "residual 8"):
            yield Claim(f"{fmt}: {kind} ends at most 0.01 nats above master weights at every size and length",
                        everywhere(f"{fmt} {kind}", f"{fmt} master", SIZES + LENGTHS), within_margin)
    yield Claim("E7M0: S^-0.5 gains at every size", everywhere("E7M0 stochastic", HALF, SIZES),
                zero_or_more)


def rate_claims() -> Iterator[Claim]:
    "The transferred rate beside half and twice of it."
    def beside_it(check: str, arm: str) -> list[Callable[[Losses], Interval]]:
        size = check.removeprefix("check-")
        return [at(size, arm, f"{arm}, x{factor}", check) for factor in ("0.5", "2")]
    for check in CHECKS:
        for arm in CHECKED:
            yield Claim(f"{arm}, {check.removeprefix('check-')}: neither half nor twice the "
                        "transferred rate ends 0.01 nats lower", beside_it(check, arm), within_margin)


def edges_of(rows: Sequence[Row]) -> dict[str, set[str]]:
    "The arms whose tuned rate lies at an edge, by part."
    edges = {name: {arm for arm, rate in tuned_in(rows, name).items() if rate.edge} for name in TUNINGS}
    return {name: edges[part.tuned] for name, part in PARTS.items()}


def rests_on(claim: Claim, losses: Losses, edges: Mapping[str, set[str]]) -> list[str]:
    "The arms at an edge that a claim was judged by."
    asked = Asked(losses)
    claim.found(asked)
    return sorted({arm for part, name in asked.keys_asked if (arm := name.partition(",")[0]) in edges[part]})


CLAIMS = {"sizes": [*size_claims()], "places": [*place_claims()], "rates": [*rate_claims()]}


def verdict_of_line(losses: Losses) -> dict[str, str]:
    "Whether at least four of five signs are right, and half of the intervals hold; KeyError before all are run."
    said = predictions(losses)
    found = score(said)
    if found.made < len(said): raise KeyError(LARGEST)
    return {"at least four of five signs are right": HOLDS if found.signs >= 0.8 * found.made else REFUTED,
            "at least half of the intervals hold": HOLDS if found.covered >= 0.5 * found.made else REFUTED}


def stored() -> list[dict[str, Any]]:
    "The rows that the page shows."
    folder = RESULTS / "sizes"
    return read_rows(folder) if folder.is_dir() else []


def begin(out: Path) -> None:
    "Puts the stored rows that a ledger lacks into it."
    ledger = Ledger(out)
    known = {row["run"] for row in ledger.rows()}
    if not (lacking := [row for row in stored() if row["run"] not in known]): return
    with ledger.writing() as append:
        for row in lacking: append(row)


class Runs(Sweep):
    "Runs of a part whose rates are known."
    def __init__(
        self, name: str, out: Path, bench: Bench, rates: Mapping[str, Tuned], accept: Iterable[str] = (),
    ):
        super().__init__(PARTS[name].matrix(name), out, bench, accept)
        self.jobs = [job for _, _, job in runs_of(name, rates)]

    def plan(self) -> Plan:
        "What is missing, in the order of worth."
        jobs = [job for job in self.jobs if self.loss(job.arm) is None]
        return Plan("confirm" if jobs else "done", jobs, [], {})


def bench_of(part: Part, out: Path, device: str = "cpu") -> Bench:
    "The text of the first study, and first weights in the ledger's folder."
    texts, _ = beside(RESULTS / "ledger")
    return Bench(out / "checkpoints", texts, part.task, device=device)


def sweep_of(name: str, out: Path, device: str = "cpu") -> Sweep:
    "The runs of a part; InputError before the rates are tuned."
    bench = bench_of(PARTS[name], out, device)
    codes = {row["code"] for row in stored() if row.get("code")}
    if name in TUNINGS: return Sweep(PARTS[name].matrix(name), out, bench, codes)
    found = tuned_in(Ledger(out).rows(), PARTS[name].tuned)
    if not set(PARTS[name].arms) <= set(found):
        raise InputError(f"the rates are not tuned: run --part {PARTS[name].tuned}")
    return Runs(name, out, bench, found, codes)


def milliseconds(arm: Arm, part: Part, times: int = 2) -> float:
    "Processor time of an update and of what validation adds to it, on one thread."
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = blank_model(RECIPES[part.recipe])
    weights = Weights(model, replace(arm, checkpoint=f"{part.recipe}-0"))
    rules = [make_rule(replace(arm, lr=1e-4), weights.stored, part.task),
             rest_rule(replace(arm, checkpoint=f"{part.recipe}-0"), weights.rest, part.task)]
    tokens = torch.randint(256, (part.batch, model.config.block_size))
    taken = []
    for _ in range(times + 1):
        began = time.process_time()
        for p in model.parameters(): p.grad = None
        loss_of(model, tokens, tokens).backward()
        weights.update(rules[0])
        rules[1].step()
        taken.append(time.process_time() - began)
    task = part.task
    validated = 2 * task.chunks * task.windows / 3  # sequences forwards, twice; backwards is two thirds
    return 1e3 * min(taken[1:]) * (1 + validated / (part.batch * part.updates))


def show_plan(names: Iterable[str], out: Path, workers: int) -> None:
    "Prints the runs that each part lacks and their hours; before the tuning, those that it begins with."
    print(f"{'part':>10}  {'runs':>5}  {'ms an update':>14}  {'hours':>7}   with {workers} workers")
    measured: dict[tuple, float] = {}
    total = 0.0
    for name in names:
        part = PARTS[name]
        try: sweep = sweep_of(name, out)
        except InputError:
            jobs = [job for _, _, job in runs_of(name, {arm: Tuned(1e-3, "") for arm in ARMS})]
        else:
            sweep.build()  # a run is known by the hash of its first weights
            jobs = sweep.plan().jobs
        cost = []
        for job in jobs:
            key = part.size, part.batch, part.updates, job.arm.storage, job.arm.rule, job.arm.format
            if key not in measured: measured[key] = milliseconds(job.arm, part)
            cost.append(measured[key])
        hours = sum(cost) * part.updates / 3.6e6 / workers
        total += hours
        span = f"{min(cost, default=0):.0f} to {max(cost, default=0):.0f}"
        print(f"{name:>10}  {len(jobs):>5}  {span:>14}  {hours:>7.2f}", flush=True)
    print(f"{total:.1f} hours in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default=",".join(ASKED))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where models are trained")
    parser.add_argument("--plan", action="store_true", help="say what is left and how long it takes")
    args = parser.parse_args()
    chosen, failed = args.part.split(","), 0
    if not set(chosen) <= set(PARTS): parser.error(f"the parts are {', '.join(PARTS)}")
    device = str(resolve_device(args.device))
    begin(args.out)
    if args.plan:
        show_plan(chosen, args.out, args.workers)
        return 0
    for name in chosen:
        sweep = sweep_of(name, args.out, device)
        sweep.build()
        failed += sweep.run(args.workers)
    return min(failed, 1)


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
