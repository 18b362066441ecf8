"""Training runs with a planted fault, in three families of models, and runs without one.

Each of `FAULTS` says what broke first: the kind, the layer and the step. They were written before
altgrad/watching/cause.py, and share no code with it; tests/test_record.py and
nbs/studies/experiments/first_causes.py ask for the cause of each.
"""
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

STEPS, AT = 10, 5  # of a run; of a fault that does not lie there from the beginning
SEED = 0  # of weights and data


# models


class Attention(nn.Module):
    "Self-attention with two heads."
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    "A transformer's block."
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up = nn.LayerNorm(width), nn.Linear(width, 8 * width)
        self.act, self.down = nn.ReLU(), nn.Linear(8 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Plain(nn.Module):
    "A transformer of plain PyTorch that takes sequences of numbers."
    def __init__(self, width: int = 32, classes: int = 10):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head, self.scale = nn.LayerNorm(width), nn.Linear(width, classes), Times()

    def forward(self, x): return self.scale(self.head(self.norm(self.blocks(self.embed(x)))))


class Conv(nn.Module):
    "A convolutional network with batch normalization."
    def __init__(self, classes: int = 10):
        super().__init__()
        self.conv1, self.norm1, self.act1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.act2, self.flatten = nn.ReLU(inplace=True), nn.Flatten()
        self.fc1, self.act3, self.fc2 = nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 16)
        self.scale = Times()

    def forward(self, x):
        x = self.act1(self.norm1(self.conv1(x)))
        x = self.flatten(self.act2(self.norm2(self.conv2(x))))
        return self.scale(self.fc2(self.act3(self.fc1(x))))


class Times(nn.Module):
    "Logits divided by a temperature."
    factor = 1.0
    def forward(self, x): return x * self.factor


class Llama(nn.Module):
    "A Llama of transformers, with a temperature."
    def __init__(self):
        import transformers

        super().__init__()
        self.lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, mlp_bias=True, hidden_act="relu",
            initializer_range=0.1,
        ))
        self.scale = Times()

    def forward(self, x):
        given = {"inputs_embeds": x} if x.is_floating_point() else {"input_ids": x}
        return self.scale(self.lm(**given).logits)


class Family(NamedTuple):
    "A model, its data, and the names of its parts."
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple]  # inputs and targets
    linear: str  # a layer with 32 inputs or more
    wide: str  # one with 256 inputs
    norm: str
    first_norm: str
    act: str  # a ReLU, which follows `before`
    before: str  # whose bias shifts what the ReLU sees
    last: str  # the last layer with a weight
    after: str  # the parts of the model that follow the norm, up to the next with a weight


def numbers(g):
    "Sequences; the class is the place of the largest of ten numbers."
    x = torch.randn(8, 12, 16, generator=g)
    return x, x[..., :10].argmax(-1)


def tokens(g):
    "Tokens; the class is the next larger one."
    x = torch.randint(64, (8, 12), generator=g)
    return x, (x + 1) % 64


def images(g):
    "Noise; the class is the brightest of the first ten columns of pixels, of all colours."
    x = torch.randn(16, 3, 8, 8, generator=g)
    return x, x.sum(1).flatten(1)[:, :10].argmax(-1)


FAMILIES = {
    "plain": Family(
        Plain, numbers, "blocks.1.up", "blocks.1.down", "blocks.1.norm2", "blocks.0.norm1",
        "blocks.0.act", "blocks.0.up", "head", "blocks.1.up",
    ),
    "llama": Family(
        Llama, tokens, "lm.model.layers.1.mlp.up_proj", "lm.model.layers.1.mlp.down_proj",
        "lm.model.layers.1.post_attention_layernorm", "lm.model.layers.0.input_layernorm",
        "lm.model.layers.0.mlp.act_fn", "lm.model.layers.0.mlp.gate_proj", "lm.lm_head",
        "lm.model.layers.1.mlp.gate_proj",
    ),
    "conv": Family(
        Conv, images, "fc2", "fc1", "norm2", "norm1", "act1", "norm1", "fc2", "fc1",
    ),
}


