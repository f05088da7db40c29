"""Advantages of single tokens, `[P, G, T]`: reward-to-go, REINFORCE++, ReMax, GAE, and baselines by position.

A completion's reward sits at its last token that the model wrote; rewards of single tokens sit where they are, and a KL in
the reward is taken from each token. Tokens the model did not write are skipped: they neither cost time nor earn.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covey.algorithms.advantages import centred, sequence_rewards
from covey.declared import Share, checked_dataclass
from covey.errors import ConfigError
from covey.types import Scores


def token_rewards(scores: Scores) -> Tensor:
    """[P, G, T], the reward of each token, 0 off the mask and for unscored completions."""
    total, mask = scores.total, scores.mask
    rewards = torch.zeros(mask.shape, dtype=total.dtype, device=mask.device)
    if not mask.shape[-1]:
        return rewards
    position = torch.arange(mask.shape[-1], device=mask.device)
    last = (mask * (position + 1)).amax(-1, keepdim=True) - 1  # [P, G, 1], -1 without any
    rewards = torch.where((position == last) & mask, total.nan_to_num(0.0).unsqueeze(-1), rewards)
    if scores.per_token is not None:
        rewards = rewards + scores.per_token * mask
    if scores.kl is not None:
        rewards = rewards - scores.kl * mask
    return rewards.masked_fill(total.isnan().unsqueeze(-1), 0.0)


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0, *, across_gaps: bool = True) -> Tensor:
    """[..., T], `G_t = r_t + gamma G_next` over tokens where `mask`, 0 elsewhere.

    `across_gaps=False` lets a masked-out token end the sum, as verl's REINFORCE++ does.
    """
    out = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[..., 0]) if rewards.shape[-1] else rewards
    for t in range(rewards.shape[-1] - 1, -1, -1):
        here = rewards[..., t] + gamma * later
        stays = later if across_gaps else torch.zeros_like(later)
        later = torch.where(mask[..., t], here, stays)
        out[..., t] = torch.where(mask[..., t], here, torch.zeros_like(here))
    return out


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """[..., T], generalised advantage estimation over tokens where `mask`, 0 elsewhere. Schulman et al. 2016, eq. 16.

    `delta = r_t + gamma V_next - V_t`, `A_t = delta + gamma lam A_next`, from 0 after the last token; next is the next token
    where `mask`.
    """
    out = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[..., 0]) if rewards.shape[-1] else rewards
    next_advantage = next_value
    for t in range(rewards.shape[-1] - 1, -1, -1):
        counts = mask[..., t]
        advantage = rewards[..., t] + gamma * next_value - values[..., t] + gamma * lam * next_advantage
        next_advantage = torch.where(counts, advantage, next_advantage)
        next_value = torch.where(counts, values[..., t], next_value)
        out[..., t] = torch.where(counts, advantage, torch.zeros_like(advantage))
    return out


def whiten(x: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + epsilon)` over all tokens where `mask`, 0 elsewhere; long rows weigh more.

    The sample variance; fewer than two tokens, or all equal, give 0.
    """
    values = x[mask]
    if values.numel() < 2:
        return torch.zeros_like(x)
    apart = torch.where(mask, x - values.mean(), torch.zeros_like(x))
    if not (values.amax() - values.amin() > 4 * torch.finfo(x.dtype).eps * values.abs().amax()):
        return torch.zeros_like(x)
    return apart / (values.var() + epsilon).sqrt()


def _scored(scores: Scores) -> Tensor:
    """[P, G, T] bool, tokens sampled by the model in scored completions."""
    return scores.mask & ~scores.total.isnan().unsqueeze(-1)


@checked_dataclass(frozen=True)
class ReinforcePlusPlus:
    """Discounted reward-to-go, whitened over all tokens of the rollout: no group, no critic. REINFORCE++, Hu et al. 2025.

    `baseline=True` first takes the group's mean from the rewards (REINFORCE++-baseline); a group of one by
    `keeps_single` then keeps its reward, as in verl, or gets 0.
    """

    gamma: Share = 1.0
    baseline: bool = False
    keeps_single: bool = False
    across_gaps: bool = True
    exempt: ClassVar[tuple[str, ...]] = ("tied_groups",)

    def __post_init__(self) -> None:
        if self.baseline and self.gamma != 1.0:
            raise ConfigError(
                f"gamma={self.gamma} discounts rewards-to-go, which baseline=True does not take; leave one out."
            )

    def __call__(self, scores: Scores) -> Tensor:
        mask = _scored(scores)
        if self.baseline:
            apart = centred(sequence_rewards(scores), "keep" if self.keeps_single else "zero")
            return whiten(apart.nan_to_num(0.0).unsqueeze(-1) * mask, mask)
        return whiten(self.returns(scores), mask)

    def returns(self, scores: Scores) -> Tensor:
        """[P, G, T], discounted reward-to-go before whitening."""
        return reward_to_go(token_rewards(scores), _scored(scores), self.gamma, across_gaps=self.across_gaps)


