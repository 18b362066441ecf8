"""Update rules from files and packages: known wherever a rule's name may stand, recorded with
their text, and refused in one line."""
import importlib
import json
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import preloaded
from altgrad.basics import InputError
from altgrad.cli import main
from altgrad.geometry.catalogue import RULES, RuleSettings, build_rule
from altgrad.geometry.outside import recall, refuse_outside, sources_of, use_rule
from altgrad.geometry.storage import STORAGES, make_grid_tensor
from altgrad.evidence.instrument import Arm, identity, run_arm, run_id
from altgrad.evidence.study import arm_of
from altgrad.evidence.sweep import Ledger, replay
from altgrad.training.config import make_config
from tiny import HEAD, small_bench

LION = '''
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), format=None, storage=None, seed=0):
        self.told = format, storage, seed
        super().__init__(params, dict(lr=lr, betas=betas))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - 0.01 * group["lr"])
                p.sub_(group["lr"] * m.lerp(p.grad, 1 - fast).sign())
                m.lerp_(p.grad, 1 - slow)
'''
MATRIX = HEAD + """\
  - {format: E4M3, storage: [fp32, grid_stochastic], rule: "lion.py:Lion", lr: 0.01}
tune: {seeds: [1000], points: 3, most: 3}
confirm: {seeds: [0]}
task: {steps: 12, batch_size: 4, warmup: 2, chunks: 4, windows: 2, every: 4}
"""
SHORT = [
    "--set", "max_steps=2", "--set", "batch_size=2", "--set", "eval_windows=2", "--wandb", "off"
]


@pytest.fixture
def here(small_folder, tmp_path, monkeypatch):
    "A folder with a rule in it, and a catalogue that forgets afterwards."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALTGRAD_CACHE", str(small_folder / "cache"))
    (tmp_path / "lion.py").write_text(LION)
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    known = dict(RULES), dict(STORAGES)
    yield tmp_path
    for table, before in zip((RULES, STORAGES), known):
        table.clear()
        table.update(before)


def sweep(folder: Path, out: str, *more: str) -> int:
    place = ["--corpus", f"tiny=path:{folder}/text.txt", "--checkpoints", f"{folder}/checkpoints"]
    return main(["sweep", "matrix.yaml", "--out", out, *place, *more])


def lion_by_hand(w: torch.Tensor, m: torch.Tensor, g: torch.Tensor, lr: float) -> torch.Tensor:
    "Lion's formula in float64."
    return w * (1 - 0.01 * lr) - lr * torch.sign(0.9 * m + 0.1 * g)


@pytest.mark.parametrize("drawn", ("torch.randn_like(p)", "float(numpy.random.rand())", "random.random()"))
def test_a_rule_that_draws_random_numbers_can_be_repeated(small_folder, here, drawn):
    text = LION.replace("import torch", "import random, numpy, torch", 1).replace(".sign())", f".sign() * {drawn})")
    (here / "noisy.py").write_text(text)
    arm = Arm(checkpoint="tiny-0", corpus="tiny", storage="fp32", lr=0.01, rule="noisy.py:Lion")
    def run(seed):
        for module in (torch, random): getattr(module, "manual_seed" if module is torch else "seed")(seed)
        np.random.seed(seed)
        ended = run_arm(arm, small_bench(small_folder))
        here = torch.rand(()).item(), random.random(), np.random.rand()
        for module in (torch, random): getattr(module, "manual_seed" if module is torch else "seed")(seed)
        np.random.seed(seed)
        assert here == (torch.rand(()).item(), random.random(), np.random.rand())  # the caller's are left alone
        return ended["weights_sha"], ended["val_loss"]
    assert run(1) == run(2)


@pytest.mark.parametrize("storage", STORAGES)
def test_torch_adamw_by_its_place_is_the_adamw_of_the_catalogue_bit_for_bit(
        small_folder, here, storage):
    arm = Arm(checkpoint="tiny-0", corpus="tiny", storage=storage, lr=0.01, rule="adamw")
    theirs = run_arm(Arm(**{**vars(arm), "rule": "torch.optim:AdamW"}), small_bench(small_folder))
    ours = run_arm(arm, small_bench(small_folder))
    for key in ("val_loss", "weights_sha", "curve", "course"): assert theirs[key] == ours[key], key
    assert theirs["run"] != ours["run"]
    (text,) = theirs["sources"].values()
    assert "class AdamW(" in text  # of the module that defines it, not of the one that hands it on


