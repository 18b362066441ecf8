"""Run folders: every file damaged in every way, and then the same command, a reader, or both."""
import hashlib
import io
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

from .core import LONGEST, Case, Place, refused_command, settings, told, works

TIMES = ("tokens_per_s", "wall_clock_s", "memory_bytes")
FILES = (
    "config.yaml", "metrics.jsonl", "run.json", "checkpoints/manifest.json",
    "checkpoints/step-00000004.pt", "checkpoints/step-00000006.pt", "series/parts.json",
    "series/values-00000002.parquet", "series/values-00000004.parquet",
    "series/values-00000006.parquet", "series/histograms-00000002.parquet",
)


def content(folder: Path) -> dict[str, Any]:
    """What a run has to say, read by other code than its own:
    metrics, series, results and the last weights."""
    import pyarrow.parquet as pq
    import torch

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
    series = {
        kind: sorted(
            (r["path"], r["step"], str(r[column]))
            for p in folder.glob(f"series/{kind}-*.parquet")
            for r in pq.read_table(p).to_pylist()
        )
        for kind, column in (("values", "value"), ("histograms", "counts"))
    }
    record = json.loads((folder / "run.json").read_text())
    weights = torch.load(folder / "checkpoints/step-00000008.pt", weights_only=True)["model"]
    return {
        "rows": rows,
        "series": series,
        "exit": record["exit_reason"],
        "val": record["results"]["val_loss"],
        "weights": {
            name: hashlib.sha256(w.float().numpy().tobytes()).hexdigest()
            for name, w in weights.items()
            if torch.is_tensor(w)
        },
    }


def again(place: Place) -> tuple:
    return (
        "train", "bf16_baseline", *settings(place.base), "--out", place.folder / "out", "--wandb",
        "off",
    )


def _copy(place: Place, of: str) -> Path:
    shutil.copytree(place.base / of / "r", place.folder / "out/r", symlinks=True)
    (place.folder / "victim.pt").write_text("mine")
    (place.folder / "out/victim.pt").write_text("mine")
    return place.folder / "out/r"


def _survives(place: Place, folder: Path) -> None:
    """The same command ends as the run that nothing disturbed,
    or is refused in a line and leaves all as it is."""
    before = {
        p: (p.read_bytes() if p.is_file() else None)
        for p in folder.rglob("*")
        if not p.is_symlink() and p.name != "lock"
    }
    code, out, err = told(*again(place))
    for line in err.splitlines():
        assert line.strip() and len(line) <= LONGEST and "Traceback" not in line, line[:400]
    if code == 0:
        want, got = content(place.base / "whole/r"), content(folder)
        for part in want: assert got[part] == want[part], f"{part} is another: said {err[-300:]!r}"
    else:
        assert code == 2 and err.splitlines()[-1].startswith("altgrad: "), (code, err[-300:])
        kept = {
            p
            for p, data in before.items()
            if p.is_file()
            and p.read_bytes() == data
            or p.with_suffix(".aside").is_file()
            or p.name == "run.json"
        }
        gone = [p for p, data in before.items() if data is not None and p not in kept]
        assert not gone, f"refused, and yet changed {[p.name for p in gone]}: {err[-200:]!r}"
    for victim in (place.folder / "victim.pt", place.folder / "out/victim.pt"):
        assert victim.read_text() == "mine"


def damage(path: Path, how: str, seed: int) -> None:
    data = path.read_bytes() if path.is_file() else b""
    if how == "flipped" and data:
        path.write_bytes(
            data[: (at := seed % len(data))] + bytes([data[at] ^ (1 << seed % 8)]) + data[at + 1 :]
        )
    elif how == "cut": path.write_bytes(data[: seed % max(1, len(data))])
    elif how == "emptied": path.write_bytes(b"")
    elif how == "rubbish": path.write_bytes(bytes(seed % 251 for _ in range(100)))
    elif how == "longer": path.write_bytes(data + b"\0" * 40)
    else:
        path.unlink()
        if how == "a folder": path.mkdir()
        if how == "a pipe": os.mkfifo(path)
        if how == "a link to nothing": path.symlink_to("nowhere")
        if how == "a link to a device": path.symlink_to("/dev/zero")


def _damaged(of: str, file: str, how: str, seed: int, place: Place) -> None:
    folder = _copy(place, of)
    assert (folder / file).is_file(), f"there is no {file} to damage"
    damage(folder / file, how, seed)
    _survives(place, folder)


