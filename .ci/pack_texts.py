"""Packs the two texts of the ledger, so that a clone can replay its rows:
nbs/results/ledger/texts/<label>.tar.xz.

python .ci/pack_texts.py eurlex=path:TEXT [stdlib=stdlib]

A text whose hash is not the one that the ledger's rows name is refused. The archives
depend on nothing but the texts: names in order, no times, no owners.
"""
import io
import lzma
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from altgrad.basics import InputError, write_atomic
from altgrad.training.data import NOT_LIBRARY, NOT_SHARED, _checked, _files, _walk, load_corpus
from altgrad.evidence.study import read_ledger

FOLDER = Path(__file__).resolve().parent.parent / "nbs/results/ledger"


def documents(data: str) -> list[tuple[str, bytes]]:
    "The documents of a text, by their names."
    if data != "stdlib":
        return [
            (name, path.read_bytes()) for name, path in _files(Path(data.removeprefix("path:")))
        ]
    found = []
    for name, path in _walk(Path(sysconfig.get_path("stdlib")), NOT_LIBRARY):
        if path.suffix != ".py" or NOT_SHARED.fullmatch(path.name): continue
        try: found.append((name, _checked(path.read_bytes(), name)))
        except InputError: continue  # not text
    return found


def pack(files: list[tuple[str, bytes]]) -> bytes:
    "A tar archive of these files, compressed."
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def main(pairs: list[str]) -> int:
    wanted = {
        row["corpus"]: row["corpus_sha"] for row in read_ledger(FOLDER) if not row.get("error")
    }
    for label, equals, data in (pair.partition("=") for pair in pairs):
        if not equals or label not in wanted:
            sys.exit(f"{label}: give LABEL=TEXT; the labels of the ledger are {', '.join(sorted(wanted))}")
        path = FOLDER / "texts" / f"{label}.tar.xz"
        packed = pack(documents(data))
        with tempfile.TemporaryDirectory() as folder:
            (trial := Path(folder) / path.name).write_bytes(packed)
            got = load_corpus(f"path:{trial}").hash
        if got != wanted[label]:
            sys.exit(
                f"{label}: the hash of this text is {got[:16]}, that of the ledger's rows "
                f"{wanted[label][:16]}"
            )
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, packed)
        print(f"{path}: {len(packed) / 1e6:.2f} MB, hash {got[:16]}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2: sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
