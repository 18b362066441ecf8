"""The mirror to W&B: what it finds in a run's folder, and what is read of it."""
import json
import os
import signal
import socket
from functools import partial
from typing import Any, Iterator

from .core import Case, Place, either, refused, refused_command, settings, told


def _made(place: Place) -> bytes:
    """A file of W&B's format with six rows, written by the description of it:
    LevelDB's log, with a CRC-32 of each record's kind and content."""
    import struct
    import zlib

    from wandb.proto import wandb_internal_pb2 as pb

    records = [pb.Record(run=pb.RunRecord(run_id="abc", display_name="r"))]
    for step in range(6):
        record = pb.Record()
        record.history.step.num = step
        item = record.history.item.add()
        item.key, item.value_json = "loss", json.dumps(step / 2)
        records.append(record)
    out = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for record in records:
        data = record.SerializeToString()
        out += struct.pack("<IHB", zlib.crc32(data, zlib.crc32(b"\1")), len(data), 1) + data
    return out


def _read(place: Place, data: bytes) -> Any:
    from altgrad.training.tracking import read_wandb
    path = place.folder / "r/wandb/offline-run-20260101_000000-abc/run-abc.wandb"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return either(read_wandb, place.folder / "r")


def _whole(place: Place) -> None:
    [part] = _read(place, _made(place))
    assert part["id"] == "abc"
    assert {s: r["loss"] for s, r in part["rows"].items()} == {s: s / 2 for s in range(6)}


def _cut(share: float, place: Place) -> None:
    "As far as it is whole, and not a row that was never written."
    data = _made(place)
    parts = _read(place, data[: int(len(data) * share)]) or []
    for part in parts:
        for step, row in part["rows"].items(): assert row == {"loss": step / 2}


def _flipped(at: int, bit: int, place: Place) -> None:
    "A record whose checksum differs is not believed."
    data = bytearray(_made(place))
    data[7 + at % (len(data) - 7)] ^= 1 << bit
    for part in _read(place, bytes(data)) or []:
        for step, row in part["rows"].items(): assert row == {"loss": step / 2}, row


def _mode(name: Any, place: Place) -> None:
    from altgrad.training.tracking import Mirror, RunFolder
    refused(Mirror, RunFolder(place.folder / "r"), name)


def _argument(value: str, place: Place) -> None:
    refused_command("train", "e4m3_fp8", f"--wandb={value}")


def _obstacle(kind: str, mode: str, place: Place) -> None:
    "Whatever the mirror finds, the run is whole, and nothing but lines is said."
    out = place.folder / "out"
    folder = out / "r"
    argv = ("train", "e4m3_fp8", *settings(place.base, max_steps=2), "--out", out)
    assert told(*argv, "--wandb", "off")[0] == 0
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "exit_reason": "running"}))
    wandb = folder / "wandb"
    if kind == "a file": wandb.write_text("x")
    elif kind == "a link to nothing": wandb.symlink_to("nowhere")
    elif kind == "a link to itself": wandb.symlink_to(wandb)
    else:
        wandb.mkdir()
        name = wandb / "altgrad-id"
        if kind == "an id that is a folder": name.mkdir()
        if kind == "an id that is empty": name.write_text("")
        if kind == "an id that is not UTF-8": name.write_bytes(b"\xff\xff")
        if kind == "an id with a path": name.write_text("../../x")
        if kind == "an id of 1 MB": name.write_text("x" * 10**6)
        if kind == "an id that is a link to nothing": name.symlink_to("nowhere")
        if kind == "a part that is rubbish":
            (wandb / "offline-run-20260101_000000-x").mkdir()
            (wandb / "offline-run-20260101_000000-x/run-x.wandb").write_bytes(b"\xff" * 100)
    code, _, err = told(*argv, "--wandb", mode)
    assert (
        code == 0 and "Traceback" not in err and all(len(line) <= 300 for line in err.splitlines())
    ), err[-300:]
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]