# a run


@dataclass
class Run:
    "A training loop, as one writes it; a fault changes one of its parts."
    family: str
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    optimizer: Callable = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3, "weight_decay": 0.0})
    before: Callable | None = None  # of (run, step), before the forward pass
    batch: Callable | None = None  # of (run, step, inputs), changes them
    loss: Callable | None = None  # of (run, step, losses), in place of their mean
    backward: Callable | None = None  # of (run, step), after the backward pass
    clear: Callable = lambda step: True  # whether gradients are cleared after a step
    repeat: Callable = lambda step: 1  # optimizer's steps
    micro: int = 1  # batches a step
    keep: Callable = lambda name: True  # parameters that the optimizer is given
    build: Callable | None = None  # of (run): changes the model
    loop: str = "plain"  # or "closure", or "lightning"
    steps: int = STEPS
    step: int = 0

    def prepare(self) -> "Run":
        "Make model and optimizer."
        torch.manual_seed(SEED)
        self.parts = FAMILIES[self.family]
        self.model = self.parts.model()
        if self.build: self.build(self)
        self.model = self.model.to(self.dtype)
        kept = [p for n, p in self.model.named_parameters() if p.requires_grad and self.keep(n)]
        self.optim = self.optimizer(kept, **self.settings)
        return self

    def __getitem__(self, part: str) -> Any:
        "A layer by its part in the family, or by its name."
        return self.model.get_submodule(getattr(self.parts, part, part))

    def change(self, part: str, kind: type, **facts: Any) -> None:
        "Make a layer one of another class, with the same parameters."
        layer = self[part]
        layer.__class__ = type(kind.__name__, (kind, layer.__class__), {})
        for name, value in {"run": lambda: self, **facts}.items(): setattr(layer, name, value)

    def forward(self, batch: tuple, told: Callable) -> torch.Tensor:
        "The loss of a batch."
        x, y = batch
        cast = lambda: torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()
        if x.is_floating_point(): x = x.to(self.dtype)
        if self.batch: x = self.batch(self, self.step, x)
        with cast(): logits = self.model(x).float()
        losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
        loss = self.loss(self, self.step, losses) if self.loss else losses.mean()
        told(loss)
        return loss

    def gradients(self, batch: tuple, told: Callable) -> torch.Tensor:
        "What an optimizer's closure does."
        self.optim.zero_grad()
        loss = self.forward(batch, told)
        loss.backward()
        return loss

    def train(self, told: Callable = lambda loss: loss) -> None:
        "The loop; `told` is given each loss."
        g = torch.Generator().manual_seed(SEED + 1)
        if self.loop == "lightning": return in_lightning(self, g, told)
        for step in range(1, self.steps + 1):
            self.step = step
            if self.before: self.before(self, self.step)
            if self.loop == "closure":
                self.optim.step(lambda: self.gradients(self.parts.batch(g), told))
                continue
            for _ in range(self.micro): self.forward(self.parts.batch(g), told).backward()
            if self.backward: self.backward(self, self.step)
            for _ in range(self.repeat(self.step)): self.optim.step()
            if self.clear(self.step): self.optim.zero_grad()


def in_lightning(run: Run, g: torch.Generator, told: Callable) -> None:
    "The loop of Lightning, whose optimizers are given a closure."
    import logging

    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = run.model

        def training_step(self, batch, i): return run.forward(batch, told)

        def configure_optimizers(self): return run.optim

    batches = torch.utils.data.DataLoader([run.parts.batch(g) for _ in range(run.steps)], batch_size=None)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    pl.Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(quiet, False)).fit(Module(), batches)


# the faults


class Fault(NamedTuple):
    "A run and what broke first in it."
    kind: str
    run: Callable[[], Run]
    family: str
    layer: str  # "" for the whole model
    step: int
    within: str = ""  # what the family's model was given, where that is not in all of them

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.kind, self.family, self.within))).replace(" ", "_")


FAULTS: list[Fault] = []


