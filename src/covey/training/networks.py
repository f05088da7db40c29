"""Policy, reference and critic of a run, sharded over processes if configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from covey import algorithms as alg
from covey.adapters import has_adapter
from covey.algorithms import SFT, Algorithm, Distill
from covey.errors import ConfigError
from covey.kernels import learning
from covey.learner import AdapterCopy, FrozenCopy, NoReference, Policy, ValueHead, ValueModel, no_critic
from covey.learner.critic import Critic
from covey.learner.reference import Reference
from covey.models import reads_images
from covey.process.sharding import Sharding, Shards
from covey.process.world import World

Shard = Callable[[nn.Module], Shards]


@dataclass(frozen=True, eq=False)
class Networks:
    """The models of a run's learner."""

    policy: Policy
    reference: Reference
    critic: Critic
    max_tokens: int | None
    """Initial token limit of a micro-batch, measured before sharding."""


def networks_of(
    algorithm: Algorithm,
    policy: Policy,
    world: World,
    sharding: Sharding | None,
    max_tokens: int | None,
    frozen: Any = None,
    *,
    keeps_whole: bool = True,
) -> Networks:
    """Policy, reference and critic of an algorithm. `frozen`: a copy of the model for the reference, made before.

    `keeps_whole`: a sharded policy can be gathered whole, for a sampler in this process.
    Copies are made before the policy is sharded, after which it cannot be copied. Raises ConfigError if it cannot be sharded.
    """
    if sharding is None or world.size == 1:
        own = build_reference(algorithm, policy, frozen=frozen)
        return Networks(policy, own, build_critic(algorithm, policy), max_tokens)
    if getattr(policy.model, "is_quantized", False):
        raise ConfigError(
            "fsdp cannot split quantized weights; leave quantization_config out (bf16 weights: model_init_kwargs={'dtype': "
            "'bfloat16'}), or leave fsdp out: an adapter on a quantized model is summed over processes without it."
        )
    if hasattr(policy.model, "hf_device_map"):
        raise ConfigError("device_map spreads the model over devices and fsdp over processes; leave one of them out.")

    def shard(module: nn.Module, keeps_whole: bool = False) -> Shards:
        with learning(module):  # chooses its kernels, once and for all, while the weights are whole
            pass
        return Shards(module, world, sharding, keeps_whole=keeps_whole)

    critic = build_critic(algorithm, policy, shard)
    reference = None if has_adapter(policy.model) else build_reference(algorithm, policy, shard)
    policy = policy.sharded(partial(shard, keeps_whole=keeps_whole))
    return Networks(policy, reference or build_reference(algorithm, policy), critic, max_tokens)


def refuse_unsplit(algorithm: Algorithm, model: Any, optimizer: Any, rollout_func: Any) -> None:
    """Raise ConfigError for options that do not work with a sharded model, or that hold its unsharded parameters."""
    for part in algorithm.regularizers:
        if isinstance(part, (Distill, SFT)):
            name = type(part).__name__.lower()
            raise ConfigError(f"alg.{name} does not work with a model that fsdp splits; leave one of them out.")
    if reads_images(model):
        raise ConfigError(
            f"{type(model).__name__} reads images, and fsdp splits models of text only; leave fsdp out, or train an adapter."
        )
    if optimizer is not None:
        raise ConfigError(
            "fsdp replaces the parameters that the optimizer of optimizers=(...) was made for; leave it out, and set optim."
        )
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func is handed a trainer whose model fsdp has split, which cannot generate; leave one of them out, or use tools or "
            "environment_factory."
        )


def build_reference(algorithm: Algorithm, policy: Policy, shard: Shard | None = None, frozen: Any = None) -> Reference:
    """Reference of the KL term: none, a copy of the adapter, or a copy of the model, by default a new one."""
    if not algorithm.needs.reference:
        return NoReference()
    if has_adapter(policy.model):
        return AdapterCopy.of(policy)
    return FrozenCopy.of(policy, follows=algorithm.reference is not alg.keep, shard=shard, model=frozen)


def build_critic(algorithm: Algorithm, policy: Policy, shard: Shard | None = None) -> Critic:
    """Critic of the algorithm: none, a value head on the policy's hidden states, or a separate value model."""
    if algorithm.critic is None:
        return no_critic()
    if getattr(algorithm.critic, "model", "head") == "separate":
        return ValueModel.of(policy, shard)
    hidden: Any = policy.model.config.get_text_config().hidden_size
    return ValueHead(hidden, policy.device)
