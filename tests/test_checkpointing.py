"Activation checkpointing makes a forward pass twice: the second must be the first."
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from altgrad.basics import InputError
from altgrad.model.points import LayerPrecisionRule, PrecisionConfig, checkpoint_contexts
from altgrad.model.surgery import quantize_model, quantizers, rounded_once
from altgrad.watching.monitors import Monitors


def a_model(**points):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("*", **{"weight": "E4M3"} | points)]), skip=())
    return model


def block_of(model):
    "Its second layer is used twice."
    def block(x): return model[1](torch.relu(model[1](torch.relu(model[0](x)))))
    return block


def directly(f, x): return f(x)


def forgetting(f, x): return checkpoint(f, x, use_reentrant=False)


def reentrant(f, x): return checkpoint(f, x, use_reentrant=True)


def noted(f, x): return checkpoint(f, x, use_reentrant=False, context_fn=checkpoint_contexts)


def trained(how, once=False, batches=6, **points):
    "Gradients of some batches, and how often each point was used."
    model = a_model(**points)
    for batch in range(batches):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(batch)).requires_grad_()
        if once:
            with rounded_once(model): how(block_of(model), x).square().mean().backward()
        else: how(block_of(model), x).square().mean().backward()
    return [p.grad for p in model.parameters()], [q.calls for q in quantizers(model).values()]


def alike(one, other): return all(map(torch.equal, one[0], other[0])) and one[1] == other[1]


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("point", [{}, {"gradient": "E5M2 stochastic"}, {"weight": "E3M4 stochastic"}])
@pytest.mark.parametrize(
    "words", ["E4M3", "E4M3 stochastic", "E4M3 delayed", "E2M1 stochastic 32", "E4M3 stochastic delayed"]
)
def test_a_repeated_pass_is_the_first(words, point, once):
    assert alike(trained(directly, once, activation=words, **point), trained(noted, once, activation=words, **point))


def test_two_losses_of_one_pass_repeat_it_twice():
    def gradients(how):
        model = a_model(activation="E4M3 stochastic")
        y = how(block_of(model), torch.linspace(-1, 1, 1024).view(16, 64).requires_grad_())
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        return [p.grad for p in model.parameters()]
    assert all(map(torch.equal, gradients(directly), gradients(noted)))


def test_micro_batches_whose_backward_passes_come_later():
    def gradients(how):
        model = a_model(activation="E4M3 stochastic delayed")
        xs = [torch.full((4, 64), 1.0 + i, requires_grad=True) for i in range(3)]
        losses = [how(block_of(model), x).square().sum() for x in xs]
        for loss in reversed(losses): loss.backward()
        return [p.grad for p in model.parameters()]
    assert all(map(torch.equal, gradients(directly), gradients(noted)))


@pytest.mark.parametrize("how", [forgetting, reentrant])
def test_nearest_rounding_under_current_scaling_needs_nothing(how):
    assert alike(trained(directly, activation="E4M3", gradient="E5M2 stochastic"),
                 trained(how, activation="E4M3", gradient="E5M2 stochastic"))


@pytest.mark.parametrize("how", [forgetting, reentrant])
@pytest.mark.parametrize("points", [{"activation": "E4M3 stochastic"}, {"weight": "E4M3 delayed"}])
def test_what_would_round_otherwise_is_refused(how, points):
    with pytest.raises(InputError, match="context_fn=altgrad.model.points.checkpoint_contexts"):
        trained(how, **points)


def test_in_evaluation_nothing_is_remembered_and_nothing_refused():
    model = a_model(activation="E4M3 stochastic delayed").eval()
    x = torch.randn(16, 64).requires_grad_()
    block_of(model)(x).sum().backward()
    want, x.grad = x.grad, None
    forgetting(block_of(model), x).sum().backward()
    assert torch.equal(x.grad, want)


def test_a_checkpoint_inside_another_is_refused():
    model = a_model(activation="E4M3 stochastic")
    def outer(x): return noted(block_of(model), x)
    with pytest.raises(InputError, match="not one inside another"):
        noted(outer, torch.randn(16, 64).requires_grad_())
    assert alike(trained(directly, activation="E4M3 stochastic"), trained(noted, activation="E4M3 stochastic"))


def test_monitors_count_a_tensor_once():
    def counted(how):
        model = a_model(activation="E4M3 stochastic")
        watch, optimizer = Monitors(model), torch.optim.SGD(model.parameters(), lr=0.1)
        watch.begin(0)
        how(block_of(model), torch.linspace(-1, 1, 1024).view(16, 64).requires_grad_()).sum().backward()
        optimizer.step()
        return watch.end()
    one, other = counted(directly), counted(noted)
    assert len(one.values) > 20 and repr(one.values) == repr(other.values)  # NaN is its own text
    assert one.histograms.keys() == other.histograms.keys() != set()
    for path, counts in one.histograms.items(): assert (counts == other.histograms[path]).all()


def test_the_way_through_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
    )
    ids = torch.arange(32).view(2, 16) % 64
    def gradients(kwargs):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        quantize_model(model, config=PrecisionConfig([LayerPrecisionRule("*", activation="E4M3 stochastic")]))
        if kwargs is not None: model.gradient_checkpointing_enable(kwargs)
        model.train()
        for _ in range(2): model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters()]
    again = gradients({"use_reentrant": False, "context_fn": checkpoint_contexts})
    assert all(map(torch.equal, gradients(None), again))


@pytest.mark.parametrize("training", [True, False])
def test_the_noise_of_gradients_averages_out(training):
    model = a_model(weight=None, activation=None, gradient="E2M1 stochastic").train(training)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    out = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    def gradient(layer):
        layer.weight.grad = None
        layer(x).backward(out)
        return layer.weight.grad.clone()
    exact = out.T @ x
    each = torch.stack([gradient(model[0]) for _ in range(100)])
    one, mean = (each[0] - exact).norm(), (each.mean(0) - exact).norm()
    assert mean < one / 5  # a tenth is expected; with the same noise each time it would be the whole
