"""What is the same on every CPU, bit for bit, recomputed here; and every tolerance says where it
comes from."""
import importlib.util
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from altgrad.evidence import instrument

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("portable", ROOT / ".ci/portable.py")
portable = sys.modules["portable"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(portable)

STORED = json.loads(portable.STORED.read_text(encoding="utf-8"))
ENTRIES = STORED["entries"]


@pytest.fixture(scope="module")
def here(): return portable.exact()


def differences(found: dict[str, str], entries: dict[str, dict]) -> set[tuple[str, str]]:
    "The entries, and what in them is not as it was found."
    return {
        (key, name)
        for key, entry in entries.items()
        for name in found.keys() | entry["exact"].keys()
        if entry["exact"].get(name) != found.get(name)
    }


def test_this_machine_computes_the_bits_of_every_stored_one(here):
    assert len(here) == 7 and differences(here, ENTRIES) == set()


def test_a_damaged_checksum_is_found(here):
    key = next(iter(ENTRIES))
    for name, value in ENTRIES[key]["exact"].items():
        damaged = {
            **ENTRIES,
            key: {
                "exact": {
                    **ENTRIES[key]["exact"],
                    name: value[:-1] + "0123456789abcdef"[int(value[-1], 16) - 1],
                }
            },
        }
        assert differences(here, damaged) == {(key, name)}


def test_a_checksum_sees_one_bit():
    x = torch.ones(1000)
    y = x.clone()
    y[500] = torch.nextafter(y[500], torch.tensor(2.0))
    # NaNs with other bits
    nan = torch.tensor([0x7FC00000, 0x7FC00001, -1], dtype=torch.int32).view(torch.float32)
    assert portable.checksum(x) == portable.checksum(torch.ones(1000)) != portable.checksum(y)
    assert portable.checksum(torch.tensor([0.0])) != portable.checksum(torch.tensor([-0.0]))
    assert nan.isnan().all()
    assert len({portable.checksum(v.reshape(1)) for v in nan}) == 1


def test_inputs_hold_what_decides_a_rounding():
    x = portable.inputs("E4M3")
    # a tie, the largest value, half of the smallest, the smallest normal one
    for edge in (1.0625, 448.0, 2.0**-10, 2.0**-6):
        near = torch.tensor(edge)
        assert {
            edge, torch.nextafter(near, torch.tensor(0.0)).item(),
            torch.nextafter(near, torch.tensor(1e9)).item(),
        } <= set(x.tolist())
    tiny = torch.finfo(torch.float32).tiny
    assert (x.abs() < tiny).any()
    assert (x.abs() > 1e30).any()
    assert x.isnan().any()
    assert x.signbit().any()


def test_every_machine_was_measured_in_at_least_five_settings():
    machines = {key.split(" / ")[0] for key in ENTRIES}
    for cpu in machines:
        mine = {
            key.split(" / ")[1]: entry
            for key, entry in ENTRIES.items()
            if key.startswith(f"{cpu} / ")
        }
        assert len(mine) >= 5 and "as it is" in mine and set(mine) <= set(portable.SETTINGS)
        for setting, entry in mine.items():
            assert entry["setting"] == setting
            assert entry["cpu"] == cpu
            assert entry["versions"]["torch"]
            assert len(entry["commit"]) == 40
            assert entry["threads"] == int(portable.SETTINGS[setting].get("OMP_NUM_THREADS", 1))
            assert all(2 < loss < 6 for loss in entry["losses"].values())


def test_the_proof_came_out_the_same_on_another_cpu():
    first, *others = STORED["proofs"].values()
    assert others and len({proof["code"] for proof in STORED["proofs"].values()}) == 1, (
        "the same code, on two machines"
    )
    assert all(proof["results"] == first["results"] for proof in others)
    assert len(first["results"]) == 6
    assert all(result["mismatches"] == 0 for result in first["results"].values())
    assert sum("standard_errors" in result for result in first["results"].values()) == 4
    assert len({proof["machine"]["cpu"] for proof in STORED["proofs"].values()}) > 1


def test_the_demo_that_two_cpus_ran_is_one_run():
    first, *others = STORED["demos"].values()
    assert others
    assert all(
        (run["seed"], run["corpus"], len(run["loss"])) == (first["seed"], first["corpus"], 300)
        for run in others
    )


def test_the_lists_name_what_exists():
    assert all((ROOT / f"nbs/{name}.ipynb").is_file() for name in portable.NOTEBOOKS)
    assert set(portable.QUICK) <= set(portable.NOTEBOOKS)
    assert all((ROOT / f"tests/{name}.py").is_file() for name in portable.TESTS)
    assert set(portable.QUICK_SETTINGS) <= set(portable.SETTINGS)


def test_a_setting_replaces_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    plain = portable.environment("as it is")
    least = portable.environment("all three at their least")
    assert "MKL_CBWR" not in plain
    assert plain["OMP_NUM_THREADS"] == "1"
    assert least["MKL_CBWR"] == "COMPATIBLE"
    assert least["ATEN_CPU_CAPABILITY"] == "default"


def test_a_failing_notebook_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr(
        portable, "run", lambda setting, name: (int(name == "bad"), 1.0, "why it failed")
    )
    assert portable.run_all(["as it is", "two threads"], ["good", "bad"]) == 2
    said = capsys.readouterr().out
    assert "1/2" in said
    assert said.count("why it failed") == 2
    assert portable.run_all(["as it is"], ["good"]) == 0
    monkeypatch.setattr(
        portable, "run", lambda setting, name: (1, 1.0, f"error: {portable.TORCH_CANNOT}")
    )
    # neither failed nor passed
    assert portable.run_all(["as it is"], ["good"]) == 0
    assert "0/1" in capsys.readouterr().out


BARE = re.compile(
    r"\b(rtol|atol|rel_tol|abs_tol|abs|rel)=\d[\d.]*e-\d+|assert\b.*\babs\(.*<=? \d[\d.]*e-\d+"
)


def sources() -> Iterator[tuple[str, str]]:
    "Place and code of every test module and every code cell."
    for path in (ROOT / "tests").glob("*.py"):
        if path != Path(__file__).resolve(): yield path.name, path.read_text(encoding="utf-8")
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield str(path.relative_to(ROOT)), re.sub(r"(?m)^[%!].*", "", "".join(cell["source"]))


def statements() -> Iterator[tuple[str, str, str]]:
    "Place, statement and what stands above it: a comment above several assertions is for them all."
    for name, source in sources():
        lines, above = source.splitlines(), {}
        for node in sorted(simple(ast.parse(source)), key=lambda n: n.lineno):
            first = node.lineno
            before = lines[first - 2] if first > 1 else ""
            if isinstance(node, ast.Assert): before = above.get(first - 1, before)
            above[node.end_lineno] = before
            yield name, "\n".join(lines[first - 1 : node.end_lineno]), before


def simple(tree: ast.AST) -> list[ast.stmt]:
    "The statements that hold no others."
    return [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not hasattr(n, "body")]


def is_unexplained(code: str, above: str) -> bool:
    """Whether a statement compares with a decimal tolerance and no comment,
    there or above, says where that comes from."""
    return (
        bool(BARE.search(code))
        and not re.search(r"\s# \w", code)
        and not above.strip().startswith("# ")
    )


def test_every_tolerance_says_where_it_comes_from():
    assert [
        (name, code) for name, code, above in statements() if is_unexplained(code, above)
    ] == []


@pytest.mark.parametrize("line, unexplained", [
    ("torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-9)", True),
    ("assert abs(a - b) < 1e-6", True),
    ("assert (x - y).abs().max() <= 2.5e-7, name", True),
    ("assert x == pytest.approx(y, abs=1e-12)", True),
    ("assert abs(a - b) < 8 * 2.0**-24", False),
    ("assert abs(a - b) < 1e-5  # the rows have five digits", False),
])
def test_a_bare_tolerance_is_found(line, unexplained):
    assert is_unexplained(line, "") == unexplained and not is_unexplained(line, "# why")


def test_the_hash_of_code_knows_no_version_of_python():
    "From 3.12 on the format in f'{x:{n}}' ends with an empty piece."
    pieces = ast.parse("f'{x:{n}}'", mode="eval").body.values[0].format_spec.values
    pieces = [piece for piece in pieces if not isinstance(piece, ast.Constant)]
    older, newer, other = (instrument._outline(ast.JoinedStr([*pieces, *map(ast.Constant, more)]))
                           for more in ((), ("",), ("d",)))
    assert older == newer != other
    assert instrument._outline(ast.Constant("")) != instrument._outline(ast.Constant("d"))


def test_a_misspelt_name_is_no_pass(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["portable", "--only", "geometry/04_optm", "test_optim"])
    with pytest.raises(SystemExit) as ended: portable.main()
    assert ended.value.code == 2 and "no notebook or test geometry/04_optm\n" in capsys.readouterr().err
    for name in {*portable.NOTEBOOKS, *portable.TESTS, *portable.QUICK}: assert portable.file_of(name).is_file()