def planted(kind: str, part: str = "", step: int = AT):
    "Register a fault in each of the families; `part` of the family is the layer that broke."
    def keep(f):
        for name, family in FAMILIES.items():
            layer = getattr(family, part) if part in Family._fields else part
            FAULTS.append(Fault(kind, lambda f=f, name=name: f(name), name, layer, step))
        return f
    return keep


def planted_in(family: str, within: str, kind: str, layer: str, step: int = AT):
    "Register a fault in one family, in a part that its model is given."
    def keep(f):
        FAULTS.append(Fault(kind, lambda: f(family), family, layer, step, within))
        return f
    return keep


def now(layer) -> bool: return layer.run().step >= AT


@planted("non-finite data")
def nan_in_data(family):
    def batch(run, step, x):
        if not x.is_floating_point(): x = run.model.lm.model.embed_tokens.weight.detach()[x].clone()
        if step == AT: x.view(-1)[7] = math.nan
        return x
    return Run(family, batch=batch)


@planted("data out of range")
def a_batch_in_other_units(family):
    def batch(run, step, x):
        if not x.is_floating_point(): x = run.model.lm.model.embed_tokens.weight.detach()[x].clone()
        return x * 1e4 if step == AT else x
    return Run(family, batch=batch)


@planted("non-finite loss")
def infinity_in_the_mask_of_the_loss(family):
    def loss(run, step, losses):
        mask = torch.ones_like(losses)
        if step == AT: mask[3] = math.inf
        return (losses * mask).mean()
    return Run(family, loss=loss)


@planted("overflow", "scale")
def logits_beyond_float16(family):
    def before(run, step): run.model.scale.factor = 1.0 if step < AT else 1e6
    return Run(family, torch.float16, before=before, optimizer=torch.optim.SGD,
               settings={"lr": 0.01})


def in_e4m3(x, share):
    "The input as codes of E4M3 under a share of its scale, with a straight-through gradient."
    scale = x.abs().amax() / 448 * share
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    return x + (codes * scale - x).detach()


class ZeroScale(nn.Module):
    "A quantized layer whose scale becomes zero."
    def forward(self, x): return super().forward(in_e4m3(x, 0.0 if now(self) else 1.0))


@planted("zero scale", "linear")
def division_by_a_scale_of_zero(family):
    return Run(family, build=lambda run: run.change("linear", ZeroScale))


class StaleScale(nn.Module):
    "A quantized layer whose scale is that of a tensor with amax 50 times smaller."
    def forward(self, x): return super().forward(in_e4m3(x, 1 / 50 if now(self) else 1.0))


@planted("stale scale", "linear")
def a_scale_that_no_longer_fits(family):
    return Run(family, build=lambda run: run.change("linear", StaleScale))


class ClippedBlock(nn.Linear):
    "A layer, one row of whose weights is clipped in one block of 32."
    def forward(self, x):
        w = self.weight
        if now(self):
            top, block = 0.02 * w.detach().abs().amax(), torch.zeros_like(w, dtype=torch.bool)
            block[3, :32] = True
            w = torch.where(block, w.clamp(-top, top), w)
        return F.linear(x, w, self.bias)


@planted("clipped block", "linear")
def one_block_has_the_scale_of_another(family):
    return Run(family, build=lambda run: run.change("linear", ClippedBlock))


class Outlier(nn.Module):
    "A normalization, one of whose channels is 1,000 times as large as it was."
    def forward(self, x):
        y = super().forward(x)
        if not now(self): return y
        factor = torch.ones(y.shape[1 if y.dim() == 4 else -1], dtype=y.dtype)
        factor[3] = 1e3
        return y * (factor.view(-1, 1, 1) if y.dim() == 4 else factor)


@planted("outlier channel", "norm")
def a_channel_takes_the_range(family):
    return Run(family, build=lambda run: run.change("norm", Outlier))


class Truncated(torch.autograd.Function):
    "The identity; its gradient is rounded stochastically, with all random numbers zero."
    @staticmethod
    def forward(ctx, w): return w.clone()

    @staticmethod
    def backward(ctx, g): return (g / (64 * g.abs().amax()) + 0.0).trunc()


