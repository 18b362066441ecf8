"""Ledgers: rows that were edited, cut or doubled, and what reads them."""
import json
from functools import partial
from typing import Any, Callable, Iterator

from .core import Case, Place, either, refused_command, told, works
from .matrices import MATRIX

ODD = (
    7, -1.5, True, [1], {"a": 1}, "", "x", None, "\x1b[2J", "x" * 5000, float("nan"), float("inf")
)
NAMED = {  # there are so many of these, and some are
    "format": ("E5M2", "E0M7", "float8_e4m3fn"), "storage": ("master", "grid_residual4"),
    "rule": ("adamw", "madam", "lion"), "split": ("tune", "confirm"),
}
FINE = {  # what may stand there
    "run": ("x", "\x1b[2J"),
    "val_loss": (7,),
    "lr": (7, None),
    "power": (7, -1.5, None),
    "floor_octaves": (7, None),
    "seed": (7, None),
    "seconds": (7, None),
    "stall": (7, None),
    "diverged": (True, None),
    **dict.fromkeys(NAMED, (None,)),
    **dict.fromkeys(("placement", "checkpoint", "corpus", "stage", "matrix"), ("", "x", None, "\x1b[2J")),
    "error": ("", "x", None, "\x1b[2J"),
    "curve": ([1], None),
    "task": ({"a": 1}, None),
    "machine": ({"a": 1}, None),
    "versions": ({"a": 1}, None),
}


def _ledger(place: Place, change: Callable[[list[bytes]], list[bytes]]) -> Any:
    "A copy of the ledger with its lines changed."
    lines = (place.base / "ledger/ledger.jsonl").read_bytes().splitlines(keepends=True)
    folder = place.folder / "ledger"
    folder.mkdir()
    (folder / "ledger.jsonl").write_bytes(b"".join(change(lines)))
    return folder


def _sweep(place: Place, folder: Any) -> tuple:
    (place.folder / "m.yaml").write_text(MATRIX)
    where = (
        "--checkpoints", place.base / "checkpoints", "--corpus", f"tiny=path:{place.base}/text.txt"
    )
    return ("sweep", place.folder / "m.yaml", "--out", folder, "--dry-run", *where)


def _readers(place: Place, folder: Any) -> list[tuple]:
    return [_sweep(place, folder), ("replay", "0", "--ledger", folder), ("watch", folder, "--once")]


def _wrong_row(number: int, change: Callable[[dict], Any], place: Place) -> None:
    "Named by its line by all three, and left as it is."
    def edit(lines):
        return [
            *lines[: number - 1],
            json.dumps(change(json.loads(lines[number - 1]))).encode() + b"\n", *lines[number:],
        ]
    folder = _ledger(place, edit)
    before = (folder / "ledger.jsonl").read_bytes()
    for argv in _readers(place, folder):
        assert f"{number}" in refused_command(*argv).rpartition("ledger.jsonl")[2], argv
    assert (folder / "ledger.jsonl").read_bytes() == before and len(list(folder.iterdir())) == 1


def _set(key: str, value: Any, row: dict) -> dict: return {**row, key: value}


def _without(key: str, row: dict) -> dict: return {k: v for k, v in row.items() if k != key}


def _bytes(change: Callable[[list[bytes]], list[bytes]], place: Place) -> None:
    "A whole line in the middle that is no row."
    folder = _ledger(place, change)
    refused_command(*_sweep(place, folder))


def _torn(at: int, place: Place) -> None:
    "A last line that a power cut tore is made again: the others count."
    folder = _ledger(place, lambda lines: [*lines[:-1], lines[-1][: at % (len(lines[-1]) - 1)]])
    out = works(*_sweep(place, folder))
    assert "3 runs in the ledger; stage tune" in out, out[-200:]


def _mutated(seed: int, content: bytes, place: Place) -> None:
    "Refused, or every row that counts is one that was written."
    from altgrad.evidence.sweep import Ledger, read_rows
    folder = place.folder / "ledger"
    folder.mkdir()
    (folder / "ledger.jsonl").write_bytes(content)
    rows = either(Ledger(folder).rows)
    for argv in _readers(place, folder):
        code, _, err = told(*argv)
        assert (
            code in (0, 2) and "Traceback" not in err and (code == 0 or len(err.splitlines()) == 1)
        ), (code, err)
    if rows: assert read_rows(folder) == rows


def _replayed(place: Place) -> None:
    row = json.loads((place.base / "ledger/ledger.jsonl").read_bytes().splitlines()[0])
    out = works(
        "replay", row["run"], "--ledger", place.base / "ledger", "--checkpoints",
        place.base / "checkpoints", "--corpus", f"tiny=path:{place.base}/text.txt",
    )
    assert "agrees bit for bit" in out


def _replay_wrong(change: Callable[[dict], Any], place: Place) -> None:
    def edit(lines): return [json.dumps(change(json.loads(lines[0]))).encode() + b"\n", *lines[1:]]
    folder = _ledger(place, edit)
    run = json.loads((folder / "ledger.jsonl").read_bytes().splitlines()[0])["run"]
    refused_command(
        "replay", run, "--ledger", folder, "--checkpoints", place.base / "checkpoints", "--corpus",
        f"tiny=path:{place.base}/text.txt",
    )


def _fine(key: str, value: Any, place: Place) -> None:
    "A value that a row may have is read as it is."
    from altgrad.evidence.sweep import Ledger
    def edit(lines: list[bytes]) -> list[bytes]:
        row = _set(key, value, json.loads(lines[0]))
        if key == "error" and value: row["val_loss"] = None  # a run that failed has none
        return [json.dumps(row).encode() + b"\n", *lines[1:]]
    folder = _ledger(place, edit)
    assert Ledger(folder).rows()[0][key] == value and len(Ledger(folder).rows()) == 4


