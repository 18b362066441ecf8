"""Keeps what benchmarks said by commit, as ratios: a file for each machine in nbs/results/history.

python nbs/studies/benchmarks/history.py               # what nbs/results/bench_*.json say; ends `make bench`
python nbs/studies/benchmarks/history.py --from-git    # and what older commits of these files said

A line is a benchmark at a commit with a number of threads. Measured again at that commit, the line is
replaced, and keeps only ratios that were not measured again. A ratio is a time by that of its yardstick
in the same run: a copy, another library's function, the unquantized step. What was measured on changes
that are no commit, on a commit that this history lacks or in few rounds is named and left out. Results
of the explorer and of a whole run are not read.
"""
import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from altgrad.basics import InputError, is_number, make_folder, parse_json, remove_leftovers, tell, write_atomic

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "nbs/results"
FEWEST = 5  # rounds below which a result is none
TENTH = 1.1  # times the best before: what is beyond got slower
# Before results said which instructions torch uses: the project's one Intel CPU has AMX, and so AVX-512.
UNRECORDED = {"Intel(R) Xeon(R) Processor": "AVX512"}
FIELDS: dict[str, type] = {
    "commit": str, "date": str, "torch": str, "cpu": str, "capability": str, "cores": int,
    "threads": int, "benchmark": str, "rounds": int, "ratios": dict,
}


class Part(NamedTuple):
    "What a file of results says of one benchmark at one commit."
    benchmark: str
    facts: dict[str, Any]  # machine, versions, rounds, and the commit
    threads: int
    ratios: dict[str, float]


# what the files of results hold


