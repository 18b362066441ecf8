"""The central study's pages on ledgers that are not the stored one: empty, begun, complete, and
with a known truth."""
import json
import math
import re
import subprocess
import zlib
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from altgrad.evidence import study as evidence
from altgrad.numbers.formats import get_format
from altgrad.evidence.instrument import VERSION
from altgrad.evidence.study import (
    arm_of, build_study, contrast, effect, read_ledger, slope_over_fp32,
)
from altgrad.evidence.sweep import loss_of_row, plan, read_matrix

STUDIES = Path(__file__).resolve().parent.parent / "nbs/studies"
PAGES = ("the_answer", "failure_atlas", "dashboard")
MATRICES, AMENDED = (
    [read_matrix(p.read_text()) for p in sorted(STUDIES.glob(f"matrices/{where}*.yaml"))]
    for where in ("", "amended/")
)
METRICS = ("dead_zone", "stall", "flips", "ulps", "sign_flips", "step_rms", "noise_rms")
# how much a storage costs
NOISE = {"fp32": 0, "master": 0.1, "grid_nearest": 2, "grid_stochastic": 1}


def truth(fmt: str, storage: str) -> float:
    "The slope in p that the invented rows have, over FP32's."
    return (
        0
        if fmt in ("E0M7", "E1M6")
        else NOISE[storage] * 0.1 * 2.0 ** -get_format(fmt).mantissa_bits
    )


def invented(job, matrix) -> dict:
    """A row that looks like a run: a parabola in the rate,
    the storage's slope, and noise of the run's own."""
    a, chance = job.arm, lambda what: np.random.default_rng(zlib.crc32(f"{what}".encode())).normal()
    middle = next(
        m
        for cell, m in matrix.cells
        if (cell.rule, cell.placement, cell.format) == (a.rule, a.placement, a.format)
    )
    off = 2 * math.log2(a.lr / middle)
    p = 0 if a.placement == "gradient" or a.format in ("E0M7", "E1M6") else a.power
    common = 0.02 * chance((a.seed, a.checkpoint))
    own = 2e-4 * chance(a) * (a.format not in ("E0M7", "E1M6"))
    loss = (
        1.8
        + common
        + own
        + 0.003 * off**2
        + 0.02 * (p - 0.3) ** 2
        + truth(a.format, a.storage) * (1 + p)
    )
    bad = a.format == "E7M0" and a.storage == "grid_nearest" and a.seed % 4 == 1
    size = truth(a.format, a.storage)
    end = dict(
        zip(
            ("noise", "codes", "code_entropy", "zeros", "doublings", "sign_changed", "travel"),
            (1.0, 100.0, 6.0, 0.0, 0.1, 0.1, 0.3),
        )
    )
    numbers = {**{k: 0.01 + size * (1.2 + p) for k in METRICS}, **end}
    course = {k: [0.01 * (i + 1) + size for i in range(10)] for k in METRICS}
    losses = {
        "val_loss": 2.4 if bad else loss,
        "raw_loss": 9.0 if bad else loss,
        "frozen_loss": 2.4,
        "start_loss": 2.5,
        "diverged": bad,
        "error": None,
        "val_chunks": (loss + 0.1 * np.sin(np.arange(32))).tolist(),
        "curve": [loss + 0.5 / (1 + i) for i in range(20)],
        "course": course,
        "steps": 200,
    }
    one = "null" if a.format in ("E0M7", "E1M6") else f"{a.format}{p}"
    facts = {
        "weights_sha": one, "checkpoint_sha": a.checkpoint, "corpus_sha": a.corpus,
        "instrument": VERSION, "machine": "m", "versions": "v",
    }
    return {
        **asdict(a), "run": f"{a}", **numbers, **losses, **facts, "stage": job.stage,
        "lr_edge": job.lr_edge, "tier": matrix.tier, "matrix": matrix.name, "protocol": "0",
    }


def ledger(matrices) -> list[dict]:
    "All rows that these matrices ask for."
    rows = {}
    known = lambda arm: loss_of_row(rows[arm]) if arm in rows else None
    for m in matrices:
        while (todo := plan(m, known)).stage != "done":
            rows.update({job.arm: invented(job, m) for job in todo.jobs})
    return list(rows.values())


@pytest.fixture(scope="module")
def complete() -> list[dict]: return ledger(MATRICES)


@pytest.fixture(scope="module")
def amended() -> list[dict]: return ledger(AMENDED)


def show(page: str, rows: list[dict], monkeypatch, amended: list[dict] | None = None) -> str:
    "Runs a page's cells on these rows; all that it says."
    import matplotlib

    matplotlib.use("Agg")
    said = []
    monkeypatch.setattr(
        evidence,
        "read_ledger",
        lambda folder: (amended or []) if folder.endswith("amended") else rows,
    )
    monkeypatch.setattr("IPython.display.Markdown", said.append)
    monkeypatch.chdir(STUDIES)
    names = {}
    with np.errstate(all="ignore"):
        for cell in json.loads((STUDIES / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), page, "exec"), names)
    matplotlib.pyplot.close("all")
    return "\n".join(said)


