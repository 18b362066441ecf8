"""The study of ten million parameters, small: what is stored is what the runs measured, claims are
judged as they are said, and the page shows runs the moment they are there."""
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from test_data import lex_glue

from altgrad import cli
from altgrad.basics import InputError
from altgrad.training.config import TrainConfig
from altgrad.training.experiment import compare, find_config, packaged_configs
from altgrad.training.tracking import RunFolder
from altgrad.watching.series import read_series

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "nbs/studies/experiments"))

import ten_million

SMALL = dict(max_steps=21, batch_size=2, block_size=16, warmup_steps=2, eval_every=7, eval_windows=4,
             device="cpu", monitor_every=1)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    "Two small runs under the names of the large ones, and what is stored of them."
    folder = tmp_path_factory.mktemp("ten")
    (folder / "secret").mkdir()
    text = folder / "secret/acts.txt"
    text.write_text("Article 1. The Commission shall adopt delegated acts.\n" * 400)
    runs = [TrainConfig(name=f"ten_million_{name}", format=fmt, data=f"path:{text}", **SMALL, **more)
            for name, fmt, more in (("bf16_baseline", "bfloat16", {}),
                                    ("e5m2_fp8", "E5M2", {"shadow_every": 1}))]
    compare(runs, folder / "runs", progress=False)
    ten_million.store(folder / "runs", folder / "stored")
    return folder


def test_what_is_stored_is_what_was_measured(stored):
    s, run = ten_million.read_stored(stored / "stored"), stored / "runs/ten_million_e5m2_fp8"
    given, kept = read_series(run / "series"), s.series[run.name]
    assert {path.split("/")[-1] for path in kept} == {
        key.split("/")[1] for key in ten_million.KEPT} - {ten_million.STILL[1]}  # that of runs on the grid
    for path, (steps, values) in kept.items():
        own = dict(zip(given[path][0].tolist(), given[path][1].tolist()))
        assert dict(zip(steps.tolist(), values.tolist())) == {
            step: own[step] for step in own if "cosine" in path or step in (1, 20)}
    log = RunFolder(run).metrics()
    assert s.loss("e5m2_fp8") == round(log[-1]["val_loss"], 5)
    assert s.runs[run.name]["tokens_per_s"] == np.median([row["tokens_per_s"] for row in log])
    steps, counts = s.histograms[run.name]
    assert (counts.sum(1) == s.runs[run.name]["record"]["quantized_parameters"]).all() and list(steps) == sorted(steps)


def test_the_place_of_a_text_is_not_stored(stored):
    lines = (stored / "stored/runs.jsonl").read_text()
    assert "secret" not in lines and "path:acts.txt" in lines and '"hash"' in lines


def test_what_was_stored_before_stays_and_is_not_run_again(stored, tmp_path, monkeypatch):
    to = tmp_path / "stored"
    for name in ("bf16_baseline", "e5m2_fp8"):  # as from two machines, one after the other
        (tmp_path / name).mkdir()
        (tmp_path / name / f"ten_million_{name}").symlink_to(stored / f"runs/ten_million_{name}")
        ten_million.store(tmp_path / name, to)
    both, one = ten_million.read_stored(stored / "stored"), ten_million.read_stored(to)
    apart = [{name: {k: v for k, v in run.items() if k != "autopsy"}  # which compares with runs beside it
              for name, run in s.runs.items()} for s in (one, both)]
    assert apart[0] == apart[1] and one.series.keys() == both.series.keys()
    for run, series in both.series.items():
        for path, (steps, values) in series.items():
            assert (one.series[run][path][0] == steps).all() and (one.series[run][path][1] == values).all()
    made = []
    monkeypatch.setattr(ten_million, "compare", lambda configs, out: made.extend(c.name for c in configs))
    ten_million.train(tmp_path, "path:x", "bf16_baseline,e4m3_fp8,bf16_baseline_seed43", to)
    assert made == ["ten_million_e4m3_fp8", "ten_million_bf16_baseline_seed43"]
    with pytest.raises(InputError, match="unknown run 'e4m3'.*allowed: bf16_baseline, e5m2_fp8"):
        ten_million.train(tmp_path, "path:x", "e4m3", to)