class LosesGradients(nn.Linear):
    "A layer whose weight's gradient is rounded by a broken stochastic rounding."
    def forward(self, x):
        w = Truncated.apply(self.weight) if now(self) else self.weight
        return F.linear(x, w, self.bias)


@planted("gradient lost", "linear")
def stochastic_rounding_without_a_random_number(family):
    return Run(family, build=lambda run: run.change("linear", LosesGradients))


@planted("dead layer", "act", step=1)
def a_relu_that_lets_nothing_through(family):
    def build(run): run["before"].bias.data.fill_(-100.0)
    return Run(family, build=build)


@planted("rate too large")
def a_rate_that_jumps(family):
    def before(run, step):
        for group in run.optim.param_groups: group["lr"] = 3.0 if step >= AT else 1e-3
    return Run(family, before=before)


class LosesCarry(torch.optim.AdamW):
    "AdamW whose write to memory loses the carry into the exponent, in one tensor."
    def step(self, closure=None):
        p, run = self.param, self.run
        old = p.detach().clone()
        super().step(closure)
        carried = torch.frexp(p.detach())[1] > torch.frexp(old)[1]
        if run.step >= AT: p.data = torch.where(carried, p.detach() / 2, p.detach())


@planted("weights jump", "linear")
def a_lost_carry(family):
    def before(run, step): run.optim.param, run.optim.run = run["linear"].weight, run
    return Run(family, before=before, optimizer=LosesCarry,
               settings={"lr": 3e-3, "weight_decay": 0.0})


@planted("epsilon too large", step=1)
def epsilon_of_the_optimizer(family):
    return Run(family, settings={"lr": 1e-3, "weight_decay": 0.0, "eps": 10.0})


@planted("epsilon too large", "norm", step=1)
def epsilon_of_a_normalization(family):
    def build(run):
        name = "variance_epsilon" if hasattr(run["norm"], "variance_epsilon") else "eps"
        setattr(run["norm"], name, 1e4)
    return Run(family, build=build)


class NarrowSums(nn.Linear):
    "A layer that adds up its products in bfloat16, one after another."
    def forward(self, x):
        exact = super().forward(x)
        if not now(self): return exact
        a, w = x.detach().bfloat16(), self.weight.detach().bfloat16()
        total = torch.zeros_like(exact, dtype=torch.bfloat16)
        for i in range(a.shape[-1]): total = total + (a[..., i, None] * w[:, i])
        if self.bias is not None: total = total + self.bias.detach().bfloat16()
        return exact + (total.to(exact.dtype) - exact).detach()


@planted("coarse sums", "wide")
def accumulation_in_bfloat16(family):
    return Run(family, autocast=True, build=lambda run: run.change("wide", NarrowSums))


@planted("stalled", "first_norm", step=1)
def normalizations_that_stay_at_one(family):
    return Run(family, torch.bfloat16, settings={"lr": 1e-3, "weight_decay": 0.0})


@planted("gradient underflow", "last")
def gradients_below_float16(family):
    def loss(run, step, losses): return losses.mean() * (2.0**-24 if step >= AT else 1.0)
    return Run(family, torch.float16, loss=loss, optimizer=torch.optim.SGD, settings={"lr": 0.01})


@planted("initial weights too large", "linear", step=1)
def a_layer_that_begins_too_large(family):
    def build(run): run["linear"].weight.data *= 100
    return Run(family, build=build)


@planted("not in the optimizer", "linear", step=1)
def a_layer_that_no_optimizer_holds(family):
    name = FAMILIES[family].linear
    return Run(family, keep=lambda n: not n.startswith(name))


@planted("decay absorbed", step=1)
def weight_decay_that_rounds_to_nothing(family):
    return Run(family, torch.bfloat16, settings={"lr": 2e-2, "weight_decay": 0.01})


@planted("step repeated")
def two_steps_with_one_gradient(family):
    return Run(family, repeat=lambda step: 2 if step >= AT else 1)


