"""Reward for variety among the completions of one prompt: distinct n-grams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError
from covey.rewards.builtin.overlap import ngrams, words_of
from covey.rewards.builtin.text import text_of
from covey.rewards.decorators import reward


@reward(streams=True)
@dataclass(frozen=True)
class Distinct:
    """Distinct n-grams of a text that no other completion of the same prompt has, over all its n-grams.

    The completions of a call are one prompt's. 1 where all is its own, 0 where it is a copy, and 0 for a text shorter than
    an n-gram. Li et al. 2016 ("A Diversity-Promoting Objective Function", distinct-n), credited to single completions.
    Noise is diverse: combine it with a reward for being right.
    """

    n: int = 2
    __name__ = "distinct"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"distinct(n={self.n}) must be at least 1.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        grams = [Counter(ngrams(words_of(text_of(c)), self.n)) for c in completions]
        holders: Counter[tuple[str, ...]] = Counter(gram for counts in grams for gram in counts)
        alone = [sum(holders[gram] == 1 for gram in counts) for counts in grams]
        return [count / counts.total() if counts else 0.0 for count, counts in zip(alone, grams, strict=True)]
