r"""Formulas compared by value: split into parts, read whole or not at all, and only then given to math-verify.

math-verify takes out of a text what it can read and leaves the rest (`\text{not }5` is 5, `1 2 3` is 123). So nothing goes to it
but formulas whose every sign is in the grammar below; any other text equals only itself.
"""

import re
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet

from covey.rewards.builtin.answers import is_same, is_same_unit, plain, quantity, split_unit
from covey.rewards.builtin.units import words

Evaluate = Callable[[str, str], bool | None]
"""(gold, answer) of readable formulas: equal, different, or `None` when the gold cannot be evaluated."""

_LONGEST = 400
_MOST_PARTS = 16
_OPERATORS = words(r"+ - * / ^ _ = < > , \times \cdot \div \pm \mp \le \ge \lt \gt \ne \in \cup \cap \setminus")
_SIGNS = frozenset({"+", "-", "\\pm", "\\mp"})
_RELATIONS = frozenset({"=", "<", ">", "\\le", "\\ge", "\\lt", "\\gt"})
_LESS, _MORE = ("<", "\\le", "\\lt"), (">", "\\ge", "\\gt")
_FUNCTIONS = words(
    r"\sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan \sinh \cosh \tanh \log \ln \exp \sqrt \frac \binom"
)  # fmt: skip
_CONSTANTS = words(
    r"\pi \infty \emptyset \varnothing \alpha \beta \gamma \delta \epsilon \varepsilon \theta \lambda \mu \rho "
    r"\sigma \tau \phi \varphi \omega \Delta \Omega \mathbb{R}"
)  # fmt: skip
_GROUPS = words(
    r"\lfloor \rfloor \lceil \rceil \{ \} \begin{pmatrix} \end{pmatrix} \begin{bmatrix} \end{bmatrix} "
    r"\begin{vmatrix} \end{vmatrix} \\ &"
)  # fmt: skip
_COMMANDS = _OPERATORS | _FUNCTIONS | _CONSTANTS | _GROUPS
_TOKEN = re.compile(r"(?P<space>\s+)|(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<letters>[a-zA-Z]+)|(?P<command>\\(?:begin|end|mathbb)\{[a-zA-Z]+\}|\\[a-zA-Z]+|\\[{}\\])|(?P<sign>[-+*/^_=<>()\[\]{}|!,&])")  # fmt: skip
_ASSIGNED = re.compile(r"([a-zA-Z](?:_\w)?(?:\([a-zA-Z]\))?)(?:=|\\(?:in|equiv)(?![a-z]) ?)([^=<>]+)")
_SET = re.compile(r"(?:([a-zA-Z](?:_\w)?)\\in ?)?\\\{(.*)\\\}", re.DOTALL)
_RELATION = re.compile(r"(<|>|\\(?:[lg]e|[lg]t)(?![a-z])) ?")
_SPLIT = re.compile(r"\\[{}]|[{}()\[\]]|[,;]|(?<![a-zA-Z\\]) ?(?:or|and)(?![a-zA-Z])")
_NAMED = re.compile(r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|log|ln|pi)(?![a-zA-Z])")
_ROOT = re.compile(r"\\sqrt\(([^()]*)\)")
_PROPER = re.compile(r"([0-9]+) ?\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}")
_BARE_POWER = re.compile(r"\^(-?[0-9]{2,}(?![0-9.])|-[0-9])")


def is_equal(answer: str, gold: str, evaluate: Evaluate, context: Collection[str] = ()) -> bool | None:
    """True when both have the same parts in any order, each the same text, number or value; `None` as from `evaluate`.

    Parts stand between commas, "or" and "and", in braces or not; `\\pm a` is two. An ordered pair or an interval is one part.
    """
    if is_same(answer, gold, context):
        return True
    first, second = parts(answer), parts(gold)
    if len(first) < len(second):
        first = parts(answer.replace(",", ", "))  # `100,200` is a number, unless the gold has two
    if not first or len(first) != len(second) or len(first) > _MOST_PARTS:
        return False
    for part in second:
        same: list[bool | None] = [is_same(other, part, context) for other in first]
        verdicts = same if any(same) else [_is_part_equal(other, part, evaluate, context) for other in first]
        if True not in verdicts:
            return None if None in verdicts else False
        del first[verdicts.index(True)]
    return True


