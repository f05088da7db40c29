"""Group filtering (GFPO): only some completions of each group are trained on, chosen by length or by reward per token."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from covey.algorithms.advantages import GroupNormalized, sequence_rewards
from covey.algorithms.wrapping import Wrapping, zeroed
from covey.errors import ConfigError
from covey.types import Advantage, Scores


@dataclass(frozen=True)
class GroupFiltered(Wrapping):
    """An advantage within the `keep` completions of each group that rank first; the others get 0 and move no statistic.

    `by="length"` keeps the shortest, `"efficiency"` those of most reward a token. All that tie with the last one are kept. Rejected
    completions still count in the denominators, as in the paper. Shrivastava et al. 2025, section 3,
    <https://arxiv.org/abs/2508.09726>.
    """

    advantage: Advantage = field(default_factory=GroupNormalized)
    keep: int = 2
    by: Literal["length", "efficiency"] = "length"

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 2:
            raise ConfigError(
                f"GroupFiltered keeps {self.keep!r} completions; a group to compare within takes at least 2."
            )
        if self.by not in ("length", "efficiency"):
            raise ConfigError(f"GroupFiltered's by={self.by!r} is neither 'length' nor 'efficiency'.")

    @property
    def least_group(self) -> int:
        """Completions a prompt that it takes."""
        return max(self.keep, getattr(self.advantage, "least_group", 1))

    def __call__(self, scores: Scores) -> Tensor:
        return zeroed(self.advantage(self.inner(scores)), ~self.retained(scores))

    def inner(self, scores: Scores) -> Scores:
        rejected = ~self.retained(scores)
        return replace(scores, per_function=scores.per_function.masked_fill(rejected.unsqueeze(-1), torch.nan))

    def retained(self, scores: Scores) -> Tensor:
        """[P, G] bool, the completions that are trained on; never an unscored one."""
        rewards = sequence_rewards(scores)
        lengths = scores.lengths.to(rewards.dtype)
        rank = lengths if self.by == "length" else -rewards / lengths.clamp(min=1)
        rank = rank.masked_fill(rewards.isnan(), torch.inf)
        last = rank.sort(-1).values[:, min(self.keep, rank.shape[-1]) - 1].unsqueeze(-1)
        return (rank <= last) & ~rewards.isnan()
