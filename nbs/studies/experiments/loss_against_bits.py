"""Tunes and confirms every way to keep and to move 8-bit weights, as `bench-1` does.

python nbs/studies/experiments/loss_against_bits.py --out FOLDER [--panel E4M3,...] [--method NAME]
                                                    [--accept CODE,...]

The rows go to FOLDER/ledger.jsonl; what it holds is not run again, so that the command goes on where
it was stopped; rows of other code count as this code's where they are accepted: first replay some.
`python .ci/ledger.py FOLDER/ledger.jsonl nbs/results/bits format` stores them for the page,
nbs/studies/loss_against_bits.ipynb, which says what is expected.
"""
import argparse
import os
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from altgrad.basics import InputError
from altgrad.evidence.bench import PROTOCOLS, Trial
from altgrad.evidence.instrument import Arm
from altgrad.evidence.study import cell_of
from altgrad.geometry.keeping import Storage
from altgrad.geometry.storage import STORAGES
from altgrad.numbers.formats import get_format
from altgrad.training.experiment import HOLDS, OPEN, REFUTED, Interval, interval

AT_ONCE = 8  # methods that are tuned before they are confirmed
PANELS: dict[str, dict[str, str]] = {  # what all arms of a panel have; in the order of the runs
    **{fmt: {"format": fmt, "granularity": "tensor"} for fmt in ("E4M3", "E5M2", "E3M4", "E7M0")},
    "MXFP4": {"format": "float4_e2m1fn", "granularity": "32"},
    "NVFP4": {"format": "float4_e2m1fn", "granularity": "nvfp4"},
}
SCALE_BITS = {"tensor": 0.0, "32": 8 / 32, "nvfp4": 8 / 16}  # a weight
NOISY = {  # the rule with added noise, by what shares a scale
    "tensor": "noisy_adamw.py:NoisyAdamW",
    "32": "noisy_in_blocks.py:MXFP4",
    "nvfp4": "noisy_in_blocks.py:NVFP4",
}
GRID, FOUR = "grid_stochastic", "grid_residual4"

# what is kept, what moves it, and what its moments are kept in; by the name that figures show
METHODS: dict[str, dict[str, Any]] = {
    "master": {"storage": "master"},  # AdamW: what all are measured from
    "master, 8-bit moments": {"storage": "master", "moments": "dynamic8"},
    "nearest": {"storage": "grid_nearest"},
    "stochastic": {"storage": GRID},
    "stochastic, 8-bit moments": {"storage": GRID, "moments": "dynamic8"},
    "bf16": {"storage": "bf16"},
    "bf16 stochastic": {"storage": "bf16_stochastic"},
    "bf16 Kahan": {"storage": "bf16_kahan"},
    "split 8": {"storage": "bf16_split8"},
    "grid Kahan": {"storage": "grid_kahan"},
    "wider float": {"storage": "grid_wide4"},  # four bits of mantissa more
    "residual 2": {"storage": "grid_residual2"},
    "residual 4": {"storage": FOUR},
    "residual 8": {"storage": "grid_residual8"},
    "residual 4, 8-bit moments": {"storage": FOUR, "moments": "dynamic8"},
    "residual 2, 8-bit moments": {"storage": "grid_residual2", "moments": "dynamic8"},
    "ECO": {"rule": "eco", "storage": "grid_nearest"},
    "ECO stochastic": {"rule": "eco", "storage": GRID},
    "ECO, 8-bit moments": {"rule": "eco", "storage": "grid_nearest", "moments": "dynamic8"},
    "ECO, residual 4": {"rule": "eco", "storage": FOUR},
    "Lion": {"rule": "lion", "storage": GRID},
    "Lion, residual 4": {"rule": "lion", "storage": FOUR},
    "SGD": {"rule": "sgd", "storage": GRID},
    "Muon": {"rule": "muon", "storage": GRID},
    "Madam": {"rule": "madam", "storage": GRID},
    "Riemannian": {"rule": "riemannian_adamw", "storage": GRID},
    "GridSGD": {"rule": "grid_sgd", "storage": GRID},
    "S^-1": {"rule": "stiffness_adamw", "power": -1.0, "storage": GRID},
    "S^1": {"rule": "stiffness_adamw", "power": 1.0, "storage": GRID},
    "S^-1, residual 4": {"rule": "stiffness_adamw", "power": -1.0, "storage": FOUR},
    "fp32": {"storage": "fp32"},  # products see float32
    "fp32, noise": {"rule": "noisy", "storage": "fp32"},
    "master, noise": {"rule": "noisy", "storage": "master"},
    # added when E4M3 was known
    "Muon, master": {"rule": "muon", "storage": "master"},
    "Muon, residual 4": {"rule": "muon", "storage": FOUR},
    "Muon, 8-bit moments": {"rule": "muon", "storage": GRID, "moments": "dynamic8"},
    # added when all others were known
    "Lion, residual 4, 8-bit moments": {"rule": "lion", "storage": FOUR, "moments": "dynamic8"},
    # added when that was known, too
    "Muon, residual 4, 8-bit moments": {"rule": "muon", "storage": FOUR, "moments": "dynamic8"},
}