def test_a_weight_on_a_grid_is_rounded_once_however_often_the_rule_writes(here):
    start = torch.linspace(-1, 1, 32)
    w = torch.nn.Parameter(make_grid_tensor(start, "E4M3", "grid_nearest"))
    name = use_rule("lion.py:Lion")
    optimizer = build_rule(
        name, [w], RuleSettings(fmt="E4M3", lr=0.03, storage="grid_nearest", seed=7)
    )
    assert optimizer.told == (w.fmt, "grid_nearest", 7)
    g, before = torch.linspace(1, -2, 32), w.dequantize()
    w.grad = g
    optimizer.step()
    exact = lion_by_hand(before.double(), torch.zeros(32).double(), g.double(), 0.03)
    # float32's own rounding of the two operations can only matter at a tie: there is none here
    assert torch.equal(
        w.dequantize(), make_grid_tensor(exact.float(), "E4M3", "grid_nearest").dequantize()
    )
    assert int(w.writes) == 1 and list(optimizer.state) == [w]
    assert optimizer.param_groups[0]["params"][0] is w


SUBCLASSES = """
from altgrad.geometry.optim import GridSGD, StiffnessAdamW

class Mine(GridSGD): pass

class Bent(StiffnessAdamW): pass
"""


def test_a_subclass_of_a_rule_is_told_what_the_rule_is(here, tmp_path):
    (tmp_path / "ours.py").write_text(SUBCLASSES)
    mine, bent = (use_rule(f"{tmp_path}/ours.py:{name}") for name in ("Mine", "Bent"))
    for name, like, key, values in ((mine, "grid_sgd", "rounding", ("none", "nearest", "stochastic")),
                                    (bent, "stiffness_adamw", "formula", ("smooth", "ulp"))):
        for value in values:
            settings = RuleSettings(fmt="E4M3", lr=0.03, **{key: value})
            made, usual = (build_rule(rule, [torch.nn.Parameter(torch.ones(4))], settings) for rule in (name, like))
            assert made.defaults == usual.defaults and made.defaults[key] == value
    config = {"format": "E4M3", "formula": "smooth", "rule_lr": 0.01}
    assert make_config({**config, "rule": bent}).formula == "smooth"
    for rule in (mine, use_rule("lion.py:Lion")):
        with pytest.raises(InputError, match="does not read formula"): make_config({**config, "rule": rule})


def trained(name: str, stop: bool) -> torch.Tensor:
    "A weight after four steps, with the state through a file after the second if asked for."
    start = torch.linspace(-1, 1, 32)
    w = torch.nn.Parameter(make_grid_tensor(start, "E5M2", "grid_stochastic"))
    settings = RuleSettings(fmt="E5M2", lr=0.03)
    optimizer = build_rule(name, [w], settings)
    for step in range(4):
        if stop and step == 2:
            state = optimizer.state_dict()
            optimizer = build_rule(name, [w], settings)
            optimizer.load_state_dict(state)
        w.grad = torch.linspace(1, -2, 32) * (step + 1)
        optimizer.step()
    return w.dequantize()


def test_a_state_goes_through_a_file_and_goes_on(here):
    name = use_rule("lion.py:Lion")
    assert torch.equal(trained(name, stop=False), trained(name, stop=True))


def test_a_run_keeps_the_file_and_goes_on_without_it(small_folder, here, capsys):
    data = ["--set", f"data=path:{small_folder / 'text.txt'}", "--out", "runs", *SHORT]
    assert main(["train", "e4m3_fp8:rule=lion.py:Lion,name=mine", *data]) == 0
    assert "lion.py:Lion@" in capsys.readouterr().err
    run = here / "runs/mine"
    assert (run / "lion.py").read_text() == LION
    (here / "lion.py").unlink()
    for name in [name for name in RULES if name.startswith("lion.py")]: del RULES[name]
    assert main(["train", str(run / "config.yaml"), "--out", "runs", "--set", "name=mine",
                 "--set", "max_steps=2", "--wandb", "off"]) == 0


def test_an_edited_rule_is_another_run(small_folder, here, capsys):
    assert sweep(small_folder, "ledger") == 0
    rows = Ledger("ledger").rows()
    (here / "lion.py").write_text(LION.replace("0.01", "0.02"))
    assert sweep(small_folder, "ledger", "--dry-run") == 0
    assert "stage tune: 6 runs" in capsys.readouterr().out
    assert all(row["error"] is None for row in rows)
    (name,) = {row["rule"] for row in rows}
    assert all(row["sources"] == {name: LION} for row in rows)


