"""LoRA layers in 16 bits with the adapter's products inside of their own, against PEFT's layers and arithmetic without rounding."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from covey.kernels import HalfWeights, adapted_layers, add_adapters_inside_products
from covey.learner import out_of_memory
from kit import forgotten

HALF = torch.bfloat16


def layer_of(is_inside=True, dtype=torch.float32, bias=True, seed=0, copies=False, **options):
    """A LoRA layer of 96 inputs and 80 outputs whose adapter has as large outputs as its base, and its copies in 16 bits."""
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 6, "lora_alpha": 20, "target_modules": ["0"], "init_lora_weights": False, **options})
    model = inject_adapter_in_model(config, nn.Sequential(nn.Linear(96, 80, bias=bias).to(dtype))).train()
    if is_inside:
        add_adapters_inside_products(model)
    return model[0], HalfWeights(model, HALF) if copies else None


def results_of(layer, half=None, device_seed=1, autocast=True, dtype=torch.float32):
    """Output, and gradients of the input and of all parameters that are trained."""
    torch.manual_seed(7)
    x = torch.randn(2, 40, 96).to(dtype).requires_grad_()
    slope = torch.randn(2, 40, 80)
    torch.manual_seed(device_seed)
    with half.fresh() if half else nullcontext(), torch.autocast("cpu", HALF, enabled=autocast):
        out = layer(x)
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        return [out.detach(), *torch.autograd.grad((out.float() * slope).sum(), leaves)]


def distances(results, exact):
    return [float((mine.double() - other).norm() / other.norm()) for mine, other in zip(results, exact, strict=True)]


def exact(dtype, **options):
    """In float64, of the weights as they are rounded."""
    layer, _ = layer_of(False, dtype, **options)
    return results_of(layer.to(HALF).double(), autocast=False, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"use_rslora": True}, {"lora_alpha": 12}], ids=str)
@pytest.mark.parametrize("dtype, copies", [(HALF, False), (HALF, True), (torch.float32, False), (torch.float32, True)])
def test_outputs_and_gradients_are_nearer_to_those_without_rounding_than_pefts(dtype, copies, options):
    other = exact(dtype, **options)
    peft = distances(results_of(layer_of(False, dtype, **options)[0]), other)
    inside = distances(results_of(*layer_of(True, dtype, copies=copies, **options)), other)
    assert max(inside) < 6e-3
    assert sum(inside) < sum(peft)


def test_weights_and_inputs_of_16_bits_need_no_autocast():
    layer, _ = layer_of(True, HALF)
    results = results_of(layer.to(HALF), autocast=False, dtype=HALF)
    assert max(distances(results, exact(HALF))) < 6e-3
    assert [result.dtype for result in results] == [HALF] * 4


def test_a_gradient_has_the_type_of_its_weight():
    assert [result.dtype for result in results_of(*layer_of(copies=True))] == [HALF, *[torch.float32] * 3]


def test_dropout_leaves_out_what_it_leaves_out_in_peft():
    peft, inside = (results_of(layer_of(way, lora_dropout=0.5)[0]) for way in (False, True))
    without = results_of(layer_of(True)[0])
    assert max(distances(inside, [x.double() for x in peft])) < 1e-2
    assert min(distances(without, [x.double() for x in peft])) > 0.1


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}], ids=str)
def test_a_batch_of_no_rows_has_gradients_of_its_shape(options):
    layer, half = layer_of(copies=True, **options)
    x = torch.randn(2, 0, 96, requires_grad=True)
    with half.fresh(), torch.autocast("cpu", HALF):
        (gradient,) = torch.autograd.grad(layer(x).float().sum(), x)
    assert gradient.shape == x.shape


def test_frozen_weights_stay_on_the_device_when_activations_are_offloaded(monkeypatch):
    moved = []

    class Waiting(out_of_memory._Waiting):
        def __init__(self, host, size, device):
            moved.append(host.numel())
            super().__init__(host, size, device)

    monkeypatch.setattr(out_of_memory, "_Waiting", Waiting)
    layer, _ = layer_of(dtype=HALF, bias=False)
    x = torch.randn(40, 96, requires_grad=True)
    with torch.autocast("cpu", HALF), out_of_memory.offloaded(pins=False):
        layer(x).float().sum().backward()
    assert layer.base_layer.weight.numel() not in moved
    assert moved, "the input, and its product with A, are moved"


def test_layers_of_one_input_give_what_each_gives_alone():
    layers = [layer_of(seed=seed, copies=True) for seed in (0, 1)]
    torch.manual_seed(7)
    x = torch.randn(30, 96, requires_grad=True)
    results = []
    for together in (False, True):
        with layers[0][1].fresh(), layers[1][1].fresh(), torch.autocast("cpu", HALF):
            linears = [layer for layer, _ in layers]
            outputs = adapted_layers.products_of(x, *linears) if together else [linear(x) for linear in linears]
            leaves = [x, *(p for linear in linears for p in linear.parameters() if p.requires_grad)]
            gradients = torch.autograd.grad(sum((out.float() ** 2).sum() for out in outputs), leaves)
            results.append([*outputs, *gradients])
    apart, joined = results
    of_input = 2
    assert (apart[of_input] - joined[of_input]).norm() < 5e-3 * apart[of_input].norm(), (
        "a sum that is rounded once less"
    )
    assert all(torch.equal(*pair) for i, pair in enumerate(zip(apart, joined, strict=True)) if i != of_input)


def disabled(layer):
    layer.enable_adapters(False)


def merged(layer):
    layer.merge()


def hooked(layer):
    layer.lora_A["default"].register_forward_hook(lambda module, inputs, output: output * 1.5)


def with_two_adapters(layer):
    torch.manual_seed(3)
    config = LoraConfig(r=3, target_modules=["0"], init_lora_weights=False)
    layer.update_layer("other", r=3, lora_alpha=5, config=config)
    layer.set_adapter(["default", "other"])


@pytest.mark.parametrize("change", [disabled, merged, hooked, with_two_adapters])
def test_a_layer_that_is_something_else_for_a_time_computes_as_peft_does(change):
    outputs = []
    for is_inside in (False, True):
        layer, _ = layer_of(is_inside)
        change(layer)
        with torch.autocast("cpu", HALF):
            outputs.append(layer(torch.ones(3, 96)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_variants_of_lora_compute_as_peft_does(options):
    peft, other = (results_of(layer_of(is_inside, **options)[0]) for is_inside in (False, True))
    assert all(torch.equal(*pair) for pair in zip(peft, other, strict=True))


def test_float32_is_computed_bit_for_bit_as_peft_does():
    peft, other = (results_of(layer_of(is_inside)[0], autocast=False) for is_inside in (False, True))
    assert all(torch.equal(*pair) for pair in zip(peft, other, strict=True))


def test_another_formula_of_peft_is_left_to_it(monkeypatch, caplog):
    from peft.tuners.lora.layer import Linear

    plain = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x, **options: 1.1 * plain(self, x, **options))
    with forgotten(adapted_layers._agrees_with_peft):
        layer, _ = layer_of()
    assert "forward" not in layer.__dict__
    assert "this PEFT computes them in another way" in caplog.text
