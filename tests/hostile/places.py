"""Places to write to and to read from, and streams that cannot take what is said."""
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Iterator

from .core import Case, Place, assert_line, refused_command, settings, works

ALTGRAD = str(Path(sys.executable).parent / "altgrad")
KINDS = (
    "a file", "under a file", "a link to nothing", "a link to itself", "two links in a circle",
    "under a link to nothing", "a pipe", "a device", "under a device", "/proc", "a long name",
    "a long path", "a link to a file", "a socket",
)


def place_of(kind: str, folder: Path) -> Path:
    "Where nothing can be written."
    path = folder / "p"
    if kind in ("a file", "under a file"): path.write_text("x")
    if kind in ("a link to nothing", "under a link to nothing"): path.symlink_to("nowhere")
    if kind == "a link to itself": path.symlink_to(path)
    if kind == "two links in a circle":
        path.symlink_to("q")
        (folder / "q").symlink_to("p")
    if kind == "a pipe": os.mkfifo(path)
    if kind == "a link to a file":
        (folder / "f").write_text("x")
        path.symlink_to("f")
    if kind == "a socket":
        import socket
        with socket.socket(socket.AF_UNIX) as s: s.bind("p")
    if kind == "a device": return Path("/dev/null")
    if kind == "under a device": return Path("/dev/null/x")
    if kind == "/proc": return Path("/proc/1/nowhere")
    if kind == "a long name": return folder / ("x" * 300)
    if kind == "a long path": return folder / "/".join(["x" * 200] * 30)
    return path / "x" if kind.startswith("under") else path


def _out(command: str, kind: str, place: Place) -> None:
    "Refused before anything is trained."
    path, matrix = place_of(kind, place.folder), place.folder / "m.yaml"
    if command == "train": argv = ("train", "e4m3_fp8", *settings(place.base), "--out", path)
    elif command == "compare":
        argv = (
            "compare", "bf16_baseline", "e4m3_fp8", *settings(place.base)[:-4], "--set",
            f"data=path:{place.base}/text.txt", "--out", path,
        )
    else:
        from .matrices import MATRIX
        matrix.write_text(MATRIX)
        argv = ("sweep", matrix, "--out", path if command == "sweep" else place.folder / "out", "--checkpoints",
            place.base / "checkpoints" if command == "sweep" else path, "--corpus", f"tiny=path:{place.base}/text.txt")
    refused_command(*argv)


def _reads(command: str, kind: str, place: Place) -> None:
    refused_command(*command.split(), place_of(kind, place.folder))


def _program(
    argv: list, place: Place, setup: str = "", tail: str = "", **env: str
) -> subprocess.CompletedProcess:
    "The command as a program, under a shell."
    words = " ".join(f"'{a}'" for a in argv)
    return subprocess.run(
        ["sh", "-c", f"{setup} {ALTGRAD} {words} {tail}"],
        capture_output=True,
        timeout=60,
        env={**os.environ, **env},
        cwd=place.folder,
    )


def _stream(argv: list, tail: str, code: int, place: Place) -> None:
    done = _program(argv, place, tail=tail)
    err = done.stderr.decode()
    assert done.returncode == code and "Traceback" not in err and "Exception" not in err, (
        done.returncode,
        err[-400:],
    )
    if code and "2>" not in tail:
        assert len(err.splitlines()) == 1, err
        assert_line(err.rstrip("\n"))


def _gone(argv: list, place: Place) -> None:
    done = _program(argv, place, setup="mkdir gone && cd gone && rmdir ../gone &&")
    err = done.stderr.decode()
    assert done.returncode == 2 and len(err.splitlines()) == 1 and err.startswith("altgrad: "), (
        done.returncode,
        err[-400:],
    )


def _ascii(name: str, encoding: str, place: Place) -> None:
    "A name that the terminal's encoding has not got: said with escapes."
    path = place.folder / os.fsdecode(name.encode("utf-8", "surrogateescape"))
    done = _program(["watch", path], place, PYTHONIOENCODING=encoding, LC_ALL="C")
    err = done.stderr.decode("utf-8", "replace")
    assert (
        done.returncode == 2
        and "Traceback" not in err
        and len(err.splitlines()) == 1
        and "neither a run" in err
    ), (done.returncode, err[-400:])


def _odd_out(name: str, place: Place) -> None:
    "A folder with an odd name is a folder."
    out = place.folder / os.fsdecode(name.encode("utf-8", "surrogateescape"))
    works(
        "train", "e4m3_fp8", *settings(place.base, max_steps=1), "--out", out, "--wandb", "off",
        "--json",
    )
    assert (out / "r/metrics.jsonl").read_text().count("\n") == 1


def cases(rng) -> Iterator[Case]:
    for kind in KINDS:
        for command in ("train", "compare", "sweep", "sweep --checkpoints"):
            if command == "sweep --checkpoints" and kind in ("a link to a file",): continue
            yield Case("places", f"{command}: {kind}", partial(_out, command, kind))
        for command in ("watch --once", "autopsy", "replay x --ledger"):
            if not (command == "replay x --ledger" and kind == "nothing"):
                yield Case("places", f"{command}: {kind}", partial(_reads, command, kind))
    for name, argv in {
        "formats": ["formats"],
        "formats as JSON": ["formats", "--json"],
        "a format": ["formats", "E4M3", "--codes"],
        "help": ["--help"],
    }.items():
        yield Case("places", f"{name} to a full device", partial(_stream, argv, "> /dev/full", 2))
        yield Case("places", f"{name} to a closed stream", partial(_stream, argv, ">&-", 0))
    yield Case(
        "places", "an error to a full device",
        partial(_stream, ["formats", "E9"], "2> /dev/full", 2),
    )
    yield Case(
        "places", "an error to a closed stream", partial(_stream, ["formats", "E9"], "2>&-", 2)
    )
    yield Case(
        "places", "to head", partial(_stream, ["formats", "--json"], "| head -c 10 > /dev/null", 0),
        right=True,
    )
    for argv in (["formats"], ["train", "e4m3_fp8"], ["--help"]):
        yield Case("places", f"{' '.join(argv)} in a folder that is gone", partial(_gone, argv))
    for name in ("modèle", "日本", "\udcff", "a\nb"):
        for encoding in ("ascii", "latin-1", "utf-8"):
            yield Case("places", f"{name!r} in {encoding}", partial(_ascii, name, encoding))
        yield Case("places", f"out {name!r}", partial(_odd_out, name), right=True)
    for name in ("with spaces", "-x", "x" * 200, "a'b", "%s{}", "~"):
        yield Case("places", f"out {name[:20]!r}", partial(_odd_out, name), right=True)
