"""The family by name: each a composition with its paper's settings, changed by keyword here or by `.replace` afterwards.

Every preset takes `kl` (a coefficient for k3 in the loss, an `alg.KL`, or None; None unless its docstring names one), `reference` (a
rule by which the reference model follows the policy, such as `alg.Every(512, alpha=0.6)`), and `correction`, the importance weight
between sampler and learner: by default TRL's, which is 1 wherever the sampler's numbers are the learner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from covey.algorithms.advantages import GroupNormalized
from covey.algorithms.aggregation import Constant, RowMean, SequenceMean, SequenceSum, batch_token_mean, token_mean
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.baselines import GPG, OPO, LeaveOneOut, Shaped, SoftOverlong
from covey.algorithms.critic import ClippedError, Critic
from covey.algorithms.importance import Correction
from covey.algorithms.making import Common, KLOption, in_reward, level_of, made
from covey.algorithms.newer_presets import (
    cfpo,
    decoupled_ppo,
    dro,
    fipo,
    gdpo,
    gfpo,
    gigpo,
    maxrl,
    otb,
    pkpo,
    real,
    tpo,
)
from covey.algorithms.objectives import Clipped, policy_gradient
from covey.algorithms.reference import keep
from covey.algorithms.surrogates import CISPO, DPPO, GMPO, SAPO, VESPO, GSPOToken
from covey.algorithms.teacher_presets import iw_opd, mopd, opsd, rlsd, sdar, sdft, sdpo
from covey.algorithms.token_advantages import GAE, ReinforcePlusPlus, ReMax
from covey.types import Advantage, ReferenceRule, Weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


def grpo(
    *,
    low: float = 0.2,
    high: float | None = None,
    scale: Literal["group", "batch", "none"] = "group",
    **common: Unpack[Common],
) -> Algorithm:
    """Group-relative policy optimization: rewards normalized in the group, clipped ratio, every completion weighs the same.

    KL of 0.04 to the reference model in the loss. Shao et al. 2024, "DeepSeekMath".
    """
    return made("grpo", GroupNormalized(scale=scale), Clipped(low, high), SequenceMean(), common, kl=0.04)


def dapo(
    *,
    low: float = 0.2,
    high: float = 0.28,
    max_length: int | None = None,
    overlong_buffer: int = 4096,
    **common: Unpack[Common],
) -> Algorithm:
    """Clip-higher and a mean over all tokens of the step, without KL. Yu et al. 2025, "DAPO".

    `max_length` adds the paper's soft overlong punishment over the last `overlong_buffer` tokens before it (paper: 20480 and
    4096). Its dynamic sampling and its mask of truncated completions are options of the trainer, not of the loss.
    """
    advantage: Advantage = GroupNormalized()
    if max_length is not None:
        advantage = Shaped(advantage, (SoftOverlong(max_length, overlong_buffer),))
    return made("dapo", advantage, Clipped(low, high), token_mean, common)


def dr_grpo(*, low: float = 0.2, high: float | None = None, **common: Unpack[Common]) -> Algorithm:
    """GRPO without its two biases: no division by the deviation, a constant denominator instead of lengths.

    Liu et al. 2025, "Understanding R1-Zero-Like Training".
    """
    return made("dr_grpo", GroupNormalized(scale="none"), Clipped(low, high), Constant(), common)


def bnpo(*, low: float = 0.2, high: float | None = None, **common: Unpack[Common]) -> Algorithm:
    """TRL's `bnpo`: the mean over the tokens of a batch, here of the whole optimizer step, so that no split changes it.

    Not the Beta normalization of Xiao et al. 2025, which shares the letters.
    """
    return made("bnpo", GroupNormalized(), Clipped(low, high), batch_token_mean, common)


def gspo(*, low: float = 3e-4, high: float = 4e-4, **common: Unpack[Common]) -> Algorithm:
    """One ratio a sequence, the geometric mean of its tokens', clipped very near 1. Zheng et al. 2025, "GSPO", section 5.1."""
    objective = Clipped(low, high, level="sequence")
    return made("gspo", GroupNormalized(), objective, SequenceMean(), common, read=level_of)


def gspo_token(*, low: float = 3e-4, high: float = 4e-4, **common: Unpack[Common]) -> Algorithm:
    """GSPO with each token's own gradient, so that advantages may differ by token. Zheng et al. 2025, section 4.3."""
    return made("gspo_token", GroupNormalized(), GSPOToken(low, high), SequenceMean(), common)


def gmpo(*, low: float = 0.4, high: float | None = None, **common: Unpack[Common]) -> Algorithm:
    """The geometric mean of token ratios, each clipped to (e^-0.4, e^0.4): robust to outliers. Zhao et al. 2025, "GMPO"."""
    return made("gmpo", GroupNormalized(), GMPO(low, high), RowMean(), common)


def cispo(*, high: float = 5.0, **common: Unpack[Common]) -> Algorithm:
    """The clipped ratio only weighs the gradient of the log-probability, so no token is lost. MiniMax-M1 2025.

    `high` is the ceiling of the ratio itself; 5 as in ScaleRL (Khatri et al. 2025).
    """
    return made("cispo", GroupNormalized(), CISPO(high), token_mean, common)


