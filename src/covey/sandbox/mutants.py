"""Mutants of tests that run in a program's process: comparisons with values that look alike instead of those that the tests expect.

A pass counts only if it depends on what the tests say. So after a pass the tests run again, in new processes, with other values in
half of the comparisons that held, then in the other half, drawn with a key that the program cannot know. An honest program's
comparisons fail there; an object that equals everything, or a program that reads what is expected, gives itself away. A
comparison that did not hold on the program itself says nothing and stays. Standard library only.
"""

import ast
import collections
import datetime
import decimal
import fractions
import operator
from os import urandom
from typing import Any

NOTE, PRETEND, SEEN = "note of tests", "mutant of tests", "seen of tests"
"""Names, no identifiers, of the functions that the tests' run brings."""
PROBE = -1
"""The number of what objects say to values that no test expects."""
_EQUALS = ("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual")
_NO_VALUES = ("func", "decorator_list", "bases", "type", "annotation", "returns", "cls", "keywords")
"""Fields of nodes whose names are functions and classes."""


class Mutation(ast.NodeTransformer):
    """Numbers the comparisons for equality, and puts other values into the `chosen` ones; with any, looks at objects too."""

    def __init__(self, chosen: frozenset[int] = frozenset()) -> None:
        self.constants: dict[type, list[Any]] = {int: [100 + _below(10**5)]}
        """Values that the tests write, but for short ones, and whole numbers."""
        self._chosen, self._count = chosen, 0
        self._functions: set[int] = set()
        self._truths: set[int] = set()

    def rewrite(self, tree: ast.Module, number: int) -> ast.Module:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and type(node.value) not in (bool, type(None))
                and len(repr(node.value)) > _SHORT
            ):
                self.constants.setdefault(type(node.value), []).append(node.value)
            self._functions |= {id(part) for name in _NO_VALUES for part in _parts(node, name)}
            if isinstance(node, ast.Assert | ast.If | ast.While | ast.IfExp):
                self._mark(node.test)
        changed: ast.Module = self.visit(tree)
        return changed

    def _mark(self, node: ast.expr) -> None:
        """The parts of a condition that are asked for their truth alone: what an object answers for it counts."""
        self._truths.add(id(node))
        inner = node.values if isinstance(node, ast.BoolOp) else [node.operand] if isinstance(node, ast.UnaryOp) else []
        for part in inner:
            self._mark(part)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        is_in = len(node.ops) == 1 and isinstance(node.ops[0], ast.In)
        if not (is_in or all(isinstance(op, ast.Eq) for op in node.ops)):
            return self.generic_visit(node)
        sides = [node.left, *node.comparators]
        number, others = self._mutated(sides[1:] if is_in else sides)
        is_truth = ast.Constant(id(node) in self._truths)
        if number in self._chosen and others:
            others = [node.left, *others] if is_in else others
            return _call(
                PRETEND,
                ast.Constant(number),
                self.generic_visit(ast.Compare(others[0], node.ops, others[1:])),
                is_truth,
            )
        inner = self.generic_visit(node)
        return _call(NOTE, ast.Constant(number), inner, is_truth) if others else inner

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in _EQUALS and len(node.args) > 1):
            return self._looked_at(node)
        number, others = self._mutated(node.args[:2])
        if number in self._chosen and others:
            equal = ast.Compare(others[0], [ast.Eq()], [others[1]])
            return _call(PRETEND, ast.Constant(number), self.generic_visit(equal), ast.Constant(True))
        passed: Any = self.generic_visit(node)
        is_none = ast.Compare(passed, [ast.Is()], [ast.Constant(None)])
        return _call(NOTE, ast.Constant(number), is_none, ast.Constant(False)) if others else passed

    def _mutated(self, sides: list[ast.expr]) -> tuple[int, list[ast.expr]]:
        """The number of the next comparison, and its `sides` with other values where they are written out; empty if none is."""
        self._count += 1
        others = list(map(_other, sides))
        return self._count - 1, others if any(map(operator.is_not, sides, others)) else []

    def _looked_at(self, node: Any) -> ast.AST:
        is_value = isinstance(getattr(node, "ctx", _LOAD), ast.Load) and id(node) not in self._functions
        node = self.generic_visit(node)
        return _call(SEEN, node) if self._chosen and is_value else node

    visit_Name = visit_Attribute = visit_Subscript = visit_Await = _looked_at  # noqa: N815


