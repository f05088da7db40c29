"""The process that runs the tests: names of the code under test stand for objects in its process, called over a socket.

Expected values are only here, and only this process writes verdicts, so code under test can neither read the one nor forge
the other. Results by value are compared here. Results by reference never equal a value of the tests, and
comparisons or arithmetic with such values are not handed to it: its own `__eq__` would be the judge. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from covey.rewards.sandbox import wire

_FILE = "<tests>"
_OURS = {
    "math": ("isclose", "sqrt", "pi", "inf", "nan", "isnan"),
    "collections": ("Counter", "defaultdict", "deque", "OrderedDict"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "datetime": ("date", "datetime", "timedelta"),
}
"""Names that tests use without an import since the code under test usually has one: taken from the library all the same."""
_MODULES = frozenset(
    [
        "bisect",
        "cmath",
        "collections",
        "copy",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "os",
        "random",
        "re",
        "statistics",
        "sys",
        "typing",
        "unittest",
    ]
)
"""Modules of which the same is true. Others may be what the code under test calls its own: `queue`, `code`, `array`."""


def judge(tests: bytes, connection: socket.socket, verdict: int) -> None:
    """Run `{"setup": str, "tests": [str]}` and write one JSON line to `verdict` for each test, then `{"done": true}`."""
    plan = json.loads(tests)
    link = _Link(connection)
    try:
        reply = wire.receive(connection)
        if "raised" in reply:
            return _write(verdict, {"code": reply})
        namespace = {"__name__": "__tests__", **_names(link, plan["setup"], plan["tests"])}
        exec(compile(plan["setup"], _FILE, "exec", dont_inherit=True), namespace)
    except wire.Broken:
        return _write(verdict, {"gone": "before the tests"})
    except BaseException as error:  # noqa: BLE001 - the border to the tests' code
        is_tests = isinstance(error, SyntaxError | ImportError) and link.raised is None
        said = {"setup": _said(error)} if is_tests else {"code": {"raised": type(error).__name__, "said": _said(error)}}
        return _write(verdict, said)
    for number, test in enumerate(plan["tests"]):
        _write(verdict, {"test": number, **_outcome(link, test, namespace)})
    _write(verdict, {"done": True})


def _outcome(link: _Link, test: str, namespace: dict[str, Any]) -> dict[str, Any]:
    try:
        exec(compile(test, _FILE, "exec", dont_inherit=True), namespace)
    except wire.Broken:
        return {"outcome": "gone", "said": "the code ended its process, or broke the connection to it"}
    except _Raised as error:
        return {"outcome": "raised", "kind": error.kind, "said": f"{error.kind}: {error}"}
    except AssertionError as error:
        return {
            "outcome": "raised" if link.raised is error else "wrong",
            "kind": "AssertionError",
            "said": _said(error),
        }
    except BaseException as error:  # noqa: BLE001 - the border to the tests' code
        return {"outcome": "raised", "kind": type(error).__name__, "said": _said(error)}
    return {"outcome": "passed"}


def _said(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()[:2000]


def _write(verdict: int, line: Mapping[str, Any]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(verdict, data) :]


def _names(link: _Link, setup: str, tests: list[str]) -> dict[str, Any]:
    """Values of the names that the tests use but do not define. Raises SyntaxError for tests that are not Python."""
    trees = [ast.parse(text) for text in (setup, *tests)]
    used, bound = names_of([node for tree in trees for node in ast.walk(tree)])
    found: dict[str, Any] = {}
    subject = _subject(trees, used - bound)
    for name in sorted(used):
        known = _known(name) if name != subject else None
        value = link.name(name) if known is None else known[0]
        if value is _MISSING and name in sys.stdlib_module_names and name not in ("this", "antigravity"):
            value = importlib.import_module(name)
        if value is not _MISSING:
            found[name] = value
    return found


def names_of(nodes: list[ast.AST]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that tests read, and those that they bind in any place."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return frozenset(used), frozenset(bound)


def _subject(trees: list[ast.Module], free: frozenset[str]) -> str | None:
    """The name of Python's that the code under test redefines, where the tests name nothing else of that code's.

    It is the one name of the library that they call, or else the one builtin that every test calls first.
    """
    if any(not hasattr(builtins, name) and library_name(name) is None for name in free):
        return None
    called = [
        [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        for tree in trees[1:]
    ]
    of_library = {name for names in called for name in names if name in free and library_name(name) is not None}
    if len(of_library) == 1:
        return of_library.pop()
    firsts = {names[0] if names else None for names in called}
    first = firsts.pop() if len(firsts) == 1 else None
    return first if first in free else None


def library_name(name: str) -> tuple[str, str] | None:
    """The module of the library's that a name without an import is taken from, and its name there; empty for the module."""
    for module, names in _OURS.items():
        if name in names and name != "datetime":
            return module, name
    return (name, "") if name in _MODULES else None