def parts(text: str) -> list[str]:
    r"""The parts of an answer, each `plain`: at commas, semicolons, "or" and "and" outside of brackets.

    >>> parts(r"1\text{ or }2"), parts(r"x\in\{1, 2\}"), parts("(1, 2)"), parts("1,250"), parts(r"\pm 3")
    (['1', '2'], ['x=1', 'x=2'], ['(1,2)'], ['1,250'], ['3', '-3'])
    """
    text = plain(text)
    name = ""
    if (elements := _SET.fullmatch(text)) and text.count("\\{") == 1 and "\\emptyset" not in text:
        name, text = f"{elements[1]}=" if elements[1] else "", elements[2]
    if quantity(text) is not None:
        return [name + text]
    pieces, depth, start = list[str](), 0, 0
    for mark in _SPLIT.finditer(text):
        depth += (mark[0][-1] in "{([") - (mark[0][-1] in "})]")
        if depth == 0 and mark[0][-1] in ",;rd":
            pieces.append(text[start : mark.start()])
            start = mark.end()
    pieces = [plain(piece) for piece in [*pieces, text[start:]]]
    if not all(pieces):
        return []
    ranges = [bounded for piece in pieces if (bounded := _range_of(piece))]
    if (
        len(ranges) == len(pieces)
        and len({name for name, _ in ranges}) == 1
        and not re.search(r"(?<![a-z\\])and(?![a-z])", text)
    ):
        pieces = [rf"{ranges[0][0]}\in" + r"\cup".join(bounds for _, bounds in ranges)]
    return [name + signed for piece in pieces for signed in _both_signs(piece)]


def _range_of(piece: str) -> tuple[str, str] | None:
    r"""Variable and interval of an inequality between it and numbers: `2<x\le 5` is x in `(2,5]`; `None` for others."""
    sides = _RELATION.split(piece)
    if len(sides) == 3:
        sides = [*sides, "", ""] if len(sides[0]) > 1 or not sides[0].isalpha() else ["", "", *sides]
    if len(sides) != 5 or not re.fullmatch("[a-zA-Z]", sides[2]) or letters_of(sides[0] + sides[4]):
        return None
    less, more = ({sides[1], sides[3]} <= {"", *names} for names in (_LESS, _MORE))
    if not less and not more:
        return None
    low, below, _, above, high = sides if less else sides[::-1]
    opening, closing = ("[" if "e" in below else "("), ("]" if "e" in above else ")")
    return sides[2], opening + (low or "-\\infty") + "," + (high or "\\infty") + closing


def _both_signs(piece: str) -> list[str]:
    r"""The two values of a part with one `\pm`; any other part alone."""
    if piece.count("\\pm") != 1 or re.search(r"\\mp|[<>]", piece):
        return [piece]
    plus = re.sub(r"(^|(?<=[=(\[{,]))\\pm ?|(?P<sum>\\pm ?)", lambda sign: "+" if sign["sum"] else "", piece)
    return [plus, re.sub(r"\\pm ?", "-", piece)]


def readable(text: str, variables: AbstractSet[str] | None = None) -> str | None:
    r"""A `plain` formula as it is given to math-verify, decimals as fractions; `None` when a sign of it is not understood.

    `variables`: the letters that may occur; `None` allows any.

    >>> readable("0.5x"), readable("5!0"), readable("1 2"), readable("no"), readable(r"5\times")
    ('(\\frac{5}{10})x', None, None, None, None)
    """
    text = _ROOT.sub(r"\\sqrt{\1}", _NAMED.sub(r"\\\1", text))
    text = _BARE_POWER.sub(r"^{\1}", _PROPER.sub(_as_sum, text))
    tokens, place = list[tuple[str, str]](), 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None or match.end() > _LONGEST or len(match[0]) > 100:
            return None
        tokens.append((match.lastgroup, match[0]))
        place = match.end()
    seen = [token for token in tokens if token[0] != "space"]
    is_written = _has_math_words(seen, variables) and _has_partners(seen) and _has_operands(seen)
    if not is_written:
        return None
    before = ["", *(token for _, token in tokens)]
    return "".join(
        _exact(kind, token if before[i] == "_" else token.replace("i", r"\sqrt{-1}") if kind == "letters" else token)
        for i, (kind, token) in enumerate(tokens)
    )


