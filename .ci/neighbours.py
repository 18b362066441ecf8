"""Runs the arms behind every effect that matters again at the learning rates beside the tuned ones, as the protocol asks: once on each checkpoint.

python .ci/neighbours.py --out LEDGER_FOLDER --checkpoints FOLDER --corpus eurlex=path:TEXT [--workers N]
The effects are those of the committed ledger (nbs/results/ledger); the rows go to LEDGER_FOLDER/ledger.jsonl, and what it holds is not repeated.
"""
import argparse
from dataclasses import replace
from pathlib import Path

from altgrad.evidence import SMALLEST, Study, best_rule, build_study, contrast, effect, gain_over_fp32, holm, judge, read_ledger, slope_over_fp32
from altgrad.formats import EIGHT_BIT
from altgrad.instrument import Arm, Bench
from altgrad.sweep import Job, Plan, Sweep, read_matrix

ROOT = Path(__file__).resolve().parent.parent / "nbs"
STORAGES, SEEDS = ("grid_stochastic", "grid_nearest", "master"), (0,)


def cells_that_matter(study: Study) -> list[Arm]:
    "The cells of every D and B that matters."
    keys = [(s, f) for s in STORAGES for f in EIGHT_BIT if f not in ("E0M7", "E1M6")]
    slopes = [slope_over_fp32(study, f, s) for s, f in keys]
    effects = [effect(contrast(study, w)) for w in slopes]
    adjusted = iter(holm([e.p for e in effects if e], len(keys)))
    found = [w for w, e in zip(slopes, effects) if e and judge(e, SMALLEST / 2, next(adjusted)) == "matters"]
    best = [cell for s in STORAGES for f in EIGHT_BIT if f != "E1M6" and (cell := best_rule(study, f, s))]
    gains = [gain_over_fp32(study, cell) for cell in best]
    found += [w for w in gains if judge(effect(contrast(study, w)), SMALLEST) == "matters"]
    return sorted({cell for weights in found for cell, w in weights.items() if w}, key=str)


class Neighbours(Sweep):
    "A sweep whose runs are those beside the tuned rates."
    def __init__(self, study: Study, *how):
        super().__init__(*how)
        tuned = [(cell, study.tuned[cell]) for cell in cells_that_matter(study)]
        self.arms = [replace(cell, lr=t.rates[k], split="confirm", checkpoint=c, seed=s) for s in SEEDS for cell, t in tuned
                     for k in (t.best - 1, t.best + 1) if 0 <= k < len(t.rates) for c in study.checkpoints]

    def plan(self) -> Plan:
        jobs = [Job(arm, "neighbour") for arm in self.arms if self.loss(arm) is None]
        return Plan("neighbour" if jobs else "done", jobs, [], {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--corpus", required=True, help="eurlex=path:<file>")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    central = [read_matrix((ROOT / f"studies/matrices/tier{i}.yaml").read_text()) for i in (1, 2, 3)]
    bench = Bench(args.checkpoints, dict([args.corpus.split("=", 1)]))
    sweep = Neighbours(build_study(read_ledger(ROOT / "results/ledger"), central), replace(central[0], name="neighbours", tier=7), args.out, bench)
    print(f"{len(sweep.arms)} runs, {len(sweep.plan().jobs)} of them to be made", flush=True)
    return sweep.run(args.workers)


if __name__ == "__main__": raise SystemExit(main())
