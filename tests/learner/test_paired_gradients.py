"""The learner's bfloat16 products in pairs: the layer's values and gradients, also where autocast, adapters or recomputing stand between."""

import logging

import pytest
import torch
from shared_rows import row
from torch import nn
from torch.nn import functional as F

from covey.kernels import compile as compiled
from covey.kernels import matmul as products
from covey.kernels import matmul_bf16 as pairs
from covey.kernels.matmul import FasterLinears, faster_linear
from covey.learner.logprobs import Head, Other, distances, score_tokens
from covey.learner.policy import Policy
from covey.learner.preparation import checkpoint_activations
from kit import forgotten, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(pairs.bf16_matmul() is None, reason="no kernel for this processor or compiler")


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 1)


def without_pairs(monkeypatch):
    """oneDNN's products, as on other machines."""
    for module in (pairs, products):
        monkeypatch.setattr(module, "bf16_matmul", lambda: None)


def exact(x):
    """In bfloat16's numbers, so that casts lose nothing."""
    return x.bfloat16().float()


def layer_of(inside, outside, bias=True):
    layer = nn.Linear(inside, outside, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(exact(parameter))
    return layer


def gradients_of(call, x, layer):
    """Output, and the gradients of the input and of what is trained."""
    x = x.detach().requires_grad_()
    y = call(x)
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    slopes = exact(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return [y.detach(), *torch.autograd.grad((y.float() * slopes).sum(), wanted)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (70, 64), (2, 35, 64), (5, 1, 7, 64)])
@pytest.mark.parametrize("outside", [16, 48, 128])
def test_values_and_gradients_under_autocast_are_those_in_float32(outside, shape, bias):
    torch.manual_seed(0)
    layer, x = layer_of(64, outside, bias), exact(torch.randn(shape))
    with torch.autocast("cpu", torch.bfloat16), FasterLinears([layer]):
        mine = gradients_of(layer, x, layer)
    expected = gradients_of(layer, x, layer)
    assert mine[0].dtype == torch.bfloat16
    assert mine[2].dtype == torch.float32
    for one, two in zip(mine, expected, strict=True):
        assert one.shape == two.shape
        assert (one.float() - two).norm() < 4e-3 * two.norm()


@pytest.mark.parametrize("rows", [31, 512, 2049])
def test_the_gradient_of_a_weight_is_summed_in_float32(rows):
    torch.manual_seed(0)
    gradient, x = torch.randn(rows, 48).bfloat16(), torch.randn(rows, 64).bfloat16()
    expected = gradient.double().t() @ x.double()
    found = products.weight_gradient(gradient, x, torch.empty(48, 64))
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 1e-6 * expected.norm()
    total = torch.ones(48, 64)
    assert pairs.bf16_matmul().weight_gradient(gradient, x, total) is total
    assert (total - 1 - expected).norm() < 1e-6 * expected.norm()


def test_a_model_in_bfloat16_is_multiplied_in_pairs_without_autocast():
    torch.manual_seed(0)
    layer, x = layer_of(64, 48).bfloat16(), torch.randn(33, 64).bfloat16()
    with FasterLinears([layer]):
        mine = gradients_of(layer, x, layer)
        assert type(layer(x.requires_grad_()).grad_fn).__name__ == "_LinearBackward"
    expected = gradients_of(layer.float(), x.float(), layer)
    for one, two in zip(mine, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - two).norm() < 5e-3 * two.norm()


def test_what_is_frozen_strided_or_repeated_has_its_gradient_too():
    torch.manual_seed(0)
    layer = layer_of(64, 48)
    layer.weight.requires_grad_(False)
    x = exact(torch.randn(64, 33)).t()
    with torch.autocast("cpu", torch.bfloat16), FasterLinears([layer]):
        y = layer(x.requires_grad_())
    found = torch.autograd.grad(y.sum(), [x, layer.bias])  # an expanded gradient
    assert (found[0] - layer.weight.sum(0)).norm() < 1e-2 * layer.weight.sum(0).norm() * 33**0.5
    assert found[1].eq(33).all()


@pytest.mark.parametrize("case", ["float16", "float64", "no blocks", "no panels", "disabled", "a view"])
def test_whatever_cannot_be_in_pairs_is_left_to_torch(case):
    inside, outside = {"no blocks": (40, 48), "no panels": (64, 40)}.get(case, (64, 48))
    layer, x = nn.Linear(inside, outside), torch.randn(8, inside)
    if case == "float64":
        layer, x = layer.double(), x.double()
    weight = layer.weight.t().contiguous().t() if case == "a view" else layer.weight
    dtype = torch.float16 if case == "float16" else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=case != "disabled"):
        expected = F.linear(x, weight, layer.bias)
        found = faster_linear(x, weight, layer.bias)
    if case != "disabled":  # then it is a product in float32, which may be oneDNN's
        assert type(found.grad_fn).__name__ != "_LinearBackward"
        assert found.equal(expected)
    assert found.dtype == expected.dtype


