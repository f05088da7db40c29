"""Scores out of text: TRL's reward functions and reward models, called so that none of them can lose a run."""

from typing import TYPE_CHECKING

from covey.names import lazy

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

__all__ = [
    "BUILTIN", "Combiner", "JudgeReward", "ModelReward", "PairwiseJudgeReward", "RewardSpec", "Scorer",
    "Scoring", "accuracy_reward", "advantage_shares", "check", "get_cosine_scaled_reward",
    "get_repetition_penalty_reward", "get_soft_overlong_punishment", "has_signal", "mean_score", "on_ray",
    "per_completion", "reasoning_accuracy_reward", "resolve", "reward", "reward_metrics", "think_format_reward",
]  # fmt: skip
_WHERE = {
    "builtin.judge_rewards": "JudgeReward PairwiseJudgeReward",
    "builtin.length_scaled": "get_cosine_scaled_reward reasoning_accuracy_reward",
    "builtin.math": "accuracy_reward",
    "builtin.registry": "BUILTIN resolve",
    "builtin.reward_model": "ModelReward",
    "builtin.text": "get_repetition_penalty_reward get_soft_overlong_punishment think_format_reward",
    "combining": "Combiner advantage_shares",
    "contract": "RewardSpec check",
    "decorators": "per_completion reward",
    "metrics": "has_signal mean_score reward_metrics",
    "ray_actors": "on_ray",
    "scorer": "Scorer Scoring",
}
__getattr__ = lazy(__name__, _WHERE)
