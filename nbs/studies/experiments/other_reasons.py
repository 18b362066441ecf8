"""What else could be the reason: formulas, resets, averages, floors, scales, inputs, all tensors, the noise
of a residual's grid; and the README's sentences on twelve checkpoints.

python nbs/studies/experiments/other_reasons.py --out FOLDER [--part NAME,...] [--workers N]

Each part has a ledger of its own, FOLDER/PART/ledger.jsonl; the command goes on where it was stopped.
`python .ci/ledger.py FOLDER/PART/ledger.jsonl nbs/results/reasons/PART` stores the rows for the page,
nbs/studies/other_reasons.ipynb, which says what is expected.
"""
import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from altgrad.evidence.bench import PROTOCOLS, Protocol, Trial
from altgrad.evidence.instrument import Arm, Task
from altgrad.evidence.study import cell_of
from altgrad.training.experiment import HOLDS, REFUTED, Interval, interval

sys.path.append(str(Path(__file__).parent))
from loss_against_bits import METHODS, PANELS, Asked, add_end, at_an_edge, beside_this, finished, with_noise

BENCH = PROTOCOLS["bench-1"]
LAW = replace(BENCH, name="other reasons", tune=BENCH.tune[:2])
MARGIN = BENCH.margin  # nats: arms that are closer are equal
GRID = "grid_stochastic"
Losses = Mapping[str, Sequence[float]]  # by arm, one a checkpoint


def none(found: Interval) -> str:
    "Whether a difference is none."
    return found.within(-MARGIN, MARGIN)


def gap(losses: Losses, arm: str, other: str) -> Interval:
    "How far an arm ends above another, nats."
    return interval(a - b for a, b in zip(losses[arm], losses[other], strict=True))


@dataclass(frozen=True)
class Claim:
    "A sentence that runs can refute."
    text: str
    found: Callable[[Losses], Interval]
    judge: Callable[[Interval], str]


@dataclass(frozen=True)
class Part:
    "Arms that are compared, and what is claimed of them."
    arms: Mapping[str, dict[str, Any]]
    claims: Sequence[Claim]
    task: Task = LAW.task
    confirm: tuple[str, ...] = LAW.confirm
    beside: str = ""  # a part whose arms are not run again where they are the same

    def protocol(self) -> Protocol:
        "The law of all parts, with this part's task and checkpoints."
        return replace(LAW, task=self.task, confirm=self.confirm)

    def made(self) -> dict[str, Arm]:
        "The arms by name."
        usual = {"rule": "adamw", "checkpoint": LAW.tune[0], "storage": GRID}
        return {name: Arm(**usual | how) for name, how in self.arms.items()}

    def own(self) -> dict[str, Arm]:
        "The arms that are run for this part."
        there = set(PARTS[self.beside]().made().values()) if self.beside else set()
        return {name: arm for name, arm in self.made().items() if arm not in there}


def differs(arm: str, other: str) -> Callable[[Losses], Interval]:
    "How far an arm ends above another."
    return lambda losses: gap(losses, arm, other)


def gain_differs(pair: tuple[str, str], other: tuple[str, str]) -> Callable[[Losses], Interval]:
    "How far the gain of one pair, the second's loss minus the first's, exceeds that of another."
    def found(losses: Losses) -> Interval:
        rows = zip(*(losses[name] for name in (*pair, *other)), strict=True)
        return interval((b - a) - (d - c) for a, b, c, d in rows)
    return found


def share_of(pair: tuple[str, str], whole: tuple[str, str], share: float
             ) -> Callable[[Losses], Interval]:
    "How far the first's loss above the second's exceeds a share of the same of another pair."
    def found(losses: Losses) -> Interval:
        rows = zip(*(losses[name] for name in (*pair, *whole)), strict=True)
        return interval((a - b) - share * (c - d) for a, b, c, d in rows)
    return found


def rests_on(claim: Claim, losses: Losses, edges: set[str]) -> set[str]:
    "The arms at an edge that a claim is judged by."
    asked = Asked(losses)
    claim.found(asked)
    return asked.keys_asked & edges


