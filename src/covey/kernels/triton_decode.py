"""Entry point of the Triton decode kernels, imported on first use: Triton may not be installed."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Any

import torch
from torch import Tensor

from covey.errors import first_line


class TritonDecode:
    """Kernels of a decode step on static buffers: each method is one launch, but where it says otherwise."""

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Reason why Triton's kernels cannot run on this device; None if they can."""
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed (pip install triton)"
        try:
            import triton
        except Exception as error:  # noqa: BLE001 - a broken package may raise anything; the reason is shown
            return f"the package triton is installed but cannot be imported ({first_line(error)})"
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            return f"Triton's kernels run on CUDA devices, and the model is on {device.type}"
        return None

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        """Exceptions of a kernel that cannot be compiled or launched: no C compiler or Python headers, too little shared
        memory, no driver, a card that lacks the type.
        """
        from triton.runtime.errors import TritonError

        return TritonError, RuntimeError, OSError, subprocess.SubprocessError, NotImplementedError

    @staticmethod
    def rotation(
        cosines: Tensor, sines: Tensor, positions: Tensor, norms: tuple[Tensor | None, Tensor | None], **options: Any
    ) -> Any:
        """A `triton_attention.Rotation` for `attend`; no launch. `norms` are those of the heads of queries and of keys."""
        from covey.kernels.triton_attention import Rotation

        return Rotation(cosines, sines, positions, *norms, **options)

    @staticmethod
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        suffix: Tensor,
        suffix_bias: Tensor | None,
        prompts: Tensor,
        prompt_bias: Tensor | None,
        members: Tensor,
        counts: Tensor,
        lengths: Tensor,
        owned: Tensor,
        first: Tensor,
        step_column: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
        rotation: Any = None,
    ) -> Tensor:
        """[R, Hq, D], in two launches, three for few rows: writes `key` and `value` [R, Hkv, D] into the cache column
        `step_column`, then attends; see `Spans` for the tables.
        """
        from covey.kernels import triton_attention

        spans = triton_attention.Spans(members, counts, lengths, owned, first, step_column)
        buffers = suffix, suffix_bias, prompts, prompt_bias
        return triton_attention.decode(
            query, key, value, *buffers, spans, scale, softcap, sinks=sinks, rotation=rotation
        )

    @staticmethod
    def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        """RMS norm of `x + update` in `dtype`; `x` [R, H] is updated in place."""
        from covey.kernels import triton_layer

        return triton_layer.add_norm(x, update, weight, epsilon, dtype)

    @staticmethod
    def norm(x: Tensor, weight: Tensor | None, epsilon: float, offset: float, dtype: torch.dtype) -> Tensor:
        """RMS norm over the last dimension, times `weight + offset`, in `dtype`."""
        from covey.kernels import triton_layer

        return triton_layer.norm(x, weight, epsilon, offset, dtype)

    @staticmethod
    def rotate(x: Tensor, cosines: Tensor, sines: Tensor, pairs: bool, by_pair: bool, dtype: torch.dtype) -> Tensor:
        """Rotary embedding of `x` [B, H, S, D] in `dtype`; see `triton_layer.rotate`."""
        from covey.kernels import triton_layer

        return triton_layer.rotate(x, cosines, sines, pairs, by_pair, dtype)

    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, [R, I] each."""
        from covey.kernels import triton_layer

        return triton_layer.gated(gate, up)

    @staticmethod
    def draw_into(tables: dict[str, Any], logits: Tensor, **options: Any) -> None:
        """Draw a token a row and advance the tables of rows, the fields of `triton_sampling.RowState`.

        Two launches, three with top-k, top-p or min-p.
        """
        from covey.kernels import triton_sampling

        triton_sampling.draw_into(triton_sampling.RowState(**tables), logits, **options)
