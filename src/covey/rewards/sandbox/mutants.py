"""Mutants of tests that run beside a program: comparisons with values that look alike instead of those that the tests expect.

A pass counts only if it depends on what the tests say. So after a pass the tests run again, in new processes, with other values in
half of the comparisons that held, then in the other half, drawn with a key that the program cannot know. An honest program's
comparisons fail there; an object that equals everything, or a program that reads what is expected, gives itself away. A
comparison that did not hold on the program itself says nothing and stays. Standard library only.
"""

from __future__ import annotations

import ast
import collections
import datetime
import decimal
import fractions
from os import urandom
from typing import Any

NOTE, PRETEND, UNLIKE = "note of the tests", "mutant of the tests", "unlike of the tests"
"""Names, no identifiers, of the functions that the tests' run brings."""
_EQUALS = frozenset(
    [
        "assertEqual",
        "assertEquals",
        "assertListEqual",
        "assertDictEqual",
        "assertTupleEqual",
        "assertSetEqual",
        "assertSequenceEqual",
        "assertMultiLineEqual",
    ]
)
_ASKED = 4
"""Values that an object of the program's is compared with in place of one; it may say yes to one of them by chance."""


class Mutation(ast.NodeTransformer):
    """Numbers the comparisons for equality, and puts other values into the `chosen` ones."""

    def __init__(self, chosen: frozenset[int] = frozenset()) -> None:
        self._chosen, self._count = chosen, 0
        self._truths: set[int] = set()

    def rewrite(self, tree: ast.Module, number: int) -> ast.Module:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert | ast.If | ast.While | ast.IfExp):
                self._mark(node.test)
        changed: ast.Module = self.visit(tree)
        return changed

    def _mark(self, node: ast.expr) -> None:
        """Parts of a condition that are asked for their truth alone."""
        self._truths.add(id(node))
        inner = node.values if isinstance(node, ast.BoolOp) else [node.operand] if isinstance(node, ast.UnaryOp) else []
        for part in inner:
            self._mark(part)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        is_truth = ast.Constant(id(node) in self._truths)
        if not (
            all(isinstance(op, ast.Eq) for op in node.ops) or (len(node.ops) == 1 and isinstance(node.ops[0], ast.In))
        ):
            return self.generic_visit(node)
        number = self._number()
        operands = [node.left, *node.comparators]
        if number not in self._chosen:
            return _call(NOTE, number, self.generic_visit(node), is_truth)
        is_in = isinstance(node.ops[0], ast.In)
        places = [place for place, item in enumerate(operands) if _is_closed(item) and (place or not is_in)]
        if places:
            for place in places:
                operands[place] = _other(operands[place])
            return _call(
                PRETEND, number, self.generic_visit(ast.Compare(operands[0], node.ops, operands[1:])), is_truth
            )
        if len(operands) > 2:
            return self.generic_visit(node)
        return _call(UNLIKE, number, ast.Constant(is_in), *[self.visit(item) for item in operands])

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _EQUALS):
            return self.generic_visit(node)
        number = self._number()
        if number not in self._chosen:
            inner = self.generic_visit(call)
            node.value = _call(NOTE, number, ast.Compare(inner, [ast.Is()], [ast.Constant(None)]), ast.Constant(True))
            return node
        operands = call.args[:2]
        places = [place for place, item in enumerate(operands) if _is_closed(item)]
        for place in places:
            operands[place] = _other(operands[place])
        if places and len(operands) == 2:
            node.value = _call(PRETEND, number, self.generic_visit(ast.Compare(operands[0], [ast.Eq()], [operands[1]])), ast.Constant(True))  # fmt: skip
        else:
            node.value = _call(UNLIKE, number, ast.Constant(False), *[self.visit(item) for item in operands])
        return node

    def _number(self) -> int:
        self._count += 1
        return self._count - 1


