"""Entry point of the Triton decode kernels, imported on first use: Triton may not be installed."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor


class TritonDecode:
    """Decode attention on static buffers by Triton's kernels."""

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Reason why Triton's kernels cannot run on this device; None if they can."""
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed (pip install triton)"
        import triton

        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            return f"Triton's kernels run on CUDA devices, and the model is on {device.type}"
        return None

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Exceptions of a kernel that cannot be compiled or launched: no compiler, too little shared memory, no driver."""
        from triton.runtime.errors import TritonError

        return TritonError, RuntimeError, OSError

    @staticmethod
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        own: Tensor,
        own_bias: Tensor,
        prompts: Tensor,
        prompt_bias: Tensor,
        members: Tensor,
        counts: Tensor,
        lengths: Tensor,
        owned: Tensor,
        first: Tensor,
        step_column: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """[R, Hq, D]: writes `key` and `value` [R, Hkv, D] into the cache column `step_column`, then attends; see `Spans` for the tables."""
        from covey.kernels import triton_attention

        triton_attention.append(key, value, own, step_column)
        spans = triton_attention.Spans(members, counts, lengths, owned, first, step_column)
        return triton_attention.decode(query, own, own_bias, prompts, prompt_bias, spans, scale, softcap)
