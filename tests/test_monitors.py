"""What is watched in a run: against oracles, without a wait for the device, and through whole
runs."""
import logging
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import altgrad.numbers.kernels as K
from altgrad.basics import InputError
from altgrad.numbers.formats import EIGHT_BIT, FORMATS
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import scale_of
from altgrad.geometry.optim import RiemannianAdamW
from altgrad.geometry.storage import STORAGES, grid_storages, store_on_grid
from altgrad.model.gpt import GPT, GPTConfig, loss_of
from altgrad.model.points import LayerPrecisionRule, Precision, PrecisionConfig
from altgrad.model.surgery import quantize_model, round_weight_gradients
from altgrad.numbers.kernels import set_path
from altgrad.watching.callbacks import lightning_monitors, transformers_monitors
from altgrad.watching.metrics import METRICS
from altgrad.watching.sums import PLACE, Parcel, code_counts, round_and_sum, rounding_sums
from altgrad.watching.points import point_metrics
from altgrad.watching.updates import UpdateCounts, UpdateSums, decay_rates, update_sums
from altgrad.watching.monitors import GradientCounts, Monitors
from altgrad.watching.series import read_series
from altgrad.watching.shadow import Shadow, shadow_metrics
from altgrad.watching.thresholds import Alarms, Interventions, Thresholds, set_weight_format

from cases import each
from old import OLD_TORCH

ml_dtypes = pytest.importorskip("ml_dtypes")
TYPES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def model_with(storage: str = "master", **points) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16))
    quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("*", **points)]))
    if storage != "master": store_on_grid(model, storage)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(step))
    return x[:, :-1], x[:, 1:]


def train(model: GPT, monitors: Monitors | None, steps: int) -> list:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), []
    if monitors: monitors.optimizers = [optimizer]
    for step in range(1, steps + 1):
        if monitors: monitors.begin(step)
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        round_weight_gradients(model)
        if monitors: monitors.gradients()
        optimizer.step()
        if monitors: found.append(monitors.end())
    return found


@each("name", sorted(TYPES))
def test_rates_are_those_that_ml_dtypes_rounding_gives(name):
    fmt, scale = FORMATS[name], 2.0**-6
    x = torch.randn(300, 50, generator=torch.Generator().manual_seed(1)) ** 5
    z = x.double().numpy() / scale
    q = np.clip(z, -fmt.max, fmt.max).astype(np.float32).astype(TYPES[name]).astype(np.float64)
    y, sums = round_and_sum(x, Precision(name), torch.tensor(scale))
    parts = {("sums", "a", "weight"): sums.numpy(), ("scale", "a", "weight"): np.array(scale)}
    values, _ = point_metrics(parts, {("a", "weight"): fmt})
    get = lambda metric: values[f"quantization/a/weight/{metric}"]
    assert np.array_equal(y.double().numpy(), q * scale)
    assert get("overflow_rate") == (np.abs(z) > fmt.max).mean()
    assert get("underflow_rate") == ((z != 0) & (q == 0)).mean()
    # of a sum of float32 numbers: its roundings add up like a random walk
    known = x.numel() ** 0.5 * 2.0**-24
    decibels = 10 * np.log10((z**2).sum() / ((z - q) ** 2).sum())
    assert abs(get("sqnr_db") - decibels) < 4.35 * 8 * known
    assert abs(get("kurtosis") / (((z - z.mean()) ** 4).mean() / z.var() ** 2) - 1) < 32 * known
    assert abs(get("rms_octaves") - np.log2(fmt.max / np.sqrt((z**2).mean()))) < 8 * known


def test_tiny_and_huge_tensors_neither_vanish_nor_overflow_in_the_sums():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for exponent in (-100, -30, 0, 30, 100):
        scale = torch.tensor(2.0 ** (exponent - 5))
        y, sums = round_and_sum(x * 2.0**exponent, Precision("E4M3"), scale)
        reference = rounding_sums(x, y * 2.0**-exponent, torch.tensor(2.0**-5), FORMATS["E4M3"])
        powers = torch.tensor([0, 0, 0, 2, 1, 2, 3, 4, 1, 0])
        torch.testing.assert_close(sums, reference * 2.0 ** (exponent * powers.double()))


