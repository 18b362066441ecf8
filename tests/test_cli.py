"""The command line: what it prints, what it leaves on disk, and what it says when something is
wrong.

Commands run in this process, and leave it as it was; where signals, a shell or the end of an
interpreter matter they are real processes.
"""
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
import yaml

from altgrad import cli
from altgrad.basics import WriteError
from altgrad.model.gpt import PRESETS, GPTConfig
from altgrad.model.surgery import quantize_model

import preloaded
from kernels import with_kernels

MINI = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32)
SMALL = {
    "model": "gpt-mini", "data": f"path:{__file__}", "max_steps": 12, "batch_size": 4,
    "block_size": 32, "warmup_steps": 2, "eval_every": 4, "eval_windows": 8, "checkpoint_every": 4,
}


@pytest.fixture(autouse=True, scope="module")
def environment(tmp_path_factory):
    "A cache of its own, a wide terminal, no mirror, and a small model beside the presets."
    matplotlib.use("Agg")
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("ALTGRAD_CACHE", with_kernels(tmp_path_factory.mktemp("cache")))
        changes.setenv("COLUMNS", "200")
        changes.setenv("WANDB_MODE", "disabled")
        changes.setitem(PRESETS, "gpt-mini", MINI)
        yield


def settings(**changes) -> list[str]:
    values = {**SMALL, **changes}
    return [arg for key, value in values.items() for arg in ("--set", f"{key}={value}")]


def state_of_the_process() -> list:
    "What belongs to the process, and not to a command."
    return [
        os.getcwd(), list(sys.path), sys.unraisablehook, list(map(signal.getsignal, cli._SIGNALS)),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        plt.get_fignums(), dict(plt.rcParams), logging.root.level, list(logging.root.handlers),
    ]


def run(*args) -> subprocess.CompletedProcess:
    "A command that has ended; what torch and wandb write into the environment goes with it."
    before, out, err = state_of_the_process(), io.StringIO(), io.StringIO()
    with patch.dict(os.environ), redirect_stdout(out), redirect_stderr(err):
        try: code = cli.main(list(map(str, args)))
        except SystemExit as e: code = e.code
    assert state_of_the_process() == before
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def timeless(rows: list[dict]) -> list[dict]:
    clocks = ("tokens_per_s", "wall_clock_s")
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    "A comparison of all eight formats with the baseline, and what the command printed."
    out = tmp_path_factory.mktemp("runs")
    names = ["bf16_baseline"] + [f"e{e}m{7 - e}_fp8" for e in range(8)]
    return out, names, run("compare", *names, *settings(), "--out", out)


