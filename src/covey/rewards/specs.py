"""Reward specs from a user's rewards: unique names, weights, worker processes where they are possible."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards.calling.workers import packed
from covey.rewards.combining import weight_of
from covey.rewards.contract import RewardSpec, is_async
from covey.types import Reward

logger = logging.getLogger(__name__)


def specs_of(rewards: Sequence[RewardSpec | Reward], weights: Sequence[Any] | None) -> list[RewardSpec]:
    """Specs with names that differ (`name`, `name_2`, ...) and the given weights."""
    if not rewards:
        raise RewardError("there is no reward; give at least one function, reward model or name of a built-in reward.")
    specs = [RewardSpec.of(reward) for reward in rewards]
    if weights is not None and len(weights) != len(specs):
        raise ConfigError(f"reward_weights has {len(weights)} values for {len(specs)} rewards; give one for each.")
    if weights is not None:
        specs = [replace(spec, weight=weight_of(weight)(0)) for spec, weight in zip(specs, weights, strict=True)]
    seen: dict[str, int] = {}
    for i, spec in enumerate(specs):
        seen[spec.name] = seen.get(spec.name, 0) + 1
        if seen[spec.name] > 1:
            specs[i] = replace(spec, name=f"{spec.name}_{seen[spec.name]}")
    return specs


def isolated(spec: RewardSpec) -> RewardSpec:
    """The reward in worker processes, if it is a function of the user's own that they can import; else as it is."""
    target = spec.call if hasattr(spec.call, "__module__") else type(spec.call)
    is_user_function = not str(getattr(target, "__module__", "")).startswith("covey.")
    if is_async(spec.call) or not is_user_function or spec.how.isolated or hasattr(spec.call, "parameters"):
        return spec
    try:
        packed(spec.name, spec.call)
    except RewardError as reason:
        logger.warning("reward_workers: %s It runs in the process of training.", reason)
        return spec
    return replace(spec, call_options=replace(spec.how, isolated=True))
