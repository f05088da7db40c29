"""Sample routing (SRPO): failed completions that have a right sibling learn from a teacher, all others from their rewards."""

from dataclasses import dataclass, field

from torch import Tensor

from covey.algorithms.advantages import GroupNormalized, sequence_rewards
from covey.algorithms.composing import Wrapping, zeroed
from covey.types import Advantage, Scores, lowest_passing


@dataclass(frozen=True)
class SampleRouted(Wrapping):
    """An advantage, 0 for the failed completions of groups in which one is right: a distillation corrects these.

    A completion is right from a reward of `threshold` on. Failed ones count in the group's mean and deviation. For
    `distill("policy", feedback="best", threshold=...)` with it. Li et al. 2026, section 3.1, <https://arxiv.org/abs/2604.02288>.
    """

    advantage: Advantage = field(default_factory=GroupNormalized)
    threshold: float = 0.5

    @property
    def least_group(self) -> int:
        """Completions a prompt that it takes."""
        return int(getattr(self.advantage, "least_group", 1))

    def __call__(self, scores: Scores) -> Tensor:
        rewards = sequence_rewards(scores)
        lowest = lowest_passing(self.threshold)
        routed = (rewards < lowest) & (rewards >= lowest).any(-1, keepdim=True)
        return zeroed(self.advantage(scores), routed)
