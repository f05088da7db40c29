"""The final answer in a text, and whether two of them are the same. Plain text and numbers; no LaTeX is evaluated here."""

from __future__ import annotations

import re
from fractions import Fraction

_MARK = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|(?<![\w.])[-+]?\.\d+")
_DECORATION = re.compile(r"\\(?:left|right|displaystyle|,|;|!| )|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|[$€£\s]|\\[$%]")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}")
_LONGEST_NUMBER = 100
"""Digits beyond which a text is not taken for a number: comparing must stay cheap for any text."""


def marked_answer(text: str) -> str | None:
    r"""Final answer that a text marks: after the last `####` on its line (GSM8K), or in the last `\boxed{}`.

    Of both, the one that comes last. `None` when it marks none.

    >>> marked_answer("3 + 4 = 7\n#### 7"), marked_answer(r"so \boxed{\frac{1}{2}}"), marked_answer("7")
    ('7', '\\frac{1}{2}', None)
    """
    marks = list(_MARK.finditer(text))
    mark = marks[-1] if marks else None
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    boxed = _braced(text, text.index("{", start)) if start >= 0 else None
    if mark is not None and (boxed is None or mark.start() > start):
        return mark.group(1).strip() or None
    return boxed


def final_answer(text: str) -> str | None:
    """The marked answer, or the last number in the text, or `None`.

    >>> final_answer("He pays 3 dollars, so 1,250 are left."), final_answer("none")
    ('1,250', None)
    """
    marked = marked_answer(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def gold_answer(text: str) -> str:
    """The answer of a data set's own solution: its marked answer, else all of its text."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def is_same(answer: str, gold: str) -> bool:
    """True when both are the same number, or the same text but for case, spaces, currency signs and LaTeX decoration.

    Where `gold` is a number, the answer may have words around its only number.

    >>> is_same("$1,250.00", "1250"), is_same("0.5", "1/2"), is_same(" Paris.", "paris"), is_same("50% off", "50")
    (True, True, True, True)
    """
    second = number(gold)
    if second is not None:
        first = number(answer)
        return (_only_number(answer) if first is None else first) == second
    return _plain(answer) == _plain(gold) != ""


def number(text: str) -> Fraction | None:
    r"""The exact value of a text that is one number: `1,250.00`, `-3/4`, `\frac{1}{2}`, `50%` (as 50); `None` for others."""
    plain = _FRACTION.sub(r"\1\2/\3", _plain(text)).removesuffix("%").replace(",", "")
    if len(plain) > _LONGEST_NUMBER or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(/\d+)?", plain):
        return None
    above, _, below = plain.partition("/")
    if below and not int(below):
        return None
    return Fraction(above) / int(below or 1)


def is_plain(text: str) -> bool:
    """True when comparing as text or number says all there is to say: no operators, no LaTeX."""
    return number(text) is not None or re.fullmatch(r"[\w\s.,'%-]*", _plain(text)) is not None


def _only_number(text: str) -> Fraction | None:
    """The one number among words, as in `72 dollars` or `x = 5`; `None` when there are several, or operators."""
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or re.search(r"[\\^*/{}()+<>|]", text[: found[0].start()] + text[found[0].end() :]):
        return None
    return None if re.match(r"\w", text[found[0].end() :]) else number(found[0].group())


def _plain(text: str) -> str:
    text = _TEXT.sub(r"\1", text) if _TEXT.sub("", text).strip(" $") == "" else text
    return _DECORATION.sub("", text).rstrip(".").casefold()


def _braced(text: str, opening: int) -> str | None:
    """Text between the brace at `opening` and its partner; `None` when it is never closed."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[opening + 1 : index].strip()
    return None
