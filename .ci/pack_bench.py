"""Makes what `bench-1` runs on: altgrad/evidence/bench_1/{texts,checkpoints}.

python .ci/pack_bench.py ACTS.jsonl [FOLDER]

ACTS.jsonl has one act of the European Union a line, with `celex_id` and `text`. The acts come in
the order of a hash of their numbers, as many as two million bytes hold, so that training and
validation text are of all years. Checkpoints that are there already are kept; the others take a
minute each. They are stored in half precision: what is stored is the checkpoint.
"""
import hashlib
import json
import sys
from pathlib import Path

import torch
from pack_texts import pack

from altgrad.basics import tell, write_atomic
from altgrad.evidence.bench import PROTOCOLS
from altgrad.evidence.instrument import Bench, pretrain, recipe_of
from altgrad.training.data import ARCHIVE, load_corpus

HERE = Path(__file__).resolve().parent.parent / "altgrad/evidence/bench_1"
MOST = 2_000_000  # bytes of text


def excerpt(acts: Path) -> bytes:
    "Acts in the order of a hash of their numbers, one after another."
    rows = [json.loads(line) for line in acts.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: hashlib.sha256(row["celex_id"].encode()).hexdigest())
    found, size = [], 0
    for row in rows:
        text = row["text"].strip().encode() + b"\n\n"
        if size + len(text) > MOST: break
        found.append(text)
        size += len(text)
    return b"".join(found)


def main(acts: Path, folder: Path = HERE) -> int:
    protocol = PROTOCOLS["bench-1"]
    text = folder / f"texts/{protocol.corpus}{ARCHIVE}"
    text.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(text, pack([(f"{protocol.corpus}.txt", excerpt(acts))]))
    tell(f"{text.name}: {text.stat().st_size / 1e6:.2f} MB, "
         f"hash {load_corpus(f'path:{text}').hash[:16]}")
    bench = Bench(folder / "checkpoints")
    bench.folder.mkdir(exist_ok=True)
    for name in (*protocol.tune, *protocol.confirm):
        if bench.file(name).is_file(): continue
        recipe, seed = recipe_of(name)
        state = pretrain(recipe, seed, bench.corpus(recipe.corpus))
        half = {key: value.half() for key, value in state.items()}
        write_atomic(bench.file(name), lambda file, kept=half: torch.save(kept, file))
        tell(f"{name}: {bench.state(name)[1][:16]}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3): sys.exit(__doc__)
    sys.exit(main(*map(Path, sys.argv[1:])))