MARGIN = PROTOCOLS["bench-1"].margin  # nats: arms that are closer are equal
NO_CASE = "no occasion"  # for a verdict
Losses = Mapping[str, Sequence[float]]  # of a panel: by method, one a checkpoint


class Asked(dict):
    "Losses that note which of them are asked for: what a verdict rests on."
    def __init__(self, losses: Mapping[Any, Any]):
        super().__init__(losses)
        self.keys_asked: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)


def beside_this(rule: str) -> str:
    "A rule from a file of this folder, as seen from where the program runs, since pages move."
    return f"{os.path.relpath(Path(__file__).parent)}/{rule}"


def with_noise(granularity: str) -> str:
    "The rule that adds noise."
    return beside_this(NOISY[granularity])


def arms(panel: str) -> dict[str, Arm]:
    "The arms of a panel, by name."
    usual = PANELS[panel] | {"rule": "adamw", "checkpoint": PROTOCOLS["bench-1"].tune[0]}
    noisy = with_noise(PANELS[panel]["granularity"])
    def rule(how: dict[str, Any]) -> dict[str, str]:
        return {"rule": noisy} if how.get("rule") == "noisy" else {}
    return {name: Arm(**usual | how | rule(how)) for name, how in METHODS.items()}


def add_end(found: dict[str, dict[str, Any]], name: str, row: Mapping[str, Any]) -> None:
    """Puts an arm's confirming row beside the others, unless it failed; InputError where it was confirmed at two
    rates, or twice."""
    if row.get("error"): return
    ends = found.setdefault(name, {})
    rates = sorted({row["lr"], *(end["lr"] for end in ends.values())})
    if len(rates) > 1:
        raise InputError(f"{name} is confirmed at two rates, {rates[0]:g} and {rates[1]:g}: "
                         "remove the rows of one from the ledger")
    if ends.setdefault(row["checkpoint"], row) is not row:
        raise InputError(f"{name} has two runs on {row['checkpoint']}, made by other code: remove one from the ledger")


def confirmed(rows: Iterable[Mapping[str, Any]], fmt: str) -> dict[str, dict[str, Any]]:
    "The confirming rows of a panel's methods: by name, then by checkpoint."
    names = {arm: name for name, arm in arms(fmt).items()}
    like = next(iter(names))
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["stage"] != "confirm" or row["format"] != PANELS[fmt]["format"]: continue
        name = names.get(cell_of(row, like))
        if name: add_end(found, name, row)
    return found


def at_an_edge(ends: Mapping[str, Mapping[str, Any]]) -> set[str]:
    "The names, of what `confirmed` found, whose tuned rate lies at an end of its grid."
    return {name for name, found in ends.items() if any(row["lr_edge"] for row in found.values())}


