"""Rewards for variety among the completions of one prompt: distinct n-grams and self-BLEU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError
from covey.rewards.builtin.overlap import ngrams, sentence_bleu, words_of
from covey.rewards.builtin.text import text_of
from covey.rewards.decorators import reward


@reward(streams=True)
@dataclass(frozen=True)
class Distinct:
    """Distinct n-grams of a text that no other completion of the same prompt has, over all its n-grams.

    The completions of a call are one prompt's. 1 where all is its own, 0 where it is a copy, and 0 for a text shorter than
    an n-gram. Li et al. 2016 ("A Diversity-Promoting Objective Function", distinct-n), credited to single completions.
    Noise is diverse: use it beside a reward for being right.
    """

    n: int = 2
    __name__ = "distinct"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"distinct(n={self.n}) must be at least 1.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        grams = [Counter(ngrams(words_of(text_of(c)), self.n)) for c in completions]
        holders: Counter[tuple[str, ...]] = Counter(gram for own in grams for gram in own)
        alone = [sum(holders[gram] == 1 for gram in own) for own in grams]
        return [count / own.total() if own else 0.0 for count, own in zip(alone, grams, strict=True)]


@reward(streams=True)
@dataclass(frozen=True)
class SelfBleu:
    """Minus the BLEU of a text against the other completions of its prompt: 0 is unlike all of them, -1 a copy of one.

    Zhu et al. 2018 ("Texygen"). An empty text scores -1, for it is alike any other empty one; a prompt's only completion
    scores 0. The first 1,000 words of each text are compared, with at most 64 others.
    """

    max_n: int = 4
    __name__ = "self_bleu"

    def __post_init__(self) -> None:
        if not 1 <= self.max_n <= 8:
            raise ConfigError(f"self_bleu(max_n={self.max_n}) must lie between 1 and 8.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = [words_of(text_of(c))[:1000] for c in completions]
        return [self._score(texts, i) for i in range(len(texts))]

    def _score(self, texts: list[list[str]], own: int) -> float:
        if not texts[own]:
            return -1.0
        others = (texts[:own] + texts[own + 1 :])[:64]
        return -sentence_bleu(texts[own], others, self.max_n)
