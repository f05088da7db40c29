"""Form of tests: whether they only call functions of the program and look at data, so that they can run in another process.

Decided by the tests' text alone, which no program can change. In doubt the answer is no.
"""

import ast
import builtins
import datetime
import decimal
import difflib
import fractions
import hashlib
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from unittest import TestCase

from covey.sandbox.suite import library_name, names_of, parsed, subject_of

_MODULES = frozenset(
    [
        "bisect", "cmath", "collections", "copy", "datetime", "decimal", "difflib", "fractions", "functools",
        "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re", "signal", "solution",
        "statistics", "string", "time", "typing", "unittest", "__future__",
    ]
)  # fmt: skip
"""Modules that mean the same in another process than the program's."""
_DATA = (
    str, bytes, bytearray, list, dict, set, tuple, int, float, complex, range, deque, Counter, OrderedDict, defaultdict, decimal.Decimal,
    fractions.Fraction, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, re.Match, re.Pattern,
    difflib.SequenceMatcher, type(hashlib.sha256()),
)  # fmt: skip
_OF_DATA = frozenset(name for kind in _DATA for name in dir(kind) if name[0] != "_")
_OF_CASES = frozenset(name for name in dir(TestCase) if name[0] != "_") | {"exception", "main", "TestCase"}
_CHANGING = frozenset(
    [
        "append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear",
        "update", "add", "discard", "sort", "reverse", "setdefault",
    ]
)  # fmt: skip
_NEAR = frozenset(
    [
        "callable", "compile", "delattr", "dir", "eval", "exec", "getattr", "globals", "hasattr", "hash", "id",
        "input", "issubclass", "locals", "memoryview", "object", "open", "setattr", "super", "vars", "__import__",
        "StopIteration", "StopAsyncIteration", "GeneratorExit", "property", "classmethod", "staticmethod",
    ]
)  # fmt: skip
"""Names of Python's that are asked of objects, not of data."""
_NEAR_NODES = (
    ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.Global, ast.Delete, ast.Match, ast.NamedExpr,
)  # fmt: skip
_SOLUTION = "Solution"
"""The class whose methods are the functions of many data sets."""


