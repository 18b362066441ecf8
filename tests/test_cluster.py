"""A sweep on a real Ray cluster of two nodes on this machine, one of which is killed in the middle."""
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from altgrad.cluster import RayWorkers
from altgrad.instrument import Bench, Task, build_checkpoint
from altgrad.sweep import Ledger, Sweep, read_matrix
from tiny import HEAD

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402 (after the check that ray is there)

MATRIX = HEAD + """\
  - {format: E4M3, storage: [fp32, grid_stochastic], power: [0, 1], lr: 0.01}
tune: {seeds: [1000], points: 5, most: 5}
confirm: {seeds: [0, 1]}
task: {steps: 60, batch_size: 4, warmup: 2, chunks: 4, windows: 2, every: 20}
"""
NOISE = ("seconds", "finished")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    "A folder with two texts, a cache and a checkpoint."
    folder = tmp_path_factory.mktemp("cluster")
    for name, factor in (("text.txt", 1), ("other.txt", 2)):
        (folder / name).write_text("".join(f"{i} times {i} is {factor * i * i}.\n" for i in range(3000)))
    build_checkpoint(bench(folder), "tiny-0")
    return folder


def bench(folder: Path, text: str = "text.txt") -> Bench:
    return Bench(folder / "checkpoints", {"tiny": f"path:{folder / text}"}, Task(), folder / "cache")


def rows_of(folder: Path) -> dict[str, dict]:
    rows = Ledger(folder).rows()
    assert len({row["run"] for row in rows}) == len(rows), "a run was made twice"
    return {row["run"]: {k: v for k, v in row.items() if k not in NOISE} for row in rows}


@pytest.fixture
def cluster():
    "A head and a second node, with one CPU each; both are processes of this machine."
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_a_killed_node_changes_no_row(here, cluster):
    whole = Sweep(read_matrix(MATRIX), here / "local", bench(here))
    assert whole.run(1, progress=False) == 0
    head, second = cluster
    sweep, killed = Sweep(read_matrix(MATRIX), here / "ray", bench(here)), threading.Event()

    def kill():
        while len(sweep.ledger.rows()) < 4: time.sleep(0.05)
        head.remove_node(second, allow_graceful=False)
        killed.set()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    ray.init(address=head.address, log_to_driver=False)
    with RayWorkers(sweep) as workers: assert workers.count == 2
    assert sweep.run(pool=RayWorkers(sweep), progress=False) == 0
    until = time.monotonic() + 60  # Ray notices a silent node by its heart
    while (alive := sorted(node["Alive"] for node in ray.nodes())) != [False, True] and time.monotonic() < until: time.sleep(0.5)
    assert killed.is_set() and alive == [False, True]
    assert rows_of(here / "ray") == rows_of(here / "local") and len(rows_of(here / "ray")) == 4 * 5 + 4 * 2


def test_a_node_with_another_text_is_refused(here, cluster):
    head, _ = cluster
    sweep = Sweep(read_matrix(MATRIX), here / "other", bench(here))
    workers = RayWorkers(sweep, head.address)
    workers.setup = (workers.setup[0], {"tiny": f"path:{here / 'other.txt'}"}, *workers.setup[2:])  # what a machine would find that has another file there
    with workers:
        job = sweep.plan().jobs[0]
        assert "another text" in workers.submit(None, job.arm).result()["error"]


def test_no_cluster_is_one_line(here):
    (here / "matrix.yaml").write_text(MATRIX)
    altgrad = Path(sys.executable).parent / "altgrad"
    command = [altgrad, "sweep", here / "matrix.yaml", "--out", here / "none", "--corpus", f"tiny=path:{here / 'text.txt'}"]
    command += ["--checkpoints", here / "checkpoints"]
    done = subprocess.run([*command, "--executor", "ray", "--ray-address", "127.0.0.1:1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no Ray cluster at 127.0.0.1:1" in done.stderr.splitlines()[-1], done.stderr
    done = subprocess.run([*command, "--ray-address", "127.0.0.1:1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--executor ray" in done.stderr
