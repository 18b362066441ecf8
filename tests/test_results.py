"""Stored results: each says where it comes from, and the claims that the pages make of them hold."""
import base64
import json
from pathlib import Path

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


def test_the_demo_learnt_more_than_pairs_of_bytes():
    result = Comparison.load(NBS / "results/first_light.json")
    assert result.baseline["config"]["name"] == "bf16_baseline"
    assert result.baseline["record"]["results"]["val_loss"] < result.bigram_entropy < result.unigram_entropy
    assert [arm["config"]["format"] for arm in result.arms] == ["bfloat16", "E5M2", "E3M4", "E7M0"]


def test_the_figure_at_the_top_is_the_one_of_the_answer():
    cells = json.loads((NBS / "studies/the_answer.ipynb").read_text(encoding="utf-8"))["cells"]
    figures = [o["data"]["image/png"] for c in cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert base64.b64decode(figures[0]) == (NBS / "images/the_answer.png").read_bytes(), "run `make evidence`"
