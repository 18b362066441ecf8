"""Rivals beside their authors' own code, where that is no example for a page, and those that are
rules where the package uses them: in the instrument and in training runs that stop and go on."""
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from altgrad.basics import InputError
from altgrad.evidence.instrument import Arm, Bench, Weights, run_arm, state_hash
from altgrad.geometry.catalogue import RULES
from altgrad.geometry.keeping import Storage
from altgrad.geometry.rivals.average import AveragedAdamW
from altgrad.geometry.rivals.split import Split
from altgrad.geometry.storage import make_grid_tensor, plain_state
from altgrad.numbers.formats import get_format
from altgrad.numbers.quantize import fake_quantize
from altgrad.training.config import make_config
from altgrad.training.trainer import NonfiniteGuard, Trainer
from tiny import small_bench

FLASH = importlib.util.find_spec("flashoptim")  # pip install --no-deps flashoptim


class Block(torch.Tensor):
    "A tensor that is cast as Triton casts: `bitcast` keeps the bits."
    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def triton_in_torch() -> dict[str, ModuleType]:
    "Modules by the names that FlashOptim imports; functions of a kernel are torch's."
    modules = {name: ModuleType(name) for name in (
        "triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice"
    )}
    triton, tl, extra, libdevice = modules.values()
    triton.jit = lambda f: f
    triton.Config = triton.autotune = triton.heuristics = lambda *_, **__: lambda f: f
    triton.language, tl.extra, extra.libdevice = tl, extra, libdevice
    tl.constexpr, tl.tensor = int, torch.Tensor
    # a magnitude's bits are not negative: signed integers hold them
    tl.uint16, tl.uint32 = torch.int16, torch.int32
    for name in ("abs", "where", "floor", "exp2", "clamp", "sqrt", "sigmoid"):
        setattr(tl, name, getattr(torch, name))
    for name in ("int8", "int16", "int32", "float32", "float16", "bfloat16"):
        setattr(tl, name, getattr(torch, name))
    libdevice.copysign = torch.copysign
    return modules


