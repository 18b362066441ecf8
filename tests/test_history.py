"""The history of speed: lines are replaced and never lost, damage is refused, what got slower is
marked, and every row of what is wanted names ratios that a benchmark writes."""
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "nbs/studies/benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_monitors
import bench_optim
import bench_quantize
import bench_stall
import bench_step
import bench_without_master
import history
import stored as results

WANTED = yaml.safe_load((BENCHMARKS / "wanted.yaml").read_text(encoding="utf-8"))
OLD, NEW, LAST = (c * 40 for c in "abc")
KNOWN = {commit: f"2026-11-2{day}T00:00:00+00:00" for day, commit in enumerate((OLD, NEW, LAST))}
FACTS = {"machine": {"system": "Linux", "cpu": "CPU(R) X", "capability": "AVX2", "cores": 2, "threads": 2},
         "versions": {"torch": "2.13.0"}, "rounds": 9, "git_commit": OLD}


def record(commit: str = OLD, **more) -> dict:
    "What bench_record.json holds."
    ratio = dict(zip(history.RECORDED, (1.1, 1.2, 1.3, 1.4)))
    return {"cpu": FACTS | {"git_commit": commit, "ratio": ratio | more.pop("ratio", {})} | more}


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    "Stores results as bench_record.json and reads them; the exit status, and what was said."
    monkeypatch.setattr(history, "dates", lambda: KNOWN)

    def run(found=None, *argv):
        if found is not None: (tmp_path / "bench_record.json").write_text(json.dumps(found))
        code = history.main(["--results", str(tmp_path), *argv])
        return code, *capsys.readouterr()

    return run


def stored(folder: Path) -> list[dict]:
    "The lines of the one machine."
    (path,) = (folder / "history").iterdir()
    assert path.name == "cpu-x-avx2-2-cores.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_where_it_comes_from_and_holds_ratios_only(go, tmp_path):
    assert go(record())[0] == 0
    (line,) = stored(tmp_path)
    assert list(line) == list(history.FIELDS)
    assert (line["commit"], line["date"], line["torch"]) == (OLD, KNOWN[OLD], "2.13.0")
    assert (line["benchmark"], line["threads"]) == ("recorder", 2)
    assert line["ratios"]["as it is by default / no recorder"] == 1.4 and len(line["ratios"]) == 4


def test_the_same_commit_again_replaces_its_line_and_another_comes_in_order(go, tmp_path):
    go(record(NEW))
    go(record(OLD))
    go(record(NEW, ratio={"usual": 1.05}))
    lines = stored(tmp_path)
    assert [line["commit"] for line in lines] == [OLD, NEW]
    assert [line["ratios"]["as it is by default / no recorder"] for line in lines] == [1.4, 1.05]
    before = next((tmp_path / "history").iterdir()).read_bytes()
    assert "as they were" in go()[1] and next((tmp_path / "history").iterdir()).read_bytes() == before


def test_a_part_measured_again_keeps_the_rest_of_its_line():
    line = history.line_of(next(history.of_record(record())), KNOWN)
    few = {"as it is by default / no recorder": 1.01}
    (both,) = history.put([line], [line | {"ratios": few, "rounds": 20}])
    assert both["ratios"] == line["ratios"] | few and both["rounds"] == 9
    assert history.put([both], [line | {"rounds": 20}])[0]["rounds"] == 20


def test_other_threads_and_other_machines_have_lines_of_their_own(go, tmp_path):
    go(record())
    go(record(machine=FACTS["machine"] | {"threads": 1}))
    assert [line["threads"] for line in stored(tmp_path)] == [1, 2]
    go(record(machine=FACTS["machine"] | {"capability": "AVX512"}))
    assert len(history.read_all(tmp_path / "history")) == 2


@pytest.mark.parametrize("found, why", [
    (record(f"{OLD}+"), "measured on changes that are no commit"), (record(None), "no commit"),
    (record("d" * 40), "its commit dddddddddddd is not in this history"),
    (record(rounds=4), "4 rounds are too few"), ({"cpu": {"ratio": {}}}, "its layout is not known"),
    ([1], "its layout is not known"), ({"cpu": None}, "its layout is not known"),
])
def test_what_has_no_line_is_named(go, tmp_path, found, why):
    code, out, _ = go(found)
    assert code == 0 and "left out: bench_record.json" in out and why in out
    assert not (tmp_path / "history").exists()