def test_autocast_to_another_type_is_heard_whatever_the_types_are():
    x, weight = torch.randn(8, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    with torch.autocast("cpu", torch.float16):
        assert faster_linear(x, weight).dtype == torch.float16


def test_shapes_that_do_not_belong_together_are_refused_as_torch_does():
    weight = torch.randn(48, 64).bfloat16()
    for inside in (32, 128):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            faster_linear(torch.randn(8, inside).bfloat16(), weight)
    assert faster_linear(torch.randn(8, 64).bfloat16(), weight[0]).shape == (8,)


def test_a_layer_that_is_not_trained_keeps_no_input():
    layer, kept = layer_of(64, 48).requires_grad_(False), []
    noting = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x)
    with noting, torch.autocast("cpu", torch.bfloat16), FasterLinears([layer]):
        layer(torch.randn(8, 64, requires_grad=True))
    assert kept == [(48, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["own head", "distance"])
def test_logits_that_are_computed_again_are_multiplied_as_the_first_time(kind, dtype, monkeypatch):
    monkeypatch.setattr(products, "is_onednn_faster", lambda: True)
    torch.manual_seed(0)
    linear, x, targets = layer_of(64, 48), torch.randn(20, 64, requires_grad=True), torch.randint(48, (20,))
    project = nn.Sequential(linear)  # not a layer as torch has it
    with FasterLinears([linear]), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        if kind == "distance":
            other = Other(x.detach(), Head(linear), lambda one, two: (one.exp() * (one - two)).sum(-1))
            found = distances(x * 1.5, Head(linear), other, chunk=8)
        else:
            found, _ = score_tokens(x, targets, Head(project), chunk=8)
    assert torch.autograd.grad(found.sum(), [x, linear.weight])[1].abs().max() > 0


def test_a_compiler_that_does_not_know_pairs_is_told_of_and_done_without(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "g++ -U__AVX512BF16__")
    with forgotten(pairs.bf16_matmul, compiled.load), caplog.at_level(logging.INFO, "covey"):
        assert pairs.bf16_matmul() is None
    assert "Multiplying with PyTorch's own operations" in caplog.text


def test_weights_that_are_a_subclass_of_tensors_are_left_alone():
    class Spread(torch.Tensor):
        pass

    weight = torch.randn(48, 64).as_subclass(Spread)
    assert products.bf16_for(torch.randn(8, 64).bfloat16(), weight) is None


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "adapter"])
def test_a_policys_gradients_are_as_near_to_float32s_as_onednns(adapted, again, monkeypatch):
    rows = [row(group, [5, 6, 7, 8], [9 + i, 10, 11 + group]) for group in (0, 1) for i in range(3)]
    model = tiny_model(layers=2, hidden=64, seed=1).train()
    if adapted:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if again:
        checkpoint_activations(model)

    def gradients(dtype):
        model.zero_grad(set_to_none=True)
        Policy(model, tiny_tokenizer().pad_token_id, compute_dtype=dtype).measure(rows).logp.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    calls, real = [], pairs.Bf16Matmul.multiply
    with monkeypatch.context() as patch:
        patch.setattr(pairs.Bf16Matmul, "multiply", lambda *a, **k: calls.append(1) or real(*a, **k))
        mine = gradients(torch.bfloat16)
    assert len(calls) > 20
    exactly = gradients(None)
    without_pairs(monkeypatch)
    theirs = gradients(torch.bfloat16)
    assert (mine - exactly).norm() < 1.25 * (theirs - exactly).norm()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [True, False])
def test_the_head_multiplies_in_pairs_in_chunks_that_end_anywhere(bias, softcap, monkeypatch):
    torch.manual_seed(0)
    linear = layer_of(64, 208, bias)
    hidden, targets, slopes = exact(torch.randn(70, 64)), torch.randint(208, (70,)), torch.randn(2, 70)

    def measured(is_narrow):
        x = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            logp, entropy = score_tokens(
                x, targets, Head(linear, softcap=softcap), temperature=0.7, entropy=True, chunk=32
            )
        found = torch.autograd.grad((logp * slopes[0] + entropy * slopes[1]).sum(), [x, *linear.parameters()])
        return [logp.detach(), entropy.detach(), *found]

    expected, mine = measured(False), measured(True)
    without_pairs(monkeypatch)
    theirs = measured(True)
    for one, two, three in zip(mine, expected, theirs, strict=True):
        assert one.dtype == two.dtype
        assert (one - two).norm() < max(1.25 * (three - two).norm(), 2e-3 * two.norm())
