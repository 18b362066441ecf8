"""Codes that leave are read by the libraries whose layouts they have, on a CPU, and none changes."""
import json

import pytest
import torch
from safetensors.torch import load_file, safe_open
from torch import nn
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import altgrad
from altgrad.basics import InputError
from altgrad.cli import main
from altgrad.geometry.layouts import LAYOUTS, export_weights
from altgrad.geometry.storage import make_grid_tensor, store_on_grid
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.numbers.quantize import fake_quantize
from altgrad.numbers.scaling import scale_of
from altgrad.training.config import make_config
from altgrad.training.trainer import Trainer, trained_model

SHARES = {"fp8": "tensor", "fp8_blocks": "tensor", "compressed-tensors": "channel", "mxfp8": "32",
          "mxfp8_e5m2": "32", "mxfp4": "32"}
OF_TRANSFORMERS = ("fp8", "fp8_blocks", "compressed-tensors")
OF_TORCHAO = ("mxfp8", "mxfp8_e5m2", "mxfp4")
TOKENS = torch.arange(24)[None] * 5 % 64


def on_grid(model, point, storage="grid_residual4", inputs=None, steps=3):
    "The model with its linear layers on a grid, and a few steps of training behind it."
    rule = LayerPrecisionRule("*", weight=point, activation=inputs)
    quantize_model(model, config=PrecisionConfig(default=rule))
    store_on_grid(model, storage)
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in model.parameters():
            with torch.no_grad(): p.add_(0.02 * torch.randn(p.shape, generator=g))
    return model.eval()


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    ))


@pytest.mark.parametrize("layout", OF_TRANSFORMERS)
def test_transformers_reads_what_was_trained(layout, tmp_path):
    model = on_grid(llama(), f"E4M3 {SHARES[layout]}")
    export_weights(model, tmp_path, layout)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    trained = {n: p.data for n, p in model.named_parameters() if hasattr(p.data, "parts")}
    assert len(trained) == 14  # the head is left as it is
    loaded = dict(read.named_parameters())
    for name, grid in trained.items():
        weight = loaded[name]
        if weight.dtype == torch.float8_e4m3fn:  # still coded: by its scale
            weight = weight.float() * read.get_parameter(f"{name}_scale")
        assert torch.equal(weight, grid.dequantize()), name
    with torch.no_grad(): theirs, ours = read(TOKENS).logits, model(TOKENS).logits
    # equal weights; products of another path may add in another order: n 2^-24 of the largest, twice
    assert torch.allclose(theirs, ours, rtol=0, atol=256 * 2.0**-23 * ours.abs().max().item())


class Two(nn.Module):
    "Two layers, one of them left alone."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.lm_head = nn.Linear(64, 96), nn.Linear(96, 8)

    def forward(self, x): return self.lm_head(self.fc(x).relu())


@pytest.mark.parametrize("layout", OF_TORCHAO)
def test_torchao_reads_what_was_trained(layout, tmp_path):
    point = f"{LAYOUTS[layout].formats[0]} 32"
    model = on_grid(Two(), point, inputs=point)
    export_weights(model, tmp_path, layout)
    with safe_open(tmp_path / "model.safetensors", "pt") as file: words = file.metadata()
    state, rest = unflatten_tensor_state_dict(load_file(tmp_path / "model.safetensors"), words)
    assert not rest
    read = Two()
    read.load_state_dict(state, assign=True)
    assert torch.equal(read.fc.weight.dequantize(), model.fc.weight.dequantize())
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(): theirs, ours = read(x), model(x)
    # inputs are rounded alike; sums of 64 and 96 products may have another order
    assert torch.allclose(theirs, ours, rtol=0, atol=96 * 2.0**-23 * ours.abs().max().item())