def test_compare_prints_its_table_and_names_what_it_wrote(compared):
    out, names, done = compared
    assert done.returncode == 0, done.stderr
    entropies = ("unigram entropy", "bigram entropy")
    for words in (*names, "one seed: ", *entropies, "codes unchanged", f"folder: {out}"):
        assert words in done.stdout
    assert (out / "comparison.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert f"figure: {out}/comparison.png" in done.stdout
    assert "gap (" not in done.stdout and "noise" in done.stdout  # one run each ranks nothing


def test_a_run_folder_is_complete_and_strict(compared):
    out, names, _ = compared
    for name in names:
        rows, record = metrics(out / name), json.loads((out / name / "run.json").read_text())
        assert [row["step"] for row in rows] == list(range(1, 13))
        keys = {"loss", "perplexity", "lr", "grad_norm", "tokens_per_s", "wall_clock_s"}
        assert keys <= set(rows[0])
        rates = ("overflow_rate", "underflow_rate", "bit_stall_rate")
        assert all(0 <= row[rate] <= 1 for row in rows for rate in rates)
        assert record["exit_reason"] == "finished"
        assert record["seed"] == 42
        assert len(record["corpus"]["hash"]) == 64
        assert record["versions"]["torch"]
        assert record["machine"]["cpu"]
        assert record["compute_dtype"] in ("float32", "bfloat16")
        weights = MINI.n_layer * 12 * MINI.n_embd**2
        assert sum(record["bit_histogram"]) == record["quantized_parameters"] == weights
        assert yaml.safe_load((out / name / "config.yaml").read_text())["name"] == name


def test_formats_differ_only_in_their_grid(compared):
    out, names, _ = compared
    first = {name: metrics(out / name)[0]["loss"] for name in names}
    # the same batch through the same weights, rounded
    assert max(first.values()) - min(first.values()) < 0.05
    assert len(set(first.values())) == len(names) - 1 and first["e0m7_fp8"] == first["e1m6_fp8"]
    assert timeless(metrics(out / "e0m7_fp8")) == timeless(metrics(out / "e1m6_fp8"))


def test_the_same_command_again_trains_nothing(compared):
    out, names, _ = compared
    before = {name: (out / name / "metrics.jsonl").stat().st_mtime_ns for name in names}
    done = run("compare", *names[:3], *settings(), "--out", out, "--json")
    assert done.returncode == 0
    assert [row["name"] for row in json.loads(done.stdout)["rows"]] == names[:3]
    assert before == {name: (out / name / "metrics.jsonl").stat().st_mtime_ns for name in names}
    other = run("compare", *names[:3], *settings(lr=0.1), "--out", out)
    assert other.returncode == 2
    assert "lr=0.003, not 0.1" in other.stderr
    assert other.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def paired(tmp_path_factory):
    "A comparison of two arms with two seeds, made after one with one seed, and what both printed."
    out = tmp_path_factory.mktemp("paired")
    args = ["compare", "e7m0_fp8", "e7m0_fp8:storage=grid_nearest", *settings(), "--out", out]
    single = run(*args, "--json")
    stamp = (out / "e7m0_fp8/metrics.jsonl").stat().st_mtime_ns
    return out, json.loads(single.stdout), run(*args, "--seeds", "2", "--json"), stamp, args


def test_seeds_are_paired_and_their_mean_gap_has_its_interval(paired):
    out, single, done, stamp, _ = paired
    assert done.returncode == 0, done.stderr
    plain, grid = "e7m0_fp8", "e7m0_fp8_grid_nearest"
    names = [plain, grid, f"{plain}_seed43", f"{grid}_seed43"]
    assert sorted(p.parent.name for p in out.glob("*/run.json")) == sorted(names)
    # the run of the first seed is used again
    assert (out / plain / "metrics.jsonl").stat().st_mtime_ns == stamp
    configs = [yaml.safe_load((out / name / "config.yaml").read_text()) for name in names]
    assert [(c["seed"], c["storage"]) for c in configs] == [
        (42, "master"), (42, "grid_nearest"), (43, "master"), (43, "grid_nearest")]
    loss = {name: metrics(out / name)[-1]["val_loss"] for name in names}
    first, second = (loss[f"{grid}{seed}"] - loss[f"{plain}{seed}"] for seed in ("", "_seed43"))
    base, row = json.loads(done.stdout)["rows"]
    assert row["gap_nats"] == pytest.approx((first + second) / 2)
    assert row["val_loss"] == pytest.approx((loss[grid] + loss[f"{grid}_seed43"]) / 2)
    # Student's t for one degree of freedom; the standard error of two
    half = 12.7062 * abs(first - second) / 2
    # the table of t has five digits
    ends = [row["gap_nats"] - half, row["gap_nats"] + half]
    assert [row["gap_low"], row["gap_high"]] == pytest.approx(ends, rel=1e-4)
    assert row["within_noise"] is (row["gap_low"] <= 0 <= row["gap_high"])
    assert base["is_baseline"]
    assert json.loads(done.stdout)["seeds"] == [42, 43]
    assert [r["gap_nats"] for r in single["rows"]] == [None, None]
    assert single["about_gaps"].startswith("one seed")


def test_a_table_of_seeds_says_what_is_noise(paired):
    text = run(*paired[4], "--seeds", "2").stdout
    for words in ("seeds 42 to 43", "gap (nats)", "95 % interval", "baseline",
                  "within noise: the interval includes zero"):
        assert words in text


EVERY = 6  # steps between two checkpoints
LONGER = ["train", "e4m3_fp8", *settings(
    model="gpt-tiny", max_steps=60, dropout=0.1, checkpoint_every=EVERY, eval_every=EVERY)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    "The folder of a run that nothing disturbed."
    out = tmp_path_factory.mktemp("uninterrupted")
    done = run(*LONGER, "--set", "name=whole", "--out", out)
    assert done.returncode == 0, done.stderr
    return out / "whole"


def mirrored() -> dict[str, str]:
    "The environment of a user, whose runs are mirrored."
    return {**os.environ, "WANDB_MODE": "offline"}


@pytest.mark.parametrize(
    "how, times", [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 2)])
def test_an_interrupted_run_says_so_and_goes_on_bit_for_bit(tmp_path, uninterrupted, how, times):
    cut, reached = tmp_path / "cut", 0
    command = [*LONGER, "--set", "name=cut", "--out", tmp_path]
    for _ in range(times):
        process = preloaded.start(*command, env=mirrored() if how == signal.SIGINT else os.environ)
        deadline = time.monotonic() + 60
        while (
            not (cut / "metrics.jsonl").is_file()
            or len((cut / "metrics.jsonl").read_text().splitlines()) < reached + 7
        ):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(how)
        _, err = process.communicate(timeout=30)
        reached = len(metrics(cut)) // EVERY * EVERY
    if how != signal.SIGKILL:
        assert process.returncode == 130 and "interrupted" in err.splitlines()[-1]
        assert json.loads((cut / "run.json").read_text())["exit_reason"] == "interrupted"
    assert len(metrics(cut)) < 60
    assert run(*command).returncode == 0
    assert timeless(metrics(cut)) == timeless(metrics(uninterrupted))
    same = [json.loads((folder / "run.json").read_text()) for folder in (cut, uninterrupted)]
    assert same[0]["bit_histogram"] == same[1]["bit_histogram"]
    assert same[0]["results"]["val_loss"] == same[1]["results"]["val_loss"]


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "line.txt").write_text("a line of text\n" * 10)
    (tmp_path / "bad.yaml").write_text("format: [E4M3\n")
    (tmp_path / "typo.yaml").write_text("formt: E4M3\n")
    (tmp_path / "file").write_text("a file where a folder should be")
    return tmp_path


