"""Checks of option combinations: one sentence for a wrong one, before any work is spent."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin

from covey.config.batches import micro_batches, whole_groups
from covey.config.combinations import expect_together, features_of
from covey.config.options import ALGORITHM_OPTIONS, DECLARED, REFUSED
from covey.errors import ArgumentTypeError, ConfigError, did_you_mean

logger = logging.getLogger(__name__)

_UNUSABLE_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo")  # they update inside the backward pass or need targets
_UNSAVED_OPTIMIZERS = ("adamw_torch_8bit", "adamw_torch_4bit")
_EVERY: Mapping[str, str] = {
    "save_steps": "save_strategy",
    "eval_steps": "eval_strategy",
    "logging_steps": "logging_strategy",
}
"""Options that count steps, and the strategy under which they act."""


def refuse_unsupported(changed: Mapping[str, Any]) -> None:
    """Raise for the first option that differs from its default and cannot be honoured."""
    for name, value in changed.items():
        if name in REFUSED:
            raise ConfigError(f"{name}={value!r} cannot be honoured: {REFUSED[name]}.")
    if _of_accelerator(changed.get("accelerator_config"), "split_batches"):
        raise ConfigError(
            "accelerator_config has split_batches=True, which cannot be honoured: per_device_train_batch_size counts the completions "
            "of one process; divide it by their number."
        )


def _of_accelerator(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def is_default_accelerator(accelerator_config: Any) -> bool:
    """True if an AcceleratorConfig equals the default one."""
    plain = lambda config: {**vars(config), "use_configured_state": None}
    return bool(plain(accelerator_config) == plain(type(accelerator_config)()))


def warn_inert(changed: Mapping[str, Any]) -> None:
    """Name each option that was set and has no effect, once."""
    for name, value in changed.items():
        declared = DECLARED.get(name)
        if declared is not None and declared.inert and not declared.is_silent:
            logger.warning("%s=%r changes nothing here: %s.", name, value, declared.inert)


def normalize(config: Any) -> None:
    """Spellings that mean the same become one, in place: 4.0 is 4 where a whole number is meant, NumPy's numbers are Python's."""
    whole = {
        item.name for item in fields(config) if re.search(r"\bint\b", str(item.type)) and "float" not in str(item.type)
    }
    for name, value in vars(config).items():
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            setattr(config, name, value := value.item())
        if isinstance(value, float) and value.is_integer() and name in whole:
            setattr(config, name, int(value))
    if isinstance(config.scale_rewards, bool):
        config.scale_rewards = "group" if config.scale_rewards else "none"
    if config.max_completion_length is None:
        config.max_completion_length = token_limit(config)
    if config.max_grad_norm is None:
        config.max_grad_norm = 0.0
    # the former name is TRL's default (True) and would warn; the new one wins when it was set
    if getattr(config, "activation_checkpointing", False) is None:
        config.activation_checkpointing = config.checkpoints_activations
    if getattr(config, "activation_checkpointing_kwargs", False) is None:
        config.activation_checkpointing_kwargs = config.gradient_checkpointing_kwargs


def token_limit(config: Any) -> int:
    """Most tokens of a completion: `max_completion_length`, before which the one of `generation_kwargs` goes, by transformers' name or vLLM's.

    Raises ConfigError without any, and for one of `generation_kwargs` that is no whole number of 1 or more.
    """
    extra = config.generation_kwargs if isinstance(config.generation_kwargs, Mapping) else {}
    for name in ("max_new_tokens", "max_tokens"):
        if name in extra:
            limit = extra[name]
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ConfigError(
                    f"generation_kwargs has {name}={limit!r}: give a whole number of tokens, at least 1, or leave it out for max_completion_length."
                )
            return limit
    if config.max_completion_length is None:
        raise ConfigError(
            "max_completion_length=None sets no limit, and a completion that never ends would take all memory: give the number of "
            'tokens, or generation_kwargs={"max_new_tokens": ...}.'
        )
    return int(config.max_completion_length)


def misfit(values: Mapping[str, Any], types: Mapping[str, Any], error: Exception) -> str:
    """The sentence for an error that some value caused: the options whose values are not of their types, or the error's own."""
    misfits = [
        f"{name}={str(values[name])[:60]}" for name in types if name in values and not _fits(values[name], types[name])
    ]
    if not misfits or isinstance(error, ValueError):
        return str(error) or type(error).__name__
    return f"{', '.join(misfits[:3])} cannot be read: {'these are' if len(misfits) > 1 else 'this is'} of another type ({error})."