def formulas() -> Part:
    "Other formulas of the stiffness."
    names = ("ulp", "smooth", "exponent", "lns")
    arms, claims = {}, []
    for fmt in ("E4M3", "E7M0"):
        for p in (-0.5, 0.5):
            for name in names:
                arms[f"{fmt} {p:g} {name}"] = {
                    "format": fmt, "rule": "stiffness_adamw", "power": p, "formula": name,
                }
            for one, other in (("exponent", "ulp"), ("lns", "smooth"), ("smooth", "ulp")):
                claims.append(Claim(f"{fmt}, p = {p:g}: {one} ties with {other}",
                                    differs(f"{fmt} {p:g} {one}", f"{fmt} {p:g} {other}"), none))
    return Part(arms, claims)


def resets() -> Part:
    "Moments that begin anew."
    arms, claims = {}, []
    for name, how in {"FP32": {"storage": "fp32"}, "E4M3": {"format": "E4M3"},
                      "E7M0": {"format": "E7M0"}}.items():
        for every in (0, 25, 100): arms[f"{name} {every}"] = how | {"reset_every": every}
        claims += [Claim(f"{name}: moments that begin anew every {every} updates cost at least 0.01 nats",
                         differs(f"{name} {every}", f"{name} 0"), lambda d: d.within(MARGIN))
                   for every in (25, 100)]
    return Part(arms, claims)


def inputs() -> Part:
    "Rounded inputs of all linear layers, weights in float32."
    words = ("", "E0M7", "E1M6", "E1M6 unscaled", "E4M3", "E4M3 unscaled")
    arms = {word or "none": {"storage": "fp32", "inputs": word} for word in words}
    return Part(arms, [
        Claim("E1M6 under a scale is E0M7, to the last bit", differs("E1M6", "E0M7"),
              lambda d: HOLDS if d.low == d.high == 0 else REFUTED),
        Claim("E4M3 needs no scale: without one it ends at most 0.01 nats above",
              differs("E4M3 unscaled", "E4M3"), lambda d: d.within(most=MARGIN)),
        Claim("E1M6 without a scale costs at most 0.03 nats", differs("E1M6 unscaled", "none"),
              lambda d: d.within(most=0.03)),
        Claim("E1M6 under a scale costs at most 0.01 nats", differs("E1M6", "none"),
              lambda d: d.within(most=MARGIN)),
    ])


def average() -> Part:
    "An average of the weights, beside a bent update."
    arms: dict[str, dict[str, Any]] = {
        "AdamW": {"format": "E7M0"},
        "average": {"format": "E7M0", "rule": "averaged_adamw"},
        "FP32": {"storage": "fp32"},
        "FP32, average": {"storage": "fp32", "rule": "averaged_adamw"},
    }
    for p in (-0.5, -1.0):
        arms[f"S^{p:g}"] = {"format": "E7M0", "rule": "stiffness_adamw", "power": p}
    return Part(arms, [
        Claim("E7M0: an average of AdamW's weights wins at least 0.02 nats",
              differs("AdamW", "average"), lambda d: d.within(0.02)),
        Claim("E7M0: S^-1 wins at most 0.01 nats more than the average", differs("average", "S^-1"),
              lambda d: d.within(most=MARGIN)),
        Claim("E7M0: the average wins at least 0.01 nats more than it does in FP32",
              gain_differs(("average", "AdamW"), ("FP32, average", "FP32")),
              lambda d: d.within(MARGIN)),
    ])


def floors() -> Part:
    "Floors of the stiffness, in octaves below the largest."
    arms, claims = {}, []
    for fmt in ("E4M3", "E7M0"):
        arms[f"{fmt} AdamW"] = {"format": fmt}
        for p in (-1.0, 1.0):
            for floor in (2.0, 4.0, 8.0, 16.0):
                arms[f"{fmt} S^{p:g} R={floor:g}"] = {
                    "format": fmt, "rule": "stiffness_adamw", "power": p, "floor_octaves": floor,
                }
            for floor in (4, 16):
                one, other = (f"{fmt} S^{p:g} R={r}" for r in (floor, 8))
                claims.append(Claim(f"{fmt}, p = {p:g}: R = {floor} ties with R = 8",
                                    differs(one, other), none))
    return Part(arms, claims)


