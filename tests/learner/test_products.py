"""float32 products by oneDNN: the same numbers and gradients, also where activations are computed again, and nothing else."""

import pytest
import torch
from shared_rows import checkpointing, row
from torch import nn
from torch.nn import functional as F

from covey.kernels import matmul as products
from covey.kernels.matmul import FasterLinears, learning
from covey.learner.policy import Policy
from covey.learner.preparation import checkpoint_activations
from covey.learner.shared_prompt import share_rows
from kit import tiny_model, tiny_tokenizer

has_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def always(monkeypatch):
    """oneDNN for every product, on any processor and of any size."""
    monkeypatch.setattr(products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 1)


def through(layer, x, is_inside):
    """Output, and the gradients of input, weight and bias."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    if is_inside:
        with FasterLinears([layer]):
            y = layer(x)
        assert type(y.grad_fn).__name__ == "_LinearBackward"
    else:
        y = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@has_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(70, 48), (1, 70, 48), (3, 5, 48)])
def test_values_and_gradients_are_those_of_the_layer(always, bias, shape):
    layer, x = nn.Linear(48, 80, bias=bias), torch.randn(shape)
    for mine, theirs in zip(through(layer, x, True), through(layer, x, False), strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


@has_onednn
def test_an_input_that_is_not_contiguous_and_a_frozen_weight(always):
    layer = nn.Linear(48, 80)
    layer.weight.requires_grad_(False)
    base = torch.randn(48, 5, 6, requires_grad=True)
    with FasterLinears([layer]):
        mine = layer(base.permute(2, 1, 0))
    theirs = layer(base.permute(2, 1, 0))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    mine.sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    torch.testing.assert_close(base.grad, layer.weight.sum(0)[:, None, None].expand_as(base), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["float64", "bfloat16", "autocast", "small"])
def test_whatever_is_not_a_large_product_in_float32_is_left_to_torch(monkeypatch, case):
    monkeypatch.setattr(products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 10**9 if case == "small" else 1)
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
    layer, x = nn.Linear(8, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        expected = layer(x)
        with FasterLinears([layer]):
            found = layer(x)
    assert type(found.grad_fn).__name__ != "_LinearBackward"
    assert found.equal(expected)


def test_rows_are_padded_to_few_counts_that_return():
    counts = {products.padded_rows(rows) for rows in range(1, 4097)}
    assert len([count for count in counts if 2048 < count <= 4096]) == 8
    assert all(rows <= products.padded_rows(rows) <= rows * 9 / 8 for rows in range(1, 10_000))
    assert [products.padded_rows(rows) for rows in (1, 15, 128, 1024)] == [1, 15, 128, 1024]
    assert products.padded_rows(16_448) == 16_640, "what is large is not made much larger"


def test_packed_rows_of_many_lengths_are_of_few_lengths_on_a_cpu():
    lengths = set()
    for count in range(30, 127):
        packed = share_rows([row(0, [5, 6, 7, 8], list(range(10, 10 + count)))] * 4, torch.device("cpu"))
        lengths.add(packed.input_ids.shape[1])
    assert len([length for length in lengths if length > 256]) == 8


@has_onednn
@pytest.mark.parametrize("again", ["kept", "ours", "the user's own"])
def test_a_policys_gradients_are_the_same_with_activations_kept_or_computed_again(monkeypatch, again):
    """Blocks that somebody else made compute again are computed by torch alone: both times must be alike."""
    rows = [row(group, [5, 6, 7, 8], [9 + i, 10, 11 + group]) for group in (0, 1) for i in range(3)]

    def gradients(is_faster):
        monkeypatch.setattr(products, "is_onednn_faster", lambda: is_faster)
        monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 1)
        model = tiny_model(layers=2, seed=1).train()
        if again == "ours":
            checkpoint_activations(model)
        elif again != "kept":
            checkpointing(model)
        calls = []
        with monkeypatch.context() as patched:
            real = products._Linear.apply
            patched.setattr(products._Linear, "apply", lambda *args: calls.append(1) or real(*args))
            Policy(model, tiny_tokenizer().pad_token_id).measure(rows).logp.sum().backward()
        return len(calls), [parameter.grad for parameter in model.parameters()]

    count, mine = gradients(True)
    none, theirs = gradients(False)
    assert none == 0
    assert (count > 0) == (again != "the user's own")
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@has_onednn
def test_a_graph_whose_activations_are_computed_again_may_be_gone_through_twice(always):
    model = tiny_model(layers=2).train()
    checkpoint_activations(model)
    rows = [row(group, [5, 6, 7, 8], [9, 10, 11 + group]) for group in (0, 1)]
    logp = Policy(model, tiny_tokenizer().pad_token_id).measure(rows).logp.sum()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    once = torch.autograd.grad(logp, weights, retain_graph=True)
    for one, two in zip(once, torch.autograd.grad(logp, weights), strict=True):
        assert torch.equal(one, two)


def test_blocks_recomputed_by_a_function_of_an_older_kind_are_left_to_torch(always):
    model = tiny_model(layers=2).train()
    model.model.gradient_checkpointing = True  # without the partial that holds a `context_fn`
    with learning(model):
        assert all("forward" not in module.__dict__ for module in model.modules())


@has_onednn
@pytest.mark.parametrize("shape", [(70, 48, 80), (70, 80, 48), (1, 5, 5)])
def test_the_gradient_of_a_weight_is_the_same_whichever_factor_is_copied(shape):
    count, outside, inside = shape
    gradient, x = torch.randn(count, outside), torch.randn(count, inside)
    torch.testing.assert_close(products.onednn_weight_gradient(gradient, x), gradient.t() @ x, atol=1e-5, rtol=1e-5)


@has_onednn
def test_the_head_multiplies_by_onednn_too_with_the_same_gradients(always, monkeypatch):
    """In chunks of tokens, and of the vocabulary where the weight's gradient is added up."""
    from covey.learner import lm_head

    monkeypatch.setattr(products, "WEIGHT_ROWS", 30)
    monkeypatch.setattr(products, "MIN_GRADIENT_TOKENS", 10)
    hidden, weight, bias = torch.randn(50, 16), torch.randn(100, 16), torch.randn(100)
    targets = torch.randint(0, 100, (50,))

    def run(is_faster):
        monkeypatch.setattr(products, "is_onednn_faster", lambda: is_faster)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        shape = lm_head.LogitTransform(1.0, None, 0.7, 16)
        logp, entropy = lm_head.LinearLogProbability.apply(*leaves, targets, shape, True)
        return [logp, entropy, *torch.autograd.grad((logp + 0.3 * entropy).sum(), leaves)]

    calls = []
    real = products.onednn_linear
    monkeypatch.setattr(products, "onednn_linear", lambda *args: calls.append(1) or real(*args))
    mine = run(True)
    assert calls
    for one, two in zip(mine, run(False), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_inside_and_afterwards_torchs_own_function_and_other_models_are_as_they_were(always):
    original, mine, other = F.linear, nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    with FasterLinears(mine.modules()):
        assert matmul_is_ours(mine[0])
        with pytest.raises(KeyError), FasterLinears(mine.modules()):
            raise KeyError
        assert matmul_is_ours(mine[0]), "an inner context leaves it to the outer one"
        assert F.linear is original
        assert "forward" not in other.__dict__
    assert "forward" not in mine[0].__dict__


def matmul_is_ours(linear):
    return products.is_routed(linear) and type(linear(torch.ones(2, 4)).grad_fn).__name__ == "_LinearBackward"


@pytest.mark.parametrize("is_before", [True, False])
def test_a_forward_that_somebody_else_has_put_there_stays(always, is_before):
    theirs, linear = lambda x: "theirs", nn.Linear(3, 4)
    if is_before:
        linear.forward = theirs
    with FasterLinears([linear]):
        linear.forward = theirs
        assert linear(torch.ones(2, 3)) == "theirs"
    assert linear.forward is theirs


@has_onednn
def test_where_onednn_has_no_room_torch_multiplies(always, monkeypatch):
    def full(*_):
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", full)
    layer, x = nn.Linear(48, 80), torch.randn(70, 48)
    for mine, theirs in zip(through(layer, x, True), through(layer, x, False), strict=True):
        torch.testing.assert_close(mine, theirs)