@each("scale", [0.25, "a row"])
@each("rounding", ["nearest", "stochastic"])
def test_sums_of_bfloat16_are_those_of_its_values(rounding, scale):
    x = torch.randn(7, 3001, generator=torch.Generator().manual_seed(0)).mul(40).bfloat16()
    x[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    rows = torch.tensor([2.0**-k for k in range(7)])[:, None]
    scale = rows if scale == "a row" else torch.tensor(scale)
    key = 3 if rounding == "stochastic" else None
    y, sums = round_and_sum(x, Precision("E4M3", rounding=rounding), scale, key)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.nan_to_num(), fake_quantize(x, "E4M3", scale, rounding=rounding, key=key).nan_to_num())
    exact, rounded = x.double()[x.isfinite()], y.double()[x.isfinite()]
    wanted = {
        "overflow": ((x / scale).abs() > 448).logical_and(x.isfinite()).sum(),
        "underflow": ((rounded == 0) & (exact != 0)).sum(), "nonfinite": 3,
        "error": (rounded - exact).square().sum(), "amax": exact.abs().max(), "elements": x.numel(),
        **{f"power_{k}": exact.pow(k).sum() for k in (1, 2, 3, 4)},
    }
    for name, value in wanted.items():
        # error, a difference of two bfloat16 numbers, is rounded to float32 at worst: 2^-24 each, twice squared;
        # without a compiler sums are float32 too, of pieces of 21,007 elements: 2^-24 times the square root of them
        size = exact.abs().sum() if name == "power_1" else exact.abs().pow(3).sum() if name == "power_3" else 0
        slack = 21_007**0.5 * 2.0**-23 * max(float(size), abs(float(value)))
        assert abs(float(sums[PLACE[name]]) - float(value)) <= slack, name


@pytest.mark.parametrize("points", [
    *(dict(weight=n) for n in (*EIGHT_BIT, "bfloat16")),
    dict(activation="E4M3 32"),
    dict(weight="E4M3 channel", activation="E5M2 stochastic smoothed",
         gradient="E5M2 toward_zero static", weight_gradient=True),
], ids=str)
def test_watching_changes_no_bit(points):
    plain, watched = model_with(**points), model_with(**points)
    train(plain, None, 4)
    found = train(watched, Monitors(watched, every=1, histogram_every=2, health_every=3), 4)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))
    values = [pair for m in found for pair in m.values.items()]
    assert [path for path, v in values if math.isinf(v) and not path.endswith("sqnr_db")] == []


@pytest.mark.parametrize("storage", ["master", *grid_storages()])
def test_every_storage_is_watched(storage):
    model = model_with(storage, weight="E4M3", activation="E4M3")
    values = train(model, Monitors(model, every=1), 3)[-1].values
    layers = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    weights = sum(m.weight.numel() for m in layers)
    kind = STORAGES[storage]
    loses = kind.on_grid and not kind.residual_bits
    rate, other = ("code_unchanged_rate", "bit_stall_rate")[:: -1 if loses else 1]
    assert f"updates/all/{other}" not in values and 0 < values[f"updates/all/{rate}"] < 1
    assert 0 <= values["updates/all/zero_update_rate"] <= 1
    flips, updates = (values[f"updates/all/{name}"] for name in ("flips", "updates"))
    assert updates <= 2 * weights  # torch's AdamW writes twice
    assert abs(values[f"updates/all/{rate}"] - (1 - flips / updates)) < 4 * 2.0**-53
    known = kind.rounding == "nearest" and kind.fmt is None and loses
    assert math.isnan(values["updates/blocks.0.mlp.fc/decay_stall_rate"]) == (not known)


@pytest.mark.parametrize("storage", ("grid_residual8", "grid_kahan", "bf16_kahan", "bf16", "grid_nearest"))
def test_updates_that_are_kept_beside_the_codes_are_no_stall(storage):
    "Steps of an eighth of bfloat16's spacing: they add up where there is room for them, and are lost elsewhere."
    model, steps, lr = nn.Sequential(nn.Linear(8, 64, bias=False)), 20, 2.0**-10
    torch.nn.init.constant_(model[0].weight, 1.75)
    quantize_model(model, "E4M3")
    store_on_grid(model, storage)
    w, opt = model[0].weight, torch.optim.SGD(model.parameters(), lr=lr)
    monitors, alarms = Monitors(model, opt, every=1), Alarms()
    acts, alerts, events = Interventions(model, [opt], ["move_bit"]), [], []
    for step in range(1, steps + 1):
        monitors.begin(step)
        w.grad = torch.ones_like(w)
        opt.step()
        m = monitors.end()
        alerts += [alert.metric for alert in alarms.check(step, 1.0, m)]
        events += acts.act(step, True, m)
    kept = STORAGES[storage].residual_bits > 0
    # a level of eight bits is 2^-3 / 254, drawn to half a level or less each time: six standard errors of 512 means
    slack = 6 * 2.0**-3 / 254 / 2 * (steps / 512) ** 0.5
    assert abs(float(1.75 - w.data.latent().mean()) - kept * steps * lr) <= slack
    assert ("updates/0/bit_stall_rate" in alerts) == (not kept)
    assert m.values[f"updates/0/{'code_unchanged_rate' if kept else 'bit_stall_rate'}"] > 0.5
    assert bool(events) == (storage == "grid_nearest") == (model[0].weight_format.name != "E4M3")


