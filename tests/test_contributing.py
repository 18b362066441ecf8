"""What CONTRIBUTING.md promises: a format, a rule and a storage are one line each, proved on a copy
of the notebooks; and its metric works."""
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from kernels import with_kernels

ROOT = Path(__file__).resolve().parent.parent
BEFORE = '    FP8Format("float8_e4m3", 4, 3, bias=7, specials="ieee"),\n'
# E4M3 with two more in its bias: torch's float8_e4m3fn divided by four
LINE = '    FP8Format("a_new_format", 4, 3, bias=9, specials="fn"),\n'

# What a user does with a format, and what torch's own float8 says it must give.
USE = """
import torch
from torch import nn

from altgrad.numbers.formats import FORMATS, get_format
from altgrad.numbers.quantize import fake_quantize
from altgrad.geometry.interchange import load_codes, save_codes
from altgrad.geometry.optim import StiffnessAdamW
from altgrad.geometry.spacing import code_coordinate, stiffness
from altgrad.geometry.keeping import Storage
from altgrad.geometry.storage import STORAGES, grid_storages, make_grid_tensor, store_on_grid
from altgrad.model.surgery import quantize_model, quantized_weights
from altgrad.training.config import make_config

def by_torch(x, scale=1.0): return (x / scale * 4).to(torch.float8_e4m3fn).float() / 4 * scale

name, codes = "a_new_format", torch.arange(256, dtype=torch.uint8)
fmt, values = get_format("A_NEW_FORMAT"), codes.view(torch.float8_e4m3fn).float() / 4
finite = values.isfinite()
assert fmt is FORMATS[name] and fmt is get_format("E4M3b9fn") and fmt.max == 112
assert torch.equal(fmt.values[finite], values[finite]) and torch.equal(fmt.values.isnan(), values.isnan())
torch.manual_seed(0)
x = torch.cat([torch.randn(4096) * 10.0 ** torch.randint(-4, 2, (4096,)), torch.tensor([0.0, -0.0])]).clamp(-112, 112)
assert torch.equal(fake_quantize(x, name), by_torch(x))
assert torch.equal(fmt.to_bits(x), (x * 4).to(torch.float8_e4m3fn).view(torch.uint8))
positive = values[:127]
assert torch.equal(code_coordinate(positive, name), torch.arange(127.0))
assert torch.equal(stiffness(positive[8:-1], name), positive[9:] - positive[8:-1])
for storage in grid_storages():
    if type(STORAGES[storage]) is not Storage or STORAGES[storage].fmt: continue
    grid = make_grid_tensor(x, name, storage)
    assert torch.equal(grid.dequantize(), by_torch(x, grid.scale))
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
quantize_model(model, name)
assert torch.equal(model[0].quantized_weight(), by_torch(model[0].weight, model[0].weight_scale()))
store_on_grid(model, "grid_nearest")
optimizer, before = StiffnessAdamW(quantized_weights(model).values(), name, 0.1), model[0].weight.data.codes.clone()
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
assert not torch.equal(before, model[0].weight.data.codes)
save_codes(model, "model.safetensors")
assert load_codes("model.safetensors")["0.weight"].fmt == fmt
assert make_config({"format": name}).format == name
"""


# Two rows more than the page has: a rule that replicas can stack, and a storage that is another's
# twin.
RULE = (
    '    "adamw_half": Rule(optim.StiffnessAdamW, reads="betas eps weight_decay floor_octaves", '
    'fixed={"power": 0.5}, '
    'guess=4e-3, unit="weight", source="here"),\n'
)
STORAGE = '    "grid_twin": Storage("stochastic"),\n'


def page() -> str: return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def line_of(name: str) -> str:
    "The row of a table that the page shows."
    return re.search(rf'^    "{name}": .*$', page(), re.MULTILINE)[0] + "\n"


def class_of_the_page() -> list[str]:
    "The lines of the update rule that the page shows."
    return re.search(r"```python\n(class .*?)```", page(), re.DOTALL)[1].splitlines(keepends=True)


def insert(path: Path, before: str, *lines: str) -> None:
    "Puts lines into a notebook's cell, in front of one that is there once."
    text = path.read_text(encoding="utf-8")
    quoted = [json.dumps(line, ensure_ascii=False) for line in (*lines, before)]
    assert text.count(quoted[-1]) == 1, before
    path.write_text(text.replace(quoted[-1], ",\n    ".join(quoted)), encoding="utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    "A copy of the notebooks with one more line, and what they export."
    folder = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "settings.ini", folder)
    shutil.copytree(
        ROOT / "nbs", folder / "nbs", symlinks=True,
        ignore=shutil.ignore_patterns("results", "images", "studies", "tutorials"),
    )
    insert(folder / "nbs/numbers/00_formats.ipynb", BEFORE, LINE)
    geometry = folder / "nbs/geometry"
    insert(
        geometry / "03_storage.ipynb", '    "bf16": Storage("nearest", fmt="bfloat16"),\n',
        line_of("grid_toward_zero"), STORAGE,
    )
    insert(geometry / "04_optim.ipynb", "class GridSGD(GeometryOptimizer):\n", *class_of_the_page())
    insert(geometry / "05_catalogue.ipynb", '    "muon": Rule(\n', line_of("sign_sgd"), RULE)
    (folder / "altgrad").mkdir()
    shutil.copy(ROOT / "altgrad/__init__.py", folder / "altgrad")
    # nbdev_export does nothing where it is set
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    code = "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()"
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, check=True)
    return folder


