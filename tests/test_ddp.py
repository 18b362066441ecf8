"""One run in two processes, started by torchrun, against the same run in one: same
batches, same scales, same codes, same losses.

Batches and chance are functions of seed, step and place, so the two runs differ only in the order
in which floats are added. In the first step that moves a
number by 1e-7 of itself. Later a value falls on the other side of a rounding boundary, by a whole
code, and the runs part slowly: by 4e-5 of the loss after
five steps where it was measured. What must be equal exactly is compared on parts of tensors that
are the same to the bit, in the last test.
"""
import json
import os
import subprocess
import sys

import pytest
import torch

import preloaded
from altgrad.watching.series import read_histograms, read_series
from altgrad.training.tracking import RunFolder
from old import OLD_TORCH

# relative: sums in another order; after a value was rounded the other way, by 2^-4 of itself, of
# which a loss sees a part
FIRST = 32 * 2.0**-24
LATER = 2e-3
CONFIG = dict(
    max_steps=6, batch_size=4, block_size=32, warmup_steps=2, eval_every=3, eval_windows=8,
    checkpoint_every=2, compute_dtype="float32", device="cpu", activation="E4M3 delayed",
    gradient="E5M2 stochastic delayed", weight_gradient="E5M2", residual_clamp=4.0, monitor_every=1,
    shadow_every=3,
)
LIFE = """
import atexit, os, signal, sys
import altgrad.model.parallel as P
import altgrad.training.trainer as T
from altgrad.cli import main
join, update, group = P.join, T.Learner.update, set()
threads = lambda: set(os.listdir("/proc/self/task"))
def joined():
    before = threads()
    join()
    group.update(threads() - before)
def wounded(learner, step, *rest):
    if os.environ.get("DIES") == f"{os.environ.get('RANK')} at {step}": os.kill(os.getpid(), signal.SIGKILL)
    return update(learner, step, *rest)
T.Learner.update = wounded
if os.path.isdir("/proc/self/task"):
    P.join = joined
    def left():
        now = len(group & threads())
        print("threads of the group:", bool(group), "at first,", now, "at the end", flush=True)
    atexit.register(left)
sys.exit(main())
"""


@pytest.fixture(scope="module")
def place(small_copy):
    "A folder with a text and the program of a process, and the environment."
    words = torch.randint(0, 50, (30_000,), generator=torch.Generator().manual_seed(0)).tolist()
    text = " ".join("abcdefghij"[w % 10] * (1 + w // 10) for w in words)
    (small_copy / "text.txt").write_text(text)
    (small_copy / "life.py").write_text(LIFE)
    cache = f"{small_copy}/cache"
    return small_copy, {**os.environ, "ALTGRAD_CACHE": cache, "OMP_NUM_THREADS": "1"}


def start(place, processes: int, *args: str, **env):
    "A program in so many processes, forked in a moment: its exit code, and what it said."
    folder, base = place
    how = {"env": {**base, **env}, "cwd": folder}
    return preloaded.torchrun(processes, *args, **how) if processes > 1 else preloaded.run_python(*args, **how)


def start_anew(place, processes: int, *args: str, **env):
    "The same from a shell, so that interpreters begin and end."
    folder, base = place
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(processes), *args],
        cwd=folder, env={**base, **env}, capture_output=True, text=True, timeout=300,
    )


def train(place, name: str, processes: int, more=(), start=start, **env):
    "`altgrad train`, and the folder of the run."
    settings = [
        arg
        for key, value in {**CONFIG, "data": "path:text.txt", "name": name, **dict(more)}.items()
        for arg in ("--set", f"{key}={value}")
    ]
    return start(
        place, processes, "life.py", "train", "e4m3_fp8", *settings, "--out", "runs", "--wandb",
        "off", **env,
    ), RunFolder(place[0] / "runs" / name)


@pytest.fixture(scope="module")
def one(place): return train(place, "one", 1)


@pytest.fixture(scope="module")
def two(place): return train(place, "two", 2, start=start_anew)


def close(a, b) -> None:
    "Two columns of numbers, one a step."
    for steps, tolerance in ((slice(0, 1), FIRST), (slice(1, None), LATER)):
        torch.testing.assert_close(
            torch.tensor(a[steps], dtype=torch.float64),
            torch.tensor(b[steps], dtype=torch.float64), rtol=tolerance, atol=0,
        )


def points(run: RunFolder) -> dict:
    "What the points remember at the end."
    return torch.load(
        run.checkpoints.folder / run.checkpoints.entries()[-1]["file"], weights_only=True
    )["points"]


def test_losses_and_gradients_are_those_of_one_process(one, two):
    assert one[0].returncode == two[0].returncode == 0, two[0].stderr
    a, b = one[1].metrics(), two[1].metrics()
    close([r["loss"] for r in a], [r["loss"] for r in b])
    assert b[0]["grad_norm"] == pytest.approx(a[0]["grad_norm"], rel=FIRST)
    assert [r["val_loss"] for r in b if "val_loss" in r] == pytest.approx(
        [r["val_loss"] for r in a if "val_loss" in r], rel=LATER
    )
    assert one[1].record()["processes"] == 1 and two[1].record()["processes"] == 2


