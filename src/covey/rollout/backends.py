"""Choice of the sampler for a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

from covey.errors import ConfigError, Unsupported
from covey.rollout.engine import NativeSampler
from covey.rollout.generate import GenerateSampler
from covey.rollout.hf import TransformersSampler
from covey.rollout.sampler import Sampler
from covey.rollout.vllm import VLLMSampler

Backend = Literal["auto", "native", "transformers", "generate", "vllm"]


def choose_sampler(
    model: Any, tokenizer: Any, *, eos_ids: Sequence[int] | None = None, backend: Backend = "auto", **options: Any
) -> Sampler:
    """The fastest sampler that is exact for this model.

    `auto` takes the native engine and falls back to plain transformers with a warning that names the reason;
    `native` raises `Unsupported` instead. `options` go to the constructor of the sampler that is asked for.
    """
    if backend not in get_args(Backend):
        raise ConfigError(f"sampler backend {backend!r} does not exist; take one of {', '.join(get_args(Backend))}.")
    if backend == "vllm":
        return VLLMSampler(model, tokenizer, eos_ids=eos_ids, **options)
    if backend == "generate":
        return GenerateSampler(model, tokenizer, eos_ids=eos_ids, **options)
    if backend == "transformers":
        return TransformersSampler(model, tokenizer, eos_ids=eos_ids, **options)
    try:
        return NativeSampler(model, tokenizer, eos_ids=eos_ids, **options)
    except Unsupported as reason:
        if backend == "native" or options.get("environment") is not None:
            raise
        kept = {name: options[name] for name in ("max_rows", "check_stop", "float32_head") if name in options}
        lost = sorted(name for name in options.keys() - {*kept, "environment", "cache_fraction"})
        warnings.warn(
            f"Completions are written by plain transformers, which is slower: {reason}."
            + (f" Without effect there: {', '.join(lost)}." if lost else ""),
            UserWarning,
            stacklevel=2,
        )
        return TransformersSampler(model, tokenizer, eos_ids=eos_ids, **kept)
