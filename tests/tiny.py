"""What the tests of sweeps share: a text of a few thousand bytes, and the head of a matrix over a
checkpoint that has seen next to nothing."""
TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(3000))
HEAD = """
name: test
tier: 0
corpus: tiny
checkpoints: [tiny-0]
arms:
"""