@lru_cache(maxsize=1024)
def are_apart(setup: str, tests: Sequence[str]) -> bool:
    """True if these tests (a tuple) do nothing with the program but call its functions with data, for data."""
    try:
        trees = [parsed(text) for text in (setup, *tests)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # the process that runs them says so
    try:
        return _Look(trees).is_apart()
    except RecursionError:
        return False


class _Look:
    def __init__(self, trees: list[ast.Module]) -> None:
        self._nodes = [node for tree in trees for node in ast.walk(tree)]
        self._top = [node for tree in trees for node in tree.body]
        self._parents = {id(child): node for node in self._nodes for child in ast.iter_child_nodes(node)}
        used, bound = names_of(self._nodes)
        self._used, free = used, used - bound
        subject = subject_of(trees, free)
        self._libraries = {name for name in free if library_name(name) is not None and name != subject}
        self._libraries |= {name for node in self._nodes for name in _imports(node)}
        self._program = {name for name in free - self._libraries if name == subject or not hasattr(builtins, name)}
        self._libraries |= self._assigned(lambda value: self._root(value) in self._libraries and not self._names(value))
        self._solutions = {_SOLUTION} | self._assigned(lambda value: self._root(value) == _SOLUTION)

    def is_apart(self) -> bool:
        return all(map(self._is_plain, self._nodes)) and not self._shares() and not self._sets()

    def _sets(self) -> bool:
        """True if the tests set a name that they do not read: it may be the program's."""
        settings = [node for node in self._top if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
        names = {target.id for node in settings for target in node.targets if isinstance(target, ast.Name)}
        return not names <= self._used

    def _is_plain(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return all(alias.name in _MODULES for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return (node.module or "solution") in _MODULES or node.level > 0
        if isinstance(node, ast.ClassDef):
            return bool(node.bases) and all(ast.unparse(base).endswith("TestCase") for base in node.bases)
        if isinstance(node, ast.With):
            return all(_is_assertion(item.context_expr) for item in node.items)
        if isinstance(node, ast.Compare):
            return all(
                self._is_value(node, place) for place, op in enumerate(node.ops) if isinstance(op, ast.Is | ast.IsNot)
            )
        if isinstance(node, ast.Attribute):
            return self._is_attribute(node)
        if isinstance(node, ast.Name):
            return node.id not in _NEAR and (node.id not in self._program or self._is_function(node))
        return not isinstance(node, _NEAR_NODES)

    def _is_value(self, node: ast.Compare, place: int) -> bool:
        """An identity that says the same of a copy: with None, True, False or a class of Python's."""
        sides = ([node.left, *node.comparators][place], node.comparators[place])
        return any(
            (isinstance(side, ast.Constant) and side.value in (None, True, False))
            or (isinstance(side, ast.Name) and isinstance(getattr(builtins, side.id, None), type))
            for side in sides
        )

    def _is_attribute(self, node: ast.Attribute) -> bool:
        root = self._root(node)
        if root in self._libraries:
            return (root, node.attr) not in (("random", "seed"), ("random", "setstate"), ("unittest", "mock"))
        if root in self._solutions:
            return node.attr[0] != "_"
        if isinstance(node.value, ast.Name) and node.value.id in self._program:
            return False
        if root in ("self", "cls"):
            return True
        return node.attr in (_OF_DATA | _OF_CASES)

    def _is_function(self, node: ast.Name) -> bool:
        """Called, handed over or given another name; with a name such as classes do not have."""
        above = self._parents[id(node)]
        if not (node.id == _SOLUTION or node.id.lstrip("_")[:1].islower()):
            return isinstance(above, ast.Call) and node is above.func and self._is_compared_with_data(above)
        if isinstance(above, ast.Call):
            return node is above.func or node in above.args
        return isinstance(above, ast.keyword | ast.Assign | ast.Tuple | ast.List)

    def _is_compared_with_data(self, call: ast.Call) -> bool:
        """`Name(data) == data`, as of a function: objects of a class are asked for more."""
        above = self._parents[id(call)]
        if not isinstance(above, ast.Compare) or isinstance(self._parents[id(above)], ast.Compare):
            return False
        if not (len(above.ops) == 1 and isinstance(above.ops[0], ast.Eq)):
            return False
        values = [*call.args, *(above.comparators if call is above.left else [above.left])]
        return not call.keywords and not any(map(self._names, values))

    def _root(self, node: ast.expr) -> str | None:
        """The name that an expression of attributes, calls and items begins with."""
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute | ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Call):
                node = node.func
            else:
                return None
        return node.id

    def _names(self, node: ast.expr) -> bool:
        """True if `node` has a name of the program's in it."""
        return any(isinstance(inner, ast.Name) and inner.id in self._program for inner in ast.walk(node))

    def _assigned(self, of: object) -> set[str]:
        """Names that are assigned a value for which `of` is true."""
        assert callable(of)
        names = set()
        for node in self._nodes:
            if isinstance(node, ast.Assign) and of(node.value):
                for target in node.targets:
                    names |= {item.id for item in ast.walk(target) if isinstance(item, ast.Name)}
        return names

    def _shares(self) -> bool:
        """True if the tests change a value that they have from the program, or have handed to it: it may still hold it."""
        calls = [node for node in self._nodes if isinstance(node, ast.Call) and self._root(node) in self._program]
        passed = {item.id for call in calls for item in call.args if isinstance(item, ast.Name)}
        numbers = set(map(id, calls))
        taken = self._assigned(lambda value: any(id(inner) in numbers for inner in ast.walk(value)))
        return bool((passed | taken) & set(map(self._changed, self._nodes)))

    def _changed(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            return self._root(node.func.value)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            return self._root(node)
        return None


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return []


def _is_assertion(node: ast.expr) -> bool:
    named = ("assertRaises", "assertRaisesRegex", "subTest")
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in named
