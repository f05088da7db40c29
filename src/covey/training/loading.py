"""Loading of policy and tokenizer for training, from names, folders or objects."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from covey.adapters import adapter_options, has_adapter, refuse_quantized, refuse_second_adapter, with_adapter
from covey.config import GRPOConfig
from covey.config.combinations import expect_together, features_of
from covey.data import eos_ids, longer_prompt, prepare_tokenizer
from covey.errors import ConfigError
from covey.learner.preparation import prepare_for_training
from covey.models import (
    can_take_long,
    config_of,
    disable_dropout,
    load_model,
    load_tokenizer,
    reads_media,
    rope_factors,
    short_rope_limit,
    take_factors,
    unwrapped,
)
from covey.models.modalities import load_processing
from covey.process.cluster import expect_cluster
from covey.rollout.on_ray import RAY_OPTION
from covey.rollout.vllm import Address, Carrier, Client, Deadlines, Server, expect_vllm, refuse_unfit
from covey.rollout.vllm.lifecycle import refuse_temperature
from covey.rollout.vllm.server import warn_of_server
from covey.training.agents import Agents
from covey.training.build_sampler import as_dict, sampling_params, vllm_length

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedPolicy:
    """A language model on its device and in training mode, its tokenizer, and the ids that end a completion."""

    model: Any
    tokenizer: Any
    eos_ids: tuple[int, ...]
    processor: Any = None
    """Processor of a model that reads media."""


def place_of_text(model: torch.nn.Module) -> str | None:
    """The folder of an adapter, whose tokenizer may be another than its base's; None for any other model."""
    return str(model) if adapter_options(model) is not None else None


def expect_engine(
    args: GRPOConfig, device: torch.device, model: Any, *, tokenizer: Any = None, peft_config: Any = None
) -> Server | None:
    """Look for vLLM and Ray before weights are loaded: vLLM in this process, or a server that serves this model; a Ray cluster.

    The arguments are those of `load_for_training`. Returns the connection to the server, for its sampler. Raises ConfigError for a server
    that does not fit, ServerError without one.
    """
    if args.async_rollouts and args.rollout_placement == "ray":
        expect_cluster(*RAY_OPTION)
    if args.rollout_backend != "vllm":
        return None
    if args.vllm_mode == "colocate":
        size = args.vllm_tensor_parallel_size
        words: dict[str, object] = {"size": size, "processes": args.world_size}
        expect_together(*features_of(args), size > 1 and "tensor parallel", **words)
        expect_vllm()
        refuse_temperature(sampling_params(args))
        return None
    address = Address.of(args.vllm_server_base_url, args.vllm_server_host, args.vllm_server_port)
    deadlines = Deadlines.of(as_dict(args.vllm_deadlines))
    server = Server.connect(Client(address, deadlines), args.vllm_server_timeout)
    if args.process_index == 0:
        warn_of_server(server)
    init_kwargs, trusts = as_dict(args.model_init_kwargs), args.trust_remote_code
    config = config_of(model, init_kwargs, trust_remote_code=trusts)
    text_tokenizer = tokenizer or load_tokenizer(
        None, place_of_text(model) or config._name_or_path, init_kwargs, trust_remote_code=trusts
    )
    refuse_unfit(
        server,
        config,
        getattr(text_tokenizer, "tokenizer", text_tokenizer),
        sampling_params(args),
        cast(Carrier, args.vllm_transport),
        is_on_cuda=device.type == "cuda",
        has_adapter=peft_config is not None or has_adapter(model) or place_of_text(model) is not None,
        records_experts=args.router_replay is not None,
    )
    return server


