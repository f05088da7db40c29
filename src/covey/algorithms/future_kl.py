"""Future-KL weights (FIPO): a token counts more where the update so far raises what follows it."""

from typing import ClassVar

import torch
from torch import Tensor

from covey.declared import BelowOne, Limit, checked_dataclass
from covey.types import TokenBatch

_BLOCK = 256
"""Tokens of a block of the discounted sum: one product a block, and memory that does not grow with T squared."""


@checked_dataclass(frozen=True)
class FutureKL:
    """Weight `clip(exp(F_t))` of each token, `F_t = sum_{k >= t} gamma^(k - t) (logp_k - old_logp_k)`, `gamma = 2^(-1 / half_life)`.

    Clipped to `[1, 1 + clip]`, or to `[1 - clip, 1 + clip]` with `both_sides`. Tokens of negative advantage whose ratio is above
    `safe_ratio` get at most 1 and at least 0.8. Tokens whose ratio is above `limit` are left out of the sum. It is 1 everywhere
    in the first update on a rollout, where nothing has moved. "FIPO: Future-KL Influenced Policy Optimization", 2026,
    <https://arxiv.org/abs/2603.19835>; defaults are those of ms-swift.
    """

    half_life: Limit = 32.0
    clip: BelowOne = 0.2
    both_sides: bool = False
    safe_ratio: Limit | None = 4.0
    limit: Limit | None = None
    exempt: ClassVar[tuple[str, ...]] = ("policy_gradient",)

    def __call__(self, tokens: TokenBatch) -> Tensor:
        low = 1 - self.clip if self.both_sides else 1.0
        weight = self.future(tokens).exp().clamp(low, 1 + self.clip)
        if self.safe_ratio is None:
            return weight
        return torch.where(self._is_unsafe(tokens), weight.clamp(0.8, 1.0), weight)

    def future(self, tokens: TokenBatch) -> Tensor:
        """[N, T], the discounted sum of log-ratios from each token on, without gradient; 0 off the mask."""
        moved = tokens.log_ratio.detach()
        if self.limit is not None:
            moved = moved.masked_fill(tokens.ratio > self.limit, 0.0)
        return torch.where(tokens.mask, discounted_future(moved, 2.0 ** (-1.0 / self.half_life)), 0.0)

    def metrics(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """`fipo/future_kl` and `fipo/weight`, means over tokens, and `fipo/unsafe`, the share that `safe_ratio` holds back."""
        unsafe = self._is_unsafe(tokens).float() if self.safe_ratio is not None else torch.zeros_like(tokens.logp)
        return {"fipo/future_kl": self.future(tokens), "fipo/weight": self(tokens), "fipo/unsafe": unsafe}

    def _is_unsafe(self, tokens: TokenBatch) -> Tensor:
        assert self.safe_ratio is not None
        return (tokens.advantages < 0) & (tokens.ratio > self.safe_ratio)


def discounted_future(x: Tensor, gamma: float) -> Tensor:
    """[N, T], `sum_{k >= t} gamma^(k - t) x_k`, from the last block to the first."""
    width = x.shape[-1]
    place = torch.arange(min(_BLOCK, width), device=x.device, dtype=x.dtype)
    distance = place[:, None] - place
    decay = torch.where(distance >= 0, gamma ** distance.clamp(min=0), 0.0)  # [k, t]
    later = x.new_zeros(len(x), 1)
    sums = []
    for start in reversed(range(0, width, _BLOCK)):
        block = x[:, start : start + _BLOCK]
        size = block.shape[-1]
        block_sums = block @ decay[:size, :size] + later * gamma ** (size - place[:size])
        later = block_sums[:, :1]
        sums.append(block_sums)
    return torch.cat(sums[::-1], -1) if sums else x
