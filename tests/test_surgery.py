"""Surgery on models that were not written for it."""
import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from altgrad.basics import InputError
from altgrad.numbers.formats import EIGHT_BIT
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig, Quantizer, read_precision, round_gradient
from altgrad.model.products import QuantizedLinear
from altgrad.geometry.storage import store_on_grid
from altgrad.model.surgery import (
    clamp_outliers, high_precision, load_points_state, points_state, quantize_model, round_weight_gradients,
    rounded_once,
)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        d_model=32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=2)


class Attention(nn.Module):
    "Named and nested the way Hugging Face models are."
    def __init__(self, width: int):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.o_proj(
            F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )


class Decoder(nn.Module):
    def __init__(self, width: int = 32, vocab: int = 50):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"self_attn": Attention(width), "norm": nn.LayerNorm(width)})
            for _ in range(2)
        )

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers: x = x + layer["self_attn"](layer["norm"](x))
        return x


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder()
        self.lm_head = nn.Linear(32, 50, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids): return self.lm_head(self.model(ids))


def rounded_by_torch(w: torch.Tensor) -> torch.Tensor:
    "A weight in E4M3 under its power-of-two scale, with torch's own cast."
    scale = 2.0 ** (w.abs().max() / 448).log2().ceil()
    return (w / scale).to(torch.float8_e4m3fn).float() * scale


def with_rounded_weights(model: nn.Module, names: list[str]) -> nn.Module:
    "A plain copy of a model whose named layers hold rounded weights."
    twin = copy.deepcopy(model)
    for name in names:
        layer = twin.get_submodule(name)
        layer.weight = nn.Parameter(rounded_by_torch(layer.weight.detach()))
    return twin


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_in_training_and_evaluation(training):
    plain = encoder()
    model = copy.deepcopy(plain)
    report = quantize_model(model, "E4M3")
    names = [row.name for row in report.changed]
    assert names == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert {row.why for row in report if not row.format} == {
        "a NonDynamicallyQuantizableLinear, not a plain Linear or Conv2d"
    }
    x = torch.randn(3, 7, 32)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[:, 5:] = True
    expected = with_rounded_weights(plain, names).train(training)
    known = 2 * 2 * 64 * 2.0**-24 * 4  # two layers of two sums of up to 64 terms, values of up to 4
    with torch.no_grad():
        for mask in (None, padding):
            keep = slice(None) if mask is None else slice(0, 5)
            torch.testing.assert_close(model.train(training)(x, src_key_padding_mask=mask)[:, keep],
                                       expected(x, src_key_padding_mask=mask)[:, keep], rtol=0, atol=known)


def test_hugging_face_style_model_keeps_its_tie_and_its_head():
    plain = CausalLM()
    model = copy.deepcopy(plain)
    ids = torch.randint(50, (2, 9))
    report = quantize_model(model, "E4M3")
    assert len(report.changed) == 8 and type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(
        model(ids), with_rounded_weights(plain, [r.name for r in report.changed])(ids)
    )


def test_tied_head_is_quantized_at_its_use_and_gets_both_gradients():
    model = CausalLM()
    quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("lm_head", "E5M2")]), skip=())
    assert isinstance(model.lm_head, QuantizedLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = model.lm_head.weight.detach().clone()
    ids = torch.randint(50, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(before, model.lm_head.weight)
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})


def test_an_optimizer_made_before_still_trains_the_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    quantize_model(model, "E3M4")
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    first = None
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        first = first or loss.item()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1 * first


def test_one_module_in_two_places_is_changed_once_and_in_both():
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    report = quantize_model(model, "E4M3")
    assert len(report) == 1
    assert model["a"] is model["b"][0]
    assert isinstance(model["b"][0], QuantizedLinear)


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_copies_pickles_and_state_dicts_survive(name):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    state = copy.deepcopy(model.state_dict())
    quantize_model(model, name)
    assert list(model.state_dict()) == list(state)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(5, 16)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), model(x)) and twin[0].weight_format == model[0].weight_format


