"""Linear layers with a LoRA adapter in one function on a CPU: PEFT's own numbers and gradients."""

import pytest
import torch
from torch import nn

from covey import compiled
from covey.fused_adapters import _Adapted, adapted, is_adapted
from covey.fused_layers import faster, fused
from kit import tiny_model

peft = pytest.importorskip("peft")
REASON = compiled.why_not()


def layer_of(dtype=torch.float32, *, inside=64, outside=48, bias=True, **options):
    """A layer with an adapter that does something."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inside, outside, bias=bias)).to(dtype)
    given = {"r": 4, "lora_alpha": 6, "target_modules": ["0"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**given | options)).base_model.model[0].train()


def gradients(out, layer, x):
    wanted = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    weights = torch.randn(out.shape).to(out.dtype)
    found = torch.autograd.grad((out * weights).sum(), [x, *wanted.values()])
    return dict(zip(["x", *wanted], found, strict=True))


def near(one, two, slack):
    return one.dtype == two.dtype and (one.float() - two.float()).norm() <= slack * two.float().norm()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 64), (2, 3, 64)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast", "autocast of bfloat16 over float32"])
def test_values_and_gradients_are_pefts(kind, shape, bias):
    layer = layer_of(torch.bfloat16 if kind == "bfloat16" else torch.float32, bias=bias).to(
        torch.bfloat16 if kind == "bfloat16" else torch.float32
    )
    x = torch.randn(shape, dtype=torch.bfloat16 if "bfloat16" in kind else torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in kind):
        found, expected = adapted(layer, layer.forward, x), layer(x)
    assert type(found.grad_fn).__name__ == "_AdaptedBackward"
    slack = 1e-6 if kind == "float32" else 1e-2
    assert near(found, expected, slack)
    mine, pefts = gradients(found, layer, x), gradients(expected, layer, x)
    assert len(mine) == 3
    for name, gradient in pefts.items():
        assert near(mine[name], gradient, slack), name


def test_inputs_without_a_gradient_get_none_and_the_adapter_its_own():
    layer, x = layer_of(), torch.randn(5, 64)
    adapted(layer, layer.forward, x).sum().backward()
    assert layer.lora_A["default"].weight.grad.abs().max() > 0
    assert layer.base_layer.weight.grad is None


def disabled(layer):
    layer.enable_adapters(False)


def merged(layer):
    layer.merge()


def doubled(layer):
    layer.update_layer("more", 2, lora_alpha=2, config=peft.LoraConfig(r=2, init_lora_weights=False))
    layer.set_adapter(["default", "more"])


def hooked(layer):
    layer.lora_A["default"].register_forward_hook(lambda module, args, out: 2 * out)


def trainable(layer):
    layer.base_layer.weight.requires_grad_(True)


def mixed(layer):
    layer.base_layer.to(torch.bfloat16)


@pytest.mark.parametrize(
    "change, options",
    [
        (disabled, {}),
        (merged, {}),
        (doubled, {}),
        (hooked, {}),
        (trainable, {}),
        (mixed, {}),
        (None, {"lora_dropout": 0.5}),
        (None, {"use_dora": True}),
        (None, {"lora_bias": True}),
    ],
)
def test_whatever_is_more_than_one_plain_adapter_is_left_to_peft(change, options, monkeypatch):
    layer = layer_of(**options)
    if change is not None:
        change(layer)
    monkeypatch.setattr(_Adapted, "apply", lambda *given: pytest.fail("was taken for a plain one"))
    x = torch.randn(5, 64, dtype=layer.base_layer.weight.dtype)
    torch.manual_seed(2)
    expected = layer(x)
    torch.manual_seed(2)
    assert adapted(layer, layer.forward, x).equal(expected)


def test_what_a_layer_gives_may_be_changed_in_place_as_some_models_do():
    layer, x = layer_of(), torch.randn(2, 5, 64)
    mine = adapted(layer, layer.forward, x).clamp_(-1, 1)
    assert mine.shape == (2, 5, 48)
    (given,) = torch.autograd.grad(mine.sum(), layer.lora_A["default"].weight)
    (pefts,) = torch.autograd.grad(layer(x).clamp_(-1, 1).sum(), layer.lora_A["default"].weight)
    assert near(given, pefts, 1e-5)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_half_of_an_adapter_may_be_frozen(frozen):
    layer, x = layer_of(), torch.randn(5, 64)
    getattr(layer, frozen)["default"].weight.requires_grad_(False)
    adapted(layer, layer.forward, x).sum().backward()
    mine = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    layer(x).sum().backward()
    assert list(mine) == [name for name, p in layer.named_parameters() if p.requires_grad]
    assert all(near(mine[name], p.grad, 1e-5) for name, p in layer.named_parameters() if p.requires_grad)


def test_dropout_that_is_switched_off_is_none():
    layer, x = layer_of(lora_dropout=0.5).eval(), torch.randn(5, 64)
    found = adapted(layer, layer.forward, x)
    assert type(found.grad_fn).__name__ == "_AdaptedBackward"
    assert near(found, layer(x), 1e-6)


def test_a_name_of_a_batch_asks_peft():
    layer, x = layer_of().eval(), torch.randn(2, 64)
    names = ["default", "__base__"]
    assert adapted(layer, layer.forward, x, adapter_names=names).equal(layer(x, adapter_names=names))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("arch", ["qwen2", "llama", "gemma2"])
def test_a_model_inside_the_context_has_its_layers_computed_so(arch):
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    names, ids, base = [], torch.arange(12)[None], tiny_model(arch, layers=2, hidden=64)
    without = base(ids).logits
    model = peft.get_peft_model(base, config).train()
    expected = model(ids).logits
    with faster(model):
        found = model(ids).logits
        layers = [module for module in model.modules() if is_adapted(module)]
        assert layers
        for module in layers:
            names.append(type(module(torch.randn(3, module.in_features)).grad_fn).__name__)
    assert set(names) == {"_AdaptedBackward"}
    assert near(found, expected, 1e-5)
    assert not any("forward" in module.__dict__ for module in layers), "outside PEFT computes them"
    with faster(model), model.disable_adapter():
        assert near(model(ids).logits, without, 1e-5)
    assert not near(found, without, 1e-2)
    assert fused(model) is fused(model)
