"""Samplers (text generation from the policy) and their sampling parameters."""

from covey.errors import Unsupported
from covey.rollout.backends import Backend, choose_sampler
from covey.rollout.engine import NativeSampler
from covey.rollout.environments import Environment, Reply, Turn
from covey.rollout.gathered import GatheredSampler
from covey.rollout.hf import TransformersSampler
from covey.rollout.prompts import PromptLike
from covey.rollout.sampler import Sampler, SamplingParams, TokenSampler, close_sampler, sampler_metrics

__all__ = [
    "Backend", "Environment", "GatheredSampler", "NativeSampler", "PromptLike", "Reply", "Sampler", "SamplingParams",
    "TokenSampler", "TransformersSampler", "Turn", "Unsupported", "choose_sampler", "close_sampler", "sampler_metrics",
]  # fmt: skip