def test_hooks_stay():
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(type(module)))
    quantize_model(model, "E4M3")
    model(torch.ones(1, 4))
    assert seen == [QuantizedLinear]


def test_first_matching_rule_wins_and_an_unmatched_one_is_an_error():
    model = CausalLM()
    report = quantize_model(
        model,
        config=PrecisionConfig([
            LayerPrecisionRule("*.q_proj", None), LayerPrecisionRule("model.layers.0.*", "E4M3"),
            LayerPrecisionRule("*_proj", "E5M2"),
        ]),
    )
    got = {row.name.replace("model.layers.", ""): row.format for row in report}
    assert got["0.self_attn.q_proj"] is None
    assert got["0.self_attn.k_proj"] == "E4M3"
    assert got["1.self_attn.k_proj"] == "E5M2"
    assert "lm_head" in got and got["lm_head"] is None
    with pytest.raises(InputError, match="no linear layer or convolution matches 'transformer.h"):
        quantize_model(
            CausalLM(),
            config=PrecisionConfig([LayerPrecisionRule("transformer.h.*", "E4M3")], default="E4M3"),
        )
    with pytest.raises(InputError, match="quantized already"): quantize_model(model, "E4M3")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_narrow_model_on_a_grid_computes_with_the_weights_that_torchs_cast_gives(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 8)).to(dtype)
    twin = copy.deepcopy(model)
    for i in (0, 2, 3):  # by hand: amax lands in E4M3's top binade, and torch rounds
        w = twin[i].weight.detach().float()
        scale = 2.0 ** math.ceil(math.log2(w.abs().max().item() / 448))
        with torch.no_grad(): twin[i].weight.copy_((w / scale).to(torch.float8_e4m3fn).float() * scale)
    quantize_model(model, "E4M3")
    store_on_grid(model, "grid_residual4")
    x = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for net in (model, twin):
        y = net(x)
        y.float().square().sum().backward()
        found.append([y, *(p.grad.to(dtype) for p in net.parameters())])
    assert found[0][0].dtype == dtype
    for ours, theirs in zip(*found, strict=True): assert torch.equal(ours, theirs)
    with high_precision(model): assert torch.equal(model(x), found[1][0])
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p.detach().float(), old.float())


WORDS = ("E5M2", "E4M3 delayed", "E5M2 stochastic", "E4M3 unscaled", "E4M3 channel", "E4M3 16")


@pytest.mark.parametrize("words", WORDS)
def test_an_overflow_is_found_behind_the_points_of_a_gradient(words):
    layer = nn.Linear(16, 16)
    rule = LayerPrecisionRule("*", gradient=words, weight_gradient=words)
    quantize_model(layer, config=PrecisionConfig(default=rule))
    x, dy = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    dy[0, 5] = torch.inf
    layer(x).backward(dy)
    assert x.grad.isfinite().all(1).tolist() == [False, True, True]
    assert layer.weight.grad.isfinite().all(1).tolist() == [i != 5 for i in range(16)]
    layer.weight.grad = torch.randn(16, 16)
    layer.weight.grad[2, 3] = -torch.inf
    round_weight_gradients(layer)
    assert (~layer.weight.grad.isfinite()).nonzero().tolist() == [[2, 3]]


def test_a_grad_scaler_skips_the_update():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    rule = LayerPrecisionRule("*", gradient="E5M2", weight_gradient="E5M2")
    quantize_model(model, config=PrecisionConfig(default=rule))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with torch.autocast("cpu", torch.float16): loss = model(100 * torch.randn(64, 16)).float().square().sum()
    scaler.scale(loss).backward()
    round_weight_gradients(model)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15 and all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_finite_gradients_are_those_of_the_point_to_the_last_bit(words, dtype):
    g = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 5, 64)[:, None]
    g[0, :2] = torch.tensor([0.0, -0.0])
    g, (one, two) = g.to(dtype), (Quantizer(read_precision(words), seed=3) for _ in range(2))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(round_gradient(one, g).view(bits), two(g).view(bits))