def test_a_weight_on_the_grid_is_seen_as_it_is():
    layer = nn.Linear(16, 16, bias=False)
    quantize_model(layer, "E4M3", skip=())
    store_on_grid(layer, "grid_nearest")
    monitors, found = Monitors(layer, every=1), []
    for step in (1, 2):
        monitors.begin(step)
        layer(torch.ones(1, 16))
        found.append(monitors.end().values["quantization//weight/amax"])
        assert found[-1] == layer.weight.data.dequantize().abs().amax()
        layer.weight.data = torch.full((16, 16), 2.0**-6)
    assert found[1] == 2.0**-6 < found[0]


@each("kind, settings", (
    ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("NAdam", {}), ("RAdam", {}), ("RMSprop", {}),
    ("NAdam", {"decoupled_weight_decay": True}), ("RAdam", {"decoupled_weight_decay": True}),
    ("Adagrad", {}), ("Adamax", {}), ("Adadelta", {}),
))
def test_decay_that_is_a_part_of_the_gradient_is_none_of_the_weights(kind, settings):
    "A part of the gradient is seen in the moments, although the gradient itself is zero."
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    optimizer = getattr(torch.optim, kind)([p], lr=0.5, weight_decay=0.5, **settings)
    optimizer.step()
    coupled = any(value.any() for value in optimizer.state[p].values() if value.shape == p.shape)
    assert decay_rates([optimizer]) == {id(p): 0 if coupled else 0.25}


def test_a_rate_that_is_not_there_is_no_decay():
    p = nn.Parameter(torch.ones(1))
    for change in ({"lr": None}, {"weight_decay": None}):
        optimizer = torch.optim.AdamW([p])
        optimizer.param_groups[0].update(change)
        assert decay_rates([optimizer]) == {id(p): 0}
    del optimizer.param_groups[0]["lr"]
    assert decay_rates([optimizer]) == {id(p): 0}


def test_names_are_paths_of_the_registry():
    model = model_with(weight="E4M3", gradient=True)
    shadow, monitors = Shadow(model), Monitors(model, every=1)
    monitors.readers.append(shadow_metrics)
    monitors.begin(1)
    shadow.begin(1)
    loss_of(model, *batch(1)).backward()
    monitors.gradients()
    shadow.measure([batch(1)], monitors.parcel)
    values = monitors.end().values
    ulps = {f"ulps_p{q:02d}" for q in (5, 25, 50, 75, 95)}
    groups = {g.path.split("/")[0]: {m.name for m in g.metrics} | ulps for g in METRICS[1:]}
    assert all(path.split("/")[-1] in groups[path.split("/")[0]] for path in values)
    assert {p.split("/")[0] for p in values} == set(groups)
    full = [f"{g.path}{m.name}" for g in METRICS for m in g.metrics]
    assert len(set(full)) == len(full)


@pytest.mark.skipif(OLD_TORCH, reason="in torch 2.8 numbers that are known are unknown too where tensors are fake")
def test_nothing_in_a_step_waits_for_the_device():
    """A fake tensor has no values: asking for one raises.
    The eager passes ask for none until the parcel is opened."""
    def step():
        layer = nn.Linear(32, 16, bias=False)
        quantize_model(layer, "E4M3", skip=())
        x, s = torch.randn(16, 32), torch.ones(())
        rounding_sums(x, x, s, FORMATS["E4M3"])
        update_sums(x, x, s, s, FORMATS["E4M3"])
        parcel, updates, gradients = Parcel(), UpdateCounts(layer), GradientCounts(layer)
        layer.weight.grad = torch.randn(16, 32)
        updates.start()
        gradients.measure(parcel)
        updates.stop(parcel)
        assert len(parcel.parts) == 3
        return x

    before = K.set_path("eager")
    try:
        step()  # what is kept between calls shall not be fake
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = step()
            with pytest.raises(DataDependentOutputException): x.sum().item()
    finally: K.set_path(before)