class Record:
    """What the comparisons of one test came to."""

    def __init__(self) -> None:
        self._true: dict[int, bool] = {}
        self._held: dict[int, bool] = {}

    def note(self, number: int, value: Any, is_truth: bool) -> Any:
        """`value`, which the comparison `number` came to."""
        if is_truth:
            value = bool(value)
        if value is True or value is False:
            self._true[number] = value and self._true.get(number, True)
        return value

    def pretend(self, number: int, value: Any, is_truth: bool) -> bool:
        """True, as the comparison was before another value took the place of the expected one; `value` is recorded."""
        self._held[number] = self._held.get(number, False) or (value is True or (is_truth and bool(value)))
        return True

    def unlike(self, number: int, is_in: bool, *operands: Any) -> Any:
        """The comparison of what is data with what is an object of the program's, made with other data."""
        left, right = operands
        is_right = is_data(right) and not is_data(left)
        if not is_right and (is_in or is_data(right) or not is_data(left)):
            return left in right if is_in else left == right
        yes = 0
        for _ in range(_ASKED):
            first, second = (left, look_alike(right)) if is_right else (look_alike(left), right)
            yes += 1 if (first in second if is_in else first == second) else 0
        self._held[number] = self._held.get(number, False) or yes > 1
        return True

    def taken(self) -> dict[str, list[int]]:
        """The numbers of the comparisons that were always true, and of those that held with other values; then anew."""
        found = {
            "true": [number for number, value in self._true.items() if value],
            "held": [number for number, value in self._held.items() if value],
        }
        self._true.clear()
        self._held.clear()
        return found


_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_SCALARS = (
    int, float, bool, str, bytes, complex, type(None), decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime,
    datetime.timedelta,
)  # fmt: skip
_KINDS = {id(kind): place for place, kinds in enumerate((_SCALARS, _CONTAINERS, _DICTS)) for kind in kinds}
"""By number: a class may have a metaclass that says it equals another."""


def is_data(value: Any) -> bool:
    """True if Python alone decides what equals `value`."""
    place = _KINDS.get(id(type(value)))
    if place == 2:
        return all(is_data(key) and is_data(item) for key, item in dict.items(value))
    return place == 0 or (place == 1 and all(map(is_data, value)))


def look_alike(value: Any) -> Any:
    """Another value of the same kind and size."""
    for _ in range(100):
        other = _drawn(value)
        if other != value:
            return other
    return "another"


def _drawn(value: Any) -> Any:
    kind = type(value)
    if kind is bool or value is None:
        return not value
    if kind in (int, float, decimal.Decimal):
        return _number(value, kind)
    if kind is str:
        return _text(value)
    if kind in _CONTAINERS:
        return kind([look_alike(item) for item in value] or [_below(10)])
    if kind in _DICTS:
        pairs = {look_alike(key): look_alike(item) for key, item in value.items()} or {_below(10): _below(10)}
        return collections.defaultdict(None, pairs) if kind is collections.defaultdict else kind(pairs)
    if kind in (datetime.date, datetime.datetime, datetime.timedelta):
        return value + datetime.timedelta(days=1 + _below(25))
    if kind is bytes:
        return bytes(_text(value.decode("latin-1")), "latin-1")
    return value + 1 + _below(9)


def _number(value: Any, kind: Any) -> Any:
    """A number of as many digits."""
    head, mark, tail = str(value).partition("e")
    digits = [str(1 + _below(9)) if letter in "123456789" else letter for letter in head]
    if "0" in head and not any(letter in "123456789" for letter in head):
        digits[-1] = str(1 + _below(9))
    try:
        found = kind("".join(digits) + mark + tail)
    except (ValueError, ArithmeticError):  # no digits at all: an infinity
        return kind(_below(100))
    return found if abs(found - value) * 20 > abs(value) else value


def _text(value: str) -> str:
    """A text of as many letters, most of them those of `value`."""
    letters = sorted({letter for letter in value if letter.isalpha()}) or ["e"]
    if not value:
        return "e"
    place = _below(len(value))
    found = list(value)
    choices = letters if len(letters) > 2 and found[place].isalpha() else list("etaoinsrhld")
    found[place] = str(_below(10)) if found[place].isdigit() else choices[_below(len(choices))]
    text = "".join(found)
    return text if text.casefold() != value.casefold() else value


def _below(most: int) -> int:
    return int.from_bytes(urandom(4), "big") % most


def _is_closed(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _other(node: ast.expr) -> ast.expr:
    return ast.parse(repr(look_alike(ast.literal_eval(node))), mode="eval").body


def _call(name: str, number: int, *arguments: Any) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [ast.Constant(number), *arguments], [])