@planted("gradients not cleared")
def gradients_that_add_up(family):
    return Run(family, clear=lambda step: step < AT - 1)


class DividesByZero(nn.Module):
    "A normalization without an epsilon, which meets a row of zeros."
    def forward(self, x):
        y = super().forward(x)
        if not now(self): return y
        rows = x.detach().clone()
        rows[0] = 0
        return y * (rows / rows).mean()


@planted("division by zero", "norm")
def a_normalization_of_a_row_of_zeros(family):
    return Run(family, build=lambda run: run.change("norm", DividesByZero))


class Detached(nn.Module):
    "A layer whose result is cut from what it was made of."
    def forward(self, x):
        y = super().forward(x)
        return y.detach() if now(self) else y


@planted("cut from the loss", "norm")
def a_detach_too_many(family):
    return Run(family, build=lambda run: run.change("norm", Detached))


@planted("changed outside a step", "linear")
def a_flipped_bit(family):
    def before(run, step):
        if step == AT: run["linear"].weight.data.view(torch.int32)[0, 0] ^= 1 << 30
    return Run(family, before=before)


def flip(run, name: str) -> None:
    "Flip a bit of a weight, once."
    if run.step == AT: run.model.get_parameter(name).data.view(torch.int32)[0, 0] ^= 1 << 30


class Heads(nn.Module):
    "Self-attention of torch, which never calls the layer of its last product."
    def __init__(self, width: int):
        super().__init__()
        self.heads = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x): return self.heads(x, x, x, need_weights=False)[0]


def with_heads(run) -> None: run.model.blocks[1].attention = Heads(32)


@planted_in("plain", "attention", "changed outside a step", "blocks.1.attention.heads.out_proj")
def a_flipped_bit_in_the_last_product_of_attention(family):
    before = lambda run, step: flip(run, "blocks.1.attention.heads.out_proj.weight")
    return Run(family, build=with_heads, before=before)


@planted_in("plain", "attention at first", "initial weights not finite", "blocks.1.attention.heads.out_proj", step=1)
def an_infinite_weight_in_the_last_product_of_attention(family):
    def build(run):
        with_heads(run)
        run.model.blocks[1].attention.heads.out_proj.weight.data[0, 0] = math.inf
    return Run(family, build=build)


def with_float8(run) -> None:
    "Linear layers as torchao trains them in float8."
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    wanted = lambda layer, name: all(n % 16 == 0 for n in layer.weight.shape)
    convert_to_float8_training(run.model, config=Float8LinearConfig(emulate=True),
                               module_filter_fn=wanted)


@planted_in("plain", "float8 of torchao", "changed outside a step", FAMILIES["plain"].linear)
def a_flipped_bit_in_a_layer_of_torchao(family):
    return Run(family, build=with_float8, before=lambda run, step: flip(run, "blocks.1.up.weight"))


@planted_in("conv", "float8 of torchao", "zero scale", FAMILIES["conv"].linear)
def a_scale_of_zero_in_a_layer_of_torchao(family):
    def build(run):
        with_float8(run)
        run.change("linear", ZeroScale)
    return Run(family, build=build)


@planted("rate is zero")
def a_schedule_that_ends_early(family):
    def before(run, step):
        for group in run.optim.param_groups: group["lr"] = 1e-3 if step < AT else 0.0
    return Run(family, before=before, steps=AT + 8)


# healthy runs


class Healthy(NamedTuple):
    "A run without a fault."
    name: str
    run: Callable[[], Run]

    @property
    def id(self) -> str: return self.name


HEALTHY: list[Healthy] = []


def healthy(*families: str):
    "Register a run for families."
    def keep(f):
        for name in families:
            HEALTHY.append(Healthy(f"{f.__name__}-{name}", lambda f=f, name=name: f(name)))
        return f
    return keep


ALL = tuple(FAMILIES)


@healthy(*ALL)
def adamw_in_float32(family): return Run(family, steps=24)


@healthy(*ALL)
def autocast_to_bfloat16(family): return Run(family, autocast=True, steps=24)


