"""Values that an option may have: its words, and the range of its number. Light to import, so that the command line can ask first."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from covey.errors import ConfigError, did_you_mean

WORDS: Mapping[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "rollout_backend": ("auto", "native", "transformers", "vllm"),
    "vllm_mode": ("colocate", "server"),
    "rollout_dtype": ("auto", "float32", "bfloat16"),
    "shared_attention": ("auto", "flex", "sdpa"),
    "on_reward_error": ("record", "raise"),
    "reward_normalization": ("none", "group", "batch", "running"),
    "on_long_prompt": ("error", "drop"),
    "on_bad_numbers": ("skip", "roll_back", "stop"),
    "on_spike": ("log", "clip", "skip", "roll_back", "stop"),
    "eval_strategy": ("no", "steps", "epoch"),
    "logging_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
}
"""Options that take one of a few words."""

_AT_LEAST: Mapping[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": 1,
    "steps_per_generation": 1,
    "num_generations": 1,
    "num_generations_eval": 1,
    "num_iterations": 1,
    "max_completion_length": 1,
    "num_completions_to_print": 1,
    "reward_error_limit": 1,
    "save_error_limit": 1,
    "bad_steps_limit": 1,
    "roll_backs_limit": 0,
    "max_tokens_per_microbatch": 1,
    "logits_chunk_tokens": 1,
    "early_stopping_patience": 1,
    "ref_model_sync_steps": 1,
    "max_tool_calling_iterations": 0,
    "rollout_log_steps": 0,
    "rollout_total_limit": 4,
    "dynamic_sampling": 0,
    "reward_workers": 0,
    "top_k": 0,
    "eval_delay": 0,
    "ddp_timeout": 1,
    "vllm_max_model_length": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_steps": 0,
    "beta": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "router_aux_loss_coef": 0,
    "entropy_coef_delta": 0,
    **dict.fromkeys(("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"), 0),
    **dict.fromkeys(("seed", "data_seed"), 0),
}
_ABOVE_ZERO = (
    "roll_back_learning_rate",
    "spike_threshold",
    "temperature",
    "repetition_penalty",
    "delta",
    "off_policy_mask_threshold",
    "reward_timeout_seconds",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "adam_epsilon",
)
_AT_MOST: Mapping[str, float] = dict.fromkeys(("seed", "data_seed"), 2**32 - 1)  # what numpy takes
_BETWEEN: Mapping[str, tuple[float, float]] = {
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_entropy_quantile": (0, 1),
    "ref_model_mixup_alpha": (0, 1),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "vllm_gpu_memory_utilization": (0, 1),
}
_WHOLE = frozenset(name for name, least in _AT_LEAST.items() if least == 1) | {
    *("rollout_log_steps", "rollout_total_limit", "max_tool_calling_iterations"),
    "roll_backs_limit",
    "reward_workers",
    "top_k",
    "seed",
    "data_seed",
    "dynamic_sampling",
}
_OPTIONAL = frozenset(
    {
        "max_tool_calling_iterations", "generation_batch_size", "steps_per_generation", "num_generations_eval", "num_completions_to_print",
        "max_tokens_per_microbatch", "logits_chunk_tokens", "early_stopping_patience", "epsilon_high", "router_aux_loss_coef", "max_grad_norm",
        "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "delta", "off_policy_mask_threshold",
        "reward_timeout_seconds", "min_p", "save_error_limit", "rollout_total_limit", "data_seed", "eval_delay", "vllm_max_model_length",
    }
)  # fmt: skip


_FINITE = (
    "learning_rate", "weight_decay", "warmup_steps", "beta", "epsilon", "temperature", "repetition_penalty", "adam_epsilon",
    "entropy_coef_delta", "num_train_epochs", "roll_back_learning_rate", "sapo_temperature_neg", "sapo_temperature_pos", "eval_delay",
)  # fmt: skip
"""An infinite number here ends in NaN. Limits such as `max_grad_norm` may be infinite: that is no limit."""
_EVERY: Mapping[str, str] = {
    "save_steps": "save_strategy",
    "eval_steps": "eval_strategy",
    "logging_steps": "logging_strategy",
}
"""Options that count steps, and the strategy under which they act."""


def refuse_bad_numbers(config: Any) -> None:
    """Raise for a number out of its range, or something that is no number."""
    for name in (*_AT_LEAST, *_ABOVE_ZERO, *_BETWEEN):
        value = getattr(config, name)
        if (value is None and name in _OPTIONAL) or (name == "max_tokens_per_microbatch" and value == "auto"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ConfigError(f"{name}={value!r} must be a number{_OR.get(name, '')}.")
        if math.isinf(value) and (name in _FINITE or name in _WHOLE):
            raise ConfigError(f"{name}={value!r} must be finite.")
        if name in _WHOLE and value != int(value):
            raise ConfigError(f"{name}={value!r} must be a whole number.")
        if name in _AT_LEAST and value < _AT_LEAST[name]:
            raise ConfigError(f"{name}={value!r} must be at least {_AT_LEAST[name]}.")
        if value > _AT_MOST.get(name, math.inf):
            raise ConfigError(f"{name}={value!r} must be at most {_AT_MOST[name]}.")
        if name in _ABOVE_ZERO and value <= 0:
            raise ConfigError(f"{name}={value!r} must be above 0.{_WHY.get(name, '')}")
        if name in _BETWEEN and not _BETWEEN[name][0] <= value <= _BETWEEN[name][1]:
            raise ConfigError(f"{name}={value!r} must lie between {_BETWEEN[name][0]} and {_BETWEEN[name][1]}.")
    if config.top_p == 0:
        raise ConfigError("top_p=0 keeps no token; 1 keeps all.")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(config, name) == 1:
            raise ConfigError(f"{name}=1 would never forget the first gradient; it must be below 1.")
    _refuse_bad_steps(config)
    if config.max_steps <= 0 and not config.num_train_epochs > 0:
        raise ConfigError(f"num_train_epochs={config.num_train_epochs!r} must be above 0, or set max_steps.")


def _refuse_bad_steps(config: Any) -> None:
    steps = config.max_steps
    if (
        isinstance(steps, bool)
        or not isinstance(steps, int | float)
        or steps != steps
        or steps % 1
        or steps == 0
        or steps < -1
    ):
        raise ConfigError(
            f"max_steps={steps!r} must be a whole number of 1 or more; -1: as many as num_train_epochs takes."
        )
    epochs = config.num_train_epochs
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not math.isfinite(epochs):
        raise ConfigError(f"num_train_epochs={epochs!r} must be a finite number.")
    for name, strategy in _EVERY.items():
        every, when = getattr(config, name), getattr(config, strategy)
        if every is None or getattr(when, "value", when) != "steps":
            continue
        if isinstance(every, bool) or not isinstance(every, int | float) or not math.isfinite(every) or every <= 0:
            raise ConfigError(f"{name}={every!r} must be above 0: steps, or below 1 a share of the run.")
        if every > 1 and every != int(every):
            raise ConfigError(f"{name}={every!r} must be a whole number of steps, or below 1 a share of the run.")


_OR = {"max_tokens_per_microbatch": ", auto, or null"}
_WHY = {
    "temperature": " GRPO compares different completions of a prompt; greedy ones are all the same.",
    "reward_timeout_seconds": " None sets no limit.",
}


_TRACKERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "tensorboard": (("tensorboard", "tensorboardX"), "covey[trackers]"),
    "wandb": (("wandb",), "covey[wandb]"),
    "trackio": (("trackio",), "covey[trackio]"),
    "mlflow": (("mlflow",), "covey[mlflow]"),
    "azure_ml": (("azureml",), "azureml-sdk"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dagshub": (("dagshub",), "dagshub"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
}
"""Trackers that transformers knows: the packages of which one is needed, and what installs it."""


def _registered_trackers() -> Collection[str]:
    """Trackers that somebody added to transformers' table, which then has been imported."""
    table = getattr(sys.modules.get("transformers.integrations.integration_utils"), "INTEGRATION_TO_CALLBACK", {})
    return set(table) - set(_TRACKERS)


def refuse_absent_trackers(names: str | Sequence[str] | None) -> None:
    """Raise ConfigError for a tracker of `report_to` that nobody knows, or whose package is not installed."""
    for name in (names,) if isinstance(names, str) else names or ():
        if name in ("none", "all") or name in _registered_trackers():
            continue
        if name not in _TRACKERS:
            hint = did_you_mean(str(name), _TRACKERS) or f" It is one of none, all, {', '.join(_TRACKERS)}."
            raise ConfigError(f"report_to={name!r} is no tracker.{hint}")
        packages, install = _TRACKERS[name]
        if not any(importlib.util.find_spec(package) for package in packages):
            raise ConfigError(f'report_to={name!r} needs the package {packages[0]}: pip install "{install}".')