@pytest.mark.parametrize(("command", "words"), [
    ("train e9m9_fp8", "allowed: bf16_baseline, e0m7_fp8"),
    ("train {t}/bad.yaml", "not valid YAML (line"),
    ("train {t}/absent.yaml", "cannot read"),
    ("train e4m3_fp8 --set format=E4M3b7n", "hence no zero"),
    ("train e4m3_fp8 --set data=wikipedia", "stdlib"),
    ("train e4m3_fp8 --set tokenizer=words", "bpe"),
    ("train e4m3_fp8 --set leanring_rate=1", "unknown config key"),
    ("train e4m3_fp8 --set data=path:{t}/empty.txt", "empty.txt"),
    ("train e4m3_fp8 --set data=path:{t}/binary.txt", "binary.txt"),
    ("train e4m3_fp8 --set data=path:{t}/short.txt", "too short"),
    ("train e4m3_fp8 --set data=path:{t}/line.txt", "block_size 64"),
    ("train e4m3_fp8 --set data=path:{t}/absent.txt", "absent.txt"),
    ("train e4m3_fp8 --set device=cuda", "no CUDA device is available; allowed: auto, cpu"),
    ("train e4m3_fp8 --set name=a\nb", "cannot name a folder"),
    (f"train e4m3_fp8 --set name={'n' * 300}", "cannot name a folder"),
    ("train e4m3_fp8 --set seed=-1", "seed must be at least 0"),
    ("train e4m3_fp8 --set lr=1e-3 --set lr=1e-4", "--set lr is given 2 times"),
    ("train e4m3_fp8:storage=fp32 --set rules=head:weight=E3M4", "rules needs a storage that is"),
    ("compare e4m3_fp8 {t}/typo.yaml", "did you mean format"),
    ("compare bf16_baseline e4m3_fp8 --out {t}/file/runs", "cannot write to"),
    ("compare bf16_baseline e4m3_fp8 --seeds 2 --set seed=9223372036854775807", "seed must be"),
    ("compare bf16_baseline e4m3_fp8 --seeds 999999999999", "at most 100"),
    ("compare e4m3_fp8 e4m3_fp8:storage=grid", "unknown storage 'grid'"),
    ("compare e4m3_fp8 e4m3_fp8:lr=1e-4", "arms must agree in lr"),
    ("compare e4m3_fp8 e4m3_fp8:lr", "neither a .yaml file nor packaged"),
    ("compare e4m3_fp8 e4m3_fp8:storage=grid_nearest,", "'' is not KEY=VALUE"),
    ("formats E4M33", "did you mean E4M3"),
    ("formats E4M3 extra", "unrecognized arguments"),
    ("formats E4M3b999", "outside float32's range"),
    ("--json", "required"),
])
def test_a_wrong_request_is_one_line_and_writes_nothing(monkeypatch, texts, command, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(texts)  # which would get the folder `runs`
    before = sorted(texts.rglob("*"))
    done = run(*command.replace("{t}", str(texts)).split(" "))
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout
    assert sorted(texts.rglob("*")) == before


def test_the_variable_of_wandb_says_where_metrics_go(monkeypatch, tmp_path):
    def train(mode):
        monkeypatch.setenv("WANDB_MODE", mode)
        return run("train", "bf16_baseline", "--out", tmp_path / mode, *settings(max_steps=2))
    pytest.importorskip("wandb")
    for mode, mirrors in (("disabled", False), ("dryrun", True)):
        assert train(mode).returncode == 0
        assert (tmp_path / mode / "bf16_baseline/wandb").exists() is mirrors
    refused = train("sometimes")
    assert refused.returncode == 2 and not (tmp_path / "sometimes").exists()
    modes = "offline, dryrun, online, run, shared, disabled"
    assert f"unknown WANDB_MODE 'sometimes'; allowed: {modes}" in refused.stderr


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "e4m3_fp8").mkdir()
    (tmp_path / "e4m3_fp8" / "thesis.tex").write_text("chapter 1")
    done = run("train", "e4m3_fp8", *settings(), "--out", tmp_path)
    assert done.returncode == 2 and "not a run folder" in done.stderr
    assert os.listdir(tmp_path / "e4m3_fp8") == ["thesis.tex"]


