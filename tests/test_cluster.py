"""A sweep on a real Ray cluster of two nodes on this machine, one of which is killed in the
middle."""
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import preloaded
from altgrad.basics import InputError
from altgrad.evidence.cluster import RayWorkers, _absolute
from altgrad.evidence.instrument import Task
from altgrad.evidence.replicas import run_arms
from altgrad.evidence.sweep import Ledger, Sweep, read_matrix
from kernels import with_kernels
from tiny import HEAD, TEXT, small_bench
from wait import until

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray")
RAY, ALTGRAD = (Path(sys.executable).parent / name for name in ("ray", "altgrad"))
MATRIX = HEAD + """\
  - {format: E4M3, storage: [fp32, grid_stochastic], power: [0, 1], lr: 0.01}
tune: {seeds: [1000], points: 5, most: 5}
confirm: {seeds: [0, 1]}
task: {steps: 60, batch_size: 4, warmup: 2, chunks: 4, windows: 2, every: 20}
"""
NOISE = ("seconds", "finished")


@pytest.fixture(scope="module", autouse=True)
def not_nice():
    "Ray gives way to all other processes; beside other tests its runs would take ten times as long."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="module")
def here(small_copy):
    "A folder with two texts, a cache and a checkpoint."
    (small_copy / "other.txt").write_text(TEXT.replace("times", "plus"))
    return small_copy


def rows_of(folder: Path) -> dict[str, dict]:
    rows = Ledger(folder).rows()
    assert len({row["run"] for row in rows}) == len(rows), "a run was made twice"
    return {row["run"]: {k: v for k, v in row.items() if k not in NOISE} for row in rows}


def start(env: dict[str, str], *how: str) -> subprocess.Popen:
    "One node with one CPU, by Ray's own command, when it says that it runs."
    command = [RAY, "start", *how, "--num-cpus", "1", "--block", "--disable-usage-stats"]
    node = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    for line in node.stdout:
        said.append(line)
        if "runtime started" in line: return node
    raise AssertionError("".join(said))


def kill(node: subprocess.Popen) -> None:
    "Ends a node and all its processes, without a word to the others."
    for process in [*psutil.Process(node.pid).children(recursive=True), node]:
        with suppress(psutil.NoSuchProcess): process.kill()
    node.wait()


def is_busy(node: subprocess.Popen) -> bool:
    "Whether a process of the node makes a run."
    for process in psutil.Process(node.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "_work_on_node" in " ".join(process.cmdline()): return True
    return False


@pytest.fixture
def cluster(tmp_path):
    """A head and a second node, started as the page says; their address,
    the environment that has the token, and the nodes."""
    cache = with_kernels(tmp_path / "cache")
    env = os.environ | {"HOME": str(tmp_path), "ALTGRAD_CACHE": cache, "RAY_AUTH_MODE": "token"}
    subprocess.run([RAY, "get-auth-token", "--generate"], env=env, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        start(
            env, "--head", "--node-ip-address", "127.0.0.1", "--port", address.partition(":")[2],
            "--include-dashboard", "false",
        )
    ]
    try:
        nodes.append(
            start(
                env, "--address", address, "--node-ip-address", "127.0.0.1",
                "--dashboard-agent-listen-port", "0",
            )
        )
        yield address, env, nodes
    finally:
        for node in nodes[::-1]:
            if node.poll() is None: kill(node)


def test_a_killed_node_changes_no_row(here, cluster):
    whole = Sweep(read_matrix(MATRIX), here / "local", small_bench(here, Task()))
    assert whole.run(1, progress=False) == 0
    address, env, nodes = cluster
    (here / "matrix.yaml").write_text(MATRIX)
    command = [
        ALTGRAD, "sweep", here / "matrix.yaml", "--out", here / "ray", "--corpus",
        f"tiny=path:{here / 'text.txt'}",
    ]
    command += [
        "--checkpoints", here / "checkpoints", "--executor", "ray", "--ray-address", address
    ]
    env = env | {"ALTGRAD_CACHE": str(here / "cache")}
    sweep = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        # so that it has a run to lose
        until(
            lambda: len(Ledger(here / "ray").rows()) >= 4 and is_busy(nodes[1]),
            lambda: sweep.poll() is None,
            seconds=120,
        )
        kill(nodes[1])
        said = sweep.communicate(timeout=240)[0]
    finally: sweep.kill()
    assert sweep.returncode == 0, said
    assert rows_of(here / "ray") == rows_of(here / "local")
    assert len(rows_of(here / "ray")) == 4 * 5 + 4 * 2


@pytest.fixture(scope="module")
def own():
    "A cluster of this process's own: two CPUs, and a GPU that Ray only counts."
    ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_node_with_another_text_is_refused(here, own):
    sweep = Sweep(read_matrix(MATRIX), here / "other", small_bench(here, Task()))
    workers = RayWorkers(sweep)
    # what a machine would find that has another file there
    workers.setup = (workers.setup[0], {"tiny": f"path:{here / 'other.txt'}"}, *workers.setup[2:])
    with workers:
        job = sweep.plan().jobs[0]
        assert "another text" in workers.submit(None, job.arm).result()["error"]


def test_runs_share_a_gpu(here, own):
    sweep = Sweep(read_matrix(MATRIX), here / "shared", small_bench(here, Task()))
    jobs = [job.arm for job in sweep.plan().jobs[:4]]
    with RayWorkers(sweep, cpus=0.5, gpus=0.5) as workers:
        assert workers.device == "cuda" and workers.count == 2  # four would have a CPU
        workers.device = "cpu"  # Ray's GPU is a number
        rows = [future.result() for future in [workers.submit(None, arm) for arm in jobs]]
    for row, want in zip(rows, run_arms(jobs, sweep.bench, size=1)):
        assert row["engine"] == "batched"
        assert row["weights_sha"] == want["weights_sha"]
        assert row["raw_loss"] == want["raw_loss"]
    with pytest.raises(InputError, match="share of one GPU"): RayWorkers(sweep, gpus=2)


def test_a_text_has_one_place_for_all_nodes(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    for said, place in {
        "path:~/laws.txt": "path:/home/me/laws.txt", "path:a@b.txt": f"path:{tmp_path}/a@b.txt",
        "lex_glue/eurlex@data": f"lex_glue/eurlex@{tmp_path}/data", "lex_glue/eurlex": "lex_glue/eurlex",
        "lex_glue/eurlex@~/d": "lex_glue/eurlex@/home/me/d", "stdlib": "stdlib",
    }.items(): assert _absolute(said) == place


def test_no_cluster_is_one_line(here):
    (here / "matrix.yaml").write_text(MATRIX)
    command = [
        "sweep", here / "matrix.yaml", "--out", here / "none", "--corpus",
        f"tiny=path:{here / 'text.txt'}", "--checkpoints", here / "checkpoints",
    ]
    done = preloaded.run(*command, "--executor", "ray", "--ray-address", "127.0.0.1:1")
    assert (
        done.returncode == 2 and "no Ray cluster at 127.0.0.1:1" in done.stderr.splitlines()[-1]
    ), done.stderr
    done = preloaded.run(*command, "--ray-address", "127.0.0.1:1", timeout=60)
    assert done.returncode == 2 and "--executor ray" in done.stderr