def _fits(value: Any, kind: Any) -> bool:
    """True if a value fits this annotation, judged by its outermost type."""
    kinds = [get_origin(arg) or arg for arg in get_args(kind)] if get_origin(kind) in (Union, UnionType) else [kind]
    kinds = [get_origin(arg) or arg for arg in kinds]
    plain = tuple(arg for arg in kinds if isinstance(arg, type) and arg is not Any)
    return len(plain) < len(kinds) or isinstance(value, plain) or (float in plain and isinstance(value, int))


def refuse_bad_values(config: Any) -> None:
    """Raise for a word that an option does not know, with the nearest one, and for a number out of its range."""
    for name, declared in DECLARED.items():
        if hasattr(config, name):  # some are only in newer transformers
            declared.check(name, getattr(config, name))
    _refuse_bad_steps(config)
    _refuse_bad_accelerator(config.accelerator_config)


def _refuse_bad_accelerator(accelerator_config: Any) -> None:
    """transformers would open a number as a file descriptor, and wait for what standard input says."""
    if not (
        accelerator_config is None
        or isinstance(accelerator_config, str | os.PathLike | Mapping)
        or hasattr(accelerator_config, "split_batches")
    ):
        raise ConfigError(
            f"accelerator_config={accelerator_config!r} is no mapping, no path of a JSON file and no AcceleratorConfig."
        )
    if isinstance(accelerator_config, Mapping):
        from transformers.trainer_pt_utils import AcceleratorConfig

        names = [field.name for field in fields(AcceleratorConfig)]
        for name in (name for name in accelerator_config if name not in names):
            raise ArgumentTypeError(
                f"accelerator_config has {name!r}, which is not known.{did_you_mean(str(name), names)} It knows {', '.join(names)}."
            )


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
    if steps <= 0 and not epochs > 0:
        raise ConfigError(f"num_train_epochs={epochs!r} must be above 0, or set max_steps.")
    for name, strategy in _EVERY.items():
        every, when = getattr(config, name), getattr(config, strategy)
        if every is None or getattr(when, "value", when) != "steps":
            continue
        if isinstance(every, bool) or not isinstance(every, int | float) or not math.isfinite(every) or every <= 0:
            raise ConfigError(f"{name}={every!r} must be above 0: steps, or below 1 a share of the run.")
        if every > 1 and every != int(every):
            raise ConfigError(f"{name}={every!r} must be a whole number of steps, or below 1 a share of the run.")


def refuse_bad_factories(config: Any) -> None:
    """Raise for an optimizer or a schedule that transformers does not know, or that cannot be honoured."""
    from covey.process.lean import OptimizerNames, SchedulerType

    for name, enum in (("optim", OptimizerNames), ("lr_scheduler_type", SchedulerType)):
        value = getattr(config, name)
        value, allowed = str(getattr(value, "value", value)), [item.value for item in enum]
        if value not in allowed:
            hint = did_you_mean(value, allowed) or f" It is one of {', '.join(allowed)}."
            raise ConfigError(f"{name}={value!r} is not known to transformers.{hint}")
    scheduler = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    if scheduler in ("reduce_lr_on_plateau", "greedy"):
        raise ConfigError(
            f"lr_scheduler_type={scheduler!r} cannot be honoured: it follows an evaluation loss, which says little in GRPO; "
            "use linear, cosine or constant."
        )
    if str(getattr(config.optim, "value", config.optim)).startswith(_UNUSABLE_OPTIMIZERS):
        raise ConfigError(f"optim={config.optim!r} cannot be honoured: {REFUSED['optim_target_modules']}.")
    if str(getattr(config.optim, "value", config.optim)) in _UNSAVED_OPTIMIZERS:
        raise ConfigError(
            f"optim={config.optim!r} cannot be honoured: torchao's state cannot be copied into a checkpoint; adamw_bnb_8bit can."
        )


