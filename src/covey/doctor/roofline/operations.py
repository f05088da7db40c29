"""Seconds of a learner's operations on a GPU that is not here: each by the roofline, from the shapes of fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from covey.doctor.roofline.gpus import Gpu
from covey.learner.live_memory import FakeBytes

aten = torch.ops.aten


class TimedBytes(FakeBytes):
    """`FakeBytes` that adds up seconds: an operation takes as long as its arithmetic or its bytes, whichever is longer.

    Arithmetic is that of PyTorch's FLOP counter. The estimate is the one of `torch.distributed._tools.RuntimeEstimator`, which
    asks the GPU itself for its peaks and so needs one. Views take no time.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = super().compute(func, args, kwargs)
        if not func.is_view and func not in _FREE:
            self.seconds += self._seconds(func, args, kwargs, result)
        return result

    def _seconds(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        moved = sum(x.numel() * x.element_size() for x in tensors) / self.gpu.reads
        count = _FLOPS.get(func._overloadpacket)
        if count is None or not tensors:
            return moved
        flops = count(*args, **kwargs, out_val=result)
        return max(moved, flops / self.gpu.flops(tensors[0].element_size()))


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of attention's forward pass, query [.., S, D], key [.., T, D], value [.., T, E]: two products of all pairs."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Five products of all pairs, one of which computes the scores again."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_FREE = {aten.detach.default, aten.empty_like.default, aten._unsafe_view.default, aten._local_scalar_dense.default}
"""Operations that move nothing."""
