"""Matrices of sweeps: every value of every key, and sizes that nobody means."""
from functools import partial
from typing import Iterator

import yaml

from .configs import FAULTS, mutations
from .core import Case, Place, either, refused, refused_command, works

MATRIX = """
name: test
tier: 0
corpus: tiny
checkpoints: [tiny-0]
arms:
  - {format: E4M3, storage: [fp32, grid_stochastic], power: [0, 1], lr: 0.01}
tune: {seeds: [1000], points: 3, most: 5}
confirm: {seeds: [0, 1]}
extend_power: {step: 0.5, limit: 2}
task: {steps: 12, batch_size: 4, warmup: 2, chunks: 4, windows: 2, every: 4}
"""
BAD = (
    None, True, -1, 1.5, float("nan"), float("inf"), "x", "", [], [[1]], {"a": 1}, "\x1b[2J",
    "x" * 5000, 10**30,
)
PLACES = {  # where a value stands, and which of the bad ones are good there
    ("name",): ("x", "x" * 5000),
    ("tier",): (),
    ("corpus",): ("x", "x" * 5000),
    ("checkpoints",): (),
    ("arms",): (),
    ("tune",): (),
    ("confirm",): (),
    ("extend_power",): (),
    ("task",): (),
    ("tune", "seeds"): (),
    ("tune", "points"): (),
    ("tune", "most"): (),
    ("confirm", "seeds"): (),
    ("extend_power", "step"): (1.5,),
    ("extend_power", "limit"): (1.5,),
    ("arms", 0, "format"): (),
    ("arms", 0, "storage"): (),
    ("arms", 0, "power"): (-1, 1.5),
    ("arms", 0, "lr"): (1.5, 10**30),
    ("arms", 0, "rule"): (),
    ("arms", 0, "placement"): (),
    ("arms", 0, "floor_octaves"): (1.5, 10**30),
    ("arms", 0, "nonsense"): (),
    ("nonsense",): (),
    **{
        ("task", key): ()
        for key in ("steps", "batch_size", "warmup", "chunks", "windows", "every", "nonsense")
    },
    ("task", "beta1"): (),
    ("task", "beta2"): (),
    ("task", "eps"): (),
}
MORE = {
    ("task", "steps"): (0, "12", 10**9),
    ("task", "batch_size"): (0, 2**62),
    ("task", "warmup"): (0, 13),
    ("task", "chunks"): (0,),
    ("task", "windows"): (0,),
    ("task", "every"): (0,),
    ("task", "beta1"): (1, 2),
    ("task", "beta2"): (1, -0.5),
    ("task", "eps"): (0, 2),
    ("tune", "points"): (2, 4, 10**9),
    ("tune", "most"): (1, 10**9),
    ("tune", "seeds"): ([1, 1], [0], [1.0], [-1], 0),
    ("confirm", "seeds"): ([1000], [1, 1], ["0"], [True]),
    ("checkpoints",): (
        ["tiny-0", "tiny-0"],
        "huge-0",
        "tiny-" + "9" * 500,
        ["tiny-x"],
        ["tiny-0", "tiny-1"],
        "../tiny-0",
        ["tiny-0", None],
        "tiny-\u0660x",
    ),
    ("extend_power",): ({}, {"step": 0}, {"limit": 1}, {"step": 0, "limit": 0}, {"step": 0.5, "limit": 0.5}),
    ("extend_power", "step"): (-0.5, 1000, 1e-9),
    ("extend_power", "limit"): (-2, 1e9),
    ("arms",): ([{}], [1], "E4M3", [None]),
    ("arms", 0, "power"): (101, -1e9),
    ("arms", 0, "lr"): (0, 1e300, [0.1, 0.2], "1e-3"),
    ("arms", 0, "format"): (["E4M3", "E4M3"], "bfloat16", ["E4M3", 8], "E9M9"),
    ("arms", 0, "storage"): (["fp32", "fp16"], ["fp32", "fp32"]),
    ("arms", 0, "rule"): ("muon", "sgdm"),
    ("arms", 0, "exclude"): ([{"nonsense": 1}], "x", [[]], {"format": "E4M3"}, [{"format": "E5M2"}],
                            {}, [{"power": 1}, {}], [{"power": 0}, {"power": 1}]),
    ("corpus",): (["a", "b"],),
}
RIGHT = {
    ("name",): ("another", "modèle"),
    ("tier",): (1, 99),
    ("tune", "seeds"): ([7], 7, [5, 6, 7]),
    ("tune", "points"): (3, 5),
    ("tune", "most"): (5, 99),
    ("confirm", "seeds"): ([9], 9),
    ("extend_power",): ({"step": 0.5, "limit": 1}, {"step": 1, "limit": 3}),
    ("task",): ({}, {"steps": 30}, {"beta1": 0}),
    ("arms", 0, "lr"): (1, 0.5, 1e-9),
    ("arms", 0, "power"): (0, -1, [0, 0.5]),
    ("arms", 0, "exclude"): ([{"power": 1}],),
    ("arms", 0, "format"): ("E0M7", ["E0M7", "E5M2"], "E4M3b9"),
    ("checkpoints",): ("tiny-0", ["tiny-7"]),
}