def refuse_contradictions(config: Any, changed: Mapping[str, Any]) -> None:
    """Raise for options that are each fine but not together."""
    both = [name for name in ALGORITHM_OPTIONS if name in changed]
    if config.algorithm is not None and both:
        raise ConfigError(
            f"algorithm={config.algorithm!r} and {both[0]}={changed[both[0]]!r} both say what the loss is: leave one out, "
            "or change the algorithm with .replace(...)."
        )
    for name in ("rollout_cache_fraction", "cuda_graphs", "attention"):
        if config.rollout_backend == "transformers" and name in changed:
            raise ConfigError(
                f"{name}={changed[name]!r} is the native engine's; rollout_backend='transformers' does without: leave it out."
            )
    if config.num_generations < 2 and config.algorithm is None:
        raise ConfigError(
            "num_generations=1 leaves nothing to compare with: GRPO needs at least 2 completions a prompt."
        )
    if config.sync_ref_model and config.beta == 0:
        raise ConfigError("sync_ref_model=True has no reference model to move: beta is 0. Set beta, such as 0.04.")
    if config.use_adaptive_entropy and config.entropy_coef_min > config.entropy_coef_max:
        raise ConfigError("entropy_coef_min must not be above entropy_coef_max.")
    clip = config.reward_clip
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise ConfigError(f"reward_clip={clip!r} is no range; give the lowest and the highest value, such as [-5, 5].")
    budget, most = config.thinking_token_budget, token_limit(config)
    if budget is not None and budget >= most:
        raise ConfigError(
            f"thinking_token_budget={budget} leaves no token of max_completion_length={most} for an answer; lower it or raise the other."
        )
    _refuse_bad_correction(config)
    _refuse_bad_evaluation(config)


def warn_of_levels(config: Any) -> None:
    """Name a policy loss that is unusual with this level of importance sampling."""
    loss, level = config.loss_type, config.importance_sampling_level
    if loss == "luspo" and level != "sequence":
        logger.warning("loss_type='luspo' is meant for importance_sampling_level='sequence' (LUSPO, 2026).")
    if loss == "vespo" and level != "token":
        logger.warning(
            "loss_type='vespo' weighs whole sequences by itself; leave importance_sampling_level at 'token'."
        )
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        logger.warning(
            "importance_sampling_level='sequence' with loss_type=%r weighs a sequence by its length; "
            "GSPO (2025) is loss_type='grpo'.",
            loss,
        )


def _refuse_bad_correction(config: Any) -> None:
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min={low!r} must be below vllm_importance_sampling_clip_max={high!r}."
        )
    if not config.vllm_importance_sampling_correction or low is not None or high is not None:
        return
    if config.vllm_importance_sampling_mode.endswith("truncate"):
        raise ConfigError(
            f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} truncates to bounds: set "
            "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min."
        )


def _refuse_bad_evaluation(config: Any) -> None:
    evaluates = getattr(config.eval_strategy, "value", config.eval_strategy) != "no"
    saves_best = config.save_strategy == "best"
    for name in ("early_stopping_patience", "load_best_model_at_end", *(["save_strategy"] if saves_best else [])):
        value = getattr(config, name)
        if value and not evaluates:
            raise ConfigError(
                f"{name}={getattr(value, 'value', value)!r} needs evaluations: set eval_strategy='steps' and eval_steps."
            )
    if config.ema_decay is not None and config.soup_steps is not None:
        raise ConfigError("ema_decay and soup_steps are two averages of the weights; keep one of them.")
    if config.ema_decay == 1:
        raise ConfigError("ema_decay=1 would never leave the first weights; it must be below 1.")
    if (config.ema_decay or config.soup_steps) and config.save_only_model and config.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end needs the averaged weights of ema_decay or soup_steps, which save_only_model leaves out of "
            "checkpoints; leave it out."
        )
    needs_metric = config.early_stopping_patience or config.load_best_model_at_end or saves_best
    if needs_metric and config.metric_for_best_model is None:
        config.metric_for_best_model = "reward"


