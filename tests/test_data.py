"""The data room: sources, splits, cache, vocabularies, batches and entropies. Offline and quick."""

import json
import math
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections import Counter

import numpy as np
import pytest
import torch

import preloaded
from altgrad.basics import InputError
from altgrad.training import data as D
from altgrad.training.data import (
    Corpus, bigram_entropy, get_batch, load_corpus, load_labelled, unigram_entropy,
    validation_windows,
)

WORDS = "whereas having regard to the treaty establishing a common market ¶ naïve Ελλάδα 條約 🙂".split()


def prose(seed: int, words: int) -> str:
    "Deterministic text with characters of one to four bytes."
    picks = np.random.default_rng(seed).integers(0, len(WORDS), words)
    return " ".join(WORDS[i] + ("\n" if i == 3 else "") for i in picks)


ROWS = [prose(seed, 40) + f" {seed}" for seed in range(60)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps({"text": row, "labels": []}) + "\n" for row in rows))
    return path


def write_parquet(path, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def refused(words, do, *args, **kwargs):
    "Runs `do` and returns its InputError's message, which must be one line and contain `words`."
    with pytest.raises(InputError) as error:
        do(*args, **kwargs)
    message = str(error.value)
    assert words in message and "\n" not in message and len(message) < 600, message
    return message


def documents(tokens):
    return tokens.tobytes().decode().split("\0")


def names(folder):
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def laws(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("laws") / "laws.jsonl", ROWS)


# --- sources
# ---------------------------------------------------------------------------------------------------------


def test_stdlib_is_whole_and_reproducible(tmp_path):
    a, b = (load_corpus("stdlib", cache=tmp_path / name) for name in "ab")
    assert a.hash == b.hash and a.folder != b.folder and np.array_equal(a.train, b.train)
    assert a.train.dtype == np.uint8 and a.train.ndim == 1 and isinstance(a.train, np.memmap)
    assert len(a.train) > 5_000_000 and 0.02 < len(a.val) / len(a.train) < 0.3
    facts = a.facts()
    assert facts == dict(name="stdlib", tokenizer="bytes", vocab_size=256, hash=a.hash, train_tokens=len(a.train),
                         val_tokens=len(a.val), python=platform.python_version())
    assert json.loads(json.dumps(facts)) == facts
    assert names(a.folder) == ["corpus.json", "train.bin", "val.bin"]
    assert a.folder.name == a.hash[:16]
    assert str(tmp_path) not in json.dumps(facts) + (a.folder / "corpus.json").read_text()


def test_stdlib_leaves_out_packages_tests_and_machine_files(tmp_path):
    keep = ["os.py", "unittest/case.py", "json/decoder.py", "testing.py"]
    drop = [
        "test/a.py", "json/tests/a.py", "idlelib/idle_test/a.py", "site-packages/p/a.py",
        "dist-packages/a.py", "_sysconfigdata__linux.py", "sitecustomize.py",
        "config-3.11-x/python-config.py", "pydoc_data/topics.py", "os.txt",
    ]
    for name in keep + drop:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    assert sorted(text.decode()[2:] for _, text in D._stdlib(tmp_path)) == sorted(keep)
    assert list(D._stdlib(tmp_path / "python311.zip")) == []


def test_a_text_file_is_cut_at_its_last_tenth(tmp_path, cache):
    text = prose(0, 500)
    (tmp_path / "a.txt").write_text(text)
    corpus = load_corpus(f"path:{tmp_path}/a.txt", cache=cache)
    # both decode: no character is cut
    assert corpus.train.tobytes().decode() + corpus.val.tobytes().decode() == text
    assert abs(len(corpus.val) - len(text.encode()) / 10) < 4
    assert "python" not in corpus.facts() and corpus.name == f"path:{tmp_path}/a.txt"


def test_rows_give_the_same_corpus_from_jsonl_and_parquet(tmp_path, cache, laws):
    a = load_corpus(f"path:{laws}", cache=cache)
    b = load_corpus(
        f"path:{write_parquet(tmp_path / 'x.parquet', text=ROWS, n=list(range(60)))}", cache=cache
    )
    c = load_corpus(
        f"path:{write_parquet(tmp_path / 'y.parquet', text=[r.split(chr(10)) for r in ROWS])}",
        cache=cache,
    )
    assert a.hash == b.hash == c.hash and a.folder == b.folder
    assert sorted(documents(a.train) + documents(a.val)) == sorted(ROWS)


def test_the_split_does_not_depend_on_row_order_or_on_other_rows(tmp_path, cache, laws):
    val = set(documents(load_corpus(f"path:{laws}", cache=cache).val))
    shuffled = [ROWS[i] for i in np.random.default_rng(1).permutation(60)]
    assert (
        set(
            documents(
                load_corpus(f"path:{write_jsonl(tmp_path / 'b.jsonl', shuffled)}", cache=cache).val
            )
        )
        == val
    )
    more = ROWS + [prose(seed, 30) for seed in range(100, 140)]
    grown = load_corpus(f"path:{write_jsonl(tmp_path / 'c.jsonl', more)}", cache=cache)
    assert set(documents(grown.val)) & set(ROWS) == val
    twice = load_corpus(f"path:{write_jsonl(tmp_path / 'd.jsonl', ROWS * 2)}", cache=cache)
    assert not set(documents(twice.train)) & set(documents(twice.val))


def test_two_documents_are_enough_and_one_goes_to_each_side(tmp_path, cache):
    for seed in range(20):
        rows = [prose(seed, 10), prose(seed + 50, 10)]
        corpus = load_corpus(f"path:{write_jsonl(tmp_path / 'two.jsonl', rows)}", cache=cache)
        assert sorted(documents(corpus.train) + documents(corpus.val)) == sorted(rows)


def test_a_folder_is_the_same_wherever_it_lies(tmp_path, cache):
    for root in (tmp_path / "here", tmp_path / "there"):
        (root / "deep").mkdir(parents=True)
        for i in range(12):
            (root / "deep" / f"{i}.{['txt', 'md', 'py'][i % 3]}").write_text(ROWS[i])
        write_jsonl(root / "rows.JSONL", ROWS[12:20])
        write_parquet(root / "rows.parquet", text=ROWS[20:30])
        (root / "photo.jpg").write_bytes(b"\xff\xd8\0")
        (root / "empty.txt").write_text("")
    a, b = (load_corpus(f"path:{tmp_path}/{name}", cache=cache) for name in ("here", "there"))
    assert a.hash == b.hash and a.name != b.name
    assert sorted(documents(a.train) + documents(a.val)) == sorted(ROWS[:30])


# --- lex_glue
# --------------------------------------------------------------------------------------------------------

LEX = {
    "eurlex": lambda i: f"Article {i}. Whereas the Council",
    "ecthr_a": lambda i: [f"{i}. The case", "originated in"],
}
SIZES = {"train": (0, 20), "validation": (100, 105), "test": (200, 205)}


def lex_glue(root, splits=SIZES):
    """A local copy with the data set's schema:
    string or list of strings, and a list of class labels."""
    import datasets as ds

    readme = "---\nconfigs:\n"
    for name, text in LEX.items():
        (root / name).mkdir(parents=True)
        readme += f"- config_name: {name}\n  data_files:\n"
        kind = ds.Value("string") if name == "eurlex" else ds.List(ds.Value("string"))
        labels = ds.List(
            ds.ClassLabel(names=[str(i) for i in range(100 if name == "eurlex" else 10)])
        )
        for split, (start, end) in splits.items():
            rows = {
                "text": [text(i) for i in range(start, end)],
                "labels": [[i % 10] for i in range(start, end)],
            }
            table = ds.Dataset.from_dict(rows, features=ds.Features(text=kind, labels=labels))
            table.to_parquet(root / name / f"{split}-00000-of-00001.parquet")
            readme += f"  - split: {split}\n    path: {name}/{split}-*\n"
    (root / "README.md").write_text(readme + "---\n")
    return root


@pytest.fixture(scope="module")
def hub_home(tmp_path_factory):
    "Keeps the Hugging Face cache of these tests out of the user's."
    import datasets

    home = tmp_path_factory.mktemp("hub")
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = home / "datasets"
    yield home
    datasets.config.HF_DATASETS_CACHE = before


def test_lex_glue_from_a_local_copy(tmp_path, cache, hub_home):
    root = lex_glue(tmp_path / "lex_glue")
    eurlex = load_corpus(f"lex_glue/eurlex@{root}", cache=cache)
    assert documents(eurlex.train) == [LEX["eurlex"](i) for i in range(20)]
    assert documents(eurlex.val) == [LEX["eurlex"](i) for i in range(100, 105)]
    ecthr = load_corpus(f"lex_glue/ecthr_a@{root}", cache=cache)
    assert documents(ecthr.val) == [f"{i}. The case\noriginated in" for i in range(100, 105)]
    assert load_corpus(f"lex_glue/eurlex@{root}", cache=cache).folder == eurlex.folder


def test_lex_glue_with_labels(tmp_path, cache, hub_home):
    root = lex_glue(tmp_path / "lex_glue")
    for name, text in (
        ("eurlex", LEX["eurlex"]),
        ("ecthr_a", lambda i: "\n".join(LEX["ecthr_a"](i))),
    ):
        corpus = load_labelled(f"lex_glue/{name}@{root}", cache=cache)
        assert sorted(corpus.labels) == [str(i) for i in range(10)]
        x, y = corpus.validation(64, 99)
        assert [bytes(row.tolist()).rstrip(b"\0") for row in x] == [
            text(i).encode() for i in range(100, 105)
        ]
        assert [[corpus.labels[j] for j in row.nonzero()] for row in y] == [
            [str(i % 10)] for i in range(100, 105)
        ]


def test_labels_from_parquet_and_by_hash(tmp_path, cache):
    labels = [["a"] * (i % 2) + ["b"] * (i % 3 == 0) for i in range(len(ROWS))]
    rows = [{"text": text, "labels": names} for text, names in zip(ROWS, labels)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_parquet(tmp_path / "y.parquet", text=ROWS, labels=labels)
    one, two = (
        load_labelled(f"path:{tmp_path}/{name}", cache=cache) for name in ("x.jsonl", "y.parquet")
    )
    assert one.hash == two.hash and one.labels == two.labels
    plain = load_corpus(f"path:{tmp_path}/x.jsonl", cache=cache)
    assert one.folder == plain.folder and one.train.tobytes() == plain.train.tobytes()
    assert sum(len(b) for b in one.bounds.values()) == len([row for row in ROWS if row])


def test_a_split_that_is_no_text_is_refused(tmp_path, cache):
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"text": "a", "labels": ["x"], "split": []}) + "\n"
    )
    refused("of split []; allowed: train", load_labelled, f"path:{tmp_path}/x.jsonl", cache=cache)


