"""Makes this machine compute as others would: runs what depends on floating-point sums in every
setting, or measures what a setting moves.

python .ci/portable.py             # the notebooks and tests below in every setting that computes
                                   # otherwise here; `make portable` (an hour on two cores)
python .ci/portable.py --quick     # the two settings that differ most, on the notebooks where a sum
                                   # decides most; part of .ci/run (minutes)
python .ci/portable.py --measure   # checksums and losses of this machine in every setting, into
                                   # nbs/results/portability.json (minutes)
"""
import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from altgrad.basics import write_atomic
from altgrad.numbers.counts import quantize_stats
from altgrad.numbers.formats import EIGHT_BIT, encode, get_format
from altgrad.numbers.kernels import rounding_key, uniform
from altgrad.numbers.quantize import fake_quantize
from altgrad.geometry.keeping import unpack_bits
from altgrad.geometry.storage import make_grid_tensor
from altgrad.model.gpt import GPT, GPTConfig, loss_of
from altgrad.training.experiment import find_config
from altgrad.training.tracking import git_commit, machine, versions
from altgrad.training.trainer import Trainer
from altgrad.evidence.instrument import (
    RECIPES, Arm, Bench, Task, blank_model, pretrain, run_arm, state_hash,
)

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "nbs/results/portability.json"
WRITTEN = (  # storages whose writes the stored checksum is of, in its order
    "grid_nearest", "grid_stochastic", "grid_residual2", "grid_residual4", "grid_residual8", "bf16"
)

SETTINGS = {  # environment of a process, by what it stands for
    "as it is": {},
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN with AVX-512, without AMX and bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    "all three at their least": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"
    },
    "two threads": {"OMP_NUM_THREADS": "2"},
}
NOTEBOOKS = """
    numbers/03_counts numbers/04_scaling numbers/05_choosing geometry/00_spacing
    geometry/01_manifold geometry/03_storage geometry/04_optim model/00_gpt model/01_parallel
    model/02_points model/03_products model/04_surgery model/05_without_master
    watching/01_sums watching/02_points
    watching/03_updates watching/04_monitors watching/05_series watching/06_thresholds watching/07_shadow
    watching/08_callbacks watching/09_attempt watching/10_stall training/04_trainer
    training/05_experiment evidence/00_instrument
    evidence/01_sweep evidence/03_stability evidence/04_replicas views/04_explorer index
    studies/toy_losses studies/trained_geometry studies/power_of_the_exponent
    studies/portability tutorials/first_run tutorials/bring_your_own_format
    tutorials/bring_your_own_model tutorials/did_my_weights_move tutorials/publish_a_result
    tutorials/without_master_weights
    understand/geometry
    understand/scaling understand/stochastic_rounding understand/where_s_acts
""".split()
TESTS = """
    test_compile test_ddp test_evidence test_manifold test_monitors test_optim test_portability
    test_quantize test_replicas test_results test_scaling test_stall test_surgery test_survival
    test_without_master
""".split()
QUICK_SETTINGS = "all three at their least", "two threads"
QUICK = """
    geometry/01_manifold geometry/04_optim model/00_gpt model/03_products model/04_surgery
    watching/01_sums watching/03_updates evidence/00_instrument
""".split()


def environment(setting: str) -> dict[str, str]:
    """The environment of a process in a setting:
    offline, and with one thread unless the setting says more."""
    held = {name for values in SETTINGS.values() for name in values}
    plain = {k: v for k, v in os.environ.items() if k not in held}
    return {
        **plain, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
        **SETTINGS[setting],
    }


# run


def differing(settings: list[str]) -> list[str]:
    """The settings that compute otherwise here than this machine does without one
    (`make test` covers that) and than one before them."""
    seen = {fingerprint("as it is"): "as it is"}
    for setting in settings:
        first = seen.setdefault(fingerprint(setting), setting)
        if first != setting:
            print(
                f"{setting}: computes as \"{first}\" does on this machine, not run again",
                flush=True,
            )
    return [s for s in seen.values() if s != "as it is"]


def asked(setting: str, what: str) -> str:
    "What this script prints in a setting."
    command, env = [sys.executable, __file__, what], environment(setting)
    return subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def fingerprint(setting: str) -> str:
    """What a process in a setting computes for sums,
    products and functions, with its threads and vectors."""
    return asked(setting, "--fingerprint")


def file_of(name: str) -> Path:
    "A notebook or a test file."
    return ROOT / (f"tests/{name}.py" if name.startswith("test_") else f"nbs/{name}.ipynb")