def scales() -> Part:
    "One scale for a tensor, a channel or a block."
    arms: dict[str, dict[str, Any]] = {"FP32": {"storage": "fp32"}}
    claims = []
    for fmt in ("E0M7", "E2M5", "E4M3", "E5M2", "E7M0"):
        for shared in ("tensor", "channel", "32"):
            arms[f"{fmt} {shared}"] = {"format": fmt, "granularity": shared}
        for shared in ("channel", "32"):
            one, whole = (f"{fmt} {shared}", "FP32"), (f"{fmt} tensor", "FP32")
            if fmt in ("E0M7", "E2M5"):
                claims.append(Claim(f"{fmt}, {shared}: the cost falls by more than a third",
                                    share_of(one, whole, 2 / 3), lambda d: d.within(most=0.0)))
                continue
            claims.append(Claim(f"{fmt}, {shared}: the cost stays above four fifths",
                                share_of(one, whole, 0.8), lambda d: d.within(0.0)))
            claims.append(Claim(f"{fmt}, {shared}: the cost stays below six fifths",
                                share_of(one, whole, 1.2), lambda d: d.within(most=0.0)))
    return Part(arms, claims)


def in_order(how: dict[str, Any], task: Task = LAW.task) -> Part:
    "Master weights, stochastic and nearest rounding, in other surroundings."
    arms = {f"{fmt} {kind}": how | {"format": fmt, "storage": kind}
            for fmt in ("E4M3", "E7M0") for kind in ("master", GRID, "grid_nearest")}
    steps = (("master", GRID), (GRID, "grid_nearest"))
    claims = [Claim(f"{fmt}: {b} does not end more than 0.01 nats below {a}",
                    differs(f"{fmt} {b}", f"{fmt} {a}"), lambda d: d.within(-MARGIN))
              for fmt in ("E4M3", "E7M0") for a, b in steps]
    return Part(arms, claims, task)


BLOCKS = [panel for panel, how in PANELS.items() if how["granularity"] != "tensor"]
BENT = {"E2M5": 1.5, "E3M4": 0.5, "E4M3": 0.5, "E5M2": 0.5, "E6M1": 0.5, "E7M0": -0.5}  # p, best with master weights
BELOW = {  # what the README advises because it ends below master weights
    "E4M3": "residual 2", "E3M4": "residual 2, 8-bit moments",
    **dict.fromkeys(("E5M2", "E7M0", *BLOCKS), "ECO, residual 4"),
}

def bent(p: float) -> dict[str, Any]:
    "A rule in the geometry of the format."
    return {"rule": "stiffness_adamw", "power": p}


def twelve() -> Part:
    "Sentences of the README on twelve checkpoints: those that confirm, and two that do not tune here."
    arms: dict[str, dict[str, Any]] = {}
    claims = []

    def arm(fmt: str, way: str, **how: Any) -> str:
        name = f"{fmt} {way}"
        arms[name] = PANELS.get(fmt, {"format": fmt}) | METHODS.get(way, {}) | how
        return name

    def below(one: str, other: str, least: float = 0.0) -> None:
        words = f"at least {least:g} nats below" if least else "below"
        claims.append(Claim(f"{one} ends {words} {other.split(' ', 1)[1]}", differs(other, one),
                            lambda d: d.within(least)))

    below(arm("E7M0", "S^-1"), arm("E7M0", "stochastic"), MARGIN)
    below(arm("E6M1", "S^-0.5", **bent(-0.5)), arm("E6M1", "stochastic"))
    below(arm("E6M1", "nearest S^0.5", storage="grid_nearest", **bent(0.5)), arm("E6M1", "nearest"))
    for fmt, p in BENT.items():
        one, other = arm(fmt, f"master S^{p:g}", storage="master", **bent(p)), arm(fmt, "master")
        claims.append(Claim(f"{one} ends at most 0.01 nats below master", differs(other, one),
                            lambda d: d.within(most=MARGIN)))
    for fmt in ("E4M3", "E5M2", "E7M0"):
        whole = arm(fmt, "stochastic"), f"{fmt} master"
        for bits in (4, 8):
            kept = arm(fmt, f"residual {bits}"), f"{fmt} master"
            claims.append(Claim(f"{fmt}: {bits} bits win back more than half of what the grid costs",
                                share_of(kept, whole, 0.5), lambda d: d.within(most=0.0)))
    for fmt in BLOCKS: arm(fmt, "master")
    for fmt in ("E4M3", "E5M2", "E3M4", *BLOCKS):
        below(arm(fmt, "ECO stochastic"), arm(fmt, "stochastic"))
    below(arm("E7M0", "nearest"), "E7M0 stochastic")
    for fmt, way in BELOW.items(): below(arm(fmt, way), f"{fmt} master")
    for fmt, how in PANELS.items():
        noisy = arm(fmt, "master, noise", rule=with_noise(how["granularity"]))
        claims.append(Claim(f"{fmt}: stochastic rounding ends at most 0.01 nats above the noise alone",
                            differs(f"{fmt} stochastic", noisy), lambda d: d.within(most=MARGIN)))
    return Part(arms, claims, confirm=BENCH.tune[2:] + BENCH.confirm)