def test_lex_glue_copies_that_are_not(tmp_path, cache, hub_home):
    refused("no such folder", load_corpus, f"lex_glue/eurlex@{tmp_path}/none", cache=cache)
    (tmp_path / "empty").mkdir()
    refused(
        "cannot load lex_glue/eurlex: ", load_corpus, f"lex_glue/eurlex@{tmp_path}/empty",
        cache=cache,
    )
    root = lex_glue(tmp_path / "trainonly", {"train": (0, 20)})
    assert "@<folder" in refused("validation", load_corpus, f"lex_glue/eurlex@{root}", cache=cache)
    assert names(cache) == []


NO_HUB = """
import sys, time
import datasets
from altgrad.basics import InputError
from altgrad.training.data import load_corpus
start = time.monotonic()
try: corpus = load_corpus("lex_glue/eurlex", cache=sys.argv[1])
except InputError as e: print(time.monotonic() - start), sys.exit(str(e))
print(corpus.hash)
"""


def without_hub(home, cache, **more):
    clean = {
        k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("HF_")
    }
    env = clean | {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"} | more
    return subprocess.run(
        [sys.executable, "-c", NO_HUB, str(cache)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_unreachable_hub_is_one_line_and_fast(tmp_path, cache):
    done = without_hub(tmp_path / "home", cache)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    # seconds: the Hub has 3 to answer; loading packages, which is slow where a machine is busy, is
    # not in them
    assert float(done.stdout) < 4
    assert "does not answer" in done.stderr and "lex_glue/eurlex@<folder" in done.stderr
    assert not cache.exists()


def test_without_a_hub_its_cache_is_used(tmp_path, cache, hub_home):
    local = load_corpus(f"lex_glue/eurlex@{lex_glue(tmp_path / 'lex_glue')}", cache=cache)
    made = next(
        p for p in (hub_home / "datasets" / "lex_glue" / "eurlex").rglob("lex_glue-train.arrow")
    ).parent
    home = tmp_path / "home" / "datasets" / "coastalcph___lex_glue" / "eurlex" / "0.0.0"
    home.mkdir(parents=True)
    made.rename(home / ("0" * 40))  # where a download from the Hub would lie
    done = without_hub(tmp_path / "home", tmp_path / "other")
    assert done.stdout.strip() == local.hash, done.stderr


def test_the_knock_goes_to_the_endpoint_or_its_proxy(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"): monkeypatch.delenv(name)
    monkeypatch.setattr(D.urllib.request, "getproxies", D.urllib.request.getproxies_environment)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert D._hub_address() == ("huggingface.co", 443)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hf")
    assert D._hub_address() == ("mirror.example", 8080)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:what")
    assert D._hub_address() == (None, 0)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.setenv("https_proxy", "http://gate.example:3128")
    assert D._hub_address() == ("gate.example", 3128)
    monkeypatch.setenv("no_proxy", "mirror.example")
    assert D._hub_address() == ("mirror.example", 443)


def test_the_knock_does_not_wait_for_a_slow_name_lookup(monkeypatch):
    def slow(*_):
        time.sleep(1)
        raise OSError

    monkeypatch.setattr(D.socket, "create_connection", slow)
    start = time.monotonic()
    assert not D._reachable("slow.example", 443, timeout=0.1) and time.monotonic() - start < 0.8


# --- vocabularies
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [2**18, 64])
def test_bpe_reads_back_exactly(tmp_path, cache, laws, slices, monkeypatch):
    from tokenizers import Tokenizer

    monkeypatch.setattr(D._slices, "__defaults__", (slices,))
    raw = load_corpus(f"path:{laws}", cache=cache)
    bpe = load_corpus(f"path:{laws}", "bpe-330", cache=cache)
    assert bpe.folder == raw.folder / "bpe-330"
    assert bpe.hash == raw.hash
    assert bpe.train.dtype == np.uint16
    assert bpe.vocab_size == 330
    assert names(bpe.folder) == ["corpus.json", "tokenizer.json", "train.bin", "val.bin"]
    tokenizer = Tokenizer.from_file(str(bpe.folder / "tokenizer.json"))
    for theirs, ours in ((bpe.train, raw.train), (bpe.val, raw.val)):
        assert tokenizer.decode(theirs.tolist()).encode() == ours.tobytes()
        assert len(theirs) < len(ours) and int(theirs.max()) < 330
    nul = tokenizer.encode("\0").ids
    # no token reaches across documents
    assert len(nul) == 1
    assert (bpe.train == nul[0]).sum() == (raw.train == 0).sum()


def test_bpe_is_deterministic(tmp_path, laws):
    a, b = (load_corpus(f"path:{laws}", "bpe-300", cache=tmp_path / name) for name in "ab")
    for name in ("train.bin", "val.bin", "tokenizer.json"):
        assert (a.folder / name).read_bytes() == (b.folder / name).read_bytes()


def test_bpe_writes_what_training_never_saw(tmp_path, cache):
    from tokenizers import Tokenizer

    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 90 + "🙂Ω€\x01ß\r\n\t" * 20)
    bpe = load_corpus(f"path:{tmp_path}/a.txt", "bpe-60000", cache=cache)
    assert 256 < bpe.vocab_size < 400  # so short a text has no more to merge
    val = Tokenizer.from_file(str(bpe.folder / "tokenizer.json")).decode(bpe.val.tolist())
    assert val == load_corpus(f"path:{tmp_path}/a.txt", cache=cache).val.tobytes().decode()


def test_slices_join_to_the_split():
    rng = np.random.default_rng(0)
    for size in (4, 5, 7, 16, 1000):
        text = "\0".join(
            "".join(rng.choice(list("a\n ßЖ條🙂"), rng.integers(1, 40))) for _ in range(20)
        )
        slices = list(D._slices(np.frombuffer(text.encode(), np.uint8), size))
        assert "".join(slices) == text and max(len(s.encode()) for s in slices) <= size
        assert all("\0" not in s or s == "\0" for s in slices)


# --- the cache
# -------------------------------------------------------------------------------------------------------


def test_an_interruption_leaves_nothing(tmp_path, cache, laws, monkeypatch):
    real, calls = D._path, []

    def breaks(root):
        calls.append(root)
        for n, item in enumerate(real(root)):
            if len(calls) == 3 and n == 30: raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(D, "_path", breaks)
    with pytest.raises(KeyboardInterrupt): load_corpus(f"path:{laws}", cache=cache)
    assert len(calls) == 3 and names(cache / "corpora") == []
    monkeypatch.undo()
    monkeypatch.setattr(D, "_encode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt): load_corpus(f"path:{laws}", "bpe-300", cache=cache)
    folder = load_corpus(f"path:{laws}", cache=cache).folder
    assert names(cache / "corpora") == [folder.name]
    assert names(folder) == ["corpus.json", "train.bin", "val.bin"]


KILLED = (
    "import os, sys, altgrad.training.data as D; D._publish = lambda *_: os._exit(9); "
    "D.load_corpus(sys.argv[1], cache=sys.argv[2])"
)
PREPARE = """
import sys, time, altgrad.training.data as D
while time.time() < float(sys.argv[4]): time.sleep(0.001)
corpus = D.load_corpus(sys.argv[1], sys.argv[2], cache=sys.argv[3])
print(corpus.hash, len(corpus.train), len(corpus.val))
"""


def test_a_killed_process_leaves_no_corpus(cache, laws):
    done = preloaded.run_code(KILLED, f"path:{laws}", cache)
    left = names(cache / "corpora")
    assert done.returncode == 9 and len(left) == 1 and left[0].startswith(".tmp-")
    corpus = load_corpus(f"path:{laws}", cache=cache)
    assert len(corpus.train) > 1000
    assert names(cache / "corpora") == sorted([left[0], corpus.folder.name])
    os.utime(cache / "corpora" / left[0], (0, 0))
    D._sweep(cache / "corpora")
    assert names(cache / "corpora") == [corpus.folder.name]


def test_two_processes_prepare_the_same_corpus(cache, laws):
    start = time.time() + 4
    argv = [PREPARE, f"path:{laws}", "bpe-330", str(cache), str(start)]
    both = [preloaded.Program(preloaded.by_code, argv, os.environ) for _ in range(2)]
    told = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[0][0] == told[1][0]
    corpus = load_corpus(f"path:{laws}", cache=cache)
    assert names(cache / "corpora") == [corpus.folder.name]
    assert names(corpus.folder) == ["bpe-330", "corpus.json", "train.bin", "val.bin"]


def test_who_comes_second_keeps_the_first_ones_work(cache, laws, monkeypatch):
    real = D._publish

    def late(folder, name):  # another process publishes just before this one
        D.shutil.copytree(folder, name)
        (name / "corpus.json").write_text((name / "corpus.json").read_text() + "\n")
        real(folder, name)

    monkeypatch.setattr(D, "_publish", late)
    corpus = load_corpus(f"path:{laws}", cache=cache)
    assert names(cache / "corpora") == [corpus.folder.name]
    assert (corpus.folder / "corpus.json").read_text().endswith("\n\n")


def test_a_prepared_corpus_is_only_read(cache, laws, monkeypatch):
    first = load_corpus(f"path:{laws}", "bpe-300", cache=cache)
    monkeypatch.setattr(D, "_staging", lambda *_: pytest.fail("wrote"))
    again = load_corpus(f"path:{laws}", "bpe-300", cache=cache)
    assert again.facts() == first.facts() and again.folder == first.folder
    with pytest.raises(ValueError): again.train[0] = 1


def test_a_changed_text_is_another_corpus(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("a" * 100)
    a = load_corpus(f"path:{path}", cache=cache)
    path.write_text("b" * 100)
    assert load_corpus(f"path:{path}", cache=cache).hash != a.hash


def flip(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(path, **facts): path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_a_damaged_corpus_is_named(cache, laws):
    for damage in (
        lambda f: flip(f / "val.bin"),
        lambda f: flip(f / "train.bin"),
        lambda f: edit(f / "corpus.json", vocab_size=255),
        lambda f: edit(f / "corpus.json", hash="0" * 64),
        lambda f: edit(f / "corpus.json", files={}),
        lambda f: edit(f / "corpus.json", files=None),
        lambda f: (f / "val.bin").write_bytes(b"short"),
        lambda f: (f / "val.bin").write_bytes(b""),
        lambda f: (f / "train.bin").unlink(),
        lambda f: (f / "corpus.json").write_text("{"),
        lambda f: (f / "corpus.json").write_text("[]"),
        lambda f: (f / "corpus.json").write_text("[" * 100_000),
    ):
        folder = load_corpus(f"path:{laws}", cache=cache).folder
        damage(folder)
        refused("is damaged, or of an older version; delete that folder", load_corpus, f"path:{laws}", cache=cache)
        D.shutil.rmtree(folder)
    folder = load_corpus(f"path:{laws}", cache=cache).folder
    (folder / ".DS_Store").write_bytes(b"a file browser's")
    assert load_corpus(f"path:{laws}", cache=cache).folder == folder


def test_damaged_tokens_are_named(cache, laws):
    for damage in (
        lambda f: flip(f / "train.bin", -1),  # an id beyond the vocabulary
        lambda f: (f / "tokenizer.json").write_text("{}"),
        lambda f: (f / "tokenizer.json").unlink(),
        lambda f: edit(f / "corpus.json", vocab_size=299),
    ):
        folder = load_corpus(f"path:{laws}", "bpe-300", cache=cache).folder
        damage(folder)
        refused("is damaged", load_corpus, f"path:{laws}", "bpe-300", cache=cache)
        D.shutil.rmtree(folder)


def test_the_cache_folder_is_chosen(tmp_path, laws, monkeypatch):
    monkeypatch.setenv("ALTGRAD_CACHE", str(tmp_path / "env"))
    assert load_corpus(f"path:{laws}").folder.parent == tmp_path / "env" / "corpora"
    assert (
        load_corpus(f"path:{laws}", cache=str(tmp_path / "arg")).folder.parent
        == tmp_path / "arg" / "corpora"
    )
    monkeypatch.setenv("ALTGRAD_CACHE", "")
    monkeypatch.setattr("altgrad.basics.platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    assert load_corpus(f"path:{laws}").folder.parent == tmp_path / "altgrad" / "corpora"


def test_an_unwritable_cache(tmp_path, laws, monkeypatch):
    (tmp_path / "file").write_text("")
    refused(
        "cannot write to the cache folder", load_corpus, f"path:{laws}", cache=tmp_path / "file"
    )

    def full(*_): raise OSError(28, "No space left on device")
    monkeypatch.setattr(D, "_publish", full)
    assert "ALTGRAD_CACHE" in refused(
        "No space left on device", load_corpus, f"path:{laws}", cache=tmp_path / "full"
    )
    assert names(tmp_path / "full" / "corpora") == []


# --- bad input
# -------------------------------------------------------------------------------------------------------

BAD_FILES = {
    "empty.txt": (b"", "is empty"),
    "binary.txt": (b"ab\0cd" * 9, "is binary: a NUL byte at offset 2"),
    "latin.txt": (b"caf\xe9 " * 9, "is not UTF-8: byte 0xe9 at offset 3"),
    "short.txt": (b"too short", "is too short"),
    "blank.jsonl": (b"\n\n", "is empty"),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text": "b"\n', "line 3 is not JSON"),
    "column.jsonl": (b'{"text": "a"}\n{"body": "b", "id": 1}\n', "line 2 has no column 'text', only: body, id"),
    "list.jsonl": (b'["text"]\n', "line 1 has no column 'text', only: a list"),
    "number.jsonl": (b'{"text": 5}\n', "line 1: 'text' is a int"),
    "null.jsonl": (b'{"text": null}\n', "line 1: 'text' is a NoneType"),
    "mixed.jsonl": (b'{"text": ["a", 1]}\n', "line 1: 'text' is a list"),
    "nul.jsonl": (b'{"text": "a\\u0000b"}\n', "line 1 is binary"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1 holds half of a surrogate pair"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', "line 1 is not JSON"),
    "deep.jsonl": (b"[" * 100_000, "line 1 is not JSON"),
    "not.parquet": (b"PAR1 but not really", "is not a parquet file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path, cache, name):
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refused(words, load_corpus, f"path:{tmp_path / name}", cache=cache)
    assert name in message and not cache.exists()


def test_bad_parquet(tmp_path, cache):
    for columns, words in (
        (dict(body=["a"]), "has no column 'text', only: body"),
        (dict(text=["a", None]), "row 2: 'text' is a NoneType"),
        (dict(text=[1, 2]), "row 1: 'text' is a int"),
        (dict(text=["a", "b\0"]), "row 2 is binary"),
    ):
        refused(
            words, load_corpus, f"path:{write_parquet(tmp_path / 'x.parquet', **columns)}",
            cache=cache,
        )


def test_bad_names(tmp_path, cache):
    allowed = refused(
        "unknown corpus 'stdlb' (did you mean stdlib?)", load_corpus, "stdlb", cache=cache
    )
    assert "path:<file or folder>" in allowed and "lex_glue/eurlex@<folder>" in allowed
    for bad in (
        "", "path", "path:", "lex_glue", "lex_glue/scotus", "lex_glue/eurlex@", "lex_glue/eurlex:x",
        None, 5,
    ):
        refused("unknown corpus", load_corpus, bad, cache=cache)
    refused("no such file or folder", load_corpus, f"path:{tmp_path}/none.txt", cache=cache)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\0")
    assert ".jsonl" in refused(
        "holds no text", load_corpus, f"path:{tmp_path}/pictures", cache=cache
    )
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        refused("neither a file nor a folder", load_corpus, f"path:{tmp_path}/pipe", cache=cache)
        (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
        refused("", load_corpus, f"path:{tmp_path}/loop.txt", cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    "tokenizer",
    [
        "bpe", "byte", "", "bpe-", "bpe-x", "bpe-256", "bpe-65536", "bpe-0512", "bpe-1e3",
        "BPE-512", "bpe-٣٠٠", None, 512,
    ],
)
def test_bad_tokenizers(cache, tokenizer):
    assert "bpe-<257 to 65535>" in refused(
        "tokenizer", load_corpus, "stdlib", tokenizer, cache=cache
    )
    assert not cache.exists()


def test_require(tmp_path, cache):
    (tmp_path / "a.txt").write_text("x" * 100)
    corpus = load_corpus(f"path:{tmp_path}/a.txt", cache=cache)
    corpus.require(9)
    refused(
        "too short: 10 validation tokens with tokenizer bytes; allowed: at least 11",
        corpus.require, 10,
    )
    refused("90 train tokens", corpus.require, 90)
    assert repr(corpus).startswith("Corpus(name='path:") and "memmap" not in repr(corpus)
    assert isinstance(corpus, Corpus) and len({corpus, corpus}) == 1


# --- batches
# ---------------------------------------------------------------------------------------------------------


def test_batches_are_slices_of_the_text(cache, laws):
    train = load_corpus(f"path:{laws}", cache=cache).train
    for step in range(20):
        x, y = get_batch(train, 5, 33, seed=3, step=step, micro_step=step % 2)
        assert x.shape == y.shape == (5, 33)
        assert x.dtype == y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()
        starts = D.random_offsets(5, len(train) - 33, 3, step, step % 2)
        for row, start in enumerate(starts.tolist()):
            assert x[row].tolist() == train[start : start + 33].tolist()
            assert y[row].tolist() == train[start + 1 : start + 34].tolist()


def test_a_batch_depends_on_seed_step_and_micro_step_only():
    text = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    want = get_batch(text, 8, 16, 1, 2, 3)
    torch.manual_seed(99)
    np.random.seed(99)
    get_batch(text, 4, 8, 5, 6)
    assert all(torch.equal(a, b) for a, b in zip(want, get_batch(text, 8, 16, 1, 2, 3)))
    assert torch.equal(want[0], get_batch(text.astype(np.uint16), 8, 16, 1, 2, 3)[0])
    keys = [(s, t, m) for s in (-1, 0, 1, 2**63) for t in (0, 1, 2, 10**9) for m in (0, 1, 2)]
    assert len({get_batch(text, 8, 16, *key)[0].numpy().tobytes() for key in keys}) == len(keys)


def test_offsets_are_pinned():
    "Stored results name a seed; these numbers may never change."
    assert D.random_offsets(4, 1000, 0, 0).tolist() == PINNED[0]
    assert D.random_offsets(4, 1000, 7, 3, 1).tolist() == PINNED[1]


PINNED = ([259, 458, 49, 556], [806, 592, 300, 849])


def test_batches_reach_both_ends_and_refuse_a_short_text():
    x, y = get_batch(np.arange(6), 300, 4, 0, 0)
    assert {tuple(row) for row in x.tolist()} == {(0, 1, 2, 3), (1, 2, 3, 4)} and int(y.max()) == 5
    assert get_batch(np.arange(5), 1, 4, 0, 0)[1].tolist() == [[1, 2, 3, 4]]
    refused("at least 5 for block_size 4", get_batch, np.arange(4), 1, 4, 0, 0)


def test_validation_windows():
    for length, block, windows in [
        (101, 10, 5),
        (1000, 7, 50),
        (12, 11, 3),
        (50, 10, 99),
        (2_000_003, 256, 64),
    ]:
        x, y = validation_windows(np.arange(length), block, windows)
        assert len(x) == min(windows, (length - 1) // block) and torch.equal(x + 1, y)
        assert len(y.unique()) == y.numel() and int(x[0, 0]) == 0
        if len(x) > 1:
            assert int(y[-1, -1]) == length - 1
            gaps = x[:, 0].diff()
            assert int(gaps.max() - gaps.min()) <= 1
    refused("at least 11", validation_windows, np.arange(10), 10, 1)
    refused("allowed: 1 or more", validation_windows, np.arange(100), 10, 0)


# --- entropies
# -------------------------------------------------------------------------------------------------------


def slow_unigram(tokens):
    count = Counter(tokens)
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in count.values())


def slow_bigram(tokens):
    return slow_unigram(list(zip(tokens, tokens[1:]))) - slow_unigram(tokens[:-1])


@pytest.mark.parametrize("vocab, dtype", [(2, np.uint8), (256, np.uint8), (65535, np.uint16), (65536, np.int64)])
def test_entropies_against_counting(vocab, dtype):
    tokens = (np.random.default_rng(vocab).random(3000) ** 3 * vocab).astype(dtype)
    assert unigram_entropy(tokens) == pytest.approx(
        slow_unigram(tokens.tolist()), abs=8 * len(tokens) * 2.0**-53
    )
    assert bigram_entropy(tokens) == pytest.approx(
        slow_bigram(tokens.tolist()), abs=16 * len(tokens) * 2.0**-53
    )


def test_entropies_in_closed_form():
    for k in (2, 10, 256):
        cycle = np.tile(np.arange(k, dtype=np.uint16), 50)
        assert unigram_entropy(cycle) == pytest.approx(math.log(k)) and bigram_entropy(cycle) == 0
    assert unigram_entropy(np.zeros(5, np.uint8)) == 0
    assert bigram_entropy(np.zeros(5, np.uint8)) == 0
    # every pair equally often: one token of context does not help
    order_two = np.array([0, 0, 1, 1] * 1000 + [0], np.uint8)
    assert bigram_entropy(order_two) == pytest.approx(math.log(2))


def test_entropies_of_a_markov_chain():
    p = np.array([[0.8, 0.15, 0.05], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
    stationary = np.linalg.matrix_power(p, 200)[0]
    u, edges, state = np.random.default_rng(0).random(400_000), p.cumsum(1).tolist(), 0
    chain = [state := sum(x > e for e in edges[state][:2]) for x in u.tolist()]
    # sampling error
    assert unigram_entropy(np.array(chain, np.uint8)) == pytest.approx(
        -(stationary * np.log(stationary)).sum(), abs=2 / len(chain) ** 0.5
    )
    assert bigram_entropy(np.array(chain, np.uint8)) == pytest.approx(
        -(stationary[:, None] * p * np.log(p)).sum(), abs=2 / len(chain) ** 0.5
    )


def test_entropies_of_too_little():
    refused("no tokens", unigram_entropy, np.zeros(0, np.uint8))
    refused("needs a pair", bigram_entropy, np.zeros(1, np.uint8))
    assert bigram_entropy(np.array([1, 2])) == 0


def test_a_table_in_a_folder_whose_name_is_not_utf8(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    with open(odd / "laws.parquet", "wb") as file:
        pq.write_table(pa.table({"text": ["one", "two"], "more": [1, 2]}), file)
    found = [row for _, row in D._parquet_rows(odd / "laws.parquet")]
    assert found == [{"text": "one"}, {"text": "two"}]


def test_an_archive_is_read_as_the_folder_of_its_files(tmp_path, cache):
    folder, archive = tmp_path / "texts", tmp_path / "texts.tar.xz"
    (folder / "old").mkdir(parents=True)
    (folder / "a.txt").write_text(prose(1, 300))
    (folder / "old/b.md").write_text(prose(2, 300))
    (folder / "notes.csv").write_text("x,y\n" * 100)
    write_jsonl(folder / "rows.jsonl", [prose(i, 20) for i in range(3, 9)])
    write_parquet(folder / "rows.parquet", text=[prose(i, 20) for i in range(9, 12)])
    with tarfile.open(archive, "w:xz") as tar: tar.add(folder, ".")
    there, packed = (load_corpus(f"path:{place}", cache=cache) for place in (folder, archive))
    assert packed.hash == there.hash and b'{"text"' not in bytes(packed.train) + bytes(packed.val)
    for link in (os.link, os.symlink):
        link(folder / "a.txt", folder / "c.txt")
        with tarfile.open(archive, "w:xz") as tar: tar.add(folder, ".")
        refused("c.txt' is a link or a device", load_corpus, f"path:{archive}", cache=cache)
        os.unlink(folder / "c.txt")


def test_a_link_to_a_folder_is_not_passed_over_in_silence(tmp_path, cache):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text(prose(1, 300))
    (tmp_path / "texts/more").symlink_to(tmp_path)
    refused("more' is a link to a folder", load_corpus, f"path:{tmp_path / 'texts'}", cache=cache)
