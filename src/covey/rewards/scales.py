"""Scores that mean right and wrong: declared by a reward, or seen to be 0 and 1 and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.types import Group

Scale = tuple[float, float]
"""The score of a wrong completion, and that of a right one."""

_ROUNDING = 1e-6


class Scales:
    """The scale of each of R rewards: as `declared`, else (0, 1) while it has given 0 and 1 alone, else None."""

    def __init__(self, declared: Sequence[Scale | None]) -> None:
        self.declared = list(declared)
        self._seen = [False] * len(self.declared)
        self._is_binary = [True] * len(self.declared)

    @property
    def current(self) -> list[Scale | None]:
        seen = zip(self.declared, self._seen, self._is_binary, strict=True)
        return [declared or ((0.0, 1.0) if was_seen and is_binary else None) for declared, was_seen, is_binary in seen]

    def see(self, groups: Sequence[Group]) -> None:
        """Look at the rewards [G, R] of scored groups."""
        rewards = [group.rewards for group in groups if group.rewards is not None]
        if not rewards:
            return
        scores = torch.cat(rewards)  # [N, R]
        is_scored = ~scores.isnan()
        is_odd = (is_scored & (scores != 0) & (scores != 1)).any(0).tolist()
        self._seen = [was or now for was, now in zip(self._seen, is_scored.any(0).tolist(), strict=True)]
        self._is_binary = [was and not odd for was, odd in zip(self._is_binary, is_odd, strict=True)]

    def state_dict(self) -> dict[str, list[bool]]:
        return {"seen": list(self._seen), "is_binary": list(self._is_binary)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state.get("seen", ())) == len(self.declared):
            self._seen, self._is_binary = list(state["seen"]), list(state["is_binary"])


def seen_scales(groups: Sequence[Group], size: int) -> list[Scale | None]:
    """[size], the scales that these groups' rewards show by themselves."""
    scales = Scales([None] * size)
    scales.see(groups)
    return scales.current


def verdicts(scores: Tensor, weights: Tensor, scales: Sequence[Scale | None]) -> tuple[Tensor, Tensor] | None:
    """[N] bool each: right and wrong completions, by the rewards [N, R] whose scale is known; None where there is none.

    Right: at the upper end of each reward of positive weight, at the lower end of each of negative weight. Wrong: at the lower
    end of each of positive weight. A completion that none of positive weight scored is neither.
    """
    paid = [r for r, scale in enumerate(scales) if scale is not None and weights[r] > 0]
    fined = [r for r, scale in enumerate(scales) if scale is not None and weights[r] < 0]
    if not paid:
        return None
    low = scores.new_tensor([scale[0] if scale else 0.0 for scale in scales])
    high = scores.new_tensor([scale[1] if scale else 0.0 for scale in scales])
    is_low = (scores <= low + _ROUNDING) | scores.isnan()
    is_high = (scores >= high - _ROUNDING) | scores.isnan()
    is_scored = ~scores[:, paid].isnan().all(-1)
    right = is_scored & is_high[:, paid].all(-1) & is_low[:, fined].all(-1)
    return right, is_scored & is_low[:, paid].all(-1)
