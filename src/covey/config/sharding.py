"""`fsdp`, `fsdp_config`, `deepspeed` and what `accelerate launch` sets: read as one way to split a model, or refused by name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.config.combinations import expect_together
from covey.errors import ConfigError, did_you_mean
from covey.process.sharding import Sharding

logger = logging.getLogger(__name__)

_READS = "every process reads the weights and keeps its part"
_FSDP1 = "FSDP2 always does so, or has no such choice"
_STATE = "a checkpoint holds whole weights and split optimizer state, whichever is asked for"
_TUNING = "it is a setting of DeepSpeed's own buffers"

_READ = (
    "version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap",
    "activation_checkpointing", "offload_params", "cpu_offload",
)  # fmt: skip
_INERT: Mapping[str, str] = {
    "cpu_ram_efficient_loading": _READS,
    "state_dict_type": _STATE,
    **dict.fromkeys(("use_orig_params", "sync_module_states", "limit_all_gathers"), _FSDP1),
    **dict.fromkeys(("forward_prefetch", "backward_prefetch"), "FSDP2 gathers the next block ahead by itself"),
}
_REFUSED: Mapping[str, str] = {
    "min_num_params": "blocks are split by class; leave it out, or set transformer_layer_cls_to_wrap",
    "sharding_strategy": "it is FSDP1's word; set reshard_after_forward to true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "ignored_modules": "every module is split; leave it out",
    "activation_checkpointing_offload": "leave it out, or set activation_offloading of the run",
    **dict.fromkeys(
        ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"), "there is no XLA here; leave it out"
    ),
}
_LAUNCHER = {f"FSDP_{name.upper()}": name for name in (*_READ, *_INERT, *_REFUSED)}
_LAUNCHER["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "transformer_layer_cls_to_wrap"

_OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"),
    *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
"""Optimizers that work on shards: element by element, or in blocks of a shard (bitsandbytes')."""

_STAGES = {2: False, 3: True}
"""ZeRO stage -> `reshard_after_forward`: stage 2 keeps gathered parameters for the backward pass, stage 3 gathers them again."""
_ZERO_INERT = (
    *("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients"),
    *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "ignore_unused_parameters"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
)
_ZERO_OFFLOADS = (
    "offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory",
)  # fmt: skip
_ZERO_REFUSED = ("zero_quantized", "zero_hpz", "mics")
"""Beginnings of names that are refused unless they are off."""
_TOP_INERT = ("steps_per_print", "wall_clock_breakdown", "zero_allow_untrained_optimizer", "prescale_gradients")


@contextmanager
def split_by_covey(config: Any) -> Iterator[None]:
    """Context manager that hides the options of splitting: transformers would make its own plugins of them."""
    names = ("fsdp", "fsdp_config", "deepspeed", "parallelism_config")
    held = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(config, name, value)


def settle_sharding(config: Any) -> Sharding | None:
    """Sharding from the options and the launcher's environment variables; None: every rank holds the whole model.

    Turns on activation checkpointing where it is asked for there. Raises ConfigError for what cannot be honoured, naming it.
    """
    zero = _of_deepspeed(config)
    fsdp = _of_fsdp(config)
    if zero is not None and fsdp is not None:
        raise ConfigError("fsdp and deepspeed both say how the model is split; keep one of them.")
    sharding = fsdp if zero is None else zero
    if sharding is None:
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        logger.warning(
            "fsdp changes nothing here: there is one process, which holds the whole model; start several with torchrun."
        )
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # transformers would leave the weights of other ranks empty
    optimizer = str(getattr(config.optim, "value", config.optim))
    expect_together(
        "FSDP2",
        optimizer not in _OPTIMIZERS and "optimizer for whole tensors",
        sharding.offloads and "CPU offload",
        optimizer.startswith("paged_") and "paged optimizer",
        optim=optimizer,
        others=", ".join(_OPTIMIZERS),
    )
    return sharding


def _of_fsdp(config: Any) -> Sharding | None:
    options = _options(config)
    if options is None:
        return None
    _refuse_unknown(options)
    if str(options.get("version", 2)) != "2":
        raise ConfigError(
            f"fsdp_config has version {options['version']!r}, and FSDP1 is not supported; set fsdp_version: 2 "
            "(accelerate to-fsdp2 converts a config file)."
        )
    inert = {name: value for name, value in options.items() if name in _INERT}
    for name in inert:
        logger.warning("fsdp_config's %s=%r changes nothing here: %s.", name, inert[name], _INERT[name])
    if _is_yes(options.get("activation_checkpointing", False), "activation_checkpointing"):
        config.gradient_checkpointing = True
    wraps = str(options.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP"))
    if wraps not in ("TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        raise ConfigError(
            f"fsdp_config has auto_wrap_policy {wraps!r}, which cannot be honoured; use TRANSFORMER_BASED_WRAP (block by block) "
            "or NO_WRAP (the whole model at once)."
        )
    classes = options.get("transformer_layer_cls_to_wrap")
    classes = [name.strip() for name in classes.split(",")] if isinstance(classes, str) else classes
    if classes and not isinstance(classes, (list, tuple)):
        raise ConfigError(f"fsdp_config's transformer_layer_cls_to_wrap={classes!r} is no list of class names.")
    blocks = () if wraps == "NO_WRAP" else tuple(classes) if classes else None
    offloads = [_is_yes(options.get(name, False), name) for name in ("offload_params", "cpu_offload")]
    reshards = _is_yes(options.get("reshard_after_forward", True), "reshard_after_forward")
    return Sharding(reshards, blocks, any(offloads))


def _options(config: Any) -> dict[str, Any] | None:
    """The options of FSDP by their names without `fsdp_`, those of the run before the launcher's; None where it is not asked for."""
    from_launcher = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")
    configured = _dict_of(config.fsdp_config, "fsdp_config")
    if not config.fsdp:
        if configured:
            raise ConfigError("fsdp_config is given without fsdp; set fsdp=True, or leave it out.")
        if not from_launcher:
            return None
    launched = {name: os.environ[key] for key, name in _LAUNCHER.items() if key in os.environ} if from_launcher else {}
    configured = {name.removeprefix("fsdp_"): value for name, value in configured.items() if value is not None}
    return {**_plain(launched), **_of_words(config.fsdp), **configured}


def _plain(variables: Mapping[str, str]) -> dict[str, Any]:
    """Effective launcher variables: the launcher sets every one, also the size for a policy that is off."""
    means = lambda name, value: (
        name in _READ or (name in _REFUSED and name not in ("min_num_params", "sharding_strategy") and _is_set(value))
    )
    return {name: value for name, value in variables.items() if means(name, value)}


def _of_words(fsdp: Any) -> dict[str, Any]:
    """The older form of `fsdp`: words such as "full_shard auto_wrap"."""
    if fsdp is not None and not isinstance(fsdp, (bool, str, list, tuple)):
        raise ConfigError(
            f"fsdp={fsdp!r} cannot be honoured; it is True or False, and its options go into fsdp_config."
        )
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, (list, tuple)) else []
    options: dict[str, Any] = {}
    for word in (str(getattr(item, "value", item)).lower() for item in words):
        if word in ("full_shard", "shard_grad_op"):
            options["reshard_after_forward"] = word == "full_shard"
        elif word == "offload":
            options["cpu_offload"] = True
        elif word not in ("auto_wrap", "true", "1", "yes"):
            accepted = ("full_shard", "shard_grad_op", "auto_wrap")
            raise ConfigError(
                f"fsdp={fsdp!r} cannot be honoured: {word!r} is none of {', '.join(accepted)}; fsdp=True shards fully."
            )
    return options


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _REFUSED and _is_set(value):
            raise ConfigError(f"fsdp_config's {name}={value!r} cannot be honoured: {_REFUSED[name]}.")
        if name not in _READ and name not in _INERT and name not in _REFUSED:
            hint = did_you_mean(name, (*_READ, *_INERT))
            raise ConfigError(f"fsdp_config has {name!r}, which is not known.{hint}")


def _is_set(value: Any) -> bool:
    return bool(value) and str(value).lower() not in ("false", "0", "none")


def _is_yes(value: Any, name: str) -> bool:
    """True and false as JSON, YAML and the launcher write them; FSDP1's words for resharding too."""
    word = str(value).lower()
    if word in ("true", "1", "yes", "full_shard"):
        return True
    if word in ("false", "0", "no", "shard_grad_op"):
        return False
    raise ConfigError(f"fsdp_config's {name}={value!r} cannot be honoured; it is true or false.")


# -- DeepSpeed's configuration ------------------------------------------------------------------------------------------


def _of_deepspeed(config: Any) -> Sharding | None:
    """ZeRO-2 and ZeRO-3 as FSDP2 splits them. Takes the option away from transformers, which would ask for the package."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("1", "true", "yes"):
        raise ConfigError(
            "accelerate was configured for DeepSpeed, which would hold the model and the optimizer itself; use an FSDP2 config "
            "(distributed_type: FSDP, fsdp_version: 2), which splits the same things, or launch with torchrun."
        )
    if not config.deepspeed:
        return None
    deepspeed = _dict_of(config.deepspeed, "deepspeed")
    zero = deepspeed.get("zero_optimization") or {}
    if not zero:
        raise ConfigError(
            f"deepspeed has no zero_optimization, only {', '.join(map(repr, deepspeed))}; give {{'zero_optimization': {{'stage': 3}}}} or 2, "
            "or leave deepspeed out."
        )
    if not isinstance(zero, Mapping):
        raise ConfigError(
            f"deepspeed has zero_optimization={zero!r}; give {{'zero_optimization': {{'stage': 3}}}} or 2."
        )
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in _STAGES:
        raise ConfigError(
            f"deepspeed has ZeRO stage {stage!r}, which is not split here; use stage 2 or 3 (FSDP2 does the same), or leave deepspeed out."
        )
    for name, value in zero.items():
        is_whole = name == "zero_hpz_partition_size" and value == 1  # DeepSpeed's default: no second partition
        if name.startswith(_ZERO_REFUSED) and _is_set(value) and not is_whole:
            raise ConfigError(
                f"deepspeed's zero_optimization.{name} cannot be honoured; leave it out, or train an adapter."
            )
        if name not in ("stage", *_ZERO_INERT, *_ZERO_OFFLOADS) and not name.startswith(_ZERO_REFUSED):
            raise ConfigError(f"deepspeed's zero_optimization.{name} is not known here; leave it out.")
    _expect_agrees(config, deepspeed)
    offloads = [_is_offload(name, zero[name]) for name in _ZERO_OFFLOADS[:-1] if name in zero]
    tuned = [name for name in zero if name in _ZERO_INERT]
    logger.warning(
        "deepspeed: ZeRO stage %d is done by PyTorch's FSDP2, which splits the same things; the package is not used%s.",
        stage,
        f", and {', '.join(tuned)} change nothing ({_TUNING})" if tuned else "",
    )
    if any(offloads):
        logger.warning(
            "deepspeed: FSDP2 keeps parameters, gradients and the optimizer's state in host memory together, whichever of them is named."
        )
    return Sharding(_STAGES[stage], offloads=any(offloads))


def _is_offload(name: str, value: Any) -> bool:
    """True for an entry that offloads to host memory. Raises ConfigError for another place."""
    device = value.get("device", "none") if isinstance(value, Mapping) else "cpu" if _is_set(value) else "none"
    if str(device) not in ("cpu", "none"):
        raise ConfigError(
            f"deepspeed's zero_optimization.{name} offloads to {device!r}, and FSDP2 to host memory alone; write 'cpu' there, or leave it out."
        )
    return str(device) == "cpu"


def _expect_agrees(config: Any, deepspeed: Mapping[str, Any]) -> None:
    """Raise where the file says of the batch, the clipping or the precision what the run's options do not."""
    for name in ("fp16", "bf16"):
        if not isinstance(deepspeed.get(name) or {}, Mapping):
            raise ConfigError(
                f"deepspeed has {name}={deepspeed[name]!r}; write {{'enabled': true}}, or \"auto\" inside it."
            )
    enabled: Callable[[str], Any] = lambda name: (deepspeed.get(name) or {}).get("enabled", False)
    rows = config.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    options = {
        "train_micro_batch_size_per_gpu": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm,
        "train_batch_size": rows * config.gradient_accumulation_steps,
    }
    for name, value in deepspeed.items():
        if name in options:
            if value not in ("auto", options[name]):
                raise ConfigError(
                    f'deepspeed has {name}={value!r} where the run has {options[name]!r}; write "auto" there.'
                )
        elif name in ("fp16", "bf16"):
            setting, has = enabled(name), bool(getattr(config, name))
            if setting != "auto" and bool(setting) and not has:
                raise ConfigError(
                    f'deepspeed enables {name}, and the run does not; set {name}=True, or write "auto" there.'
                )
        elif name != "zero_optimization" and name not in _TOP_INERT:
            instead = "; set optim and lr_scheduler_type of the run" if name in ("optimizer", "scheduler") else ""
            raise ConfigError(f"deepspeed's {name} cannot be honoured{instead}; leave it out.")


def _dict_of(value: Any, name: str) -> dict[str, Any]:
    """A dict, JSON text, or the path of a JSON file, as transformers takes them."""
    if not value:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    text = str(value)
    try:
        options = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={text[:80]!r} is neither JSON nor the path of a JSON file ({error}).") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{name}={text[:80]!r} holds no options; it must be one JSON object.")
    return options