def command(name: str) -> list[str]:
    "What runs a notebook or a test file."
    if name.startswith("test_"): return [sys.executable, "-m", "pytest", "-q", "-x", str(file_of(name))]
    return [
        str(Path(sys.executable).with_name("nbdev_test")), "--path", str(file_of(name)),
        "--n_workers", "1", "--do_print",
    ]


def run(setting: str, name: str) -> tuple[int, float, str]:
    "Exit code, seconds and output of one notebook or test file in one setting."
    began = time.perf_counter()
    done = subprocess.run(
        command(name), cwd=ROOT, env=environment(setting), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )
    return done.returncode, time.perf_counter() - began, done.stdout


# torch 2.13 writes such C++ where its own ATEN_CPU_CAPABILITY=default says that there are no
# vectors: no fault of what is tested, and no pass either
TORCH_CANNOT = "‘at::vec’ has not been declared"


def run_all(settings: list[str], names: list[str]) -> int:
    """Runs everything, as many at a time as there are cores for their threads;
    a line for each, a table at the end; how many failed."""
    failed = {s: [] for s in settings}
    left = {s: [] for s in settings}
    seconds = dict.fromkeys(settings, 0.0)
    for setting in settings:
        threads = int(SETTINGS[setting].get("OMP_NUM_THREADS", 1))
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // threads)) as pool:
            for name, (code, took, output) in zip(
                names, pool.map(run, [setting] * len(names), names), strict=True
            ):
                impossible = bool(code) and TORCH_CANNOT in output
                print(
                    f"{setting}: {name}: "
                    f"{'not compiled by torch' if impossible else 'FAILED' if code else 'ok'}, "
                    f"{took:.0f} s",
                    flush=True,
                )
                seconds[setting] += took
                if impossible: left[setting].append(name)
                if not code or impossible: continue
                failed[setting].append(name)
                print(output[-5000:], flush=True)
    print(f"\n{'setting':46} {'passed':>8} {'seconds':>8}  failed; not compiled by torch")
    for s in settings:
        passed = len(names) - len(failed[s]) - len(left[s])
        print(
            f"{s:46} {passed:>4}/{len(names):<3} {seconds[s]:>8.0f}  "
            f"{', '.join(failed[s]) or '-'}; {', '.join(left[s]) or '-'}"
        )
    return sum(map(len, failed.values()))


# measure: what must be the same on every CPU