@pytest.mark.parametrize("change", [
    lambda text: text[:-20], lambda text: "{}\n", lambda text: text + text, lambda text: "[]\n",
    lambda text: text.replace("1.4", '"1.4"'), lambda text: text.replace("1.4", "NaN"),
    lambda text: text.replace("1.4", "-1.4"), lambda text: text.replace(OLD, "HEAD"),
    lambda text: text.replace('"threads": 2', '"threads": true'), lambda text: "\n" + text,
    lambda text: text.replace('"cores": 2', '"cores": 4'), lambda text: text.replace("2026-", "26-"),
    lambda text: "[" * 100_000, lambda text: "\udcff" + text,
])
def test_a_damaged_line_is_refused_in_one_line_and_nothing_is_written(go, tmp_path, change):
    go(record())
    (path,) = (tmp_path / "history").iterdir()
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    before = path.read_bytes()
    code, out, err = go(record(NEW))
    assert code == 2 and err.count("\n") == 1 and not out
    assert re.search(r"cpu-x-avx2-2-cores\.jsonl, line \d is damaged: ", err)
    assert path.read_bytes() == before


def test_a_damaged_result_is_refused_in_one_line(go, tmp_path):
    (tmp_path / "bench_record.json").write_text("{")
    code, _, err = go()
    assert code == 2 and err.count("\n") == 1 and "bench_record.json is damaged" in err


def test_a_failing_replacement_leaves_the_old_file(go, tmp_path, monkeypatch):
    go(record())
    (path,) = (tmp_path / "history").iterdir()
    before = path.read_bytes()

    def full(*_): raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = go(record(NEW))
    assert code == 2 and err.count("\n") == 1 and "No space left on device" in err
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_killed_process_leaves_the_old_file(go, tmp_path, moment):
    go(record())
    (path,) = (tmp_path / "history").iterdir()
    before = path.read_bytes()
    (tmp_path / "bench_record.json").write_text(json.dumps(record(NEW)))
    code = (f"import os, sys; sys.path.append({str(BENCHMARKS)!r}); import history\n"
            f"history.dates = lambda: {KNOWN!r}\n"
            f"os.{moment} = lambda *_: os._exit(9)\n"
            f"history.main(['--results', {str(tmp_path)!r}])")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 9
    assert path.read_bytes() == before
    assert go()[0] == 0 and [line["commit"] for line in stored(tmp_path)] == [OLD, NEW]


# what got slower


def points(*ratios: float) -> list: return [history.Point("c", "d", ratio) for ratio in ratios]


@pytest.mark.parametrize("ratios, marks", [
    ((1.0, 1.09), [0, 0]), ((1.0, 1.11), [0, 1]), ((1.1, 1.21), [0, 0]), ((3.0, 3.3), [0, 0]),
    ((1.0, 1.06, 1.12), [0, 0, 1]),  # little by little
    ((1.0, 1.5, 1.4, 1.0), [0, 1, 1, 0]), ((2.0, 1.0, 1.2), [0, 0, 1]), ((1.0,), [0]),
])
def test_more_than_a_tenth_above_the_best_before_is_marked(ratios, marks):
    assert history.slower(points(*ratios)) == [bool(m) for m in marks]


def test_what_got_slower_is_told_at_the_end(go):
    assert "slower" not in go(record())[1]
    assert "slower" not in go(record(NEW, ratio={"usual": 1.4 * 1.09}))[1]
    _, out, _ = go(record(LAST, ratio={"usual": 1.4 * 1.11}))
    assert out.count("slower by more than a tenth: recorder, 2 thread(s), as it is by default") == 1
    assert f"1.55 at {LAST[:7]}, 1.11 times the 1.4 at {OLD[:7]}" in out


# what older files were