def test_a_changed_text_is_another_run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 2000)
    changed = settings(max_steps=2, data=f"path:{text}")
    args = ["train", "e4m3_fp8", *changed, "--out", tmp_path / "runs"]
    assert run(*args).returncode == 0
    text.write_text("jumps over the lazy dog\n" * 2000)
    done = run(*args)
    assert done.returncode == 2 and "corpus hash" in done.stderr and done.stderr.count("\n") == 1


def test_help_and_formats_need_no_torch_time():
    done = run("--help")
    assert done.returncode == 0 and "examples" in done.stdout
    code = "import sys, altgrad.cli; altgrad.cli.make_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_a_diverged_run_says_so_and_is_not_a_success(tmp_path):
    args = [*settings(max_steps=4, lr=1e30, warmup_steps=0), "--out", tmp_path]
    done = run("train", "e4m3_fp8", *args)
    assert done.returncode == 1 and "the validation loss is not finite" in done.stdout
    both = run("compare", "bf16_baseline", "e4m3_fp8", *args)
    assert both.returncode == 1
    assert "e4m3_fp8: finished, but the validation loss is not finite" in both.stdout
    as_json = run("compare", "bf16_baseline", "e4m3_fp8", *args, "--json").stdout
    rows = json.loads(as_json, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))["rows"]
    assert [row["val_loss"] for row in rows] == [None, None]
    assert all("nonfinite" in row for row in metrics(tmp_path / "e4m3_fp8")[1:])