def test_the_analysis_finds_the_truth(complete):
    study = build_study(complete, [m for m in MATRICES if m.tier in (1, 2, 3, 4)])
    for storage in ("grid_stochastic", "master"):
        for fmt in ("E0M7", "E2M5", "E4M3", "E7M0"):
            e = effect(contrast(study, slope_over_fp32(study, fmt, storage)))
            # the noise that was put in
            assert abs(e.mean - truth(fmt, storage)) < 3e-4
            assert e.seeds == 8
            assert fmt == "E0M7" or e.low - 2e-4 < truth(fmt, storage) < e.high + 2e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
def test_pages_of_a_complete_ledger(page, complete, amended, monkeypatch):
    text = show(page, complete, monkeypatch, amended)
    assert "nan" not in text.replace("nance", ""), [
        line for line in text.splitlines() if "nan" in line
    ]
    if page != "the_answer": return
    assert "gains most depends on the rounding" in text or "the same under every rounding" in text
    assert "So far." not in text and "** so far" not in text and "**part**" not in text
    assert "| H1: under stochastic rounding D is above zero | **holds** |" in text
    assert "bit for bit | **holds** |" in text
    # the invented nearest rounding costs twice as much
    assert (
        "| H2: D under nearest minus D under stochastic rounding is below zero | **refuted** |"
        in text
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "part",
    [
        "nothing", "tuning", "two seeds of a tier", "nearest before stochastic",
        "a second tier begun", "one power of a second tier",
    ],
)
def test_pages_of_a_part(page, part, complete, monkeypatch):
    chosen = {
        "nothing": lambda r: False,
        "tuning": lambda r: r["tier"] == 1 and r["split"] == "tune",
        "two seeds of a tier": lambda r: r["tier"] == 1 and (r["split"] == "tune" or r["seed"] < 2),
        "nearest before stochastic": lambda r: (
            r["storage"] in ("fp32", "grid_nearest") and r["tier"] < 3
        ),
        "a second tier begun": lambda r: (
            r["tier"] == 1 or r["tier"] == 2 and (r["split"] == "tune" or r["seed"] == 0)
        ),
        "one power of a second tier": lambda r: (
            r["tier"] == 1 or r["tier"] == 2 and (r["split"] == "tune" or r["power"] == 0)
        ),
    }[part]
    text = show(page, [r for r in complete if chosen(r)], monkeypatch)
    assert "not run" in text.lower() and ("nan" not in text or part == "nothing")


@pytest.fixture(scope="module")
def headlines() -> dict[str, list[dict]]:
    "The stored rows of amendments 2 and 9, by matrix."
    rows = read_ledger(STUDIES.parent / "results/ledger/amended")
    return {name: [r for r in rows if r["matrix"] == name] for name in ("headline_e7m0", "headline_nearest")}


def headline(name: str): return read_matrix((STUDIES / f"matrices/amended/{name}.yaml").read_text())


def test_rows_of_another_task_are_not_the_matrix_rows(headlines):
    rows, name = headlines["headline_e7m0"], "headline_e7m0"
    def found(rows):
        study = build_study(rows, [headline(name)])
        return effect(contrast(study, evidence.gain(study, study.cell("E7M0", "grid_stochastic", -1.0)))), study.plans
    longer = [{**r, "run": f"longer {k}", "task": {**r["task"], "steps": 400}, "val_loss": 9.0}
              for k, r in enumerate(rows)]
    assert found(rows + longer) == found(longer + rows) == found(rows)
    # a run that failed before it succeeded does not count, in whichever order they come
    lost = [{**r, "val_loss": None, "error": "MemoryError"} for r in rows[::7]]
    assert found(rows + lost) == found(lost + rows) == found(rows)
    with pytest.raises(evidence.InputError, match=f"runs {rows[5]['run']} and other .* are of one arm and task"):
        found([*rows, {**rows[5], "run": "other", "code": "0" * 16}])


def test_runs_whose_weights_may_differ_are_not_compared(headlines):
    one = {**headlines["headline_e7m0"][0], "format": "E0M7", "rule": "stiffness_adamw", "placement": "update"}
    rows = [{**one, "power": p} for p in (0.0, 1.0)]
    assert evidence.same_weights(rows).verdict == "holds"
    assert evidence.same_weights([*rows, {**one, "weights_sha": "b"}]).verdict == "refuted"
    for change in ({"task": {**one["task"], "steps": 400}}, {"moments": "dynamic8"}, {"weight_decay": 0.1},
                   {"code": "0" * 16}, {"instrument": "0" * 16}, {"engine": "batched"}):
        assert evidence.same_weights([*rows, {**one, **change, "weights_sha": "b"}]).verdict == "holds"


