"""The options of a run planned for GPUs that are not here: machine-dependent defaults are resolved for the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config import GRPOConfig
from covey.errors import ConfigError

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
    if options.get("use_vllm") and options.get("vllm_mode", "server") != "colocate":
        raise ConfigError(
            "A plan is for GPUs that write and learn in turn; add --vllm-mode colocate, or leave vLLM out."
        )
    words = str(options.pop("fsdp", None) or "").lower()
    is_split, offloads = words not in _NO, "offload" in words.split()
    bf16 = options.pop("bf16", True)
    config = GRPOConfig(**options)
    config.bf16 = bf16
    return config, is_split, offloads
