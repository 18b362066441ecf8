"""The second task: which EuroVoc labels an act carries, in every arm of the second protocol.

python nbs/studies/experiments/labels.py --acts ACTS.jsonl --labels LABELS.json --out FOLDER [--workers N]
python nbs/studies/experiments/labels.py --out FOLDER --store

The first pretrains a model for each seed on the text of the acts that train, makes the runs, tuned and
then confirmed, and goes on where it was stopped; an empty folder begins with what is stored. ACTS.jsonl has
one act of the European Union a line, with `title`, `text`, `eurovoc_ids` and `data_type` (train, dev,
test); LABELS.json lists the labels, with `id` and `label`. The second writes what is finished to
nbs/results/labels, for nbs/studies/second_task.ipynb.
"""
import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from altgrad.basics import InputError, tell, write_atomic
from altgrad.evidence.instrument import state_hash
from altgrad.model.gpt import GPT, label_scores
from altgrad.training.config import TrainConfig
from altgrad.training.data import Corpus, LabelledCorpus, load_labelled
from altgrad.training.experiment import HOLDS, OPEN, REFUTED, Interval, interval
from altgrad.training.tracking import code_commit, machine, versions
from altgrad.training.trainer import Compute, Learner, Trainer, trained_model

HERE = Path(__file__).resolve().parents[2] / "results/labels"
SPLITS = {"train": "train", "dev": "validation", "test": "test"}  # of the acts, and in lex_glue
STEPS, TOKENS, VOCABULARY = 300, 128, "bpe-4000"
PRETRAINING = 1000  # updates on the next token
RATES = tuple(1e-3 * 2.0**k for k in (-1, 0, 1, 2, 3))  # at first
MOST = 4  # rates that are added, one at a time, beyond the edge that is best
TUNE, CONFIRM = (1000, 1001), tuple(range(1, 9))  # seeds: of pretraining, of the head, of batches
GRID = {"storage": "grid_stochastic"}
HOW: dict[str, dict[str, Any]] = {
    "master": {}, "stochastic": GRID, "S^-1": {**GRID, "rule": "stiffness_adamw", "power": -1.0, "floor_octaves": 8.0},
}
ARMS: dict[str, dict[str, Any]] = {
    "FP32": {"format": None},
    **{f"{fmt} {name}": {"format": fmt, **how} for fmt in ("E4M3", "E7M0") for name, how in HOW.items()},
}


# the acts, as a local copy of lex_glue's eurlex has them


def prepare(acts: Path, labels: Path, to: Path) -> str:
    "Writes the acts as a local copy of lex_glue, and returns its name as a config's `data`."
    import datasets

    known = json.loads(labels.read_text(encoding="utf-8"))
    place = {label["id"]: i for i, label in enumerate(known)}
    rows = [json.loads(line) for line in acts.read_text(encoding="utf-8").splitlines()]
    features = datasets.Features(
        text=datasets.Value("string"),
        labels=datasets.List(datasets.ClassLabel(names=[label["label"] for label in known])),
    )
    (to / "eurlex").mkdir(parents=True, exist_ok=True)
    said = ["---", "configs:", "- config_name: eurlex", "  data_files:"]
    for given, split in SPLITS.items():
        part = [row for row in rows if row["data_type"] == given]
        columns = {
            "text": [f"{row['title']}\n{row['text']}" for row in part],
            "labels": [[place[i] for i in row["eurovoc_ids"] if i in place] for row in part],
        }
        datasets.Dataset.from_dict(columns, features=features).to_parquet(to / f"eurlex/{split}-0.parquet")
        said += [f"  - split: {split}", f"    path: eurlex/{split}-*"]
    (to / "README.md").write_text("\n".join([*said, "---", ""]))
    return f"lex_glue/eurlex@{to.resolve()}"


class Halves(NamedTuple):
    "The validation acts: tokens and targets of the half that tunes, and of the half that confirms."
    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]