def mean_loss(rows, fmt, rule, lr, seed):
    "Of the confirmed runs of an arm with one seed."
    found = [r["val_loss"] for r in rows if r["stage"] == "confirm" and r["storage"] == "grid_nearest"
             and (r["format"], r["rule"], r["lr"], r["seed"]) == (fmt, rule, lr, seed)]
    assert len(found) == 3
    return np.mean(found)


def test_a_lead_pairs_seeds_by_their_number(headlines):
    "One format lacks the first seed: the lead is the mean, over the others, of the difference of gains."
    rows = [r for r in headlines["headline_nearest"]
            if not (r["format"] == "E0M7" and r["stage"] == "confirm" and r["seed"] == 16)]
    study = build_study(rows, [headline("headline_nearest")])
    cells = {f: study.cell(f, "grid_nearest", rule="madam") for f in ("E0M7", "E2M5")}
    lead = evidence._lead(*((study, evidence.gain(study, cell)) for cell in cells.values()))
    assert lead.seeds == len(study.seeds) - 1
    def gain(f, seed):
        plain = study.cell(f, "grid_nearest")
        ends = [mean_loss(rows, f, c.rule, study.tuned[c].rates[study.tuned[c].best], seed) for c in (plain, cells[f])]
        return ends[0] - ends[1]
    by_seed = [gain("E0M7", s) - gain("E2M5", s) for s in study.seeds if s != 16]
    assert lead.mean == pytest.approx(np.mean(by_seed), abs=1e-12)  # sums of some losses in another order


def test_a_failed_run_moves_as_the_frozen_model(headlines):
    rows, (seed, *_) = headlines["headline_e7m0"], headline("headline_e7m0").confirm_seeds
    arm = dict(format="E7M0", storage="grid_stochastic", power=-1.0, stage="confirm", seed=seed)
    lost = next(r for r in rows if all(r[key] == value for key, value in arm.items()))
    failed = {**lost, "error": "MemoryError", **dict.fromkeys(("val_loss", "raw_loss", "diverged", "val_chunks"))}
    def found(rows):
        study = build_study(rows, [headline("headline_e7m0")])
        return evidence.moved(study, evidence.gain(study, study.cell("E7M0", "grid_stochastic", -1.0)), (seed,)).tuned
    now = found([failed if r is lost else r for r in rows])
    cost = (lost["frozen_loss"] - lost["val_loss"]) / len(headline("headline_e7m0").checkpoints)
    assert now == pytest.approx(found(rows) - cost, abs=1e-12)  # sums of some losses in another order


def test_the_stored_ledger_is_one():
    rows = read_ledger(STUDIES.parent / "results/ledger")
    assert len({r["run"] for r in rows}) == len(rows)
    assert len({arm_of(r) for r in rows}) == len(rows)
    assert sum(p.stat().st_size for p in (STUDIES.parent / "results/ledger").iterdir()) < 20e6
    assert all(
        r["error"] is None
        and len(r["commit"]) == 40
        and len(r["val_chunks"]) == r["task"]["chunks"]
        for r in rows
    )


def prose(commit: str | None = None) -> list[str]:
    """What the protocol says in words, now or in a commit;
    its code is not what was promised (a module may get another name)."""
    path = "nbs/studies/protocol.ipynb"
    here = (STUDIES / "protocol.ipynb").read_text(encoding="utf-8")
    shown = (
        subprocess.run(
            ["git", "show", f"{commit}:{path}"],
            cwd=STUDIES,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if commit
        else here
    )
    return [
        "".join(cell["source"])
        for cell in json.loads(shown)["cells"]
        if cell["cell_type"] == "markdown"
    ]


@pytest.mark.parametrize("folder", ["", "amended"])
def test_the_protocol_came_before_the_runs(folder):
    rows = read_ledger(STUDIES.parent / "results/ledger" / folder)
    told = subprocess.run(
        ["git", "log", "--format=%H %ct", "--", str(STUDIES / "protocol.ipynb")],
        cwd=STUDIES,
        capture_output=True,
        text=True,
    ).stdout
    written = {commit: int(when) for commit, when in map(str.split, told.splitlines())}
    if not written: pytest.skip("not a checkout")
    for row in rows:
        assert row["protocol"] in written, "a row names a protocol that this history lacks"
        assert datetime.fromisoformat(row["finished"]).timestamp() > written[row["protocol"]]
    for commit in {row["protocol"] for row in rows if folder}:
        (*then, last), (*now, changes) = prose(commit), prose()
        assert then == now and changes.startswith(last), "an amendment was changed after its runs began"
        later = changes.removeprefix(last)  # an amendment of another day may follow
        assert not later or re.match(r"\n\n### 20\d\d-\d\d-\d\d, before the runs", later)
