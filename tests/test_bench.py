"""`altgrad bench`: a rule from a file and one command give a verdict; a killed bench goes on; what a
rule does wrong is said in a sentence."""
import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from altgrad.cli import main
from altgrad.evidence import bench as module
from altgrad.evidence.bench import PROTOCOLS, ROLES, Verdict, bits_a_weight, card_folder, compared, decide
from altgrad.evidence.instrument import Arm
from altgrad.evidence.sweep import Ledger, replay
from altgrad.geometry.catalogue import RULES
from altgrad.geometry.storage import STORAGES
from tiny import CONFIRM, MOST, POINTS, RULE, SIGN, TUNE, small_protocol
from wait import has_content, until


@pytest.fixture(scope="module")
def small(small_folder): return small_protocol(small_folder)


@pytest.fixture
def here(small, tmp_path, monkeypatch):
    "A folder with a rule, a small protocol, and tables that forget afterwards."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALTGRAD_CACHE", str(small.folder / "cache"))
    monkeypatch.setitem(PROTOCOLS, "bench-1", small)
    (tmp_path / "mine.py").write_text(SIGN)
    known = dict(RULES), dict(STORAGES)
    yield tmp_path
    for table, before in zip((RULES, STORAGES), known):
        table.clear()
        table.update(before)


def bench(*more: str) -> int: return main(["bench", *more, "--out", "out", "--workers", "1"])


def card(name: str) -> dict:
    path, = Path("out").glob(f"{name}/card.json")
    return json.loads(path.read_text())


def test_a_file_and_one_command_give_a_verdict(small, here, capsys):
    assert bench("mine.py:Mine") == 0
    told = capsys.readouterr().out.splitlines()
    found = card("mine.py_Mine_*_grid_stochastic_E4M3")
    rows = {row["run"]: row for row in Ledger("out").rows()}
    losses = {r: np.array([rows[run]["val_loss"] for run in found["rows"][r]]) for r in ROLES}
    # the numbers of the card, by scipy's paired test over checkpoints
    for key, other in (("gain", "rival"), ("below_master", "master")):
        ends = ttest_rel(losses[other], losses["rule"]).confidence_interval(0.95)
        # quantiles of t are found by iteration; losses of a few nats are known to 1e-15
        assert np.allclose([found[key]["low"], found[key]["high"]], ends, rtol=1e-9, atol=1e-12)
        assert np.isclose(found[key]["mean"], (losses[other] - losses["rule"]).mean())
    both = losses["rival"] - losses["rule"] - losses["rival_fp32"] + losses["rule_fp32"]
    assert np.isclose(found["difference_of_gains"]["mean"], both.mean())
    assert found["verdict"] == decide(losses["master"] - losses["rule"]).value
    assert found["bits"] == {"rule": 8, "rival": 8 + 64, "master": 96}
    assert told[0].startswith("gain over adamw") and any(
        "8 of its 96" in line or "ecided" in line for line in told
    )
    assert found["sources"] == {found["rule"]: SIGN}
    sha = hashlib.sha256(SIGN.encode()).hexdigest()[:12]
    assert (here / f"out/mine.py_Mine_{sha}_grid_stochastic_E4M3/card.png").stat().st_size > 1000
    row = rows[found["rows"]["rule"][0]]
    assert row["checkpoint"] in CONFIRM and row["split"] == "confirm"
    (here / "mine.py").unlink()
    assert replay(row, small.bench())[0]


def test_all_arms_have_the_same_budget_and_are_tuned_by_the_uncapped_loss(here):
    assert bench("mine.py:Mine", "--set", "power=0") == 0
    rows = [row for row in Ledger("out").rows() if row["stage"] == "tune"]
    found = card("mine.py_Mine_*_grid_stochastic_E4M3")
    for role, storage in (("rule", "grid_stochastic"), ("rule_fp32", "fp32"), ("master", "master")):
        rule = "adamw" if role == "master" else found["rule"]
        mine = [r for r in rows if (r["rule"], r["storage"]) == (rule, storage)]
        rates = {r["lr"] for r in mine}
        assert POINTS <= len(rates) <= MOST
        assert {r["checkpoint"] for r in mine} == set(TUNE)
        mean = {lr: np.mean([r["raw_loss"] for r in mine if r["lr"] == lr]) for lr in rates}
        assert found["rates"][role] == min(mean, key=mean.__getitem__)