def without_master(model, layout, make):
    "The model after a few steps of training without master weights, as a layout wants it."
    kind = LAYOUTS[layout]
    optimizer = altgrad.without_master(
        model, torch.optim.AdamW, lr=1e-3, format=kind.formats[0], granularity=kind.shares[-1]
    )
    before = {n: p.data.codes.clone() for n, p in model.named_parameters() if hasattr(p.data, "parts")}
    for step in range(3):
        make(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, codes in before.items(): assert (model.get_parameter(name).codes != codes).any()
    return before.keys()


@pytest.mark.parametrize("layout", OF_TORCHAO)
def test_torchao_reads_what_was_trained_without_master_weights(layout, tmp_path):
    model, x = Two(), torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    assert [*without_master(model, layout, lambda step: model(x).square().sum())] == ["fc.weight"]
    export_weights(model, tmp_path, layout)
    with safe_open(tmp_path / "model.safetensors", "pt") as file: words = file.metadata()
    stored = load_file(tmp_path / "model.safetensors")
    state, rest = unflatten_tensor_state_dict(dict(stored), words)
    assert not rest
    read, grid = Two(), model.fc.weight
    read.load_state_dict(state, assign=True)
    assert torch.equal(read.fc.weight.dequantize(), grid.dequantize())
    codes = stored["fc._weight_qdata"].view(torch.uint8)
    if grid.fmt.bits == 4: codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    assert torch.equal(codes, grid.codes)
    # its reader rounds inputs as well
    rounded = fake_quantize(x, grid.fmt, scale_of(x, grid.fmt, 32))
    with torch.no_grad():
        theirs, ours = read.fc(x), nn.functional.linear(rounded, grid.dequantize(), model.fc.bias)
    assert torch.allclose(theirs, ours, rtol=0, atol=64 * 2.0**-23 * ours.abs().max().item())


@pytest.mark.parametrize("layout", OF_TRANSFORMERS)
def test_transformers_reads_what_was_trained_without_master_weights(layout, tmp_path):
    model = llama()
    names = without_master(model, layout, lambda step: model(TOKENS, labels=TOKENS).loss)
    export_weights(model.eval(), tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    for name in names:
        codes = model.get_parameter(name).codes
        assert torch.equal(stored[name].view(torch.uint8), codes)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad(): theirs, ours = read(TOKENS).logits, model(TOKENS).logits
    assert torch.allclose(theirs, ours, rtol=0, atol=256 * 2.0**-23 * ours.abs().max().item())


@pytest.mark.parametrize("stored", ("master", "grid_residual4"))
@pytest.mark.parametrize("layout", OF_TORCHAO)
def test_torchao_reads_a_model_in_bfloat16_as_one(layout, stored, tmp_path):
    point = f"{LAYOUTS[layout].formats[0]} 32"
    model = on_grid(Two().bfloat16(), point, stored, inputs=point)
    export_weights(model, tmp_path, layout)
    with safe_open(tmp_path / "model.safetensors", "pt") as file: words = file.metadata()
    state, _ = unflatten_tensor_state_dict(load_file(tmp_path / "model.safetensors"), words)
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    read = Two().bfloat16()
    read.load_state_dict(state, assign=True)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad(): theirs, ours = read(x), model(x)
    # one rounding to bfloat16 after each of two products, which may fall to the other side
    assert theirs.dtype == ours.dtype == torch.bfloat16
    assert torch.allclose(theirs, ours, rtol=0, atol=2.0**-7 * ours.abs().max().item())


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64))
def test_torchao_has_no_mx_for_other_dtypes(dtype, tmp_path):
    model = on_grid(Two().to(dtype), "E4M3 32", "master")
    said = f"fc: MX of torchao is for models in float32 or bfloat16, not {str(dtype)[6:]}"
    with pytest.raises(InputError, match=said): export_weights(model, tmp_path / "out", "mxfp8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", OF_TRANSFORMERS)
def test_transformers_reads_a_model_in_bfloat16_as_one(layout, tmp_path):
    model = on_grid(llama().bfloat16(), f"E4M3 {SHARES[layout]}")
    export_weights(model, tmp_path, layout)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad(): theirs, ours = read(TOKENS).logits, model(TOKENS).logits
    assert theirs.dtype == ours.dtype == read.dtype == torch.bfloat16
    # two layers of roundings to bfloat16, which may fall to the other side
    assert torch.allclose(theirs.float(), ours.float(), rtol=0, atol=2.0**-5 * ours.abs().max().item())


@pytest.mark.parametrize("layout", OF_TORCHAO)
def test_the_file_is_the_one_that_torchao_would_write(layout, tmp_path):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    model = on_grid(Two(), f"{LAYOUTS[layout].formats[0]} 32")
    export_weights(model, tmp_path, layout)
    with safe_open(tmp_path / "model.safetensors", "pt") as file: words = file.metadata()
    written = load_file(tmp_path / "model.safetensors")
    state, _ = unflatten_tensor_state_dict(written, words)
    tensors, facts = flatten_tensor_state_dict(state)
    assert set(tensors) == set(written)
    for name, t in tensors.items(): assert torch.equal(t.view(torch.uint8), written[name].view(torch.uint8))
    for name, told in facts.items():
        if name != "tensor_names": assert json.loads(told) == json.loads(words[name])


def test_a_scale_for_a_tensor_or_a_row_reaches_compressed_tensors(tmp_path):
    for shared, shape in (("tensor", (1,)), ("channel", (96, 1))):
        model = on_grid(Two(), f"E4M3 {shared}")
        export_weights(model, tmp_path / shared, "compressed-tensors")
        assert load_file(tmp_path / shared / "model.safetensors")["fc.weight_scale"].shape == shape
        told = json.loads((tmp_path / shared / "config.json").read_text())["quantization_config"]
        assert told["config_groups"]["group_0"]["weights"]["strategy"] == shared
        assert told["ignore"] == ["lm_head"]