def test_a_run_is_watched_from_config_to_files(tmp_path):
    from altgrad.training.data import load_corpus
    from altgrad.training.config import make_config
    from altgrad.training.trainer import Trainer
    corpus = load_corpus("stdlib", cache=tmp_path / "cache")
    config = make_config(dict(
        format="E4M3", activation="E4M3", gradient="E5M2 stochastic", monitor_every=2,
        shadow_every=4, max_steps=6, batch_size=2, block_size=16, eval_windows=2, eval_every=3,
        checkpoint_every=3,
    ))
    trainer = Trainer(config, tmp_path / "runs", corpus)
    record = trainer.run(progress=False)
    rows, series = trainer.folder.metrics(), read_series(trainer.folder.path / "series")
    assert record["exit_reason"] == "finished" and record["monitors"]["every"] == 2
    steps = [row["step"] for row in rows if "quantization/all/gradient/sqnr_db" in row]
    assert steps == [1, 2, 4, 6]
    assert series["shadow/blocks.0.mlp.fc/cosine"][0].tolist() == [1, 4]
    assert series["quantization/blocks.3.mlp.fc/weight/amax"][0].tolist() == [1, 2, 4, 6]
    nested = {k for row in rows for k, v in row.items() if isinstance(v, (list, dict))}
    assert nested <= {"events", "nonfinite"}
    files = sorted(p.name for p in (trainer.folder.path / "series").glob("values*"))
    assert files == ["values-00000002.parquet", "values-00000006.parquet"]


def test_noise_alone_rarely_rings_and_divergence_does():
    random = np.random.default_rng(0)
    rung = 0
    for _ in range(20):
        alarms = Alarms()
        rung += any(alarms.check(step, 4 + 0.1 * random.normal()) for step in range(300))
    alarms, alerts = Alarms(), []
    for step in range(300):
        loss = 4 + 0.02 * max(0, step - 200) + 0.1 * random.normal()
        alerts += alarms.check(step, loss)
    assert rung <= 1 and [a.metric for a in alerts] == ["loss_rise"]
    assert 200 < alerts[0].step < 260


@each("name", ["E4M3", "E7M0", "binary8p1", "float8_e4m3b11fnuz"])
def test_flips_are_counted_where_weights_lie_between_two_codes(name):
    # between two codes, and at zeros of both signs, formats differ: ties to the even code, no -0
    fmt = FORMATS[name]
    values = fmt.values[fmt.values.isfinite()].unique().float()
    between = (values[1:] + values[:-1]) / 2
    pool = torch.cat([values, between, -between, torch.tensor([0.0, -0.0])])
    drawn = torch.randint(len(pool), (2, 64, 64), generator=torch.Generator().manual_seed(0))
    before, after = pool[drawn]
    counted = UpdateSums(*update_sums(before, after, torch.ones(()), torch.ones(()), fmt).tolist())
    codes = [fake_quantize(w, fmt).view(torch.int32) for w in (before, after)]
    assert counted.flips == ((codes[0] != codes[1]) & (before != after)).sum()


def test_sums_take_any_scale_that_rounding_takes():
    x = torch.tensor([1e-40, 3e-41, -2e-40, 0.0])
    for scale in (2.0**-140, 2.0**-3, 0.37):
        s = torch.tensor(scale)
        y, _ = round_and_sum(x, Precision("E4M3"), s)
        assert torch.equal(y, fake_quantize(x, "E4M3", s))
    with pytest.raises(InputError, match="positive and finite"):
        round_and_sum(x, Precision("E4M3"), torch.tensor(0.0))


# what is refused, and loops of others


@each("make, told", (
    (lambda m, o: Monitors(3), "model must be a torch.nn.Module, not int"),
    (lambda m, o: Monitors(m, 3), "optimizers must be of torch.optim.Optimizer, not 3"),
    (lambda m, o: Monitors(m, [o, None]), "optimizers must be of torch.optim.Optimizer, not None"),
    (lambda m, o: Monitors(m, o, every=True), "every must be a whole number of steps, from 1, not True"),
    (lambda m, o: Monitors(m, o, health_every=0), "health_every must be a whole number of steps"),
    (lambda m, o: Shadow(m, every="a"), "every must be a whole number of steps, from 1, not 'a'"),
    (lambda m, o: Shadow(m, every=0), "every must be a whole number of steps, from 1, not 0"),
    (lambda m, o: lightning_monitors(every=0), "every must be a whole number of steps, from 1, not 0"),
    (lambda m, o: transformers_monitors(None, every="x"), "every must be a whole number of steps"),
))
def test_what_cannot_be_watched_is_refused_in_one_line(make, told):
    model = model_with(weight="E4M3")
    with pytest.raises(InputError, match=told) as error: make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "\n" not in str(error.value)