def unset(rows: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    "Rows by their present names: an older file calls otherwise what no setting was given to."
    if any(name.endswith(new) for name in rows): return rows
    return {f"{n.removesuffix(old)}{new}" if n.endswith(old) else n: row for n, row in rows.items()}


SIZES = {1 << 22: "4M", 1 << 26: "64M"}
DATA = {"gaussian": "Gaussian", "student_t2": "Student t"}


def of_quantize(found: dict) -> Iterator[Part]:
    "Ours, beside a copy, random numbers, or torch's own round trip."
    ratios: dict[int, dict[str, float]] = defaultdict(dict)
    for case in found["cases"]:
        size = SIZES.get(case["elements"], f"{case['elements']:,}")
        for name, row in unset(case["rows"], " auto", " without a setting").items():
            if not name.startswith("altgrad ") or "ratio" not in row: continue
            what = f"{size} {DATA[case['data']]}: {name.removeprefix('altgrad ')} / {row['against']}"
            ratios[case["threads"]][what] = row["ratio"]
    for threads, named in ratios.items(): yield Part("quantize", found, threads, named)


PEERS = {"AdamW foreach": "torch AdamW(foreach=True)", "AdamW fused": "torch AdamW(fused=True)"}


def of_optim(found: dict) -> Iterator[Part]:
    "A step of every update rule, beside AdamW's."
    for run in found["runs"]:
        rows = unset(run["rows"], ", not compiled", ", without a setting")
        ratios = {
            f"{name} / {peer}": round(row["fastest_ms"] / rows[unit]["fastest_ms"], 4)
            for name, row in rows.items() if not name.startswith("torch ")
            for peer, unit in PEERS.items()
        }
        facts = {**found, **run, "git_commit": found["commit"]}
        yield Part("update rules", facts, run["machine"]["threads"], ratios)


POINTS = {"weights": "weights", "weights and activations": "weights and inputs", "all": "all points"}
COMPILED = {"eager": "without a compiler", "kernels": "kernels compiled", "model": "model compiled",
            "growth": "kernels compiled"}


def of_step(found: dict) -> Iterator[Part]:
    "A rounded training step, beside the unquantized one; an older file has one part a kind of products."
    for place, parts in found.items():
        device, dtype = place.split()
        if device != "cpu": continue  # make gpu keeps those
        for part in [parts] if isinstance(parts, dict) else parts:
            ratios = {}
            for case in part["cases"]:
                if case["kind"] not in COMPILED: continue
                batch = case["batch"].replace("demo", "32 x 64")
                model = f"{case['model']}{' parameters' * (case['kind'] == 'growth')}, {batch}"
                for arm, ratio in case["ratio"].items():
                    if arm not in POINTS: continue
                    what = f"{model}, {POINTS[arm]}, {COMPILED[case['kind']]}"
                    ratios[f"{what} / unquantized"] = ratio
            if ratios: yield Part(f"training step, {dtype} products", part, part["threads"], ratios)


def of_monitors(found: dict) -> Iterator[Part]:
    "A step with monitors, beside one without."
    part, ratios = found["cpu"], {}
    for case in part["cases"]:
        place = f"{case['batch'].replace('default', 'default batch')}, {case['points']}"
        how = "" if case["compiled"] else ", without a compiler"
        often = "every step" if case["every"] == 1 else f"every {case['every']} steps"
        for key, what in (("all", f"all monitors, {often}"), ("resting", "monitors that rest"),
                          ("weight_monitor", "the weight monitor")):
            ratios[f"{place}: {what}{how} / no monitors"] = case[f"ratio_{key}"]
    yield Part("monitors", part, part["machine"]["threads"], ratios)


def of_stall(found: dict) -> Iterator[Part]:
    "A step in a stall meter, beside one without."
    part = found["cpu"]
    ratios = {
        f"{case['stored']} weights, {case['optimizer']} AdamW: measured every "
        f"{key.removeprefix('ratio_every_')} / no meter": ratio
        for case in part["cases"] for key, ratio in case.items() if key.startswith("ratio_every_")
    }
    yield Part("stall meter", part, part["machine"]["threads"], ratios)


RECORDED = {"glanced": "glanced at", "measured": "measured every step",
            "with_dump": "measured every step, with a dump", "usual": "as it is by default"}


def of_record(found: dict) -> Iterator[Part]:
    "A step in a recorder, beside one without."
    part = found["cpu"]
    ratios = {f"{what} / no recorder": part["ratio"][key] for key, what in RECORDED.items()}
    yield Part("recorder", part, part["machine"]["threads"], ratios)


SAME = {"the same, fused": "without master weights, 4 bits, fused",
        "the same, gradients released": "without master weights, 4 bits, fused, gradients released"}
FUSED = "AdamW in FP32, fused"


def of_without_master(found: dict) -> Iterator[Part]:
    "A step without master weights, and the optimizer's part of it, beside those of fused AdamW."
    part, ratios = found["cpu"], {}
    for old, row in part["rows"].items():
        name = SAME.get(old, old)
        if not name.startswith("without master weights"): continue
        # released gradients are used up in the backward pass, and nothing is left for the optimizer
        for what in ("step",) if "released" in name else ("step", "optimizer"):
            ratio = row[f"{what}_ms"] / part["rows"][FUSED][f"{what}_ms"]
            ratios[f"{what}: {name} / fused AdamW"] = round(ratio, 4)
    facts = {**part, "rounds": part["steps"]}
    yield Part("without master weights", facts, part["machine"]["threads"], ratios)


READERS: dict[str, Callable[[dict], Iterator[Part]]] = {
    "quantize": of_quantize, "optim": of_optim, "step": of_step, "monitors": of_monitors,
    "stall": of_stall, "record": of_record, "without_master": of_without_master,
}


# lines


def git(*words: str) -> str:
    "What git says of this project; InputError where it says nothing."
    try: done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except OSError: raise InputError("history.py asks git for the dates of commits: install it") from None
    if not done.returncode: return done.stdout
    raise InputError(f"git {words[0]}: {(done.stderr.splitlines() or ['failed'])[0]}")


def dates() -> dict[str, str]:
    "The commits of this history, and when each was made."
    found = (line.split() for line in git("log", "--format=%H %ct").splitlines())
    return {commit: datetime.fromtimestamp(int(at), UTC).isoformat() for commit, at in found}


def refusal(part: Part, known: dict[str, str]) -> str | None:
    "Why a part has no line; None where it has one."
    commit, rounds = part.facts["git_commit"], part.facts["rounds"]
    if commit is None or commit.endswith("+"): return "measured on changes that are no commit"
    if commit not in known: return f"its commit {commit[:12]} is not in this history"
    return f"{rounds} rounds are too few" if rounds < FEWEST else None


def line_of(part: Part, known: dict[str, str]) -> dict[str, Any]:
    "The line of a part."
    about, commit = part.facts["machine"], part.facts["git_commit"]
    return {
        "commit": commit, "date": known[commit], "torch": part.facts["versions"]["torch"], "cpu": about["cpu"],
        "capability": about.get("capability") or UNRECORDED.get(about["cpu"], "unknown"), "cores": about["cores"],
        "threads": part.threads, "benchmark": part.benchmark, "rounds": part.facts["rounds"], "ratios": part.ratios,
    }


def lines_of(name: str, found: Any, where: str, known: dict[str, str]) -> Iterator[dict[str, Any]]:
    "The lines of a file of results; what has none is told."
    try:
        parts = list(READERS[name](found))
        refused = [(part, why) for part in parts if (why := refusal(part, known))]
        lines = [line_of(part, known) for part in parts if not refusal(part, known)]
    except (KeyError, TypeError, AttributeError, ValueError):
        print(f"left out: {where}: its layout is not known")
        return
    for part, why in refused: print(f"left out: {where}, {part.benchmark}: {why}")
    yield from lines


def machine_of(line: dict[str, Any]) -> str:
    "The name of a line's machine."
    cpu = re.sub(r"\((R|TM)\)", "", line["cpu"])
    return f"{cpu}, {line['capability']}, {line['cores']} cores"


def slug_of(line: dict[str, Any]) -> str:
    "The name of its file."
    return re.sub(r"[^a-z0-9]+", "-", machine_of(line).lower()).strip("-")


# files


def problem(line: Any, stem: str) -> str | None:
    "What is wrong with a line of a machine's file; None where nothing is."
    if not isinstance(line, dict) or line.keys() != FIELDS.keys():
        return f"its fields are not {', '.join(FIELDS)}"
    wrong = [key for key, kind in FIELDS.items() if type(line[key]) is not kind]
    if wrong: return f"{wrong[0]} is no {FIELDS[wrong[0]].__name__}"
    if not re.fullmatch("[0-9a-f]{40}", line["commit"]): return "commit is no hash"
    try: datetime.fromisoformat(line["date"])
    except ValueError: return "date is none"
    if not all(is_number(ratio) and ratio > 0 for ratio in line["ratios"].values()):
        return "a ratio is no number above 0"
    return None if slug_of(line) == stem else f"it is of {machine_of(line)}"


def key_of(line: dict[str, Any]) -> tuple: return line["benchmark"], line["threads"], line["commit"]


def read(path: Path) -> list[dict[str, Any]]:
    "The lines of a machine in the order of commits; InputError for one that is damaged."
    found: dict[tuple, dict] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try: line = parse_json(text)
        except ValueError: line = None
        why = problem(line, path.stem)
        if not why and key_of(line) in found: why = "it is there twice"
        if why: raise InputError(f"{path}, line {number} is damaged: {why}; restore the file, or remove the line")
        found[key_of(line)] = line
    return list(found.values())


def read_all(folder: Path) -> dict[str, list[dict[str, Any]]]:
    "The lines of every machine, by its name."
    files = [read(path) for path in sorted(folder.glob("*.jsonl"))]
    return {machine_of(lines[0]): lines for lines in files if lines}


def put(lines: list[dict], new: list[dict]) -> list[dict]:
    "Lines with new ones, which take the place of their like, in the order of commits."
    found = {key_of(line): line for line in lines}
    for line in new:
        before = found.get(key_of(line), line)
        kept = before["ratios"].keys() - line["ratios"].keys()
        rounds = min(before["rounds"], line["rounds"]) if kept else line["rounds"]
        found[key_of(line)] = line | {"rounds": rounds, "ratios": before["ratios"] | line["ratios"]}
    return sorted(found.values(), key=lambda line: (line["date"], *key_of(line)))


def text_of(lines: list[dict]) -> str:
    "The text of a file: a line of JSON each."
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def add(folder: Path, new: list[dict]) -> list[Path]:
    "Writes new lines into the files of their machines; the files that changed."
    by_slug: dict[str, list] = defaultdict(list)
    for line in new: by_slug[slug_of(line)].append(line)
    paths = {slug: folder / f"{slug}.jsonl" for slug in by_slug}
    before = {slug: read(path) if path.is_file() else [] for slug, path in paths.items()}
    after = {slug: put(before[slug], lines) for slug, lines in by_slug.items()}
    changed = [slug for slug in by_slug if after[slug] != before[slug]]
    if changed:
        make_folder(folder)
        remove_leftovers(folder)
    for slug in changed: write_atomic(paths[slug], text_of(after[slug]))
    return [paths[slug] for slug in changed]


# what got slower


class Point(NamedTuple):
    "A ratio at a commit."
    commit: str
    date: str
    ratio: float


def courses(lines: list[dict]) -> dict[tuple[str, int, str], list[Point]]:
    "Every ratio of a machine over its commits, by benchmark, threads and name."
    found: dict[tuple, list] = defaultdict(list)
    for line in lines:
        for name, ratio in line["ratios"].items():
            point = Point(line["commit"], line["date"], ratio)
            found[line["benchmark"], line["threads"], name].append(point)
    return found


def slower(points: list[Point]) -> list[bool]:
    "Whether each is more than a tenth above the best before it."
    best = [min((p.ratio for p in points[:i]), default=point.ratio) for i, point in enumerate(points)]
    # equal to a tenth is not more, whatever the last bit of the product is
    return [point.ratio > TENTH * b * (1 + 1e-9) for point, b in zip(points, best)]


class Slower(NamedTuple):
    "A ratio that is more than a tenth above the best before it, at its latest commit."
    benchmark: str
    threads: int
    name: str
    now: Point
    best: Point

    @property
    def times(self) -> float: return self.now.ratio / self.best.ratio

    def __str__(self) -> str:
        return (f"{self.benchmark}, {self.threads} thread(s), {self.name}: {self.now.ratio:.3g} at "
                f"{self.now.commit[:7]}, {self.times:.2f} times the {self.best.ratio:.3g} at {self.best.commit[:7]}")


def slower_now(lines: list[dict]) -> list[Slower]:
    "What is slower at its latest commit than it was."
    return [
        Slower(*key, points[-1], min(points, key=lambda p: p.ratio))
        for key, points in courses(lines).items() if slower(points)[-1]
    ]


# what is wanted


def judged(row: dict[str, Any], lines: list[dict]) -> dict[str, Any]:
    """A row of wanted.yaml beside a machine's latest numbers: the worst of its ratios, where that is,
    at which commits they were measured, and how many were not."""
    found: dict[str, tuple[float, str]] = {}
    for line in lines:
        if line["benchmark"] != row["benchmark"] or row.get("threads") not in (None, line["threads"]): continue
        found |= {name: (line["ratios"][name], line["commit"]) for name in row["ratios"] if name in line["ratios"]}
    if not found: return {"value": None, "missing": len(row["ratios"])}
    where = max(found, key=lambda name: found[name][0])
    value = found[where][0]
    return {"value": value, "where": where, "met": value <= row["wanted"],
            "commits": sorted({commit for _, commit in found.values()}),
            "missing": len(row["ratios"]) - len(found)}


# the command


def results_of(folder: Path, known: dict[str, str]) -> Iterator[dict[str, Any]]:
    "The lines of the files of results as they are."
    for name in READERS:
        path = folder / f"bench_{name}.json"
        if not path.is_file(): continue
        try: found = parse_json(path.read_bytes())
        except ValueError: raise InputError(f"{path} is damaged: measure again, or restore it") from None
        yield from lines_of(name, found, path.name, known)


def results_of_git(known: dict[str, str]) -> Iterator[dict[str, Any]]:
    "The lines of all committed versions of those files, the oldest first."
    for name in READERS:
        path = f"nbs/results/bench_{name}.json"
        for commit in git("log", "--reverse", "--format=%H", "--", path).split():
            where = f"{Path(path).name} of {commit[:7]}"
            try: found = parse_json(git("show", f"{commit}:{path}"))
            except (InputError, ValueError): print(f"left out: {where}: it is no JSON, or not there")
            else: yield from lines_of(name, found, where, known)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-git", action="store_true", help="what older commits of the files say, too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of bench_*.json")
    parser.add_argument("--history", type=Path, help="the folder of histories (default: history in it)")
    args = parser.parse_args(argv)
    folder = args.history or args.results / "history"
    try:
        read_all(folder)  # what is damaged stops it before anything is written
        known = dates()
        new = [*(results_of_git(known) if args.from_git else ()), *results_of(args.results, known)]
        changed = add(folder, new)
        for path in changed:
            print(f"wrote {path.name}")
            for one in slower_now(read(path)): print(f"  slower by more than a tenth: {one}")
        if not changed: print("the histories are as they were")
        return 0
    except InputError as e:
        tell(str(e))
        return 2


if __name__ == "__main__": sys.exit(main())