@pytest.mark.slow
def test_a_killed_bench_goes_on_and_comes_out_the_same(small, here):
    assert bench("mine.py:Mine") == 0
    whole = card("mine.py_Mine_*_grid_stochastic_E4M3")
    (here / "out").rename(here / "whole")
    code = (
        "import sys\nfrom altgrad.cli import main\nfrom altgrad.evidence import bench\n"
        "from pathlib import Path, PosixPath\nfrom altgrad.evidence.bench import Protocol\n"
        f"from altgrad.evidence.instrument import Task\nbench.PROTOCOLS['bench-1'] = {small!r}\n"
        "if __name__ == '__main__': sys.exit(main(sys.argv[1:]))\n"
    )
    (here / "run.py").write_text(code)
    started = subprocess.Popen(
        [sys.executable, "run.py", "bench", "mine.py:Mine", "--out", "out", "--workers", "1"],
        stderr=subprocess.DEVNULL,
    )
    until(lambda: has_content(here / "out/ledger.jsonl"), lambda: started.poll() is None)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = len(Ledger("out").rows())
    assert bench("mine.py:Mine") == 0
    assert 0 < kept < len(Ledger("out").rows())
    again = card("mine.py_Mine_*_grid_stochastic_E4M3")
    clock = {"step_ms": 0, "seconds": 0}
    assert again | clock == whole | clock


@pytest.mark.slow
def test_several_formats_and_json(here, capsys):
    assert bench("madam", "--format", "E4M3,E7M0", "--json") == 0
    cards = json.loads(capsys.readouterr().out)
    assert [c["format"] for c in cards] == ["E4M3", "E7M0"]
    assert all(c["verdict"] in {v.value for v in Verdict} for c in cards)


@pytest.mark.slow
def test_what_was_asked_for_is_in_a_cards_folder_and_its_sentence(small, here, monkeypatch, capsys):
    "No card overwrites another's, and the rival and the master arm know nothing of the rule's settings."
    monkeypatch.setitem(PROTOCOLS, "bench-1-quick", replace(small, name="bench-1-quick"))
    asked = ("stiffness_adamw", "--set", "floor_octaves=4", "--set")
    usual = "stiffness_adamw_grid_stochastic_E4M3"
    for more in (("power=-1",), ("power=1",), ("power=1", "--quick"), ("power=1", "--against", "madam")):
        assert bench(*asked, *more) == 0
    folders = [f"{usual}_power_{p}_floor_octaves_4{more}" for p, more in (
        (-1, ""), (1, ""), (1, "_quick"), (1, "_against_madam"))]
    assert {path.parent.name for path in Path("out").glob("*/card.json")} == set(folders)
    cards = [card(name) for name in folders]
    assert [(c["power"], c["floor_octaves"]) for c in cards] == [(-1, 4), (1, 4), (1, 4), (1, 4)]
    for c in cards: assert f"E4M3, power {c['power']:g}, floor_octaves 4," in module.sentence(c)
    rows = {row["run"]: row for row in Ledger("out").rows()}
    for c in cards:
        of_role = {role: {(rows[run]["rule"], rows[run]["floor_octaves"]) for run in c["rows"][role]} for role in ROLES}
        assert of_role["master"] == {("adamw", 8)} and of_role["rival"] == {(c["against"], 8)}
        assert of_role["rule"] == of_role["rule_fp32"] == {("stiffness_adamw", 4)}


@pytest.mark.parametrize("step, storage, said", [
    ("1e30 * p.grad", "fp32", "diverges in 3 of 3 confirming runs"),
    ("1e-4 * p.grad", "grid_nearest", "never moves a weight"),
])
def test_what_a_rule_does_wrong_is_a_sentence(here, capsys, step, storage, said):
    (here / "mine.py").write_text(RULE.replace("{step}", step))
    for _ in range(2):  # the second time all rows come from the ledger, which has no number that is not finite
        assert bench("mine.py:Mine", "--storage", storage) == 0
        assert said in capsys.readouterr().out


HIDES = """
import collections
import torch

class Held: pass

class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))
        self.mine = {kind}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                {keep}
                p.sub_(1e-3 * p.grad)
"""


@pytest.mark.parametrize("kind, keep", [
    ("{}", "self.mine[i] = (p.clone(), 0, p.grad.clone())"),
    ("[]", "self.mine.append(p.double().float()) if len(self.mine) < 2 * len(group['params']) else None"),
    ("Held()", "setattr(self.mine, f'x{i}', [p.clone(), p.grad.numpy().copy()])"),
    ("{}", "setattr(self, f'x{i}', (p.grad.numpy().copy().T, p.clone(), p.grad.sum().numpy()))"),
    ("collections.deque()", "self.state[p]['all'] = collections.namedtuple('T', 'a b')(p.clone(), p.grad.clone())"),
])
def test_bits_that_a_rule_keeps_elsewhere_are_counted(small, here, kind, keep):
    "Two copies in float32, beside codes of eight bits."
    (here / "mine.py").write_text(HIDES.replace("{kind}", kind).replace("{keep}", keep))
    arm = Arm(rule="mine.py:Mine", storage="grid_nearest", checkpoint="tiny-0", corpus="tiny")
    found = bits_a_weight(arm, small.bench())
    assert found == pytest.approx(8 + 64, abs=0.1)  # the scales are a few bytes more