def test_a_single_optimizer_is_one_of_several():
    found = []
    for several in (False, True):
        model = model_with(weight="E4M3")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        monitors = Monitors(model, [optimizer] if several else optimizer, every=1)
        monitors.begin(1)
        loss_of(model, *batch(1)).backward()
        monitors.gradients()
        optimizer.step()
        found.append(monitors.end().overall())
    assert found[0] and repr(found[0]) == repr(found[1])


def fit(module, watch, batches, **settings):
    "Trains a module of lightning on random batches, watched."
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", callbacks=[watch], **quiet, **settings)
    with warnings.catch_warnings(action="ignore"): trainer.fit(module, torch.randn(batches, 4, 8))


@pytest.mark.parametrize("each", (1, 4))
@pytest.mark.parametrize("every", (1, 5, 10))
def test_with_two_optimizers_in_lightning_a_step_is_a_batch(every, each):
    "The second optimizer steps once in `each` batches; both rest in the third."
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)
            quantize_model(self, "E4M3")

        def training_step(self, batch, i):
            loss = self.down(self.up(batch)).square().mean()
            self.manual_backward(loss)
            if i == 2: return
            for n, optimizer in enumerate(self.optimizers()):
                if n and i % each: continue
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (self.up, self.down)]

    class Memory(pl.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None): rows.setdefault(step, set()).update(metrics)

    rows: dict[int, set] = {}
    fit(Module(), lightning_monitors(every), 12, max_epochs=2, logger=Memory(), log_every_n_steps=1)
    # two times twelve batches, and one of each twelve ends with no step; what is logged is numbered from 0
    measured = [step + 1 for step, row in rows.items() if "gradients/all/l2" in row]
    assert sorted(measured) == [step for step in range(1, 23) if step == 1 or step % every == 0]


@pytest.mark.parametrize("both", (False, True))
def test_with_two_optimizers_in_lightning_each_gradient_is_measured_once(both):
    "A neuron without a gradient is silent once a step; a layer's gradient is the one that its optimizer uses."
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 1, bias=False)
            self.up.weight.register_hook(lambda g: torch.cat([torch.zeros_like(g[:1]), g[1:]]))

        def training_step(self, batch, i):
            optimizers = self.optimizers()
            for optimizer, factor in zip(optimizers, (1, 100)):
                if both or factor == 1:
                    for each in optimizers: each.zero_grad()
                    self.manual_backward(factor * self.down(self.up(batch)).square().mean())
                if factor == 100: self.used = self.down.weight.grad.norm().item()
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(m.parameters(), lr=1e-6) for m in (self.up, self.down)]

    module, watch = Module(), lightning_monitors(1)
    found = []
    watch.end = lambda end=watch.end: found.append(end()) or found[-1]
    fit(module, watch, 4, max_epochs=1, logger=False)
    silent = watch.monitors.of_gradients.silent["up"]
    assert len(found) == silent[0] == 4 and silent.count_nonzero() == 1
    # a norm of sixteen float32 numbers
    assert math.isclose(found[-1].values["gradients/down/l2"], module.used, rel_tol=32 * 2.0**-24)


@each("words", ("E4M3", "E4M3 channel"))
def test_updates_of_convolutions_are_counted_alike_on_every_path(words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 5))
    quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("*", weight=words)]))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    before = model[0].weight.detach().clone()
    for path in ("eager", "auto"):
        with torch.no_grad(): model[0].weight.copy_(before)
        set_path(path)
        try:
            monitors = Monitors(model, [optimizer], every=1)
            monitors.begin(1)
            model(torch.ones(2, 3, 8, 8)).sum().backward()
            monitors.gradients()
            optimizer.step()
            optimizer.zero_grad()
            found.append(monitors.end().values)
        finally: set_path("auto")
    counts = [{key: value for key, value in values.items() if key.startswith("updates/") and not math.isnan(value)}
              for values in found]
    assert counts[0] == counts[1] and counts[0]["updates/0/updates"] > 0