KEY = "a" * 40
CLOSED = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
ONLINE = {  # environment, and how the one warning begins
    "no key": ({}, "there is no key"),
    "a short key": ({"WANDB_API_KEY": "x"}, "WANDB_API_KEY invalid"),
    "a host that is closed": (CLOSED, "Failed to authenticate with http://127.0.0.1:9"),
    "a host that never answers": (
        {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:{port}"},
        "Failed to authenticate with http://127.0.0.1",
    ),
    "a host that is none": (
        {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "nonsense"},
        "1 validation error for Settings",
    ),
    "a project that cannot be": ({**CLOSED, "WANDB_PROJECT": "a/b:#?%"}, "Invalid project name"),
    "a folder that is a file": (CLOSED, "the mirror has stopped"),
    "a folder that is a link to nothing": (CLOSED, "the mirror has stopped"),
}


def _train_online(place: Place, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and error stream of a run in a process of its own,
    for wandb reads its environment once; a hang is ended with it by the case's limit."""
    pid, code = os.fork(), 1
    if pid == 0:
        try:
            for name in [name for name in os.environ if name.startswith("WANDB_")]:
                del os.environ[name]
            os.environ |= {"HOME": str(place.folder), **environment}
            argv = (
                "train", "e4m3_fp8", *settings(place.base, max_steps=2), "--out",
                place.folder / "out", "--wandb", "online",
            )
            (place.folder / "said").write_text(json.dumps(told(*argv)))
            code = 0
        finally: os._exit(code)
    try: code = os.waitpid(pid, 0)[1]
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    assert code == 0, "the process died"
    code, _, err = json.loads((place.folder / "said").read_text())
    return code, err


def _online(kind: str, place: Place) -> None:
    "The run is whole whatever W&B says: one line, and not the one that says that its time was up."
    environment, words = ONLINE[kind]
    folder = place.folder / "out/r"
    if "folder" in kind:
        assert (
            told(
                "train", "e4m3_fp8", *settings(place.base, max_steps=2), "--out",
                place.folder / "out", "--wandb", "off",
            )[0]
            == 0
        )
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**record, "exit_reason": "running"}))
        if kind == "a folder that is a file": (folder / "wandb").write_text("x")
        else: (folder / "wandb").symlink_to("nowhere")
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes connections, and says nothing
        code, err = _train_online(
            place,
            {key: value.format(port=deaf.getsockname()[1]) for key, value in environment.items()},
        )
    assert code == 0 and "Traceback" not in err, err[-300:]
    said = [line for line in err.splitlines() if line.startswith("wandb")]
    assert len(said) == 1 and said[0].startswith(f"wandb: {words}") and len(said[0]) <= 300, err[
        -600:
    ]
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]


def _project(name: str, place: Place) -> None:
    "A project that cannot be one is refused before the network is asked."
    os.environ["WANDB_MODE"], os.environ["WANDB_API_KEY"] = "offline", ""
    refused_command("workspace", name)


def _ledger(name: str, place: Place) -> None: refused_command("workspace", "a/b", "--ledger", name)


def cases(rng) -> Iterator[Case]:
    yield Case("mirrors", "a whole file", _whole, right=True)
    for i in range(40): yield Case("mirrors", f"cut to {i / 40:.1%}", partial(_cut, i / 40))
    for i in range(80):
        yield Case(
            "mirrors", f"flipped {i}", partial(_flipped, rng.randrange(10**6), rng.randrange(8))
        )
    for name in ("", "on", "ONLINE", None, 7, True, [], "off\n"):
        yield Case("mirrors", f"mode {name!r}", partial(_mode, name))
    for value in ("", "on", "OFF", "x" * 10_000, "\x1b[2J", "1"):
        yield Case("mirrors", f"--wandb {value[:20]!r}", partial(_argument, value))
    for kind in (
        "a file", "a link to nothing", "a link to itself", "an id that is a folder",
        "an id that is empty", "an id that is not UTF-8", "an id with a path", "an id of 1 MB",
        "an id that is a link to nothing", "a part that is rubbish",
    ):
        yield Case("mirrors", f"{kind}, off", partial(_obstacle, kind, "off"))
    for kind in ONLINE: yield Case("mirrors", f"online: {kind}", partial(_online, kind))
    for name in ("", "x", "a/b/c", "/", "a/", "/b"):
        yield Case("mirrors", f"workspace {name!r}", partial(_project, name))
    for name in ("none", "", "/dev/zero", "\x1b[2J"):
        yield Case("mirrors", f"workspace --ledger {name!r}", partial(_ledger, name))