def test_a_row_is_read_without_its_code_and_replayed_with_it(small_folder, here, capsys):
    assert sweep(small_folder, "ledger", "--workers", "2") == 0
    (here / "lion.py").unlink()
    for name in [name for name in RULES if name.startswith("lion.py")]: del RULES[name]
    row = Ledger("ledger").rows()[-1]
    arm = arm_of(row)
    assert arm.rule == row["rule"] and arm.rule not in RULES
    with pytest.raises(InputError, match="lion"): run_arm(arm, small_bench(small_folder))
    agrees, said = replay(row, small_bench(small_folder))
    assert agrees and "bit for bit" in said
    assert f"{row['rule']} is imported from the row" in capsys.readouterr().err


def test_a_damaged_text_of_a_row_is_refused(small_folder, here):
    sources = sources_of([use_rule("lion.py:Lion")])
    RULES.popitem()
    with pytest.raises(InputError, match="has another text"):
        recall({name: text + "\n" for name, text in sources.items()})


def test_a_node_of_a_cluster_needs_no_file(small_folder, here):
    arm = Arm(checkpoint="tiny-0", corpus="tiny", rule="lion.py:Lion", lr=0.01)
    b = small_bench(small_folder)
    setup = b.setup
    job = [setup, run_id(identity(arm, b)), arm, None, sources_of([arm.rule])]
    (here / "lion.py").unlink()
    (here / "job").write_bytes(pickle.dumps(job))
    code = (
        "import pickle\nfrom altgrad.evidence import cluster\n"
        "row = cluster._work_on_node(*pickle.load(open('job', 'rb')))\n"
        "print(row['error'], row['val_loss'])"
    )
    done = preloaded.run_code(code)
    assert done.stdout.split() == ["None", str(run_arm(arm, b)["val_loss"])], done.stderr


def test_an_installed_package_names_its_rules(here, monkeypatch):
    (here / "site/lions").mkdir(parents=True)
    (here / "site/lions/__init__.py").write_text("")
    (here / "site/lions/code.py").write_text(LION)
    facts = here / "site/lions-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: lions\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[altgrad.rules]\nking = lions.code:Lion\n")
    monkeypatch.syspath_prepend(str(here / "site"))
    name = use_rule("king")
    assert name == use_rule("lions.code:Lion") and name.startswith("lions.code:Lion@")
    assert sources_of([name]) == {name: LION}


def test_a_module_that_was_edited_after_its_import_is_refused_until_it_is_loaded_anew(here, monkeypatch):
    "The recorded text would not be that of the class that runs."
    file = here / "site/edited.py"
    file.parent.mkdir()
    file.write_text(LION)
    monkeypatch.syspath_prepend(str(file.parent))
    before = use_rule("edited:Lion")
    file.write_text(LION + "# edited\n")
    with pytest.raises(InputError, match="edited was edited after its import"): use_rule("edited:Lion")
    importlib.reload(sys.modules["edited"])
    assert use_rule("edited:Lion") != before