def letters_of(text: str) -> frozenset[str]:
    """Variables of a formula: the letters outside of commands."""
    return frozenset("".join(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]+", _NAMED.sub(" ", text))))


def _is_part_equal(answer: str, gold: str, evaluate: Evaluate, context: Collection[str]) -> bool | None:
    if is_same(answer, gold, context):
        return True
    name, gold_name = _ASSIGNED.fullmatch(answer), _ASSIGNED.fullmatch(gold)
    is_named = name[1] == gold_name[1] if name and gold_name else not _num_relations(gold)
    if name is not None and is_named and _is_solved(name):
        answer = name[2]
        gold = gold if gold_name is None else gold_name[2]
    elif gold_name is not None and name is None and not _num_relations(answer) and _is_solved(gold_name):
        gold = gold_name[2]
    whole = plain(answer)
    (answer, unit), (gold, gold_unit) = split_unit(whole, context), split_unit(plain(gold), context)
    is_product = unit.isalpha() and set(unit) <= letters_of(gold)  # `2 n` where the gold is of n
    if is_product:
        answer, unit = whole, ""
    if not is_same_unit(unit, gold_unit, context):
        return False
    if is_same(answer, gold, context):
        return True
    value, gold_value = None if is_product else quantity(answer), quantity(gold)
    if value is not None and gold_value is not None:
        return False
    formula = str(value[0]) if value else readable(answer, letters_of(gold) | {"e", "i"})
    gold_formula = str(gold_value[0]) if gold_value else readable(gold)
    if formula is None or gold_formula is None or not _has_same_form(answer, gold):
        return False
    return evaluate(gold_formula, formula)


def _is_solved(assigned: re.Match[str]) -> bool:
    """`x=5`, not `x=x`; of a function, `f(x)=2x`."""
    return assigned[1].endswith(")") or assigned[1][0] not in letters_of(assigned[2])


def _has_same_form(answer: str, gold: str) -> bool:
    """As many relations on both sides; an inequality may be answered by its interval."""
    is_interval = answer[0] in "([" and "=" not in gold
    return _num_relations(answer) == _num_relations(gold) or (is_interval and not _num_relations(answer))


def _num_relations(text: str) -> int:
    return sum(match[0] in _RELATIONS for match in _TOKEN.finditer(text))


def _has_math_words(tokens: list[tuple[str, str]], variables: AbstractSet[str] | None) -> bool:
    """Commands are those of the grammar; letters are variables, and a formula is more than letters."""
    for kind, token in tokens:
        if kind == "command" and token not in _COMMANDS:
            return False
        if kind == "letters" and (len(token) > 3 or (variables is not None and not variables >= set(token))):
            return False
    return (
        any(kind != "letters" or len(token) == 1 for kind, token in tokens[:1]) or len({kind for kind, _ in tokens}) > 1
    )


def _has_partners(tokens: list[tuple[str, str]]) -> bool:
    """Every bracket is closed, at most 24 deep; an interval may mix its two."""
    partners = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), "\\{": ("\\}",)}
    partners |= {"\\lfloor": ("\\rfloor",), "\\lceil": ("\\rceil",)}
    opened = list[tuple[str, ...]]()
    for _, token in tokens:
        if token in partners or token.startswith("\\begin"):
            opened.append(partners.get(token, (token.replace("begin", "end"),)))
        elif token in (")", "]", "}", "\\}", "\\rfloor", "\\rceil") or token.startswith("\\end"):
            if len(opened) > 24 or not opened or token not in opened.pop():
                return False
        elif token in ("\\\\", "&") and not any("matrix" in closing[0] for closing in opened):
            return False
    has_bars = sum(token == "|" for _, token in tokens) % 2 == 0
    return not opened and has_bars


def _has_operands(tokens: list[tuple[str, str]]) -> bool:
    """No operator without its operands, no number right after another value, one quotient in a row, one equation."""
    before = ("sign", "(")
    for i, (kind, token) in enumerate(tokens):
        follows_operator = (
            before[1] in _OPERATORS
            or before[1] in ("(", "[", "{", "\\{", "&", "\\\\", "|")
            or before[1].startswith(("\\begin", "\\lf", "\\lc"))
        )
        if token in _OPERATORS and follows_operator and not (token in _SIGNS and before[1] not in _SIGNS | {"^", "_"}):
            return False
        if token in (")", "]", "}", "\\}") and before[1] in _OPERATORS:
            return False
        if token == "!" and (follows_operator or before[1] == "!"):
            return False
        if kind == "number" and not (follows_operator or before[1] in _FUNCTIONS or _after_base(tokens[:i])):
            return False
        if (token == "_" and before[0] == "number") or (kind == "number" and re.match("0[0-9]", token)):
            return False
        if token == "{" and before[0] == "number" and tokens[i - 2][1] not in {"_", *_FUNCTIONS}:
            return False
        if token == "\\infty" and not _is_bound(tokens, i):
            return False
        before = (kind, token)
    text = "".join(token for _, token in tokens)
    return before[1] not in _OPERATORS and text.count("=") <= 1 and not re.search(r"/[\w.]+/|/[0-9.]+[a-zA-Z(]", text)


def _is_bound(tokens: list[tuple[str, str]], place: int) -> bool:
    """An infinity that is an end of an interval, or all there is on its side; one in a sum or product has no value."""
    texts = ["(", *(token for _, token in tokens), ")"]
    before = texts[place - 1 if texts[place] in _SIGNS else place]
    return before in {"(", "[", ",", "\\in"} | _RELATIONS and texts[place + 2] in {")", "]", ","} | _RELATIONS


def _after_base(tokens: list[tuple[str, str]]) -> bool:
    r"""Directly after the base of `\log_2` or `\log_{10}`."""
    text = "".join(token for _, token in tokens)
    return re.search(r"\\log_(?:\w+|\{[^{}]*\})$", text) is not None


def _exact(kind: str, token: str) -> str:
    """Decimals as fractions: math-verify rounds them to six places."""
    if kind != "number" or "." not in token:
        return token
    head, tail = token.split(".")
    return f"(\\frac{{{int(head + tail)}}}{{{10 ** len(tail)}}})"


def _as_sum(mixed: re.Match[str]) -> str:
    """`3\\frac{1}{2}` is three and a half; what is no proper fraction stays, and is not understood."""
    if int(mixed[2]) >= int(mixed[3]):
        return f"{mixed[1]} 0"
    return f"({mixed[1]}+\\frac{{{mixed[2]}}}{{{mixed[3]}}})"
