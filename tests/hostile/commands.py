"""The command line: arguments that are missing, empty, too many, too long, or of another kind."""
from functools import partial
from typing import Iterator

from .core import Case, Place, refused_command, told, works

COMMANDS = (
    "train", "compare", "sweep", "replay", "max-lr", "watch", "autopsy", "workspace", "formats",
    "conform",
)
ODD = (
    "", " ", "\x00", "\x1b[2J", "x" * 100_000, "\ud800", "a\nb\nc", "--", "=", "%s%n", "../../..",
    "{}", "\u202e", "日本", "'", "$(reboot)", "-9", "nan",
)
NUMBERS = (
    "", "x", "nan", "inf", "-1", "0", "1e999", "1.5", "9" * 5000, "\u0663x", "1,5", "0x10", "--1",
    " ",
)
FORMATS = (
    "", "E", "E4", "E4M", "M3", "E4M33b", "E9M9", "E-1M8", "E4M3b", "E4M3bx", "E4M3b7fnn",
    "E4M3b99999999999", "E4M3 E5M2", "E4M3\n", "float8", "fp8", "x" * 100_000, "\ud800", "\x1b[2J",
    "E4M3b7ieee7", "E999999999M1b0", "E1M999999999b0", "e0m0b0", "E0M0b1", "\u0395\u0034M3",
)
SETS = (
    "lr", "=", "=1", "lrr=1", "lr=", "lr=x", "lr==1", " =1", "lr=1e999", "lr=nan", "\x00=1",
    "x" * 10_000 + "=1", "lr=" + "x" * 100_000, "\ud800=1", "LR=1", "l r=1", "lr-1", "seed=-1",
    "seed=1.5", "format=E9", "max_steps=0", "device=tpu", "task=other", "data=none",
)
BESIDE = (
    "--set", "--out", "--wandb", "--json=x", "--nonsense", "-x", "--jsonn", "--wandb=maybe",
    "--wandb=", "--set=",
)
SWEEP = {
    "--workers": NUMBERS,
    "--replicas": NUMBERS,
    "--executor": ("", "x", "slurm", "LOCAL"),
    "--ray-address": (
        "", "x", "host", "host:", ":1", "host:x", "host:99999", "http://host:1", "host:1:2"
    ),
    "--ray-gpus": ("", "x", "nan", "-1", "2"),
    "--corpus": ("", "x", "=", "=x", "x=", "tiny=none", "tiny=path:none"),
}
SEARCH = {
    "--power": ("", "x", "nan", "inf", "1e999"),
    "--guess": ("", "x", "nan", "inf", "0", "-1", "1e999", "1e200"),
    "--workers": NUMBERS[:6],
    "--rule": ("", "x", "muon", "ADAMW"),
    "--storage": ("", "x", "fp16"),
    "--on": ("", "zzz", "\x1b[2J", "x" * 10_000),
    "--corpus": ("", "x", "=x", "eurlex=none", "eurlex=path:none"),
}


def _wrong(argv: tuple, place: Place) -> None:
    "Refused, and nothing written."
    refused_command(*argv)
    assert not list(place.folder.iterdir()), f"wrote {list(place.folder.iterdir())}"


def _sweep(option: str, value: str, place: Place) -> None:
    from .matrices import MATRIX
    (place.folder / "m.yaml").write_text(MATRIX)
    refused_command(
        "sweep", place.folder / "m.yaml", "--out", place.folder / "out", "--checkpoints",
        place.folder / "c", f"{option}={value}",
    )
    assert {p.name for p in place.folder.iterdir()} == {"m.yaml"}


def _format(name: str, place: Place) -> None:
    "The facts of a format as JSON, compared with the definition."
    import json
    facts = json.loads(works("formats", name, "--json"))
    e, m = facts["exponent_bits"], facts["mantissa_bits"]
    if facts["subnormals"] and e > 0 and m > 0:
        assert facts["min_subnormal"] == 2.0 ** (1 - facts["bias"] - m)
    assert facts["bits"] == e + m + facts["signed"]