def test_a_run_ends_with_its_picture_says_how_long_it_takes_and_stands_on_the_page(tmp_path):
    done = run("train", "e4m3_fp8", *settings(), "--out", tmp_path)
    assert done.returncode == 0 and f"figure: {tmp_path}/e4m3_fp8/run.png" in done.stdout
    assert (tmp_path / "e4m3_fp8/run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"gpt-mini on path:{__file__}")
    assert "12 steps of 4 x 32 tokens" in lines[0]
    assert lines[1].startswith("e4m3_fp8: step 1/12")
    assert all(line.endswith(" left") for line in lines[1:])
    page = run("watch", tmp_path, "--page")
    assert page.returncode == 0 and page.stdout == f"page: {tmp_path}/watch.html\n"
    text = (tmp_path / "watch.html").read_text()
    assert "<td>e4m3_fp8</td>" in text and "http-equiv" not in text and "<script" not in text


def test_the_help_of_train_lists_every_setting():
    from altgrad.training.config import TrainConfig
    shown = run("train", "--help").stdout
    assert all(f"    {name}: " in shown for name in TrainConfig.__dataclass_fields__)


LOADED = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.3); print('loaded')"
DROPPED = """
import os, signal, time
class Gone:
    def __del__(self): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2)
Gone()
"""


