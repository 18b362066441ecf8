"""Trains ten million parameters on EUR-Lex in every arm of the second protocol, and stores the runs.

python nbs/studies/experiments/ten_million.py --out FOLDER --data path:FILE
python nbs/studies/experiments/ten_million.py --out FOLDER --store

The first makes the runs that are not stored yet, in the order of the protocol, one after the other on
all cores; it goes on where it was stopped. `--arms NAME,...` makes some of them alone. The second adds
what is finished to nbs/results/ten_million, for nbs/studies/ten_million.ipynb, which says what is expected.
"""
import argparse
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from altgrad.basics import InputError, unknown, write_atomic
from altgrad.training.config import TrainConfig
from altgrad.training.experiment import Interval, compare, find_config, interval, read_arm, with_seeds
from altgrad.training.tracking import RunFolder
from altgrad.views.autopsy import autopsy
from altgrad.watching.series import read_histograms, read_series

HERE = Path(__file__).resolve().parents[2] / "results/ten_million"
BASE, WIDE = "ten_million/bf16_baseline", "ten_million/e5m2_fp8"
RESHAPED = "e7m0_fp8_reshaped"  # S^-1 at twice the rate: what the tuning at 0.4M found beside AdamW's
SEEDED = (  # with three seeds
    BASE, WIDE, "ten_million/e4m3_fp8", "ten_million/e7m0_fp8",
    "ten_million/e4m3_fp8:storage=grid_stochastic", "ten_million/e7m0_fp8:storage=grid_stochastic",
    f"ten_million/e7m0_fp8:name=ten_million_{RESHAPED},storage=grid_stochastic,rule=stiffness_adamw,"
    "power=-1,floor_octaves=8,rule_lr=0.002",
)
SINGLE = (
    "ten_million/e3m4_fp8", "ten_million/e4m3_fp8:storage=grid_nearest", "ten_million/e7m0_fp8:storage=grid_nearest",
    "ten_million/e4m3_fp8:storage=grid_residual4,moments=dynamic8",
)
HALVED = (  # is what looks like a gain of noise a rate too high for master weights? part 8 of the second protocol
    "ten_million/e7m0_fp8:name=ten_million_e7m0_fp8_half_rate,lr=0.0005",
    "ten_million/e7m0_fp8:name=ten_million_e7m0_fp8_grid_stochastic_half_rate,storage=grid_stochastic,lr=0.0005",
)
DENSE, SPARSE = 1, 20  # steps between stored numbers
KEPT = {  # what is stored of single layers, and how often; and of all of them together
    "shadow/cosine": DENSE, "gradients/l2": SPARSE, "gradients/snr": SPARSE,
    "gradients/dead_neurons": SPARSE, "updates/code_unchanged_rate": SPARSE,
    "updates/bit_stall_rate": SPARSE, "quantization/underflow_rate": SPARSE,
}
STILL = "code_unchanged_rate", "bit_stall_rate"  # with master weights, and on the grid
PICTURES = 8  # steps of which a run's histogram is stored


def configs(specs: Iterable[str], data: str) -> list[TrainConfig]:
    "The arms, trained on a text; eagerly on every device, as the first of them were."
    return [find_config(spec, {"data": data, "compile": "off"}) for spec in specs]


def planned(data: str) -> dict[str, TrainConfig]:
    "All runs by name, in the order in which they are made."
    seeded = chain.from_iterable(with_seeds(configs(SEEDED, data), seeds=3))
    return {c.name.removeprefix("ten_million_"): c for c in (*seeded, *configs(SINGLE + HALVED, data))}


def chosen(arms: str | None, data: str, stored: Iterable[str]) -> list[TrainConfig]:
    "The runs that are asked for and not stored yet; InputError for a name that is none."
    runs = planned(data)
    names = arms.split(",") if arms else list(runs)
    for name in names:
        if name not in runs: raise unknown("run", name, runs)
    return [runs[name] for name in names if runs[name].name not in set(stored)]


def train(out: Path, data: str, arms: str | None = None, stored: Path = HERE) -> None:
    "Makes the runs that are neither stored nor finished."
    for config in chosen(arms, data, read_stored(stored).runs): compare([config], out)


def without_place(entry: dict[str, Any]) -> dict[str, Any]:
    "A run's config and record, with the text's name in place of where it lay."
    kind, _, place = entry["config"]["data"].partition(":")
    name = f"{kind}:{Path(place).name}" if place else kind
    config = entry["config"] | {"data": name}
    record = {k: v for k, v in entry["record"].items() if k != "bit_histogram"}
    return entry | {"config": config, "record": record | {"corpus": record["corpus"] | {"name": name}}}


