"""Texts to train on: kinds of files, what is in them, and how they are cut."""
import json
import os
from functools import partial
from typing import Iterator

from .core import TEXT, Case, Place, refused, refused_command

JSONL = {
    "no object": "[1]\n",
    "a number": "3\n",
    "no JSON": "{\n",
    "no column": '{"txt": "a"}\n',
    "text is a number": '{"text": 3}\n',
    "text is null": '{"text": null}\n',
    "text is a mapping": '{"text": {}}\n',
    "a list of numbers": '{"text": [1]}\n',
    "half of a pair": '{"text": "\\ud800"}\n',
    "a NUL": '{"text": "a\\u0000b"}\n',
    "deep": "[" * 100_000 + "\n",
    "deep in a row": '{"text": ' + "[" * 100_000 + "\n",
    "a column of 1 MB": '{"' + "x" * 10**6 + '": 1}\n',
}
FILES = {
    "a.txt": {
        "empty": b"",
        "NUL": b"abc\0def" * 99,
        "not UTF-8": b"abc\xff" * 99,
        "UTF-16": TEXT.encode("utf-16"),
        "one byte": b"a",
        "two bytes": b"ab",
        "half a character": "ab\u20ac".encode()[:-1] * 9,
    },
    "a.parquet": {
        "empty": b"",
        "magic only": b"PAR1PAR1",
        "text": TEXT.encode(),
        "magic and rubbish": b"PAR1" + bytes(range(256)) * 20 + b"PAR1",
    },
}
NAMES = (
    "", "none", "path:", "path", "path:none.txt", "path:a\0b", "path:~nobody-of-this-name/x",
    "lex_glue/none", "lex_glue/eurlex@", "lex_glue/eurlex@none", "stdlib ", "STDLIB",
    "path:/dev/null", "path:/dev/zero", "path:/dev/stdin/x", "path:/proc/self/mem/x", "\ud800",
    "path:\ud800", "x" * 100_000, "path:" + "x" * 5000, "path:" + "a/" * 3000, "http://nowhere",
    "\x1b[2J", "path:\x1b[2J",
)
TOKENIZERS = (
    "", "byte", "bpe", "bpe-", "bpe-0", "bpe-256", "bpe-65536", "bpe--1", "bpe-1e3",
    "bpe-\u0663\u0660\u0660", "bpe-00300", "x" * 100_000, "bpe-" + "9" * 5000, "\x00",
)
LABELLED = {
    "no labels": {"text": "a"},
    "labels are text": {"text": "a", "labels": "x"},
    "labels are null": {"text": "a", "labels": None},
    "a label is a list": {"text": "a", "labels": [[1]]},
    "a split of its own": {"text": "a", "labels": [1], "split": "holdout"},
    "a split that is a list": {"text": "a", "labels": [1], "split": []},
    "a label is null": {"text": "a", "labels": [None]},
}


def _load(place: Place, data: str, tokenizer: str = "bytes"):
    from altgrad.training.data import load_corpus
    return load_corpus(data, tokenizer, place.folder / "cache")


def _wrong(name: str, content: bytes, place: Place) -> None:
    (place.folder / name).write_bytes(content)
    refused(_load, place, f"path:{place.folder / name}")
    (place.folder / "in").mkdir()
    (place.folder / "in" / name).write_bytes(content)
    refused(_load, place, f"path:{place.folder / 'in'}")


def _wrong_train(name: str, content: bytes, place: Place) -> None:
    (place.folder / name).write_bytes(content)
    refused_command(
        "train", "e4m3_fp8", "--set", f"data=path:{place.folder / name}", "--out",
        place.folder / "out",
    )
    assert not (place.folder / "out").exists()


def _name(data: str, place: Place) -> None: refused(_load, place, data)


def _tokenizer(name: str, place: Place) -> None:
    refused(_load, place, f"path:{place.base}/text.txt", name)


def _special(kind: str, inside: bool, place: Place) -> None:
    folder = place.folder / "in"
    folder.mkdir()
    path = folder / "a.txt"
    if kind == "a pipe": os.mkfifo(path)
    if kind == "a device": path.symlink_to("/dev/zero")
    if kind == "a link to nothing": path.symlink_to("nowhere")
    if kind == "a link to itself": path.symlink_to(path)
    if kind == "an empty folder": path.mkdir()
    if kind == "a socket":
        import socket
        with socket.socket(socket.AF_UNIX) as s: s.bind("in/a.txt")
    refused(_load, place, f"path:{folder if inside else path}")


def _parquet(place: Place, rows: list) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.table({"text": rows}), place.folder / "made.parquet")
    data = (place.folder / "made.parquet").read_bytes()
    (place.folder / "made.parquet").unlink()
    return data


