"""Scores out of text: TRL's reward functions and reward models, called so that none of them can lose a run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rewards.builtin.judge_rewards import JudgeReward, PairwiseJudgeReward
    from covey.rewards.builtin.length_scaled import get_cosine_scaled_reward, reasoning_accuracy_reward
    from covey.rewards.builtin.math import accuracy_reward
    from covey.rewards.builtin.registry import BUILTIN, resolve
    from covey.rewards.builtin.reward_model import ModelReward
    from covey.rewards.builtin.text import (
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        think_format_reward,
    )
    from covey.rewards.combining import Combiner, advantage_shares
    from covey.rewards.contract import RewardSpec, check
    from covey.rewards.decorators import per_completion, reward
    from covey.rewards.metrics import has_signal, mean_score, reward_metrics
    from covey.rewards.ray_actors import on_ray
    from covey.rewards.scorer import Scorer, Scoring

_WHERE = {
    "BUILTIN": "builtin.registry:BUILTIN",
    "Combiner": "combining:Combiner",
    "JudgeReward": "builtin.judge_rewards:JudgeReward",
    "ModelReward": "builtin.reward_model:ModelReward",
    "PairwiseJudgeReward": "builtin.judge_rewards:PairwiseJudgeReward",
    "RewardSpec": "contract:RewardSpec",
    "Scorer": "scorer:Scorer",
    "Scoring": "scorer:Scoring",
    "advantage_shares": "combining:advantage_shares",
    "accuracy_reward": "builtin.math:accuracy_reward",
    "check": "contract:check",
    "get_cosine_scaled_reward": "builtin.length_scaled:get_cosine_scaled_reward",
    "get_repetition_penalty_reward": "builtin.text:get_repetition_penalty_reward",
    "get_soft_overlong_punishment": "builtin.text:get_soft_overlong_punishment",
    "has_signal": "metrics:has_signal",
    "mean_score": "metrics:mean_score",
    "on_ray": "ray_actors:on_ray",
    "per_completion": "decorators:per_completion",
    "reasoning_accuracy_reward": "builtin.length_scaled:reasoning_accuracy_reward",
    "resolve": "builtin.registry:resolve",
    "reward": "decorators:reward",
    "reward_metrics": "metrics:reward_metrics",
    "think_format_reward": "builtin.text:think_format_reward",
}
"""Public names, TRL's among them, and where they live; imported when first used."""

__all__ = [
    "BUILTIN",
    "Combiner",
    "JudgeReward",
    "ModelReward",
    "PairwiseJudgeReward",
    "RewardSpec",
    "Scorer",
    "Scoring",
    "accuracy_reward",
    "advantage_shares",
    "check",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "has_signal",
    "mean_score",
    "on_ray",
    "per_completion",
    "reasoning_accuracy_reward",
    "resolve",
    "reward",
    "reward_metrics",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _WHERE[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
