"""The rivals that are rules, where the package uses them: in the instrument, in training runs that
stop and go on, and in the memory that is measured."""
import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from altgrad.basics import InputError
from altgrad.evidence.bench import bits_a_weight
from altgrad.evidence.instrument import (
    Arm, Bench, Weights, build_checkpoint, run_arm, state_hash,
)
from altgrad.geometry.catalogue import RULES
from altgrad.geometry.rivals.average import AveragedAdamW
from altgrad.geometry.storage import make_grid_tensor, plain_state
from altgrad.numbers.quantize import fake_quantize
from altgrad.training.config import make_config
from altgrad.training.trainer import NonfiniteGuard, Trainer
from tiny import TASK, TEXT

BITS = {"lion": 32, "sgd": 32, "eco": 64, "averaged_adamw": 96}  # of optimizer state, a weight


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    "A folder with a text and a checkpoint."
    folder = tmp_path_factory.mktemp("rivals")
    (folder / "text.txt").write_text(TEXT)
    build_checkpoint(bench(folder), "tiny-0")
    return folder


def bench(folder) -> Bench:
    data = {"tiny": f"path:{folder / 'text.txt'}"}
    return Bench(folder / "checkpoints", data, TASK, folder / "cache")


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
def test_what_is_validated_is_the_average(here, storage):
    looked: list[Averaged] = []

    def make(model, a):
        looked.append(Averaged(model, a))
        return looked[-1]

    plain = run_arm(arm(storage=storage, rule="adamw"), bench(here), make)
    averaged = run_arm(arm(storage=storage, rule="averaged_adamw"), bench(here))
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


@pytest.mark.parametrize("rule", BITS)
def test_bits_of_the_state_are_measured(here, rule):
    assert bits_a_weight(arm(rule=rule, storage="grid_nearest"), bench(here)) == 8 + BITS[rule]


def test_eco_without_a_grid_is_adamw(here):
    for storage in ("fp32", "master"):
        rows = [run_arm(arm(rule=r, storage=storage), bench(here)) for r in ("adamw", "eco")]
        assert rows[0]["weights_sha"] == rows[1]["weights_sha"]


def trainer(here, out, rule: str) -> Trainer:
    return Trainer(make_config(dict(
        name="run", data=f"path:{here / 'text.txt'}", format="E4M3", storage="grid_stochastic",
        rule=rule, rule_lr=RULES[rule].guess, max_steps=4, batch_size=2, block_size=16,
        eval_every=2, eval_windows=2, warmup_steps=1, checkpoint_every=1, device="cpu",
        compute_dtype="float32",
    )), out)


@pytest.mark.parametrize("rule", [rule for rule in BITS if not RULES[rule].averages])
def test_a_stopped_training_run_goes_on_bit_for_bit(here, tmp_path, monkeypatch, rule):
    whole, torn = (trainer(here, tmp_path / name, rule) for name in ("whole", "torn"))
    whole.run(progress=False)
    check = NonfiniteGuard.check

    def stop(guard, row):
        check(guard, row)
        if row["step"] == 2: raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NonfiniteGuard, "check", stop)
        with pytest.raises(KeyboardInterrupt): torn.run(progress=False)
    torn = trainer(here, tmp_path / "torn", rule)
    assert torn.run(progress=False)["exit_reason"] == "finished"
    ends = [plain_state(t.model) for t in (whole, torn)]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


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


@pytest.mark.parametrize("wrong, said", [
    ({"decay": 5.0}, "decay must be"), ({"decay": "0.9"}, "decay must be"), ({"decay": True}, "decay must be"),
    ({"power": 1.0}, "power must be 0"),
])
def test_a_group_of_averages_is_checked_as_the_constructor_is(wrong, said):
    make = lambda: torch.nn.Parameter(torch.ones(3))
    with pytest.raises(InputError, match=said): AveragedAdamW([{"params": [make()], **wrong}], "E4M3")
    if "decay" in wrong:  # the constructor has no power
        with pytest.raises(InputError, match=said): AveragedAdamW([make()], "E4M3", **wrong)
    rule = AveragedAdamW([make()], "E4M3", decay=0.5)
    with pytest.raises(InputError, match=said): rule.add_param_group({"params": [make()], **wrong})
    rule.add_param_group({"params": [make()], "decay": 0.25})
    assert [group["decay"] for group in rule.param_groups] == [0.5, 0.25]
