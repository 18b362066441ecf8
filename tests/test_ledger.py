"""The stored ledger stands alone: its texts and checkpoints lie beside it, and a clone can replay
its rows with nothing else."""
import importlib.util
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from altgrad.basics import InputError, read_parquet
from altgrad.cli import _EXAMPLES, main
from altgrad.training.data import load_corpus
from altgrad.evidence.instrument import Bench, Task
from altgrad.evidence.sweep import beside, find_row, read_rows, replay
from preloaded import ALTGRAD
from tiny import small_bench

LEDGER = Path(__file__).resolve().parent.parent / "nbs/results/ledger"


@pytest.fixture(scope="module")
def rows():
    return [row for row in read_rows(LEDGER) if not row.get("error")]


def test_every_row_finds_its_text_beside_the_ledger(rows, tmp_path):
    texts, kept = beside(LEDGER)
    bench = Bench(kept, texts, cache=tmp_path)
    assert {row["corpus"] for row in rows} == set(texts)
    for label in texts:
        assert {bench.corpus(label).hash} == {
            row["corpus_sha"] for row in rows if row["corpus"] == label
        }
    assert beside(LEDGER / "tier1.parquet") == beside(LEDGER / "amended") == (texts, kept)


def test_every_row_finds_a_checkpoint_beside_the_ledger(rows):
    bench = Bench(beside(LEDGER)[1])
    for name in {row["checkpoint"] for row in rows}: assert len(bench.state(name)[1]) == 64


def test_ledger_is_light():
    assert (
        sum(
            path.stat().st_size
            for path in LEDGER.rglob("*")
            if path.parent.name in ("texts", "checkpoints")
        )
        < 16e6
    )


CARD = (LEDGER / "README.md").read_text(encoding="utf-8")


def test_the_cards_two_lines_load_every_row(rows, tmp_path):
    lines = CARD.split("```python\n")[1].split("```")[0]
    asked = "print(table.run.nunique(), len(rows), rows[0]['run'] in set(table.run))"
    got = subprocess.run(
        [sys.executable, "-c", lines + asked], cwd=LEDGER.parents[2], capture_output=True,
        text=True, check=True, env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    stored = sum(pq.read_metadata(p).num_rows for p in LEDGER.glob("*.parquet"))
    assert got.stdout.split() == [str(stored), str(stored), "True"]


def test_the_card_names_every_column():
    folders = [LEDGER, *(LEDGER.parent / name for name in ("bits", "narrow", "reasons"))]
    tables = [p for folder in folders for p in folder.rglob("*.parquet")]
    columns = {name for p in tables for name in pq.read_schema(p).names}
    assert len(columns) > 50 and {name for name in columns if f"`{name}`" not in CARD} == set()


def test_a_packed_text_is_the_folder_that_was_packed(tmp_path):
    folder = tmp_path / "texts"
    for name in ("b/two.txt", "a/one.txt", "a/three.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the text of {name}. " * 400)
    with tarfile.open(tmp_path / "packed.tar.xz", "w:xz") as tar: tar.add(folder, arcname=".")
    plain, packed = (
        load_corpus(f"path:{tmp_path / name}", cache=tmp_path / name.replace(".", "_"))
        for name in ("texts", "packed.tar.xz")
    )
    assert len(plain.train) and packed.hash == plain.hash


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another kind", "no file in it"])
def test_a_damaged_archive_is_refused(tmp_path, damage):
    path = tmp_path / "x.tar.xz"
    (tmp_path / "one.txt").write_text("a text " * 5000)
    with tarfile.open(path, "w:xz") as tar:
        if damage != "no file in it": tar.add(tmp_path / "one.txt", "one.txt")
    whole = path.read_bytes()
    broken = {
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:80] + bytes([whole[80] ^ 255]) + whole[81:],
        "empty": b"",
        "another kind": lzma.compress(b"x"),
    }
    path.write_bytes(broken.get(damage, whole))
    with pytest.raises(InputError) as e: load_corpus(f"path:{path}", cache=tmp_path / "cache")
    assert "\n" not in str(e.value) and "x.tar.xz" in str(e.value) and len(str(e.value)) <= 300


def test_replay_takes_the_stored_checkpoint(small_folder, tmp_path):
    """Another CPU's row runs from the stored checkpoint and says so;
    this CPU's row runs from one that is pretrained again."""
    from altgrad.evidence.instrument import Arm, run_arm
    from altgrad.training.tracking import git_commit, machine, versions
    task = Task(steps=4, batch_size=4, warmup=2, chunks=4, windows=2, every=4)
    made = small_bench(small_folder, task)
    # another checkpoint under the name
    (tmp_path / "stored").mkdir()
    shutil.copy(made.file("tiny-1"), tmp_path / "stored/tiny-0.pt")
    row = {
        **run_arm(Arm(checkpoint="tiny-0", corpus="tiny"), made),
        "machine": machine(),
        "versions": versions(),
        "commit": git_commit(),
    }
    agrees, said = replay(row, made.with_folder(tmp_path / "empty"), tmp_path / "stored")
    assert agrees and "bit for bit" in said and (tmp_path / "empty/tiny-0.pt").is_file()
    agrees, said = replay(
        {**row, "machine": {**machine(), "cpu": "of another make"}},
        made.with_folder(tmp_path / "none"),
        tmp_path / "stored",
    )
    assert "another checkpoint" in said
    assert "another CPU" in said
    assert not (tmp_path / "none").exists()