def run(tree: Path, *command: str) -> str:
    "What Python prints with the copy as its package; its errors if it fails."
    cache = with_kernels(tree / "cache")
    env = {**os.environ, "PYTHONPATH": str(tree), "HOME": str(tree), "ALTGRAD_CACHE": cache}
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_target_of_make_is_listed():
    listed, = re.findall(r"# lists all targets: (.*)", (ROOT / "CONTRIBUTING.md").read_text())
    made = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    assert sorted(["help", *listed.split(", ")]) == sorted(made)


def test_these_lines_are_all_that_changed(tree):
    changed = {}
    for new in sorted((tree / "altgrad").rglob("*.py")):
        if new.name == "_modidx.py": continue
        pair = [
            p.read_text(encoding="utf-8").splitlines(keepends=True)
            for p in (ROOT / new.relative_to(tree), new)
        ]
        lines = [line for line in difflib.ndiff(*pair) if line[0] in "+-"]
        if lines: changed[new.name] = lines
    added = {
        "formats.py": [LINE],
        "storage.py": [line_of("grid_toward_zero"), STORAGE],
        "catalogue.py": [line_of("sign_sgd"), RULE],
    }
    # the list of names changes, too
    ours = [
        line for line in changed.pop("optim.py") if not re.match(r"[+-] (__all__| {11}')", line)
    ]
    assert ours == ["+ " + line for line in class_of_the_page()]
    assert changed == {name: ["+ " + line for line in lines] for name, lines in added.items()}


def test_the_format_works_everywhere(tree):
    assert str(tree) in run(tree, "-c", "import altgrad; print(altgrad.__file__)")
    run(tree, "-c", USE)


def test_the_command_line_knows_it(tree):
    shown = run(
        tree, "-c",
        "from altgrad.cli import main; raise SystemExit(main(['formats', 'a_new_format']))",
    )
    assert "E4M3b9fn" in shown and "112" in shown


@pytest.mark.slow
def test_the_notebook_of_the_formats_still_passes(tree):
    run(
        tree, "-c",
        "from nbdev.test import nbdev_test; "
        "nbdev_test.__wrapped__(path='nbs/numbers/00_formats.ipynb', n_workers=0)",
    )


@pytest.mark.slow
def test_the_rule_and_the_storage_go_through_trainer_sweeps_both_engines_and_the_study(tree):
    run(tree, str(ROOT / "tests/use_rows.py"))


def test_the_update_rule_of_the_page_moves_every_weight_by_one_code():
    from altgrad.geometry import optim
    from altgrad.geometry.storage import make_grid_tensor

    names = dict(vars(optim))
    exec("".join(class_of_the_page()), names)
    SignSGD = names["SignSGD"]
    # the largest has a code above it
    w = torch.nn.Parameter(make_grid_tensor(torch.linspace(0.3, 3.0, 64), "E4M3", "grid_nearest"))
    before, w.grad = w.data.codes.long(), torch.where(torch.arange(64) % 2 == 0, 2.0, -1e-3)
    optimizer = SignSGD([w], "E4M3")
    optimizer.step()
    # below a power of two the spacing is half as wide
    up = before + 1
    down = torch.where(before % 8 == 0, before - 2, before - 1)
    assert torch.equal(w.data.codes.long(), torch.where(w.grad > 0, down, up))
    optimizer.load_state_dict(optimizer.state_dict())


def code_of(start: str) -> str:
    "A line of code of the page."
    return re.search(rf"^    ({re.escape(start)}.*),$", page(), re.MULTILINE)[1]


def with_line(monkeypatch, module, before: str, line: str):
    "A copy of a module with one more line, in the module's place."
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(before) == 1
    copy = ModuleType(module.__name__)
    copy.__package__ = module.__package__
    monkeypatch.setitem(sys.modules, module.__name__, copy)
    exec(
        compile(source.replace(before, f"    {line},\n{before}"), module.__file__, "exec"),
        vars(copy),
    )
    return copy


def test_the_metric_of_the_page_from_a_histogram_is_one_line(monkeypatch):
    from altgrad.numbers.formats import get_format
    from altgrad.views import workspace
    from altgrad.watching import metrics, sums

    counts = np.zeros(256)
    counts[[0, 56, 200]] = 1, 6, 5
    before = sums.histogram_metrics(counts, get_format("E4M3"))
    mine = with_line(
        monkeypatch, metrics, '    Metric("dead_codes",', code_of('Metric("fullest_code"')
    )
    monkeypatch.setattr(sums, "FROM_CODES", mine.FROM_CODES)
    assert sums.histogram_metrics(counts, get_format("E4M3")) == {**before, "fullest_code": 0.5}
    assert "| `fullest_code` |" in mine.QUANTIZATION.table()
    monkeypatch.setattr(workspace, "METRICS", mine.METRICS)
    assert "fullest_code" in workspace.panels()["quantization"]


def test_the_metric_of_the_page_from_a_new_sum_is_two_lines(monkeypatch):
    from altgrad.numbers.formats import get_format
    from altgrad.watching import metrics, sums

    with_line(monkeypatch, metrics, '    Metric("kurtosis",', code_of('Metric("mean_magnitude"'))
    # before all others: no position matters
    mine = with_line(monkeypatch, sums, '    Sum("overflow",', code_of('Sum("magnitude"'))
    monkeypatch.setattr(mine.K, "CHUNK", 100)
    fmt, x = get_format("E4M3"), torch.linspace(-3, 3, 1001)
    pieces = [
        mine.rounding_sums(part, part, torch.ones(()), fmt).numpy() for part in (x[:400], x[400:])
    ]
    got = mine.rounding_metrics(mine.add_sums(np.stack(pieces))[None], np.ones(1), [fmt])
    # sums of up to 1001 terms
    assert abs(got["mean_magnitude"].item() - x.double().abs().mean()) < 1001 * 2.0**-24 * 3
    assert got["amax"].item() == 3 and got["overflow_rate"].item() == 0
