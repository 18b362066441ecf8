"""What the scripts of the small studies share: results that go on where they were, and with nothing else."""
import json
import math
import sys
from pathlib import Path

import pytest

from altgrad.basics import InputError

from tiny import load_experiment

EXPERIMENTS = Path(__file__).resolve().parent.parent / "nbs/studies/experiments"
studies = load_experiment("studies")


@pytest.fixture
def opened(tmp_path, monkeypatch):
    "Opens the results of a study on a text of so many lines, without checkpoints."
    monkeypatch.setenv("ALTGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(studies, "CHECKPOINTS", ())

    def on(lines):
        text = tmp_path / f"{lines}.txt"
        text.write_text("".join(f"{n} is a number\n" for n in range(lines)))
        monkeypatch.setattr(sys, "argv", ["study", "--corpus", f"eurlex=path:{text}"])
        return studies.opened("A study.", tmp_path / "out/found.json", ("runs",))

    return on


def test_results_go_on_and_are_not_mixed_with_those_of_another_text(opened, tmp_path):
    _, stored, store = opened(5000)
    stored["runs"].append({"loss": 1.5})
    store()
    kept = (tmp_path / "out/found.json").read_bytes()
    assert opened(5000)[1]["runs"] == [{"loss": 1.5}]
    with pytest.raises(InputError, match="found.json holds runs with other corpus: choose another --out"): opened(6000)
    (tmp_path / "out/found.json").write_text(json.dumps({**stored, "facts": {
        **stored["facts"], "checkpoints": {"stdlib-0.1m-0": "of other weights"}}}))
    with pytest.raises(InputError, match="holds runs with other checkpoints"): opened(5000)
    (tmp_path / "out/found.json").write_bytes(kept)
    assert opened(5000)[1]["facts"]["corpus"] == stored["facts"]["corpus"]


def test_bad_input_is_one_line_and_code_2(capsys):
    def wrong(): studies.text_of("laws.txt")
    assert studies.exit_code(wrong) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert studies.exit_code(lambda: None) == 0 and studies.exit_code(lambda: 1) == 1
    assert studies.text_of("eurlex=path:a=b.txt") == {"eurlex": "path:a=b.txt"}


@pytest.mark.parametrize("octaves", [-3.2, -1.9, -0.4, 0.0, 0.6, 2.2, 3.3])
def test_rates_are_tried_an_octave_apart_until_the_best_is_no_end(monkeypatch, octaves):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    study = load_experiment("batch_and_data")
    best, losses = 0.008 * 2.0**octaves, {}
    while (rate := study.next_rate(losses, 32)) is not None: losses[rate] = abs(math.log2(rate / best))
    rates = sorted(losses)
    assert all(b == 2 * a for a, b in zip(rates, rates[1:])) and 0.008 in losses
    if abs(octaves) < 3: assert rates[0] < min(losses, key=losses.get) < rates[-1] and min(losses.values()) <= 0.5
    else: assert len(losses) == study.MOST
