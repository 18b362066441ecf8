"""What the tests of sweeps share: a text of a few thousand bytes, a task of seconds, the head of a
matrix over a checkpoint that has seen next to nothing, and a bench over several such."""
import importlib.util
import tarfile
from pathlib import Path
from types import ModuleType

from altgrad.evidence.bench import Protocol
from altgrad.evidence.instrument import Bench, Task, build_checkpoint
from kernels import with_kernels

TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(3000))
HEAD = """
name: test
tier: 0
corpus: tiny
checkpoints: [tiny-0]
arms:
"""
TASK = Task(steps=12, batch_size=4, warmup=2, chunks=4, windows=2, every=4)
TUNE, CONFIRM, POINTS, MOST = ("tiny-0", "tiny-1"), ("tiny-2", "tiny-3", "tiny-4"), 3, 5
RULE = """
import torch

class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]: p.sub_(group["lr"] * {step})
"""
SIGN = RULE.replace("{step}", "p.grad.sign()")


def load_experiment(name: str) -> ModuleType:
    "A script of nbs/studies/experiments as a module."
    path = Path(__file__).resolve().parent.parent / f"nbs/studies/experiments/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill_folder(folder: Path) -> None:
    "Makes the text, its corpus and archive, the checkpoints and the C++ kernels."
    (folder / "text.txt").write_text(TEXT)
    (folder / "texts").mkdir()
    with tarfile.open(folder / "texts/tiny.tar.xz", "w:xz") as archive:
        archive.add(folder / "text.txt", "text.txt")
    with_kernels(folder / "cache")
    for name in TUNE + CONFIRM: build_checkpoint(small_bench(folder), name)


def small_bench(folder: Path, task=TASK, text="text.txt", kind: type[Bench] = Bench) -> Bench:
    "A bench over what lies in a folder."
    return kind(folder / "checkpoints", {"tiny": f"path:{folder / text}"}, task, folder / "cache")


def small_protocol(folder: Path) -> Protocol:
    "A protocol of seconds by the name of the large one, over the same."
    return Protocol("bench-1", TUNE, CONFIRM, "tiny", POINTS, MOST, task=TASK, folder=folder,
                    compiled=False)
