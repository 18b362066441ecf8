"""What a user gets: the built wheel, in an environment of its own, in an empty folder. Works
without a network."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ConfigParser(delimiters=["="])
CONFIG.read(ROOT / "settings.ini", encoding="utf-8")
FACTS = CONFIG["DEFAULT"]
NEVER_COPIED = shutil.ignore_patterns(
    ".venv", ".git", "nbs", "runs", "build", "dist", "*.egg-info", "__pycache__", "_docs", "_proc"
)
# What only developers have, by the names of imports: to the wheel's environment these do not exist.
DEVELOPMENT = (
    "nbdev", "execnb", "fastcore", "jupyterlab", "nbconvert", "nbformat", "ipykernel", "IPython",
    "pytest", "gfloat", "ml_dtypes", "ray", "wandb_workspaces", "transformers", "accelerate",
    "lightning", "mypy", "twine", "build", "setuptools",
)
# What tutorials name beside the wheel, by the names of imports.
NAMED = ("transformers", "accelerate", "torchao", "compressed_tensors")
# `make test` runs these pages here, where there is no clone, and not a second time as notebooks.
TUTORIALS = (
    "did_my_weights_move", "what_broke_first", "without_master_weights", "train_what_you_serve"
)
IMPORTED_AS = {"pyyaml": "yaml", "scikit_learn": "sklearn"}
SMALL = ["max_steps=2", "batch_size=2", "block_size=16", "eval_windows=2", "warmup_steps=1"]


def run(*command, **options) -> str:
    "What a command prints; its error output if it fails."
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(once) -> Path:
    "A folder with the sdist, and the wheel that was built from it."
    def build(folder: Path):
        copy = shutil.copytree(ROOT, folder / "altgrad", ignore=NEVER_COPIED)
        command = sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist"
        run(*command, copy, cwd=folder)

    return once("package", build) / "dist"


def installed(dist: Path, place: Path, absent: Iterable[str]) -> Callable[..., str]:
    """Runs a command of an environment that holds the wheel and its requirements, in an empty
    folder; some packages do not exist there."""
    env, work = place / "env", place / "work"
    work.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", env)
    wheel = next(dist.glob("*.whl"))
    run(
        sys.executable, "-m", "pip", "--python", env / "bin/python", "install", "-q", "--no-deps",
        "--no-index", "--disable-pip-version-check", wheel,
    )
    site = next(env.glob("lib/python*/site-packages"))
    # .pth files in there are not read: no editable install
    (site / "requirements.pth").write_text(
        "\n".join(p for p in sys.path if p.endswith("-packages"))
    )
    # a sitecustomize may be the system's own
    (site / "without.pth").write_text(
        f"import sys; sys.modules.update(dict.fromkeys({tuple(absent)!r}))\n"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "IN_TEST")} | {
        "HOME": str(place),
        "ALTGRAD_CACHE": str(place / "cache"),
        "MPLBACKEND": "agg",
    }
    return lambda command, *args: run(env / "bin" / command, *args, cwd=work, env=clean)


@pytest.fixture(scope="module")
def user(dist, tmp_path_factory):
    "Who has installed the wheel, and nothing for developers."
    return installed(dist, tmp_path_factory.mktemp("user"), DEVELOPMENT)


@pytest.fixture(scope="module")
def reader(dist, tmp_path_factory):
    "Who has installed what the tutorials name as well."
    absent = set(DEVELOPMENT) - set(NAMED)
    return installed(dist, tmp_path_factory.mktemp("reader"), sorted(absent))


@pytest.mark.slow
def test_twine_accepts_both(dist):
    assert "FAILED" not in run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_wheel_holds_every_module_and_its_types(dist):
    inside = {
        name
        for name in zipfile.ZipFile(next(dist.glob("*.whl"))).namelist()
        if not name.startswith("altgrad-")
    }
    assert inside == {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "altgrad").rglob("*.*")
        if p.suffix in (".py", ".typed") or p.is_file() and "bench_1" in p.parts
    }
    assert "altgrad/py.typed" in inside
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        assert {"settings.ini", "setup.py", "README.md", "LICENSE", "CHANGELOG.md"} <= {
            name.partition("/")[2] for name in sdist.getnames()
        }


def test_it_is_the_wheel_that_runs_and_no_development_package_exists(user):
    where = user(
        "python", "-c", "import altgrad; print(altgrad.__file__, altgrad.__version__)"
    ).split()
    assert "site-packages" in where[0]
    assert str(ROOT) not in where[0]
    assert where[1] == FACTS["version"]
    with pytest.raises(AssertionError, match="No module named 'pytest'|import of pytest halted"):
        user("python", "-c", "import pytest")


@pytest.mark.slow
def test_the_command_line_and_the_packaged_configs(user):
    assert "train" in user("altgrad", "--help")
    assert re.search(r"max +57344", user("altgrad", "formats", "E5M2"))
    settings = [word for change in SMALL for word in ("--set", change)]
    assert "e5m2_fp8" in user(
        "altgrad", "train", "e5m2_fp8", *settings, "--out", "runs", "--wandb", "off"
    )


@pytest.mark.slow
def test_the_demo(user):
    settings = [word for change in SMALL for word in ("--set", change)]
    assert "no gap is shown" in user(
        "altgrad", "compare", "bf16_baseline", "e7m0_fp8", *settings, "--out", "demo", "--wandb",
        "off",
    )


RULE = """
import torch
class Mine(torch.optim.SGD):
    def __init__(self, params, lr=1e-3): super().__init__(params, lr=lr)
