"""Choice of the sampler for a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

from covey.errors import ConfigError, Unsupported
from covey.rollout.engine import NativeSampler
from covey.rollout.hf import TransformersSampler
from covey.rollout.sampler import DEFAULT_ROWS, Sampler
from covey.rollout.vllm import VLLMSampler

Backend = Literal["auto", "native", "transformers", "vllm"]


def choose_sampler(
    model: Any, tokenizer: Any, *, eos_ids: Sequence[int] | None = None, backend: Backend = "auto", **options: Any
) -> Sampler:
    """The fastest sampler that is exact for this model.

    `auto` takes the native engine and falls back to plain transformers with a warning that names the reason;
    `native` raises `Unsupported` instead. `options` go to the constructor of the sampler that is asked for.
    """
    if backend not in ("auto", "native", "transformers", "vllm"):
        raise ConfigError(f"sampler backend {backend!r} does not exist; take auto, native, transformers or vllm.")
    if backend == "vllm":
        return VLLMSampler(model, tokenizer, eos_ids=eos_ids, **options)
    if backend == "transformers":
        return TransformersSampler(model, tokenizer, eos_ids=eos_ids, **options)
    try:
        return NativeSampler(model, tokenizer, eos_ids=eos_ids, **options)
    except Unsupported as reason:
        if backend == "native" or options.get("environment") is not None:
            raise
        lost = sorted(options.keys() - {"max_rows", "environment", "check_stop"})
        warnings.warn(
            f"Completions are written by plain transformers, which is slower: {reason}."
            + (f" Without effect there: {', '.join(lost)}." if lost else ""),
            UserWarning,
            stacklevel=2,
        )
        kept = {name: options[name] for name in ("check_stop",) if name in options}
        rows = options.get("max_rows", DEFAULT_ROWS)
        return TransformersSampler(model, tokenizer, eos_ids=eos_ids, max_batch_completions=rows, **kept)