def _cut_parquet(share: float, place: Place) -> None:
    data = _parquet(place, [f"{i} times {i}" for i in range(200)])
    _wrong("a.parquet", data[: int(len(data) * share)], place)


def _odd_parquet(rows: list, place: Place) -> None:
    _wrong("a.parquet", _parquet(place, rows), place)


def _labels(row: dict, place: Place) -> None:
    from altgrad.training.data import load_labelled
    good = [{"text": f"{i} times {i}", "labels": ["a"]} for i in range(30)]
    (place.folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*good, row]))
    refused(load_labelled, f"path:{place.folder}/a.jsonl", "bytes", place.folder / "cache")


def _damaged_cache(name: str, how: str, place: Place) -> None:
    "A prepared text that was damaged is named; the text itself is never mixed up with it."
    corpus = _load(place, f"path:{place.base}/text.txt")
    path = corpus.folder / name
    data = path.read_bytes()
    path.unlink()
    if how == "cut": path.write_bytes(data[:-1])
    if how == "emptied": path.write_bytes(b"")
    if how == "rubbish": path.write_bytes(b"\xff" * 10)
    if how == "a folder": path.mkdir()
    refused(_load, place, f"path:{place.base}/text.txt")


def _control(name: str, content: bytes, want: bytes, place: Place) -> None:
    "What was written is there, all of it, once."
    (place.folder / name).write_bytes(content)
    corpus = _load(place, f"path:{place.folder / name}")
    got = sorted([*corpus.train.tobytes().split(b"\0"), *corpus.val.tobytes().split(b"\0")])
    assert (
        b"".join(got) == b"".join(sorted(want.split(b"\0")))
        or corpus.train.tobytes() + corpus.val.tobytes() == want
    )


def cases(rng) -> Iterator[Case]:
    good = '{"text": "one row that is right"}\n' * 3
    for name, line in JSONL.items():
        for place, text in (("first", line + good), ("last", good + line)):
            yield Case(
                "texts", f"jsonl, {name}, {place}", partial(_wrong, "a.jsonl", text.encode())
            )
        yield Case(
            "texts", f"jsonl, {name}, train", partial(_wrong_train, "a.jsonl", line.encode())
        )
    for file, contents in FILES.items():
        for name, content in contents.items():
            yield Case("texts", f"{file}, {name}", partial(_wrong, file, content))
            yield Case("texts", f"{file}, {name}, train", partial(_wrong_train, file, content))
    for name in NAMES: yield Case("texts", f"data {name[:30]!r} {len(name)}", partial(_name, name))
    for name in TOKENIZERS:
        yield Case("texts", f"tokenizer {name[:30]!r} {len(name)}", partial(_tokenizer, name))
    for kind in (
        "a pipe", "a device", "a link to nothing", "a link to itself", "an empty folder",
        "a socket",
    ):
        for inside in (False, True):
            yield Case("texts", f"{kind}, inside {inside}", partial(_special, kind, inside))
    for i in range(20):
        yield Case("texts", f"parquet cut to {i / 20:.0%}", partial(_cut_parquet, i / 20))
    for name, rows in {
        "numbers": [1, 2], "nulls": [None, None], "a NUL": ["a\0b"] * 3, "floats": [0.5],
        "lists of numbers": [[1], [2]], "nothing": [], "empty texts": ["", ""],
    }.items():
        yield Case("texts", f"parquet of {name}", partial(_odd_parquet, rows))
    for name, row in LABELLED.items(): yield Case("texts", f"labels: {name}", partial(_labels, row))
    for name in ("train.bin", "val.bin", "corpus.json"):
        for how in ("cut", "emptied", "rubbish", "gone", "a folder"):
            if (name, how) != ("corpus.json", "cut"):
                yield Case("texts", f"cache: {name} {how}", partial(_damaged_cache, name, how))
    for seed in range(30):
        letters = rng.choice(("abc \n", "äöü€ \n", "日本語\n", "a\r\n", "🙂 b", "\u2028\u0085x"))
        text = "".join(rng.choice(letters) for _ in range(rng.randint(20, 3000))).encode()
        yield Case(
            "texts", f"control text {seed}",
            partial(_control, f"a{rng.choice(('.txt', '.md', '.py', '', '.xyz'))}", text, text),
            right=True,
        )
        rows = [
            "".join(rng.choice(letters) for _ in range(rng.randint(4, 60)))
            for _ in range(rng.randint(2, 30))
        ]
        content = "".join(
            json.dumps({"text": row}, ensure_ascii=rng.random() < 0.5) + "\n" for row in rows
        )
        yield Case(
            "texts", f"control rows {seed}",
            partial(_control, "a.jsonl", content.encode(), "\0".join(rows).encode()), right=True,
        )