def checksum(*tensors: Tensor) -> str:
    """SHA-256 of the bytes of tensors; every NaN counts as the same one,
    because IEEE 754 leaves its bits open."""
    digest = hashlib.sha256()
    for t in tensors:
        t = (
            torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
            if t.is_floating_point()
            else t
        )
        digest.update(
            t.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if t.dim()
            else t.reshape(1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def inputs(name: str) -> Tensor:
    """Float32 inputs from whole numbers alone: patterns all over float32,
    and a format's values and midpoints with their neighbours."""
    everywhere = torch.arange(-(2**31), 2**31, 50_021).to(torch.int32).view(torch.float32)
    values = get_format(name).values.double()
    values = values[values.isfinite()].unique()
    edges = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    bits = edges.view(torch.int32)
    return torch.cat([
        everywhere, edges, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)
    ])


def within(name: str) -> Tensor:
    "Float32 numbers within a format's range, from whole numbers alone."
    k = torch.arange(-(2**15), 2**15).float()
    return k * (get_format(name).max * 2.0**-15)


def writes(name: str, storage: str) -> list[Tensor]:
    "The codes, and the residuals, after each of three writes of given numbers."
    grid, found = make_grid_tensor(within(name), name, storage, seed=1), []
    for step in (1, 2, 3):
        grid.copy_(within(name) * (1 - step / 8))
        parts = grid.parts()
        if bits := grid.kind.residual_bits:  # one number a byte, as the stored checksums have them
            parts["residual"] = unpack_bits(parts["residual"], bits, grid.shape)
        found += [part.clone() for part in parts.values()]
    return found


def exact() -> dict[str, str]:
    "Checksums that are the same on every CPU, in every setting, with any number of threads."
    key = rounding_key(1, 2, 3)
    over = {name: (inputs(name), get_format(name)) for name in EIGHT_BIT}
    counted = {name: quantize_stats(x, fmt)[1] for name, (x, fmt) in over.items()}
    return {
        "codes": checksum(
            *(t for _, fmt in over.values() for t in (fmt.values, encode(fmt, fmt.values)))
        ),
        "rounding to nearest": checksum(*(fake_quantize(x, fmt) for x, fmt in over.values())),
        "the other roundings": checksum(
            *(
                fake_quantize(x, fmt, rounding=r)
                for x, fmt in over.values()
                for r in ("toward_zero", "up", "down", "away")
            )
        ),
        "counts and histograms": checksum(
            *(
                t
                for s in counted.values()
                for t in (s.overflow, s.underflow, s.nan, s.inf, s.histogram)
            )
        ),
        "stochastic bits": checksum(uniform((300_000,), key)),
        "stochastic rounding": checksum(
            *(fake_quantize(x, fmt, rounding="stochastic", key=key) for x, fmt in over.values())
        ),
        "writes to the grid": checksum(
            *(t for name, s in product(EIGHT_BIT, WRITTEN) for t in writes(name, s))
        ),
    }


# measure: what need not be


def operands() -> tuple[Tensor, Tensor]:
    "Two float32 matrices, from stochastic bits: the same on every CPU."
    return tuple(uniform((256, 256), rounding_key(7, i)) - 0.5 for i in (0, 1))


def products() -> dict[str, str]:
    """Checksums of sums, products and functions of the same numbers:
    IEEE 754 says of none of them which last digit it has."""
    a, b = operands()
    torch.manual_seed(0)
    return {
        "float32 matrix product": checksum(a @ b),
        "bfloat16 matrix product": checksum(a.bfloat16() @ b.bfloat16()),
        "sum": checksum(a.sum(), a.sum(0)),
        "exp, log, tanh, erf": checksum(a.exp(), a.abs().add(1).log(), a.tanh(), a.erf()),
        "softmax": checksum(a.softmax(-1)),
        "a + 0.1 b in one call": checksum(torch.add(a, b, alpha=0.1)),
        "normal random numbers": checksum(torch.randn(4096)),
        "layer norm": checksum(F.layer_norm(a, (256,))),
    }


UPDATES, SEEDS = 60, (42, 43)
TRAINED = [("bf16_baseline", s) for s in SEEDS] + [
    (name, SEEDS[0]) for name in ("e5m2_fp8", "e7m0_fp8")
]
ARMS = {
    "E5M2, stochastic": Arm("E5M2", "grid_stochastic", "adamw", corpus="words"),
    "E7M0, nearest": Arm("E7M0", "grid_nearest", "adamw", corpus="words"),
}


def text() -> str:
    """80,000 words of the license, drawn at random:
    the same text in every checkout and with every Python."""
    return " ".join(
        random.Random(0).choices((ROOT / "LICENSE").read_text(encoding="utf-8").split(), k=80_000)
    )


def losses() -> dict[str, float]:
    """Validation losses, in nats: of gpt-tiny after 60 updates, of a small model after 200,
    and of arms of the instrument after 20 more."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "words.txt")
        file.write_text(text(), encoding="utf-8")
        found = {}
        common = dict(
            max_steps=UPDATES, data=f"path:{file}", eval_every=UPDATES, checkpoint_every=UPDATES,
            device="cpu",
        )
        for name, seed in TRAINED:
            config = find_config(name, {**common, "seed": seed, "name": f"{name}-{seed}"})
            found[f"{name}, seed {seed}"] = Trainer(config, Path(folder)).run(progress=False)[
                "results"
            ]["val_loss"]
        return found | instrument_losses(Path(folder), file)


def instrument_losses(folder: Path, file: Path) -> dict[str, float]:
    "Of the arms, from one checkpoint that this setting pretrained."
    bench = Bench(folder, {"words": f"path:{file}"}, Task(steps=20, warmup=2, chunks=16))
    recipe = replace(RECIPES["stdlib-0.1m"], steps=200)
    torch.save(pretrain(recipe, 0, bench.corpus("words")), folder / "stdlib-0.1m-0.pt")
    rows = {name: run_arm(arm, bench) for name, arm in ARMS.items()}
    return {"pretrained, 200 updates": next(iter(rows.values()))["frozen_loss"]} | {
        f"{name}, 20 updates": row["raw_loss"] for name, row in rows.items()
    }


def first_losses() -> list[float]:
    """The training losses of a small GPT's first updates on given bytes:
    attention, layer norms and their gradients in one number."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, block_size=32, n_layer=2, n_head=2, n_embd=64))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    x = (uniform((8, 33), rounding_key(3, 1)) * 256).long()
    for _ in range(3):
        loss = loss_of(model, x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def measure_here() -> dict[str, Any]:
    "What this process finds, in the setting that its environment says."
    torch.manual_seed(0)
    start = state_hash(blank_model(RECIPES["stdlib-0.1m"]).state_dict())
    return {"threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability(), "exact": exact(),
            "products": {**products(), "initial weights": start}, "losses": losses()}


def cpu() -> str:
    "The processor: its name, and what tells two of one name apart."
    try: lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError: return machine()["cpu"]
    facts = dict(map(str.strip, line.split(":", 1)) for line in reversed(lines) if ":" in line)
    return (
        f"{machine()['cpu']}, family {facts.get('cpu family', '?')}, model "
        f"{facts.get('model', '?')}"
    )


def measure_all(path: Path) -> int:
    """Measures every setting in a process of its own,
    and puts the results beside those of other machines; each is stored at once."""
    commit, here = git_commit(), cpu()
    for setting in SETTINGS:
        began = time.perf_counter()
        found = json.loads(asked(setting, "--here").splitlines()[-1])
        facts = {
            "cpu": here, "machine": machine(), "setting": setting, "versions": versions(),
            "commit": commit,
        }
        keep(path, "entries", f"{here} / {setting}", {**facts, **found})
        print(f"{setting}: {time.perf_counter() - began:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "verify.json")
        for rounding, names in PROVED.items():
            subprocess.run(
                [*PROVE, "--out", file, "--rounding", rounding, "--format", *names],
                cwd=ROOT,
                check=True,
            )
        keep(path, "proofs", here, part_of_the_proof(file))
        run = Trainer(find_config(DEMO), folder)
        run.run(progress=False)
        keep(path, "demos", here, course_of(run.folder.record(), run.folder.metrics()))
    return 0


def keep(path: Path, part: str, key: str, value: dict[str, Any]) -> None:
    "Stores one result beside the others."
    stored = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.is_file()
        else {"entries": {}, "proofs": {}, "demos": {}}
    )
    stored["config"] = {
        "updates": UPDATES,
        "trained": [list(t) for t in TRAINED],
        "arms": list(ARMS),
        "settings": SETTINGS,
        "text": hashlib.sha256(text().encode()).hexdigest(),
    }
    stored[part][key] = value
    write_atomic(path, json.dumps(stored, indent=1) + "\n")


# a part of `make verify` and of the demo, which other CPUs did as well
DEMO = "bf16_baseline"
PROVE = [sys.executable, ".ci/verify.py", "--overflow", "saturate"]
PROVED = {"nearest": ("E4M3", "E7M0"), "stochastic": ("E3M4", "E4M3", "E5M2", "E7M0")}


def part_of_the_proof(path: Path) -> dict[str, Any]:
    """From a file of `make verify`: the circumstances,
    and what of its results does not depend on the time."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    rows = {
        key: stored["results"][key]
        for key in (
            f"{name}/{rounding}/saturate" for rounding, names in PROVED.items() for name in names
        )
    }
    results = {
        key: {
            k: v
            for k, v in row.items()
            if k in ("patterns", "segments", "draws", "standard_errors", "mismatches")
        }
        for key, row in rows.items()
    }
    commit, code = (next(iter(rows.values()))[key] for key in ("commit", "code"))
    return {
        "machine": stored["machine"], "versions": stored["versions"], "commit": commit,
        "code": code, "results": results,
    }


def course_of(record: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    "From a run's record and rows: the circumstances, and its losses."
    facts = {
        "machine": record["machine"],
        "versions": record["versions"],
        "commit": record["git_commit"].rstrip("+"),
        "seed": record["seed"],
    }
    return {
        **facts,
        "compute_dtype": record["compute_dtype"],
        "corpus": record["corpus"]["hash"],
        "val_loss": record["results"]["val_loss"],
        "loss": [round(row["loss"], 5) for row in rows],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="two settings, few notebooks")
    what.add_argument("--measure", action="store_true", help=f"write {STORED.relative_to(ROOT)}")
    what.add_argument(
        "--fingerprint", action="store_true",
        help="print what tells this setting from others, as JSON",
    )
    what.add_argument(
        "--here", action="store_true", help="print what this process measures, as JSON"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="these notebooks or tests, e.g. geometry/04_optim test_optim",
    )
    args = parser.parse_args()
    if args.here: return print(json.dumps(measure_here()))
    if args.fingerprint:
        return print(
            json.dumps([
                torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), products(),
                first_losses(),
            ])
        )
    if args.measure: return measure_all(STORED)
    settings, names = (
        (list(QUICK_SETTINGS), QUICK) if args.quick else (list(SETTINGS), NOTEBOOKS + TESTS)
    )
    chosen = args.only or names
    absent = [name for name in chosen if not file_of(name).is_file()]
    if absent: parser.error(f"there is no notebook or test {', '.join(absent)}")  # nbdev_test finds no fault
    return int(run_all(differing(settings), chosen) > 0)


if __name__ == "__main__": sys.exit(main())