@pytest.mark.slow
def test_labels_are_scored_over_both_processes(place):
    rows = [
        {
            "text": f"{i} " + "abc"[i % 3] * 20,
            "labels": ["abc"[i % 3]],
            "split": "val" if i < 8 else "train",
        }
        for i in range(60)
    ]
    (place[0] / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = {
        "task": "multilabel", "data": "path:rows.jsonl", "activation": "null", "gradient": "null"
    }
    a, b = (
        [
            {key: value for key, value in row.items() if key.startswith("val_")}
            for row in run.metrics()
            if "val_loss" in row
        ]
        for _, run in (train(place, f"labels-{n}", n, more) for n in (1, 2))
    )
    assert len(a) == len(b) == 2
    assert set(a[0]) == {
        f"val_{key}" for key in ("loss", "perplexity", "micro_f1", "macro_f1", "roc_auc", "pr_auc")
    }
    for one, two in zip(a, b): assert two == pytest.approx(one, rel=LATER)


def test_amaxes_are_those_of_one_process(one, two):
    a, b = points(one[1]), points(two[1])
    assert a.keys() == b.keys()
    assert {k.rpartition("/")[2] for k in a} == {
        "weight", "activation", "gradient", "weight_gradient"
    }
    for key in a:
        assert a[key]["calls"] == b[key]["calls"], key
        if "memory" in a[key]:
            close(*(state[key]["memory"][-CONFIG["max_steps"] :].tolist()[:1] for state in (a, b)))


def test_codes_are_counted_over_both_processes(one, two):
    a, b = (read_histograms(run.path / "series") for _, run in (one, two))
    assert a.keys() == b.keys() and any("/gradient/" in path for path in a)
    for path in a:
        assert (a[path][1].sum(1) == b[path][1].sum(1)).all(), path
        # values at the edge of two codes
        assert abs(a[path][1][0] - b[path][1][0]).sum() <= 1e-3 * a[path][1][0].sum(), path
    a, b = (read_series(run.path / "series") for _, run in (one, two))
    assert a.keys() == b.keys()
    for path in a:
        if path.endswith(("/amax", "/sqnr_db", "/l2", "/entropy", "/cosine")):
            # as above: some values lie at the edge of two codes
            assert b[path][1][0] == pytest.approx(a[path][1][0], rel=1e-4, abs=1e-6), path


def test_one_process_writes_and_speaks(two):
    done, run = two
    text = run.metrics_file.read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(
        range(1, CONFIG["max_steps"] + 1)
    )
    assert done.stdout.count("finished: validation loss") == 1
    assert done.stderr.count("step 6/6") == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not list threads there")
def test_no_thread_of_the_group_is_left_when_the_interpreter_ends(two):
    # such a thread aborted 1 run of some hundred, when it gave back the last tensor too late
    assert (
        two[0].stdout.splitlines().count("threads of the group: True at first, 0 at the end") == 2
    ), two[0].stdout


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_one_alone_goes_on(place, one):
    done, run = train(place, "lost", 2, DIES="1 at 4")
    reason = run.record()["exit_reason"]
    assert done.returncode != 0 and run.record()["steps"] == 3
    # torchrun's signal, or the closed connection: whichever is first
    assert reason == "interrupted" or "has lost another one" in reason
    assert "the same command goes on from the last checkpoint" in done.stderr
    done, run = train(place, "lost", 1)
    assert done.returncode == 0 and run.record()["processes"] == 1, done.stderr
    # step 3's checkpoint, as the best, was written whole before the end came, or not
    assert run.record()["continued_from_step"] in (2, 3)
    close([r["loss"] for r in run.metrics()], [r["loss"] for r in one[1].metrics()])


PARTS = """
import atexit, os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from altgrad.basics import InputError
from altgrad.model.parallel import ProcessLost, first, join, part, rank, total, world
from altgrad.model.points import POINTS
from altgrad.model.products import QuantizedLinear
from altgrad.watching.points import PointCounts
from altgrad.watching.sums import Parcel
from altgrad.training.config import make_config
from altgrad.training.trainer import Trainer

threads = lambda: set(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else set()
before = threads()
atexit.register(lambda: print("left:", len(group & threads()), flush=True))
join()
group = threads() - before
g = torch.Generator().manual_seed(1)
xs = [torch.randn(6, 5, 32, generator=g) * 4.0**i for i in (0, 2, 1, -1)]
grads = [torch.randn(6, 5, 16, generator=g) for _ in xs]

def walk(cut, spec):
    "Rounded inputs and gradients of a stream, the scales, and the counts."
    layer = QuantizedLinear.adopt(torch.nn.Linear(32, 16, bias=False), "E4M3", 5, 1, activation=spec, gradient=spec)
    for kind, q in layer.points.items(): q.parted = cut and q.parted
    counts, parcel, found = PointCounts(torch.nn.Sequential(layer)), Parcel(), []
    counts.start(True)
    for x, dy in zip(xs, grads):
        if cut: x, dy = part(x), part(dy)
        rounded = layer.points["activation"](x.clone().requires_grad_()).detach(), layer.points["gradient"](dy)
        found += [torch.cat([whole.clone() for whole in gathered(t)]) if cut else t for t in rounded]
    counts.stop(parcel)
    memory = [q.scaling.memory.state for q in layer.points.values() if q.scaling]
    return found, memory, parcel.unpack()

def gathered(t):
    parts = [torch.empty_like(t) for _ in range(world())]
    dist.all_gather(parts, t.contiguous())
    return parts

for spec in ("E4M3", "E5M2 delayed", "E4M3 stochastic", "E5M2 stochastic delayed", "E4M3 channel", "E4M3 16"):
    (a, memory, counts), (b, whole_memory, whole_counts) = walk(True, spec), walk(False, spec)
    assert all(torch.equal(x, y) for x, y in zip(a, b)), spec
    assert all(torch.equal(x, y) for x, y in zip(memory, whole_memory)) and len(memory) == 2 * ("delayed" in spec), spec
    for key, whole in whole_counts.items():
        here = counts[key]
        if key[0] == "histogram": assert (here == whole).all(), (spec, key)
        if key[0] != "sums": continue
        assert abs(here - whole).max() <= 16 * 2.0**-24 * abs(whole).max(), (spec, key)
        counted = [0, 1, 2, 8, 9]
        assert (here[counted] == whole[counted]).all(), (spec, key)

for wrong, words in (
    ({"batch_size": 3}, "batch_size must be a multiple of the number of processes, 2, not 3"),
    ({"eval_windows": 7}, "eval_windows must be"),
    ({"device": "cuda:0"}, "2 processes" if torch.cuda.is_available() else "no CUDA"),
):
    settings = {"data": "path:text.txt", "block_size": 32, "device": "cpu", **wrong}
    try: Trainer(make_config(settings), "wrong")
    except InputError as e: assert words in str(e), e
    else: raise AssertionError(wrong)
assert not os.path.exists("wrong")

if os.environ["LOSES"] == "no": sys.exit()
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
if rank() == 1: os.kill(os.getpid(), signal.SIGSTOP), sys.exit(0)
began = time.monotonic()
try: total([torch.ones(3)])
except ProcessLost as e: print("told:", e); lost = e  # an error that is kept keeps no thread
assert time.monotonic() - began < 60
os.kill(pids[1], signal.SIGCONT)
"""


def test_parts_are_rounded_and_counted_as_the_whole_and_nobody_waits_for_ever(place):
    (place[0] / "parts.py").write_text(PARTS)
    done = start_anew(place, 2, "parts.py", LOSES="no" if OLD_TORCH else "yes")
    assert done.returncode == 0 and done.stdout.count("left: 0") == 2, (
        done.stdout + done.stderr[-3000:]
    )
    if OLD_TORCH:
        pytest.skip(
            "the parts are right; an old torch's gloo keeps the timeout that it began with, "
            "minutes here, so that no process was lost"
        )
    assert "told: process 0 of 2 has lost another one" in done.stdout, done.stderr[-3000:]


OWN_GROUP = """
import torch, torch.distributed as dist
from torch import nn
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.surgery import clamp_outliers, quantize_model, quantizers
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import compute_scale

def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    rule = LayerPrecisionRule("*", weight="E4M3", activation="E2M5", gradient="E2M5")
    quantize_model(model, config=PrecisionConfig(default=rule))
    clamp_outliers(model, "2", 2.0)
    return model

def trained(model, x):
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

g = torch.Generator().manual_seed(0)
batches = [torch.randn(8, 16, generator=g) * 16.0**i for i in range(2)]
checked = torch.randn(8, 16, generator=g) / 1000
validated, whole = network().eval()(checked), trained(network(), torch.cat(batches))
dist.init_process_group("gloo")
rank, model = dist.get_rank(), network()
parallel = nn.parallel.DistributedDataParallel(model)
if rank == 0:
    model.eval()
    assert torch.equal(model(checked), validated)
    model.train()
found = trained(parallel, batches[rank])
assert (found - whole).norm() < 1e-4 * whole.norm()  # 1e-3 where each has its own scale
for q in quantizers(model).values(): q.parted = False  # as if both had models of their own
x = batches[rank]
own = model[0].points["activation"](x)
assert torch.equal(own, fake_quantize(x, "E2M5", compute_scale(x.abs().max(), "E2M5")))
dist.destroy_process_group()
print("done")
"""


def test_in_a_group_of_ones_own_one_process_may_validate_alone(place):
    (place[0] / "own.py").write_text(OWN_GROUP)
    done = start(place, 2, "own.py")
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stdout + done.stderr[-3000:]