def test_an_older_file_of_steps_has_one_part_a_kind_of_products():
    case = {"model": "gpt-tiny", "batch": "demo", "kind": "eager", "ratio": {"none": 1.0, "all": 1.5}}
    part = FACTS | {"threads": 2, "cases": [case]}
    old, new = ({"cpu float32": found, "cuda float32": found} for found in (part, [part]))
    (line,) = history.of_step(old)
    assert [line] == list(history.of_step(new)) and line.benchmark == "training step, float32 products"
    assert line.ratios == {"gpt-tiny, 32 x 64, all points, without a compiler / unquantized": 1.5}


def test_what_no_setting_was_given_to_has_its_present_name():
    assert history.unset({"A auto": 1, "B": 2}, " auto", " unset") == {"A unset": 1, "B": 2}
    assert history.unset({"A auto": 1, "A unset": 2}, " auto", " unset") == {"A auto": 1, "A unset": 2}


def test_what_git_holds_is_read(tmp_path, monkeypatch, capsys):
    git = lambda *words: subprocess.run(
        ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.example", *words],
        capture_output=True, text=True, check=True).stdout.strip()
    path = tmp_path / "nbs/results/bench_record.json"
    path.parent.mkdir(parents=True)
    git("init", "-q")
    commits = []
    for step, text in enumerate(("{}", "{", None, None)):
        found = record(commits[0], ratio={"usual": step}) if commits else None
        path.write_text(text or json.dumps(found))
        git("add", ".")
        git("commit", "-qm", "x")
        commits.append(git("rev-parse", "HEAD"))
    path.write_text(json.dumps(record(commits[1])))  # measured, and not committed
    monkeypatch.setattr(history, "ROOT", tmp_path)
    assert history.main(["--results", str(path.parent), "--from-git"]) == 0
    out = capsys.readouterr().out
    assert "its layout is not known" in out and "it is no JSON" in out
    lines = stored(path.parent)
    usual = {line["commit"]: line["ratios"]["as it is by default / no recorder"] for line in lines}
    assert usual == {commits[0]: 3, commits[1]: 1.4}  # the newest of what was stored
    assert all(re.fullmatch(r"20\d\d-.*\+00:00", line["date"]) for line in lines)


def test_without_git_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(history, "ROOT", tmp_path)
    assert history.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# names


def timed(names, against: str = "torch.clone") -> dict:
    "Rows of bench_quantize.json."
    return {name: {"ratio": 2.0, "against": against} for name in names}


def written() -> dict[str, set[str]]:
    "The names of all ratios that the benchmarks write, from the scripts' own lists of what they measure."
    rows = [row.name for row in (*bench_quantize.rows_for("cpu")[0], *bench_quantize.unset_rows())]
    small = [*bench_quantize.small_rows(), *bench_quantize.unset_small_rows()]
    cases = [{"elements": n, "data": shape, "threads": 1, "rows": timed(rows)}
             for n in bench_quantize.SIZES["cpu"] for shape in bench_quantize.SHAPES]
    cases.append({"elements": bench_quantize.SMALL, "data": "gaussian", "threads": 1,
                  "rows": timed((row.name for row in small), small[0].against)})
    times = dict.fromkeys(bench_optim.CASES, {"fastest_ms": 2.0})
    steps = [
        {"model": model, "batch": batch, "kind": kind, "ratio": dict.fromkeys(bench_step.POINTS, 2.0)}
        for model, batches in bench_step.SIZES["cpu"].items()
        for batch in batches for kind in (*bench_step.KINDS, "memory")
    ]
    watched = [
        {"batch": batch, "points": what, "compiled": every == 1, "every": every, "ratio_all": 2.0,
         "ratio_resting": 2.0, "ratio_weight_monitor": 2.0}
        for batch in bench_monitors.BATCHES for what in bench_monitors.POINTS for every in (1, 10)
    ]
    trained = dict.fromkeys(bench_without_master.CASES, {"step_ms": 2.0, "optimizer_ms": 2.0})
    found = {
        "quantize": FACTS | {"cases": cases},
        "optim": FACTS | {"commit": OLD, "runs": [FACTS | {"rows": times}]},
        "step": {f"cpu {t}": [FACTS | {"threads": 1, "cases": steps}] for t in ("float32", "bfloat16")},
        "monitors": {"cpu": FACTS | {"cases": watched}},
        "without_master": {"cpu": FACTS | {"steps": 100, "rows": trained}},
    }
    return {part.benchmark: set(part.ratios) for name in found for part in history.READERS[name](found[name])}


