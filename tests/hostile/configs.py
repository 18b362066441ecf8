"""Configs: what a field holds, and what a YAML file is."""
from dataclasses import fields
from functools import partial
from typing import Iterator

from .core import Case, Place, either, refused, refused_command

NUMBERS = (
    "nan", "inf", "-inf", "1e999", "much", "", "[1]", "{a: 1}", "-1", "0x", "1_", "\u0661.x",
    "1" * 5000,
)
WORDS = (
    "nowhere", "", "x" * 3_000_000, "\x00", "E4M3\nE5M2", "\ud800", "../..", "{}", "None,",
    "\x1b[2J",
)
NAMES = ("", ".", "..", "a/b", "a\\b", ".hidden", "a\nb", "a\0b", "\x1b[2J", "\ud800", "\u202e", "x" * 5000, "x" * 256,
    "é" * 128, "../../elsewhere/x", "/elsewhere/x", "\t")
FREE = {"power", "name", "data"}
LONG = "x" * 200
FAULTS = {
    "a key twice": "format: E4M3\nlr: 0.1\nformat: E5M2\n",
    "a key twice, in flow": "{lr: 1, lr: 2}",
    "no mapping": "[1, 2]",
    "text": "hello",
    "number": "3",
    "an unknown key": "fromat: E4M3",
    "an alias": "name: &a x\nmodel: *a\n",
    "an anchor": "name: &a x\n",
    "a merge": "<<: {lr: 1}\n",
    "a tag": "lr: !!python/object/apply:os.system [ls]\n",
    "binary": "lr: !!binary aGVsbG8=\n",
    "a date": "lr: 2001-01-01\n",
    "no date": "lr: 2001-99-99\n",
    "a set": "lr: !!set {a}\n",
    "an open list": "lr: [1\n",
    "an open quote": "name: 'x\n",
    "a tab": "lr:\n\t1\n",
    "two documents": "lr: 1\n---\nlr: 2\n",
    "a control character": "lr: \x01\n",
    "NUL": "\0",
    "deep list": "[" * 100_000,
    "deep mapping": "{a: " * 5000,
    "deep blocks": "".join(" " * i + "a:\n" for i in range(300)),
    "a wide list": "lr: [" + "1," * 60_000 + "]",
    "a wide list of 2 MB": "lr: [" + "1," * 1_000_000 + "]",
    "many keys": "".join(f"k{i}: 1\n" for i in range(100_000)),
    "few thousand keys": "".join(f"k{i}: 1\n" for i in range(4000)),
    "a key of 1 MB": "x" * 1_000_000 + ": 1\n",
    "a value of 1 MB": "format: " + "x" * 1_000_000,
    "a key that is a list": "? [a, b]\n: 1\n",
    "a key that is a number": "1: 2\n",
    "a key that is true": "on: 2\n",
    "a key that is null": "~: 2\n",
    "a lone colon": ":",
    "a percent": "%YAML 9.9\n---\nlr: 1\n",
    "a billion laughs": "a: &a [x, x]\n"
    + "".join(
        f"{c}: &{c} [*{d}, *{d}, *{d}, *{d}, *{d}, *{d}, *{d}, *{d}, *{d}]\n"
        for c, d in zip("bcdefghij", "abcdefghi")
    ),
    "a bomb in one key": "lr: [&a [x, x, x, x, x, x, x, x], &b [*a, *a, *a, *a, *a, *a, *a, *a], "
                         "*b]\n",
    "sexagesimal": "max_steps: 1:30:00.5\n",
    "too large a number": "max_steps: " + "9" * 5000,
    "a list for a number": "lr: [0.1]",
    "a mapping for text": "format: {a: 1}",
    "true for a number": "max_steps: true",
    "true for text": "rule: true",
    "a float for a whole number": "max_steps: 1.5",
    "an escape": 'format: "\\x1b[2J"',
    "line breaks": 'format: "a\\n\\n\\nb"',
}
VALID = (
    "format: E4M3\nmax_steps: 20\nlr: 0.01\nrules: 'blocks.0.*: weight=E3M4'\nactivation: "
    "E4M3\nname: a run\n"
)
RIGHT = {
    "empty": "",
    "a comment": "# nothing\n",
    "one field": "format: E5M2\n",
    "flow": "{format: E5M2, lr: 0.1}",
    "null": "format: null\n",
    "a number as text": "lr: 1e-3\n",
    "with a mark": "\ufeffformat: E5M2\n",
    "Windows line ends": "format: E5M2\r\nlr: 0.5\r\n",
    "a letter beyond ASCII": "name: modèle\n",
    "a document mark": "---\nformat: E5M2\n...\n",
    "quoted": 'format: "E5M2"\n',
    "a folded value": "format: >-\n  E5M2\n",
    "all": VALID,
}


def _file(place: Place, text: str, binary: bytes | None = None):
    path = place.folder / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if binary is None else binary)
    return path


def _field(key: str, value: object, place: Place) -> None:
    from altgrad.training.config import make_config
    refused(make_config, {key: value})


def _fault(text: str, place: Place) -> None:
    from altgrad.training.config import load_config
    refused(load_config, _file(place, text))


def _by_command(text: str, place: Place) -> None:
    refused_command("train", _file(place, text), "--out", place.folder / "out")


def _right(text: str, place: Place) -> None:
    from altgrad.training.config import TrainConfig, load_config, make_config
    import yaml
    got = load_config(_file(place, text))
    want = yaml.safe_load(text.removeprefix("\ufeff")) or {}
    want = {key: float(value) if key == "lr" else value for key, value in want.items()}
    assert got == make_config({"name": "c", **want}, TrainConfig())


