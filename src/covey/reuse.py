"""A sampler that leaves what it computes, and the learner that takes it: the option `reuse_rollout`."""

from __future__ import annotations

import torch

from covey.errors import ConfigError
from covey.fused_layers import recomputes_inside
from covey.invariants import draws_while_training
from covey.learner import Policy
from covey.learner.memory import bytes_for_outputs
from covey.outputs import Outputs
from covey.rollout import NativeSampler, Sampler
from covey.rollout.mode import unwrapped
from covey.world import World


def shared_outputs(asked: bool | None, policy: Policy, sampler: Sampler, dtype: torch.dtype, world: World) -> Outputs:
    """What the sampler leaves for a learner that computes in `dtype`; it stays empty where nothing can be left.

    Raises ConfigError, with the reason, where it was asked for and cannot be had.
    """
    text = unwrapped(policy.model).config.get_text_config()
    outputs = Outputs(bytes_for_outputs(asked, text.hidden_size, is_checkpointed=policy.is_checkpointing))
    if not outputs.most_bytes:
        return outputs
    reason = why_not(policy, sampler, dtype, world)
    if reason is None and isinstance(sampler, NativeSampler):
        sampler.keep(outputs)
        policy.outputs = outputs
        reason = None if outputs.products else "no kernels of this processor decode this model a whole step at a time"
    if reason is not None and asked:
        raise ConfigError(f"reuse_rollout=True, but {reason}; leave it out.")
    return outputs


def why_not(policy: Policy, sampler: Sampler, dtype: torch.dtype, world: World) -> str | None:
    """What keeps the learner from computing with the very numbers that the sampler has."""
    if not isinstance(sampler, NativeSampler):
        return "completions are not drawn by the native engine"
    if hasattr(policy.model, "peft_config"):
        return "the sampler adds an adapter to the weights, and the learner multiplies with both"
    if sampler.forward.dtype != dtype:
        return f"completions are drawn in {sampler.forward.dtype}, and the learner computes in {dtype}"
    if world.size > 1:
        return "one process draws what another learns from"
    if draws_while_training(policy.model):
        return "layers drop numbers at random (disable_dropout=True ends that)"
    if not recomputes_inside(policy.model):
        return "activations are computed again by means of their own (use_reentrant=False ends that)"
    return None