def finished(ends: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> dict[str, list[float]]:
    "The losses of what was confirmed on all of these checkpoints, in their order."
    return {name: [found[c]["val_loss"] for c in order] for name, found in ends.items() if set(found) >= set(order)}


def losses_of(rows: Iterable[Mapping[str, Any]], fmt: str) -> dict[str, list[float]]:
    "The confirmed losses of a panel's finished methods, in the order of the checkpoints."
    return finished(confirmed(rows, fmt), PROTOCOLS["bench-1"].confirm)


def above(losses: Losses, method: str, other: str) -> Interval:
    "How far a method ends above another, nats."
    return interval(a - b for a, b in zip(losses[method], losses[other], strict=True))


def weight_bits(method: str, panel: str) -> float:
    "The bits of a weight, of what remembers for it, and of its share of a block's scale."
    kind: Storage = STORAGES[METHODS[method]["storage"]]
    if kind.fmt or not kind.on_grid: return kind.bits
    how = PANELS[panel]
    return get_format(how["format"]).bits + kind.residual_bits + SCALE_BITS[how["granularity"]]


def equal(found: Interval) -> str:
    "Whether two methods tie."
    return found.within(-MARGIN, MARGIN)


def at_most(found: Interval, most: float = MARGIN) -> str:
    "Whether one method ends at most so far above another."
    return found.within(most=most)


def together(verdicts: Iterable[str]) -> str:
    "The verdict on several claims that a prediction makes at once."
    found = list(verdicts)
    if not found: return NO_CASE
    return next((v for v in (REFUTED, OPEN) if v in found), HOLDS)


EXPECTED = ("stochastic", "ECO", "residual 2", "residual 4")  # on the frontier
WIDE = ("bf16 stochastic", "bf16 Kahan", "split 8", "grid Kahan", "residual 8")


def frontier_of_weights(losses: Losses, fmt: str) -> str:
    "Prediction 1."
    most = weight_bits("residual 4", fmt)
    small = [m for m in METHODS if weight_bits(m, fmt) <= most and m not in EXPECTED]
    for m in small:
        if all(above(losses, m, other).high < 0 for other in EXPECTED): return REFUTED
    return at_most(above(losses, "residual 4", "master"))


def equal_bits(losses: Losses, fmt: str) -> str:
    "Prediction 2."
    return equal(above(losses, "wider float", "residual 4"))


def sixteen_bits(losses: Losses, fmt: str) -> str:
    "Prediction 3."
    return together(equal(above(losses, m, "master")) for m in WIDE)


def eco_between(losses: Losses, fmt: str) -> str:
    "Prediction 4."
    to_noise, to_residual = above(losses, "ECO", "stochastic"), above(losses, "ECO", "residual 2")
    if to_noise.low > 0 or to_residual.high < 0: return REFUTED
    return HOLDS if to_noise.high < 0 < to_residual.low else OPEN


def small_moments(losses: Losses, fmt: str) -> str:
    "Prediction 5."
    return together(
        at_most(above(losses, f"{m}, 8-bit moments", m)) for m in ("master", "residual 4")
    )


def geometry(losses: Losses, fmt: str) -> str:
    "Prediction 6."
    if fmt == "E7M0": return at_most(above(losses, "S^-1", "stochastic"), -MARGIN)
    pairs = [(m, "stochastic") for m in ("S^-1", "S^1", "Riemannian", "GridSGD")]
    pairs.append(("S^-1, residual 4", "residual 4"))
    return together(at_most(above(losses, other, m)) for m, other in pairs)


def noise_alone(losses: Losses, fmt: str) -> str:
    "Prediction 7."
    better = [m for m in BY_ADAMW if m not in ("fp32", "master") and above(losses, m, "master").high < 0]
    if not better: return NO_CASE
    return HOLDS if above(losses, "master, noise", "master").high < 0 else REFUTED


LEAST_COST = 0.06  # nats


def four_bits(losses: Losses, fmt: str) -> str:
    "Prediction 8."
    if get_format(PANELS[fmt]["format"]).bits != 4: return NO_CASE
    found = above(losses, "stochastic", "residual 4")
    return found.within(LEAST_COST)


def finer_scales(mx: Losses, nv: Losses) -> str:
    "Prediction 9."
    found = interval(a - b for a, b in zip(nv["stochastic"], mx["stochastic"], strict=True))
    if found.low > 0: return REFUTED
    return HOLDS if found.high < 0 else OPEN


LEAD = 0.04  # nats


def muons_lead(losses: Losses, fmt: str) -> str:
    "Prediction 10."
    return together([
        at_most(above(losses, "Muon, master", "master"), -LEAD),
        at_most(above(losses, "Muon, residual 4", "Muon, master")),
        at_most(above(losses, "Muon, 8-bit moments", "Muon")),
    ])


def lion_in_eight_bits(losses: Losses, fmt: str) -> str:
    "Prediction 11."
    return at_most(above(losses, "Lion, residual 4, 8-bit moments", "Lion, residual 4"))


def muon_in_eight_bits(losses: Losses, fmt: str) -> str:
    "Prediction 12."
    small = "Muon, residual 4, 8-bit moments"
    return together([at_most(above(losses, small, other)) for other in ("master", "Muon, residual 4")])


PREDICTIONS: dict[str, Callable[[Losses, str], str]] = {
    "the frontier of weights": frontier_of_weights,
    "twelve bits, two ways": equal_bits,
    "sixteen bits and more tie": sixteen_bits,
    "ECO lies between": eco_between,
    "moments in eight bits": small_moments,
    "geometry": geometry,
    "noise alone": noise_alone,
    "what four bits cost": four_bits,
    "Muon's lead": muons_lead,
    "Lion in 20 bits": lion_in_eight_bits,
    "Muon in 20 bits": muon_in_eight_bits,
}


def frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    "The methods, by bits and loss, below which none lies that keeps as few bits."
    best, found = float("inf"), []
    for name in sorted(points, key=points.__getitem__):
        if points[name][1] < best: found.append(name)
        best = min(best, points[name][1])
    return found


LIMITS = {8: (8, 10, 12, 16), 4: (4.5, 6.5, 8.5, 16)}  # bits that a weight may take, by those of its codes
CONTROLS = ("fp32", "fp32, noise", "master, noise")  # weights in float32, or with added noise
BY_ADAMW = [name for name, how in METHODS.items() if how.get("rule", "eco") == "eco"]


def limits(panel: str) -> tuple[float, ...]:
    "The numbers of bits that a weight of a panel may take, in a table of advice."
    return LIMITS[get_format(PANELS[panel]["format"]).bits]


def cheapest(losses: Losses, panel: str, limit: float, among: Iterable[str]) -> str:
    "The method with the lowest mean loss of those whose weight takes so many bits; no control."
    allowed = [m for m in among if m not in CONTROLS and weight_bits(m, panel) <= limit]
    return min(allowed, key=lambda m: above(losses, m, "master").mean)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--panel", default=",".join(PANELS))
    parser.add_argument("--method", action="append", choices=list(METHODS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--accept", default="", help="codes of rows that are not run again")
    args = parser.parse_args()
    failed, panels = 0, args.panel.split(",")
    if not set(panels) <= set(PANELS): parser.error(f"the panels are {', '.join(PANELS)}")
    for panel in panels:
        named = [(n, arm) for n, arm in arms(panel).items() if n in (args.method or METHODS)]
        for k in range(0, len(named), AT_ONCE):  # so that what is stopped has confirmed arms
            failed += Trial(
                dict(named[k : k + AT_ONCE]), args.out, accept=filter(None, args.accept.split(","))
            ).run(args.workers)
    return min(failed, 1)


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