def halves(corpus: LabelledCorpus) -> Halves:
    "The validation acts in their order, in two."
    x, y = corpus.validation(TOKENS, len(corpus.bounds["val"]))
    half = len(x) // 2
    return Halves((x[:half], y[:half]), (x[half:], y[half:]))


# runs


def config_of(steps: int, seed: int, data: str, **more: Any) -> TrainConfig:
    "The config of a run, or of a pretraining."
    return TrainConfig(
        model="gpt-tiny", data=data, tokenizer=VOCABULARY, max_steps=steps, batch_size=16, block_size=TOKENS,
        warmup_steps=min(40, steps), eval_every=steps, eval_windows=1, compute_dtype="float32", device="cpu",
        seed=seed, **more,
    )


def pretrained(seed: int, corpus: LabelledCorpus, data: str, steps: int, out: Path) -> dict[str, Tensor]:
    "The weights of a model of the next token of the acts that train; made once."
    text = Corpus(**{f.name: getattr(corpus, f.name) for f in fields(Corpus)})
    c = config_of(steps, seed, data, name=f"pretrained-{seed}", lr=2e-3, format=None, checkpoint_every=steps)
    Trainer(c, out, text).run(progress=False)
    return trained_model(out / c.name).state_dict()


@torch.no_grad()
def answers(model: GPT, x: Tensor) -> Tensor:
    "The logits of documents."
    model.eval()
    return torch.cat([model(piece) for piece in x.split(32)])


def make_run(
    arm: str, lr: float, seed: int, corpus: LabelledCorpus, data: str, steps: int, weights: dict[str, Tensor]
) -> tuple[dict[str, Any], Tensor]:
    "The row of a run, and its logits of the acts that confirm."
    c = config_of(steps, seed, data, name="labels", task="multilabel", lr=lr, **ARMS[arm])
    learner = Learner(c, corpus, Compute(c), weights)
    learner.model.train()
    for step in range(1, steps + 1):
        learner.update(step, learner.forward_backward(learner.batches(step)), learner.clip())
    tuning, confirming = halves(corpus)
    logits = [answers(learner.model, x) for x, _ in (tuning, confirming)]
    losses = [
        torch.nn.functional.binary_cross_entropy_with_logits(z, y).item()
        for z, (_, y) in zip(logits, (tuning, confirming))
    ]
    level = best_threshold(logits[0], tuning[1])
    row = {
        "arm": arm, "lr": lr, "seed": seed, "tuning_loss": losses[0], "loss": losses[1],
        "threshold": level, **label_scores(logits[1] - level, confirming[1]),
        "config": asdict(c) | {"data": "lex_glue/eurlex"}, "corpus": corpus.hash, "begun": state_hash(weights),
    }
    return row, logits[1]


def best_threshold(logits: Tensor, targets: Tensor) -> float:
    "The logit above which a label is given, so that micro-F1 is highest."
    levels = torch.linspace(-6, 3, 91)
    given, true = logits[None] > levels[:, None, None], targets > 0.5
    hits = (given & true).sum((1, 2))
    f1 = 2 * hits / (given.sum((1, 2)) + true.sum()).clamp(min=1)
    return float(levels[f1.argmax()])


def read_runs(path: Path) -> list[dict[str, Any]]:
    "The rows of runs.jsonl; a line that a kill cut short is left out."
    if not path.is_file(): return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