def test_weights_on_a_grid_need_no_quantized_layer(tmp_path):
    model = Two()
    model.fc.weight = nn.Parameter(make_grid_tensor(model.fc.weight, "E4M3", "grid_nearest"))
    export_weights(model, tmp_path, "fp8")
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["fc.weight"].float() * stored["fc.weight_scale_inv"], model.fc.weight.dequantize())


def convolution():
    "A model whose only quantized weight has four dimensions."
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    quantize_model(model, "E4M3", skip=())
    return model


def alone():
    "A layer that is the whole model."
    layer = nn.Linear(32, 32)
    layer.weight = nn.Parameter(make_grid_tensor(layer.weight, "E4M3", "grid_nearest"))
    return layer


@pytest.mark.parametrize("make, layout, said", [
    (lambda: on_grid(Two(), "E4M3"), "fp9", "unknown layout 'fp9'"),
    (lambda: on_grid(Two(), "E7M0"), "fp8", "fc.weight is E7M0; fp8 holds E4M3"),
    (lambda: on_grid(Two(), "E5M2"), "mxfp8", "fc.weight is E5M2; mxfp8 holds E4M3"),
    (lambda: on_grid(Two(), "E4M3 32"), "fp8", "has a scale for each 32; fp8 has one for each tensor"),
    (lambda: on_grid(Two(), "E4M3"), "mxfp8", "has a scale for each tensor; mxfp8 has one for each 32"),
    (lambda: on_grid(Two(), "E4M3 nvfp4"), "mxfp8", "has a scale for each 16"),
    (lambda: on_grid(Two(), "E4M3"), "fp8_blocks", "need such multiples, not 96 x 64"),
    (convolution, "fp8", "holds matrices, not weights of 4 dimensions"),
    (alone, "fp8", "a layer inside a model has a name before .weight"),
    (Two, "fp8", "call quantize_model first"),
    (lambda: None, "fp8", "the model must be a torch.nn.Module, not NoneType"),
])
def test_what_a_layout_does_not_have(make, layout, said, tmp_path):
    with pytest.raises(InputError, match=said): export_weights(make(), tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def run(small_folder, tmp_path_factory):
    "The folder of a short run whose weights live on a grid."
    here = tmp_path_factory.mktemp("runs")
    settings = dict(
        name="mine", data=f"path:{small_folder}/text.txt", format="E4M3",
        storage="grid_residual4", max_steps=4, batch_size=4, warmup_steps=1, eval_every=4,
        eval_windows=4, checkpoint_every=2, device="cpu",
        compute_dtype="float32", compile="off",
    )
    Trainer(make_config(settings), here).run(progress=False)
    return here / "mine"


def test_a_run_is_converted(run, tmp_path, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    assert main(["convert", str(run), "--to", "fp8", "--out", str(tmp_path / "served")]) == 0
    assert before == sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    stored, model = load_file(tmp_path / "served/model.safetensors"), trained_model(run)
    grids = {n: p.data for n, p in model.named_parameters() if hasattr(p.data, "parts")}
    assert grids
    for name, grid in grids.items():
        assert torch.equal(stored[name].view(torch.uint8), grid.codes.view(torch.uint8))
        assert torch.equal(stored[f"{name}_scale_inv"], grid.scale)
    assert main(["convert", str(run), "--to", "fp8"]) == 0 and (run / "fp8/model.safetensors").is_file()


def test_the_help_of_convert_lists_what_there_is(capsys, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "mine", LAYOUTS["mxfp4"])
    with pytest.raises(SystemExit) as done: main(["convert", "--help"])
    told = capsys.readouterr().out
    assert not done.value.code
    for name, kind in LAYOUTS.items():
        line, = (row for row in told.splitlines() if row.split()[:1] == [name])
        assert line.endswith(f"read by {kind.reader}") and all(f in line for f in kind.formats)


def test_a_request_to_convert_that_is_wrong(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.yaml").write_text((run / "config.yaml").read_text())
    for words, said in [
        ((str(run), "--to", "fp9"), "unknown layout 'fp9' (did you mean fp8?)"),
        ((str(run), "--to", "mxfp8"), "has a scale for each tensor; mxfp8 has one for each 32"),
        ((str(tmp_path / "none"), "--to", "fp8"), "there is no run"),
        ((str(tmp_path / "bare"), "--to", "fp8"), "there is no checkpoint"),
    ]:
        assert main(["convert", *words, "--out", str(tmp_path / "out")]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1 and not (tmp_path / "out").exists(), told