def _known(name: str) -> tuple[Any] | None:
    if hasattr(builtins, name):
        return (getattr(builtins, name),)
    found = library_name(name)
    if found is None:
        return None
    module = importlib.import_module(found[0])
    return (getattr(module, found[1]) if found[1] else module,)


class _Raised(Exception):  # noqa: N818 - what happened there
    """The code under test raised an exception whose class the tests' process lacks."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


_MISSING = object()


class _Link:
    """Questions to the process of the code under test, and the answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._callbacks: list[Any] = []
        self.raised: BaseException | None = None

    def name(self, name: str) -> Any:
        """Value of `name` in the program; `_MISSING` where it is undefined, or a module."""
        reply = self._ask({"do": "name", "name": name})
        return _MISSING if reply.get("missing") else wire.decode(reply["value"], self._remote)

    def ask(self, what: str, *arguments: Any, **keywords: Any) -> Any:
        """The value of one call there, with what it did to the lists, sets and dictionaries it was given."""
        named = {name: self._encode(item) for name, item in keywords.items()}
        reply = self._ask({"do": what, "arguments": [self._encode(item) for item in arguments], "keywords": named})
        for item, now in zip(arguments, reply.get("given", ()), strict=False):
            if now is not None:
                _become(item, wire.decode(now, self._remote))
        return wire.decode(reply["value"], self._remote)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        wire.send(self._connection, request)
        while "callback" in (reply := wire.receive(self._connection)):
            wire.send(self._connection, self._call_back(reply))
        if "raised" in reply:
            self.raised = _exception(str(reply["raised"]), str(reply.get("said", "")))
            raise self.raised
        if "value" not in reply and "missing" not in reply:
            raise wire.Broken("an answer without a value")
        return reply

    def _call_back(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._callbacks[request["callback"]]
            arguments = [wire.decode(item, self._remote) for item in request["arguments"]]
            return {"value": self._encode(function(*arguments))}
        except wire.Broken:
            raise
        except BaseException as error:  # noqa: BLE001 - sent to the caller in the other process
            return {"raised": type(error).__name__, "said": str(error)}

    def _encode(self, value: Any) -> Any:
        return wire.encode(value, self._refer)

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["R", object.__getattribute__(value, "_number")]
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} cannot be given to the code under test")
        self._callbacks.append(value)
        return ["C", len(self._callbacks) - 1]

    def _remote(self, message: list[Any]) -> Remote:
        if message[0] != "R" or not isinstance(message[1], int):
            raise wire.Broken("a reference of no known kind")
        return Remote(self, message[1])


def _exception(kind: str, said: str) -> BaseException:
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(said)
        except TypeError:  # a UnicodeError, an ExceptionGroup: they are made of more than a text
            return _Raised(kind, said)
    return _Raised(kind, said)


def _become(item: Any, now: Any) -> None:
    if type(item) is not type(now) or item == now:
        return
    if isinstance(item, list | bytearray):
        item[:] = now
    elif isinstance(item, dict | set | collections.Counter):
        item.clear()
        item.update(now)


def _both(name: str) -> Any:
    """An operator that is asked there only when both sides live there."""

    def apply(self: Remote, other: Any) -> Any:
        return self._link.ask(name, self, other) if isinstance(other, Remote) else NotImplemented

    return apply


class Remote:
    """Stands for an object in the process of the code under test."""

    def __init__(self, link: _Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    _link: _Link
    _number: int
    __eq__, __lt__, __le__, __gt__, __ge__ = map(_both, ("eq", "lt", "le", "gt", "ge"))
    __add__, __sub__, __mul__, __truediv__ = map(_both, ("add", "sub", "mul", "truediv"))

    def __hash__(self) -> int:
        return hash(self._number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._link.ask("call", self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._link.ask("delitem", self, key)

    def __iter__(self) -> Any:
        there = self._link.ask("iter", self)
        while True:
            try:
                value = self._link.ask("next", there)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._link.ask("next", self)

    def __contains__(self, value: Any) -> bool:
        return any(item == value for item in self)

    def __len__(self) -> int:
        return self._link.ask("len", self)

    def __bool__(self) -> bool:
        return self._link.ask("bool", self)

    def __int__(self) -> int:
        return self._link.ask("int", self)

    def __float__(self) -> float:
        return self._link.ask("float", self)

    def __neg__(self) -> Any:
        return self._link.ask("neg", self)

    def __str__(self) -> str:
        return self._link.ask("str", self)

    def __repr__(self) -> str:
        return self._link.ask("repr", self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._link.ask("isinstance", instance, self)