class Runs:
    "The runs of a folder: made once, and kept as they come."
    def __init__(
        self, out: Path, corpus: LabelledCorpus, data: str, steps: int = STEPS, pretraining: int = PRETRAINING,
    ):
        self.out, self.corpus, self.data, self.steps, self.pretraining = out, corpus, data, steps, pretraining
        self.path = out / "runs.jsonl"
        self.rows = {self.key(row): row for row in read_runs(self.path)}
        if any(row["corpus"] != corpus.hash for row in self.rows.values()):
            raise InputError(f"{out} holds runs on other acts: choose another --out")

    def begin(self) -> None:
        "Make the folder: an empty one has what is stored; no line stays that a kill cut short."
        self.out.mkdir(parents=True, exist_ok=True)
        if not self.rows: self.take_up(read_stored())
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in self.rows.values()))
        _, targets = halves(self.corpus).second
        known = prior(self.corpus.targets["train"], targets)
        write_atomic(self.out / "prior.json", json.dumps(known) + "\n")
        np.save(self.out / "targets.npy", targets.bool().numpy())

    def take_up(self, stored: "Stored") -> None:
        "Take over the stored runs of this study."
        for row in stored.rows:
            if (row["corpus"], row["config"]["max_steps"]) != (self.corpus.hash, self.steps): continue
            self.rows[self.key(row)] = row
            if row["seed"] in CONFIRM: np.save(self.out / file_of(row), stored.answers[file_of(row)[:-4]])

    def weights(self, seed: int) -> dict[str, Tensor]:
        "What a run begins with."
        return pretrained(seed, self.corpus, self.data, self.pretraining, self.out)

    @staticmethod
    def key(row: Mapping[str, Any]) -> tuple:
        "What tells a run from others."
        return row["arm"], row["lr"], row["seed"], row["config"]["max_steps"]

    def get(self, arm: str, lr: float, seed: int) -> dict[str, Any]:
        "A run's row."
        if (known := self.rows.get((arm, lr, seed, self.steps))) is not None: return known
        row, logits = make_run(arm, lr, seed, self.corpus, self.data, self.steps, self.weights(seed))
        row |= {"commit": code_commit(), "machine": machine("cpu"), "versions": versions()}
        if seed in CONFIRM: np.save(self.out / file_of(row), logits.half().numpy())
        with self.path.open("a", encoding="utf-8") as file: file.write(json.dumps(row) + "\n")
        self.rows[self.key(row)] = row
        tell(f"{arm}, rate {lr:g}, seed {seed}: loss {row['tuning_loss']:.4f}, "
             f"micro-F1 {row['micro_f1']:.3f}")
        return row

    def tuned(self, arm: str) -> float:
        "The best rate of an arm; the grid grows while the best lies at its edge."
        rates = list(RATES)
        def loss(lr: float) -> float:
            return statistics.fmean(self.get(arm, lr, seed)["tuning_loss"] for seed in TUNE)
        for _ in range(MOST):
            best = min(rates, key=loss)
            if best == rates[0]: rates.insert(0, best / 2)
            elif best == rates[-1]: rates.append(best * 2)
            else: return best
        return min(rates, key=loss)

    def arm(self, arm: str) -> None:
        "Tune an arm, and confirm it at its own rate."
        best = self.tuned(arm)
        for seed in CONFIRM: self.get(arm, best, seed)


def file_of(row: Mapping[str, Any]) -> str:
    "The name of the file of a run's logits."
    return f"{row['arm'].replace(' ', '_').replace('^', '')}-{row['seed']}.npy"


def train(runs: Runs, workers: int = 1) -> None:
    "Pretrains, then tunes and confirms every arm; a worker has an arm for itself."
    runs.begin()
    if workers == 1:
        for arm in ARMS: runs.arm(arm)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        list(pool.map(runs.weights, (*TUNE, *CONFIRM)))
        list(pool.map(runs.arm, ARMS))


