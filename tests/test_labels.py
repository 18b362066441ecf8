"""The second task's program: the acts as it prepares them, runs that are made once, scores against
scikit-learn and by hand, and claims that hold and that are refuted."""
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from altgrad.basics import InputError
from altgrad.training.data import load_labelled

sys.path.append(str(Path(__file__).resolve().parents[1] / "nbs/studies/experiments"))

import labels


def acts(folder: Path) -> tuple[Path, Path]:
    "Acts about two subjects, and one label that is none of the chosen."
    rows = [
        {"title": f"Regulation {i}", "text": ("milk and cheese. ", "steel and iron. ")[i % 2] * 9,
         "eurovoc_ids": [str(i % 2), "99"], "data_type": ("train", "dev", "test")[(i > 29) + (i > 39)]}
        for i in range(44)
    ]
    (folder / "acts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "labels.json").write_text(json.dumps([{"id": "0", "label": "dairy"}, {"id": "1", "label": "metal"}]))
    return folder / "acts.jsonl", folder / "labels.json"


@pytest.fixture
def small(tmp_path, monkeypatch):
    "A corpus, and a program that makes few and short runs."
    monkeypatch.setattr(labels, "TUNE", (1000,))
    monkeypatch.setattr(labels, "CONFIRM", (0, 1))
    monkeypatch.setattr(labels, "RATES", (1e-3, 2e-3, 4e-3))
    monkeypatch.setattr(labels, "ARMS", {k: labels.ARMS[k] for k in ("FP32", "E4M3 stochastic", "E7M0 S^-1")})
    monkeypatch.setattr(labels, "VOCABULARY", "bytes")
    monkeypatch.setattr(labels, "TOKENS", 32)
    data = labels.prepare(*acts(tmp_path), tmp_path / "lex_glue")
    return load_labelled(data, "bytes", cache=tmp_path / "cache"), data


def test_the_acts_keep_their_labels_and_their_order(small):
    corpus, _ = small
    assert set(corpus.labels) == {"dairy", "metal"} and len(corpus.bounds["train"]) == 30
    first, second = labels.halves(corpus)
    assert len(first[0]) == len(second[0]) == 5
    x, y = second
    assert bytes(x[0].tolist()).startswith(b"Regulation 35\nsteel")
    assert y[0].tolist() == [float(name == "metal") for name in corpus.labels]


def test_runs_are_made_once_and_a_line_that_was_cut_is_made_again(small, tmp_path, monkeypatch):
    corpus, data = small
    runs = labels.Runs(tmp_path / "out", corpus, data, steps=1)
    labels.train(runs)
    rows = labels.read_runs(runs.path)
    assert len(rows) == len(runs.rows) and set(labels.confirmed(rows)) == set(labels.ARMS)
    whole = runs.path.read_bytes()
    runs.path.write_bytes(whole[:-9])
    made = []
    monkeypatch.setattr(labels, "make_run", lambda *a, make=labels.make_run: made.append(a[:3]) or make(*a))
    labels.train(labels.Runs(tmp_path / "out", corpus, data, steps=1))
    last = rows[-1]
    assert made == [(last["arm"], last["lr"], last["seed"])]
    again = labels.read_runs(runs.path)[-1]
    assert again["loss"] == last["loss"] and runs.path.read_bytes().count(b"\n") == len(rows)

    labels.store(tmp_path / "out", tmp_path / "stored")
    answers = np.load(tmp_path / "stored/answers.npz")
    found = labels.confirmed(labels.read_runs(tmp_path / "stored/runs.jsonl"))
    gap = labels.over_acts(answers, found, "FP32", "FP32", times=20)
    assert gap == (0, 0, 0) and answers["targets"].shape == (5, 2)
    one = found["FP32"][0]
    given = answers["FP32-0"].astype(np.float32) > one["threshold"]
    assert one["micro_f1"] == pytest.approx(f1_score(answers["targets"], given, average="micro", zero_division=0))
    assert json.loads((tmp_path / "stored/prior.json").read_text())["labels"] in (1, 2)


def test_nothing_to_store_is_said(tmp_path):
    with pytest.raises(InputError, match="holds no finished run"): labels.store(tmp_path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_the_grid_of_rates_grows_while_the_best_is_at_its_edge(small, tmp_path, monkeypatch):
    corpus, data = small
    runs = labels.Runs(tmp_path / "out", corpus, data)
    def loss(wanted): return lambda arm, lr, seed: {"tuning_loss": abs(np.log2(lr / wanted))}
    for wanted, found in ((2e-3, 2e-3), (16e-3, 16e-3), (1e-6, 1e-3 / 2**labels.MOST)):
        monkeypatch.setattr(runs, "get", loss(wanted))
        assert runs.tuned("FP32") == pytest.approx(found)


def test_the_best_threshold_is_that_of_a_search():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(40, 6, generator=g) - 1, (torch.rand(40, 6, generator=g) < 0.3).float()
    level = labels.best_threshold(logits, targets)
    def f1(t): return f1_score(targets.numpy(), (logits > t).numpy(), average="micro")
    assert f1(level) == max(f1(float(t)) for t in torch.linspace(-6, 3, 91))


def test_the_prior_gives_every_act_the_same_labels():
    train = torch.tensor([[1.0, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    targets = torch.tensor([[1.0, 1, 0], [0, 1, 1]])
    found = labels.prior(train, targets)
    assert found["labels"] == 2
    assert found["micro_f1"] == pytest.approx(f1_score(targets, [[1, 1, 0], [1, 1, 0]], average="micro"))


def rows(**means):
    "Rows that confirm, of all arms: micro-F1 0.5 and loss 0.1, or what is given."
    usual = {"micro_f1": 0.5, "macro_f1": 0.25, "roc_auc": 0.9, "pr_auc": 0.4}
    noise = np.random.default_rng(0).normal(size=(len(labels.ARMS), len(labels.CONFIRM))) * 1e-3
    made = []
    for a, arm in enumerate(labels.ARMS):
        scores = {**usual, **means.get(arm.replace(" ", "_").replace("^-", ""), {})}
        for s in labels.CONFIRM:
            moved = {name: value + noise[a, s] for name, value in scores.items()}
            made.append({"arm": arm, "seed": s, "lr": 1e-3, "loss": 1 - 2 * moved["micro_f1"], **moved})
    return labels.confirmed(made)


AS_SAID = {
    "E7M0_stochastic": {"micro_f1": 0.3, "macro_f1": 0.1}, "E7M0_S1": {"micro_f1": 0.4},
    "E4M3_stochastic": {"micro_f1": 0.48}, "E4M3_S1": {"micro_f1": 0.47}, "E7M0_master": {"micro_f1": 0.45},
}
NOT_SO = {
    "E4M3_master": {"micro_f1": 0.44}, "E7M0_stochastic": {"micro_f1": 0.52, "macro_f1": 0.27},
    "E7M0_S1": {"micro_f1": 0.3},
}


def test_claims_can_hold_and_can_be_refuted():
    assert {claim(rows(**AS_SAID)) for claim in labels.CLAIMS.values()} == {"holds"}
    refuted = [claim(rows(**NOT_SO)) for claim in list(labels.CLAIMS.values())[1:]]
    assert refuted == ["refuted"] * 4
    upside_down = rows(**AS_SAID)
    for found in upside_down.values():
        for row in found.values(): row["loss"] = row["micro_f1"]
    assert labels.in_order(upside_down) == "refuted"


def test_an_arm_that_was_not_made_is_missed():
    with pytest.raises(KeyError): labels.in_order({k: v for k, v in rows().items() if k != "FP32"})
