"""The law: its constants from stored rows by pandas alone, its verdicts from rows by another way, and that what
was said stands in the commit that made the runs."""
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tiny import load_experiment

law = load_experiment("the_law")
reasons = load_experiment("other_reasons")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "nbs/results"
ROWS = RESULTS / "law/law-formats.parquet"


def confirmed(path: Path) -> pd.DataFrame:
    rows = pd.read_parquet(path)
    return rows[(rows.stage == "confirm") & rows.error.isna()]


def test_constants_are_those_of_the_first_study():
    loss = confirmed(RESULTS / "ledger/tier1.parquet").groupby(
        ["format", "storage", "power", "checkpoint"]).val_loss.mean()
    def gain(fmt, storage): return loss[fmt, storage, 0.0] - loss[fmt, storage, -1.0]
    cost = {f: loss[f, law.GRID, 0.0] - loss[f, "fp32", 0.0] for f in law.FITTED}
    over = {f: gain(f, law.GRID) - gain(f, "fp32") for f in law.FITTED}
    x, y = (np.array([values[f].to_numpy() for f in law.FITTED]) for values in (cost, over))
    shares = (x * y).sum(0) / (x * x).sum(0)  # one a checkpoint
    assert len(shares) == 3 and round(shares.mean(), 3) == law.SHARE
    line = np.polyfit(x.mean(1), [gain(f, law.GRID).mean() for f in law.FITTED], 1)
    assert line.round(3).tolist() == [law.SLOPE, law.INTERCEPT]


def test_gains_and_what_exceeds_the_law_are_paired_by_checkpoint():
    losses = reasons.losses_of(pd.read_parquet(ROWS).to_dict("records"), law.format_part())
    rows = confirmed(ROWS)
    table = rows.pivot_table(index="checkpoint", columns=["format", "storage", "power"], values="val_loss")
    plain = table["E4M3", "fp32", 0.0]  # AdamW in FP32 knows no format
    for fmt in law.NEW:
        grid, rule, rule32 = (table[fmt, s, p] for s, p in ((law.GRID, 0.0), (law.GRID, -1.0), ("fp32", -1.0)))
        excess = (grid - rule) - (plain - rule32) - law.SHARE * (grid - plain)
        assert len(excess) == 10
        # the same sums of float64 in another order
        assert law.gain(losses, fmt).mean == pytest.approx((grid - rule).mean(), abs=1e-12)
        assert law.excess(losses, fmt, law.SHARE).mean == pytest.approx(excess.mean(), abs=1e-12)


def test_the_share_of_noise_in_weights_is_none_in_fixed_point_and_grows_with_the_power():
    # one spacing, or no bending: two equal sums of float64
    assert law.share_in_weights("E0M7", -1.0) == pytest.approx(0, abs=1e-9)
    assert law.share_in_weights("E4M3", 0.0) == pytest.approx(0, abs=1e-9)
    shares = [law.share_in_weights("E4M3", p) for p in (-1.0, -0.5, 0.5, 1.0)]
    assert shares == sorted(shares, reverse=True)


def test_what_was_said_stands_in_the_commit_that_made_the_runs():
    for commit in pd.read_parquet(ROWS, columns=["commit"]).commit.unique():
        shown = subprocess.run(["git", "-C", ROOT, "show", f"{commit}:nbs/studies/protocol_2.ipynb"],
                               capture_output=True, text=True)
        if shown.returncode: pytest.skip("the history is not here")
        assert "+0.037 in E5M0, +0.002 in E4M1, +0.05 in E3M0, -0.013 in E3M2" in shown.stdout