def store(out: Path, to: Path = HERE) -> None:
    "Writes the rows for the page, and the logits of those that confirm."
    rows = read_runs(out / "runs.jsonl")
    if not rows: raise InputError(f"{out} holds no finished run")
    kinds = {(row["corpus"], row["config"]["max_steps"]) for row in rows}
    if len(kinds) > 1: raise InputError(f"{out} holds runs on other acts or of other lengths: they are not one study")
    to.mkdir(parents=True, exist_ok=True)
    write_atomic(to / "runs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_atomic(to / "prior.json", (out / "prior.json").read_text())
    given = {file_of(row)[:-4]: np.load(out / file_of(row)) for row in rows if row["seed"] in CONFIRM}
    targets = np.load(out / "targets.npy")
    write_atomic(to / "answers.npz", lambda file: np.savez_compressed(file, targets=targets, **given))


class Stored(NamedTuple):
    "What is stored: the rows, the scores of the prior, and the logits of the runs that confirm."
    rows: list[dict[str, Any]]
    prior: dict[str, float]
    answers: dict[str, np.ndarray]


def read_stored(folder: Path = HERE) -> Stored:
    "Reads what `store` wrote; nothing where it has not."
    rows = read_runs(folder / "runs.jsonl")
    if not rows: return Stored([], {}, {})
    with np.load(folder / "answers.npz") as file: answers = dict(file)
    return Stored(rows, json.loads((folder / "prior.json").read_text()), answers)


# what is known without reading


def prior(train_targets: Tensor, targets: Tensor) -> dict[str, float]:
    """The scores of the same labels for every act: as many of the most frequent ones as give the
    best micro-F1 on the acts that train; `labels` says how many."""
    order = train_targets.sum(0).argsort(descending=True, stable=True)
    rank = torch.empty(len(order)).scatter_(0, order, torch.arange(len(order)).float())
    def given(k: int, like: Tensor) -> Tensor: return (k - 0.5 - rank).expand_as(like)
    def f1(k: int) -> float: return float(label_scores(given(k, train_targets), train_targets)["micro_f1"] or 0)
    k = max(range(1, 31), key=f1)
    found = label_scores(given(k, targets), targets)
    return {"labels": k, **{name: float(value or 0) for name, value in found.items()}}


# what was said of the runs, and what they show

Scores = Mapping[str, Mapping[int, Mapping[str, float]]]  # by arm and seed
SCORES = ("micro_f1", "macro_f1", "roc_auc", "pr_auc")


def confirmed(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    "The rows that confirm, by arm and seed; of arms that have all of them."
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if row["seed"] in CONFIRM: found.setdefault(row["arm"], {})[row["seed"]] = row
    return {arm: found[arm] for arm in ARMS if len(found.get(arm, ())) == len(CONFIRM)}


def gap(found: Scores, arm: str, other: str, score: str = "micro_f1") -> Interval:
    "How far an arm lies above another; KeyError for one that was not made."
    return interval(found[arm][seed][score] - found[other][seed][score] for seed in CONFIRM)


def share_lost(found: Scores, arm: str) -> Interval:
    "By how much more of FP32's an arm keeps of macro-F1 than of micro-F1."
    def kept(seed: int, score: str) -> float: return found[arm][seed][score] / found["FP32"][seed][score]
    return interval(kept(seed, "macro_f1") - kept(seed, "micro_f1") for seed in CONFIRM)


def above_prior(found: Scores, known: Mapping[str, float]) -> Interval:
    "How far FP32's micro-F1 lies above the prior's."
    return interval(found["FP32"][seed]["micro_f1"] - known["micro_f1"] for seed in CONFIRM)


def rank_correlation(found: Scores) -> float:
    "Of the arms, by loss and by micro-F1: 1 where the lower loss has the higher micro-F1."
    from scipy.stats import spearmanr

    if set(found) != set(ARMS): raise KeyError("an arm")
    mean = lambda score: [statistics.fmean(row[score] for row in found[arm].values()) for arm in ARMS]
    return -float(spearmanr(mean("loss"), mean("micro_f1")).statistic)


def agree(found: Scores, arm: str, other: str) -> str:
    "Whether micro-F1 says of two arms what the loss says; OPEN where an interval has both signs."
    loss, f1 = gap(found, arm, other, "loss"), gap(found, arm, other)
    if any(g.low <= 0 <= g.high for g in (loss, f1)): return OPEN
    return HOLDS if (loss.mean < 0) == (f1.mean > 0) else REFUTED


def at_edge(rows: Sequence[Mapping[str, Any]], arm: str) -> bool:
    "Whether the rate that confirms an arm is the lowest or the highest of those that tuned it."
    tried = {row["lr"] for row in rows if row["arm"] == arm and row["seed"] in TUNE}
    used = {row["lr"] for row in rows if row["arm"] == arm and row["seed"] in CONFIRM}
    return not tried or bool(used & {min(tried), max(tried)})


class Claim(NamedTuple):
    "What measures a sentence that runs can refute, and what judges each measurement."
    found: Callable[[Scores], list[Interval]]
    judge: Callable[[Interval], str]

    def verdict(self, found: Scores) -> str:
        "Refuted where one measurement refutes it, and holds where all do; KeyError if not run."
        said = [self.judge(part) for part in self.found(found)]
        return next((v for v in (REFUTED, OPEN) if v in said), HOLDS)


def in_order(r: Interval) -> str:
    "What a rank correlation says of the order; it is one number, and has no interval."
    return HOLDS if r.mean >= 0.7 else REFUTED if r.mean < 0.3 else OPEN


def above_zero(found: Interval) -> str: return found.within(0.0)


def below_zero(found: Interval) -> str: return found.within(most=0.0)


CLAIMS = {
    "losses order the seven arms as micro-F1 does: rank correlation at least 0.7": Claim(
        lambda found: [Interval(*[rank_correlation(found)] * 3)], in_order),
    "master weights in E4M3 are within 0.02 of FP32 in micro-F1 and both areas": Claim(
        lambda found: [gap(found, "E4M3 master", "FP32", score) for score in ("micro_f1", "roc_auc", "pr_auc")],
        lambda found: found.within(-0.02, 0.02)),
    "stochastic AdamW in E7M0 ends below its master weights in micro-F1": Claim(
        lambda found: [gap(found, "E7M0 stochastic", "E7M0 master")], below_zero),
    "S^-1 in E7M0 raises micro-F1 over stochastic AdamW": Claim(
        lambda found: [gap(found, "E7M0 S^-1", "E7M0 stochastic")], above_zero),
    "stochastic AdamW in E7M0 keeps a smaller share of FP32's macro-F1 than of its micro-F1": Claim(
        lambda found: [share_lost(found, "E7M0 stochastic")], below_zero),
}
PAIRS = (  # arms that are compared, each with the one beside it
    *((arm, "FP32") for arm in ARMS if arm != "FP32"),
    *((f"{fmt} {name}", f"{fmt} {other}") for fmt in ("E4M3", "E7M0")
      for name, other in (("stochastic", "master"), ("S^-1", "stochastic"))),
)
MARGIN = 0.2  # of FP32's micro-F1 over the prior's, when runs are long enough


def over_acts(
    answers: Mapping[str, np.ndarray], found: Scores, arm: str, other: str, times: int = 1000
) -> Interval:
    "How far an arm's micro-F1 lies above another's, and where 95 % lie if other acts had been drawn."
    true = answers["targets"]
    draws = np.random.default_rng(0).integers(0, len(true), (times, len(true)))
    draws = np.concatenate([np.arange(len(true))[None], draws])

    def f1(name: str) -> np.ndarray:
        rows = [row for row in found[name].values()]
        given = [answers[file_of(row)[:-4]].astype(np.float32) > row["threshold"] for row in rows]
        hits, said = (sum(part.sum(1) for part in parts) for parts in
                      ([g & true for g in given], given))
        total = len(rows) * true.sum(1)
        return 2 * hits[draws].sum(1) / (said[draws].sum(1) + total[draws].sum(1))
    gaps = f1(arm) - f1(other)
    return Interval(float(gaps[0]), *map(float, np.quantile(gaps[1:], [0.025, 0.975])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acts", type=Path, help="the acts, one a line")
    parser.add_argument("--labels", type=Path, help="the labels")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--store", action="store_true", help="store what is finished, and train nothing")
    given = parser.parse_args()
    if given.store: return store(given.out)
    if not (given.acts and given.labels): parser.error("give --acts and --labels, or --store")
    torch.set_num_threads(1)
    data = prepare(given.acts, given.labels, given.out / "acts")
    train(Runs(given.out, load_labelled(data, VOCABULARY), data), given.workers)


if __name__ == "__main__":
    from studies import exit_code

    raise SystemExit(exit_code(main))