def _read(file: str, how: str, seed: int, place: Place) -> None:
    """A reader says what it finds or refuses in a line;
    a series that is not what was written is always refused by the autopsy."""
    folder = _copy(place, "whole")
    damage(folder / file, how, seed)
    for argv in (("watch", folder, "--once"), ("autopsy", folder)):
        code, _, err = told(*argv)
        assert code in (0, 2) and "Traceback" not in err and len(err.splitlines()) == (code == 2), (
            argv[0], code, err[-300:]
        )
        if argv[0] == "autopsy" and "values" in file:
            assert code == 2 and Path(file).name in err, "a damaged series was examined"


def _gone(of: str, name: str, how: str, place: Place) -> None:
    "A whole folder of the run."
    folder = _copy(place, of)
    shutil.rmtree(folder / name)
    if how == "a file": (folder / name).write_text("x")
    if how == "a link to nothing": (folder / name).symlink_to("nowhere")
    if how == "empty": (folder / name).mkdir()
    _survives(place, folder)


def _edited(file: str, change: Callable[[Any], Any], place: Place) -> None:
    "A JSON file that says something else."
    folder = _copy(place, "killed")
    (folder / file).write_text(json.dumps(change(json.loads((folder / file).read_text()))))
    _survives(place, folder)


def _entry(key: str, value: Any, entries: list[dict]) -> list[dict]:
    return [*entries[:-1], {**entries[-1], key: value}]


def _set(key: str, value: Any, record: dict) -> dict: return {**record, key: value}


def _state(change: Callable[[dict], Any], place: Place) -> None:
    """A newest checkpoint that is not what the run wrote,
    with the hash of what it is: refused in a line."""
    import torch
    folder = _copy(place, "killed")
    manifest = json.loads((folder / "checkpoints/manifest.json").read_text())
    path = folder / "checkpoints" / manifest[-1]["file"]
    buffer = io.BytesIO()
    torch.save(change(torch.load(path, weights_only=True)), buffer)
    path.write_bytes(buffer.getvalue())
    manifest[-1]["sha256"] = hashlib.sha256(buffer.getvalue()).hexdigest()
    (folder / "checkpoints/manifest.json").write_text(json.dumps(manifest))
    assert "cannot be used" in refused_command(*again(place), lines=4)


class Evil:
    "Would make a file where it is unpickled."
    def __init__(self, file: Path): self.file = file

    def __reduce__(self): return Path.touch, (self.file,)


def _evil(place: Place) -> None:
    file = place.folder / "ran"
    _state(lambda state: {**state, "extra": Evil(file)}, place)
    assert not file.exists()


def _without(key: str, state: dict) -> dict: return {k: v for k, v in state.items() if k != key}


def _extra(key: str, value: Any, state: dict) -> dict:
    return {**state, "extra": {**state["extra"], key: value}}


def _line(number: int, line: bytes, place: Place) -> None:
    "A line of the metrics of a killed run, or of a finished one."
    for of in ("killed", "whole"):
        folder = _copy(place, of)
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_bytes(
            b"".join([*lines[:number], line, *lines[number + 1 :]])
        )
        _survives(place, folder)
        shutil.rmtree(place.folder / "out")


def _control(how: str, place: Place) -> None:
    "What is whole goes on, is used again, or is read."
    folder = _copy(place, "killed" if how == "goes on" else "whole")
    if how in ("goes on", "used again"): _survives(place, folder)
    if how == "goes on":
        assert json.loads((folder / "run.json").read_text())["exit_reason"] == "finished"
        assert "-00000008.parquet" in "".join(map(str, folder.rglob("*")))
    if how == "watched": assert "step 8 of 8" in works("watch", folder, "--once")
    if how == "examined": assert "8 of 8 steps" in works("autopsy", folder)
    if how == "another config": refused_command(*again(place), "--set", "lr=0.5")


