"""The numbers of README and the answer, worked out again from the parquet files by pandas: nothing here knows `altgrad.evidence.study`."""
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
LEDGER = ROOT / "nbs/results/ledger"
ARM = ["format", "storage", "rule", "placement", "power"]
CHECKPOINTS = {"stdlib": "stdlib-0.1m", "eurlex": "eurlex-0.1m"}


def table(folder: Path) -> pd.DataFrame:
    "All runs of a folder, each once."
    rows = pd.concat([pd.read_parquet(path) for path in sorted(folder.glob("*.parquet"))])
    return rows[rows.error.isna()].drop_duplicates("run")


class Runs:
    "The runs of one study: tuned rates, and confirmed losses."
    def __init__(self, rows: pd.DataFrame, family: str, tune: set[int], confirm: set[int]):
        rows = rows[rows.checkpoint.str.startswith(family)]
        tuning = rows[(rows.split == "tune") & rows.seed.isin(tune)]
        means = tuning.groupby([*ARM, "lr"], as_index=False)[["val_loss", "raw_loss"]].mean()
        means.raw_loss = means.raw_loss.fillna(np.inf)
        first = means.sort_values(["val_loss", "raw_loss", "lr"]).groupby(ARM, as_index=False).first()
        self.tuned = first.set_index(ARM)
        confirmed = rows[(rows.split == "confirm") & rows.seed.isin(confirm)].merge(first[[*ARM, "lr"]], on=[*ARM, "lr"])
        self.pieces = {arm: part.set_index(["checkpoint", "seed"]).sort_index() for arm, part in confirmed.groupby(ARM)}

    def losses(self, fmt, storage, power=0.0, placement="update") -> np.ndarray:
        "Losses [checkpoints, seeds, pieces], shifted to the exact mean of each run."
        part = self.pieces[fmt, storage, "stiffness_adamw", placement, power]
        chunks = np.stack(part.val_chunks.to_numpy()).astype(float)
        chunks += (part.val_loss.to_numpy() - chunks.mean(1))[:, None]
        return chunks.reshape(3, len(part) // 3, -1)

    def gain(self, fmt, storage, power, placement="update"):
        return self.losses(fmt, storage) - self.losses(fmt, storage, power, placement)

    def slope(self, fmt, storage, powers=(-1.0, -0.5, 0.0, 0.5, 1.0)):
        return sum(p * self.losses(fmt, storage, p) for p in powers) / sum(p * p for p in powers)

    def rate(self, fmt, storage, power=0.0, placement="update"): return self.tuned.lr[fmt, storage, "stiffness_adamw", placement, power]


def interval(d: np.ndarray) -> tuple[float, float]:
    "The 95 % t interval of three checkpoints' means."
    return tuple(stats.ttest_1samp(d.mean((1, 2)), 0).confidence_interval(0.95))


def drawn(d: np.ndarray, draws: int = 4000) -> tuple[float, float]:
    "A 95 % bootstrap interval: checkpoints, seeds within them, pieces of text."
    rng, (_, seeds, pieces) = np.random.default_rng(5), d.shape
    c = rng.integers(3, size=(draws, 3, 1))
    s = rng.integers(seeds, size=(draws, 3, seeds))
    counts = np.apply_along_axis(np.bincount, 1, rng.integers(pieces, size=(draws, pieces)), minlength=pieces)
    pairs = np.apply_along_axis(np.bincount, 1, (c * seeds + s).reshape(draws, -1), minlength=3 * seeds)
    means = ((pairs @ d.reshape(-1, pieces)) * counts).sum(1) / (3 * seeds * pieces)
    return tuple(np.quantile(means, (0.025, 0.975)))


def near(d: np.ndarray) -> float:
    "How far two bootstraps' ends may lie apart: five standard errors of a quantile of 4,000 normal draws, 0.04 standard deviations each."
    return 5 * 0.04 * np.subtract(*drawn(d)[::-1]) / 3.92


@pytest.fixture(scope="module")
def central(): return Runs(table(LEDGER), "stdlib-0.1m", {1000, 1001, 1002}, set(range(8)))


@pytest.fixture(scope="module")
def retuned():
    rows = table(LEDGER / "amended")
    return Runs(rows[rows.matrix == "retuned"], "stdlib-0.1m", {1000, 1001, 1002}, set(range(8)))


def said(page: str) -> str:
    "All that a page's stored outputs say."
    cells = json.loads((ROOT / f"nbs/studies/{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(o["data"]["text/markdown"]) for c in cells for o in c.get("outputs", []) if "text/markdown" in o.get("data", {}))


def check(text_mean, text_low, text_high, d, digits):
    "A printed mean with the wider of both intervals."
    last = 0.51 * 10**-digits
    assert abs(float(text_mean) - d.mean()) < last
    (a, b), (c, e) = interval(d), drawn(d)
    assert abs(float(text_low) - min(a, c)) < last + near(d) and abs(float(text_high) - max(b, e)) < last + near(d)


STORAGE = {"stochastic rounding": "grid_stochastic", "nearest rounding": "grid_nearest", "FP32 master weights": "master"}
GAIN = re.compile(r"(E\dM\d)(?: gains most:|) \(?S\^(-?[\d.]+)(?: ends|,) (-?[\d.]+) nats \[(-?[\d.]+), (-?[\d.]+)\]")


def test_gains_of_the_first_sentence(central):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = next(line for line in readme.splitlines() if line.startswith("**") and "gains most" in line)
    assert sentence in said("the_answer")
    found = 0
    for clause in sentence.split(".** ")[0].removeprefix("**So far. ").split(". With"):
        storage = next(name for words, name in STORAGE.items() if words in clause)
        for fmt, power, mean, low, high in GAIN.findall(clause):
            check(mean, low, high, central.gain(fmt, storage, float(power)), 3)
            found += 1
            best = min((central.tuned.val_loss[a], abs(a[4])) for a in central.tuned.index if a[:2] == (fmt, storage) and a[4])
            assert best[1] == abs(float(power)), "another rule has the least tuning loss"
    assert found >= 3


def test_table_of_slopes(central, retuned):
    number, both = r"([-+.\d]+)", r"\[([-+.\d]+), ([-+.\d]+)\]"
    rows = re.findall(rf"\| (grid_\w+|master) \| (E\dM\d) \| {number} {both} \| {both} \| ([.\d]+) \|", said("the_answer"))
    assert len(rows) == 18
    p_values = []
    for storage, fmt, mean, low, high, from_, to, _ in rows:
        runs = retuned if (storage, fmt) == ("grid_nearest", "E7M0") else central
        d = runs.slope(fmt, storage) - runs.slope(fmt, "fp32")
        p_values.append(max(0.001, stats.ttest_1samp(d.mean((1, 2)), 0).pvalue))
        assert np.allclose([float(mean), float(low), float(high)], [d.mean(), *interval(d)], atol=0.51e-4, rtol=0)  # printed with four digits
        assert np.allclose([float(from_), float(to)], drawn(d), atol=near(d) + 0.51e-4, rtol=0)
    order, least = np.argsort(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (18 - rank) * p_values[i]))
        assert abs(float(rows[i][-1]) / least - 1) < 0.06  # printed with two digits


def test_table_of_every_rule(central):
    lines = said("the_answer").splitlines()
    head = next(line for line in lines if line.startswith("| storage | format | AdamW: loss |"))
    rules = [name.strip() for name in head.strip("|").split("|")[3:]]
    checked = 0
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("| "): break
        storage, fmt, adamw, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert abs(float(adamw.split()[0]) - central.losses(fmt, storage).mean()) < 0.51e-3  # printed with three digits
        assert adamw.split("@")[1].rstrip("*") == f"{central.rate(fmt, storage):.2g}"
        for rule, cell in zip(rules, cells):
            if not cell or cell == "not run" or not rule.startswith("S^"): continue
            power, placement = float(rule.split()[0][2:]), "gradient" if "gradient" in rule else "update"
            d = central.gain(fmt, storage, power, placement) - central.gain(fmt, "fp32", power, placement)
            mean, low, high, rate = re.match(r"\**([-+.\d]+) \[([-+.\d]+), ([-+.\d]+)\]\** @([-.e\d]+)", cell).groups()
            printed = [float(mean), float(low), float(high)]
            assert np.allclose(printed, [d.mean(), *interval(d)], atol=0.51e-3, rtol=0), (storage, fmt, rule)  # three digits
            assert rate == f"{central.rate(fmt, storage, power, placement):.2g}"
            checked += 1
    assert checked > 120


@pytest.mark.parametrize("family, seeds, place", [("stdlib", range(8, 16), 0), ("eurlex", range(8), 1)])
def test_error_feedback(family, seeds, place):
    runs = Runs(table(LEDGER), CHECKPOINTS[family], {1000, 1001, 1002}, set(seeds))
    text = re.findall(r"in nats a byte\. (.*?)\.\*?\*? ", said("better_rule"))[place]
    assert text in (ROOT / "README.md").read_text(encoding="utf-8")
    storages = ("grid_stochastic", "grid_residual4", "grid_residual8")
    for part, storage in zip(text.split("; "), storages, strict=True):
        numbers = re.findall(r"(E\dM\d) ([-+.\d]+) \[([-+.\d]+), ([-+.\d]+)\]", part)
        assert [n[0] for n in numbers] == ["E4M3", "E5M2", "E7M0"]
        for fmt, mean, low, high in numbers: check(mean, low, high, runs.losses(fmt, storage) - runs.losses(fmt, "master"), 4)


def test_what_the_amendments_changed(central, retuned):
    old = {(o["effect"], o["storage"], o["format"]): o for o in json.loads((LEDGER / "superseded.json").read_text())["effects"] if o["study"] == "central"}
    rows = re.findall(r"\| (D|B|gain) \| (\w+) \| (E\dM\d) \| ([-+.\d]+) \[.*?\] \| ([\w ]+) \| ([-+.\d]+) \[([-+.\d]+), ([-+.\d]+)\] \|", said("the_answer"))
    assert ("D", "grid_nearest", "E7M0") in {row[:3] for row in rows}
    for effect, storage, fmt, before, judged, now, low, high in rows:
        assert abs(old[effect, storage, fmt]["mean"] - float(before)) < 0.51e-4 and old[effect, storage, fmt]["verdict"] == judged  # printed with four digits
        if effect != "D": continue
        runs = retuned if (storage, fmt) == ("grid_nearest", "E7M0") else central
        d = runs.slope(fmt, storage) - runs.slope(fmt, "fp32")
        assert np.allclose([float(now), float(low), float(high)], [d.mean(), *interval(d)], atol=0.51e-4, rtol=0)  # printed with four digits


def test_more_tuning_for_the_large_gain():
    "What is said of amendment 2, as soon as it is complete."
    rows = table(LEDGER / "amended")
    rows = rows[rows.matrix == "headline_e7m0"]
    sentence = (r"on fresh seeds S\^-1 in E7M0 ends ([-.\d]+) nats \[([-.\d]+), ([-.\d]+)\] below AdamW under stochastic rounding; "
                r"without quantization it (costs|gains) (\d\.\d+)")
    found = re.search(sentence, said("the_answer"))
    if (rows.split == "confirm").sum() < 96: return
    runs = Runs(rows, "stdlib-0.1m", set(range(1100, 1112)), set(range(16, 24)))
    check(*found.groups()[:3], runs.gain("E7M0", "grid_stochastic", -1.0), 3)
    control = runs.gain("E7M0", "fp32", -1.0).mean()
    assert found[4] == ("gains" if control > 0 else "costs") and abs(float(found[5]) - abs(control)) < 0.51e-3  # printed with three digits
