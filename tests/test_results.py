"""Stored results: each says where it comes from, and the claims that the pages make of them hold."""
import base64
import json
import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from altgrad.experiment import Comparison

NBS = Path(__file__).resolve().parent.parent / "nbs"
COMPARISONS = sorted((NBS / "results").glob("first_light*.json"))


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda p: p.name)
def test_a_stored_comparison_names_its_circumstances(path):
    result = Comparison.load(path)
    assert len(result.arms) >= 2
    for arm in result.arms:
        record = arm["record"]
        assert record["seed"] == arm["config"]["seed"] and record["machine"]["cpu"] and record["versions"]["torch"]
        assert len(record["corpus"]["hash"]) == 64 and len(record["git_commit"]) == 40, "run it on a clean commit"
        assert len(arm["loss"]) == record["steps"] == arm["config"]["max_steps"]


def commits() -> dict[str, set[str]]:
    "The commits that the files of results name."
    found = {p.name: set(re.findall(r'commit": ?"([0-9a-f]+\+?)"', p.read_text(encoding="utf-8"))) for p in (NBS / "results").rglob("*.json")}
    tables = {p.name: pq.read_table(p) for p in (NBS / "results").rglob("*.parquet")}
    return found | {name: set(table["commit"].to_pylist()) for name, table in tables.items() if "commit" in table.column_names}


def test_results_are_of_commits_of_this_history():
    git = lambda *args: subprocess.run(["git", *args], cwd=NBS, capture_output=True, text=True)
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false": pytest.skip("a copy without its history")
    history = set(git("rev-list", "HEAD").stdout.split())
    named = commits()
    assert sum(map(bool, named.values())) > 10 and {name: gone for name, these in named.items() if (gone := these - history)} == {}


def test_the_demo_learnt_more_than_pairs_of_bytes():
    result = Comparison.load(NBS / "results/first_light.json")
    assert result.baseline["config"]["name"] == "bf16_baseline"
    assert result.baseline["record"]["results"]["val_loss"] < result.bigram_entropy < result.unigram_entropy
    assert [arm["config"]["format"] for arm in result.arms] == ["bfloat16", "E5M2", "E3M4", "E7M0"]


def test_the_figure_at_the_top_is_the_one_of_the_answer():
    cells = json.loads((NBS / "studies/the_answer.ipynb").read_text(encoding="utf-8"))["cells"]
    figures = [o["data"]["image/png"] for c in cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert base64.b64decode(figures[0]) == (NBS / "images/the_answer.png").read_bytes(), "run `make evidence`"
