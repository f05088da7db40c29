"""`parallelism_config`, and what `accelerate launch` sets of it: read as the size of context parallelism, or refused by name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from covey.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

_CONTEXT = ("cp_size", "sp_size")
"""accelerate's two kinds of one thing, the tokens of a row shared out: PyTorch's ring, and the all-to-all of DeepSpeed-Ulysses."""
_DATA = ("dp_replicate_size", "dp_shard_size")
_INERT = ("cp_backend", "sp_backend", "cp_handler", "sp_handler", "tp_handler")
_READ = (*_CONTEXT, *_DATA, "tp_size", *_INERT)


def settle_parallelism(config: Any) -> int:
    """Processes that compute each row together; 1: each computes its own. Leaves the option as a plain mapping.

    Raises ConfigError for what cannot be honoured, naming it.
    """
    options = _options(config.parallelism_config)
    for name in options:
        if name not in _READ:
            raise ConfigError(f"parallelism_config has {name!r}, which is not known.{did_you_mean(name, _READ)}")
    sizes = {name: _size(name, options.get(name)) for name in (*_CONTEXT, *_DATA, "tp_size")}
    if sizes["tp_size"] > 1:
        raise ConfigError(
            f"parallelism_config has tp_size={sizes['tp_size']}, and layers are not cut into parts here: fsdp=True splits a model over "
            "processes, and vllm_tensor_parallel_size a sampler; leave it out."
        )
    if min(sizes[name] for name in _CONTEXT) > 1:
        raise ConfigError("parallelism_config has cp_size and sp_size, which share out the same tokens; keep cp_size.")
    if min(sizes[name] for name in _DATA) > 1:
        raise ConfigError(
            "parallelism_config has dp_replicate_size and dp_shard_size, copies of a model that is split, which fsdp does not make; "
            "leave dp_replicate_size out."
        )
    size = max(sizes[name] for name in _CONTEXT)
    config.parallelism_config = {"cp_size": size} if size > 1 else None
    inert = [f"{name}={sizes[name]}" for name in _DATA if sizes[name] > 1]
    inert += [f"{name}={options[name]!r}" for name in _INERT if options.get(name) is not None]
    if inert:
        logger.warning(
            "parallelism_config's %s: nothing changes here. The launcher gives the number of processes, fsdp splits the model over "
            "all of them, and tokens are shared out by PyTorch's all-to-all.",
            ", ".join(inert),
        )
    return size


def expect_processes(size: int, processes: int) -> int:
    """The size of context parallelism in a run of so many processes: 1 of a process alone. Raises ConfigError if it does not divide."""
    if size > 1 and processes == 1:
        logger.warning(
            "parallelism_config's cp_size=%d changes nothing here: there is one process, which computes whole rows; start several with "
            "torchrun.",
            size,
        )
        return 1
    if processes % size:
        raise ConfigError(
            f"parallelism_config has cp_size={size}, which does not divide the {processes} processes of the run; start a multiple of {size}."
        )
    return size


def _options(value: Any) -> dict[str, Any]:
    """The option's entries, those of the launcher where it has none. `value`: a mapping, JSON of one, accelerate's own object."""
    prefix = "PARALLELISM_CONFIG_"
    uses = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    launched = {f"{name}_size": os.environ.get(f"{prefix}{name.upper()}_SIZE") for name in ("cp", "sp", "tp")}
    launched |= {name: os.environ.get(f"{prefix}{name.upper()}") for name in _DATA}
    held = {name: size for name, size in launched.items() if uses and size is not None}
    if not value:
        return held
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"parallelism_config={value!r} is no JSON ({error}).") from error
    if type(value).__name__ == "ParallelismConfig":
        # its backends and handlers always stand there
        value = {name: getattr(value, name) for name in (*_CONTEXT, *_DATA, "tp_size") if hasattr(value, name)}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"parallelism_config={value!r} is no mapping and no ParallelismConfig; write {{'cp_size': 2}}, for example."
        )
    return {**held, **value}


def _size(name: str, value: Any) -> int:
    size = 1 if value is None else int(value) if isinstance(value, str) and value.isdigit() else value
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"parallelism_config has {name}={value!r}; it is a number of processes, at least 1.")
    return size