def test_every_row_of_what_is_wanted_names_ratios_that_a_benchmark_writes():
    names = written()
    missing = {row["row"]: gone for row in WANTED
               if (gone := set(row["ratios"]) - names.get(row["benchmark"], set()))}
    assert missing == {}


def test_what_is_wanted_is_what_was_asked_for():
    assert len({row["row"] for row in WANTED}) == len(WANTED) == 33
    assert all(row.keys() <= {"row", "wanted", "benchmark", "threads", "ratios", "cause"} for row in WANTED)
    assert all(isinstance(row["cause"], str) and row["ratios"] for row in WANTED)
    # nothing but a step, where a compiler is named, and the monitors are measured with a setting
    assert all("without a setting" in ratio for row in WANTED for ratio in row["ratios"]
               if row["benchmark"] in ("quantize", "update rules"))


def test_a_row_is_judged_by_the_worst_of_its_latest_ratios():
    row = {"benchmark": "b", "wanted": 1.2, "ratios": ["x", "y", "z"], "threads": 1}
    line = {"benchmark": "b", "threads": 1, "commit": OLD, "ratios": {"x": 3.0, "y": 1.2}}
    newer = line | {"commit": NEW, "ratios": {"x": 1.1}}
    others = [line | {"threads": 2, "ratios": {"x": 9.0}}, line | {"benchmark": "c", "ratios": {"x": 9.0}}]
    found = history.judged(row, [line, newer, *others])
    assert found == {"value": 1.2, "where": "y", "met": True, "commits": [OLD, NEW], "missing": 1}
    assert history.judged(row, [line])["met"] is False
    assert history.judged(row, others) == {"value": None, "missing": 3}


def cell(page: str, word: str) -> str:
    "The source of the code cell of a page in which a word occurs."
    cells = json.loads((ROOT / "nbs/studies" / page).read_text(encoding="utf-8"))["cells"]
    (found,) = (s for c in cells if c["cell_type"] == "code" and word in (s := "".join(c["source"])))
    return found


@pytest.fixture
def pages(tmp_path, monkeypatch):
    "Stores lines of a machine where the pages look for them."
    base = history.line_of(next(history.of_record(record())), KNOWN)

    def store(*lines: dict) -> dict:
        (tmp_path / "studies").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "studies")
        if not Path("benchmarks").exists(): Path("benchmarks").symlink_to(BENCHMARKS)
        history.add(tmp_path / "results/history", [base | line for line in lines])
        return {"runpy": runpy, "yaml": yaml, "Path": Path, "Markdown": str}

    return store


def test_the_page_of_speed_shows_each_limit_beside_the_number(pages):
    rule, unit = "Madam, without a setting", "AdamW foreach"
    names = pages({"benchmark": "update rules", "threads": 1, "ratios": {
        f"{rule} / {unit}": 0.5, "GridSGD, without a setting / AdamW fused": 3.51}})
    exec(cell("speed.ipynb", "def wanted_table"), names)
    table = names["wanted_table"]()
    assert f"| what | wanted, at most | CPU X, AVX2, 2 cores; {KNOWN[OLD][:10]} | cause |" in table
    assert "| Madam; to AdamW foreach | 0.6 | 0.500, met | - |" in table
    cause = next(row["cause"] for row in WANTED if row["row"] == "GridSGD; to AdamW fused")
    assert f"| GridSGD; to AdamW fused | 3.5 | 3.510, **missed** | {cause} |" in table and len(cause) > 20
    assert table.count("not measured | - |") == len(WANTED) - 2
    assert "1 of the 2 limits that were measured are met; commits: update rules aaaaaaaaaaaa." in table


