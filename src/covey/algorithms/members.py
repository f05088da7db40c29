"""Weights of completions that another model wrote, as members of an ensemble do: importance corrections, without gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from covey.errors import ConfigError


@dataclass(frozen=True)
class MemberWeight:
    """Filtered, truncated importance weight: `min(pi / mu, high)` a token, 0 for tokens that the filter removes.

    `pi` is the policy at the rollout, `mu` the member that drew the token. The filter takes out completions of negative advantage
    that the policy would hardly write: pushing them down further teaches nothing and spoils the distribution. That is where the
    mean of `log mu - log pi` over the tokens that count is above `drift` (nats a token; None: no filter). F-TIS, 2026,
    <https://arxiv.org/abs/2605.22537>.
    """

    high: float = 2.0
    drift: float | None = 0.5

    def __post_init__(self) -> None:
        if not self.high > 0:
            raise ConfigError(f"MemberWeight(high={self.high!r}): the largest weight must be above 0.")
        if self.drift is not None and not self.drift >= 0:
            raise ConfigError(f"MemberWeight(drift={self.drift!r}): give nats a token of 0 or more, or None.")

    def __call__(self, policy_logp: Tensor, member_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """[N, T] from log-probabilities [N, T], `mask` [N, T] bool and `advantages` [N, 1] or [N, T]; 0 off the mask."""
        gap = torch.where(mask, policy_logp - member_logp, torch.zeros_like(policy_logp)).detach()
        weight = gap.clamp(-60.0, 60.0).exp().clamp(max=self.high)
        if self.drift is not None:
            lengths = mask.sum(-1, keepdim=True).clamp(min=1)
            is_far = -gap.sum(-1, keepdim=True) / lengths > self.drift  # [N, 1]
            weight = torch.where(is_far & (advantages < 0), 0.0, weight)
        return torch.where(mask, weight, torch.zeros_like(weight))