def test_no_column_of_a_weight_is_left_out_of_its_sizes():
    model = nn.Sequential(nn.Linear(64, 4096, bias=False))
    quantize_model(model, "E4M3")
    updates, parcel = UpdateCounts(model), Parcel()
    updates.start()
    with torch.no_grad(): model[0].weight[:, 1:] *= 1.5
    updates.stop(parcel)
    sizes = parcel.unpack()["sizes", ("0",)][0]
    assert sizes[2] != 0 or sizes[4] > 0  # the median, or the largest, of the steps in spacings
    assert sizes[5] > 1  # codes away from where it began


def test_codes_are_counted_from_where_a_format_began():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_model(model, "E4M3")
    updates, found = UpdateCounts(model), []
    for fmt in ("E4M3", "E3M4"):
        set_weight_format(model, [], {"0": fmt})
        parcel = Parcel()
        updates.start()
        updates.stop(parcel)
        found.append(parcel.unpack()["sizes", ("0",)][0][5])
    assert found == [0, 0]


@each("drop", ((), ("formats",)))
def test_where_codes_began_outlives_a_restart_after_a_moved_bit(drop):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_model(model, "E4M3")
    def displacement(monitors, step):
        monitors.begin(step)
        return monitors.end().values["updates/0/code_displacement"]
    whole = Monitors(model, every=1)
    assert displacement(whole, 1) == 0
    again = Monitors(model, every=1)
    again.load_state_dict({key: value for key, value in whole.state_dict().items() if key not in drop})
    assert again.updates.origin.keys() == {"0"}
    set_weight_format(model, [], {"0": "E3M4"})
    assert displacement(whole, 2) == 0  # nothing has moved since the format began
    if not drop: assert displacement(again, 2) == 0


@each("storage, begun, new, why", (
    ("grid_nearest", "float4_e2m1fn", {"0": "E4M3"}, "codes of E4M3 do not fit"),
    ("grid_nearest", "E4M3", {"0": "float4_e2m1fn"}, "codes of float4_e2m1fn do not fit"),
    ("grid_residual4", "E4M3", {"0": "E4M11"}, "codes of E4M11 do not fit"),
    ("grid_nearest", "E4M3", {"0": "E3M4", "1": "nonsense"}, "nonsense"),
    ("master", "E4M3", {"0": "E3M4", "1": "nonsense"}, "nonsense"),
    ("master", "E4M3", {"0": "E3M4"}, "one group of an optimizer must get one format, not 0 E3M4, 1 E4M3"),
))
def test_formats_that_cannot_be_given_change_nothing(storage, begun, new, why):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    quantize_model(model, begun, skip=())
    store_on_grid(model, storage)
    weights = [m.weight.detach().clone() for m in model]
    codes = [w.codes.clone() for w in weights] if storage != "master" else []
    rule = RiemannianAdamW([m.weight for m in model], begun)
    with pytest.raises(InputError, match=why): set_weight_format(model, [rule], new)
    assert [m.weight_format.name for m in model] == [begun, begun] and rule.param_groups[0]["fmt"].name == begun
    assert all(torch.equal(m.weight.detach() + 0, w + 0) for m, w in zip(model, weights))
    assert all(torch.equal(m.weight.data.codes, c) for m, c in zip(model, codes))


def test_a_weight_on_a_manifold_keeps_its_format():
    pytest.importorskip("geoopt")
    model = nn.Sequential(nn.Linear(16, 16))
    quantize_model(model, "E4M3", manifold=True)
    with pytest.raises(InputError, match="0: a weight on a manifold"): set_weight_format(model, [], {"0": "E3M4"})
    assert model[0].weight_format == model[0].weight.manifold.fmt


def test_a_group_follows_its_own_layers_alone():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    quantize_model(model, "E4M3", skip=())
    rule = RiemannianAdamW([{"params": [m.weight]} for m in model], "E4M3")
    set_weight_format(model, [rule], {"0": "E3M4"})
    assert [group["fmt"].name for group in rule.param_groups] == ["E3M4", "E4M3"]


