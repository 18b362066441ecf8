"""The other update rules by format and storage: what tier 4 of the central study says of them.

Their runs are made by `altgrad sweep nbs/studies/matrices/tier4.yaml`; the page is nbs/studies/other_rules.ipynb.
"""
from itertools import product
from pathlib import Path
from typing import Callable, Iterable, Mapping, NamedTuple

import numpy as np

from altgrad.evidence.instrument import Arm
from altgrad.evidence.study import (
    POWERS, PRIMARY, RANKED, SMALLEST, Effect, Study, Weights, build_study, contrast, effect, gain, is_frozen, metric,
    read_ledger,
)
from altgrad.evidence.sweep import read_matrix
from altgrad.geometry.catalogue import RULES as CATALOGUE
from altgrad.training.experiment import HOLDS, OPEN, REFUTED

HERE = Path(__file__).resolve().parents[1]
MATRICES = tuple(f"tier{i}" for i in (1, 2, 3, 4))
RULES = {name: CATALOGUE[name].optimizer.__name__ for name in ("riemannian_adamw", "madam", "grid_sgd")}
STORED = {
    "fp32": "FP32, nothing quantized", "master": "FP32 master weights",
    "grid_stochastic": "on the grid, stochastic rounding", "grid_nearest": "on the grid, nearest rounding",
}
FORMATS = RANKED


class Key(NamedTuple):
    "A rule in a storage and a format."
    rule: str
    storage: str
    format: str

    def __str__(self) -> str: return f"{RULES[self.rule]} in {self.format} ({STORED[self.storage]})"


KEYS = tuple(Key(r, s, f) for s in STORED for f in FORMATS for r in RULES)
Gains = dict[Key, Effect]


def stored() -> Study:
    "The central study, from the stored rows."
    matrices = [read_matrix((HERE / f"matrices/{name}.yaml").read_text()) for name in MATRICES]
    return build_study(read_ledger(HERE.parent / "results/ledger"), matrices)


def cell_of(study: Study, key: Key) -> Arm: return study.cell(key.format, key.storage, rule=key.rule)


def compared(study: Study, key: Key) -> Weights:
    "The rule's arm and that of AdamW, weighted so that their sum is the rule's gain."
    return gain(study, cell_of(study, key))


def gains(study: Study) -> Gains:
    "What each arm with two complete seeds ends below AdamW in the same format and storage, in nats a byte."
    found = {key: effect(contrast(study, compared(study, key))) for key in KEYS}
    return {key: e for key, e in found.items() if e}


def at_an_edge(study: Study, key: Key) -> bool:
    "Whether a rate that the gain rests on, the rule's or AdamW's, lies at an edge of those tried, or on a plateau."
    return any(study.tuned[cell].edge for cell in compared(study, key))


def listed(keys: Iterable[Key], found: Gains) -> str:
    "Arms, each with its gain."
    return ", ".join(f"{key} {found[key].mean:+.3f}" for key in keys)


def none_outside(found: Gains) -> tuple[str, str]:
    "One arm beyond it refutes it; it holds only when all are run."
    elsewhere = [key for key in KEYS if key.format != "E7M0"]
    beyond = [key for key in elsewhere if key in found and found[key].low > SMALLEST]
    if beyond: return REFUTED, listed(beyond, found)
    missing = sum(key not in found for key in elsewhere)
    if missing: return "not run to the end", f"{missing} of {len(elsewhere)} arms are missing"
    unclear = [key for key in elsewhere if found[key].high > SMALLEST]
    if unclear: return OPEN, f"an interval reaches further: {listed(unclear, found)}"
    return HOLDS, f"the largest is {max(found[key].mean for key in elsewhere):+.3f}"


def riemannian_in_e7m0(found: Gains) -> tuple[str, str]:
    "It holds and is refuted by the interval."
    key = Key("riemannian_adamw", "grid_stochastic", "E7M0")
    if key not in found: return "not run", ""
    e = found[key]
    verdict = REFUTED if e.high < SMALLEST else HOLDS if e.low > SMALLEST else OPEN
    return verdict, f"{e.mean:+.3f} [{e.low:+.3f}, {e.high:+.3f}]"


CLAIMS: dict[str, Callable[[Gains], tuple[str, str]]] = {  # verdict and what it rests on
    f"None of RiemannianAdamW, Madam and GridSGD gains {SMALLEST:g} nats over AdamW in any format but E7M0":
        none_outside,
    f"RiemannianAdamW gains {SMALLEST:g} nats over AdamW in E7M0 under stochastic rounding": riemannian_in_e7m0,
}


class Moving(NamedTuple):
    "An arm under nearest rounding: how many codes change, and where it ends."
    flips: float  # share of all codes, in a step
    loss: float  # nats a byte


def moving(study: Study, cell: Arm) -> Moving | None:
    "None for an arm that has not been run, or of which half the runs diverged or ended above the frozen model."
    runs = study.runs(cell)
    if not runs or np.mean([is_frozen(r) for r in runs]) >= 0.5: return None
    return Moving(metric(study, cell, "flips"), float(contrast(study, {cell: 1.0}).mean()))


class Line(NamedTuple):
    "A straight line from the logarithm of the share of codes that change to the loss."
    slope: float  # nats for each doubling
    at_one: float  # nats where all codes change
    arms: int  # that it was drawn through
    typical: float  # nats by which one through the other formats' arms misses a format's, root mean square

    def loss(self, flips: float) -> float: return self.at_one + self.slope * float(np.log2(flips))


