"""A checkpoint that does not fit changes nothing: weights, points, optimizers and generators are
bit for bit those of before."""
import random

import numpy as np
import pytest
import torch
from torch import nn

from altgrad.basics import InputError
from altgrad.geometry.optim import StiffnessAdamW
from altgrad.geometry.storage import GridTensor, store_on_grid
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig
from altgrad.model.surgery import quantize_model
from altgrad.training.checkpoint import load_checkpoint, save_checkpoint

from cases import each


def trained(seed: int, storage: str, steps: int) -> tuple[nn.Module, list]:
    "A model with a rule on its linear weights and torch's AdamW on the rest."
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    rule = LayerPrecisionRule("*", weight="E4M3", activation="E4M3 delayed")
    quantize_model(model, config=PrecisionConfig([rule]))
    store_on_grid(model, storage, seed)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizers = [
        StiffnessAdamW(matrices, "E4M3", 1e-2),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], 1e-2),
    ]
    for _ in range(steps):
        for optimizer in optimizers: optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers: optimizer.step()
    return model, optimizers


def everything(model: nn.Module, optimizers: list) -> list:
    "All that loading may change, copied by other code than the checkpoint's."
    found = []
    for p in model.parameters():
        w, on_grid = p.data, isinstance(p.data, GridTensor)
        inner = [w.codes, w.scale, w.writes] if on_grid else [p]
        found += [part.detach().numpy().tobytes() for part in inner]
    for layer in (model[0], model[2]):
        scaling = layer.points["activation"].scaling
        found += [str(scaling.memory.state), str(scaling.scale), layer.points["activation"].calls]
    for optimizer in optimizers:
        found += [
            [
                (k, v.numpy().tobytes() if isinstance(v, torch.Tensor) else v)
                for k, v in optimizer.state.get(p, {}).items()
            ]
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        for group in optimizer.param_groups:
            found.append({k: v for k, v in group.items() if k != "params"})
    return [*found, random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def last_weight(state): state["model"]["2.bias"] = torch.zeros(5)
def last_codes(state): state["model"]["2.weight.codes"] = torch.zeros(4, 15, dtype=torch.uint8)
def codes_of_floats(state):
    state["model"]["2.weight.codes"] = state["model"]["2.weight.codes"].float()
def weight_missing(state): del state["model"]["2.bias"]
def weight_too_many(state): state["model"]["3.bias"] = torch.zeros(5)
def weight_no_tensor(state): state["model"]["2.bias"] = [0.0] * 4
def no_model(state): del state["model"]
def moment_shape(state): state["optimizers"][1]["state"][2]["exp_avg_sq"] = torch.zeros(5)
def moment_of_another_layer(state):
    state["optimizers"][0]["state"][1]["exp_avg"] = torch.zeros(16, 8)
def groups(state):
    state["optimizers"][1]["param_groups"].append(state["optimizers"][1]["param_groups"][0])
def parameters(state): state["optimizers"][1]["param_groups"][0]["params"].pop()
def no_optimizer(state): state["optimizers"].pop()
def optimizer_of_nothing(state): state["optimizers"][1] = {}
def generator(state): state["random"]["cpu"] = torch.zeros(7, dtype=torch.uint8)
def numpys_generator(state): state["random"]["numpy"] = ("MT19937", torch.zeros(3), 0, 0, 0.0)
def no_generator(state): del state["random"]
def point_missing(state): state["points"].popitem()
def point_without_memory(state): del state["points"]["2/activation"]["memory"]
def point_scale(state): state["points"]["2/activation"]["scale"] = "1"
def no_extra(state): del state["extra"]
def step_of_words(state): state["step"] = "3"


ON_GRIDS = [last_codes, codes_of_floats]
WRONGS = [
    last_weight, weight_missing, weight_too_many, weight_no_tensor, no_model, moment_shape,
    moment_of_another_layer, groups, parameters, no_optimizer, optimizer_of_nothing, generator,
    numpys_generator, no_generator, point_missing, point_without_memory, point_scale, no_extra,
    step_of_words,
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "The path of a checkpoint for each storage."
    folder = tmp_path_factory.mktemp("saved")
    for storage in ("master", "grid_nearest"):
        save_checkpoint(folder / storage, *trained(0, storage, steps=3), 3, best=1.5)
    return folder


@each("storage, wrong", [
    *(("master", w) for w in WRONGS),
    *(("grid_nearest", w) for w in [*ON_GRIDS, last_weight, moment_shape]),
])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_a_state_that_does_not_fit_changes_nothing(saved, tmp_path, storage, wrong, steps):
    state = torch.load(saved / storage, weights_only=True)
    wrong(state)
    torch.save(state, tmp_path / "c.pt")
    model, optimizers = trained(1, storage, steps)
    before = everything(model, optimizers)
    with pytest.raises(InputError, match="c.pt cannot be used") as e:
        load_checkpoint(tmp_path / "c.pt", model, optimizers)
    assert len(str(e.value)) <= 300 and "\n" not in str(e.value)
    assert everything(model, optimizers) == before


@each("storage", ["master", "grid_nearest"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_a_state_that_fits_is_all_loaded(saved, storage, steps):
    twin = everything(*trained(0, storage, steps=3))
    model, optimizers = trained(1, storage, steps)
    assert everything(model, optimizers) != twin
    assert load_checkpoint(saved / storage, model, optimizers) == (3, {"best": 1.5})
    # but for the generators, of which python's and numpy's went on meanwhile
    assert everything(model, optimizers)[:-3] == twin[:-3]


def test_a_moment_of_rows_and_columns_is_taken(tmp_path):
    "Adafactor keeps a row and a column for a matrix; they are no wrong shapes."
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", model, [optimizer], 1)
    other = torch.optim.Adafactor(model.parameters())
    load_checkpoint(tmp_path / "c.pt", model, [other])
    assert {v.shape for v in other.state[model.weight].values()} == {(), (4, 1), (1, 8)}
