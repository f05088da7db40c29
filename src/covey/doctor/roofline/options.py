"""The options of a run planned for GPUs that are not here: machine-dependent defaults are resolved for the GPU. And published
configurations of some models, each from its config.json on the hub, for a plan where the hub cannot be reached.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from covey.config import GRPOConfig
from covey.config.parallelism import settle_parallelism
from covey.doctor.roofline.estimate import Teaching
from covey.errors import ConfigError, ModelError, did_you_mean
from covey.training.build_algorithm import build_algorithm
from covey.training.teaching import sizes_of_teachers

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
    read = lambda name: config_of(name, config.trust_remote_code)
    sizes = sizes_of_teachers(build_algorithm(config).role, policy, read)
    return tuple(Teaching(parameters=count, weights=size) for count, size in sizes)


_SHAPES = json.loads(Path(__file__).with_name("models.json").read_text())
MODELS = tuple(_SHAPES)
_SUFFIXES = ("-Instruct", "-Base", "-Instruct-v0.3")


def config_by_name(model: str) -> Any:
    """The transformers configuration of a known model, by its name with or without its owner; None for any other."""
    by_name = {name.lower(): name for name in MODELS} | {name.rpartition("/")[2].lower(): name for name in MODELS}
    plain = model.lower()
    full_name = next((by_name[w] for s in ("", *_SUFFIXES) if (w := plain.removesuffix(s.lower())) in by_name), None)
    if full_name is None:
        return None
    from transformers import AutoConfig

    return AutoConfig.for_model(**_SHAPES[full_name], max_position_embeddings=131072, use_cache=False)


def config_of(model: str, trust_remote_code: bool, load: Any) -> Any:
    """The configuration of a folder, a config.json, a known model, or a model on the hub, looked for in this order.

    `load` reads a folder or the hub. Raises ModelError with the known names where there is none.
    """
    path = Path(model)
    if path.is_file():
        from covey.files.bounded import read_json
        from covey.models import as_model_errors

        read_json(path, ModelError)
        with as_model_errors(model):
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    config = None if path.exists() else config_by_name(model)
    if config is not None:
        return config
    try:
        return load(model, trust_remote_code)
    except ModelError as error:
        near = did_you_mean(model, MODELS)
        raise ModelError(
            f"{error}{near} Without the hub, a folder, its config.json, or one of: {', '.join(MODELS)}."
        ) from error
