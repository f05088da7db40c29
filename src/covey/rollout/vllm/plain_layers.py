"""Layers of a policy as a server has them: with adapters merged as PEFT merges them, and 4-bit or 8-bit weights in floating point."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from covey.adapters import carries_adapter, has_adapter
from covey.errors import ConfigError, first_line
from covey.models import unwrapped
from covey.process.memory import is_out_of_memory

_QUANTIZED = ("Params4bit", "Int8Params")
"""Classes of bitsandbytes' parameters. Of a model that is split a gathered one is a plain parameter, and its layer has the `quant_state`."""
_WAY_OUT = "train LoRA on linear layers, or leave use_vllm out"


def changed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By name: the layers whose weights are not a server's, the outermost of those that are nested."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not any(part in layers for part in _prefixes(name)) and (_is_of_peft(module) or _is_quantized(module)):
            layers[name] = module
    return layers


def layer_with(name: str, layers: dict[str, nn.Module]) -> str | None:
    """Name of the layer among `layers` that has this parameter."""
    return next((part for part in _prefixes(name) if part in layers), None)


def _prefixes(name: str) -> list[str]:
    return [name[: match.start()] for match in re.finditer(r"\.", name)]


def plain_name(name: str) -> str:
    """The name of a weight without the layers of adapters around it."""
    return re.sub(r"\.(base_layer|original_module|token_adapter)(?=\.)", "", name)


@torch.no_grad()
def plain_state(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """The weights of a changed layer, active adapters merged; the layer stays as it is. Raises ConfigError where PEFT cannot merge it."""
    try:
        return {part: value.detach() for part, value in saved_tensors(_plain(layer)).items()}
    except (NotImplementedError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"The adapter on {name} cannot be merged into the weights that vLLM gets ({first_line(error)}); {_WAY_OUT}."
        ) from error


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as `state_dict` has them, whose hooks split a gathered block of FSDP2 again."""
    buffers = {
        f"{place}.{name}" if place else name: value
        for place, part in module.named_modules()
        for name, value in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }
    return dict(module.named_parameters(remove_duplicate=False)) | buffers


def _plain(layer: Any) -> nn.Module:
    """A layer of transformers with the weights of a layer of PEFT or bitsandbytes."""
    if _is_quantized(layer):
        return _dequantized(layer)
    if hasattr(layer, "modules_to_save"):  # trained in full: there is nothing to add
        names = [name for name in layer.active_adapters if name in layer.modules_to_save]
        whole: nn.Module = layer.modules_to_save[names[0]] if names else layer.original_module
        return whole
    twin = _twin(layer)
    if hasattr(twin, "unload_and_optionally_merge_module"):
        merged: nn.Module = twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return merged
    twin.merge()
    base: nn.Module = twin.get_base_layer()
    return base


def _twin(layer: Any) -> Any:
    """A copy of a layer of PEFT without hooks, on a base in floating point, for PEFT to merge in place."""
    memo: dict[int, Any] = {
        id(value): type(value)()
        for part in layer.modules()
        for name, value in vars(part).items()
        if name.endswith("_hooks")
    }
    memo |= {id(weight): nn.Parameter(weight.detach().clone(), requires_grad=False) for weight in layer.parameters()
             if weight.is_floating_point()}  # fmt: skip
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else None
    if base is None or not _is_quantized(base):
        return copy.deepcopy(layer, memo)
    from peft.tuners import lora

    if not isinstance(layer, lora.LoraLayer):
        raise ValueError(f"{type(layer).__name__} is no LoRA, and its base is quantized")
    twin = copy.deepcopy(layer, {**memo, id(base): _dequantized(base)})
    twin.__class__ = lora.Linear  # it merges into floating-point bases
    return twin


def _is_of_peft(module: nn.Module) -> bool:
    merges = hasattr(module, "merge") or hasattr(module, "unload_and_optionally_merge_module")
    return type(module).__module__.startswith("peft.") and hasattr(module, "active_adapters") and merges


def _is_quantized(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    is_packed = weight is not None and not weight.is_floating_point() and hasattr(module, "quant_state")
    return type(weight).__name__ in _QUANTIZED or is_packed


def _dequantized(layer: Any) -> nn.Module:
    """The weight and bias of a layer of bitsandbytes in floating point, as its product computes with them."""
    from bitsandbytes import functional

    weight, plain = layer.weight, nn.Module()
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    if state is not None:
        value = functional.dequantize_4bit(weight.data, state)
    else:
        scales = weight.SCB if getattr(weight, "SCB", None) is not None else layer.state.SCB
        value = functional.int8_vectorwise_dequant(weight.data, scales)
    plain.weight = nn.Parameter(value, requires_grad=False)
    if getattr(layer, "bias", None) is not None:
        plain.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    return plain


def plain_config(model: nn.Module) -> Any:
    """The configuration of a policy's base with weights in floating point."""
    config = copy.deepcopy(unwrapped(model).config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def refuse_unmerged(policy: Any) -> None:
    """Raise ConfigError for a policy of which no plain weights would compute the same: before anything is sent."""
    base = unwrapped(policy)
    layers = changed_layers(base)
    method = str(getattr(getattr(base, "quantization_method", None), "value", "bitsandbytes"))
    if getattr(base, "is_quantized", False) and method != "bitsandbytes":
        raise ConfigError(
            f"vLLM cannot be handed a base that is quantized by {method}; load it by bitsandbytes (BitsAndBytesConfig), or in "
            "floating point."
        )
    if not carries_adapter(policy):
        return
    inner = {id(weight) for weight in base.parameters()}
    outside = [name for name, weight in policy.named_parameters() if weight.requires_grad and id(weight) not in inner]
    outside += [name for name, module in base.named_modules()
                if type(module).__module__.startswith("peft.") and layer_with(f"{name}.", layers) is None]  # fmt: skip
    if outside:
        kind = type(policy.peft_config[policy.active_adapter]).__name__ if has_adapter(policy) else "the adapter"
        raise ConfigError(
            f"vLLM cannot be handed {outside[0]} of {kind}, which is no part of the model's weights; {_WAY_OUT}."
        )
    _refuse_untied(base, layers)


def _refuse_untied(base: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raise ConfigError for an adapter that changes one of two tied weights, which a server ties."""
    tied: dict[int, dict[str, frozenset[int]]] = {}
    for name, weight in base.named_parameters(remove_duplicate=False):
        if name.endswith(".weight") and re.search(r"\.(lora|modules_to_save)", name) is None:
            place = layer_with(name, layers)
            tied.setdefault(id(weight), {})[plain_name(name)] = _changes(place and layers[place], id(weight))
    for changes in tied.values():
        if len(set(changes.values())) > 1:
            raise ConfigError(
                f"The adapter does not change {' and '.join(changes)} alike, and they are one tied weight to vLLM; leave "
                "these layers out of it, or set ensure_weight_tying=True in the configuration of an adapter on embeddings."
            )


def _changes(layer: Any, base: int) -> frozenset[int]:
    """Ids of the parameters by which a layer of PEFT changes its base."""
    if not layer:
        return frozenset()
    tied = getattr(getattr(layer, "token_adapter", None), "tied_adapter", None)
    return frozenset(id(weight) for weight in (tied or layer).parameters() if id(weight) != base)