def _places(kind: str, place: Place) -> None:
    "What is no ledger where one should be."
    import os
    path = place.folder / "ledger/ledger.jsonl"
    path.parent.mkdir()
    if kind == "a pipe": os.mkfifo(path)
    if kind == "a folder": path.mkdir()
    if kind == "a link to itself": path.symlink_to(path)
    if kind == "a device": path.symlink_to("/dev/zero")
    for argv in _readers(place, path.parent): refused_command(*argv)


def _parquet(kind: str, place: Place) -> None:
    from altgrad.evidence.sweep import Ledger, compact
    path = place.folder / "l.parquet"
    compact(Ledger(place.base / "ledger").rows(), path)
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "half": data[: len(data) // 2],
            "rubbish": b"PAR1" + b"x" * 100 + b"PAR1",
            "text": b"hello",
            "no tail": data[:-8],
            "head": data[:4],
        }[kind]
    )
    refused_command("replay", "0", "--ledger", path)


def _run(name: str, place: Place) -> None:
    refused_command("replay", name, "--ledger", place.base / "ledger")


def cases(rng) -> Iterator[Case]:
    from .configs import mutations

    for key, fine in FINE.items():
        for value in ODD:
            if key in ("error",) and not value and not isinstance(value, (int, list, dict)):
                continue
            good = (
                any(value is g or type(value) is type(g) and value == g for g in fine)
                or key not in ("run", "val_loss")
                and value is None
            )
            if (
                key not in ("run", "val_loss", "error", *NAMED)
                and isinstance(value, str)
                and not good
                and "text" == _kind(key)
                and len(value) <= 1000
            ):
                good = True
            if good:
                yield Case(
                    "ledgers", f"fine {key} = {str(value)[:20]!r}", partial(_fine, key, value),
                    right=True,
                )
            else: yield Case("ledgers", f"{key} = {str(value)[:20]!r} {type(value).__name__}",
                partial(_wrong_row, rng.randint(1, 3), partial(_set, key, value)))
    for key, values in NAMED.items():
        for value in values:
            yield Case("ledgers", f"fine {key} = {value!r}", partial(_fine, key, value), right=True)
    for key in ("run", "val_loss"):
        yield Case("ledgers", f"without {key}", partial(_wrong_row, 2, partial(_without, key)))
    for key in (
        "task", "corpus_sha", "checkpoint_sha", "weights_sha", "instrument", "diverged", "machine",
        "lr", "seed", "format",
    ):
        yield Case(
            "ledgers", f"replay without {key}", partial(_replay_wrong, partial(_without, key))
        )
    for key, value in (
        ("corpus_sha", "0" * 64),
        ("instrument", 99),
        ("corpus_sha", 7),
        ("code", []),
        ("raw_loss", "x"),
        ("checkpoint", "tiny-" + "9" * 500),
        ("seed", 10**30),
        ("instrument", "1"),
        ("task", {"steps": 0}),
        ("task", {"stepps": 1}),
        ("checkpoint", "none-0"),
        ("corpus", "other"),
        ("format", "E9M9"),
        ("rule", "none"),
        ("split", "none"),
        ("storage", "none"),
    ):
        yield Case(
            "ledgers", f"replay with {key} = {value!r}",
            partial(_replay_wrong, partial(_set, key, value)),
        )
    for name, line in {
        "text": b"hello\n",
        "a list": b"[1]\n",
        "a number": b"1\n",
        "null": b"null\n",
        "half a row": b'{"run": "a\n',
        "NUL": b"\0\0\0\n",
        "not UTF-8": b'{"run": "\xff"}\n',
        "deep": b"[" * 100_000 + b"\n",
        "NaN": b'{"run": "a", "val_loss": NaN}\n',
        "empty": b"\n",
    }.items():
        for at in (0, 1, 3):
            yield Case(
                "ledgers", f"line {at + 1} is {name}", partial(_bytes, partial(_insert, at, line))
            )
    for seed in range(20):
        yield Case("ledgers", f"torn {seed}", partial(_torn, rng.randrange(10**6)), right=True)
    sample = (
        b'{"run": "ab12", "val_loss": 2.5, "error": null, "format": "E4M3", "lr": 0.1, "stage": '
        b'"tune", "curve": [1, 2]}\n'
        * 4
    )
    for seed in range(60):
        yield Case("ledgers", f"mutated {seed}", partial(_mutated, seed, mutations(rng, sample)))
    for kind in ("a pipe", "a folder", "a link to itself", "a device"):
        yield Case("ledgers", f"{kind} for a ledger", partial(_places, kind))
    for kind in ("empty", "half", "rubbish", "text", "no tail", "head"):
        yield Case("ledgers", f"parquet: {kind}", partial(_parquet, kind))
    for name in ("zzz", "\x1b[2J", "x" * 10_000, "-1", " ", "\ud800"):
        yield Case("ledgers", f"run {name[:20]!r}", partial(_run, name))
    yield Case("ledgers", "a replay", _replayed, right=True)


def _insert(at: int, line: bytes, lines: list[bytes]) -> list[bytes]:
    return [*lines[:at], line, *lines[at:]]


def _kind(key: str) -> str:
    return (
        "text"
        if key
        in (
            "format", "storage", "rule", "placement", "split", "checkpoint", "corpus", "stage",
            "matrix",
        )
        else ""
    )
