"""The final answer in a text, and plain comparison: equal as text, or as the same exact number. LaTeX is not evaluated here."""

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from covey.rewards.builtin.text import turns_of
from covey.rewards.builtin.units import is_unit, unit_name

_MARK = re.compile(r"####[ \t]*([^\n]*)")
_THOUGHTS_END = re.compile(r"</think>|\[/THINK\]")
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-z])[ \t]*")
_MOST_BOXES, _MOST_ENDS = 17, 8
_JOINED = frozenset({"", ",", ";", "or", "and"})
_STATED = re.compile(r"\b(?:answer|result)(?:[ \t]+is|[ \t]*[:=])[ \t]*:?|答案[ \t]*[是为：:]*", re.IGNORECASE)  # noqa: RUF001 - a full-width colon
_SENTENCE = re.compile(r"\.(?=\s|$)|\n|。")
_MATHS = re.compile(r"\$(?!\s)[^$\n]{1,300}(?<!\s)\$(?!\d)|\\\([^\n]{1,300}?\\\)|\\\[[^\n]{1,300}?\\\]")
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+)(?![0-9]|[,'][0-9])"
_NUMBER = re.compile(
    rf"(?<![\w.√½¼¾])(?<![0-9]['\u2019])[-+]?\$?-?{_INTEGER}(?:\.[0-9]+)?(?:/[0-9]+)?|(?<![\w.])[-+]?\.[0-9]+", re.ASCII
)
_GOES_ON = re.compile(
    r"\w*(?:[ \t]*(?:\\?%|!|\^|:|(?:(?:hundred|thousand|million|billion|trillion|dozen|third)s?|halves|percent|squared|cubed|factorial)\b))*",
    re.IGNORECASE,
)
_IN_A_LIST = re.compile(
    r"[0-9)}\]$%][\s$*]*(?:(?:,|;|\band\b)[\s$*]*|[\s$*]+)$|\bor\b[\s$*]*$|[\\^_{]$|[0-9)][ \t]*[-+*/\u00d7÷][ \t]*$|[<>≤≥≠][\s$]*$|(?:^|\n)[0-9]+\.\s+$",
    re.IGNORECASE,
)
"""Text before a number that is one of several, or an operand."""
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_DENIED = re.compile(
    r"\b(?:not|never|nor|neither|or|than|except|minus|negative|cannot be|no longer|(?:any|every|no)thing but|all but)\b[^.;:=0-9]*$"
    r"|n['\u2019]t\b[^.;:=0-9]*$|(?:\b(?:half|twice|double|triple|root|at least|at most|over|under|above|below|about|around|approximately|roughly|almost|nearly)"
    r"(?: of)?|≈|~)[\s$*]*$",
    re.IGNORECASE,
)
_LONGEST_NUMBER = 100
"""Characters beyond which a text is not taken for a number: comparing must stay cheap for any text."""
LONGEST_COMPARED = 4000
"""Characters of an answer beyond which only the same text is the same answer."""
_LONGEST_STATEMENT = 2000
"""Characters at the end of a text in which an answer that is not marked is looked for."""

# -- an answer in a text --------------------------------------------------------------------------------------------------


def answer_text_of(completion: Any, tag: str | None = None) -> str:
    """The text in which a completion's answer stands: the last of the assistant's turns that marks one, or all of them.

    A reward that reads `<tag>` counts it as a mark. Thoughts are left out of all turns, but kept in a single one, for `conclusion`.
    """
    turns = turns_of(completion)
    if len(turns) == 1:
        return turns[0]
    turns = [conclusion(turn) for turn in turns]
    marks = (turn for turn in reversed(turns) if "####" in turn or _BOX.search(turn) or (tag and f"</{tag}>" in turn))
    return next(marks, "\n\n".join(turns))


def conclusion(text: str) -> str:
    """The text after the thoughts of a reasoning model; all of it where it closes none.

    >>> conclusion("<think>5?</think> 6"), conclusion("<think>5?")
    (' 6', '<think>5?')
    """
    return text[thought_ends(text)[0] :]


def thought_ends(text: str) -> list[int]:
    """Places where thoughts end, the last ones first, and 0."""
    return [*[end.end() for end in _THOUGHTS_END.finditer(text)][: -_MOST_ENDS - 1 : -1], 0]


def marked_answer(text: str) -> str | None:
    r"""Final answer that a text marks: after the last `####` on its line (GSM8K), or in the last `\boxed{}`.

    Of both, the one that comes last; what stands in thoughts that are closed is no answer. Boxes that follow each other at once (`\boxed{5} or \boxed{6}`) are one answer of
    several parts. `None` when the text marks none, or the mark is empty.

    >>> marked_answer("3 + 4 = 7\n#### 7"), marked_answer(r"so \boxed{\frac{1}{2}}"), marked_answer("7")
    ('7', '\\frac{1}{2}', None)
    """
    text = conclusion(text)
    line, boxes = _last_mark(text), _last_boxes(text)
    if line is not None and (boxes is None or line[0] > boxes[0]):
        return line[1] or None
    return boxes[1] or None if boxes is not None else None


def final_answer(text: str) -> str | None:
    """The marked answer, or what is stated last: a formula or number after "the answer is", else the text's last number.

    `None` for a number that stands in a list or is denied ("not 72"), and for a mark that is empty or never closed.

    >>> final_answer("He pays 3 dollars, so 1,250 are left."), final_answer("none"), final_answer("5, 6 or 7")
    ('1,250', None, None)
    """
    text = conclusion(text)
    if _last_mark(text) is not None or _last_boxes(text) is not None:
        return marked_answer(text)
    end = text[-_LONGEST_STATEMENT:].translate(_WIDE | _MINUS)
    stated = None
    for stated in _STATED.finditer(end):  # noqa: B007 - the last
        pass
    if stated is None:
        return _last_value(end)
    sentence = _SENTENCE.split(end[stated.end() :].lstrip(), maxsplit=1)[0].split(" (", 1)[0].strip(" *\t")
    is_whole = sentence.casefold() in NUMERALS or (sentence != "" and not _WORD.search(sentence))
    return sentence if is_whole else _last_value(sentence)


def gold_answer(text: str) -> str:
    """The answer of a data set's own solution: its marked answer, else all of its text."""
    marked = marked_answer(text)
    return conclusion(text).strip() if marked is None else marked


def _last_mark(text: str) -> tuple[int, str] | None:
    start = text.rfind("####")
    while start > 0 and text[start - 1] == "#":
        start -= 1
    mark = _MARK.match(text, start) if start >= 0 else None
    return None if mark is None else (start, mark[1].lstrip("#").strip())


def _last_boxes(text: str) -> tuple[int, str] | None:
    """Place of the last box, and its content with that of the boxes that it joins on to; empty where it is never closed."""
    joined, after, ends = list[str](), -1, -1
    starts = [box.start() for box in _BOX.finditer(text)]
    for start in starts[:-_MOST_BOXES:-1]:
        content, end = _box_at(text, start)
        if joined and content and end > ends:  # a box around the others
            joined, after = [_BOX.sub("", content)], start
            continue
        if joined and (end > after or text[end:after].strip(" \t\r\n$") not in _JOINED):
            break
        joined.append(content)
        after, ends = start, max(end, ends)
    parts = list(dict.fromkeys(reversed(joined)))
    return (starts[-1], ", ".join(parts) if all(parts) else "") if joined else None


def _box_at(text: str, start: int) -> tuple[str, int]:
    r"""Content of the box at `start` and where it ends; empty when it is never closed. `\boxed 9` holds 9."""
    box = _BOX.match(text, start)
    opening = start if box is None else box.end()
    if text[opening : opening + 1] != "{":
        bare = re.compile(r"[-\w.,/]*").match(text, opening)
        return ("", opening) if bare is None else (bare[0].rstrip(".,"), bare.end())
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            has_second = text.startswith("{", brace.end())  # a second group: no answer
            return "" if has_second else text[opening + 1 : brace.start()].strip(), brace.end()
    return "", len(text)


def _last_value(text: str) -> str | None:
    """The last formula or number, with what qualifies it after it; `None` in a list or after a denial."""
    last = None
    for pattern in (_MATHS, _NUMBER):
        for match in pattern.finditer(text):
            if last is None or match.end() > last.end():
                last = match
    if last is None:
        return None
    before, value = text[: last.start()][-80:], last[0]
    if _IN_A_LIST.search(before.rpartition("\n\n")[2]) or _DENIED.search(before):
        return None
    if value[0] in "\\$" and value[-1] in ")]$":
        return value
    rest = _GOES_ON.match(text, last.end())
    return value + ("" if rest is None else rest[0].rstrip(" \t:"))


# -- comparing ------------------------------------------------------------------------------------------------------------

_MINUS = dict.fromkeys(map(ord, "−–﹣⁻"), ord("-"))  # noqa: RUF001
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "±": "\\pm ", "∅": "\\emptyset ", "∪": "\\cup ", "∈": "\\in ", "≠": "\\ne ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}", "×": "\\times ", "·": "\\cdot ", "÷": "\\div ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "√": "\\sqrt ", "°": "^\\circ ", "\u00a0": " ", "\u202f": " ", "\u2009": " "})  # noqa: RUF001  # fmt: skip
_POWERS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_WRITTEN = (
    (re.compile(r"\\(?:left|right|big|Big|bigl|bigr|displaystyle|limits|!)(?![a-zA-Z])"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|$)|(?<=[\w.,$})])~"), " "),
    (re.compile(r"(?<=[\w)}])\*\*(?=[\w(])"), "^"),
    (re.compile(r"\*\*"), ""),
    (re.compile(r"[⁻⁰¹²³⁴-⁹]+"), lambda power: f"^{{{power[0].translate(_POWERS)}}}"),
    (re.compile(r"\\q?quad(?![a-z])"), ";"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:text(?:bf|rm|it|normal)?|math(?:rm|bf|it)|mbox)\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\[lr]vert(?![a-z])"), "|"),
    (re.compile(r"\\colon(?![a-z])"), ":"),
    (re.compile(r"\b([ap])\. ?m\b\.?", re.IGNORECASE), r"\1m"),
    (re.compile(r"\(?(?:\\[bp]?|\b)mod(?![a-z])\s*\{?\s*([0-9]+)\s*\}?\s*\)?"), r"\\pmod\1"),
    (
        re.compile(r"(?:\(|\[)\s*\\begin\{array\}\{[clr|]+\}(.*?)\\end\{array\}\s*[)\]]", re.DOTALL),
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (re.compile(r"\\(?:bar|dot)\{?([0-9]+)\}?"), r"\\overline{\1}"),
    (re.compile(r"\(([0-9A-Z]+)\)_"), r"\1_"),
    (re.compile(r"_\{ ?\(([0-9]+)\) ?\}"), r"_{\1}"),
    (re.compile(r"\binfinity\b", re.IGNORECASE), r"\\infty"),
    (re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-z]))|\\degree(?![a-z])"), "°"),
    (re.compile(r"\\(l|g|n)eq(?![a-z])"), r"\\\1e"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\\frac ?([0-9]) ?([0-9])(?![0-9.])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt ?([0-9])(?![0-9.])"), r"\\sqrt{\1}"),
    (re.compile(r"([_^])\{ ?(\w) ?\}"), r"\1\2"),
    (re.compile(r"(?<!\\)\b[A-Za-z]{2,}\b"), lambda word: word[0].casefold()),
    (re.compile(r"\s+"), " "),
    (re.compile(r" (?![\w\\])|(?<![\w},]) |(?<=,) (?![0-9]{3}(?![0-9]))| (?=\\(?!frac))"), ""),
    (re.compile(r"(\\begin\{[a-z]+\}|\\[a-zA-Z]+(?= [0-9])) "), r"\1"),
)
_HEAD = re.compile(r"([-+]?)([$€£¥]?)(?:(?<=[$€£¥])(-?))?")
_UNIT = re.compile(
    r"(?<=[\w})\]!])(?<!\\cdot)(?<!\\times)( ?(?:%|°[CF]?|[$€£¥¢])|(?: |(?<=[0-9}]))[^\W\d_]+(?:[ /*.^23]{1,2}[^\W\d_]+)*(?:\^?[23])?)$"
)
_VALUE = re.compile(r"[0-9\\]|^.$")
_SOLE_LETTER = re.compile(r"[(\[]?([A-E])[)\].]?", re.IGNORECASE)
_PERIOD = re.compile(r"([0-9]*)\.([0-9]*)(?:\\overline\{|(?<=\.)\()([0-9]+)[})]")
_RATIO = re.compile(rf"({_INTEGER})/({_INTEGER})|\\frac\{{(-?[0-9]+)\}}\{{(-?[0-9]+)\}}")
_MIXED = re.compile(r"([0-9]+) ?(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<= )([0-9]+)/([0-9]+))")
_DECIMAL = re.compile(rf"({_INTEGER})?(\.[0-9]*)?(?:e([-+]?[0-9]{{1,3}}))?", re.IGNORECASE)
_SCIENTIFIC = re.compile(r"([0-9.,]+)(?:\\times|\\cdot|\*)10\^(?:(-?[0-9])|\{(-?[0-9]{1,3})\})(?![0-9])")
_SIZED = re.compile(r"(.+?) ?(thousand|million|billion|trillion)")
MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten by word."""
_MEANINGS = (
    dict.fromkeys(("\\emptyset", "\\{\\}", "no solutions", "empty set"), "no solution")
    | dict.fromkeys(("\\mathbb{R}", "all real numbers"), "(-\\infty,\\infty)")
    | {"dne": "does not exist", "+\\infty": "\\infty"}
)
"""One of several texts of the same meaning."""
NUMERALS = {word: i for i, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"])}  # fmt: skip


def plain(text: str) -> str:
    r"""A text in one spelling: no `\left`, dollar signs around it or final period; spaces only between words and digits.

    >>> plain(r"$\left( 1,\, 2 \right)$"), plain(r"\text{No  Solution}."), plain(r"\dfrac12"), plain("1 2")
    ('(1,2)', 'no solution', '\\frac{1}{2}', '1 2')
    """
    text = text.translate(_WIDE).translate(_SIGNS)
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    text = _strip_math(text.strip())
    text = re.sub(r"(?<!\.)\.$", "", text).strip()
    letter = _SOLE_LETTER.fullmatch(text)
    return letter[1].upper() if letter else _MEANINGS.get(text, text)


def is_same(answer: str, gold: str, context: Collection[str] = ()) -> bool:
    """True when both are the same number, in the same unit where both name one, or the same text as `plain` spells it.

    `context` are words of the question: a noun of it may stand after a number, as may a unit of measure. A percentage is
    the bare number only where the question speaks of percent.

    >>> is_same("$1,250.00", "1250"), is_same("0.5", "1/2"), is_same(" Paris.", "paris"), is_same("5 cm", "5 m")
    (True, True, True, False)
    """
    if len(answer) > LONGEST_COMPARED:
        return answer.strip() == gold.strip()
    first, second = plain(answer), plain(gold)
    if first == second:
        return first != ""
    values = quantity(first, context), quantity(second, context)
    if values[0] is None or values[1] is None:
        return False
    return values[0][0] == values[1][0] and is_same_unit(values[0][1], values[1][1], context)


def is_same_unit(first: str, second: str, context: Collection[str] = ()) -> bool:
    """True for equal units, or when one side names none; a percentage needs a question about percent to leave it out."""
    if first == second:
        return True
    if first and second:
        return False
    return "%" not in (first, second) or not {"percent", "percentage"}.isdisjoint(context)


def number(text: str) -> Fraction | None:
    r"""The exact value of a text that is one number, a unit of measure after it or not; `None` for others.

    `1,250.00`, `-3/4`, `\frac{1}{2}`, `3\frac{1}{2}` (seven halves), `1.5e3`, `50%` (as 50), `0.\overline{3}` or `0.(3)`.
    """
    value = quantity(plain(text))
    return None if value is None else value[0]


def quantity(text: str, context: Collection[str] = ()) -> tuple[Fraction, str] | None:
    """(value, unit) of a `plain` text that is a number with an optional unit or currency sign; `None` for others."""
    body, unit = split_unit(text, context) if len(text) <= _LONGEST_NUMBER + 40 else ("", "")
    value = _value(body.lstrip("+-") if body[1:2] not in ("+", "-") else "")
    return None if value is None else (-value if body[0] == "-" else value, unit)


def split_unit(text: str, context: Collection[str] = ()) -> tuple[str, str]:
    r"""A `plain` text without the unit at its end or the currency before it, and the unit; empty where there is none.

    >>> split_unit("5 cm"), split_unit("10\\sqrt{2} m"), split_unit("50%"), split_unit("5 million")
    (('5', 'cm'), ('10\\sqrt{2}', 'm'), ('50', '%'), ('5 million', ''))
    """
    head = _HEAD.match(text)
    sign, currency = (head[1] or head[3] or "", head[2]) if head is not None else ("", "")
    body = sign + text[head.end() :] if head is not None and currency else text
    match = _UNIT.search(body)
    if match is None or (not _VALUE.search(body[: match.start()]) and body[: match.start()] not in NUMERALS):
        return body, currency
    name = unit_name(match[0])
    has_room = len(match[0]) > 1 or not (match[0].isascii() and match[0].isalpha())  # `5m` is a product, `5 m` a length
    if not (has_room and is_unit(name, context)):
        return body, currency
    return body[: match.start()], name if currency in ("", name) else currency + name


def is_plain(text: str) -> bool:
    """True when comparing as text or number says all there is to say: no operators, no LaTeX."""
    return number(text) is not None or re.fullmatch(r"[\w\s.,'%-]*", plain(text)) is not None


def _value(text: str) -> Fraction | None:
    """The exact value of a number without sign or unit."""
    if not text or len(text) > _LONGEST_NUMBER:
        return None
    if text in NUMERALS:
        return Fraction(NUMERALS[text])
    if match := _RATIO.fullmatch(text):
        above, below = (int(_digits(part)) for part in match.groups() if part is not None)
        return Fraction(above, below) if below else None
    if match := _MIXED.fullmatch(text):
        whole, above, below = (int(part) for part in match.groups() if part is not None)
        return whole + Fraction(above, below) if above < below else None
    if match := _PERIOD.fullmatch(text):
        head, tail, period = match.groups()
        repeated = Fraction(int(period), 10 ** len(tail) * (10 ** len(period) - 1))
        return Fraction(f"{head or 0}.{tail or 0}") + repeated
    if match := _SIZED.fullmatch(text) or _SCIENTIFIC.fullmatch(text):
        power = MAGNITUDES[match[2]] if match.re is _SIZED else int(match[2] or match[3])
        value = _value(match[1])
        return None if value is None else value * Fraction(10) ** power
    match = _DECIMAL.fullmatch(text)
    if match is None or not re.search(r"[0-9]", f"{match[1] or ''}{match[2] or ''}"):
        return None
    return Fraction(f"{_digits(match[1] or '0')}{match[2] or '.'}0") * Fraction(10) ** int(match[3] or 0)


def _digits(text: str) -> str:
    return text.replace(",", "").replace(" ", "")


def _strip_math(text: str) -> str:
    """Without the signs of a formula around all of it."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening) and "$" not in inner:
            return inner.strip()
    return text
