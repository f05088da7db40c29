"""Right answers weighed by length, and right answers after a text's reasoning."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from covey.declared import Count, Finite, checked_dataclass
from covey.errors import ConfigError, RewardError
from covey.rewards.builtin.math import accuracy_reward, exact_reward, math_reward
from covey.rewards.builtin.text import text_of
from covey.rewards.contract import needs_one_of

_JUDGES: dict[str, Callable[..., list[float | None]]] = {
    "math": math_reward,
    "exact": exact_reward,
    "accuracy_reward": accuracy_reward,
}


@needs_one_of("answer", "solution")
@checked_dataclass(frozen=True)
class CosineScaled:
    r"""Right answers earn less the longer they are, wrong ones cost less the longer they are.

    `low + (high - low) / 2 * (1 + cos(pi * length / max_len))` with `length` in tokens, at most `max_len`; low and high are
    `min_value_correct` and `max_value_correct` for a right answer, `max_value_wrong` and `min_value_wrong` for a wrong one.
    Yeo et al. 2025 ("Demystifying Long Chain-of-Thought Reasoning"), appendix C.1; parameters named as in TRL. Which answers
    are right says `judge`: the built-in reward of that name. `None` where it abstains.
    """

    max_len: Count
    min_value_wrong: Finite = -1.0
    max_value_wrong: Finite = -0.5
    min_value_correct: Finite = 0.5
    max_value_correct: Finite = 1.0
    judge: Literal["math", "exact", "accuracy_reward"] = "math"
    __name__ = "cosine_scaled_reward"  # TRL's name in the metrics

    def __post_init__(self) -> None:
        ladder = (self.min_value_wrong, self.max_value_wrong, self.min_value_correct, self.max_value_correct)
        if list(ladder) != sorted(ladder):
            raise ConfigError(
                f"cosine: min_value_wrong, max_value_wrong, min_value_correct, max_value_correct are {ladder}; they must rise, "
                "or a wrong answer may earn more than a right one."
            )

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        verdicts = _JUDGES[self.judge](completions=completions, **columns)
        return [
            None if verdict is None else self._scaled(verdict > 0.5, len(ids))
            for verdict, ids in zip(verdicts, completion_ids, strict=True)
        ]

    def _scaled(self, is_right: bool, length: int) -> float:
        wrong, right = (self.max_value_wrong, self.min_value_wrong), (self.min_value_correct, self.max_value_correct)
        low, high = right if is_right else wrong
        return low + (high - low) / 2 * (1 + math.cos(math.pi * min(length / self.max_len, 1.0)))


get_cosine_scaled_reward = partial(CosineScaled, judge="accuracy_reward")
"""TRL's name for `CosineScaled`, with TRL's judge."""


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    **columns: Any,
) -> list[float | None]:
    """TRL's reward of this name: `accuracy_reward` of what follows the last delimiter (`</think>`); 0.0 without one.

    The first of `reasoning_delimiters` that the text holds counts. `None` where the solution cannot be parsed.
    """
    ends = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    if not all(ends):
        raise RewardError("reasoning_accuracy_reward: a delimiter is empty; give texts such as '</think>'.")
    answers = [_after(text_of(completion), ends) for completion in completions]
    finished = [i for i, answer in enumerate(answers) if answer is not None]
    judged = accuracy_reward([answers[i] for i in finished], [solution[i] for i in finished])
    scores: list[float | None] = [0.0] * len(answers)
    for i, score in zip(finished, judged, strict=True):
        scores[i] = score
    return scores


def _after(text: str, ends: Sequence[str]) -> str | None:
    marker = next((end for end in ends if end in text), None)
    return None if marker is None else text.rsplit(marker, 1)[1]
