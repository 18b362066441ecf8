"""Runs the arms behind every effect that matters again at the learning rates beside the tuned ones,
as the protocol asks: once on each checkpoint.

python nbs/studies/experiments/neighbours.py --out LEDGER_FOLDER --checkpoints FOLDER --corpus
eurlex=path:TEXT [--workers N] [--accept CODE]
The effects are those of the committed ledger (nbs/results/ledger); the rows go to
LEDGER_FOLDER/ledger.jsonl, and what it holds is not repeated.
"""
import argparse
from dataclasses import replace
from pathlib import Path

from altgrad.evidence.instrument import Bench
from altgrad.evidence.study import Study, what_matters
from altgrad.evidence.sweep import Job, Plan, Sweep, read_matrix
from studies import ROOT, central_study, exit_code, text_of

SEEDS = (0,)  # of the confirmation


class Neighbours(Sweep):
    "A sweep whose runs are those beside the tuned rates."
    def __init__(self, study: Study, *how):
        super().__init__(*how)
        cells = {
            cell for weights in what_matters(study).values() for cell, w in weights.items() if w
        }
        tuned = [(cell, study.tuned[cell]) for cell in sorted(cells, key=str)]
        self.arms = [
            replace(cell, lr=t.rates[k], split="confirm", checkpoint=c, seed=s)
            for s in SEEDS
            for cell, t in tuned
            for k in (t.best - 1, t.best + 1)
            if 0 <= k < len(t.rates)
            for c in study.checkpoints
        ]

    def plan(self) -> Plan:
        jobs = [Job(arm, "neighbour") for arm in self.arms if self.loss(arm) is None]
        return Plan("neighbour" if jobs else "done", jobs, [], {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--corpus", required=True, help="eurlex=path:<file>")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--accept", action="append", default=[], help="as of `altgrad sweep`")
    args = parser.parse_args()
    matrix = replace(
        read_matrix((ROOT / "studies/matrices/tier1.yaml").read_text()), name="neighbours", tier=7
    )
    bench = Bench(args.checkpoints, text_of(args.corpus))
    sweep = Neighbours(central_study((1, 2, 3, 4)), matrix, args.out, bench, args.accept)
    print(f"{len(sweep.arms)} runs, {len(sweep.plan().jobs)} of them to be made", flush=True)
    return min(sweep.run(args.workers), 1)


if __name__ == "__main__": raise SystemExit(exit_code(main))
