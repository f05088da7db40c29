"""Presets from papers of 2025 and 2026 that change one part of GRPO; `presets.py` lists them with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from covey.algorithms.advantages import GroupNormalized
from covey.algorithms.aggregation import Constant, SequenceMean, SequenceSum, token_mean
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.baselines import GroupFiltered, MaxRL, NormalizeThenSum
from covey.algorithms.future_kl import FutureKL
from covey.algorithms.importance import Correction
from covey.algorithms.labels import RewardsAsLabels
from covey.algorithms.making import Common, KLOption, made
from covey.algorithms.objectives import Clipped
from covey.algorithms.pass_at_k import PKPO
from covey.algorithms.reference import keep
from covey.algorithms.surrogates import DRO, QuadraticPenalty
from covey.algorithms.target_policy import TargetPolicy
from covey.algorithms.token_advantages import OptimalTokenBaseline
from covey.algorithms.turn_advantages import GiGPO
from covey.types import ReferenceRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


def pkpo(
    *,
    k: int = 4,
    baseline: Literal["minus_one", "leave_one_out"] = "minus_one",
    low: float = 0.2,
    high: float | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """The gradient of max@k (pass@k for rewards of 0 and 1), unbiased for any `k` up to the number of completions.

    Walder and Karkhanis 2025, "Pass@K Policy Optimization", <https://arxiv.org/abs/2505.15201>. A constant denominator instead of
    lengths, which would bias it.
    """
    return made("pkpo", PKPO(k, baseline), Clipped(low, high), Constant(), common)


def maxrl(*, low: float = 0.2, high: float | None = None, **common: Unpack[Common]) -> Algorithm:
    """Rewards divided by the group's mean: the more completions, the closer to the gradient of log(success rate).

    Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", <https://arxiv.org/abs/2602.02710>. A constant denominator
    instead of lengths, which would bias it.
    """
    return made("maxrl", MaxRL(), Clipped(low, high), Constant(), common)


def gdpo(*, low: float = 0.2, high: float | None = None, **common: Unpack[Common]) -> Algorithm:
    """Several rewards, each normalized within the group before they are added, so that none drowns another.

    Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization", <https://arxiv.org/abs/2601.05242>.
    """
    return made("gdpo", NormalizeThenSum(), Clipped(low, high), SequenceMean(), common)


def gfpo(
    *,
    keep_best: int = 4,
    by: Literal["length", "efficiency"] = "length",
    low: float = 0.2,
    high: float | None = None,
    **common: Unpack[Common],
) -> Algorithm:
    """Learn only from the `keep_best` shortest completions of each group, or those of most reward a token.

    Shrivastava et al. 2025, "Sample More to Think Less: Group Filtered Policy Optimization", <https://arxiv.org/abs/2508.09726>.
    """
    advantage = GroupFiltered(GroupNormalized(), keep_best, by)
    return made("gfpo", advantage, Clipped(low, high), token_mean, common)


def gigpo(
    *, weight: float = 1.0, gamma: float = 0.95, low: float = 0.2, high: float | None = None, **common: Unpack[Common]
) -> Algorithm:
    """GRPO with advantages of single turns, among the turns that a group took in the same state: for agents and environments.

    Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training", <https://arxiv.org/abs/2505.10978>.
    """
    return made("gigpo", GiGPO(weight, gamma), Clipped(low, high), token_mean, common)


def cfpo(*, epsilon: float = 0.2, **common: Unpack[Common]) -> Algorithm:
    """A quadratic penalty on the ratio instead of a clip, so that no token loses its gradient.

    Cagatan et al. 2026, "Clipping-Free Policy Optimization", <https://arxiv.org/abs/2601.22801>.
    """
    return made("cfpo", GroupNormalized(), QuadraticPenalty(epsilon), SequenceMean(), common)


def tpo(
    *, temperature: float = 1.0, level: Literal["product", "sequence"] = "product", **common: Unpack[Common]
) -> Algorithm:
    """The policy is fitted by cross-entropy to `q ∝ p_old exp(A / temperature)` over each group, with no clip.

    Kaddour 2026, "Target Policy Optimization", <https://arxiv.org/abs/2604.06159>, whose advantages divide by the population's
    standard deviation where GRPO's divide by the sample's: a temperature of `sqrt((G - 1) / G)` is the same target.
    """
    return made("tpo", GroupNormalized(), TargetPolicy(temperature, level), SequenceSum(), common)


def fipo(
    *, half_life: float = 32.0, clip: float = 0.2, low: float = 0.2, high: float | None = 0.28, **common: Unpack[Common]
) -> Algorithm:
    """DAPO's loss, in which a token weighs up to `1 + clip` times as much where the update raises what follows it.

    "FIPO: Future-KL Influenced Policy Optimization", 2026, <https://arxiv.org/abs/2603.19835>. It is DAPO in the first update on
    a rollout; give `num_iterations` or `steps_per_generation` above 1.
    """
    algorithm = made("fipo", GroupNormalized(), Clipped(low, high), token_mean, common)
    return algorithm.replace(weights=(FutureKL(half_life, clip), *algorithm.weights), name="fipo")


def real(*, temperature: float = 0.5, **common: Unpack[Common]) -> Algorithm:
    """Each group is a classification: completions above the group's mean reward go up, the others down, with bounded gradients.

    "Rewards as Labels: Revisiting RLVR from a Classification Perspective", 2026, <https://arxiv.org/abs/2602.05630>.
    """
    return made("real", GroupNormalized(), RewardsAsLabels(temperature), SequenceMean(), common)


def otb(*, zero_tail: bool = True, low: float = 0.2, high: float | None = None, **common: Unpack[Common]) -> Algorithm:
    """GRPO's loss with a baseline of its own for each token, that of least variance, and no division by a deviation.

    "Optimal Token Baseline", 2026, <https://arxiv.org/abs/2602.07078>.
    """
    return made("otb", OptimalTokenBaseline(zero_tail), Clipped(low, high), token_mean, common)


def dro(*, beta: float = 0.1, **common: Unpack[Common]) -> Algorithm:
    """The policy gradient with a quadratic penalty on the log-ratio instead of a clip.

    verl's `dro`; Richemond et al. 2024, "Offline Regularised Reinforcement Learning", <https://arxiv.org/abs/2405.19107>.
    """
    return made("dro", GroupNormalized(), DRO(beta), token_mean, common)


def decoupled_ppo(
    *,
    low: float = 0.2,
    high: float | None = None,
    cap: float | None = 5.0,
    kl: KLOption = None,
    reference: ReferenceRule = keep,
) -> Algorithm:
    """The clip around the learner's policy before the update, and an importance weight from the (older) sampler to it.

    `(prox / behaviour) min(u A, clip(u) A)`, `u = policy / prox`; tokens whose weight exceeds `cap` are left out. Hilton et al.
    2021, "Batch size-invariance for policy optimization"; for asynchronous rollouts Fu et al. 2025, "AReaL",
    <https://arxiv.org/abs/2505.24298>, eq. 5. Without a critic; `.replace(critic=...)` adds one.
    """
    common = Common(kl=kl, reference=reference, correction=Correction("token", "mask", cap))
    return made("decoupled_ppo", GroupNormalized(), Clipped(low, high), token_mean, common)
