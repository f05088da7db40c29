"""Rewards for answers among a few, or near a gold answer: a choice's letter, a number within a tolerance, words in common."""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from covey.declared import NotNegative, Share, checked_dataclass
from covey.errors import ConfigError, RewardError
from covey.rewards.builtin.answers import (
    MAGNITUDES,
    answer_text_of,
    conclusion,
    gold_answer,
    marked_answer,
    number,
    plain,
)
from covey.rewards.builtin.text import last_tagged, values_in

_ARTICLES = frozenset({"a", "an", "the"})
_CONNECTED = r"(?:answer|choice|option|lösung|réponse|respuesta)"
_LONGEST_COMPARED = 10_000
"""Characters of a text that are compared by similarity, whose time grows with the square."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?(?:[eE][-+]?\d{1,3})?(?!\d|[eE][-+]?\d)"
    rf"(?:[^\S\n](?:{'|'.join(MAGNITUDES)})s?\b(?!-))?",
    re.IGNORECASE,
)
_SIZED = re.compile(rf"(.*\d.*?)\s*\b({'|'.join(MAGNITUDES)})s?\b(?!-)\s*[^\d\s]*\s*", re.IGNORECASE | re.DOTALL)
_NO_NOUN = "as because but by could due for from had has if in is it must of on or seems should since so that the this to was with would"
_SENTENCE = re.compile(
    rf"(?:A[^\S\n]+(?!(?:{_NO_NOUN.replace(' ', '|')})\b)|I[^\S\n]+(?!(?:as|because|due|for|is|since)\b))[a-z]"
)
"""The beginning of a sentence whose first word is no letter of a choice: `A train`, `I think`. No article stands before `_NO_NOUN`."""


@checked_dataclass(frozen=True)
class ChoiceLetter:
    r"""1.0 where the one letter that the text chooses is the gold letter, 0.0 where not, `None` without a gold letter.

    The choice is what the text marks (`####`, `\boxed{}`, `<answer>`), or stands after its last "answer is", "answer:" or
    "option", or is the whole text: `B`, `(B)`, `B.`, `b) Paris`. A text that chooses several letters there ("A or B") or none
    scores 0. The gold letter is in the column `answer` or else `solution`, as a letter, or as an index from 0 of the column's
    value is a whole number.
    """

    letters: str = "ABCD"
    needs_one_of = ("answer", "solution")
    __name__ = "choice"

    def __post_init__(self) -> None:
        if not self.letters.isalpha() or len(set(self.letters.upper())) < max(2, len(self.letters)):
            raise ConfigError(f"choice(letters={self.letters!r}): give two or more different letters, such as 'ABCD'.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        cells = gold_column(self, columns)
        golds = [{self._gold(value) for value in values_in(cell)} - {None} for cell in cells]
        chosen = [self.chosen(answer_text_of(completion, "answer")) for completion in completions]
        return [float(c in letters) if letters else None for c, letters in zip(chosen, golds, strict=True)]

    def chosen(self, text: str) -> str | None:
        """The letter that a text chooses, as a capital; `None` for none or several."""
        text = conclusion(text)
        tagged = last_tagged(text, "answer")
        marked = marked_answer(text) if tagged is None else tagged
        if marked is not None:
            return self._letter(marked)
        phrases = list(re.finditer(rf"\b{_CONNECTED}\b\s*(?:is|:|=|ist|est|es)?\s*:?", text, re.IGNORECASE))
        if not phrases and _SENTENCE.match(text.lstrip()):
            return None
        return self._letter(text[phrases[-1].end() :] if phrases else text)

    def _letter(self, text: str) -> str | None:
        """The letter at the beginning of `text`, unless another follows it as a choice of its own."""
        letter = rf"[{self.letters}{self.letters.lower()}]"
        plain = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}", r"\1", text).strip().lstrip("*_`\"'$ ")
        first = re.match(rf"(?:\(|\[)?({letter})(?:[).\]:,*_`\"'$]|\s|$)", plain)
        if first is None or (first[1].islower() and re.match(r"\s+[a-z]", plain[first.end(1) :])):
            return None  # "a book" is no choice of A
        rest = plain[first.end(1) : first.end(1) + 40]
        others = re.search(
            rf"^[).\]]?\s*(?:,|/|&|or|and|\+)\s*(?:\(|\[)?{letter}(?:[).\]:,]|\s|$)", rest, re.IGNORECASE
        )
        return None if others else first[1].upper()

    def _gold(self, value: Any) -> str | None:
        if str(value).strip() == "":
            return None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self.letters):
            return self.letters[value].upper()
        letter = self._letter(gold_answer(str(value)))
        if letter is None:
            raise ValueError(
                f"choice: the gold answer {str(value)[:60]!r} is none of the letters {self.letters}; give choice(letters=...)."
            )
        return letter


@checked_dataclass(frozen=True)
class Numeric:
    """1.0 where the final number is within a tolerance of the gold number, 0.0 where not, `None` without a gold number.

    Within means `|x - gold| <= max(absolute, relative * |gold|)`, compared exactly. With `scale` above 0 the score falls as
    `exp(-excess / scale)` beyond it, where `excess` is the distance past the tolerance; so a guess earns something, and the
    full mark only what is right.
    """

    relative: NotNegative = 0.01
    absolute: NotNegative = 0.0
    scale: NotNegative = 0.0
    needs_one_of = ("answer", "solution")
    __name__ = "numeric"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        golds = [[number_within(text) for text in golds_of(g)] for g in gold_column(self, columns)]
        rows = zip(map(answer_text_of, completions), golds, strict=True)
        return [max((self._score(text, g) for g in several if g is not None), default=None) for text, several in rows]

    def _score(self, text: str, gold: Fraction) -> float:
        marked = marked_answer(text)
        numbers = _NUMBER.findall(conclusion(text)) if marked is None else [marked]
        value = number_within(numbers[-1].rstrip(",.")) if numbers else None
        if value is None:
            return 0.0
        excess = abs(value - gold) - max(_decimal(self.absolute), _decimal(self.relative) * abs(gold))
        if excess <= 0:
            return 1.0
        return 0.0 if self.scale == 0 else math.exp(-min(float(min(excess, Fraction(10**9))) / self.scale, 700.0))


@lru_cache(maxsize=256)
def _decimal(value: float) -> Fraction:
    """The exact decimal value: 0.29 is 29/100, not the nearest binary fraction."""
    return Fraction(str(value))


def number_within(text: str) -> Fraction | None:
    """The number that a text is, also as `1.5e-3`, `2 million` and with a unit after it; `None` for others.

    >>> number_within("2.50 m"), number_within("1e3"), number_within("3 or 4"), number_within("2 million"), number_within("1,5")
    (Fraction(5, 2), Fraction(1000, 1), None, Fraction(2000000, 1), None)
    """
    exact = number(text)
    if exact is not None:
        return exact
    sized = _SIZED.fullmatch(plain(text[:200]))
    if sized is not None:
        value = number(sized[1])
        return None if value is None else value * 10 ** MAGNITUDES[sized[2].lower()]
    pattern = r"\s*\$?([-+]?(?:(?:\d+|\d{1,3}(?:,\d{2,3})*,\d{3})\.?\d*|\.\d+))(?:[eE]([-+]?\d{1,3}))?\s*[^\d\s]*\s*"
    match = re.fullmatch(pattern, text[:200])
    return None if match is None else Fraction(match[1].replace(",", "")) * Fraction(10) ** int(match[2] or 0)


def normalized(text: str) -> str:
    """A text as SQuAD compares answers: NFKC, lower case, no punctuation, no articles, single spaces.

    >>> normalized("The  Eiffel-Tower!")
    'eiffeltower'
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    stripped = "".join(c for c in folded if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    return " ".join(word for word in stripped.split() if word not in _ARTICLES)


@dataclass(frozen=True)
class TokenF1:
    """F1 of the words of the answer and a gold answer, as SQuAD measures it; the best of several gold answers.

    `2 p r / (p + r)` with precision p and recall r over words as multisets, after `normalized`. The answer is what the text
    marks, or all of it; so a text that lists many words pays in precision. `None` without a gold answer.
    """

    needs_one_of = ("answer", "solution", "reference")
    __name__ = "f1"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        golds = gold_column(self, columns)
        return [best(_f1, answer_in(c), gold) for c, gold in zip(completions, golds, strict=True)]


@checked_dataclass(frozen=True)
class Fuzzy:
    """Character similarity of answer and gold answer, from 0 to 1; below `at_least` it is 0.

    `2 L / T` with L letters of the longest common subsequence and T letters in both, after `normalized`: 1 less the share of
    letters to insert or delete. Of longer texts the first 10,000 characters are compared. `None` without a gold answer.
    """

    at_least: Share = 0.0
    needs_one_of = ("answer", "solution", "reference")
    __name__ = "fuzzy"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        golds = gold_column(self, columns)
        scores = [best(_ratio, answer_in(c), gold) for c, gold in zip(completions, golds, strict=True)]
        return [None if score is None else score if score >= self.at_least else 0.0 for score in scores]


def gold_column(reward: Any, columns: Mapping[str, Sequence[Any] | None]) -> Sequence[Any]:
    """The first that is there of the columns of which a reward needs one. Raises RewardError when none is."""
    for name in reward.needs_one_of:
        if (column := columns.get(name)) is not None:
            return column
    example = "'answer' or 'solution'; rename yours, as in --columns answer=label"
    if reward.needs_one_of[0] == "reference":
        example = "'reference'; rename yours, as in --columns reference=highlights"
    raise RewardError(f"{reward.__name__} needs a column {example}.")


def golds_of(gold: Any) -> list[str]:
    """The gold answers of one row: one, or several in a list; those that are empty or missing are left out."""
    return [text for text in (gold_answer(str(value)) for value in values_in(gold)) if text]


def best(score: Any, text: str, gold: Any) -> float | None:
    """The highest score of `text` against a row's gold answers; `None` when it has none."""
    return max((score(text, reference) for reference in golds_of(gold)), default=None)


def answer_in(completion: Any) -> str:
    """Marked answer of a completion, or all of its text after its thoughts."""
    text = conclusion(answer_text_of(completion))
    marked = marked_answer(text)
    return text if marked is None else marked


def _f1(text: str, gold: str) -> float:
    predicted, expected = Counter(normalized(text).split()), Counter(normalized(gold).split())
    shared = (predicted & expected).total()
    return 2 * shared / (predicted.total() + expected.total()) if shared else 0.0


def _ratio(text: str, gold: str) -> float:
    predicted, expected = normalized(text)[:_LONGEST_COMPARED], normalized(gold)[:_LONGEST_COMPARED]
    if not predicted or not expected:
        return 0.0
    return 2 * common_length(expected, predicted) / (len(expected) + len(predicted))


def common_length(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, a bit for each item of `first` (Hyyrö 2004): a row at a time.

    >>> common_length("abcd", "abxd")
    3
    """
    places: dict[Hashable, int] = {}
    for i, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << i
    every = (1 << len(first)) - 1
    row = every
    for item in second:
        taken = row & places.get(item, 0)
        row = ((row + taken) | (row - taken)) & every
    return len(first) - row.bit_count()
