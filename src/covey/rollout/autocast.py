"""Sampling in another precision than the weights': forward passes under autocast, as in the learner."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from covey.errors import ConfigError, ModelError
from covey.kernels import share_copies, with_adapters
from covey.models import expert_weights, float32_stream, multiplies_in_float32, settle_products, unwrapped
from covey.rollout.forward import ModulesForward
from covey.rollout.kv_cache import LayerShape

SamplerPrecision = Literal["auto", "float32", "bfloat16", "float16"]
"""Compute dtype of a sampler; "auto": the weights' own dtype."""


def expect_precision(model: nn.Module, dtype: str) -> SamplerPrecision:
    """`dtype`, checked. Raises ConfigError if this model cannot be sampled in it, ModelError for what is no loaded model."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model={model!r:.60} is no loaded model; give one of AutoModelForCausalLM.from_pretrained.")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {dtype!r} is not known to the sampler; take auto, float32, bfloat16 or float16.")
    weights_dtype = _dtype_of(model)
    if dtype == "float32" and weights_dtype != torch.float32:
        raise ConfigError(
            f"The sampler is to compute in float32, but the weights are in {str(weights_dtype).removeprefix('torch.')}: leave rollout_dtype "
            "out, or load the model in float32."
        )
    return cast(SamplerPrecision, dtype)


def in_precision(model: nn.Module, dtype: SamplerPrecision) -> AbstractContextManager[Any]:
    """Context in which the model's own forward computes in `dtype`."""
    if dtype == "auto" or getattr(torch, dtype) == _dtype_of(model):
        return float32_stream(model)
    settle_products(unwrapped(model))
    return torch.autocast(next(model.parameters()).device.type, getattr(torch, dtype))


def _dtype_of(model: nn.Module) -> torch.dtype:
    dtype: torch.dtype = next(unwrapped(model).parameters()).dtype
    return dtype


class AutocastForward(ModulesForward):
    """The modules of any other architecture under autocast, as the learner runs them.

    Weights of two dimensions or more are read from a copy in `dtype`, which every `load` refreshes; without it autocast would copy
    them in each decode step. Embeddings, norms, biases and buffers are the live ones. Adapters of experts are merged in the copy,
    since PEFT would merge them in each step.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, float32_head: bool = False) -> None:
        """Raises Unsupported, with the reason, before anything is copied."""
        self._expect(model)
        live = unwrapped(model)
        settle_products(live)
        self._parameters = list(live.parameters())
        self._live = live
        mine = copy.deepcopy(live, {id(x): x for x in (*self._parameters, *live.buffers())})
        pairs = list(zip(live.modules(), mine.modules(), strict=True))
        self._adapters = {id(layer.get_param()): layer for layer in live.modules() if _is_adapted(layer, dtype)}
        for module in list(mine.modules()):
            for name, child in module._modules.items():
                if _is_adapted(child, dtype):
                    module._modules[name] = child.get_base_layer()
        self._copies = list(_copied(mine, dtype, mine.get_output_embeddings() if float32_head else None))
        self._copy()
        share_copies(pairs)
        super().__init__(mine, float32_head, dtype)

    def refresh(self) -> bool:
        now = list(self._live.parameters())
        if len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            return False
        self._copy()
        return super().refresh()

    @torch.no_grad()
    def _copy(self) -> None:
        for live, mine in self._copies:
            adapter = self._adapters.get(id(live))
            mine.copy_(live if adapter is None else with_adapters(live, adapter))

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that autocast reads."""
        return sum(mine.nbytes for _, mine in self._copies)

    def _run(self, *args: Any) -> Any:
        with self._autocast():
            return super()._run(*args)

    def _trial(self, ids: Tensor) -> Any:
        with self._autocast():
            return super()._trial(ids)

    def _layers(self) -> tuple[LayerShape, ...]:
        with self._autocast():
            return super()._layers()

    def _autocast(self) -> AbstractContextManager[Any]:
        # autocast's weight cache is off: a captured step must not fill it
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)


def _is_adapted(layer: Any, dtype: torch.dtype) -> bool:
    """True for PEFT's layer around fused experts, of whose adapted weight a copy in `dtype` is made."""
    is_of_experts = hasattr(layer, "parameter_name") and expert_weights(layer.get_base_layer())
    return bool(is_of_experts) and layer.get_param().dtype != dtype


def _copied(model: nn.Module, dtype: torch.dtype, head: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Replace the weights of matmuls but those of `head` by copies in `dtype`; yields each weight [.., N, K] with its copy."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is head or multiplies_in_float32(module):
            continue
        least = 2 if expert_weights(module) else 1  # biases of experts have two dimensions
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_floating_point() and weight.ndim > least and weight.dtype != dtype:
                mine = module._parameters[name] = nn.Parameter(
                    torch.empty_like(weight, dtype=dtype), requires_grad=False
                )
                yield weight, mine