def _mutated(seed: int, binary: bytes, place: Place) -> None:
    """Whatever it is now: refused in a line,
    or a config that says the same when it is written and read again."""
    from altgrad.training.config import load_config
    got = either(load_config, _file(place, "", binary))
    if got is not None: assert load_config(_file(place, got.to_yaml())) == got


def _special(kind: str, place: Place) -> None:
    import os
    path = place.folder / "c.yaml"
    if kind == "a pipe": os.mkfifo(path)
    if kind == "a folder": path.mkdir()
    if kind == "a link to nothing": path.symlink_to("nowhere")
    if kind == "a link to itself": path.symlink_to(path)
    if kind == "/dev/zero": path.symlink_to("/dev/zero")
    if kind == "/dev/tty": path.symlink_to("/dev/tty")
    if kind == "a gigabyte":
        with open(path, "wb") as file: file.truncate(2**30)
    if kind == "not UTF-8": path.write_bytes(b"format: \xff\xfe")
    if kind == "UTF-16": path.write_bytes("format: E4M3".encode("utf-16"))
    for command in ("train", "compare"):
        refused_command(command, path, "--out", place.folder / "out")
    assert not (place.folder / "out").exists()


def _packaged(name: str, place: Place) -> None:
    from altgrad.training.experiment import find_config
    assert find_config(name, {"lr": "0.5"}).lr == 0.5


def mutations(rng, content: bytes) -> bytes:
    "Some bytes changed, cut, doubled or moved."
    data = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(5)
        if kind == 0 and at < len(data): data[at] = rng.randrange(256)
        elif kind == 1: del data[at : at + rng.randint(1, 8)]
        elif kind == 2:
            data[at:at] = bytes(
                rng.choice(b"{}[]:,&*!|>'\"%@`#-?\n\t 019eE.\xff\x00")
                for _ in range(rng.randint(1, 4))
            )
        elif kind == 3: data[at:at] = data[at : at + rng.randint(1, 20)]
        else: data = data[: max(1, at)]
        if not data: data = bytearray(b"x")
    return bytes(data)


# a rule that reads the setting: with the default, AdamW, it is refused
READ_BY = {"damping": "stiffness_adamw", "floor_octaves": "stiffness_adamw"}


def _good(key: str, value: object, place: Place) -> None:
    "A value that a field may have, given as text, is the field's."
    from altgrad.training.config import load_config, make_config
    config = make_config({key: str(value), **({"rule": READ_BY[key]} if key in READ_BY else {})})
    assert getattr(config, key) == value and type(getattr(config, key)) is type(value)
    assert load_config(_file(place, config.to_yaml())) == config


def cases(rng) -> Iterator[Case]:
    from altgrad.training.config import TrainConfig

    numbers = [
        f.name
        for f in fields(TrainConfig)
        if any(t in str(f.type) for t in ("int", "float")) and f.name not in FREE
    ]
    words = [f.name for f in fields(TrainConfig) if "str" in str(f.type) and f.name not in FREE]
    for key in numbers:
        for value in NUMBERS:
            yield Case("configs", f"{key}={value[:20]!r}", partial(_field, key, value))
        for value in (True, [], {}, b"1"):
            yield Case("configs", f"{key}: {value!r}", partial(_field, key, value))
    for key in words:
        for value in WORDS:
            if value in ("", "../..", "{}", "nowhere", "None,") and key in ("tokenizer", "interventions",
                "rules"): continue  # some of these are nothing to do, or found out later
            if key != "tokenizer":
                yield Case("configs", f"{key}={value[:20]!r}", partial(_field, key, value))
        for value in (1, 1.5, [], {}, b"E4M3"):
            yield Case("configs", f"{key}: {value!r}", partial(_field, key, value))
    for key in numbers:
        default = getattr(TrainConfig(), key)
        if key in ("beta1", "beta2", "dropout"): values: tuple = (0.25, 0.5)
        elif isinstance(default, int): values = (3, 7)
        elif isinstance(default, float): values = (0.5, 2.0)
        else:
            values = (
                (4, 5)
                if key in ("converge_window", "monitor_every")
                else ()
                if key == "shadow_every"
                else (0.5, 2.0)
            )
        for value in values:
            yield Case("configs", f"{key} is {value}", partial(_good, key, value), right=True)
    for key, values in {
        "storage": ("fp32", "master", "grid_nearest", "grid_stochastic", "bf16"),
        "rule": ("adamw", "madam", "grid_sgd"),
        "compute_dtype": ("float32", "bfloat16"),
        "tokenizer": ("bytes", "bpe-300"),
        "activation": ("E4M3",),
        "compile": ("off",),
    }.items():
        for value in values:
            yield Case("configs", f"{key} is {value}", partial(_good, key, value), right=True)
    for name in NAMES: yield Case("configs", f"name={name[:20]!r}", partial(_field, "name", name))
    for name, text in FAULTS.items():
        yield Case("configs", name, partial(_fault, text))
        yield Case("configs", f"{name}, on the command line", partial(_by_command, text))
    for name, text in RIGHT.items(): yield Case("configs", name, partial(_right, text), right=True)
    for seed in range(150):
        yield Case(
            "configs", f"mutated {seed}", partial(_mutated, seed, mutations(rng, VALID.encode()))
        )
    for kind in (
        "a pipe", "a folder", "a link to nothing", "a link to itself", "/dev/zero", "/dev/tty",
        "a gigabyte", "not UTF-8", "UTF-16",
    ):
        yield Case("configs", kind, partial(_special, kind))
    for name in ("bf16_baseline", *(f"e{e}m{7 - e}_fp8" for e in range(8))):
        yield Case("configs", f"packaged {name}", partial(_packaged, name), right=True)