class Record:
    """Outcomes of the comparisons of one test."""

    def __init__(self, constants: dict[type, list[Any]], codes: frozenset[int], classes: frozenset[int]) -> None:
        """`constants` are the tests' own, `codes` and `classes`, by number, what is no program's."""
        self._constants, self._codes, self._classes = list(constants.values()), codes, classes
        self._met: dict[int, Any] = {}
        self._answers: dict[int, list[int]] = {}
        self._true: dict[int, bool] = {}
        self._held: dict[int, bool] = {}

    def note(self, number: int, value: Any, is_truth: bool) -> Any:
        """Record and return `value`, the result of comparison `number`."""
        self._true[number] = (_is_true(value) if is_truth else value is True) and self._true.get(number, True)
        return value

    def pretend(self, number: int, value: Any, is_truth: bool) -> bool:
        """True, as the comparison was before another value took the place of the expected one; `value` is recorded."""
        self._held[number] = self._held.get(number, False) or (_is_true(value) if is_truth else value is True)
        return True

    def seen(self, value: Any) -> Any:
        """`value`, a value of the tests'; objects of the program's in it are asked, once each, about a value that no test expects."""
        for item in _items(value):
            kind = type(item)
            is_strange = kind.__flags__ & _HEAP and id(kind) not in self._classes and id(item) not in self._met
            if is_strange and not self._is_tests(kind):
                self._met[id(item)] = item  # kept alive, so that no other object can get its number
                counts = self._answers.setdefault(id(kind), [0, 0])
                counts[1] += 1
                counts[0] += any(_is_like(item, look_alike(values[_below(len(values))])) for values in self._constants)
        return value

    def _is_tests(self, kind: type) -> bool:
        """True if the tests define how objects of this class compare."""
        equals = [_names(parent)["__eq__"] for parent in _mro(kind) if "__eq__" in _names(parent)]
        return id(getattr(equals[0], "__code__", None)) in self._codes

    def taken(self) -> dict[str, list[int]]:
        """The numbers of the comparisons that were always true, and of those that held with other values; then anew."""
        numbers = {
            "true": [number for number, value in self._true.items() if value],
            "held": [number for number, value in self._held.items() if value],
        }
        if any(2 * yes >= count for yes, count in self._answers.values()):
            numbers["held"].append(PROBE)
        for store in (self._true, self._held, self._answers, self._met):
            store.clear()
        return numbers


_HEAP = 1 << 9
"""The flag of classes made by Python code."""
_mro = type.__dict__["__mro__"].__get__
_names = type.__dict__["__dict__"].__get__


def _items(value: Any) -> list[Any]:
    """`value`, and what is in it where it is a builtin container of a few."""
    kind = id(type(value))
    if _KINDS.get(kind) == 2 and len(value) < _MOST:
        return [*dict.keys(value), *dict.values(value)]
    return list(value) if _KINDS.get(kind) == 1 and len(value) < _MOST else [value]


_MOST, _SHORT = 1000, 3


def _is_like(item: Any, other: Any) -> bool:
    """True if `item` passes for the value `other` in one of the ways that tests compare."""
    for says in (lambda: item == other, lambda: abs(item - other) < 1e-6, lambda: item <= other and item >= other):
        try:
            answer = says()
        except Exception:  # noqa: BLE001 - foreign code
            continue
        if answer is True or (any("__bool__" in _names(parent) for parent in _mro(type(answer))) and _is_true(answer)):
            return True  # an expression, such as a query is made of, is no yes
    return False


def _is_true(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # noqa: BLE001 - an array, which has many truths
        return False


_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_SCALARS = (
    int, float, bool, str, bytes, complex, type(None), decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime,
    datetime.timedelta,
)  # fmt: skip
_KINDS = {id(kind): place for place, kinds in enumerate((_SCALARS, _CONTAINERS, _DICTS)) for kind in kinds}
"""By number: a class may have a metaclass that says it equals another."""


def look_alike(value: Any) -> Any:
    """Another value of the same kind and size."""
    for _ in range(100):
        other = _drawn(value)
        if other != value:
            return other
    return "another"


def _drawn(value: Any) -> Any:
    kind: Any = type(value)
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
        return dict(pairs) if kind is collections.defaultdict else kind(pairs)
    if kind in (datetime.date, datetime.datetime, datetime.timedelta):
        return value + datetime.timedelta(days=1 + _below(25))
    if kind is bytes:
        return bytes(_text(value.decode("latin-1")), "latin-1")
    return value + 1 + _below(9)


def _number(value: Any, kind: Any) -> Any:
    """A number of as many digits."""
    head, mark, tail = str(value).partition("e")
    whole, point, part = head.partition(".")
    round_at = len(whole.rstrip("0")) or len(whole) - 1  # a round number stays as round
    digits = [
        str(1 + _below(9)) if n < max(round_at, 1) and letter.isdigit() else letter for n, letter in enumerate(whole)
    ]
    digits += [point, *(str(1 + _below(9)) if len(part) > 1 else letter for letter in part)]
    try:
        result = kind("".join(digits) + mark + tail)
    except (ValueError, ArithmeticError):  # no digits at all: an infinity
        return kind(_below(100))
    return result if abs(result - value) * 20 > abs(value) else value


def _text(value: str) -> str:
    """A text of as many letters, most of them those of `value`."""
    letters = sorted({letter for letter in value if letter.isalpha()}) or ["e"]
    if not value:
        return "e"
    place = _below(len(value))
    characters = list(value)
    choices = letters if len(letters) > 2 and characters[place].isalpha() else list("etaoinsrhld")
    characters[place] = str(_below(10)) if characters[place].isdigit() else choices[_below(len(choices))]
    text = "".join(characters)
    return text if text.casefold() != value.casefold() else value


def _below(most: int) -> int:
    return int.from_bytes(urandom(4), "big") % most


def _other(node: ast.expr) -> ast.expr:
    """Another value, where `node` is written out."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return node
    return ast.parse(repr(look_alike(value)), mode="eval").body


def _parts(node: ast.AST, name: str) -> list[ast.AST]:
    value = getattr(node, name, None)
    return value if isinstance(value, list) else [value] if isinstance(value, ast.AST) else []


def _call(name: str, *arguments: Any) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


_LOAD = ast.Load()