@pytest.fixture
def flash(monkeypatch) -> ModuleType:
    "FlashOptim's own file, with torch in the place of Triton."
    for name, module in triton_in_torch().items(): monkeypatch.setitem(sys.modules, name, module)
    path = f"{FLASH.submodule_search_locations[0]}/optimizers.py"
    spec = importlib.util.spec_from_file_location("flashoptim_in_torch", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(FLASH is None, reason="FlashOptim is not installed")
@pytest.mark.parametrize("bits", [8, 16])
def test_split_weights_are_those_of_flashoptim_to_the_last_bit(flash, bits):
    g = torch.Generator().manual_seed(bits)
    w = torch.randn(100_000, generator=g)
    # with these exponents half a spacing is a normal number of float32
    w *= 2.0 ** torch.randint(-110, 120, w.shape, generator=g)
    w = torch.cat([w, torch.tensor([0.0, 1.0, 1 - 2.0**-10, -1 - 2.0**-9, 2.0**-100])])
    kind, fmt = Split("nearest", residual_bits=bits, fmt="bfloat16"), get_format("bfloat16")
    q = kind.round(w, fmt, 0)
    narrow, integer = w.bfloat16().as_subclass(Block), {8: torch.int8, 16: torch.int16}[bits]
    theirs = flash._compute_ecc_bits(w.as_subclass(Block), narrow, integer, 7, kind.levels)
    ours = kind.remember(w, q, fmt, 0)
    assert ours.dtype == integer and torch.equal(ours, theirs.as_subclass(torch.Tensor))
    joined = flash._apply_error_correction(narrow, ours.as_subclass(Block), 7, kind.levels)
    assert torch.equal(kind.latent(q, ours, fmt), joined.as_subclass(torch.Tensor))
    assert ours.float().abs().max() == kind.levels and len(ours.unique()) > 2**bits / 3


def of_torchao():
    return pytest.importorskip("torchao.optim.quant_utils")._fp32_to_bf16_sr


def of_heavyball():
    round_into = pytest.importorskip("heavyball.utils").stochastic_round_
    return lambda x: round_into(torch.empty_like(x, dtype=torch.bfloat16), x)


@pytest.mark.parametrize("of", [of_torchao, of_heavyball])
@torch.compiler.set_stance("force_eager")  # heavyball's function takes half a minute to compile
def test_stochastic_rounding_to_bfloat16_is_theirs(of):
    theirs = of()
    torch.manual_seed(2)
    x, fmt, keys, copies = torch.randn(500), get_format("bfloat16"), 32, 32
    low, high = (fake_quantize(x, fmt, rounding=r) for r in ("down", "up"))
    chance = ((x - low) / (high - low)).nan_to_num(0)
    kind, up = Storage("stochastic", fmt="bfloat16"), torch.zeros(2, 500)
    for key in range(keys):
        many = x.repeat(copies, 1)
        drawn = torch.stack([kind.round(many, fmt, key), theirs(many).float()])
        assert ((drawn == low) | (drawn == high)).all()
        up += (drawn == high).sum(1)
    # five standard errors, and 2^-16 for bits that they do not draw
    n = keys * copies
    allowed = 5 * (chance * (1 - chance) / n).sqrt() + 2.0**-16
    assert ((up / n - chance).abs() <= allowed).all()


def test_torchao_int8_with_stochastic_rounding_is_e0m7_of_a_row():
    """Direct quantized training in INT8. torchao scales each row, by its largest over 127 at every
    write; a grid here has one power of two a tensor, which grows only. Where the two agree, in a
    row that ends at 127/128, both round to the same values, and to the next below or above them."""
    qt = pytest.importorskip("torchao.prototype.quantized_training")
    row = torch.rand(1, 500, generator=torch.Generator().manual_seed(0)) * 2 - 1
    row[0, 0] = 127 / 128
    row.clamp_(-127 / 128, 127 / 128)
    ours = make_grid_tensor(row, "E0M7", "grid_stochastic")
    theirs = qt.Int8QuantizedTrainingLinearWeight.from_float(row)
    assert torch.equal(ours.dequantize(), theirs.dequantize())

    drawn = []
    for weight in (ours, theirs):
        values = []
        torch.manual_seed(0)
        for _ in range(400):
            weight.copy_(row)
            values.append(weight.dequantize())
        drawn.append(torch.cat(values))
    low, part = (128 * row).floor(), (128 * row).frac() % 1
    for values in drawn:
        steps = 128 * values - low
        assert ((steps == 0) | (steps == 1) & (part > 0)).all()
        # six standard errors of 400 draws of 500 weights, no rounding error
        assert (steps.mean(0) - part).abs().max() < 6 * 0.5 / 400**0.5
        assert (steps.mean() - part.mean()).abs() < 6 * 0.5 / (400 * 500) ** 0.5


# rules


@pytest.fixture(scope="module")
def bench(small_folder) -> Bench: return small_bench(small_folder)


def arm(**values) -> Arm:
    return Arm(**{"checkpoint": "tiny-0", "corpus": "tiny", "lr": 0.01, **values})


class Averaged(Weights):
    "Weights with torch's moving average of what was stored."
    def __init__(self, model, arm):
        super().__init__(model, arm)
        self.means: list[torch.Tensor] = []

    def update(self, rule):
        super().update(rule)
        now = [p.latent() if self.on_grid else p.detach().clone() for p in self.stored]
        if self.means: get_ema_multi_avg_fn(0.95)(self.means, now, 1)
        else: self.means = now


@pytest.mark.parametrize("storage", ["fp32", "master", "grid_nearest", "grid_residual4"])
def test_what_is_validated_is_the_average(bench, storage):
    looked: list[Averaged] = []

    def make(model, a):
        looked.append(Averaged(model, a))
        return looked[-1]

    plain = run_arm(arm(storage=storage, rule="adamw"), bench, make)
    averaged = run_arm(arm(storage=storage, rule="averaged_adamw"), bench)
    (weights,) = looked
    means = weights.means
    if weights.on_grid:
        means = [fake_quantize(m, "E4M3", g.scale) for m, g in zip(means, weights.stored)]
    expected = state_hash({str(i): m for i, m in enumerate(means)})[:16]
    assert averaged["weights_sha"] == expected != plain["weights_sha"]
    assert averaged["curve"] == plain["curve"]  # training never sees the average
    assert averaged["val_loss"] != plain["val_loss"]


def test_a_training_run_refuses_a_rule_with_averages():
    with pytest.raises(InputError, match="averaged_adamw keeps averages"):
        make_config({"rule": "averaged_adamw", "format": "E4M3"})


def test_eco_without_a_grid_is_adamw(bench):
    for storage in ("fp32", "master"):
        rows = [run_arm(arm(rule=r, storage=storage), bench) for r in ("adamw", "eco")]
        assert rows[0]["weights_sha"] == rows[1]["weights_sha"]


def trainer(bench, out, rule: str) -> Trainer:
    return Trainer(make_config(dict(
        name="run", data=bench.data["tiny"], format="E4M3", storage="grid_stochastic",
        rule=rule, rule_lr=RULES[rule].guess, max_steps=4, batch_size=2, block_size=16,
        eval_every=2, eval_windows=2, warmup_steps=1, checkpoint_every=1, device="cpu",
        compute_dtype="float32",
    )), out)


@pytest.mark.parametrize("rule", ["lion", "sgd", "eco"])
def test_a_stopped_training_run_goes_on_bit_for_bit(bench, tmp_path, monkeypatch, rule):
    whole, torn = (trainer(bench, tmp_path / name, rule) for name in ("whole", "torn"))
    whole.run(progress=False)
    check = NonfiniteGuard.check

    def stop(guard, row):
        check(guard, row)
        if row["step"] == 2: raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NonfiniteGuard, "check", stop)
        with pytest.raises(KeyboardInterrupt): torn.run(progress=False)
    torn = trainer(bench, tmp_path / "torn", rule)
    assert torn.run(progress=False)["exit_reason"] == "finished"
    ends = [plain_state(t.model) for t in (whole, torn)]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("wrong, why", [
    ({"decay": 5.0}, "decay must be"), ({"decay": "0.9"}, "decay must be"),
    ({"decay": True}, "decay must be"), ({"power": 1.0}, "power must be 0"),
])
def test_a_group_of_averages_is_checked_as_the_constructor_is(wrong, why):
    make = lambda: torch.nn.Parameter(torch.ones(3))
    group = {"params": [make()], **wrong}
    with pytest.raises(InputError, match=why): AveragedAdamW([group], "E4M3")
    if "decay" in wrong:  # the constructor has no power
        with pytest.raises(InputError, match=why): AveragedAdamW([make()], "E4M3", **wrong)
    rule = AveragedAdamW([make()], "E4M3", decay=0.5)
    with pytest.raises(InputError, match=why): rule.add_param_group(group)
    rule.add_param_group({"params": [make()], "decay": 0.25})
    assert [group["decay"] for group in rule.param_groups] == [0.5, 0.25]