def retuned() -> Study:
    "AdamW and the powers of S in E7M0 under nearest rounding, of which two had not been tuned, by amendment 1."
    matrix = read_matrix((HERE / "matrices/amended/retuned.yaml").read_text())
    return build_study(read_ledger(HERE.parent / "results/ledger/amended"), [matrix])


def power_of(study: Study, again: Study, f: str, p: float) -> Moving | None:
    "A power of S under nearest rounding, in E7M0 from the runs that replace the others."
    there = again if f == "E7M0" else study
    return moving(there, there.cell(f, "grid_nearest", p))


def line_of_powers(study: Study, again: Study) -> Line | None:
    """The line through the powers of S under nearest rounding in all formats but E0M7, in which they are all AdamW;
    of the other rules it knows nothing. None where fewer than three formats have been run."""
    arms = [(f, m) for f, p in product(PRIMARY, POWERS) if (m := power_of(study, again, f, p))]
    formats = np.array([f for f, _ in arms])
    if len(set(formats)) < 3: return None
    x, y = np.log2([m.flips for _, m in arms]), np.array([m.loss for _, m in arms])
    slope, at_one = np.polyfit(x, y, 1)
    left_out = [y[mine] - np.polyval(np.polyfit(x[~mine], y[~mine], 1), x[mine])
                for mine in (formats == f for f in sorted(set(formats)))]
    return Line(float(slope), float(at_one), len(arms), root_mean_square(np.concatenate(left_out)))


def root_mean_square(x: Iterable[float]) -> float: return float(np.sqrt(np.mean(np.square(list(x)))))


def misses(study: Study, again: Study) -> dict[Key, float]:
    "How far each rule's arm under nearest rounding ends above the line of powers, by its own share of moving codes."
    line = line_of_powers(study, again)
    if line is None: return {}
    known = {key: m for key in KEYS if key.storage == "grid_nearest"
             and (m := moving(study, cell_of(study, key)))}
    return {key: m.loss - line.loss(m.flips) for key, m in known.items()}


TYPICAL = 0.02  # nats: the root mean square of the misses that was said


def on_the_line(found: Mapping[Key, float]) -> tuple[str, str]:
    "Judged by the root mean square of the misses."
    if len(found) < 2: return "not run", ""
    typical = root_mean_square(found.values())
    return HOLDS if typical < TYPICAL else REFUTED, f"{typical:.3f} over {len(found)} arms"


ON_THE_LINE = (f"Under nearest rounding the line of the powers misses the rules' arms by less than {TYPICAL:g} nats, "
               "root mean square")


def near_the_line(found: Mapping[Key, float], typical: float) -> str:
    "How many arms end above the line, and how many as close to it as the powers typically do (nats)."
    above, close = sum(miss > 0 for miss in found.values()), sum(abs(miss) <= typical for miss in found.values())
    return f"{above} of {len(found)} end above it, and {close} lie within its typical miss of {typical:.3f} nats"


def verdicts(study: Study, again: Study, found: Gains) -> dict[str, tuple[str, str]]:
    "By claim the verdict, and what it rests on."
    judged = {text: judge(found) for text, judge in CLAIMS.items()}
    return {**judged, ON_THE_LINE: on_the_line(misses(study, again))}


def under_stochastic(study: Study, f: str) -> Effect | None:
    "How far Madam under nearest rounding ends above AdamW under stochastic rounding, in nats a byte."
    madam, plain = study.cell(f, "grid_nearest", rule="madam"), study.cell(f, "grid_stochastic")
    return effect(contrast(study, {madam: 1.0, plain: -1.0}))


def stored_again() -> Study:
    "Madam's gains with twelve tuning runs a rate, on fresh seeds (amendment 9 of the first protocol)."
    matrix = read_matrix((HERE / "matrices/amended/headline_nearest.yaml").read_text())
    return build_study(read_ledger(HERE.parent / "results/ledger/amended"), [matrix])


SAID_AGAIN = {"E0M7": (0.03, 0.07), "E2M5": (0.01, 0.04)}  # nats that Madam ends below AdamW


def within(e: Effect | None, low: float, high: float) -> tuple[str, str]:
    "Refuted where an interval includes zero or lies outside the bounds."
    if e is None: return "not run", ""
    outside = e.low > high or e.high < low
    verdict = REFUTED if e.sign <= 0 or outside else HOLDS if low <= e.low and e.high <= high else OPEN
    return verdict, f"{e.mean:+.3f} [{e.low:+.3f}, {e.high:+.3f}]"


def above_stochastic(found: Mapping[str, Effect | None]) -> tuple[str, str]:
    "One format in which it does not refutes it."
    if not all(found.values()): return "not run", ""
    known = {f: e for f, e in found.items() if e}
    text = ", ".join(f"{f} {e.mean:+.3f} [{e.low:+.3f}, {e.high:+.3f}]" for f, e in known.items())
    return REFUTED if any(e.sign <= 0 for e in known.values()) else HOLDS, text


def verdicts_again(study: Study) -> dict[str, tuple[str, str]]:
    "By claim of amendment 9 the verdict, and what it rests on."
    judged = {}
    for f, (low, high) in SAID_AGAIN.items():
        e = effect(contrast(study, gain(study, study.cell(f, "grid_nearest", rule="madam"))))
        judged[f"More tuning: Madam under nearest rounding ends {low:g} to {high:g} nats below AdamW in {f}"] = within(
            e, low, high)
    text = "More tuning: AdamW under stochastic rounding ends below Madam under nearest rounding in both"
    return {**judged, text: above_stochastic({f: under_stochastic(study, f) for f in SAID_AGAIN})}