def test_runs_on_two_texts_are_not_one_study(stored, tmp_path):
    to = tmp_path / "stored"
    ten_million.store(stored / "runs", to)
    lines = [json.loads(line) for line in (to / "runs.jsonl").read_text().splitlines()]
    lines[0]["record"] |= {"corpus": {"hash": "other"}, "name": "ten_million_other"}
    (to / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = (to / "runs.jsonl").read_text()
    with pytest.raises(InputError, match="2 texts"): ten_million.store(stored / "runs", to)
    assert (to / "runs.jsonl").read_text() == before


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no finished run"): ten_million.store(tmp_path, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def of(losses, unchanged=None, cosine=None):
    "Runs with these losses, as if they were stored."
    runs = {f"ten_million_{name}": {"val": [[0, 9.0, 1.0], [1, loss, 1.0]]} for name, loss in losses.items()}
    series = {}
    for name, x in (unchanged or {}).items():
        path = f"updates/all/{ten_million.STILL['grid' in name]}"
        series[f"ten_million_{name}"] = {path: (np.arange(2), np.array([x, x]))}
    for layer, values in (cosine or {}).items():
        own = series.setdefault("ten_million_e5m2_fp8", {})
        own[f"shadow/{layer}/cosine"] = (np.arange(len(values)), np.array(values))
    return ten_million.Stored(runs, series, {})


def seeds(name, base, gaps):
    "Three seeds of a run that ends so far above another."
    suffixes = ("", "_seed43", "_seed44")
    return of({f"{base}{s}": 1 for s in suffixes} | {f"{name}{s}": 1 + gap for s, gap in zip(suffixes, gaps)})


SEEDS = [f"{name}{seed}" for name in ("bf16_baseline", "e5m2_fp8") for seed in ("", "_seed43", "_seed44")]
NAMES = ("bf16_baseline", "e3m4_fp8", "e4m3_fp8", "e5m2_fp8", "e7m0_fp8")
MOSTLY = [1.0] * 95 + [0.5] * 5
CASES = [  # the claim's number, runs with which it holds, runs that refute it
    (0, of(dict(zip(SEEDS, (1, 1, 1, 1.09, 0.91, 1)))), of(dict(zip(SEEDS, (1, 1, 1, 1, 1, 1.11))))),
    (1, of({}, cosine={"all": [0.0] * 100, "a": MOSTLY}), of({}, cosine={"a": MOSTLY, "b": [0.5] + MOSTLY})),
    (2, of(dict(zip(NAMES, (1, 1.019, 1.01, 1.5, 1.6)))), of(dict(zip(NAMES, (1, 1.01, 1.01, 1.5, 1.47))))),
    (2, of(dict(zip(NAMES, (1, 0.99, 1, 1, 1)))), of(dict(zip(NAMES, (1, 1.03, 1.03, 1.5, 1.6))))),
    (3, seeds("e7m0_fp8", "bf16_baseline", (0.05, 0.03, 0.09)),
     seeds("e7m0_fp8", "bf16_baseline", (0.05, 0.01, 0.09))),
    (3, seeds("e7m0_fp8", "bf16_baseline", (0.05, 0.03, 0.09)),
     seeds("e7m0_fp8", "bf16_baseline", (0.05, math.inf, 0.09))),
    (4, of({}, dict(e7m0_fp8=0.9, e7m0_fp8_grid_nearest=0.8)),
     of({}, dict(e7m0_fp8=0.9, e7m0_fp8_grid_nearest=0.7, e5m2_fp8=0.95))),
    (5, of(dict(e4m3_fp8=1, e4m3_fp8_grid_stochastic=1.05)), of(dict(e4m3_fp8=1, e4m3_fp8_grid_stochastic=1.0))),
    (5, seeds("e4m3_fp8_grid_stochastic", "e4m3_fp8", (0.05, 0.02, 0.07)),
     seeds("e4m3_fp8_grid_stochastic", "e4m3_fp8", (0.05, 0.001, 0.07))),
    (6, of(dict(e7m0_fp8=1, e7m0_fp8_grid_stochastic=1.2)), of(dict(e7m0_fp8=1, e7m0_fp8_grid_stochastic=1.05))),
    (7, of(dict(e4m3_fp8_grid_nearest=2, e4m3_fp8_grid_stochastic=1)),
     of(dict(e4m3_fp8_grid_nearest=1, e4m3_fp8_grid_stochastic=2))),
    (8, of(dict(e7m0_fp8_grid_nearest=2, e7m0_fp8_grid_stochastic=1)),
     of(dict(e7m0_fp8_grid_nearest=1, e7m0_fp8_grid_stochastic=2))),
    (9, of({"e4m3_fp8": 1, ten_million.RESIDUAL: 0.995}), of({"e4m3_fp8": 1, ten_million.RESIDUAL: 1.02})),
    (10, seeds("e4m3_fp8_grid_stochastic", "e4m3_fp8", (-0.1, -0.2, -0.01)),
     seeds("e4m3_fp8_grid_stochastic", "e4m3_fp8", (-0.1, -0.2, 0.01))),
    (11, seeds("e7m0_fp8_grid_stochastic", "e7m0_fp8", (-0.1, -0.2, -0.01)),
     seeds("e7m0_fp8_grid_stochastic", "e7m0_fp8", (0.01, -0.2, -0.1))),
    (12, seeds(ten_million.RESHAPED, "e7m0_fp8_grid_stochastic", (-0.02, 0.0, -0.02)),
     seeds(ten_million.RESHAPED, "e7m0_fp8_grid_stochastic", (-0.02, 0.0, -0.004))),
]


@pytest.mark.parametrize("place,holds,refuted", CASES)
def test_a_claim_is_judged_as_it_is_said(place, holds, refuted):
    verdicts = [ten_million.findings(s)[place].holds for s in (holds, refuted, of({}))]
    assert verdicts == [True, False, None]


def test_the_names_of_the_claims_are_those_of_the_runs():
    packaged, arms = packaged_configs(), (*ten_million.SEEDED, *ten_million.SINGLE)
    names = {find_config(spec).name for spec in arms}
    assert {f"ten_million_{name}" for name in (*NAMES, ten_million.RESIDUAL)} <= names
    assert {f"ten_million_{fmt}_grid_{how}" for fmt in (ten_million.E4, ten_million.E7)
            for how in ("nearest", "stochastic")} <= names
    assert f"ten_million_{ten_million.RESHAPED}" in {find_config(spec).name for spec in ten_million.SEEDED}
    wide = packaged[ten_million.WIDE]
    assert wide.shadow_every == wide.monitor_every == 1 and "gradients" in wide.wandb_layers


@pytest.mark.parametrize("filled", [False, True])
def test_the_page_shows_runs_the_moment_they_are_there(stored, tmp_path, monkeypatch, filled):
    import matplotlib
    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT / "nbs/studies")
    found = stored / "stored" if filled else tmp_path / "none"
    cells = json.loads((ROOT / "nbs/studies/ten_million.ipynb").read_text())["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"
                     and "eval: false" not in "".join(c["source"]))
    texts: list[str] = []
    code = code.replace("experiment.read_stored()", "experiment.read_stored(FOUND)")
    code = code.replace("Markdown(", "texts.append(")
    exec(code, {"FOUND": found, "texts": texts})
    said = "\n".join(texts)
    assert ("**Nothing of this page has been run.**" in said) != filled
    run = json.loads((stored / "stored/runs.jsonl").read_text().splitlines()[0])
    loss, steps = run["val"][-1][1], run["record"]["steps"]
    assert (f"| bf16 baseline | {steps:,} | {loss:.4f} |" in said) == filled
    assert ("nothing left its range" in said or "finished" in said or "after" in said) == filled


def test_the_baseline_trains_on_judgments_from_a_local_folder(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setenv("ALTGRAD_CACHE", str(tmp_path / "cache"))
    data = f"lex_glue/ecthr_a@{lex_glue(tmp_path / 'lex_glue')}"
    changes = {**SMALL, "max_steps": 10, "model": "gpt-tiny", "data": data}
    given = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    assert cli.main(["train", "ten_million/bf16_baseline", *given, "--out", str(tmp_path / "runs")]) == 0
    run = RunFolder(tmp_path / "runs/ten_million_bf16_baseline")
    record = json.loads((run.path / "run.json").read_text())
    assert record["exit_reason"] == "finished" and record["steps"] == 10
    assert record["corpus"]["name"] == data and record["corpus"]["vocab_size"] == 256
    assert run.metrics()[-1]["val_loss"] < math.log(256)