COMMANDS = {
    "train": ["train", "e4m3_fp8:rule=lion.py:Lion", *SHORT],
    "compare": ["compare", "e4m3_fp8", "e4m3_fp8:rule=lion.py:Lion", *SHORT],
    "sweep": ["sweep", "matrix.yaml", "--out", "ledger"],
    "max-lr": ["max-lr", "E4M3", "--rule", "lion.py:Lion", "--out", "ledger"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_code_is_refused_where_asked(here, command, capsys):
    before = sorted(path.name for path in here.iterdir())
    assert main([*COMMANDS[command], "--no-foreign-code"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "--no-foreign-code refuses" in said[0]
    assert sorted(path.name for path in here.iterdir()) == before


def test_a_refused_package_is_not_even_imported(here, monkeypatch):
    (here / "site").mkdir()
    (here / "site/loud.py").write_text(LION + "\nopen('was_here', 'w').close()\n")
    monkeypatch.syspath_prepend(str(here / "site"))
    (here / "loud_too.py").write_text((here / "site/loud.py").read_text())
    with refuse_outside("the test"):
        for name in ("loud:Lion", "loud_too.py:Lion"):
            with pytest.raises(InputError, match="the test refuses"): use_rule(name)
    assert not (here / "was_here").exists()
    use_rule("loud:Lion")
    assert (here / "was_here").exists()


FAULTS = {
    "absent.py:Lion": "cannot read absent.py",
    "lion.py:Tiger": "unknown name of lion.py 'Tiger'; allowed: Lion",
    "lion.py": "unknown rule",
    "math:sqrt": "has no Python text",
    "json:JSONDecoder": "is no torch.optim.Optimizer",
    "lion.py:Lion@000000000000": "has another text",
    "torch.optim:LBFGS": "needs a closure",
    "torch.optim:SparseAdam": "a step of torch.optim:SparseAdam",
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_rule_that_cannot_be_used_is_named_before_anything_is_written(here, rule, capsys):
    before = sorted(path.name for path in here.iterdir())
    assert main(["train", f"e4m3_fp8:rule={rule}", *SHORT]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "imported from" not in line]
    assert FAULTS[rule] in said
    assert sorted(path.name for path in here.iterdir()) == before


STORAGE = """
from altgrad.geometry.keeping import Storage

class Mine(Storage):
    bits = 12
    def remember(self, w, q, fmt, key): return super().remember(w, q, fmt, key)

near, mine, wrong = Storage("nearest"), Mine("nearest", residual_bits=4), Mine("nearest")
own = Storage("stochastic", fmt="bfloat16")
"""


@pytest.mark.parametrize("mine, ours", [
    ("near", "grid_nearest"), ("mine", "grid_residual4"), ("own", "bf16_stochastic")
])
def test_a_storage_by_its_place_is_the_one_of_the_catalogue_bit_for_bit(
        small_folder, here, mine, ours):
    (here / "own.py").write_text(STORAGE)
    base = Arm(checkpoint="tiny-0", corpus="tiny", rule="adamw", lr=0.01, storage=ours)
    theirs = run_arm(Arm(**{**vars(base), "storage": f"own.py:{mine}"}), small_bench(small_folder))
    known = run_arm(base, small_bench(small_folder))
    for key in ("val_loss", "weights_sha", "curve", "course"): assert theirs[key] == known[key], key
    assert theirs["sources"] == {theirs["storage"]: STORAGE}


def test_a_run_with_a_storage_of_ones_own_goes_on_after_a_kill(small_folder, here):
    (here / "own.py").write_text(STORAGE)
    data = ["--set", f"data=path:{small_folder}/text.txt", "--set", "checkpoint_every=1", *SHORT]
    told = "e4m3_fp8:storage=own.py:mine,name="
    assert main(["train", f"{told}whole", *data]) == 0
    killed = (
        "import os\nfrom altgrad.training import trainer\nfrom altgrad.cli import main\n"
        "check = trainer.NonfiniteGuard.check\n"
        "def die(self, row):\n    check(self, row)\n    if row['step'] == 2: os._exit(9)\n"
        f"trainer.NonfiniteGuard.check = die\nmain({['train', f'{told}torn', *data]!r})"
    )
    assert preloaded.run_code(killed).returncode == 9
    assert main(["train", f"{told}torn", *data]) == 0
    ends = [json.loads((here / f"runs/{name}/run.json").read_text()) for name in ("whole", "torn")]
    assert ends[0]["results"]["val_loss"] == ends[1]["results"]["val_loss"]
    assert (here / "runs/torn/own.py").read_text() == STORAGE


@pytest.mark.parametrize("storage, said", {
    "own.py:wrong": "says 12 bits and keeps 8",
    "own.py:Mine": "is no instance of",
    "own.py:absent": "unknown name of own.py",
}.items())
def test_a_storage_that_cannot_be_used_is_named(here, storage, said):
    (here / "own.py").write_text(STORAGE)
    with pytest.raises(InputError, match=said):
        Arm(checkpoint="tiny-0", corpus="tiny", storage=storage, lr=0.01)


def test_half_a_spacing_holds_no_more_than_rounding_to_nearest_leaves(here):
    (here / "own.py").write_text(STORAGE + 'drifts = Storage("stochastic", residual_bits=4)\n')
    with pytest.raises(InputError, match="goes with rounding to nearest"):
        Arm(checkpoint="tiny-0", corpus="tiny", storage="own.py:drifts", lr=0.01)


def test_what_is_recorded_is_plain(small_folder, here):
    arm = Arm(checkpoint="tiny-0", corpus="tiny", rule="lion.py:Lion", lr=0.01)
    row = run_arm(arm, small_bench(small_folder))
    assert json.loads(json.dumps(row["sources"])) == {row["rule"]: LION}


def test_two_files_of_one_name_are_refused_before_a_run(here):
    (here / "other").mkdir()
    (here / "other/lion.py").write_text(STORAGE)
    with pytest.raises(InputError, match="two files are named lion.py"):
        make_config({"format": "E4M3", "rule": "lion.py:Lion", "storage": "other/lion.py:near"})
    (here / "lion.py").write_text(LION + STORAGE)  # both in one file
    assert make_config({"format": "E4M3", "rule": "lion.py:Lion", "storage": "lion.py:near"}).rule in RULES
