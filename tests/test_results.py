"""Stored results: each says where it comes from, and the claims that the pages make of them
hold."""
import base64
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

import preloaded
from altgrad.training.experiment import Comparison

NBS = Path(__file__).resolve().parent.parent / "nbs"
COMPARISONS = [NBS / "results" / name for name in ("first_light.json", "first_light_storage.json")]


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda p: p.name)
def test_a_stored_comparison_names_its_circumstances(path):
    result = Comparison.load(path)
    assert len(result.arms) >= 2
    for arm in [run for arms in (result.arms, *result.further) for run in arms]:
        record = arm["record"]
        assert record["seed"] == arm["config"]["seed"]
        assert record["machine"]["cpu"]
        assert record["versions"]["torch"]
        assert len(record["corpus"]["hash"]) == 64 and len(record["git_commit"]) == 40, (
            "run it on a clean commit"
        )
        assert len(arm["loss"]) == record["steps"] == arm["config"]["max_steps"]


def commits() -> dict[str, set[str]]:
    "The commits that the files of results name."
    found = {
        str(p): set(re.findall(r'commit": ?(?:"([0-9a-f]+\+?)"|null)', p.read_text(encoding="utf-8")))
        for end in ("json", "jsonl") for p in (NBS / "results").rglob(f"*.{end}")
    }
    tables = {str(p): pq.read_table(p) for p in (NBS / "results").rglob("*.parquet")}
    return found | {
        name: set(table["commit"].to_pylist())
        for name, table in tables.items()
        if "commit" in table.column_names
    }


def test_results_are_of_commits_of_this_history():
    git = lambda *args: subprocess.run(["git", *args], cwd=NBS, capture_output=True, text=True)
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a copy without its history")
    history = set(git("rev-list", "HEAD").stdout.split())
    named = commits()
    assert sum(map(bool, named.values())) > 10
    squashed = json.loads((NBS / "results/squashed.json").read_text(encoding="utf-8"))["landed_in"]
    assert set(squashed.values()) <= history
    assert not set(squashed) & history and set(squashed) <= set().union(*named.values())
    known = history | set(squashed)
    assert {name: gone for name, these in named.items() if (gone := these - known)} == {}


def test_rows_that_were_made_again_are_of_the_ledgers_and_agree_as_far_as_a_last_bit_lets_them():
    stored = json.loads((NBS / "results/replays.json").read_text(encoding="utf-8"))
    known = {
        run for p in (NBS / "results").rglob("*.parquet") if "run" in pq.read_schema(p).names
        for run in pq.read_table(p, columns=["run"])["run"].to_pylist()
    }
    for name, facts in stored.items():
        rows = facts["rows"]
        assert len(rows) >= 20 and {row["run"] for row in rows} <= known, name
        apart = [row for row in rows if not row["agrees"]]
        assert len(apart) <= 1, name  # a run that a last bit carries farther than 0.01 nats
        assert all(abs(row["apart"]) <= max(map(abs, row["nudged"])) for row in apart), name


