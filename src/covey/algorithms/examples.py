"""Supervised examples in addition to the reward: the negative log-likelihood of right answers as a term of the loss."""

from typing import Any

import torch
from torch import Tensor

from covey.algorithms.aggregation import token_mean
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.objectives import policy_gradient
from covey.declared import Count, Positive, checked_dataclass
from covey.types import Scores, TokenBatch


@checked_dataclass(frozen=True)
class SFT:
    """`weight x` the mean `-log p` of a completion token over `batch_size` examples a step, added to the loss of the policy's completions.

    `dataset` is what `--dataset` takes, or a loaded set, with `prompt` and `completion`, or with `messages` that end with the
    assistant. The learner draws and computes its rows: the same ones for the same step and seed. Log-probabilities are those of
    temperature 1. As the pre-training loss added to PPO in Ouyang et al. 2022, "InstructGPT", eq. 2.
    """

    dataset: Any
    weight: Positive = 0.1
    batch_size: Count = 8
    is_apart = True
    """Its rows are not those of the rollout: the learner adds the term."""

    def __call__(self, tokens: TokenBatch) -> Tensor:
        return torch.zeros_like(tokens.logp)


def sft(dataset: Any, weight: float = 0.1, batch_size: int = 8) -> SFT:
    """A supervised term as a regularizer: `alg.grpo().replace(regularizers=(alg.sft("warm.jsonl", 0.1),))`."""
    return SFT(dataset, weight, batch_size)


def _every_one(scores: Scores) -> Tensor:
    return torch.ones_like(scores.total)


def supervised() -> Algorithm:
    """Supervised fine-tuning: `-log p`, the mean over the completion tokens of a step. Every completion is a right one."""
    return Algorithm(name="sft", advantage=_every_one, objective=policy_gradient, aggregate=token_mean)