def cases(rng) -> Iterator[Case]:
    for file in FILES:
        ways = (
            ["flipped"] * 3
            + ["cut"] * 2
            + [
                "emptied", "rubbish", "longer", "gone", "a folder", "a pipe", "a link to nothing",
                "a link to a device",
            ]
        )
        for number, how in enumerate(ways): yield Case("runs", f"killed: {file} {how} {number}",
            partial(_damaged, "killed", file, how, rng.randrange(10**9)))
    for file in (
        "metrics.jsonl", "run.json", "series/values-00000004.parquet",
        "series/values-00000008.parquet", "series/histograms-00000002.parquet", "series/parts.json",
    ):
        for number, how in enumerate(["flipped", "cut", "emptied", "gone"]):
            yield Case(
                "runs", f"finished: {file} {how} {number}",
                partial(_damaged_finished, file, how, rng.randrange(10**9)),
            )
    for file in (
        "config.yaml", "metrics.jsonl", "run.json", "series/parts.json",
        "series/values-00000004.parquet", "series/values-00000008.parquet",
    ):
        for number, how in enumerate(["flipped", "flipped", "cut", "emptied", "rubbish", "gone"]):
            if (file, how) not in (("config.yaml", "gone"),): yield Case("runs", f"read: {file} {how} {number}",
                partial(_read, file, how, rng.randrange(10**9)))
    for name in ("checkpoints", "series"):
        for how in ("gone", "empty", "a file", "a link to nothing"):
            yield Case("runs", f"{name} {how}", partial(_gone, "killed", name, how))
    for value in (
        "../../victim.pt", "../victim.pt", "/etc/passwd", "", ".", "a\0b", 7, None, [],
        "step-00000099.pt", "x" * 5000, "step-00000006.pt/.", "anomaly-00000006.pt",
    ):
        yield Case("runs", f"manifest: file = {str(value)[:30]!r} {type(value).__name__}",
            partial(_edited, "checkpoints/manifest.json", partial(_entry, "file", value)))
    for key, values in {"step": ("6", None, -1, 99, 6.0, [], True, 10**30), "sha256": (7, [], "", "0" * 64, "x"),
        "val_loss": ("x", [], float("nan"), True, {}), "anomaly": (7, [], "x", False)}.items():
        for value in values:
            yield Case(
                "runs", f"manifest: {key} = {value!r}",
                partial(_edited, "checkpoints/manifest.json", partial(_entry, key, value)),
            )
    for name, value in {
        "a mapping": {}, "a number": 1, "null": None, "no entries": [], "a list of lists": [[]],
        "text": "x",
    }.items():
        yield Case(
            "runs", f"manifest is {name}",
            partial(_edited, "checkpoints/manifest.json", partial(_constant, value)),
        )
    for key, values in {
        "exit_reason": (7, None, [], "finished", "stopped", "finished, honestly"),
        "corpus": (None, "x", {}, {"hash": 7}, []),
        "results": (None, [], {"val_loss": "x"}, {}),
        "compute_dtype": (7, None, "bfloat16"),
        "compile": (7, None, "on"),
        "steps": ("x", None, -1),
    }.items():
        for value in values:
            yield Case(
                "runs", f"run.json: {key} = {value!r}",
                partial(_edited, "run.json", partial(_set, key, value)),
            )
    for name, value in {"a list": [], "a number": 1, "null": None, "text": "x"}.items():
        yield Case(
            "runs", f"run.json is {name}", partial(_edited, "run.json", partial(_constant, value))
        )
    for value in (
        [], {}, None, {"values-00000002.parquet": 7}, {"../../victim.pt": "0" * 64},
        {"values-00000099.parquet": "0" * 64}, {"values-x.parquet": ""},
    ):
        yield Case(
            "runs", f"parts.json is {str(value)[:40]}",
            partial(_edited, "series/parts.json", partial(_constant, value)),
        )
    for key in ("model", "formats", "optimizers", "step", "points", "random", "extra"):
        yield Case("runs", f"checkpoint without {key}", partial(_state, partial(_without, key)))
    for key, values in {
        "step": (99, "6", None, 5.5), "random": ({}, None, {"cpu": 1}), "model": ({}, None),
        "optimizers": ([], None, [{}]), "extra": ({}, None, []), "points": (None, {"x": {}}),
        "formats": (None, {"x": {}}, []),
    }.items():
        for value in values:
            yield Case(
                "runs", f"checkpoint: {key} = {value!r}", partial(_state, partial(_set, key, value))
            )
    for key, values in {
        "seconds": (None, "x"),
        "skipped": (None, "x"),
        "watch": ("x", [1], {"alarms": 1}, {}),
    }.items():
        for value in values:
            yield Case(
                "runs", f"checkpoint: extra {key} = {value!r}",
                partial(_state, partial(_extra, key, value)),
            )
    yield Case("runs", "a checkpoint that is a pickle", _evil)
    for number in (0, 2, 5):
        for name, line in {
            "text": b"hello\n",
            "a list": b"[]\n",
            "no step": b"{}\n",
            "another step": b'{"step": 99}\n',
            "NUL": b"\0" * 9 + b"\n",
            "not UTF-8": b'{"step": "\xff"}\n',
            "deep": b"[" * 100_000 + b"\n",
            "nothing": b"",
            "empty": b"\n",
            "another loss": b'{"step": %d, "loss": 0.5}\n' % (number + 1),
        }.items():
            yield Case(
                "runs", f"metrics: line {number + 1} is {name}", partial(_line, number, line)
            )
    for how in ("goes on", "used again", "watched", "examined", "another config"):
        yield Case("runs", how, partial(_control, how), right=True)


def _constant(value: Any, _: Any) -> Any: return value


def _damaged_finished(file: str, how: str, seed: int, place: Place) -> None:
    _damaged("whole", file, how, seed, place)
