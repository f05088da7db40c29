"""Types of products under autocast.

In modules that cast the operands to float32, as DeepSeek V3's router does, products are float32 too. Autocast rounds such operands to
16 bits again: saturated scores of experts then tie, and tokens go to other experts than the model's own code chooses.

Products of fused experts, whose weights [E, N, K] lie in one parameter, are in autocast's type, as all others. transformers multiplies
them by `grouped_mm`, which is not on autocast's list: float32 weights would be multiplied in float32.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, torch.mm, Tensor.mm, Tensor.__matmul__)
_checked: WeakSet[nn.Module] = WeakSet()
_here = threading.local()


def settle_products(model: nn.Module) -> None:
    """Let such modules of this model compute without autocast from now on, and fused experts in its type; copies do so too."""
    if model in _checked:
        return
    _checked.add(model)
    kinds: dict[type, bool] = {}
    for module in model.modules():
        if names := expert_weights(module):
            module.__dict__.setdefault("forward", partial(experts_forward, module, names))
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _casts_to_float32(module)
        if kinds[kind] and not multiplies_in_float32(module):
            module.register_forward_pre_hook(_leave_autocast)
            module.register_forward_hook(_enter_autocast, always_call=True)
            for each in module.modules():
                each.__dict__["multiplies_in_float32"] = True


def multiplies_in_float32(module: nn.Module) -> bool:
    """True if `settle_products` lets this module, or the one that holds it, compute without autocast."""
    return bool(getattr(module, "multiplies_in_float32", False))


class _Products(TorchFunctionMode):
    """Mode that records the dtypes of the operands of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            self.dtypes.append({x.dtype for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)})
        return func(*args, **(kwargs or {}))


def _casts_to_float32(module: nn.Module) -> bool:
    """True if all products of a trial without data, of 16-bit input and weights, have float32 operands."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    weights = dict(module.named_parameters())
    widths = {weight.shape[-1] for weight in weights.values() if weight.ndim == 2}
    if isinstance(module, nn.Linear | nn.Embedding) or len(widths) != 1:
        return False
    if not all(type(child) is nn.Linear for child in children):
        return False
    blank = lambda x, dtype: torch.empty(x.shape, dtype=dtype, device="meta")
    tensors = {name: blank(weight, torch.bfloat16) for name, weight in weights.items()}
    tensors |= {name: blank(buffer, buffer.dtype) for name, buffer in module.named_buffers()}
    silent = copy.copy(module)  # its hooks are for tokens
    silent.__dict__.update(_forward_hooks={}, _forward_pre_hooks={})
    products = _Products()
    with suppress(Exception), torch.no_grad(), products:
        functional_call(silent, tensors, (torch.empty(3, widths.pop(), dtype=torch.float16, device="meta"),))
    return bool(products.dtypes) and all(dtypes == {torch.float32} for dtypes in products.dtypes)


def _leave_autocast(module: nn.Module, args: tuple[Any, ...]) -> None:
    device = next(module.parameters()).device.type
    left = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else None
    if left is not None:
        left.__enter__()
    _here.__dict__.setdefault("left", []).append(left)


def _enter_autocast(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    left = _here.left.pop()
    if left is not None:
        left.__exit__(None, None, None)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Type of products under autocast on this kind of device; None outside of autocast."""
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else None


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights [E, ., .] of a module of fused experts, by transformers' interface of them; none for other modules.

    Biases [E, N] stay in float32: their gradients are sums over tokens.
    """
    if not hasattr(type(module), "_apply_gate"):
        return ()
    return tuple(name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3)


def experts_forward(experts: Any, names: tuple[str, ...], *args: Any, **others: Any) -> Any:
    """Output of a module of experts, its weights cast as autocast casts those of a linear layer."""
    dtype = autocast_dtype(next(iter((*args, *others.values()))).device.type)
    weights = {} if dtype is None else {name: getattr(experts, name) for name in names}
    if all(weight.dtype == dtype for weight in weights.values()):
        return type(experts).forward(experts, *args, **others)
    return compute_with(experts, {name: weight.to(dtype) for name, weight in weights.items()}, *args, **others)


def compute_with(experts: nn.Module, weights: Mapping[str, Tensor], *args: Any, **others: Any) -> Any:
    """Output of the experts' class with other weights by name. The module stays as it is: threads may share it."""
    kind: Any = parametrize.type_before_parametrizations(
        experts
    )  # for a pass, PEFT makes properties of adapted weights
    view = kind.__new__(kind)
    view.__dict__.update(experts.__dict__, **weights)
    return kind.forward(view, *args, **others)
