"""`_calculate_rewards` of a trainer's subclass: all scores of a batch by one method, which may ask the rewards itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covey.errors import CoveyError, RewardError
from covey.raised import with_place
from covey.rewards.calling.outcome import Outcome
from covey.rewards.contract import Batch

Calculate = Callable[[list[dict[str, Any]], list[Any], list[Any], list[list[int]]], Any]
"""(rows, prompts, completions, completion ids) -> [N, R], as TRL's method of that name."""


@dataclass(eq=False)
class Replaced:
    """Scores a batch by `calculate`. Raises RewardError for a result that is not [N, R] and for any exception."""

    calculate: Calculate
    names: Sequence[str]
    _outcomes: list[Outcome] = field(default_factory=list)

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """The rewards were called: their failures, seconds and logged values count, even if their scores are replaced."""
        self._outcomes = list(outcomes)

    def __call__(self, batch: Batch) -> list[Outcome]:
        """One outcome for each reward, [N] each."""
        self._outcomes = []
        try:
            returned = self.calculate(batch.rows(), batch.prompts, batch.completions, batch.completion_ids)
            scores = torch.as_tensor(returned, dtype=torch.float32).detach().cpu()
        except CoveyError:
            raise
        except Exception as error:
            raise RewardError(f"_calculate_rewards raised {with_place(error)}.") from error
        shape = (len(batch), len(self.names))
        if tuple(scores.shape) != shape:
            raise RewardError(
                f"_calculate_rewards returned shape {list(scores.shape)}; return one score for each of {shape[0]} completions "
                f"by each of {shape[1]} rewards, [{shape[0]}, {shape[1]}]."
            )
        called = self._outcomes if all(len(outcome.scores) == shape[0] for outcome in self._outcomes) else []
        return [self._outcome(name, called[r] if called else None, scores[:, r]) for r, name in enumerate(self.names)]

    def _outcome(self, name: str, called: Outcome | None, scores: Tensor) -> Outcome:
        outcome = Outcome(name, scores.clone()) if called is None else called
        outcome.scores = scores.clone()
        outcome.failures = [
            failure for failure in outcome.failures if bool(scores[failure.start : failure.stop].isnan().any())
        ]
        return outcome
