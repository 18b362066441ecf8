"""What the tests of sweeps share: a text of a few thousand bytes, a task of seconds, and the head of
a matrix over a checkpoint that has seen next to nothing."""
from altgrad.evidence.instrument import Task

TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(3000))
HEAD = """
name: test
tier: 0
corpus: tiny
checkpoints: [tiny-0]
arms:
"""
TASK = Task(steps=12, batch_size=4, warmup=2, chunks=4, windows=2, every=4)