def load_for_training(
    model: Any,
    args: GRPOConfig,
    device: torch.device,
    *,
    tokenizer: Any = None,
    quantization_config: Any = None,
    peft_config: Any = None,
) -> LoadedPolicy:
    """Load the policy, add adapters, move it to its device and prepare it for training; shared by trainer and doctor.

    `model` and `tokenizer` are names, folders or loaded objects; tokenizer None: the model's own. The parts
    of a processor for media are used if the model reads them. A model placed by `device_map` is not moved.
    The adapter in a folder is trained further. Raises ModelError or ConfigError for a model that cannot be loaded or trained.
    """
    refuse_second_adapter(model, peft_config)
    init_kwargs = as_dict(args.model_init_kwargs)
    if quantization_config is not None:
        init_kwargs["quantization_config"] = quantization_config
    loaded = load_model(model, init_kwargs, trust_remote_code=args.trust_remote_code, is_trainable=True)
    processing = tokenizer or load_processing(
        loaded, place_of_text(model), init_kwargs, trust_remote_code=args.trust_remote_code
    )
    prepared = prepare_tokenizer(processing, loaded)
    processor = processing if processing is not prepared and reads_media(loaded) else None
    ends = eos_ids(loaded, prepared)
    refuse_quantized(loaded, device, has_adapter=peft_config is not None or hasattr(loaded, "peft_config"))
    loaded = with_adapter(loaded, peft_config)
    if peft_config is not None and "revision" in init_kwargs:
        peft_config.revision = init_kwargs["revision"]  # in the adapter's file: its base is that of this revision
    if args.disable_dropout:
        disable_dropout(loaded)
    if not hasattr(loaded, "hf_device_map"):
        loaded = loaded.to(device)
    return LoadedPolicy(prepare_for_training(loaded, args), prepared, ends, processor)


def choose_factors(
    loaded: LoadedPolicy,
    args: GRPOConfig,
    datasets: Sequence[Any],
    agents: Agents,
    server: Server | None = None,
) -> None:
    """Take one set of `longrope` factors for the whole run, and say which: the long one where a row can exceed the short one's tokens.

    Where vLLM writes, its context length decides, by which it chooses for every row. `datasets`: those whose prompts are
    measured, or dicts of them. Raises ConfigError where vLLM takes the long set and the model cannot.
    """
    model = unwrapped(loaded.model)
    limit, name = short_rope_limit(model.config.get_text_config()), type(model).__name__
    if limit is None:
        return
    if (engine := vllm_length(args, server)) is not None:
        tokens, option = engine
        why = f"{option} is {tokens}" if tokens > limit else None
    elif rope_factors(model) == "long":
        why = "the model was trained so"
    else:
        why = _longer_row(loaded, args, datasets, agents, limit)
    if why is not None and not can_take_long(model):
        shorter = f"{name} has two sets of rotary factors (longrope) and takes short_factor here, since its code has no place for the other"
        if engine is not None:
            raise ConfigError(f"{shorter}, and vLLM takes long_factor where {why}; lower it to {limit}.")
        logger.warning("%s: rows end at %d tokens.", shorter, limit)
    elif why is None:
        take_factors(model, "short")
        logger.warning(
            "%s has two sets of rotary factors (longrope), and this run takes short_factor for every row: %d tokens, prompt and "
            "completion together, are its context.", name, limit,
        )  # fmt: skip
    else:
        take_factors(model, "long")
        logger.warning(
            "%s has two sets of rotary factors (longrope), and this run takes long_factor for every row, short ones too, since %s: more than "
            "%d tokens. Let vLLM serve the result with --max-model-len above %d.", name, why, limit, limit,
        )  # fmt: skip


def _longer_row(
    loaded: LoadedPolicy, args: GRPOConfig, datasets: Sequence[Any], agents: Agents, limit: int
) -> str | None:
    """The reason why a row can have more tokens than `limit`; None if none can."""
    completion, processor = args.max_completion_length, loaded.processor
    template = agents.template_options(args.chat_template_kwargs)
    if completion >= limit:
        return f"max_completion_length is {completion}"
    if args.on_long_prompt == "drop":  # those that exceed it are left out
        return None
    room = limit - completion
    several = [dataset for part in datasets for dataset in (part.values() if isinstance(part, dict) else [part])]
    lengths = (longer_prompt(dataset, loaded.tokenizer, room, template, processor) for dataset in several)
    longer = next((length for length in lengths if length is not None), None)
    return None if longer is None else f"a prompt has {longer} tokens and max_completion_length is {completion}"