def settle_precision(config: Any) -> None:
    """Decide `bf16` where it was not said, and refuse a precision that this machine cannot compute in."""
    import torch
    from transformers.utils.import_utils import is_torch_bf16_gpu_available

    on_accelerator = torch.accelerator.is_available() and not config.use_cpu
    has_bfloat16 = is_torch_bf16_gpu_available() if on_accelerator else processor_has_bfloat16()
    if config.activation_offloading and not on_accelerator:
        raise ConfigError(
            "activation_offloading=True keeps activations in the host's memory, where this run computes already; leave it out."
        )
    if config.bf16 is None:
        config.bf16 = on_accelerator and has_bfloat16 and not config.fp16
    if config.fp16 and config.bf16:
        raise ConfigError("fp16=True and bf16=True contradict each other: leave fp16 out where bfloat16 works.")
    if config.fp16 and not on_accelerator:
        logger.warning(
            "fp16=True on a CPU is slow, and for trying loss scaling only; leave it out to compute in float32%s.",
            ", or set bf16=True" if has_bfloat16 else "",
        )
        config.use_cpu = True  # transformers takes float16 on a CPU only with use_cpu
    if config.bf16 and not has_bfloat16:
        where = "this accelerator (it needs an Ampere GPU or newer)" if on_accelerator else "this processor"
        instead = "set fp16=True" if on_accelerator else "leave bf16 out to compute in float32"
        raise ConfigError(f"bf16=True, but {where} does not compute in bfloat16: {instead}.")
    if config.bf16 and not on_accelerator:
        config.use_cpu = True  # transformers takes bfloat16 on a CPU only with use_cpu


def processor_has_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 natively; emulation would be slower than float32."""
    import torch

    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe)() for probe in probes if hasattr(torch.cpu, probe)) or _arm_has_bfloat16()


def _arm_has_bfloat16() -> bool:
    import platform

    if platform.machine().lower() not in ("arm64", "aarch64") or not os.path.exists("/proc/cpuinfo"):
        return False
    with open("/proc/cpuinfo") as file:
        return " bf16" in file.read()


def settle_sampler(config: Any) -> None:
    """Resolves `use_vllm`, TRL's name for `rollout_backend="vllm"`."""
    if config.use_vllm and config.rollout_backend not in ("auto", "vllm"):
        raise ConfigError(f"use_vllm=True and rollout_backend={config.rollout_backend!r} contradict each other.")
    if config.use_vllm:
        config.rollout_backend = "vllm"
    if config.vllm_structured_outputs_regex is not None and config.rollout_backend != "vllm":
        raise ConfigError(
            f"vllm_structured_outputs_regex={config.vllm_structured_outputs_regex!r} cannot be honoured without vLLM: set use_vllm=True, "
            "or score the format with a reward."
        )
    is_constrained = config.vllm_structured_outputs_regex is not None
    expect_together(config.thinking_token_budget and "thinking budget", is_constrained and "regular expression")


def settle_asynchrony(config: Any) -> None:
    """Refuse options that asynchronous rollouts cannot honour; warn of uncorrected staleness."""
    if not config.async_rollouts:
        return
    evaluates = getattr(config.eval_strategy, "value", config.eval_strategy) != "no"
    is_constrained = evaluates and config.vllm_structured_outputs_regex is not None
    expect_together(*features_of(config), is_constrained and "regular expression")
    if config.max_staleness and not config.vllm_importance_sampling_correction:
        logger.warning(
            "max_staleness=%d without vllm_importance_sampling_correction: updates from completions of older weights are not corrected.",
            config.max_staleness,
        )


def settle_batches(config: Any) -> None:
    """Fill in `steps_per_generation` and `generation_batch_size` from each other, and refuse sizes that do not divide."""
    share = config.per_device_train_batch_size * config.world_size
    accumulation = config.gradient_accumulation_steps
    config.steps_per_generation = micro_batches(
        share, accumulation, config.steps_per_generation, config.generation_batch_size
    )
    config.steps_per_generation, config.generation_batch_size = whole_groups(config, config.world_size)