@pytest.mark.parametrize("where", ["import", "__del__"])
def test_an_interrupt_is_neither_swallowed_nor_in_the_way_of_what_loads(tmp_path, where):
    """Libraries that are being loaded drop an interrupt, turn it into another error, or abort;
    and Python drops it in `__del__`."""
    (tmp_path / "slow.py").write_text(LOADED if where == "import" else "")
    begins = "import slow" if where == "import" else DROPPED
    code = f"""
import sys, time
from altgrad import cli
cli._take_process()
sys.path.insert(0, {str(tmp_path)!r})
try:
    {begins.strip().replace(chr(10), chr(10) + "    ")}
    time.sleep(20)
except KeyboardInterrupt: print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["loaded"] * (where == "import") + ["interrupted"], done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("delay", [0.1, 1.2])
def test_an_early_interrupt_leaves_no_traceback_and_no_silent_folder(tmp_path, delay):
    endless = settings(model="gpt-tiny", max_steps=5000)
    command = [preloaded.ALTGRAD, "train", "e4m3_fp8", *endless, "--out", str(tmp_path)]
    for later in range(6):  # while Python itself was still starting, again, and later
        process = subprocess.Popen(command, env=mirrored(), stderr=subprocess.PIPE, text=True)
        time.sleep(delay * 2**later)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        if process.returncode != -signal.SIGINT and "init_import_site" not in err: break
    assert process.returncode == 130 and "Traceback" not in err, err
    folder = tmp_path / "e4m3_fp8"
    if (folder / "config.yaml").exists():
        assert json.loads((folder / "run.json").read_text())["exit_reason"] == "interrupted"


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = run("formats")
    assert done.returncode == 0 and "…" not in done.stdout and "1.9921875 x 2^127" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= columns
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()][3:]
    assert names[:8] == [f"E{e}M{7 - e}" for e in range(8)]
    assert {"mxint8", "binary8p1", "float8_e8m0fnu"} <= set(names[8:])


def test_a_card_and_its_codes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    card, table = run("formats", "E4M3"), run("formats", "float8_e4m3fn", "--codes")
    assert card.returncode == table.returncode == 0 and table.stdout.startswith(card.stdout)
    assert "448  (0x7E)" in card.stdout and "0x7F, 0xFF" in card.stdout
    assert "0x38 1 " in table.stdout
    assert "0x7F NaN" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 80


FULL = "altgrad: the output or the system failed: No space left on device\n"
where_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is none here")


@pytest.mark.parametrize(("command", "code", "begins", "error"), [
    ("formats E4M33", 2, "", "altgrad: unknown format 'E4M33' (did you mean E4M3?); allowed: "),
    ("formats bfloat16 --codes | head -3", 0, "bfloat16", ""),  # whose reader leaves early
    pytest.param("--help > /dev/full", 2, "", FULL, marks=where_full),
])
def test_what_a_shell_sees(command, code, begins, error):
    done = subprocess.run(
        f"{preloaded.ALTGRAD} {command}", shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stderr.count("\n") == bool(error)
    assert done.stdout.startswith(begins) and bool(done.stdout) == bool(begins)
    assert done.stderr.startswith(error)


@where_full
@pytest.mark.parametrize("command", ["--help", "train --help", "formats"])
def test_an_output_that_is_full_is_one_line(capsys, command):
    with open("/dev/full", "w") as full, redirect_stdout(full):
        assert cli.main(command.split()) == 2
    assert capsys.readouterr().err == FULL


@pytest.mark.parametrize(("command", "stored"), {
    "train c.yaml --out x": "the last checkpoint",
    "sweep m.yaml --out x": "the runs that are finished",
    "conform m:f --format E4M3 --all": "the numbers that were judged",
    "conform m:f --format E4M3": "", "doctor": "",
}.items())
def test_only_what_stores_as_it_goes_promises_to_go_on(command, stored, monkeypatch):
    def interrupt(args): raise KeyboardInterrupt
    monkeypatch.setitem(cli._COMMANDS, command.split()[0], interrupt)
    promise = f"; the same command goes on from {stored}" if stored else ""
    done = run(*command.split())
    assert done.returncode == 130 and done.stderr == f"altgrad: interrupted{promise}\n"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_result_is_printed_though_its_figure_cannot_be_written(tmp_path, monkeypatch, more):
    from altgrad.evidence import bench
    from altgrad.views import report

    def full(figure, path):
        plt.close(figure)
        raise WriteError("the disk is full")
    monkeypatch.setattr(report, "save_figure", full)
    made = dict(run_bench={"a card": 1}, card_text="a card", plot_card=None, card_folder=tmp_path)
    for name, value in made.items():
        monkeypatch.setattr(bench, name, lambda *args, value=value: value)
    # the loss of such a rate is finite, and its perplexity is not
    how = [*settings(max_steps=2, lr=100.0, warmup_steps=0), "--out", tmp_path]
    commands = [
        (["compare", "bf16_baseline", "e4m3_fp8", *how], "e4m3_fp8"),
        (["train", "e4m3_fp8", *how], "val_loss" if more else "validation loss"),
        (["bench", "adamw", "--out", tmp_path], "a card"),
    ]
    if not more: commands.append((["autopsy", tmp_path / "e4m3_fp8"], "e4m3_fp8 (E4M3"))
    for command, words in commands:
        done = run(*command, *more)
        assert done.returncode == 1, command
        assert words in done.stdout and "figure: " not in done.stdout
        assert "the disk is full" in done.stderr
        if more: assert "Infinity" not in done.stdout and json.loads(done.stdout)


def test_a_folder_that_cannot_be_made_is_a_wrong_request(tmp_path, monkeypatch):
    from altgrad.training import trainer

    (tmp_path / "file").write_text("")
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    quantize_model(model, "E4M3")
    monkeypatch.setattr(trainer, "trained_model", lambda run: model)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for args in (["convert", "run", "--to", "fp8", "--out", tmp_path / "file"],
                 ["explore", "--out", tmp_path / "absent/x.ipynb"]):
        done = run(*args)
        assert done.returncode == 2, args
        assert done.stderr.startswith("altgrad: cannot ")