def told(folder: RunFolder) -> list[dict[str, Any]]:
    "What happened in a run, with its steps."
    return [{"step": row["step"], **e} for row in folder.metrics() for e in row.get("events", ())]


def run_row(path: Path) -> dict[str, Any]:
    "A finished run as a line of runs.jsonl."
    folder, found = RunFolder(path), autopsy(path)
    speed = [row["tokens_per_s"] for row in folder.metrics()]
    return without_place(read_arm(path)) | {
        "events": told(folder), "autopsy": str(found).splitlines(), "tokens_per_s": float(np.median(speed)),
    }


def is_kept(path: str, step: int) -> bool:
    "Whether a number of a series is stored."
    group, *_, name = path.split("/")
    every = KEPT.get(f"{group}/{name}")
    return every is not None and (step == 1 or step % every == 0)


def numbers(path: Path) -> Iterator[dict[str, Any]]:
    "The rows of series.parquet of a run."
    for place, (steps, values) in read_series(path / "series").items():
        for step, value in zip(steps.tolist(), values.tolist()):
            if is_kept(place, step):
                yield {"run": path.name, "path": place, "step": step, "value": value}


def pictures(path: Path) -> Iterator[dict[str, Any]]:
    "The rows of histograms.parquet of a run: counts by code of all layers at some steps."
    series = list(read_histograms(path / "series").values())
    if not series: return
    steps, total = series[0][0], sum(counts.astype(np.int64) for _, counts in series)
    for i in np.unique(np.linspace(0, len(steps) - 1, PICTURES).round().astype(int)):
        yield {"run": path.name, "step": int(steps[i]), "counts": total[i].tolist()}


def table(rows: list[dict[str, Any]], path: Path, kept: frozenset[str]) -> None:
    "Adds rows to parquet, beside those of the runs that are kept; numbers with the digits that were measured."
    found = pa.Table.from_pylist(rows)
    if "value" in found.column_names:
        place = found.column_names.index("value")
        found = found.set_column(place, "value", found.column("value").cast(pa.float32()))
    if path.is_file():
        before = pq.read_table(path)
        mask = pc.is_in(before.column("run"), pa.array(sorted(kept), pa.string()))
        found = pa.concat_tables([before.filter(mask).cast(found.schema), found])
    write_atomic(path, lambda file: pq.write_table(found, file, compression="zstd"))


def finished(out: Path) -> list[Path]:
    "The folders of finished runs; InputError where there is none."
    paths = [p.parent for p in sorted(out.glob("*/run.json"))]
    ended = {p: json.loads((p / "run.json").read_text())["exit_reason"] for p in paths}
    found = [p for p in paths if ended[p].startswith(("finished", "stopped"))]
    if not found: raise InputError(f"{out} holds no finished run")
    return found


def store(out: Path, to: Path = HERE) -> None:
    "Adds the finished runs to those of the page; InputError where they were trained on another text."
    paths = finished(out)
    before = read_stored(to).runs
    rows = {path.name: run_row(path) for path in paths}
    kept = frozenset(before) - set(rows)
    texts = {row["record"]["corpus"]["hash"] for row in (*(before[name] for name in kept), *rows.values())}
    if len(texts) > 1: raise InputError(f"{out} and {to} hold runs on {len(texts)} texts; allowed: one")
    to.mkdir(parents=True, exist_ok=True)
    table([row for path in paths for row in numbers(path)], to / "series.parquet", kept)
    table([row for path in paths for row in pictures(path)], to / "histograms.parquet", kept)
    lines = [json.dumps(row, allow_nan=False) for _, row in sorted({**{n: before[n] for n in kept}, **rows}.items())]
    write_atomic(to / "runs.jsonl", "\n".join(lines) + "\n")


# what was said of the runs, and what they show

Series = dict[str, tuple[np.ndarray, np.ndarray]]  # path: steps, values


class Stored(NamedTuple):
    "The stored runs."
    runs: dict[str, dict[str, Any]]
    series: dict[str, Series]
    histograms: dict[str, tuple[np.ndarray, np.ndarray]]  # run: steps, counts [n, codes]

    def loss(self, name: str) -> float:
        "The final validation loss of a run, in nats a byte; KeyError for one that was not made."
        last = self.runs[f"ten_million_{name}"]["val"][-1]
        return math.inf if last[1] is None else last[1]

    def unchanged(self) -> dict[str, float]:
        "The share of codes that an update leaves as they are, by run, mean over the run."
        paths = [f"updates/all/{name}" for name in STILL]
        return {run: float(found[path][1].mean()) for run, found in self.series.items()
                for path in paths if path in found}


