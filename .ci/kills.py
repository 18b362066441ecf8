"""The long form of tests/test_survival.py: runs killed before every one of their file operations,
and at many random moments."""
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import test_survival as s

from altgrad.numbers.formats import EIGHT_BIT

ROUNDS = 20  # of random kills for every format


def main() -> None:
    "Raises at the first run that does not end like the one that was left alone."
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "text.txt").write_text(
            "".join(f"{i} times {i} is {i * i}.\n" for i in range(3000))
        )
        for name in EIGHT_BIT:
            config, out = {**s.SMALL, "format": name, "storage": "grid_stochastic"}, folder / name
            assert s.live({**config, "name": "whole"}, out, folder) == 0
            whole = s.outcome(out / "whole")
            kills = s.kill_at_every(1, config, out, folder, whole)
            print(f"{name}: {kills} kills before file operations, all survived", flush=True)
            kills = sum(
                s.kill_at_random(4, seed, {**config, "name": f"random{seed}"}, out, folder, whole)
                for seed in range(ROUNDS)
            )
            print(f"{name}: {kills} kills at random moments, all survived", flush=True)


if __name__ == "__main__": main()