def noise() -> Part:
    "The noise of a residual's own grid, on master weights: a reason why a residual ends below them?"
    arms: dict[str, dict[str, Any]] = {}
    claims = []
    for fmt in ("E4M3", "E3M4", "E5M2", "E7M0"):
        master = f"{fmt} master"
        arms[master] = PANELS[fmt] | METHODS["master"]
        for bits, kind in ((2, "TwoBits"), (4, "FourBits")):
            noisy, kept = f"{master}, noise of {bits} bits", f"{fmt} residual {bits}"
            arms[noisy] = PANELS[fmt] | {"storage": "master", "rule": beside_this(f"noisy_residual.py:{kind}")}
            arms[kept] = PANELS[fmt] | METHODS[f"residual {bits}"]
            much = bits == 2 and fmt in ("E5M2", "E7M0")
            words, judge = (("at least", lambda d: d.within(MARGIN)) if much else
                            ("at most", lambda d: d.within(most=MARGIN)))
            claims.append(Claim(f"{fmt}: the noise of {bits} bits costs master weights {words} 0.01 nats",
                                differs(noisy, master), judge))
            side, judge = (("above", lambda d: d.within(0.0)) if fmt == "E7M0" else
                           ("below", lambda d: d.within(most=0.0)))
            claims.append(Claim(f"{kept} ends {side} master weights with the noise of its grid",
                                differs(kept, noisy), judge))
    return Part(arms, claims, confirm=BENCH.tune[2:] + BENCH.confirm, beside="twelve")


PARTS: dict[str, Callable[[], Part]] = {  # in the order of the runs
    "average": average,
    "formulas": formulas,
    "scales": scales,
    "inputs": inputs,
    "tensors": lambda: in_order({"inputs": "E4M3", "gradients": "E5M2"}),
    "floors": floors,
    "resets": resets,
    "decay": lambda: in_order({"weight_decay": 0.1}),
    "betas": lambda: in_order({}, replace(LAW.task, beta2=0.999)),
    "batches": lambda: in_order({}, replace(LAW.task, batch_size=4 * LAW.task.batch_size)),
    "twelve": twelve,
    "noise": noise,
}


def confirmed(rows: Iterable[Mapping[str, Any]], part: Part) -> dict[str, dict[str, Any]]:
    "The confirming rows of a part's arms: by name, then by checkpoint."
    like = replace(next(iter(part.made().values())), lr=0.0, corpus=LAW.corpus)
    names: dict[Arm, list[str]] = {}
    for name, arm in part.made().items():
        names.setdefault(replace(arm, lr=0.0, corpus=LAW.corpus), []).append(name)
    ends: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["stage"] != "confirm": continue
        for name in names.get(cell_of(row, like), ()): add_end(ends, name, row)
    return ends


def edges_of(rows: Iterable[Mapping[str, Any]], part: Part) -> set[str]:
    "The arms whose tuned rate lies at an end of its grid."
    return at_an_edge(confirmed(rows, part))


def losses_of(rows: Iterable[Mapping[str, Any]], part: Part) -> dict[str, list[float]]:
    "The confirmed losses of a part's finished arms, in the order of the checkpoints."
    return finished(confirmed(rows, part), part.confirm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    chosen = args.part.split(",")
    if not set(chosen) <= set(PARTS): parser.error(f"the parts are {', '.join(PARTS)}")
    failed = 0
    for name in chosen:
        part = PARTS[name]()
        failed += Trial(part.own(), args.out / name, part.protocol()).run(args.workers)
    return min(failed, 1)


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