def _with(where: tuple, value: object) -> str:
    given = yaml.safe_load(MATRIX)
    at = given
    for key in where[:-1]: at = at[key]
    at[where[-1]] = value
    return yaml.safe_dump(given, allow_unicode=True)


def _wrong(text: str, place: Place) -> None:
    from altgrad.evidence.sweep import read_matrix
    refused(read_matrix, text)


def _wrong_command(text: str, place: Place, words: str = "") -> None:
    "A dry run does not say yes either, and makes nothing."
    path = place.folder / "m.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    said = refused_command(
        "sweep", path, "--out", place.folder / "out", "--dry-run", "--checkpoints",
        place.folder / "checkpoints", "--corpus", f"tiny=path:{place.base}/text.txt",
    )
    assert words in said, said
    assert {p.name for p in place.folder.iterdir()} == {"m.yaml"}


def _right(text: str, place: Place) -> None:
    "Read, and planned: as many runs as a count by hand says."
    from altgrad.evidence.sweep import plan, read_matrix
    given, matrix = yaml.safe_load(text), read_matrix(text)
    size = lambda value: len(value) if isinstance(value, list) else 1
    arms = [
        (f, s, p)
        for entry in given["arms"]
        for f in _listed(entry["format"])
        for s in _listed(entry["storage"])
        for p in _listed(entry["power"])
        if not any(
            all({"format": f, "storage": s, "power": p}[k] in _listed(v) for k, v in e.items())
            for e in entry.get("exclude", [])
        )
    ]
    assert len(matrix.cells) == len(arms)
    assert len(plan(matrix, {}.get).jobs) == len(arms) * given["tune"]["points"] * size(
        given["tune"]["seeds"]
    )


def _listed(value): return value if isinstance(value, list) else [value]


def _mutated(text: bytes, place: Place) -> None:
    from altgrad.evidence.sweep import plan, read_matrix
    matrix = either(read_matrix, text)
    if matrix is not None:
        assert len(plan(matrix, {}.get).jobs) == len(matrix.cells) * matrix.points * len(
            matrix.tune_seeds
        )


def _large(axes: int, place: Place) -> None:
    "More arms than are allowed; a thousand in two storages are not, so there are two formats, too."
    keys = ("power", "floor_octaves", "placement")[:axes]
    entry = "".join(f"    {key}: [{', '.join(map(str, range(1000)))}]\n" for key in keys)
    _wrong_command(
        MATRIX.replace(
            "  - {format: E4M3, storage: [fp32, grid_stochastic], power: [0, 1], lr: 0.01}\n",
            f"  - format: [E4M3, E5M2]\n    storage: [fp32, master]\n{entry}    lr: 0.1\n",
        ),
        place,
        "arms; allowed: at most",
    )


def _dry(place: Place) -> None:
    path = place.folder / "m.yaml"
    path.write_text(MATRIX)
    out = works(
        "sweep", path, "--out", place.folder / "out", "--dry-run", "--checkpoints",
        place.base / "checkpoints", "--corpus", f"tiny=path:{place.base}/text.txt",
    )
    assert "stage tune: 12 runs" in out and len(out.splitlines()) == 13


def _real(path: str, place: Place) -> None:
    from altgrad.evidence.sweep import read_matrix
    from pathlib import Path
    assert read_matrix(Path(path).read_bytes()).cells


def cases(rng) -> Iterator[Case]:
    from pathlib import Path

    for where, good in PLACES.items():
        for number, value in enumerate([
            *(v for v in BAD if not any(v is g or type(v) is type(g) and v == g for g in good)),
            *MORE.get(where, ()),
        ]):
            name = (
                f"{'.'.join(map(str, where))} = {str(value)[:30]!r} ({type(value).__name__} "
                f"{number})"
            )
            yield Case(
                "matrices", name,
                partial(_wrong_command if rng.random() < 0.3 else _wrong, _with(where, value)),
            )
    for where in (w for w in MORE if w not in PLACES):
        for value in MORE[where]:
            yield Case("matrices", f"{where} = {value!r}", partial(_wrong, _with(where, value)))
    for name, text in FAULTS.items():
        yield Case("matrices", name, partial(_wrong, text))
        yield Case(
            "matrices", f"{name}, appended",
            partial(_wrong, MATRIX + "note: " + text.replace("\n", "\n  ")),
        )
    for where, values in RIGHT.items():
        for value in values:
            yield Case(
                "matrices", f"right {where} = {value!r}", partial(_right, _with(where, value)),
                right=True,
            )
    for axes in (1, 2, 3):
        yield Case("matrices", f"{axes} axes of a thousand", partial(_large, axes))
    for seed in range(120):
        yield Case(
            "matrices", f"mutated {seed}", partial(_mutated, mutations(rng, MATRIX.encode()))
        )
    for path in sorted(
        (Path(__file__).resolve().parents[2] / "nbs/studies/matrices").rglob("*.yaml")
    ):
        yield Case("matrices", f"real {path.name}", partial(_real, str(path)), right=True)
    yield Case("matrices", "a dry run", _dry, right=True)