"""
ONE_RUN = f"""
from pathlib import Path
from altgrad.evidence.bench import PROTOCOLS
from altgrad.evidence.instrument import Arm, run_arm
Path("mine.py").write_text({RULE!r})
protocol = PROTOCOLS["bench-1"]
row = run_arm(Arm(rule="mine.py:Mine", checkpoint=protocol.confirm[0]), protocol.bench())
print(row["steps"], *row["sources"].values())
"""


@pytest.mark.slow
def test_the_bench_brings_its_text_and_checkpoints(user):
    said = user("python", "-c", ONE_RUN)
    assert said.startswith("200 ") and RULE in said


def cells_of(page: Path) -> list[str]:
    "The code of a notebook, without the cells that the tests of notebooks leave out."
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    left_out = re.compile(r"^#\| ?(eval: false|slow|notest)$", re.MULTILINE)
    return [source for source in sources if not left_out.search(source)]


# Every page in a process of its own, forked from one that has imported what is slow to import.
# A cell's last value and its figures are made as a notebook would show them.
RUN_PAGES = """
import ast, io, json, os, sys
import torch, transformers, altgrad
import matplotlib.pyplot as plt
from transformers import LlamaForCausalLM, Trainer

def run(cell, names):
    body = ast.parse(cell).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if last: print(repr(eval(compile(last, "cell", "eval"), names)))
    for number in plt.get_fignums(): plt.figure(number).savefig(io.BytesIO())
    plt.close("all")

for name, cells in json.load(open("pages.json")).items():
    if os.fork():
        os.wait()
        continue
    for fd in (1, 2): os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    names = {"__name__": "__main__"}
    for cell in cells: run(cell, names)
    print("every cell ran with", altgrad.__file__, flush=True)
    sys.exit()
"""


@pytest.fixture(scope="module")
def pages(reader) -> Path:
    "A folder with what every tutorial said."
    work = Path(reader("python", "-c", "import os; print(os.getcwd())").strip())
    cells = {name: cells_of(ROOT / f"nbs/tutorials/{name}.ipynb") for name in TUTORIALS}
    (work / "pages.json").write_text(json.dumps(cells), encoding="utf-8")
    reader("python", "-c", RUN_PAGES)
    return work


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_needs_no_clone(pages, name):
    said = (pages / name).read_text(encoding="utf-8")
    ended, _, place = said.strip().rpartition("every cell ran with ")
    assert ended and "site-packages" in place and str(ROOT) not in place, said[-3000:]


def test_the_tests_of_notebooks_leave_out_what_is_run_here():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^FROM_WHEEL := (.*)$", makefile, re.MULTILINE)[1].split("|") == [*TUTORIALS]


def test_every_import_is_a_requirement_or_an_extra():
    allowed = {"altgrad"}
    for key in (
        "requirements", "ray_requirements", "workspace_requirements", "integrations_requirements",
        "explore_requirements", "triton_requirements",
    ):
        names = [
            re.match(r"[\w-]+", word)[0].lower().replace("-", "_") for word in FACTS[key].split()
        ]
        allowed |= {IMPORTED_AS.get(name, name) for name in names}
    found = set()
    for path in (ROOT / "altgrad").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {(alias.name.partition(".")[0], path.name) for alias in node.names}
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module.partition(".")[0], path.name))
    assert {
        (name, path) for name, path in found if name not in allowed | sys.stdlib_module_names
    } == set()


def test_the_changelog_has_this_version():
    assert f"## [{FACTS['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
