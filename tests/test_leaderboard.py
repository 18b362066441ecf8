"""The leaderboard: a card of a tiny bench with four more keys is a row; each fault is named; a run
is made again and compared; the page's table sorts itself."""
import json
import runpy
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scipy.stats import ttest_rel

from altgrad.basics import InputError
from altgrad.evidence import leaderboard as module
from altgrad.evidence.bench import PROTOCOLS, compared, run_bench
from altgrad.evidence.instrument import Arm
from altgrad.evidence.leaderboard import (
    check_submission, frontier, read_submissions, rerun, submissions_table,
)
from altgrad.geometry.catalogue import RULES
from altgrad.geometry.outside import is_full
from tiny import SIGN, small_protocol

ROOT = Path(__file__).resolve().parent.parent
ADDED = {
    "author": "Ada", "date": "2026-11-23", "source": "https://example.org/mine.py",
    "log": "https://example.org/log",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A small protocol, and the submission of a rule from a file by it."
    folder = tmp_path_factory.mktemp("leaderboard")
    small = small_protocol(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTGRAD_CACHE", str(folder / "cache"))
        (folder / "mine.py").write_text(SIGN)
        patch.chdir(folder)
        arm = Arm(rule="mine.py:Mine", checkpoint="tiny-0", corpus="tiny")
        card = run_bench(arm, folder / "out", small, progress=False)
    for name in [name for name in RULES if is_full(name)]: del RULES[name]
    return small, json.loads(json.dumps(card)) | ADDED


@pytest.fixture
def rows(made, tmp_path, monkeypatch):
    "A folder with one valid submission, and the small protocol by the name of the large one."
    small, card = made
    monkeypatch.setenv("ALTGRAD_CACHE", str(small.folder / "cache"))
    monkeypatch.setitem(PROTOCOLS, "bench-1", small)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine.json", card)
    known = dict(RULES)
    yield tmp_path
    RULES.clear()
    RULES.update(known)


@pytest.fixture
def card(made): return json.loads(json.dumps(made[1]))


def write(folder: Path, name: str, card: dict) -> Path:
    path = folder / name
    path.write_text(json.dumps(card))
    return path


def test_a_card_with_four_more_keys_is_a_row_and_is_checked_without_its_code(rows, card):
    assert check_submission(rows / "mine.json") == []
    assert not any(is_full(name) for name in RULES)
    (row,) = read_submissions(rows)
    assert row.file == "mine.json" and row.card == card and row.bits == 8 and row.counts
    ends = ttest_rel(card["losses"]["rule"], card["losses"]["master"]).confidence_interval(0.95)
    # quantiles of t are found by iteration; losses of a few nats are known to 1e-15
    assert list(row.above[1:]) == pytest.approx([ends.low, ends.high], rel=1e-9, abs=1e-12)


PAIR = {"mean": 0.1, "low": 0.0, "high": 0.2}
FAULTS = {  # a change of a valid file -> what is said
    "lacks": (lambda c: c.pop("log"), "the submission lacks 'log'"),
    "unknown": (lambda c: c.update(mood=1), "unknown key of the submission 'mood'"),
    "deep": (lambda c: c["machine"].update(disk=1), "unknown key of machine 'disk'"),
    "type": (lambda c: c.update(moved="yes"), "moved must be true or false, not 'yes'"),
    "number": (lambda c: c["rates"].update(rule=-1), "rates.rule must be a positive number"),
    "list": (lambda c: c["losses"].update(rule=2.0), "losses.rule must be a list"),
    "item": (lambda c: c["losses"]["rule"].__setitem__(1, None), "losses.rule[1] must be a loss"),
    "object": (lambda c: c.update(gain=0.1), "gain must be an object"),
    "date": (lambda c: c.update(date="23.11.2026"), "date must be a date"),
    "link": (lambda c: c.update(source="javascript:alert(1)"), "source must be an https link"),
    "name": (lambda c: c.update(author="Ada\n# Head"), "author must be one line"),
    "protocol": (lambda c: c.update(protocol="bench-7"), "unknown protocol of a submission"),
    "quick": (lambda c: c.update(protocol="bench-1-quick"), "unknown protocol of a submission"),
    "interval": (lambda c: c.update(gain=PAIR), "gain does not follow from the losses"),
    "verdict": (lambda c: c.update(verdict="beats all"), "verdict does not follow"),
    "short": (lambda c: c["losses"]["rule"].pop(), "losses.rule must have 3 values"),
    "checkpoints": (lambda c: c["checkpoints"].reverse(), "checkpoints are not the 3"),
    "diverged": (lambda c: c["diverged"].update(rule=9), "diverged.rule must be at most 3"),
    "rule": (lambda c: c.update(against="nobody"), "unknown against 'nobody'"),
    "format": (lambda c: c.update(format="E4M4"), "unknown format 'E4M4'"),
    "power": (lambda c: c.update(placement="nowhere"), "unknown placement 'nowhere'"),
    "moments": (lambda c: c.update(moments="int3"), "unknown moments 'int3'"),
    "no text": (lambda c: c["sources"].clear(), "sources has no text of mine.py:Mine@"),
    "a text": (lambda c: c["sources"].update(other=""), "sources has a text that nothing names"),
    "its text": (lambda c: c["sources"].update({c["rule"]: SIGN + "\n"}), "has the hash"),
    "huge": (lambda c: c["losses"].update(rule=[1e308, -1e308, 1e308]), "losses.rule[0] must be a loss"),
    "no bits": (lambda c: c["bits"].update(rule=5e-324), "bits.rule must be bits, from 1"),
    "half": (lambda c: c["sources"].update({c["rule"]: "\ud800"}), "has the hash"),
    "corrects": (lambda c: c.update(corrects="absent.json"), "corrects names absent.json"),
    "itself": (lambda c: c.update(corrects="other.json"), "corrects names other.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(rows, card, fault):
    change, said = FAULTS[fault]
    change(card)
    found = check_submission(write(rows, "other.json", card))
    assert any(said in line for line in found), found
    assert all("\n" not in line for line in found)
    if fault != "quick":
        with pytest.raises(InputError, match="other.json"): read_submissions(rows)


@pytest.mark.parametrize("text, said", {
    "{": "is no JSON", "[]": "the submission must be an object", '{"gain": NaN}': "is no JSON",
    "[" * 100_000: "is no JSON",
}.items())
def test_what_is_no_submission_is_one_line(rows, text, said):
    (rows / "bad.json").write_text(text)
    (found,) = check_submission(rows / "bad.json")
    assert said in found
    assert "cannot read" in check_submission(rows / "absent.json")[0]
    assert "name must be" in check_submission(write(rows, "a b.json", {}))[0]


def test_a_rule_of_a_package_is_refused(rows, card):
    old, new = card["rule"], card["rule"].replace("mine.py", "mine")
    text = json.dumps(card).replace(old, new)
    (rows / "other.json").write_text(text)
    assert [f"{new} is of a package" in f for f in check_submission(rows / "other.json")] == [True]


@pytest.mark.parametrize("role", ["rule", "rival", "rule_fp32", "rival_fp32", "master"])
def test_a_run_is_made_again_from_the_card_alone(rows, card, role):
    for name in card["checkpoints"][:2]:
        agrees, said = rerun(card, role, name)
        assert agrees and f"from {name}: loss " in said and said.endswith("agrees bit for bit")
    assert rerun(card, role)[0]


def test_losses_that_were_changed_with_all_that_follows_are_found_by_a_run(rows, card):
    card["losses"]["rule"] = [loss - 0.011 for loss in card["losses"]["rule"]]
    card.update(compared(card["losses"]))
    assert check_submission(write(rows, "other.json", card)) == []
    agrees, said = rerun(card)
    assert not agrees and "on the same kind of CPU" in said
    card["machine"]["cpu"] = "another"
    agrees, said = rerun(card)
    assert not agrees and "more than 0.01 (another CPU here)" in said


def test_another_cpu_or_code_may_differ_by_the_bound_and_the_same_may_not(rows, card):
    card["losses"]["rule"] = [loss + 0.009 for loss in card["losses"]["rule"]]
    assert not rerun(card)[0]
    for key, value in (("machine", {**card["machine"], "capability": "none"}), ("code", "0" * 16)):
        other = {**card, key: value}
        if key == "code": other["rows"] = ids_of(other)
        agrees, said = rerun(other)
        assert agrees and "agrees within 0.01 nats" in said, said


def ids_of(card: dict) -> dict:
    "The names of a card's runs, were they made by the code that it names."
    bench = PROTOCOLS[card["protocol"]].bench()
    name = lambda role, checkpoint: module.run_id(
        {**module.identity(module._run_of(card, role, checkpoint), bench), "code": card["code"]}
    )
    return {role: [name(role, c) for c in card["checkpoints"]] for role in card["rows"]}


@pytest.mark.parametrize("change", [
    lambda c: c["rates"].update(rule=c["rates"]["rule"] * 2),
    lambda c: c["rows"]["rule"].__setitem__(slice(None), ["0" * 16] * 3),
    lambda c: c.update(format="E5M2"),
])
def test_another_run_than_the_card_names_is_said_and_not_made(rows, card, change, monkeypatch):
    change(card)
    monkeypatch.setattr(module, "run_arm", None)
    agrees, said = rerun(card)
    assert not agrees and "is another run" in said


def test_bits_that_a_weight_does_not_keep_are_found(rows, card):
    card["bits"]["rule"] = 4.0
    agrees, said = rerun(card)
    assert not agrees and "a weight keeps 8 bits, not 4" in said


@pytest.mark.parametrize("row, change, said", [
    ({"diverged": True}, {}, "the run diverges"),
    ({"diverged": False}, {"diverged": 3}, "the run does not diverge"),
    ({"travel": 0.1}, {"moved": False}, "the card says that it never does"),
    ({"travel": 0.0}, {}, ""),  # in another run it may
])
def test_what_a_card_says_beside_its_losses_is_found_by_a_run(rows, card, monkeypatch, row, change, said):
    real = module.run_arm
    monkeypatch.setattr(module, "run_arm", lambda *args: {**real(*args), **row})
    if "diverged" in change: card["diverged"]["rule"] = change["diverged"]
    card.update(moved=change.get("moved", card["moved"]))
    agrees, told = rerun(card)
    assert agrees == (not said) and said in told


def test_a_rule_that_fails_here_is_a_sentence(rows, card, monkeypatch):
    def fail(*_): raise KeyError("x")
    monkeypatch.setattr(module, "run_arm", fail)
    agrees, said = rerun(card)
    assert not agrees and "fails here: KeyError" in said
    with pytest.raises(InputError, match="unknown role"): rerun(card, "boss")
    with pytest.raises(InputError, match="unknown checkpoint"): rerun(card, "rule", "tiny-0")


def test_a_row_of_an_older_protocol_stays_and_is_marked(rows, card, monkeypatch):
    monkeypatch.setitem(PROTOCOLS, "bench-0", replace(PROTOCOLS["bench-1"], name="bench-0"))
    path = write(rows, "old.json", card | {"protocol": "bench-0"})
    assert "unknown protocol" in check_submission(path)[0]
    found = {row.file: row for row in read_submissions(rows)}
    assert found["old.json"].older and not found["old.json"].counts and found["mine.json"].counts
    assert "older protocol bench-0" in submissions_table(found.values())


def test_a_row_that_another_corrects_stays_and_is_marked(rows, card):
    write(rows, "doubt.json", card | {"corrects": "mine.json", "note": "not on my machine"})
    found = {row.file: row for row in read_submissions(rows)}
    assert found["mine.json"].corrected_by == ("doubt.json",) and not found["mine.json"].counts
    assert found["doubt.json"].counts
    table = submissions_table(found.values())
    assert "doubted by doubt.json" in table and "corrects mine.json" in table
    assert "not on my machine" in table


def test_nothing_of_a_file_becomes_part_of_the_page(rows, card):
    evil = '<img src=x onerror="alert(1)">'
    path = write(rows, "evil.json", card | {"author": evil, "note": evil})
    assert check_submission(path) == []
    assert evil not in submissions_table(read_submissions(rows))


@pytest.mark.parametrize("seed", range(20))
def test_the_frontier_is_what_nothing_beats(seed):
    import random

    draw = random.Random(seed)
    points = [(draw.choice([8.0, 12.0, 16.0, 72.0]), draw.randrange(6) / 10) for _ in range(9)]
    best = {p for p in points if not any(
        q != p and q[0] <= p[0] and q[1] <= p[1] for q in points
    )}
    assert frontier(points) == sorted(best)


def test_every_stored_row_is_right_and_nothing_else_lies_there():
    folder = ROOT / "nbs/results/bench"
    stored = {row.file for row in read_submissions(folder)}
    assert {path.name for path in folder.iterdir()} == stored | {"README.md"}


SCRIPT = ROOT / ".ci/check_submission.py"


def test_the_check_prints_markdown_and_says_by_its_exit_code_what_it_found(rows, card, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(["mine.json"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("### mine.json") and told.count("agrees bit for bit") == 2
    card["losses"]["rule"] = [loss - 0.011 for loss in card["losses"]["rule"]]
    card.update(compared(card["losses"]))
    write(rows, "other.json", card)
    assert main(["other.json"]) == 1
    write(rows, "bad.json", card | {"author": "```\n@all", "mood": "```"})
    capsys.readouterr()
    assert main(["bad.json"]) == 2
    told = capsys.readouterr().out
    assert "unknown key" in told and told.count("```") == 2
    assert main([]) == 2


WORKFLOWS = ROOT / ".github/workflows"


def jobs(name: str) -> dict:
    return yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))["jobs"]


def test_foreign_code_runs_where_nothing_can_be_written():
    text = (WORKFLOWS / "submission.yml").read_text(encoding="utf-8")
    checked = yaml.safe_load(text)
    # YAML reads the key `on` as true
    assert list(checked[True]) == ["pull_request"]
    assert checked["permissions"] == {"contents": "read"}
    for never in ("pull_request_target", "{{ secrets", "{{ github.token"): assert never not in text
    assert "GITHUB_STEP_SUMMARY" in text and "persist-credentials: false" in text
    (job,) = jobs("submission-comment.yml").values()
    # the one that may write a comment takes no code of the pull request
    assert not any("checkout" in step.get("uses", "") for step in job["steps"])
    for script in [step.get("run", "") for step in job["steps"]]: assert "${{" not in script


@pytest.mark.parametrize("changes, allowed", {
    "A\tnbs/results/bench/mine.json": True,
    "A\tnbs/results/bench/mine.json\nM\tREADME.md": False,
    "M\tnbs/results/bench/mine.json": False,
    "A\tnbs/results/bench/deep/mine.json": False,
    "A\tnbs/results/bench/mine.py": False,
    "": False,
}.items())
def test_a_pull_request_adds_one_file_and_changes_nothing_else(tmp_path, changes, allowed):
    git = tmp_path / "git"  # stands for git: says what the pull request changes
    git.write_text("#!/bin/sh\nprintf '%s' \"$CHANGES\"\n")
    git.chmod(0o755)
    (tmp_path / "env").touch()
    script = next(step["run"] for step in jobs("submission.yml")["check"]["steps"] if "run" in step)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CHANGES": changes,
             "GITHUB_ENV": str(tmp_path / "env"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")},
    )
    assert (done.returncode == 0) == allowed, done.stderr
    said = (tmp_path / "env").read_text()
    assert said == ("FILE=nbs/results/bench/mine.json\n" if allowed else "")