@healthy(*ALL)
def sgd_with_a_large_rate(family):
    return Run(family, optimizer=torch.optim.SGD, settings={"lr": 0.5, "momentum": 0.9}, steps=24)


@healthy(*ALL)
def warm_restarts(family):
    def before(run, step):
        for group in run.optim.param_groups:
            group["lr"] = 5e-3 * (1 + math.cos(math.pi * (step % 8) / 8)) / 2
    return Run(family, before=before, steps=24)


@healthy("plain", "llama")
def a_warm_up_from_zero(family):
    def before(run, step):
        for group in run.optim.param_groups: group["lr"] = 1e-4 * (step - 1)
    return Run(family, before=before, steps=20)


@healthy("plain", "conv")
def several_batches_a_step_and_clipping(family):
    def backward(run, step): nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    return Run(family, micro=3, backward=backward, steps=12)


@healthy("llama", "conv")
def a_part_that_is_frozen(family):
    def build(run): run["before"].requires_grad_(False)
    return Run(family, build=build, steps=16)


class Dropped(nn.Module):
    "A layer whose result loses most of its elements."
    def forward(self, x): return F.dropout(super().forward(x), 0.8)


@healthy("plain", "llama", "conv")
def dropout(family):
    return Run(family, build=lambda run: run.change("act", Dropped), steps=16)


@healthy("conv", "plain")
def float8_of_torchao(family):
    return Run(family, build=with_float8, autocast=family == "plain", steps=16)


@healthy("plain")
def attention_of_torch(family): return Run(family, build=with_heads, steps=16)


@healthy("llama")
def sparse_gradients(family):
    def build(run): run.model.lm.model.embed_tokens.sparse = True
    return Run(family, build=build, optimizer=torch.optim.SGD, settings={"lr": 0.1}, steps=16)


@healthy("plain", "conv")
def a_head_that_begins_at_zero(family):
    def build(run): nn.init.zeros_(run["last"].weight)
    return Run(family, build=build, steps=16)


@healthy("plain")
def bfloat16_on_a_stochastic_grid(family):
    def build(run):
        from altgrad import quantize_model, store_on_grid

        quantize_model(run.model, "bfloat16")
        store_on_grid(run.model, "bf16_stochastic")
    return Run(family, build=build, steps=16)


class Masked(nn.Linear):
    "A layer half of whose weights are masked."
    def forward(self, x):
        mask = (torch.arange(self.weight.numel()).view_as(self.weight) % 2).to(x.dtype)
        return F.linear(x, self.weight * mask, self.bias)


@healthy(*ALL)
def a_mask_over_weights(family):
    return Run(family, build=lambda run: run.change("linear", Masked), steps=12)


@healthy("conv", "llama")
def bfloat16_rounded_stochastically(family):
    class Chance(torch.optim.SGD):
        "Rounds each weight up or down by chance."
        @torch.no_grad()
        def step(self):
            for p in (p for group in self.param_groups for p in group["params"]):
                w = (p.float() - 3e-4 * p.grad.float().sign()).view(torch.int32)
                w = w + torch.randint(2**16, w.shape, dtype=torch.int32)
                p.copy_((w >> 16 << 16).view(torch.float32))
    return Run(family, torch.bfloat16, optimizer=Chance, settings={"lr": 3e-4}, steps=12)


@healthy("plain", "conv")
def gradients_of_a_closure(family): return Run(family, loop="closure", steps=24)


@healthy("plain")
def lbfgs(family):
    "Its closure is called several times a step."
    g = torch.Generator().manual_seed(SEED)
    build = lambda run: setattr(run, "parts", run.parts._replace(batch=lambda _: one))
    one = FAMILIES[family].batch(g)
    return Run(family, loop="closure", build=build, optimizer=torch.optim.LBFGS,
               settings={"lr": 0.05, "max_iter": 3}, steps=12)


@healthy("plain", "llama")
def in_the_loop_of_lightning(family): return Run(family, loop="lightning", steps=24)
