"""Attention of packed rows `[prompt | c1 | ... | cG]` by the device's fastest kernel, and its padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.kernels import flex_attention
from covey.kernels.attention_product import AttentionProduct, Layout
from covey.kernels.flex_attention import AttentionHeads
from covey.kernels.matmul import padded_rows
from covey.kernels.shared_attention import SharedAttention, runs_here
from covey.kernels.windows import Window

MIN_PADDED = 128
"""Length from which a row on a CPU is padded to one of few lengths, by at most an eighth."""


class SharedPromptAttention:
    """One of the kernels "own" (a CPU), "flex" (FlexAttention, CUDA) or "sdpa" (PyTorch's, part by part, by the caller)."""

    @staticmethod
    def flex_unavailable_reason(heads: AttentionHeads) -> str | None:
        """Reason why FlexAttention cannot compute such layers here; None after a trial that agreed with SDPA."""
        return flex_attention.reason_against(heads)

    @staticmethod
    def padding(tokens: int, kernel: str, device: torch.device) -> int:
        """Tokens to append to a row of `tokens`: up to whole blocks for "flex", to one of few lengths for "own" on a CPU."""
        if kernel == "flex":
            return flex_attention.padded(tokens) - tokens
        is_padded = kernel == "own" and device.type == "cpu" and tokens >= MIN_PADDED
        return padded_rows(tokens) - tokens if is_padded else 0

    @staticmethod
    def mask(layouts: Sequence[Layout], kernel: str, device: torch.device, window: Window | None = None) -> Any:
        """FlexAttention's block mask of a layer with this window; None for the other kernels."""
        return flex_attention.mask_of(layouts, device, window) if kernel == "flex" else None

    @staticmethod
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layouts: Sequence[Layout],
        mask: Any,
        *,
        kernel: str,
        product: AttentionProduct,
    ) -> Tensor | None:
        """[1, S, H, D] from `query` [1, H, S, D], `key` and `value` [1, K, S, D]; None where `product` must compute it by part."""
        if kernel == "flex" and product.dropout == 0.0 and product.softcap is None:
            return flex_attention.attend(query, key, value, mask, product.scale, product.sinks)
        if kernel != "own" or not product.is_plain or not runs_here(query, value, product.dropout):
            return None
        scale = query.shape[-1] ** -0.5 if product.scale is None else product.scale
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        out: Tensor = SharedAttention.apply(*(x[0].to(dtype) for x in (query, key, value)), tuple(layouts), scale)
        return out.transpose(0, 1)[None]