def read_stored(folder: Path = HERE) -> Stored:
    "Reads what `store` wrote; nothing where it has not."
    if not (folder / "runs.jsonl").is_file(): return Stored({}, {}, {})
    rows = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    series: dict[str, Series] = {}
    for (run, path), part in pq.read_table(folder / "series.parquet").to_pandas().groupby(["run", "path"]):
        series.setdefault(run, {})[path] = (part["step"].to_numpy(), part["value"].to_numpy())
    counts = pq.read_table(folder / "histograms.parquet").to_pandas().groupby("run")
    histograms = {run: (part["step"].to_numpy(), np.stack(part["counts"])) for run, part in counts}
    return Stored({row["record"]["name"]: row for row in rows}, series, histograms)


class Finding(NamedTuple):
    "What was said, what was found, and whether it holds; None where a run is missing."
    said: str
    found: str
    holds: bool | None


ENDS = "", "_seed43", "_seed44"  # of a run's name, by seed


def seeds_of(s: Stored, name: str) -> list[float]:
    "The final losses of a run's three seeds."
    return [s.loss(f"{name}{end}") for end in ENDS]


def each(found: Sequence[str], unit: str) -> str:
    "What was found with each seed."
    return f"{', '.join(found)} {unit}{'' if found[1:] else ', one seed'}"


def shares_above(s: Stored, name: str, base: str) -> list[float]:
    "How far a run ends above another, in percent, by seed."
    return [100 * (a / b - 1) for a, b in zip(seeds_of(s, name), seeds_of(s, base))]


def excess(s: Stored) -> tuple[str, bool]:
    "How far E5M2 ends above the baseline, by seed."
    found = shares_above(s, "e5m2_fp8", "bf16_baseline")
    return each([f"{x:+.2f}" for x in found], "%"), max(map(abs, found)) <= 10


def near_shadow(s: Stored) -> tuple[str, bool]:
    "The least share of updates at which a layer's gradient points as its shadow's does."
    layers = {path.split("/")[1]: values for path, (_, values) in s.series["ten_million_e5m2_fp8"].items()
              if path.startswith("shadow/") and path.endswith("/cosine") and "/all/" not in path}
    if not layers: raise KeyError("shadow")
    shares = {layer: float((values > 0.9).mean()) for layer, values in layers.items()}
    worst = min(shares, key=shares.__getitem__)
    if shares[worst] < 1: return f"at least {shares[worst]:.1%} of updates, in {worst}", shares[worst] >= 0.95
    return f"all updates, in every layer; the least {min(v.min() for v in layers.values()):.3f}", True


ORDER = "bf16_baseline", "e3m4_fp8", "e4m3_fp8", "e5m2_fp8", "e7m0_fp8"  # as was said
ALLOWED = 0.02  # nats: between two of them that stand the other way round, and among the first three


def in_order(s: Stored) -> tuple[str, bool]:
    "The losses with master weights, in the order that was said."
    losses = [s.loss(name) for name in ORDER]
    turned = max(a - b for i, a in enumerate(losses) for b in losses[i + 1:])
    found = each([f"{x:.4f}" for x in losses], "nats") + ", first seed"
    if turned > 0: found += f"; pairs stand the other way round by at most {turned:.4f}, of {ALLOWED} that are allowed"
    return found, turned <= ALLOWED and max(losses[1:3]) - losses[0] <= ALLOWED


def coarse(s: Stored) -> tuple[str, bool]:
    "How far E7M0 ends above the baseline, by seed."
    found = shares_above(s, "e7m0_fp8", "bf16_baseline")
    return each([f"{x:+.2f}" for x in found], "%"), all(2 <= x <= 10 for x in found)


def stillest(s: Stored) -> tuple[str, bool]:
    "The runs whose codes stay unchanged most often, E7M0 with master weights first."
    shares = s.unchanged()
    own = shares.pop("ten_million_e7m0_fp8")
    if "ten_million_e7m0_fp8_grid_nearest" not in shares: raise KeyError("grid_nearest")  # could be stiller
    other = max(shares, key=shares.__getitem__)
    return f"{own:.2%}; of the others at most {shares[other]:.2%} ({other})", own > shares[other]