@each("fmt", ("E4M3", "E7M0", "bfloat16"))
def test_updates_of_float64_that_float32_does_not_see_are_counted(fmt):
    from altgrad.watching.updates import WeightMonitor
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.float64))
    quantize_model(model, fmt)
    w, cheap, updates, parcel = model[0].weight, WeightMonitor(model), UpdateCounts(model), Parcel()
    with torch.no_grad():  # a code that only float64 tells from its neighbour: a tie, and a bit above it
        w[0, 0] = tie = 0.25 * (1 + 2.0 ** -(FORMATS[fmt].mantissa_bits + 1))
    cheap.measure()
    updates.start()
    old, old_q = w.detach().clone(), model[0].quantized_weight().detach()
    with torch.no_grad():
        w -= 1e-9 * torch.randn_like(w).sign()
        w[0, 0] = tie + 1e-12
    updates.stop(parcel)
    moved = int((w != old).sum())
    flips = int(((w != old) & (model[0].quantized_weight() != old_q)).sum())
    found = UpdateSums(*parcel.unpack()["updates", "0", FORMATS[fmt], False])
    assert (found.updates, found.flips) == (moved, flips) and moved > 4000
    assert cheap.measure()["bit_stall_rate"] == 1 - flips / moved


def test_a_shared_weight_counts_once_in_all():
    from altgrad.watching.points import bit_histogram
    from altgrad.watching.updates import WeightMonitor
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
    model[1].weight = model[0].weight
    quantize_model(model, "E4M3", skip=())
    opt, x, loss = torch.optim.SGD(model.parameters(), lr=1.0), torch.randn(5, 4), lambda m, x, y: (m(x) - y).sum()
    monitors, cheap, shadow = Monitors(model, opt, every=1), WeightMonitor(model), Shadow(model, loss=loss)
    monitors.begin(1)
    shadow.begin(1)
    loss(model, x, x[:, :3]).backward()
    monitors.gradients()
    shadow.measure([(x, x[:, :3])], monitors.parcel)
    kept = [(key, value) for key, value in monitors.parcel.parts.items() if key[0] == "shadow"]
    opt.step()
    values = monitors.end().values
    norm = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()  # each of them once
    assert abs(values["gradients/all/l2"] - norm) <= 16 * 2.0**-23 * norm  # of float32 sums over up to 16 squares
    assert values["updates/all/updates"] == 28 and values["updates/1/updates"] == 16
    assert values["gradients/1/l2"] == values["gradients/0/l2"]
    assert [key for key, _ in kept if key[2]] == [("shadow", "0", True), ("shadow", "2", True)]
    assert sum(bit_histogram(model)) == 28 and len(cheap.layers) == 2


def test_formats_without_a_code_coordinate_are_watched():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_model(model, "mxint8")
    w, opt = model[0].weight, torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitors = Monitors(model, opt, every=1)
    for step in (1, 2):
        old, old_q = w.detach().clone(), model[0].quantized_weight().detach()
        monitors.begin(step)
        model(torch.randn(4, 64)).square().sum().backward()
        opt.step()
        values = monitors.end().values
        assert math.isnan(values["updates/0/code_displacement"])
        flips = int(((w != old) & (model[0].quantized_weight() != old_q)).sum())
        assert values["updates/0/flips"] == flips > 0 and math.isfinite(values["updates/0/ulps_p05"])
    again = Monitors(model, opt, every=1)
    again.load_state_dict(monitors.state_dict())


def test_writes_that_are_not_counted_are_refused_by_name_and_can_be_attempted():
    from altgrad.geometry.storage import make_grid_tensor
    from altgrad.watching.attempt import attempt_alone
    from altgrad.watching.updates import WeightMonitor
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    quantize_model(model, "E4M3")
    made = [make_grid_tensor(model[0].weight, "E4M3", "grid_nearest", counted=c) for c in (True, False)]
    weights, attempts = list(map(nn.Parameter, made)), []
    for w in weights:
        opt, w.grad = torch.optim.SGD([w], lr=0.01), torch.ones(8, 8)
        attempts.append(attempt_alone(opt, opt.param_groups[0], w).update)
    assert torch.equal(*attempts)
    model[0].weight = weights[1]
    for watch in (lambda: Monitors(model, every=1).begin(1), lambda: WeightMonitor(model), UpdateCounts(model).start):
        with pytest.raises(InputError, match="0.weight: its writes are not counted"): watch()


@each("path", ("auto", "eager"))
@each("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", ("E2M5", "E4M3", "E5M2", "E0M7"))
@each("granularity", ("tensor", "channel", "nvfp4"))
def test_codes_are_counted_where_a_narrow_tensor_rounded_them_again(granularity, name, dtype, path):
    "The nearest value of the format, in float64, is the one that was meant; counted with exact codes."
    fmt, x = FORMATS[name], torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = scale_of(x, fmt, granularity)
    set_path(path)
    try:
        y = fake_quantize(x, fmt, scale)
        counts = code_counts(y, scale, fmt)
    finally: set_path("auto")
    wanted = fmt.to_bits(y.double() / scale.double()).flatten().long().bincount(minlength=256)
    assert torch.equal(counts, wanted)


