"""A machine without a compiler is healthy and slow; one that rounds wrong is found, by name."""
import json
import os
import subprocess
import sys

import torch

from altgrad.cli import main
from altgrad.numbers import kernels, native
from altgrad.views import doctor

ALTGRAD = "import sys; from altgrad.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_machine_without_a_compiler(tmp_path):
    "Whatever the compiler is called, it fails; nothing compiled before is found."
    where = {**os.environ, "TRITON_INTERPRET": "0", "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
             "ALTGRAD_CACHE": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", ALTGRAD, "doctor", "--json"], env=where, capture_output=True,
                         text=True, timeout=300)
    told = json.loads(ran.stdout)
    checks = {check["name"]: check["outcome"] for check in told["checks"]}
    assert ran.returncode == 0 and told["healthy"]
    absent = {checks.pop(name) for name in ("the compiled path", "the Triton path", "update rules")}
    assert absent == {"not here"} and set(checks.values()) == {"right"}
    paths = told["paths"]
    assert paths["compiler"] == "/bin/false: fails" and paths["rounding, counts"] == "eager: compiling failed"


def test_wrong_numbers_are_found(monkeypatch, capsys):
    "Ties that go away from zero are off in one code of two where they occur."
    right = doctor.fake_quantize
    def away(x, fmt, *rest, **how):
        q = right(x, fmt, *rest, **how)
        below = right(x, fmt, rounding="toward_zero") if not how else q
        tie = (x - below).abs() == (right(x, fmt, rounding="away") - x).abs() if not how else False
        return torch.where(torch.as_tensor(tie), right(x, fmt, rounding="away"), q)
    monkeypatch.setattr(doctor, "fake_quantize", away)
    monkeypatch.setattr(doctor, "CHECKS", {"rounding": lambda: doctor._conform("eager", ("E4M3",))})
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["healthy"] and "ties away from zero" in told["checks"][0]["said"]


def test_nothing_is_left_changed():
    before = dict(kernels.state)
    state = torch.get_rng_state()
    doctor._conform("eager", ("E5M2",)), doctor._draws(), doctor._casts(), doctor._storages()
    assert kernels.state["path"] == before["path"] and kernels.state["broken"] == before["broken"]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_compiler_is_named_and_what_it_built(monkeypatch, tmp_path):
    monkeypatch.setenv("ALTGRAD_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert doctor.compiler() == "no-such-compiler is not here"
    monkeypatch.setenv("CXX", sys.executable)
    assert doctor.compiler() == f"{sys.executable}; the kernels are not built yet"
    native.library_path().parent.mkdir(parents=True)
    native.library_path().write_bytes(b"")
    assert doctor.compiler() == f"{sys.executable}; the kernels are built"
    native.library_path().unlink()
    monkeypatch.setitem(kernels.state, "broken", {kernels.COMPILER["cpu"]})
    assert doctor.compiler() == f"{sys.executable}: fails"


def test_without_the_self_test(capsys):
    assert main(["doctor", "--no-test"]) == 0
    said = capsys.readouterr().out
    assert "check:" not in said and torch.__version__ in said
    assert main(["doctor", "--no-test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is None
