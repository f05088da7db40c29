"""Loading of ensemble members: each name becomes a writer with its role."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.data import eos_ids, prepare_tokenizer
from covey.ensembles.member import Member, Role
from covey.ensembles.writers import Encoding, EndpointWriter, LocalWriter, ReadTurn, Writer
from covey.errors import ConfigError
from covey.models import load_model, load_tokenizer
from covey.process.sharding import Shards
from covey.rewards.builtin.chat_endpoint import Endpoint
from covey.rollout import GatheredSampler, Sampler, choose_sampler
from covey.runs.weights import model_folder

logger = logging.getLogger(__name__)


def load_writer(
    member: Member,
    name: str,
    device: torch.device,
    policy: Encoding | None = None,
    *,
    trust_remote_code: bool = False,
    check_stop: Callable[[], None] = lambda: None,
    shard: Callable[[nn.Module], Shards] | None = None,
    episodes: Callable[..., Sampler] | None = None,
    read_turn: ReadTurn | None = None,
    thinking_tokens: int | None = None,
) -> Writer:
    """The member, loaded on `device`.

    `policy`: how the policy reads text; None at inference, where each member reads and writes in its own tokens. `check_stop`: called while
    the member generates; an exception ends it. `shard`: splits a model that is loaded here over the processes; a loaded object and a
    quantized model stay whole. `episodes(over, model, shards, tokenizer, eos_ids)`: makes the sampler of completions that call the run's
    tools, act in its environment, or answer its agent, of those that `over(model)` makes. `read_turn`: tells thoughts of another
    tokenizer's turns apart. `thinking_tokens`: budget of the thoughts of a member with the policy's tokenizer. Raises ConfigError for a
    sibling with another tokenizer than the policy's, for a member that cannot write the run's episodes, and ModelError for what cannot
    be loaded.
    """
    if member.is_endpoint:
        if episodes is not None:
            raise _without_tools(name, "an endpoint")
        return _endpoint_writer(member, name, policy, check_stop)
    named = model_folder(str(member.model)) if isinstance(member.model, (str, Path)) else member.model
    is_named = isinstance(named, str)
    options = {"dtype": "float32" if device.type == "cpu" else "auto"} if is_named else None
    model = load_model(named, options, trust_remote_code=trust_remote_code)
    if is_named:
        model = model.to(device)
        model.requires_grad_(False)
    source = named if is_named else None
    tokenizer = member.tokenizer or load_tokenizer(model, source, trust_remote_code=trust_remote_code)
    tokenizer = prepare_tokenizer(tokenizer, model)
    is_same = policy is not None and tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    role: Role = member.role or ("sibling" if is_same else "rescue")
    if role == "sibling" and policy is not None and not is_same:
        raise ConfigError(
            f"Ensemble member {name} has another tokenizer than the policy, so its tokens have no probability under it and it "
            "cannot be a sibling; take role=rescue or role=baseline."
        )
    if episodes is not None and not is_same:
        raise _without_tools(name, "another tokenizer")
    theirs = policy.eos_ids if is_same and policy is not None else ()
    ends = tuple(dict.fromkeys((*theirs, *eos_ids(model, tokenizer))))
    is_split = is_named and not getattr(model, "is_quantized", False)
    shards = shard(model) if shard is not None and is_split else None
    budget = thinking_tokens if is_same else None  # elsewhere the mark would become a token to learn
    common: dict[str, Any] = {"eos_ids": ends, "check_stop": check_stop, "thinking_tokens": budget}
    over = lambda model, **more: choose_sampler(model, tokenizer, **common, **more)
    if episodes is not None:
        tokenizer = tokenizer if policy is None else policy.tokenizer  # the prompt was written by its chat template
        sampler = episodes(over, model, shards, tokenizer, ends)
    else:
        sampler = over(model) if shards is None else GatheredSampler(shards, over)
    encoding = None if is_same else policy
    return LocalWriter(name, role, member.samples, sampler, tokenizer, encoding, not is_same, read_turn)


def _endpoint_writer(
    member: Member, name: str, policy: Encoding | None, check_stop: Callable[[], None]
) -> EndpointWriter:
    endpoint = Endpoint(
        url=member.model,
        model=str(member.served_model_name),
        key_env=member.key_env,
        request_seconds=member.request_seconds,
        called=f"ensemble member {name}",
    )
    return EndpointWriter(name, member.role or "rescue", member.samples, endpoint, policy, check_stop)


def _without_tools(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"Ensemble member {name} writes text of {what}, in which the run's tools cannot answer, nor its environment or agent; leave "
        "it out, or these."
    )


def load_writers(
    members: Sequence[Member],
    names: Sequence[str],
    device: torch.device,
    policy: Encoding | None = None,
    **options: Any,
) -> list[Writer]:
    """Every member, in order; `options`: those of `load_writer`."""
    writers = [
        load_writer(member, name, device, policy, **options) for member, name in zip(members, names, strict=True)
    ]
    for writer in writers if policy is not None else ():
        logger.info("ensemble: %s writes %d completion(s) a prompt as %s", writer.name, writer.samples, writer.role)
    return writers