@dataclass(frozen=True)
class ReMax:
    """Reward-to-go minus the reward of the prompt's greedy answer. Li et al. 2023.

    Needs `scores.greedy` [P]. An unscored completion gets 0, and so do those to a prompt whose greedy answer nobody scored.
    """

    needs: ClassVar[tuple[str, ...]] = ("greedy",)
    exempt: ClassVar[tuple[str, ...]] = ("tied_groups",)

    def __call__(self, scores: Scores) -> Tensor:
        if scores.greedy is None:
            raise ValueError(
                "ReMax compares with the reward of each prompt's greedy answer; the sampler gave none. Use rloo, whose "
                "baseline is the other completions."
            )
        apart = self.returns(scores) - scores.greedy[:, None, None].to(scores.per_function.dtype)
        return torch.where(_scored(scores), apart, torch.zeros_like(apart)).nan_to_num(0.0)

    def returns(self, scores: Scores) -> Tensor:
        """[P, G, T], reward-to-go."""
        return reward_to_go(token_rewards(scores), _scored(scores))


@checked_dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation from a critic's values, whitened over the rollout. PPO, Schulman et al. 2017.

    Needs `scores.values`. `returns(scores)`, the critic's targets, are `A + V` from the advantages before whitening.
    """

    gamma: Share = 1.0
    lam: Share = 0.95
    whitens: bool = True
    needs: ClassVar[tuple[str, ...]] = ("values",)
    exempt: ClassVar[tuple[str, ...]] = ("tied_groups",)

    def __call__(self, scores: Scores) -> Tensor:
        raw = self._raw(scores)
        return whiten(raw, _scored(scores)) if self.whitens else raw

    def returns(self, scores: Scores) -> Tensor:
        """[P, G, T], 0 off the mask."""
        values = _values(scores)
        return torch.where(_scored(scores), self._raw(scores) + values, torch.zeros_like(values))

    def _raw(self, scores: Scores) -> Tensor:
        return gae(token_rewards(scores), _values(scores), _scored(scores), self.gamma, self.lam)


def _values(scores: Scores) -> Tensor:
    if scores.values is None:
        raise ValueError("GAE needs the critic's values; give the algorithm a critic, such as alg.Critic().")
    return scores.values.to(scores.per_function.dtype)


@checked_dataclass(frozen=True)
class OptimalTokenBaseline:
    """`A_t = G_t - B_t`: the baseline of each token that makes the variance of the policy gradient least.

    `G` is the reward-to-go, `B_t` its mean over the group, weighted by `W_t = sum_{j <= t} (1 - 2 p_j + sum_v p_vj^2)`: completions
    that have moved the logits most set it. The t-th tokens that the model wrote are compared. `zero_tail`: no baseline where only
    the longest completion goes on, whose own reward it would be. "Optimal Token Baseline", 2026,
    <https://arxiv.org/abs/2602.07078>, as verl's `tir_optimal_token_baseline`.
    """

    zero_tail: bool = True
    needs: ClassVar[tuple[str, ...]] = ("squared_score",)
    exempt: ClassVar[tuple[str, ...]] = ("tied_groups",)

    def __call__(self, scores: Scores) -> Tensor:
        if scores.squared_score is None:
            raise ValueError(
                "OptimalTokenBaseline needs squared_score, measured by the learner; these scores have none."
            )
        weight = scores.squared_score.to(scores.per_function.dtype)
        return optimal_token_baseline(scores, weight, written_only=True, handle_zero_tail=self.zero_tail)


def optimal_token_baseline(
    scores: Scores,
    squared_score: Tensor,
    *,
    correction: Tensor | None = None,
    written_only: bool = False,
    handle_zero_tail: bool = False,
) -> Tensor:
    """[P, G, T], reward-to-go minus, at each position, its mean over the group weighted by the gradient seen so far.

    `W_t = sum_{j<=t} m w`, `w` the `squared_score`, times `correction^2` where given; `B_t` is the mean of the
    group's reward-to-go weighted by W. Inputs are [P, G, T]; a group of one has B = 0. `written_only` counts positions by
    tokens the model wrote. `handle_zero_tail`: no baseline for the one longest completion beyond the second longest. As in verl.
    """
    mask, returns = _scored(scores), reward_to_go(token_rewards(scores), _scored(scores))
    weight = squared_score if correction is None else squared_score * correction.square()
    weight = torch.where(mask, weight, torch.zeros_like(weight))
    order = _written_first(mask) if written_only else None
    if order is not None:
        mask, returns, weight = (x.gather(-1, order) for x in (mask, returns, weight))
    baseline = _position_baseline(returns, weight.cumsum(-1) * mask, mask)
    if handle_zero_tail:
        baseline = torch.where(_lone_tail(mask), 0.0, baseline)
    advantage = torch.where(mask, returns - baseline, torch.zeros_like(returns))
    return advantage if order is None else torch.zeros_like(advantage).scatter(-1, order, advantage)


def _position_baseline(returns: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """[P, G, T], the same for each member of a group; 0 for a group of one."""
    mean = (returns * weight).sum(1, keepdim=True) / (weight.sum(1, keepdim=True) + 1e-8)
    is_group = mask.any(-1).sum(1)[:, None, None] > 1
    return torch.where(is_group, mean, torch.zeros_like(mean)).expand_as(returns)


def _written_first(mask: Tensor) -> Tensor:
    """[P, G, T] int64, positions with those where `mask` first, in order."""
    return mask.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)


def _lone_tail(mask: Tensor) -> Tensor:
    """[P, G, T] bool, positions of a group's one longest completion from the second longest length on."""
    position = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    lengths = (mask * position).amax(-1)  # [P, G]
    if lengths.shape[1] < 2:
        return torch.zeros_like(mask)
    first, second = lengths.topk(2, dim=1).values.unbind(1)
    is_longest = (lengths == first[:, None]) & (first > second)[:, None]
    return is_longest.unsqueeze(-1) & (position - 1 >= second[:, None, None])
