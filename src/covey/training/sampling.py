"""Sampling options of a run as arguments of a sampler."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from covey.config import GRPOConfig
from covey.errors import ConfigError, did_you_mean
from covey.process.world import World
from covey.rollout import SamplingParams
from covey.training.vllm_options import vllm_backend, vllm_options

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = frozenset(
    {"use_cache", "cache_implementation", "pad_token_id", "bos_token_id", "return_dict_in_generate"}
)
"""Arguments of `generate` that affect no completion."""


def as_dict(option: dict[str, Any] | str | None) -> dict[str, Any]:
    """A dict option, typed as a dict: GRPOConfig has parsed text already."""
    return dict(option) if isinstance(option, dict) else {}


def sampling_params(args: GRPOConfig) -> SamplingParams:
    """Sampling parameters from the options; `generation_kwargs` take precedence. Raises ConfigError for an unknown name."""
    options = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    return SamplingParams(**{**options, **_split(args)[0]})


def generate_options(args: GRPOConfig) -> dict[str, Any]:
    """`generation_kwargs` that only transformers' `generate` supports, such as `num_beams`."""
    return _split(args)[1]


def _split(args: GRPOConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """`generation_kwargs` split into those of every sampler and those of `generate` alone."""
    extra = as_dict(args.generation_kwargs)
    if "max_new_tokens" in extra:
        extra["max_tokens"] = extra.pop("max_new_tokens")
    if extra.pop("do_sample", True) is False:
        extra["temperature"] = 0.0
    if "stop_strings" in extra:
        stop = extra.pop("stop_strings")
        extra["stop"] = tuple(stop) if isinstance(stop, list) else stop
    known = set(inspect.signature(SamplingParams).parameters)
    others = {name: value for name, value in extra.items() if name not in known and name not in _WITHOUT_EFFECT}
    if others:
        _refuse_unknown(others, known, args)
    return {name: value for name, value in extra.items() if name in known}, others


def _refuse_unknown(others: Mapping[str, Any], known: set[str], args: GRPOConfig) -> None:
    from transformers import GenerationConfig

    of_generate = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    for name in others:
        if name not in of_generate:
            hint = did_you_mean(name, known | of_generate) or f" The samplers know {', '.join(sorted(known))}."
            raise ConfigError(f"generation_kwargs has {name!r}, which no sampler knows.{hint}")
        if args.rollout_backend in ("native", "vllm"):
            raise ConfigError(
                f"generation_kwargs has {name!r}, which only transformers' generate knows, and "
                f"rollout_backend={args.rollout_backend!r} does not use it; leave one of them out."
            )


def sampler_options(args: GRPOConfig, world: World, server: Any = None) -> dict[str, Any]:
    """Arguments of `choose_sampler` that differ from its defaults; `server`: a connection that `expect_engine` made."""
    if others := generate_options(args):
        logger.warning(
            "generation_kwargs has %s: completions are drawn by transformers' generate, which takes longer and gives no "
            "log-probabilities of its own.",
            ", ".join(sorted(others)),
        )
    dtype = _dtype(args, world)
    options: dict[str, Any] = {"max_rows": args.rollout_max_rows}
    options |= {} if dtype == "auto" else {"dtype": dtype}
    options |= {"float32_head": True} if args.cast_lm_head_to_fp32 else {}
    if others:
        return {**options, "backend": "generate", "generate": others}
    if args.rollout_backend == "vllm":
        options = {"backend": vllm_backend(args), **vllm_options(args, world, server)}
        return options if dtype == "auto" or args.vllm_mode == "server" else {**options, "dtype": dtype}
    if args.rollout_backend == "transformers":
        return {**options, "backend": "transformers"}
    choices = {
        "cuda_graphs": (args.cuda_graphs, None),
        "attention": (args.attention, "auto"),
    }
    options |= {"backend": args.rollout_backend, "cache_fraction": args.rollout_cache_fraction}
    return options | {name: value for name, (value, default) in choices.items() if value != default}


def _dtype(args: GRPOConfig, world: World) -> str:
    """Compute dtype of the sampler: the learner's, but not float16 on a CPU, which is slow there."""
    if args.rollout_dtype != "auto":
        return args.rollout_dtype
    if args.bf16:
        return "bfloat16"
    return "float16" if args.fp16 and world.device.type != "cpu" else "auto"