@pytest.mark.parametrize("recipe", ("static", "delayed", "smoothed"))
@pytest.mark.parametrize("first", (0.0, torch.inf))
def test_a_memory_of_zeros_is_none(recipe, first):
    def after_the_first():
        model = nn.Sequential(nn.Linear(4, 4))
        rule = LayerPrecisionRule("*", activation=f"E4M3 {recipe}")
        quantize_model(model, config=PrecisionConfig(default=rule))
        model[0].points["activation"](torch.full((4,), first))
        return model

    model, other = after_the_first(), nn.Sequential(nn.Linear(4, 4))
    quantize_model(other, config=PrecisionConfig(default=LayerPrecisionRule("*", activation=f"E4M3 {recipe}")))
    load_points_state(other, points_state(model))
    x = torch.tensor([1e-4, -3e-5, 2e-4, 1e-5])
    for point in (model[0].points["activation"], other[0].points["activation"]):
        assert torch.equal(point(x, advance=False), rounded_by_torch(x))
        assert torch.equal(point(x), rounded_by_torch(x))
        assert point(64 * x).max() == 448 * 2.0**-21  # clipped: by the past, whose amax 2e-4 has this scale


@pytest.mark.parametrize("leaves", (False, True))
def test_gradients_add_up_over_several_rounded_once(leaves):
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    quantize_model(model, "E4M3")
    store_on_grid(model, "grid_nearest")
    batches = torch.randint(-9, 9, (3, 2, 8)).float()  # whole numbers: exact sums
    for x in batches:
        with rounded_once(model, leaves): model(x).sum().backward()
    with rounded_once(model, leaves): model(batches[0])  # no backward pass
    assert torch.equal(model[0].weight.grad, batches.sum((0, 1)).expand(4, 8))


def network(inplace, bias):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=bias), nn.ReLU(inplace), nn.Flatten(2), nn.Linear(16, 8, bias=bias),
        nn.ReLU(inplace), nn.Linear(8, 8, bias=bias), nn.ReLU(inplace),
    )


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("gradient", (None, "E5M2"))
def test_what_follows_a_layer_may_write_into_its_output(gradient, bias):
    found = []
    for inplace in (False, True):
        model = network(inplace, bias)
        rule = LayerPrecisionRule("*", weight="E4M3", activation="E4M3", gradient=gradient)
        quantize_model(model, config=PrecisionConfig(default=rule))
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = model(x)
        (y * torch.linspace(-1, 1, 8)).sum().backward()
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
        flat = model[3:5](torch.randn(16, generator=torch.Generator().manual_seed(2)))
        found[-1].append(flat)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("points", ({"weight": "E4M3"}, {"weight": "E4M3", "gradient": "E5M2"}))
def test_outputs_under_autocast_have_the_dtype_of_torchs_layers(points):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.Linear(16, 8))
    model = copy.deepcopy(plain)
    quantize_model(model, config=PrecisionConfig(default=LayerPrecisionRule("*", **points)))
    with torch.autocast("cpu", torch.bfloat16):
        for end in (1, 3):
            x = torch.randn(2, 3, 6, 6)
            assert model[:end](x).dtype == plain[:end](x).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ("activation", "gradient"))
def test_a_point_that_remembers_is_refused_under_a_transform_and_left_as_it_was(kind):
    model = nn.Sequential(nn.Linear(8, 8))
    rule = LayerPrecisionRule("*", weight="E4M3", **{kind: "E4M3 delayed"})
    quantize_model(model, config=PrecisionConfig(default=rule))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p, x): return torch.func.functional_call(model, p, (x,)).square().sum()

    x = torch.randn(3, 8)
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    for f in (torch.func.grad(loss), per_sample):
        with pytest.raises(InputError, match="no point remembers amaxes"): f(params, x)
    model(x).sum().backward()
    copy.deepcopy(model)
    if kind == "activation": assert per_sample(model.eval() and params, x)["0.weight"].shape == (3, 8, 8)


