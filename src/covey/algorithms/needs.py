"""Inputs of an algorithm besides the policy's log-probabilities, rewards and masks, from what its parts say."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from covey.algorithms.composing import needs_whole_step
from covey.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Needs:
    """Inputs that an algorithm reads; the learner computes no others."""

    entropy: bool = False
    ref_logp: bool = False
    old_logp: bool = False
    """The learner's own log-probabilities at rollout time, even when nothing is off-policy."""
    sampler_logp: bool = False
    values: bool = False
    squared_score: bool = False
    """The squared norm of the gradient of each token's log-probability by the logits."""
    observed: bool = False
    """The tokens with which tools and environments answered."""
    greedy: bool = False
    """The reward of each prompt's greedy answer."""
    teacher_logp: bool = False
    """A teacher's log-probabilities of the policy's tokens."""
    distribution: bool = False
    """The reference's distribution over the whole vocabulary at every position (`alg.full`)."""
    whole_step: bool = False
    """A gradient-free pass over the step before the first micro-batch, for `Algorithm.prepare`."""

    def at_rollout(self, *, is_off_policy: bool) -> "Needs":
        """Those of them that are measured at the rollout, before the advantages."""
        old_logp = self.old_logp or is_off_policy
        return Needs(old_logp=old_logp, ref_logp=self.ref_logp, values=self.values, squared_score=self.squared_score)

    @property
    def reference(self) -> bool:
        """A reference model."""
        return self.ref_logp or self.distribution


def needs_of(parts: Mapping[str, Any]) -> Needs:
    """Inputs that the parts read, by slot: those they list in `needs`, and those that follow from their type."""
    listed = {name for part in parts.values() for name in getattr(part, "needs", ())}
    inputs = {item.name for item in fields(Needs)}
    for name in listed - inputs:
        raise ConfigError(f"A part says it needs {name!r}, which nobody provides.{did_you_mean(name, inputs)}")
    flags, kl = {name: name in listed for name in inputs}, parts["kl"]
    if kl is not None:
        flags["distribution" if kl.takes_distribution else "ref_logp"] = True
    flags["old_logp"] |= kl is not None and kl.where == "reward"
    flags["values"] |= parts["critic"] is not None
    flags["whole_step"] |= any(map(needs_whole_step, parts.values()))
    return Needs(**flags)