def test_the_page_of_the_history_says_what_got_slower(pages):
    later = {"commit": NEW, "date": KNOWN[NEW]}
    names = pages({"ratios": {"x / y": 1.0, "z / y": 1.0}}, later | {"ratios": {"x / y": 1.2, "z / y": 1.09}})
    names |= {"plt": SimpleNamespace(rcParams={}), "figure_style": dict}
    exec(cell("speed_over_time.ipynb", "def panels"), names)
    exec(cell("speed_over_time.ipynb", "def told"), names)
    (machine,) = names["machines"]
    assert names["told"](machine) == (
        "- **recorder, 2 threads, to y**: 1 of 2: x 1.20 times (1 at aaaaaaa, now 1.2)")
    names["slower"][machine] = []
    assert names["told"](machine) == "Nothing."


# what is stored


def shallow() -> bool:
    "Whether this is a copy without its history, or outside git."
    command = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() != "false"


def test_stored_histories_are_sound_small_and_of_this_history():
    folder = ROOT / "nbs/results/history"
    machines = history.read_all(folder)
    assert any("EPYC" in name for name in machines) and any("Xeon" in name for name in machines)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 500_000
    for lines in machines.values():
        assert [history.key_of(line) for line in history.put(lines, [])] == list(map(history.key_of, lines))
    if shallow(): pytest.skip("a copy without its history")
    known = history.dates()
    assert all(line["date"] == known.get(line["commit"]) for lines in machines.values() for line in lines)


def test_stored_results_are_in_the_history():
    if shallow(): pytest.skip("a copy without its history")
    folder = ROOT / "nbs/results"
    known = {history.key_of(line): line["ratios"] for lines in history.read_all(folder / "history").values()
             for line in lines}
    missing = {history.key_of(line) for line in history.results_of(folder, history.dates())
               if not line["ratios"].items() <= known.get(history.key_of(line), {}).items()}
    assert missing == set(), "nbs/studies/benchmarks/history.py adds them"


def test_each_benchmark_says_what_it_measures_and_how_long_and_can_be_quick():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    about = re.search(r"^ABOUT := (.*)$", makefile, re.M)[1]
    for path in sorted(BENCHMARKS.glob("bench_*.py")):
        said = subprocess.run([sys.executable, "-c", about, path], capture_output=True, text=True).stdout
        assert re.search(r"About \d+ minutes? on two cores\.$", said), path.name
        source = path.read_text(encoding="utf-8")
        assert '"--rounds"' in source and "git_commit()" not in source, path.name
        assert "type=result" in source or f'add_out(parser, "{path.stem}.json")' in source, path.name
    assert "$(BIN)/python nbs/studies/benchmarks/history.py)" in makefile


@pytest.mark.parametrize("file, problem", [
    ("", "cannot be written; allowed: a file in a folder that can"), ("absent/a.json", "cannot be written"),
    ("damaged.json", "is damaged: remove it"), ("list.json", "is damaged"),
])
def test_a_result_that_cannot_be_stored_is_refused_before_anything_is_timed(
    file, problem, tmp_path, monkeypatch, capsys
):
    (tmp_path / "damaged.json").write_text('{"cpu": ')
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.setattr(sys, "argv", ["bench_stall.py", "--out", str(tmp_path / file)])
    monkeypatch.setattr(bench_stall, "measure", None)
    with pytest.raises(SystemExit) as e: bench_stall.main()
    assert e.value.code == 2 and problem in capsys.readouterr().err.splitlines()[-1]


def test_a_result_joins_those_of_other_devices(tmp_path):
    file = results.result(str(tmp_path / "a.json"))
    for device, value in (("cpu", 1), ("cuda", 2), ("cpu", 3)): results.add(file, device, {"value": value})
    assert results.read(file) == {"cpu": {"value": 3}, "cuda": {"value": 2}}


def test_the_products_of_a_step_are_of_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(bench_step, "fast_bfloat16", lambda device: device.type == "cuda")
    assert [bench_step.products_of(device) for device in ("cpu", "cuda")] == ["float32", "bfloat16"]
