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
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.products import QuantizedLinear
from altgrad.geometry.storage import store_on_grid
from altgrad.model.surgery import high_precision, quantize_model


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