@pytest.mark.parametrize("words", ("E4M3 channel", "E4M3 32", "E4M3"))
def test_a_gradient_that_is_fitted_is_shrunk_by_one_factor(words):
    q = Quantizer(read_precision(words))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -6, 16)[:, None]
    before = q(x)
    q.fit = True
    assert torch.equal(q(x), before)  # a scale from the amax at hand leaves nothing beyond the range
    large = q.rounded(x, q.scale(x) / 4, None, False)
    cosine = F.cosine_similarity(large.flatten(), x.flatten(), dim=0)
    assert cosine > 1 - 2.0**-7  # rounding moves an element by a part in 16, whose square is two such
    assert large.norm() < x.norm() / 3


def test_what_is_beside_one_context_ends_with_that_one():
    model = nn.Sequential(nn.Linear(8, 8))
    quantize_model(model, "E2M1")
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    exact = F.linear(x, model[0].weight, model[0].bias)
    with high_precision(model):
        with high_precision(model): assert torch.equal(model(x), exact)
        assert torch.equal(model(x), exact)
    assert not torch.equal(model(x), exact)

    store_on_grid(model, "grid_nearest")
    def gradient(nested):
        model.zero_grad()
        with rounded_once(model, leaves=True):
            model(x).sum().backward()
            if nested:
                with rounded_once(model): model(x)
            model(x).sum().backward()
        return model[0].weight.grad.clone()
    assert torch.equal(gradient(nested=True), gradient(nested=False))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_outputs_are_clamped_in_every_dtype(dtype):
    model = nn.Sequential(nn.Identity())
    clamp_outliers(model, "0", 2.0)
    for size in (1e-6, 1e4):  # whose squares float16 does not hold
        x = torch.full((64,), size, dtype=dtype)
        x[0] *= 5 if size > 1 else 50
        bound = 2 * x.double().square().mean().sqrt()
        told = model(x)
        # a root and a product in float32, and the bound in the dtype, of whose subnormals float16 has the largest
        near = 4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
        assert told[0].double() == pytest.approx(float(bound), rel=near, abs=2.0**-24)
        assert torch.equal(told[1:], x[1:])
    pair = nn.Sequential(nn.MultiheadAttention(8, 2))
    clamp_outliers(pair, "0", 2.0)
    with pytest.raises(InputError, match="no tensor"): pair[0](*[torch.ones(2, 1, 8)] * 3)


@pytest.mark.parametrize("harm", (
    lambda here: here.pop("calls"), lambda here: here.pop("scale"), lambda here: here.pop("precision"),
    lambda here: here.update(calls=-5), lambda here: here.update(calls="x"), lambda here: here.update(fit=1),
    lambda here: here.update(scale=torch.tensor(math.nan)), lambda here: here.update(memory=torch.ones(3)),
))
def test_a_damaged_state_of_points_is_refused_and_nothing_of_it_loaded(harm):
    def made():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        rule = LayerPrecisionRule("*", weight="E4M3", activation="E4M3 delayed stochastic")
        quantize_model(model, config=PrecisionConfig([rule]))
        return model
    model, other = made(), made()
    model(torch.ones(2, 8))
    state = points_state(model)
    harm(state["1/activation"])
    before = repr(points_state(other))
    with pytest.raises(InputError): load_points_state(other, state)
    assert repr(points_state(other)) == before


@pytest.mark.parametrize("make", (
    lambda: LayerPrecisionRule("*", weight=True), lambda: LayerPrecisionRule("*", activation=True),
    lambda: LayerPrecisionRule(5, "E4M3"), lambda: LayerPrecisionRule(["a"], "E4M3"), lambda: PrecisionConfig(rules=5),
))
def test_rules_of_the_wrong_kind_are_refused(make):
    with pytest.raises(InputError): make()


def test_gradients_are_rounded_for_the_optimizer_that_steps():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    rule = LayerPrecisionRule("*", weight="E4M3", weight_gradient="E5M2 delayed")
    quantize_model(model, config=PrecisionConfig([rule]))
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0))).sum().backward()
    other = model[1].weight.grad.clone()
    round_weight_gradients(model, torch.optim.SGD([model[0].weight], lr=0.1))
    assert torch.equal(model[1].weight.grad, other)
    assert model[0].points["weight_gradient"].scaling.memory.amax > 0
    assert model[1].points["weight_gradient"].scaling.memory.amax == 0