@pytest.fixture
def first_light() -> tuple[dict, pd.DataFrame, str]:
    """The stored bounds of the README's first table, the losses they come from,
    one a setting, seed and arm, and that table."""
    stored = json.loads((NBS / "results/first_light_settings.json").read_text(encoding="utf-8"))
    rows = [
        (setting, seed, arm, loss)
        for setting, s in stored["settings"].items()
        for arm, losses in s["losses"].items()
        for seed, loss in zip(s["seeds"], losses, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["setting", "seed", "arm", "loss"])
    base = frame[frame.arm == "e7m0_fp8"].set_index(["setting", "seed"]).loss
    frame["gap"] = frame.loss - base.reindex(frame.set_index(["setting", "seed"]).index).to_numpy()
    text = (NBS.parent / "README.md").read_text(encoding="utf-8")
    return stored, frame, text[text.index("## First light") : text.index("## Its limits")]


def moves(frame: pd.DataFrame, key: str) -> pd.DataFrame:
    """How far each arm moves from the machine as it is, mean of the seeds that a setting has:
    a row a setting, a column an arm."""
    wide = frame.pivot_table(index=["setting", "seed"], columns="arm", values=key)
    return (
        (wide - wide.loc["as_is"].reindex(wide.index, level="seed"))
        .groupby("setting")
        .mean()
        .abs()
        .drop(index="as_is")
    )


def of_seeds(frame: pd.DataFrame, key: str) -> pd.Series:
    """What three other seeds may do to the mean of three (95 %), by the spread of these:
    4.3027 is Student's t for two degrees of freedom."""
    return 4.302653 * (2 / 3) ** 0.5 * frame[frame.setting == "as_is"].groupby("arm")[key].std()


def test_the_first_table_says_what_was_measured_and_how_far_it_may_differ(first_light):
    stored, frame, text = first_light
    here = frame[frame.setting == "as_is"].groupby("arm")[["loss", "gap"]].mean()
    seeds = frame.groupby("setting").seed.nunique().to_dict()
    assert seeds["as_is"] == seeds["aten_default"] == 3 and {"two_threads"} <= seeds.keys()
    for arm in here.index:
        row = next(line for line in text.splitlines() if line.startswith(f"| {arm} |"))
        gap = "baseline" if arm == "e7m0_fp8" else f"{here.gap[arm]:+.4f}"
        assert f"| {here.loss[arm]:.4f} | {gap} |" in row
        for key, name in (("loss", "val_loss"), ("gap", "gap_nats"))[: len(stored["bounds"][arm])]:
            exact = max(2 * moves(frame, key)[arm].max(), of_seeds(frame, key)[arm])
            assert exact <= stored["bounds"][arm][name] < exact + 0.01 + 1e-9
            assert f"{key} ± {stored['bounds'][arm][name]:.2f}" in row
    assert {arm: len(bounds) for arm, bounds in stored["bounds"].items()} == {
        arm: 1 + (arm != "e7m0_fp8") for arm in here.index
    }


def test_the_bounds_without_a_setting_hold_in_that_setting(first_light):
    _, frame, _ = first_light
    for key in ("loss", "gap"):
        moved, seeds = moves(frame, key), of_seeds(frame, key)
        for setting in moved.index:
            bound = (2 * moved.drop(index=setting).max()).combine(seeds, max)
            assert (moved.loc[setting] <= bound.clip(lower=0.01)).all(), (key, setting)


def test_what_the_demo_shows_holds_in_every_setting(first_light):
    stored, frame, _ = first_light
    nearest = (
        frame[frame.arm == "e7m0_fp8_grid_nearest"]
        .groupby("setting")
        .gap.agg(["mean", "std", "count", "min"])
    )
    assert (nearest["min"] > 0.1).all(), (
        "rounding to nearest loses with every seed in every setting"
    )
    three = nearest[nearest["count"] == 3]
    assert len(three) == 2 and (three["mean"] - 4.302653 / 3**0.5 * three["std"] > 0.05).all(), (
        "and by more than noise"
    )
    assert (
        nearest["mean"]["as_is"] - stored["bounds"]["e7m0_fp8_grid_nearest"]["gap_nats"] > 0.05
    ), "and so it does wherever the bounds hold"


def test_the_stored_demo_is_what_make_demo_runs():
    result = Comparison.load(NBS / "results/first_light.json")
    assert [(arm["config"]["format"], arm["config"]["storage"]) for arm in result.arms] == [
        ("E7M0", s) for s in ("master", "grid_nearest", "grid_stochastic")
    ]
    assert result.seeds == [42, 43, 44]
    assert all(row["val_loss"] < result.unigram_entropy for row in result.rows())
    stored = json.loads((NBS / "results/first_light_settings.json").read_text(encoding="utf-8"))
    makefile = (NBS.parent / "Makefile").read_text(encoding="utf-8").replace("\\\n  ", "")
    assert f"DEMO := {stored['command']}\n" in makefile
    assert stored["settings"]["as_is"]["losses"] == {
        row["name"]: row["val_losses"] for row in result.rows()
    }


@pytest.mark.parametrize(
    "change, code, words",
    [
        (lambda r: None, 0, "holds"),
        (lambda r: r["further"].pop(), 2, "other runs"),
        (lambda r: r["further"][0][1]["record"]["results"].update(val_loss=2.3), 1, "OUTSIDE"),
        (lambda r: r["arms"][0]["record"]["results"].update(val_loss=None), 1, "none, README"),
    ],
)
def test_a_demo_is_checked_against_the_bounds(tmp_path, change, code, words):
    changed = json.loads((NBS / "results/first_light.json").read_text(encoding="utf-8"))
    change(changed)
    (tmp_path / "comparison.json").write_text(json.dumps(changed))
    done = preloaded.run_python(NBS.parent / ".ci/first_light.py", "check", tmp_path)
    assert done.returncode == code and words in done.stdout + done.stderr, done.stderr


def test_the_figure_at_the_top_is_the_one_of_the_answer():
    cells = json.loads((NBS / "studies/the_answer.ipynb").read_text(encoding="utf-8"))["cells"]
    figures = [
        o["data"]["image/png"]
        for c in cells
        for o in c.get("outputs", [])
        if "image/png" in o.get("data", {})
    ]
    assert base64.b64decode(figures[0]) == (NBS / "images/the_answer.png").read_bytes(), (
        "run `make evidence`"
    )


def test_the_summary_is_of_the_pages_as_they_are():
    spec = importlib.util.spec_from_file_location("summary", NBS.parent / ".ci/summary.py")
    summary = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(summary)
    pdf = (NBS / "images/summary.pdf").read_bytes()
    assert pdf.count(b"/Type /Page ") == 1
    assert summary.hash_of(summary.content()).encode() in pdf, "make evidence writes it again"
    readme = (NBS.parent / "README.md").read_text(encoding="utf-8")
    first = next(what for kind, what in summary.content() if kind == "table")
    assert all(cell in readme.replace("*", "") for row in first for cell in row)