def test_bits_of_what_is_kept_sparse_are_counted(small, here):
    "Beside codes of eight bits a value of 32 and two places of 64 for each weight."
    keep = "self.mine[i] = (p.grad + 1).to_sparse()"
    (here / "mine.py").write_text(HIDES.replace("{kind}", "{}").replace("{keep}", keep))
    arm = Arm(rule="mine.py:Mine", storage="grid_nearest", checkpoint="tiny-0", corpus="tiny")
    assert bits_a_weight(arm, small.bench()) == pytest.approx(8 + 32 + 2 * 64, abs=0.1)


def test_a_rule_that_fails_in_a_run_is_said(here, capsys):
    text = SIGN.replace(
        "for group",
        "if self.param_groups[0]['params'][0].numel() > 64: raise KeyError('x')\n        for group",
    )
    (here / "mine.py").write_text(text)
    assert bench("mine.py:Mine") == 1
    assert "runs failed" in capsys.readouterr().err
    assert any("KeyError: 'x'" in (row["error"] or "") for row in Ledger("out").rows())


FAULTS = {
    ("absent.py:Mine",): "cannot read absent.py",
    ("mine.py:Other",): "unknown name of mine.py",
    ("mine.py:Mine", "--format", "E4M4"): "unknown format",
    ("mine.py:Mine", "--format", "bfloat16"): "8 bits",
    ("mine.py:Mine", "--storage", "nowhere"): "unknown storage",
    ("mine.py:Mine", "--against", "nobody"): "unknown rule",
    ("mine.py:Mine", "--set", "betas=0.9"): "unknown setting",
    ("mine.py:Mine", "--set", "power=x"): "power must be a finite number",
    ("mine.py:Mine", "--set", "power=1"): "has no power",
    ("mine.py:Mine", "--set", "power=1e0"): "has no power",  # which YAML reads as text
    ("stiffness_adamw",): "reads a power, and none is usual",
    ("mine.py:Bends",): "reads a power, and none is usual",
    ("mine.py:Mine", "--no-foreign-code"): "refuses",
}


@pytest.mark.parametrize("request_", FAULTS, ids=" ".join)
def test_a_wrong_request_is_refused_before_a_run(here, capsys, request_):
    bends = SIGN.replace("Mine", "Bends").replace("lr=0.01", "lr=0.01, power=1.0")
    (here / "mine.py").write_text(SIGN + bends)
    assert bench(*request_) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "imported from" not in line]
    assert len(lines) == 1 and FAULTS[request_] in lines[0]
    assert not (here / "out").exists()


def test_an_edited_rule_has_another_folder():
    asked = {"format": "E4M3", "storage": "grid_stochastic", "against": "adamw", "protocol": "bench-1"}
    texts = [f"mine.py:Mine@{sha * 12}" for sha in "ab"]
    folders = [card_folder("out", asked | {key: text, "rule": rule}) for key, rule in (
        ("rule", "adamw"), ("storage", "lion"), ("against", "lion")) for text in texts
        for rule in [text if key == "rule" else rule]]
    assert len(set(folders)) == 6 and not any(set(":@") & set(f.name) for f in folders)
    assert card_folder("out", asked | {"rule": "lion"}).name == "lion_grid_stochastic_E4M3"


def test_the_protocol_keeps_tuning_and_confirmation_apart():
    for protocol in PROTOCOLS.values():
        assert not set(protocol.tune) & set(protocol.confirm)
        assert protocol.points % 2 == 1
    assert len(PROTOCOLS["bench-1"].confirm) >= 8
    assert module.TUNE_SEED > len(PROTOCOLS["bench-1"].confirm) + module.CONFIRM_SEED


CARDS = sorted((Path(__file__).resolve().parent.parent / "nbs/results/bench").glob("*.json"))


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_what_a_stored_card_says_follows_from_its_losses(path):
    found, protocol = json.loads(path.read_text(encoding="utf-8")), PROTOCOLS["bench-1"]
    assert found["protocol"] == protocol.name and found["checkpoints"] == list(protocol.confirm)
    for key, value in compared(found["losses"], protocol.margin).items():
        # a quantile of t is found by iteration, to less than 1e-9 of it; losses are a few nats
        assert found[key] == (pytest.approx(value, rel=1e-7, abs=1e-9) if key != "verdict" else value), key
    for name, text in found["sources"].items():
        assert name.endswith(f"@{hashlib.sha256(text.encode()).hexdigest()[:12]}")
