"""The second task's program: the acts as it prepares them, runs that are made once, scores against
scikit-learn and by hand, and claims that hold and that are refuted."""
import json
import multiprocessing
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from sklearn.metrics import f1_score

from altgrad.basics import InputError
from altgrad.training.data import load_labelled

STUDIES = Path(__file__).resolve().parents[1] / "nbs/studies"
sys.path.append(str(STUDIES / "experiments"))

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


def shorten(patch):
    "Makes of the program one that makes few and short runs."
    patch.setattr(labels, "TUNE", (1000,))
    patch.setattr(labels, "CONFIRM", (0, 1))
    patch.setattr(labels, "RATES", (1e-3, 2e-3, 4e-3))
    patch.setattr(labels, "ARMS", {k: labels.ARMS[k] for k in ("FP32", "E4M3 stochastic", "E7M0 S^-1")})
    patch.setattr(labels, "VOCABULARY", "bytes")
    patch.setattr(labels, "TOKENS", 32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A folder with short runs, what is stored of them, and the corpus they were made on."
    folder = tmp_path_factory.mktemp("labels")
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        data = labels.prepare(*acts(folder), folder / "lex_glue")
        corpus = load_labelled(data, "bytes", cache=folder / "cache")
        labels.train(labels.Runs(folder / "out", corpus, data, steps=1, pretraining=1))
        labels.store(folder / "out", folder / "stored")
    return folder, corpus, data


@pytest.fixture
def small(made, monkeypatch):
    "A corpus, and a program that makes few and short runs."
    shorten(monkeypatch)
    return made[1:]


@pytest.mark.slow
def test_the_acts_keep_their_labels_and_their_order(small):
    corpus, _ = small
    assert set(corpus.labels) == {"dairy", "metal"} and len(corpus.bounds["train"]) == 30
    first, second = labels.halves(corpus)
    assert len(first[0]) == len(second[0]) == 5
    x, y = second
    assert bytes(x[0].tolist()).startswith(b"Regulation 35\nsteel")
    assert y[0].tolist() == [float(name == "metal") for name in corpus.labels]


def test_an_empty_folder_begins_with_what_is_stored(made, small, tmp_path, monkeypatch):
    corpus, data = small
    read = labels.read_stored
    monkeypatch.setattr(labels, "read_stored", lambda: read(made[0] / "stored"))
    made_again = []
    monkeypatch.setattr(labels, "make_run", lambda *a: made_again.append(a[:3]))
    runs = labels.Runs(tmp_path / "out", corpus, data, steps=1, pretraining=1)
    labels.train(runs)
    assert not made_again
    labels.store(tmp_path / "out", tmp_path / "stored")
    for name in ("runs.jsonl", "prior.json"):
        assert (tmp_path / "stored" / name).read_bytes() == (made[0] / "stored" / name).read_bytes()
    there, here = (read(folder).answers for folder in (made[0] / "stored", tmp_path / "stored"))
    assert there.keys() == here.keys() and all(np.array_equal(there[k], here[k]) for k in there)
    longer = labels.Runs(tmp_path / "longer", corpus, data, steps=2, pretraining=1)
    longer.begin()
    assert not longer.rows  # runs of another length are another study's
    with pytest.raises(InputError, match="holds runs on other acts"):
        labels.Runs(tmp_path / "out", replace(corpus, hash="0" * 64), data, steps=1, pretraining=1)


def test_a_run_begins_with_what_was_pretrained_with_its_seed(made, small):
    corpus, data = small
    runs = labels.Runs(made[0] / "out", corpus, data, steps=1, pretraining=1)
    begun = {row["seed"]: row["begun"] for row in runs.rows.values()}
    assert len(set(begun.values())) == len(begun) == 3  # one that tunes, two that confirm
    files = {path: path.stat().st_mtime_ns for path in (made[0] / "out/pretrained-0").rglob("*")}
    weights = runs.weights(0)
    assert labels.state_hash(weights) == begun[0] and set(weights) > {"wte.weight", "blocks.0.mlp.fc.weight"}
    assert {path: path.stat().st_mtime_ns for path in files} == files  # nothing is trained again


@pytest.mark.parametrize("change, said", [
    ({"wte.weight": torch.zeros(8, 64)}, r"wte.weight is \(8, 64\), not \(256, 128\)"),
    ({"wpe.weight": None}, "wpe.weight is absent"), ({"other": torch.zeros(1)}, "other is .*, not absent"),
])
def test_weights_of_another_model_are_refused(made, small, change, said):
    corpus, data = small
    runs = labels.Runs(made[0] / "out", corpus, data, steps=1, pretraining=1)
    weights = {k: v for k, v in (runs.weights(0) | change).items() if v is not None}
    with pytest.raises(InputError, match=said): labels.make_run("FP32", 1e-3, 0, corpus, data, 1, weights)


@pytest.mark.slow
def test_two_workers_make_the_runs_of_one(made, small, tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "get_context", lambda _: multiprocessing.get_context("fork"))  # short runs there, too
    corpus, data = small
    folder = tmp_path / "two"
    shutil.copytree(made[0] / "out", folder)
    (folder / "runs.jsonl").unlink()
    labels.train(labels.Runs(folder, corpus, data, steps=1, pretraining=1), workers=2)
    kept = [{labels.Runs.key(row): row["loss"] for row in labels.read_runs(of / "runs.jsonl")}
            for of in (folder, made[0] / "out")]
    assert kept[0] == kept[1]


def test_runs_are_made_once_and_a_line_that_was_cut_is_made_again(made, small, tmp_path, monkeypatch):
    corpus, data = small
    out = shutil.copytree(made[0] / "out", tmp_path / "out")
    rows = labels.read_runs(out / "runs.jsonl")
    assert set(labels.confirmed(rows)) == set(labels.ARMS)
    whole = (out / "runs.jsonl").read_bytes()
    (out / "runs.jsonl").write_bytes(whole[:-9])
    asked = []
    monkeypatch.setattr(labels, "make_run", lambda *a, make=labels.make_run: asked.append(a[:3]) or make(*a))
    runs = labels.Runs(out, corpus, data, steps=1, pretraining=1)
    labels.train(runs)
    last = rows[-1]
    assert asked == [(last["arm"], last["lr"], last["seed"])] and len(runs.rows) == len(rows)
    again = labels.read_runs(runs.path)[-1]
    assert again["loss"] == last["loss"] and runs.path.read_bytes().count(b"\n") == len(rows)


def test_what_is_stored_is_what_was_made(made, small):
    stored = labels.read_stored(made[0] / "stored")
    found, answers = labels.confirmed(stored.rows), stored.answers
    assert stored.rows == labels.read_runs(made[0] / "out/runs.jsonl")
    gap = labels.over_acts(answers, found, "FP32", "FP32", times=20)
    assert gap == (0, 0, 0) and answers["targets"].shape == (5, 2)
    one = found["FP32"][0]
    given = answers["FP32-0"].astype(np.float32) > one["threshold"]
    assert one["micro_f1"] == pytest.approx(f1_score(answers["targets"], given, average="micro", zero_division=0))
    assert stored.prior["labels"] in (1, 2)


@pytest.mark.slow
def test_a_gap_over_acts_is_of_pooled_scores_and_of_acts_drawn_anew():
    rng, acts, seeds = np.random.default_rng(0), 60, 2
    targets = rng.random((acts, 4)) < 0.3
    answers, found = {"targets": targets}, {}
    for arm, noise in (("FP32", 0.3), ("E4M3 S^-1", 0.6)):
        found[arm] = {seed: {"arm": arm, "seed": seed, "threshold": 0.5} for seed in range(seeds)}
        for row in found[arm].values():
            answers[labels.file_of(row)[:-4]] = (targets + noise * rng.standard_normal((acts, 4))).astype(np.float16)

    def pooled(arm, drawn):
        given = [answers[labels.file_of(row)[:-4]].astype(np.float32)[drawn] > 0.5 for row in found[arm].values()]
        return f1_score(np.concatenate([targets[drawn]] * seeds), np.concatenate(given), average="micro")

    gap = labels.over_acts(answers, found, "FP32", "E4M3 S^-1", times=4000)
    between = lambda drawn: pooled("FP32", drawn) - pooled("E4M3 S^-1", drawn)
    theirs = bootstrap([range(acts)], lambda x: between(x.astype(int)), n_resamples=2000, vectorized=False,
                       method="percentile", rng=np.random.default_rng(1))
    assert gap.mean > 0.05 and gap.mean == pytest.approx(between(np.arange(acts)))
    # an end of 2,000 draws lies within a tenth of the spread of the statistic in nearly all cases: four times that
    assert np.allclose(gap[1:], theirs.confidence_interval, rtol=0, atol=0.4 * theirs.standard_error)


@pytest.mark.parametrize("change", [{"corpus": "other"}, {"config": {"max_steps": 2}}])
def test_runs_on_other_acts_or_of_other_lengths_are_not_stored_together(made, tmp_path, change):
    rows = labels.read_runs(made[0] / "out/runs.jsonl")
    rows[0] |= change
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="not one study"): labels.store(tmp_path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


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
        for place, s in enumerate(labels.CONFIRM):
            moved = {name: value + noise[a, place] for name, value in scores.items()}
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
    order, *others = labels.CLAIMS.values()
    assert {claim.verdict(rows(**AS_SAID)) for claim in (order, *others)} == {"holds"}
    assert [claim.verdict(rows(**NOT_SO)) for claim in others] == ["refuted"] * 4
    upside_down = rows(**AS_SAID)
    for found in upside_down.values():
        for row in found.values(): row["loss"] = row["micro_f1"]
    assert order.verdict(upside_down) == "refuted"
    assert labels.agree(upside_down, "E7M0 S^-1", "E7M0 stochastic") == "refuted"


def test_loss_and_f1_agree_where_both_can_be_told():
    found = rows(**AS_SAID)
    assert labels.agree(found, "E7M0 S^-1", "E7M0 stochastic") == "holds"
    swayed = {seed: {**row, "loss": row["loss"] + (-1) ** seed} for seed, row in found["E7M0 S^-1"].items()}
    assert labels.agree({**found, "E7M0 S^-1": swayed}, "E7M0 S^-1", "E7M0 stochastic") == "not decided"
    assert set(labels.PAIRS) >= {("E4M3 master", "FP32"), ("E7M0 S^-1", "E7M0 stochastic")}
    assert {arm for pair in labels.PAIRS for arm in pair} == set(labels.ARMS)


def test_a_rate_at_the_edge_of_those_tried_is_told():
    tried = [{"arm": "FP32", "lr": lr, "seed": 1000} for lr in (1e-3, 2e-3, 4e-3)]
    edges = [labels.at_edge([*tried, {"arm": "FP32", "lr": lr, "seed": 1}], "FP32") for lr in (1e-3, 2e-3, 4e-3)]
    assert edges == [True, False, True]


def test_fp32_is_measured_against_the_prior():
    found = labels.above_prior(rows(), {"micro_f1": 0.25})
    # the mean of eight scores with noise of 1e-3 each: five standard errors are 1.8e-3
    assert found.mean == pytest.approx(0.25, abs=2e-3) and found.within(labels.MARGIN) == "holds"


def test_an_arm_that_was_not_made_is_missed():
    some = {k: v for k, v in rows().items() if k != "FP32"}
    with pytest.raises(KeyError): labels.rank_correlation(some)


def complete(to):
    "Stored rows of all arms that turn out as was said, and answers to four acts."
    confirmed = rows(**AS_SAID)
    g = np.random.default_rng(0)
    said = {"threshold": 0.0, "corpus": "c0ffee" * 9, "commit": "1234567890abcdef", "machine": {"cpu": "a small one"},
            "config": {"max_steps": 600}}
    tuned = [{"arm": arm, "seed": 1000, "lr": lr, **said} for arm in labels.ARMS for lr in (5e-4, 1e-3, 2e-3)]
    made = tuned + [{**row, **said} for found in confirmed.values() for row in found.values()]
    to.mkdir()
    (to / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (to / "prior.json").write_text(json.dumps({"labels": 3, "micro_f1": 0.2125, "macro_f1": 0.1}))
    logits = {labels.file_of(row)[:-4]: g.normal(size=(4, 3)) for row in made}
    np.savez(to / "answers.npz", targets=g.random((4, 3)) > 0.5, **logits)
    return confirmed


def page(folder):
    "What the page says of what is stored in a folder, and the figures it draws."
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = json.loads((STUDIES / "second_task.ipynb").read_text())["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"
                     and "eval: false" not in "".join(c["source"]))
    # of this module, whose runs may be short, and not of a fresh one
    code = code.replace("spec.loader.exec_module(experiment)", "experiment = LABELS")
    code = code.replace("experiment.read_stored()", "experiment.read_stored(FOUND)")
    texts: list[str] = []
    plt.close("all")
    exec(code.replace("Markdown(", "texts.append("), {"FOUND": folder, "LABELS": labels, "texts": texts})
    figures = [plt.figure(n) for n in plt.get_fignums()]
    return "\n".join(texts), [sum(len(a.lines) for a in figure.axes) for figure in figures]


def test_the_page_says_that_nothing_was_run(tmp_path, monkeypatch):
    monkeypatch.chdir(STUDIES)
    said, drawn = page(tmp_path / "none")
    assert "**Nothing of this page has been run.**" in said and drawn == [0, 0]
    assert said.count("| not run |") == len(labels.CLAIMS) + len(labels.ARMS) + len(labels.PAIRS)


def test_the_page_shows_runs_the_moment_they_are_stored(made, small, monkeypatch):
    monkeypatch.chdir(STUDIES)
    monkeypatch.setattr(labels, "PAIRS", (("E7M0 S^-1", "FP32"), ("E4M3 master", "FP32")))
    monkeypatch.setitem(labels.ARMS, "E4M3 master", {})
    said, drawn = page(made[0] / "stored")
    stored = labels.read_stored(made[0] / "stored")
    assert "Nothing of this page" not in said and "3 of 4 arms are confirmed" in said
    assert "**Not run:** E4M3 master." in said and stored.rows[0]["corpus"][:12] in said
    loss = np.mean([row["loss"] for row in labels.confirmed(stored.rows)["FP32"].values()])
    assert f"| {loss:.4f} ± " in said and f"micro-F1 of {stored.prior['micro_f1']:.4f}" in said
    assert said.count("| not run |") == len(labels.CLAIMS) + 2 and min(drawn) > 3


def test_the_page_judges_what_is_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(STUDIES)
    found = complete(tmp_path / "stored")
    said, drawn = page(tmp_path / "stored")
    assert "not run" not in said.lower() and "(edge)" not in said and min(drawn) > len(labels.ARMS)
    lines = said.splitlines()
    for text in labels.CLAIMS:
        [line] = [line for line in lines if line.startswith(f"| {text} |")]
        assert line.endswith("| holds |")
    gap = labels.gap(found, "E7M0 S^-1", "E7M0 stochastic").mean
    [line] = [line for line in lines if line.startswith("| E7M0 S^-1 | E7M0 stochastic |")]
    assert f"| {gap:+.4f} [" in line and line.endswith("| holds |")
    assert "| prior | | 0.2125 |" in said and "at least 0.2 above, **holds**" in said
