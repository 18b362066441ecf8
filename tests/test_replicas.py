"""Stacked runs against single runs: the same numbers in float64, whoever the neighbours are; and no
silent way back to eager."""
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import preloaded
from altgrad.evidence import instrument
from altgrad.evidence import replicas
from altgrad.basics import InputError
from altgrad.numbers.formats import EIGHT_BIT
from altgrad.evidence.instrument import Arm, Bench, Task, run_arm
from altgrad.geometry import storage as storages
from altgrad.evidence.replicas import Batches, run_arms, stacks
from altgrad.evidence.sweep import Ledger, Sweep, read_matrix, replay
from tiny import HEAD, small_bench

STORAGES = [name for name, kind in storages.STORAGES.items() if stacks(kind)]
RULES = [
    dict(rule="adamw", lr=0.01), dict(power=0.5, lr=0.01),
    dict(power=-1.0, lr=0.01, floor_octaves=3.0), dict(power=1.0, placement="gradient", lr=0.01),
    dict(rule="riemannian_adamw", lr=0.3), dict(rule="madam", lr=0.05),
    dict(rule="grid_sgd", lr=0.1),
]
TASK = Task(steps=20, batch_size=2, warmup=2, chunks=2, windows=2, every=10)
MATRIX = HEAD + """\
  - {format: [E4M3, E7M0], storage: [fp32, grid_stochastic], power: [0, 1], lr: 0.01}
  - {format: E4M3, storage: [grid_residual4, grid_stochastic], rule: madam, lr: 0.01}
tune: {seeds: [1000], points: 3, most: 3}
confirm: {seeds: [0]}
task: {steps: 6, batch_size: 2, warmup: 2, chunks: 2, windows: 2, every: 3}
"""


class Exact(Bench):
    "A bench whose models compute in float64."
    def model(self, checkpoint): return super().model(checkpoint).double()


@pytest.fixture(scope="module")
def here(small_copy): return small_copy


def bench(folder: Path, kind: type = Bench) -> Bench: return small_bench(folder, TASK, kind=kind)


def arm(**values) -> Arm:
    return Arm(**{"checkpoint": "tiny-0", "corpus": "tiny", "lr": 0.01, **values})


@pytest.fixture
def outcomes(monkeypatch):
    "Rows that also hold what they were made from."
    make = instrument.make_row
    for module in (instrument, replicas):
        monkeypatch.setattr(
            module, "make_row", lambda a, b, run: {**make(a, b, run), "outcome": run}
        )


# float64: some 20 updates from numbers that differ by 1e-16 leave no more, unless a code flips, and
# then it is 1e-3
EXACT = 1e-9
SINGLE = 1e-5  # nats: float32, by another order of additions


def same(a: dict, b: dict) -> bool: return {**a, "seconds": 0} == {**b, "seconds": 0}