def test_a_cell_that_is_half_a_text_is_named(tmp_path, capsys):
    table = pq.read_table(LEDGER / "amended/headline_e6m1.parquet").slice(0, 3)
    broken = [*table["task"].to_pylist()[:1], '{"steps":', *table["task"].to_pylist()[2:]]
    place, path = table.column_names.index("task"), tmp_path / "cut.parquet"
    pq.write_table(table.set_column(place, "task", pa.array(broken)), path)
    with pytest.raises(InputError, match="cut.parquet is damaged in row 2: task is no JSON"): read_rows(path)
    assert main(["replay", "0", "--ledger", str(path)]) == 2
    assert "task is no JSON" in capsys.readouterr().err
    assert subprocess.run([ALTGRAD, "replay", "0", "--ledger", path]).returncode == 2


def test_parquet_is_read_by_arrow_alone(monkeypatch):
    "Threads of Arrow that held a Python file's bytes aborted one process in four at its end."
    path = LEDGER / "amended/headline_e6m1.parquet"
    expected = len(pq.read_table(path))
    def no_python(*args, **kwargs): raise AssertionError(f"Python opened {args[0]}")
    monkeypatch.setattr("builtins.open", no_python)
    monkeypatch.setattr("io.open", no_python)
    assert len(read_parquet(path)) == expected


@pytest.fixture
def program():
    "The program that stores ledgers."
    spec = importlib.util.spec_from_file_location("ledger", LEDGER.parents[2] / ".ci/ledger.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stored_file_of_another_ledger_is_not_overwritten(program, tmp_path):
    rows = [{"run": name, "val_loss": 1.0, "stage": "tune", "matrix": "mine"} for name in "abc"]
    def store(*these):
        (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in these))
        program.main(tmp_path / "l.jsonl", tmp_path / "stored")
    store(*rows[:2])
    store(*rows)  # the same one, which went on
    before = (tmp_path / "stored/mine.parquet").read_bytes()
    with pytest.raises(InputError, match="mine.parquet holds 2 runs that .*l.jsonl does not have"):
        store({**rows[0], "matrix": "another"}, rows[0])
    assert (tmp_path / "stored/mine.parquet").read_bytes() == before
    assert not (tmp_path / "stored/another.parquet").exists()
    with pytest.raises(InputError, match="absent.jsonl cannot be read: No such file"):
        program.main(tmp_path / "absent.jsonl", tmp_path / "stored")


def test_the_runs_of_the_examples_are_stored():
    for typed, _ in _EXAMPLES["replay"]:
        words = typed.split()
        if "nbs/results/ledger" in words: assert find_row(read_rows(LEDGER), words[2])


def test_files_that_are_stored_together_have_the_same_columns(program, tmp_path):
    "Whichever came first, and no value changes."
    rows = [row for row in read_rows(LEDGER / "amended/headline_nearest.parquet") if not row["error"]][:6]
    rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    early = [{k: v for k, v in row.items() if k not in ("engine", "formula")} | {"matrix": "early"} for row in rows]
    late = [row | {"matrix": "late", "sources": {"a": "b"}} for row in rows]
    for name, these in (("early", early), ("late", late), ("early", early)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in these))
        program.main(tmp_path / f"{name}.jsonl", tmp_path / "stored")
    files = sorted((tmp_path / "stored").glob("*.parquet"))
    assert [path.stem for path in files] == ["early", "late"]
    assert pq.read_schema(files[0]).equals(pq.read_schema(files[1]))
    for path, these in zip(files, (early, late)):
        back = {row["run"]: {k: v for k, v in row.items() if v is not None} for row in read_rows(path)}
        for row in these:
            mine = back[row["run"]]
            assert mine.keys() == row.keys()
            assert [k for k in row if mine[k] != row[k] and not isinstance(row[k], list)] == []


def test_stored_ledgers_have_the_same_columns_in_every_file():
    for folder in (LEDGER, LEDGER / "amended"):
        first, *rest = (pq.read_schema(path) for path in sorted(folder.glob("*.parquet")))
        assert rest and all(schema.equals(first) for schema in rest), folder


@pytest.mark.parametrize("given, said", [
    ("eurlex=path:{text}", "eurlex: the hash of this text is"), ("eurlex", "eurlex: give LABEL=TEXT"),
    ("other=path:{text}", "the labels of the ledger are eurlex, stdlib"),
])
def test_another_text_is_refused_before_anything_is_written(tmp_path, monkeypatch, given, said):
    spec = importlib.util.spec_from_file_location("pack_texts", LEDGER.parents[2] / ".ci/pack_texts.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    monkeypatch.setattr(script, "read_ledger", lambda _: [
        {"corpus": name, "corpus_sha": "0" * 64} for name in ("eurlex", "stdlib")])
    (text := tmp_path / "text.txt").write_text("".join(f"{n} is a number\n" for n in range(5000)))
    (tmp_path / "texts").mkdir()
    (kept := tmp_path / "texts/eurlex.tar.xz").write_bytes(b"what was there")
    with pytest.raises(SystemExit, match=said): script.main([given.format(text=text)])
    assert list(kept.parent.iterdir()) == [kept] and kept.read_bytes() == b"what was there"
