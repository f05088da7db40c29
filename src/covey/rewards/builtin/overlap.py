"""Rewards by words shared with a reference: ROUGE and BLEU for summaries and translations, with length in check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from covey.errors import ConfigError, RewardError
from covey.rewards.builtin.choice import common_length
from covey.rewards.builtin.text import text_of, words_in

_MOST_WORDS = 5000

Words = Sequence[str]


def words_of(text: str) -> list[str]:
    """Lower-case words of letters and digits, at most 5,000; of scripts without spaces each character is one (`words_in`).

    >>> words_of("It's 3.5, no?")
    ['it', 's', '3', '5', 'no']
    """
    return words_in(text.casefold())[:_MOST_WORDS]


def ngrams(words: Words, size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


@dataclass(frozen=True)
class Rouge:
    """ROUGE F1 against the column `reference` (or else `summary`, `solution`, `answer`); the best of several references.

    `1` and `2` count shared n-grams as multisets, `L` the longest common subsequence of words (Lin 2004); no stemming. With
    `max_ratio`, a text of more than that many times the reference's words has its score divided by the excess, so that
    recall cannot be bought by length. `None` without a reference. The first 5,000 words are read.
    """

    kind: Literal["1", "2", "L"] = "L"
    max_ratio: float | None = None
    needs_one_of = ("reference", "summary", "solution", "answer")
    __name__ = "rouge"

    def __post_init__(self) -> None:
        if str(self.kind) not in ("1", "2", "L"):
            raise ConfigError(f"rouge(kind={self.kind!r}): use '1', '2' or 'L'.")
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise ConfigError(f"rouge(max_ratio={self.max_ratio}) must be at least 1: the reference's own length.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        references = _references("rouge", columns)
        return [_best(self._score, text_of(c), r) for c, r in zip(completions, references, strict=True)]

    def _score(self, text: str, reference: str) -> float:
        said, wanted = words_of(text), words_of(reference)
        if str(self.kind) == "L":
            shared, of_said, of_wanted = common_length(wanted, said), len(said), len(wanted)
        else:
            first, second = Counter(ngrams(said, int(self.kind))), Counter(ngrams(wanted, int(self.kind)))
            shared, of_said, of_wanted = (first & second).total(), first.total(), second.total()
        score = 2 * shared / (of_said + of_wanted) if shared else 0.0
        return score / _excess(len(said), len(wanted), self.max_ratio)


@dataclass(frozen=True)
class Bleu:
    """Sentence BLEU against the column `reference` (or else `summary`, `solution`, `answer`); of several, the best.

    Geometric mean of clipped n-gram precisions for n = 1 to `max_n`, times `exp(1 - wanted / said)` for a text that is
    shorter (Papineni et al. 2002). From n = 2 on 1 is added above and below, so that a short text is not 0 for one missing
    n-gram (Lin and Och 2004). `max_ratio` as in `rouge`. `None` without a reference.
    """

    max_n: int = 4
    max_ratio: float | None = None
    needs_one_of = ("reference", "summary", "solution", "answer")
    __name__ = "bleu"

    def __post_init__(self) -> None:
        if not 1 <= self.max_n <= 8:
            raise ConfigError(f"bleu(max_n={self.max_n}) must lie between 1 and 8.")
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise ConfigError(f"bleu(max_ratio={self.max_ratio}) must be at least 1: the reference's own length.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        references = _references("bleu", columns)
        return [_best(self._score, text_of(c), r) for c, r in zip(completions, references, strict=True)]

    def _score(self, text: str, reference: str) -> float:
        said, wanted = words_of(text), words_of(reference)
        return sentence_bleu(said, [wanted], self.max_n) / _excess(len(said), len(wanted), self.max_ratio)


def sentence_bleu(said: Words, references: Sequence[Words], max_n: int = 4) -> float:
    """Smoothed BLEU of one text against all of `references`: each n-gram counts as often as in the reference with most.

    >>> sentence_bleu(["a", "b"], [["a", "b"]]), sentence_bleu(["c"], [["a", "b"]])
    (1.0, 0.0)
    """
    if not said or not any(references):
        return 0.0
    logs = []
    for size in range(1, max_n + 1):
        own = Counter(ngrams(said, size))
        most: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            most |= Counter(ngrams(reference, size))
        extra = int(size > 1)
        shared = (own & most).total() + extra
        if not shared:
            return 0.0
        logs.append(math.log(shared / (own.total() + extra)))
    nearest = min((len(reference) for reference in references), key=lambda size: (abs(size - len(said)), size))
    return math.exp(min(0.0, 1 - nearest / len(said)) + sum(logs) / max_n)


def _excess(said: int, wanted: int, max_ratio: float | None) -> float:
    return 1.0 if max_ratio is None or not wanted else max(1.0, said / (max_ratio * wanted))


def _references(name: str, columns: dict[str, Any]) -> Sequence[Any]:
    for column in ("reference", "summary", "solution", "answer"):
        if columns.get(column) is not None:
            found: Sequence[Any] = columns[column]
            return found
    raise RewardError(f"{name} needs a column 'reference'; rename yours, as in --columns reference=highlights.")


def _best(score: Callable[[str, str], float], text: str, reference: Any) -> float | None:
    several = reference if isinstance(reference, list | tuple) else [reference]
    return max((score(text, str(one)) for one in several if one is not None and str(one).strip()), default=None)