@pytest.mark.parametrize("every", (5, pytest.param(1, marks=pytest.mark.slow)))
def test_every_format_storage_and_rule_is_the_single_run_in_float64(here, outcomes, every):
    cells = enumerate(list(itertools.product(EIGHT_BIT, STORAGES, RULES))[::every])
    arms = [
        arm(
            format=f, storage=s, seed=i, checkpoint=f"tiny-{i % 2}",
            split=("tune", "confirm")[i // 2 % 2], **rule,
        )
        for i, (f, s, rule) in cells
    ]
    exact = bench(here, Exact)
    for got, a in zip(run_arms(arms, exact), arms):
        want = run_arm(a, exact)
        x, y = got.pop("outcome"), want.pop("outcome")
        assert y.weights[0].dtype == torch.float64 and len(y.losses) == TASK.steps
        for p, q in zip(x.weights, y.weights, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=EXACT, msg=str(a))
        for name in ("before", "losses", "after"):
            assert getattr(x, name) == pytest.approx(getattr(y, name), abs=EXACT), (a, name)
        assert x.end == pytest.approx(y.end, rel=1e3 * EXACT, abs=EXACT), a
        for one, two in zip(x.course, y.course, strict=True):
            assert one == pytest.approx(two, rel=1e3 * EXACT, abs=EXACT), a
        assert got.pop("engine") == "batched" and list(got) == list(want)


def test_neighbours_change_nothing(here):
    arms = [
        arm(format=f, storage=s, seed=i, lr=0.01 * (i + 1))
        for i, (f, s) in enumerate(itertools.product(("E0M7", "E4M3", "E7M0"), STORAGES))
    ]
    together, exact = run_arms(arms, bench(here)), bench(here)
    for i in (0, 5, 11):
        alone = run_arms([arms[i]], exact)[0]
        assert alone["val_loss"] == pytest.approx(together[i]["val_loss"], abs=SINGLE)
    assert all(map(same, run_arms(arms[::-1], exact)[::-1], together))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_replica_that_diverges_harms_no_other(here, storage):
    wild = arm(storage="fp32", rule="madam", lr=1e30)
    calm = arm(storage=storage, rule="madam", lr=0.05, seed=3)
    exact = bench(here, Exact)
    bad, good = run_arms([wild, calm], exact)
    single = run_arm(wild, exact)
    assert bad["diverged"]
    assert bad["steps"] == single["steps"]
    assert bad["val_loss"] == bad["frozen_loss"] == single["val_loss"]
    assert good["val_loss"] == pytest.approx(run_arm(calm, exact)["val_loss"], abs=EXACT)
    assert not good["steps"] < TASK.steps


def test_what_cannot_be_stacked_is_refused_in_one_line(here):
    with pytest.raises(InputError, match="no storage 'grid_residual4'; allowed: fp32, master"):
        run_arms([arm(storage="grid_residual4")], bench(here))
    with pytest.raises(InputError, match="float8_e4m3fnuz"):
        run_arms([arm(format="float8_e4m3fnuz")], bench(here))


@pytest.mark.slow
def test_a_sweep_in_batches_goes_on_and_says_so(here):
    sweep = Sweep(read_matrix(MATRIX), here / "ledger", bench(here))
    class Killed(Exception): pass
    def stop(row):
        if len(sweep.rows) == 9: raise Killed
    sweep.rows = Stopping(sweep.rows, stop)
    setup = sweep.bench.setup
    with pytest.raises(Killed): sweep.run(progress=False, pool=Batches(setup, 4))
    sweep = Sweep(read_matrix(MATRIX), here / "ledger", bench(here))
    assert len(sweep.rows) == 9 and sweep.run(progress=False, pool=Batches(setup, 4)) == 0
    rows = Ledger(here / "ledger").rows()
    assert len({row["run"] for row in rows}) == len(rows) == 10 * 3 + 10
    assert {row["storage"] for row in rows if "engine" not in row} == {"grid_residual4"}
    assert {row.get("engine") for row in rows} == {"batched", None}
    row = next(row for row in rows if row.get("engine") and not row["diverged"])
    agrees, text = replay(row, bench(here))
    assert agrees and "another engine" in text


class Stopping(dict):
    "A dict that calls a function after each new value."
    def __init__(self, rows, then): super().__init__(rows), setattr(self, "then", then)
    def __setitem__(self, key, value): super().__setitem__(key, value), self.then(value)


def test_the_command_line_refuses_replicas_elsewhere(here):
    (here / "matrix.yaml").write_text(MATRIX)
    done = preloaded.run("sweep", here / "matrix.yaml", "--out", here / "none", "--replicas", "4")
    assert done.returncode == 2
    assert "--replicas" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def few_graphs():
    "torch's own limit of graphs, back in its place afterwards, whatever a test makes of it."
    with torch._dynamo.config.patch(recompile_limit=8): yield


@pytest.mark.slow
def test_compiling_never_falls_back_to_eager_silently(here, monkeypatch, few_graphs):
    """Dynamo without a code generator: what it captures,
    and what it would leave out, does not depend on that."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    arms = [
        arm(format=f, storage="grid_stochastic", seed=i, lr=0.01)
        for i, f in enumerate(("E4M3", "E7M0"))
    ]
    few = bench(here)
    few.task = replace(TASK, steps=3)
    compiled = run_arms(arms, few, compiled=True)
    assert [row["val_loss"] for row in compiled] == pytest.approx(
        [row["val_loss"] for row in run_arms(arms, few)], abs=SINGLE
    )
    # the losses; for each shape of a tensor the move, and the storing
    assert counters["stats"]["unique_graphs"] == 1 + 3 + 3
    assert not counters["graph_break"] and not counters["unimplemented"]
    monkeypatch.setattr(replicas, "RECOMPILES", 1)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        run_arms(arms, few, compiled=True)
