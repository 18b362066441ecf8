"""Training without master weights in the hands of others: checkpoints of transformers, accelerate
and safetensors, GPT-2, files that are read where this package is not."""
import logging
import subprocess
import sys

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

import altgrad
from altgrad.basics import InputError
from altgrad.geometry.layouts import export_weights
from altgrad.geometry.storage import grid_weights
from altgrad.model.without_master import BITS
from test_without_master import (equal, everything, go_on_alike, network, product, reloaded,
                                 size_of, train)

ADAMW = torch.optim.AdamW


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    yield
    logging.disable(logging.NOTSET)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    ))


class Counting(Dataset):
    def __len__(self): return 64

    def __getitem__(self, i):
        tokens = (torch.arange(16) + i) % 64
        return {"input_ids": tokens, "labels": tokens}


def trained(folder, resume=None, **more):
    "A model and its optimizer after four steps of the Trainer, which saves after two."
    model = llama()
    optimizer = altgrad.without_master(model, ADAMW, lr=1e-3, **more)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, report_to=[], save_strategy="steps", save_steps=2, use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Counting(), optimizers=(optimizer, None)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return model, optimizer


@pytest.mark.parametrize("bits", (0, 4))
def test_the_trainer_saves_and_goes_on_bit_for_bit(bits, tmp_path):
    whole = trained(tmp_path / "whole", bits=bits)
    # from what the first one left after two steps; its seed is that of the file
    again = trained(tmp_path / "again", tmp_path / "whole/checkpoint-2", bits=bits, seed=9)
    assert equal(everything(*whole), everything(*again))
    # who takes the codes for weights is told
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole/checkpoint-2")


def test_accelerate_saves_and_goes_on(tmp_path):
    def prepared(seed):
        model = network()
        accelerator = Accelerator(cpu=True)
        optimizer = altgrad.without_master(model, ADAMW, lr=1e-3, seed=seed)
        return accelerator, *accelerator.prepare(model, optimizer)
    accelerator, model, optimizer = prepared(0)
    train(model, optimizer, range(3))
    accelerator.save_state(str(tmp_path))
    train(model, optimizer, range(3, 5))
    again, twin, other = prepared(5)
    train(twin, other, range(7, 8))
    again.load_state(str(tmp_path))
    train(twin, other, range(3, 5))
    assert equal(everything(model, optimizer.optimizer), everything(twin, other.optimizer))


@pytest.mark.parametrize("format", ("E4M3", "float6_e2m3fn", "float4_e2m1fn"))
@pytest.mark.parametrize("bits", BITS)
def test_safetensors_takes_a_state_and_gives_it_back(format, bits, tmp_path):
    model = network()
    optimizer = altgrad.without_master(model, ADAMW, lr=1e-3, bits=bits, format=format)
    train(model, optimizer, range(2))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    twin = network()
    altgrad.without_master(twin, ADAMW, lr=1e-3, bits=bits, format=format, seed=4)
    twin.load_state_dict(load_file(tmp_path / "model.safetensors"))
    twins, grids = grid_weights(twin), grid_weights(model)
    for name, grid in grids.items():
        assert equal([*grid.parts().values()], [*twins[name].parts().values()])
        for key in ("seed", "tensor"): assert grid.how[key] == twins[name].how[key]


def test_a_state_is_plain_tensors_that_share_the_weights_memory():
    model = network()
    altgrad.without_master(model, ADAMW, lr=1e-3)
    state, weight = model.state_dict(), model[2].weight
    assert {type(t) for t in state.values()} == {torch.Tensor}
    assert state["2.weight"].dtype == torch.uint8
    parts = [t.data_ptr() for t in weight.data.parts().values()]
    assert set(parts) <= {t.data_ptr() for t in state.values()}
    own = [t for grid in grid_weights(model).values() for t in grid.parts().values()]
    plain = [p.data for name, p in model.named_parameters() if name not in grid_weights(model)]
    # of each weight its seed and its kind in words come on top
    assert 0 < size_of([*state.values()]) - size_of(own + plain) < 64 * len(grid_weights(model))


