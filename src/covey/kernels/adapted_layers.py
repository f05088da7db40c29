"""LoRA layers of PEFT in 16 bits, each adapter's products added inside of the layer's, as the sampler computes them."""

import logging
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from covey.errors import Unsupported
from covey.kernels.half_weights import half_of
from covey.kernels.linear_products import Factors, multiply
from covey.kernels.matmul import is_hooked
from covey.kernels.sampler_linear import active_adapters
from covey.kernels.trials import relative_gap
from covey.models import autocast_dtype

logger = logging.getLogger(__name__)


def add_adapters_inside_products(model: nn.Module) -> None:
    """Let the plain LoRA layers of `model` compute `linear_products.multiply` in 16 bits, for good.

    In float32, and whenever a layer is merged, disabled, of several adapters or a variant of LoRA, it computes as PEFT does.
    """
    layers = [module for module in model.modules() if _is_lora(module) and "forward" not in module.__dict__]
    # an estimate of memory has tensors without numbers, in a mode of its own
    if layers and not is_in_torch_dispatch_mode() and not _agrees_with_peft():
        logger.warning(
            "LoRA layers take more passes over their outputs: this PEFT computes them in another way than Covey."
        )
        return
    for layer in layers:
        layer.__dict__["forward"] = partial(_forward, layer)


def products_of(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Outputs of several layers of one input: in one function if all have an adapter or a 16-bit copy, else layer by layer."""
    dtype = _product_dtype(x)
    layers = [factors for factors in (_factors(linear, x, dtype) for linear in linears) if factors is not None]
    if dtype is None or len(layers) < len(linears):
        return [linear(x) for linear in linears]
    return list(multiply(x.to(dtype), *layers))


def _forward(layer: nn.Module, x: Tensor, *args: Any, **options: Any) -> Any:
    dtype = _product_dtype(x)
    factors = None if args or options else _factors(layer, x, dtype)
    if dtype is None or factors is None:
        return type(layer).forward(layer, x, *args, **options)
    return multiply(x.to(dtype), factors)[0]


def _product_dtype(x: Tensor) -> torch.dtype | None:
    """16-bit type of a product of `x`: of autocast, or its own."""
    dtype = autocast_dtype(x.device.type) or x.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def _factors(linear: Any, x: Tensor, dtype: torch.dtype | None) -> Factors | None:
    """Factors of a layer for `x` as things stand; None for a layer that must be called."""
    if dtype is None or is_hooked(linear):
        return None
    if not _computes_here(linear):
        half = half_of(linear)
        copy = None if half is None else half.copy_for(linear, x)
        return None if copy is None else Factors(linear.weight, linear.bias, *copy)
    if (name := _adapter_of(linear)) is None:
        return None
    base, a, b, dropout = linear.base_layer, linear.lora_A[name], linear.lora_B[name], linear.lora_dropout[name]
    narrow = [parts for parts in (_narrow(part, x, dtype) for part in (base, a, b)) if parts is not None]
    if len(narrow) < 3 or type(dropout) not in (nn.Identity, nn.Dropout) or is_hooked(dropout):
        return None
    (weight, bias), (narrow_a, _), (narrow_b, _) = narrow
    is_dropping = type(dropout) is nn.Dropout and dropout.training and dropout.p > 0
    adapter = a.weight, b.weight, narrow_a, narrow_b, dropout(x.to(dtype)) if is_dropping else None
    return Factors(base.weight, base.bias, weight, bias, *adapter, linear.scaling[name])


def _computes_here(linear: nn.Module) -> bool:
    forward = linear.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _adapter_of(layer: nn.Module) -> str | None:
    """The one adapter that acts on a LoRA layer as plain products; None if there is another number, or another kind."""
    try:
        names = active_adapters(layer)
    except Unsupported:
        return None
    return names[0] if len(names) == 1 else None


def _narrow(linear: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a plain linear layer in `dtype`: its copy, or cast as autocast does; None for other layers and types."""
    half = half_of(linear)
    is_plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not is_hooked(linear)
    if not is_plain or not (half or "forward" not in linear.__dict__):
        return None
    if half is not None and (copy := half.copy_for(linear, x)) is not None:
        return copy
    if linear.weight.dtype == dtype and (linear.bias is None or linear.bias.dtype == dtype):
        return linear.weight, linear.bias  # as parameters, which stay where they are when activations are offloaded
    if not torch.is_autocast_enabled(x.device.type):
        return None
    return linear.weight.detach().to(dtype), None if linear.bias is None else linear.bias.detach().to(dtype)


def _is_lora(module: nn.Module) -> bool:
    return type(module).__module__ == "peft.tuners.lora.layer" and type(module).__name__ == "Linear"


@lru_cache
def _agrees_with_peft() -> bool:
    """Trial of one layer with its gradients against the installed PEFT's own forward."""
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=12, target_modules=["0"], init_lora_weights=False)
        model: Any = inject_adapter_in_model(config, nn.Sequential(nn.Linear(32, 24)))
        layer = model[0]
        x, slope = torch.randn(5, 32, requires_grad=True), torch.randn(5, 24)
        results = []
        for forward in (layer.forward, partial(_forward, layer)):
            layer.__dict__["forward"] = forward
            with torch.autocast("cpu", torch.bfloat16):
                out = forward(x)
            leaves = x, layer.lora_A["default"].weight, layer.lora_B["default"].weight
            results.append([out.detach(), *torch.autograd.grad((out.float() * slope).sum(), leaves)])
    theirs, mine = results
    return relative_gap(mine, theirs) < 3e-2