def sapo(*, positive: float = 1.0, negative: float = 1.05, **common: Unpack[Common]) -> Algorithm:
    """A smooth gate on the ratio, a little narrower for negative advantages. Gao et al. 2025, "SAPO"."""
    return made("sapo", GroupNormalized(), SAPO(positive, negative), SequenceMean(), common)


def luspo(*, low: float = 2e-3, high: float = 2.5e-3, **common: Unpack[Common]) -> Algorithm:
    """GSPO with each sequence's loss times its length, which takes away the pull towards short answers.

    arXiv 2602.05261, "LUSPO", section 5.1.
    """
    objective = Clipped(low, high, level="sequence")
    return made("luspo", GroupNormalized(), objective, SequenceSum(), common, read=level_of)


def vespo(
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    kl: KLOption = None,
    reference: ReferenceRule = keep,
    correction: Weight | None = Correction(level="token", mode="truncate"),  # noqa: B008  # frozen
) -> Algorithm:
    """A smooth weight on whole sequences that falls off on both sides of 1. arXiv 2602.10693, "VESPO".

    The correction between sampler and learner is part of that weight instead of multiplying the loss.
    """
    objective = VESPO(k_positive, lambda_positive, k_negative, lambda_negative, correction)
    return made("vespo", GroupNormalized(), objective, token_mean, Common(kl=kl, reference=reference, correction=None))


def dppo(
    *,
    measure: Literal["tv", "kl"] = "tv",
    low: float | None = None,
    high: float | None = None,
    kl: KLOption = None,
    reference: ReferenceRule = keep,
) -> Algorithm:
    """A trust region on how much a token's probability moved, by total variation ("tv") or "kl". Qi et al. 2026, "DPPO".

    Bounds of 0.2 for "tv" and 0.05 for "kl", which prime-rl and SkyRL use. The old policy is the sampler itself, so there is no
    correction.
    """
    bound = 0.05 if measure == "kl" else 0.2
    objective = DPPO(bound if low is None else low, bound if high is None else high, measure)
    return made("dppo", GroupNormalized(), objective, token_mean, Common(kl=kl, reference=reference, correction=None))


def rloo(*, low: float = 0.2, high: float | None = None, **common: Unpack[Common]) -> Algorithm:
    """REINFORCE with the mean of the other completions as baseline, a completion as one action, KL of 0.05 in the reward.

    Ahmadian et al. 2024, "Back to Basics"; the clip on the ratio of whole sequences is TRL's and idle on-policy.
    """
    objective = Clipped(low, high, level="product")
    return made("rloo", LeaveOneOut(), objective, RowMean(), common, kl=0.05, read=in_reward)


def reinforce_pp(
    *, gamma: float = 1.0, baseline: bool = False, low: float = 0.2, high: float | None = None, **common: Unpack[Common]
) -> Algorithm:
    """Reward-to-go normalized over the whole batch instead of the group, clipped, KL of 0.01 in the reward. Hu et al. 2025.

    `baseline=True` is REINFORCE++-baseline: the group's mean is taken first.
    """
    advantage = ReinforcePlusPlus(gamma, baseline)
    return made("reinforce_pp", advantage, Clipped(low, high), token_mean, common, kl=0.01, read=in_reward)


def remax(**common: Unpack[Common]) -> Algorithm:
    """REINFORCE with the reward of the prompt's greedy answer as baseline, KL of 0.05 in the reward. Li et al. 2023, "ReMax"."""
    return made("remax", ReMax(), policy_gradient, SequenceSum(), common, kl=0.05, read=in_reward)


def opo(**common: Unpack[Common]) -> Algorithm:
    """Exactly on-policy REINFORCE with the length-weighted baseline, no KL, no clip. Hao et al. 2025, "OPO"."""
    return made("opo", OPO(), policy_gradient, token_mean, common)


def gpg(**common: Unpack[Common]) -> Algorithm:
    """Plain policy gradient on centred rewards, rescaled for completions that earned nothing. Chu et al. 2025, "GPG"."""
    return made("gpg", GPG(), policy_gradient, token_mean, common)


def ppo(
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    low: float = 0.2,
    high: float | None = None,
    value_clip: float = 0.2,
    value_coefficient: float = 1.0,
    critic_model: Literal["head", "separate"] = "head",
    **common: Unpack[Common],
) -> Algorithm:
    """A critic's generalised advantages, clipped ratio and values, KL in the reward. Schulman et al. 2017.

    Settings of Ouyang et al. 2022, "InstructGPT": KL 0.02, no discount, lambda 0.95. `critic_model="separate"` trains a second
    model for the values, as that paper does, where `"head"` reads the policy's own hidden states.
    """
    algorithm = made("ppo", GAE(gamma, lam), Clipped(low, high), token_mean, common, kl=0.02, read=in_reward)
    return replace(algorithm, critic=Critic(ClippedError(value_clip), value_coefficient, model=critic_model))


PRESETS: Mapping[str, Callable[..., Algorithm]] = {
    preset.__name__: preset
    for preset in (
        *(grpo, dapo, dr_grpo, bnpo, gspo, gspo_token, gmpo, cispo, sapo, luspo, vespo, dppo),
        *(rloo, reinforce_pp, remax, opo, gpg, ppo),
        *(pkpo, maxrl, gdpo, gfpo, gigpo, cfpo, decoupled_ppo, tpo, fipo, real, otb, dro),
        *(rlsd, sdar, iw_opd, mopd, sdpo, opsd, sdft),
    )
}
"""Every preset by name."""
