"""The options of a run planned for GPUs that are not here: machine-dependent defaults are resolved for the GPU."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from covey.algorithms.teachers import POLICY, is_address
from covey.config import GRPOConfig
from covey.config.parallelism import settle_parallelism
from covey.doctor.roofline.estimate import Teaching
from covey.errors import ConfigError
from covey.training.build_algorithm import build_algorithm

_ELSEWHERE = {
    "deepspeed": "say --fsdp true, which is how ZeRO-2 and ZeRO-3 are carried out",
    "fsdp_config": "a plan knows one way to split a model; say --fsdp true",
    "use_cpu": "a plan is for GPUs; covey doctor memory is for a CPU",
    "fp16": "a plan computes in bfloat16 (--bf16 false: in float32)",
}
_NO = ("", "false", "no", "off", "0", "none")


def planned(options: Mapping[str, Any]) -> tuple[GRPOConfig, bool, bool]:
    """The configuration on a GPU, in bfloat16 unless `bf16` says otherwise; whether FSDP splits the model, and offloads its shards.

    Raises ConfigError for options that a plan does not cover.
    """
    options = dict(options)
    for name, instead in _ELSEWHERE.items():
        if options.get(name):
            raise ConfigError(f"covey doctor plan does not take --{name.replace('_', '-')}: {instead}.")
    words = str(options.pop("fsdp", None) or "").lower()
    is_split, offloads = words not in _NO, "offload" in words.split()
    bf16 = options.pop("bf16", True)
    shared = SimpleNamespace(parallelism_config=options.pop("parallelism_config", None))
    config = GRPOConfig(**options)
    config.bf16 = bf16
    config.context = settle_parallelism(shared)  # the processes of the plan are not here
    return config, is_split, offloads


def division(config: GRPOConfig, gpus: int, writers: int | None) -> tuple[int, bool]:
    """GPUs that only write, of `gpus`, and whether they do so while the others learn. `writers`: those of a vLLM server.

    Raises ConfigError where none is left to write or to learn.
    """
    is_server = config.use_vllm and config.vllm_mode == "server"
    if not is_server and not config.async_rollouts:
        if writers:
            raise ConfigError(
                "--rollout-gpus are those of a vLLM server: add --use-vllm true --vllm-mode server, or leave it out."
            )
        return 0, False
    if is_server and writers is None:
        raise ConfigError(
            "--rollout-gpus is missing: how many of the GPUs the vLLM server has, such as --rollout-gpus 1. Or add --vllm-mode colocate."
        )
    count = config.rollout_workers if writers is None else writers
    if not 0 < count < gpus:
        raise ConfigError(
            f"{count} of {gpus} GPUs would only write, which leaves none to learn; plan for more GPUs, or have them write in turn."
        )
    return count, bool(config.async_rollouts)


def teachers_of(config: GRPOConfig, policy: Any, config_of: Callable[[str, bool], Any]) -> tuple[Teaching, ...]:
    """The teachers of the run's algorithm. `policy`: transformers' configuration of the model, its own teacher without more weights."""
    role = build_algorithm(config).role
    named = () if role is None else role.teacher
    names = list(named) if isinstance(named, Mapping | list | tuple) else [named]
    made = []
    for name in names:
        if isinstance(name, str) and is_address(name):
            continue  # its server's seconds overlap with those of other processes
        if name == POLICY or not isinstance(name, str):
            made.append(Teaching(parameters=_parameters(policy), weights=0))
            continue
        size = _parameters(config_of(name, config.trust_remote_code))
        made.append(Teaching(parameters=size, weights=2 * size))
    return tuple(made)


def _parameters(model_config: Any) -> int:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return sum(p.numel() for p in auto.from_config(model_config).parameters())