READ = """
import sys
import torch
state = torch.load(sys.argv[1], weights_only=True)
print(state["model"]["2.weight"].dtype, len(state["optimizer"]["state"]), "altgrad" in sys.modules)
"""


def test_a_file_is_read_where_nothing_of_this_was_imported(tmp_path):
    model = network()
    optimizer = altgrad.without_master(model, ADAMW, lr=1e-3)
    train(model, optimizer, range(1))
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "state.pt")
    command = [sys.executable, "-c", READ, str(tmp_path / "state.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["torch.uint8", "9", "False"], done.stderr


# GPT-2, whose linear layers are [in, out]


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    ))


def learn(model, optimizer, steps):
    "Losses of counting."
    losses = []
    for step in range(steps):
        tokens = (torch.arange(16) + torch.arange(step, step + 8)[:, None]) % 64
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_gpt2_learns_as_with_plain_weights():
    plain, model = gpt2(), gpt2()
    expected = learn(plain, ADAMW(plain.parameters(), lr=1e-3), 60)
    optimizer = altgrad.without_master(model, ADAMW, lr=1e-3)
    losses = learn(model, optimizer, 60)
    kinds = {type(m).__name__ for m in model.modules() if hasattr(m, "weight")}
    assert kinds == {"Embedding", "LayerNorm", "GridConv1D", "Linear"}
    assert len(grid_weights(model)) == 8 and expected[0] - expected[-1] > 1
    # of a loss that falls by more than a nat; what the weights of a start lose in E4M3 is in it
    assert sum(abs(a - b) for a, b in zip(losses, expected)) / 60 < 0.05
    assert "GridConv1D(E4M3, grid_residual4)" in repr(model)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=("float32", "autocast"))
def test_a_product_is_that_of_a_conv1d_with_the_decoded_weight(dtype):
    model, x = gpt2(), torch.randn(4, 8, 64)
    altgrad.without_master(model, ADAMW, lr=1e-3)
    layer, plain = model.transformer.h[0].mlp.c_fc, gpt2().transformer.h[0].mlp.c_fc
    with torch.no_grad(): plain.weight.copy_(layer.weight.dequantize())
    ours, theirs = (product(each, x, dtype) for each in (layer, plain))
    assert [t.dtype for t in ours] == [t.dtype for t in theirs] and equal(ours, theirs)
    assert layer.weight.shape == (64, 256)


def test_gpt2_saves_and_takes_plain_weights(tmp_path):
    model, twin = gpt2(), gpt2()
    optimizer, other = (altgrad.without_master(m, ADAMW, lr=1e-3) for m in (model, twin))
    learn(model, optimizer, 2)
    twin.load_state_dict(reloaded(model.state_dict()))
    other.load_state_dict(reloaded(optimizer.state_dict()))
    assert go_on_alike((model, optimizer), (twin, other), 2, learn)
    plain = {name: p.dequantize() if name in grid_weights(model) else p.data
             for name, p in model.named_parameters()}
    reader = gpt2()
    reader.load_state_dict(plain, strict=False)
    tokens = torch.arange(16)[None]
    assert torch.equal(reader(tokens).logits, model(tokens).logits)
    model.load_state_dict(gpt2().state_dict())  # begins afresh
    fresh = gpt2()
    altgrad.without_master(fresh, ADAMW, lr=1e-3)
    for name, grid in grid_weights(fresh).items():
        assert torch.equal(grid.codes, grid_weights(model)[name].codes)


def test_blocks_of_a_conv1d_are_refused():
    with pytest.raises(InputError, match="c_attn is a Conv1D, .* granularity must be tensor, not 32"):
        altgrad.without_master(gpt2(), ADAMW, lr=1e-3, granularity=32)


@pytest.mark.parametrize("layout", ("fp8", "compressed-tensors"))
def test_no_layout_has_a_conv1d(layout, tmp_path):
    model = gpt2()
    altgrad.without_master(model, ADAMW, lr=1e-3)
    with pytest.raises(InputError, match=f"c_attn.weight is that of a GridConv1D; {layout} holds those of nn.Linear"):
        export_weights(model, tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()
