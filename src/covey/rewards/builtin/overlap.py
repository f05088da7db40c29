"""ROUGE: words shared with a reference, for summaries, with length in check."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from covey.declared import Count, Range, checked_dataclass
from covey.rewards.builtin.choice import common_length, gold_column
from covey.rewards.builtin.text import text_of, values_in, words_in
from covey.rewards.decorators import reward

_MOST_WORDS = 5000
LengthRatio = Annotated[float, Range(at_least=1, why="At 1 a text is as long as its reference.")]

Words = Sequence[str]


def words_of(text: str) -> list[str]:
    """Lower-case words of letters and digits, at most 5,000; of scripts without spaces each character is one (`words_in`).

    >>> words_of("It's 3.5, no?")
    ['it', 's', '3', '5', 'no']
    """
    return words_in(text.casefold())[:_MOST_WORDS]


def ngrams(words: Words, size: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


@checked_dataclass(frozen=True)
class Rouge:
    """ROUGE F1 against the column `reference` (or else `summary`, `solution`, `answer`); the best of several references.

    `1` and `2` count shared n-grams as multisets, `L` the longest common subsequence of words (Lin 2004); no stemming. With
    `max_ratio`, a text of more than that many times the reference's words has its score divided by the excess, so that
    recall cannot be bought by length. `None` without a reference. The first 5,000 words are read.
    """

    kind: Literal["1", "2", "L", 1, 2] = "L"
    max_ratio: LengthRatio | None = None
    needs_one_of = ("reference", "summary", "solution", "answer")
    __name__ = "rouge"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rows = zip(map(text_of, completions), map(several, gold_column(self, columns)), strict=True)
        return [max((self._score(text, reference) for reference in row), default=None) for text, row in rows]

    def _score(self, text: str, reference: str) -> float:
        words, reference_words = words_of(text), words_of(reference)
        if str(self.kind) == "L":
            shared, num_words, num_reference = common_length(reference_words, words), len(words), len(reference_words)
        else:
            first, second = Counter(ngrams(words, int(self.kind))), Counter(ngrams(reference_words, int(self.kind)))
            shared, num_words, num_reference = (first & second).total(), first.total(), second.total()
        score = 2 * shared / (num_words + num_reference) if shared else 0.0
        return score / excess(len(words), len(reference_words), self.max_ratio)


def excess(num_words: int, num_reference: int, max_ratio: float | None) -> float:
    """Divisor for a text of `num_words` where the reference has `num_reference`; 1 up to `max_ratio` times as many."""
    return 1.0 if max_ratio is None or not num_reference else max(1.0, num_words / (max_ratio * num_reference))


def several(reference: Any) -> list[str]:
    """The references of a row that have a word; one text or a list of texts."""
    return [str(value) for value in values_in(reference) if str(value).strip()]


@reward(streams=True)
@checked_dataclass(frozen=True)
class Distinct:
    """Distinct n-grams of a text that no other completion of the same prompt has, over all its n-grams.

    The completions of a call are one prompt's. 1 where all is its own, 0 where it is a copy, and 0 for a text shorter than
    an n-gram. Li et al. 2016 ("A Diversity-Promoting Objective Function", distinct-n), credited to single completions.
    Noise is diverse: combine it with a reward for being right.
    """

    n: Count = 2
    __name__ = "distinct"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        grams = [Counter(ngrams(words_of(text_of(c)), self.n)) for c in completions]
        holders: Counter[tuple[str, ...]] = Counter(gram for counts in grams for gram in counts)
        alone = [sum(holders[gram] == 1 for gram in counts) for counts in grams]
        return [count / counts.total() if counts else 0.0 for count, counts in zip(alone, grams, strict=True)]