def _help(command: str, place: Place) -> None:
    code, out, err = told(command, "--help")
    assert code == 0 and "usage: altgrad" in out and not err


def cases(rng) -> Iterator[Case]:
    from altgrad.numbers.formats import FORMATS as REGISTRY

    for command in COMMANDS:
        yield Case("commands", f"{command} --help", partial(_help, command), right=True)
        if command != "formats":
            yield Case("commands", f"{command} alone", partial(_wrong, (command,)))
        yield Case(
            "commands", f"{command} --nonsense", partial(_wrong, (command, "x", "--nonsense"))
        )
        for value in ODD:
            more = {
                "sweep": ("--out", "o"), "replay": ("--ledger", "none"), "max-lr": ("--out", "o")
            }.get(command, ())
            if value in ("--", "-9"): continue
            if command == "workspace" and value not in ("", "="): continue  # it asks the network
            yield Case(
                "commands", f"{command} {value[:20]!r}", partial(_wrong, (command, value, *more))
            )
    for value in (*ODD, *COMMANDS[0:0], "trian", "TRAIN", "train "):
        yield Case("commands", f"command {value[:20]!r}", partial(_wrong, (value,)))
    for value in FORMATS:
        yield Case("commands", f"formats {value[:20]!r}", partial(_wrong, ("formats", value)))
    for value in FORMATS[:12]:
        yield Case(
            "commands", f"formats {value[:20]!r} as JSON",
            partial(_wrong, ("formats", value, "--json", "--codes")),
        )
    for value in SETS:
        for command in ("train", "compare"): yield Case("commands", f"{command} --set {value[:20]!r} {len(value)}",
            partial(_wrong, (command, "e4m3_fp8", f"--set={value}")))
    for value in BESIDE:
        for command in ("train", "compare"):
            yield Case(
                "commands", f"{command} {value}", partial(_wrong, (command, "e4m3_fp8", value))
            )
    for name in (
        "nope", "E4M3", "e4m3", "bf16", "e4m3_fp8 ", "none.yaml", "none.yml", "e4m3_fp8.yaml"
    ):
        for command in ("train", "compare"):
            yield Case("commands", f"{command} config {name!r}", partial(_wrong, (command, name)))
    for argv in (
        ("compare", "e4m3_fp8", "e4m3_fp8"),
        ("compare", "e4m3_fp8", "nope"),
        ("train", "a", "b"),
        ("formats", "E4M3", "E5M2"),
        ("formats", "--codes"),
        ("watch", "a", "b"),
        ("--version-of-nothing",),
        ("compare", "e4m3_fp8", "--set", "task=multilabel"),
    ):
        yield Case("commands", " ".join(argv), partial(_wrong, argv))
    for option, values in SWEEP.items():
        for value in values:
            if (option, value) in (("--workers", "1"), ("--ray-address", "")): continue
            yield Case(
                "commands", f"sweep {option} {value[:20]!r} {len(value)}",
                partial(_sweep, option, value),
            )
    for option, values in SEARCH.items():
        for value in values: yield Case("commands", f"max-lr {option} {value[:20]!r} {len(value)}",
            partial(_wrong, ("max-lr", "E4M3", "--out", "o", f"{option}={value}")))
    for name in ("none", "bfloat16", "E9M9", "", "all all x"):
        yield Case("commands", f"max-lr {name!r}", partial(_wrong, ("max-lr", name, "--out", "o")))
    for name in (
        *REGISTRY,
        *(
            f"E{e}M{m}b{b}"
            for e, m in ((2, 3), (3, 2), (4, 3), (5, 2), (6, 1))
            for b in (0, 1, 5, -3)
        ),
        "e4m3",
        "E4M3B8",
        "float8_e4m3fn",
    ):
        yield Case("commands", f"formats {name} works", partial(_format, name), right=True)