def above(name: str, base: str, least: float, most: float) -> Callable[[Stored], tuple[str, bool]]:
    "A run ends between so many and so many nats above another, with every seed that both have."
    def judge(s: Stored) -> tuple[str, bool]:
        both = [end for end in ENDS if {f"ten_million_{n}{end}" for n in (name, base)} <= s.runs.keys()]
        found = [s.loss(f"{name}{end}") - s.loss(f"{base}{end}") for end in both or ENDS[:1]]
        return each([f"{gap:+.4f}" for gap in found], "nats"), all(least <= gap <= most for gap in found)
    return judge


def gaps(s: Stored, name: str, base: str) -> list[float]:
    "How far a run ends above another, by seed."
    return [a - b for a, b in zip(seeds_of(s, name), seeds_of(s, base))]


def below(name: str, base: str) -> Callable[[Stored], tuple[str, bool]]:
    "A run ends below another with each of the seeds."
    def judge(s: Stored) -> tuple[str, bool]:
        found = gaps(s, name, base)
        return each([f"{gap:+.4f}" for gap in found], "nats"), max(found) < 0
    return judge


def gain(s: Stored, name: str, base: str) -> Interval:
    "How far a run ends below another, in the mean of the seeds."
    return interval(-gap for gap in gaps(s, name, base))


def reshaping_gains(s: Stored) -> tuple[str, bool]:
    "How far S^-1 ends below AdamW on the grid."
    found = gain(s, RESHAPED, f"{E7}_grid_stochastic")
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] nats", found.mean >= 0.01


E4, E7, RESIDUAL = "e4m3_fp8", "e7m0_fp8", "e4m3_fp8_grid_residual4_moments_dynamic8"
BEFORE: dict[str, Callable[[Stored], tuple[str, bool]]] = {
    "E5M2 ends within 10 % of the baseline's loss with every seed": excess,
    "the cosine of every quantized layer is above 0.9 at 95 of 100 updates": near_shadow,
    "losses in order: baseline, E3M4, E4M3, E5M2, E7M0; the first three within 0.02 nats": in_order,
    "E7M0 with master weights ends 2 to 10 % above the baseline": coarse,
    "E7M0 with master weights: codes stay unchanged more often than in any other run": stillest,
    "E4M3: stochastic rounding is 0.01 to 0.08 nats above master weights":
        above(f"{E4}_grid_stochastic", E4, 0.01, 0.08),
    "E7M0: stochastic rounding is more than 0.1 nats above master weights":
        above(f"{E7}_grid_stochastic", E7, 0.1, math.inf),
    "E4M3: nearest rounding is above stochastic":
        above(f"{E4}_grid_nearest", f"{E4}_grid_stochastic", 0.0, math.inf),
    "E7M0: nearest rounding is above stochastic":
        above(f"{E7}_grid_nearest", f"{E7}_grid_stochastic", 0.0, math.inf),
    "E4M3: a residual of 4 bits with moments in 8 is within 0.01 nats of master weights":
        above(RESIDUAL, E4, -0.01, 0.01),
}
AFTER = {  # written down after the first seed on the grid, which they count
    "E4M3: stochastic rounding ends below master weights with each of three seeds":
        below(f"{E4}_grid_stochastic", E4),
    "E7M0: stochastic rounding ends below master weights with each of three seeds":
        below(f"{E7}_grid_stochastic", E7),
    "E7M0: S^-1 ends at least 0.01 nats below AdamW on the grid, in the mean of three seeds": reshaping_gains,
}
CLAIMS = {**BEFORE, **AFTER}


def findings(s: Stored) -> list[Finding]:
    "All claims, each with what the stored runs show."
    def judged(text: str, judge: Callable[[Stored], tuple[str, bool]]) -> Finding:
        try: return Finding(text, *judge(s))
        except KeyError: return Finding(text, "not run", None)
    return [judged(*claim) for claim in CLAIMS.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", help="the text: path:FILE")
    parser.add_argument("--arms", help="names of runs with commas between them; all without it")
    parser.add_argument("--store", action="store_true", help="store what is finished, and train nothing")
    given = parser.parse_args()
    if bool(given.data) == given.store: parser.error("give either --data, to train, or --store")
    if given.store and given.arms: parser.error("--store takes all that is finished: leave out --arms")
    if given.store: store(given.out)
    else: train(given.out, given.data, given.arms)
    return 0


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