def test_the_largest_number_of_float16_has_the_code_that_was_rounded_to_it():
    y = torch.tensor([65504.0, -65504.0], dtype=torch.float16)  # 2 * 2^15, which float16 does not reach
    assert code_counts(y, torch.tensor(2.0), FORMATS["E5M2"]).nonzero().flatten().tolist() == [120, 248]


def test_a_shadow_leaves_the_statistics_of_batches_as_they_are():
    def trained(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        quantize_model(model, "E4M3")
        loss = lambda m, x, y: (m(x) - y).square().mean()
        shadow = Shadow(model, loss=loss)
        data = torch.randn(16, 8), torch.randn(16, 1)
        if watched: shadow.begin(1)
        loss(model, *data).backward()
        if watched: shadow.measure([data], Parcel())
        return list(model.buffers())
    assert all(map(torch.equal, trained(True), trained(False)))


def test_a_shadow_takes_a_layer_that_the_loss_does_not_see():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(8, 1), nn.Linear(8, 1)
        def forward(self, x): return self.used(x)
    model, parcel = Part(), Parcel()
    quantize_model(model, "E4M3")
    shadow = Shadow(model, loss=lambda m, x, y: m(x).sum())
    shadow.begin(1)
    model(torch.ones(2, 8)).sum().backward()
    shadow.measure([(torch.ones(2, 8), None)], parcel)
    assert [key[1] for key in parcel.parts] == ["used"]


@each("size", (6e-6, 1.0, 100.0))
def test_gradients_in_float16_have_the_numbers_of_float32(size):
    def numbers(dtype):
        model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=dtype))
        quantize_model(model, "E4M3")
        g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).mul(size).half()
        model[0].weight.grad = g.to(dtype)
        parcel = Parcel()
        GradientCounts(model, 1e-30, 1).measure(parcel)
        return parcel.unpack()["gradients", "0"]
    np.testing.assert_allclose(numbers(torch.float16), numbers(torch.float32), rtol=64 * 64 * 2.0**-24)


@each("given", (dict(strict=5), dict(strict=(5,)), dict(patience=10.5), dict(patience=True)))
def test_thresholds_of_the_wrong_kind_are_refused(given):
    with pytest.raises(InputError): Thresholds(**given)


def test_one_pattern_of_strict_layers_is_one():
    one = Thresholds(strict="*.attn.proj")
    assert one.limit("blocks.0.mlp.fc", "stable_rank") == Thresholds().limit("blocks.0.mlp.fc", "stable_rank")
    assert one.limit("blocks.0.attn.proj", "stable_rank") == Thresholds().limit("blocks.0.attn.proj", "stable_rank")


def test_states_of_another_run_are_refused():
    model = model_with(weight="E4M3")
    acts = Interventions(model, [], ["move_bit"])
    for state in ({**acts.state_dict(), "moved": {"zz": "E4M3"}}, {**acts.state_dict(), "other": 1}, {}):
        with pytest.raises(InputError): acts.load_state_dict(state)
    alarms = Alarms()
    for state in ({}, {**alarms.state_dict(), "losses": 3}):
        with pytest.raises(InputError): alarms.load_state_dict(state)
    with pytest.raises(InputError): Monitors(model, [], 1).load_state_dict({"origin": {"zz": [1, 2]}, "silent": {}})


def test_a_damaged_list_of_parts_is_no_list_of_none(tmp_path):
    from altgrad.watching.monitors import Measurement
    from altgrad.watching.series import SeriesLog
    log = SeriesLog(tmp_path)
    log.append(Measurement(1, {"a/b/c": 1.0}))
    log.flush()
    assert list(read_series(tmp_path)) == ["a/b/c"]
    (tmp_path / "parts.json").write_text("{")
    with pytest.raises(InputError, match="parts.json is damaged"): read_series(tmp_path)


@each("words, fits", (("E5M2 delayed", True), ("float4_e2m1fn nvfp4", False), ("E4M3 32", False)))
def test_only_gradients_under_one_scale_are_fitted(words, fits):
    from altgrad.watching.monitors import Measurement
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("*", weight="E4M3", gradient=words)]))
    events = Interventions(model, [], ["fit_gradients"]).act(
        1, True, Measurement(1, {"quantization/0/gradient/overflow_rate": 0.03}))
    assert bool(events) == model[0].points["gradient"].fit == fits
