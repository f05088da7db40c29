"""The process that runs the tests: names of the code under test stand for objects in its process, called over a socket.

Only this process has the expected values, compares and writes verdicts, with a Python that the code under test never touches: it
can neither read the one nor forge the other. It returns data, or an object that equals no value of the tests: comparisons or
arithmetic with such values are not handed to it, its own `__eq__` would be the judge. Standard library only.
"""

from __future__ import annotations

import builtins
import collections
import json
import os
import socket
import traceback
from collections.abc import Mapping
from typing import Any

from covey.sandbox import suite, wire


def judge(tests: bytes, connection: socket.socket, verdict: int) -> None:
    """Run `{"setup": str, "tests": [str]}` and write one JSON line to `verdict` for each test, then `{"done": true}`."""
    plan = json.loads(tests)
    try:
        made = suite.Suite(plan["setup"], plan["tests"])
    except BaseException as error:  # noqa: BLE001 - the border to the tests' code
        return _write(verdict, {"setup": _message(error)})
    link = _Link(connection)
    try:
        reply = wire.receive(connection)
        if "raised" in reply:
            return _write(verdict, {"code": reply})
        space = _namespace(link, made)
        exec(made.setup, space)
    except BaseException as error:  # noqa: BLE001 - the border to the tests' code
        kind = error.kind if isinstance(error, _Raised | _Left) else type(error).__name__
        return _write(verdict, link.trouble or {"code": {"raised": kind, "said": str(error)}})
    for number, test in enumerate(plan["tests"]):
        outcome = _outcome(link, made, number, test, space)
        _write(verdict, {"test": number, **outcome})
        if "beside" in outcome:
            return
    _write(verdict, {"done": True})


def _outcome(link: _Link, made: suite.Suite, number: int, test: str, space: dict[str, Any]) -> dict[str, Any]:
    try:
        made.run(number, space, space)
        outcome: dict[str, Any] = {"outcome": "passed"}
    except AssertionError as error:
        outcome = {"outcome": "raised" if link.raised is error else "wrong", **_raised(error)}
        if outcome["said"] == "AssertionError":
            outcome["said"] = f"AssertionError: {_line(error, test)}"[:300]
    except BaseException as error:  # noqa: BLE001 - the border to the tests' code
        outcome = {"outcome": "raised", **_raised(error)}
    return link.trouble or outcome


def _namespace(link: _Link, made: suite.Suite) -> dict[str, Any]:
    """The tests' globals: Python's and the library's names, then the values that the program gives to those that are free."""
    library_names = made.library_values()
    space: dict[str, Any] = {"__name__": "__main__", **library_names}
    for name in sorted(made.free - library_names.keys()):
        if name == made.subject or not hasattr(builtins, name):
            value = link.name(name)
            if value is not _MISSING:
                space[name] = value
    space[suite.MAIN] = made.main_of(space)
    return space


def _message(error: BaseException) -> str:
    text = str(error)
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:2000]


def _line(error: BaseException, test: str) -> str:
    """The line of `test` that raised `error`."""
    numbers = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == suite.FILE]
    lines = test.splitlines()
    return lines[numbers[0] - 1].strip().removeprefix("assert ") if numbers and numbers[0] <= len(lines) else ""


def _raised(error: BaseException) -> dict[str, str]:
    kind = error.kind if isinstance(error, _Raised | _Left) else type(error).__name__
    message = f"{kind}: {error}" if isinstance(error, _Raised | _Left) else _message(error)
    return {"raised": kind, "kind": kind, "said": message}


def _write(verdict: int, line: Mapping[str, Any]) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(verdict, data) :]


class _Raised(Exception):  # noqa: N818 - what happened there
    """The code under test raised an exception whose class the tests' process lacks."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Left(BaseException):
    """The code under test raised what `except Exception` lets through, has gone, or was to be handed what is no data."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message)
        self.kind = kind


_MISSING = object()


class _Link:
    """Questions to the process of the code under test, and the answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._callbacks: list[Any] = []
        self.raised: BaseException | None = None
        self.trouble: dict[str, Any] = {}
        """The program has gone, or the tests hand it what is no data: nothing that the tests then did counts."""

    def name(self, name: str) -> Any:
        """Value of `name` in the program; `_MISSING` where it is undefined, or a module."""
        reply = self._ask({"do": "name", "name": name})
        value = _MISSING if reply.get("missing") else self._decode(reply["value"])
        if isinstance(value, Remote) and name.lstrip("_")[:1].isupper():
            object.__setattr__(value, "_is_class", True)
        return value

    def ask(self, what: str, *arguments: Any, **keywords: Any) -> Any:
        """The value of one call there, with what it did to the lists, sets and dictionaries it was given."""
        named = {name: self._encode(item) for name, item in keywords.items()}
        reply = self._ask({"do": what, "arguments": [self._encode(item) for item in arguments], "keywords": named})
        for item, now in zip((*arguments, *keywords.values()), reply.get("given", ()), strict=False):
            if now is not None:
                _become(item, self._decode(now))
        return self._decode(reply["value"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            wire.send(self._connection, request)
            while "callback" in (reply := wire.receive(self._connection)):
                wire.send(self._connection, self._call_back(reply))
            if "raised" in reply:
                self.raised = _exception(reply, self._decode(reply["arguments"]), is_next=request["do"] == "next")
            elif "value" not in reply and "missing" not in reply:
                raise wire.Broken("an answer without a value")
        except (wire.Broken, KeyError) as error:
            raise self._gone(error) from error
        if "raised" in reply:
            assert self.raised is not None
            raise self.raised
        return reply

    def _gone(self, error: BaseException) -> _Left:
        self.trouble = {"outcome": "gone", "said": "the code ended its process, or broke the connection to it"}
        return _Left("gone", str(error))

    def _decode(self, message: Any) -> Any:
        try:
            return wire.decode(message, self._remote)
        except (wire.Broken, RecursionError) as error:
            raise self._gone(error) from error

    def _call_back(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._callbacks[request["callback"]]
            arguments = [self._decode(item) for item in request["arguments"]]
            return {"value": self._encode(function(*arguments))}
        except BaseException as error:  # noqa: BLE001 - sent to the caller in the other process
            return {"raised": type(error).__name__, "said": str(error)}

    def _encode(self, value: Any) -> Any:
        return wire.encode(value, self._refer)

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["R", object.__getattribute__(value, "_number")]
        if not callable(value):
            self.trouble = {
                "beside": True,
                "outcome": "wrong",
                "said": f"a {type(value).__name__} cannot be given to the code",
            }
            raise _Left("beside")
        self._callbacks.append(value)
        return ["C", len(self._callbacks) - 1]

    def _remote(self, message: list[Any]) -> Remote:
        if message[0] != "R" or not isinstance(message[1], int):
            raise wire.Broken("a reference of no known kind")
        return Remote(self, message[1])


def _exception(reply: dict[str, Any], arguments: Any, *, is_next: bool) -> BaseException:
    """The exception that the code raised, as the nearest of its classes that Python has."""
    name, base, message = str(reply["raised"]), str(reply["base"]), str(reply["said"])
    kind = getattr(builtins, base, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return _Left(name, message)
    if base in ("StopIteration", "StopAsyncIteration") and not is_next:
        return _Raised(name, message)  # it would end a loop of the tests' as though all had been seen
    if kind is Exception and name != "Exception":
        return _Raised(name, message)
    try:
        return kind(*arguments) if isinstance(arguments, list) else kind(message)
    except TypeError:  # a UnicodeError, an ExceptionGroup: they are made of more than a text
        return _Raised(name, message)


def _become(item: Any, now: Any) -> None:
    """Change `item` in place into `now`, keeping the lists and dictionaries within it the same objects."""
    if type(item) is not type(now):
        return
    if isinstance(item, list | tuple):
        inner = [old if _is_same_kind(old, new) else new for old, new in zip(item, now, strict=False)]
        for old, new in zip(item, now, strict=False):
            if _is_same_kind(old, new):
                _become(old, new)
        if isinstance(item, list):
            item[:] = [*inner, *now[len(inner) :]]
    elif isinstance(item, bytearray | collections.deque):
        item.clear()
        item.extend(now)
    elif isinstance(item, dict | set):
        item.clear()
        item.update(now)


def _is_same_kind(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(old, list | dict | set | tuple | bytearray | collections.deque)


_OF_DATA = frozenset(
    name
    for kind in (str, bytes, list, dict, set, tuple, int, float, collections.deque)
    for name in dir(kind)
    if name[0] != "_"
)
"""Methods of plain data. An object that is none is not asked for them: their arguments are what the tests expect."""


def _there(name: str) -> Any:
    """An operation that runs there."""
    return lambda self, *arguments: self._link.ask(name, self, *arguments)


def _both(name: str) -> Any:
    """An operator that is asked there only when both sides live there."""

    def apply(self: Remote, other: Any) -> Any:
        return self._link.ask(name, self, other) if isinstance(other, Remote) else NotImplemented

    return apply


class Remote:
    """Proxy of an object in the process of the code under test."""

    def __init__(self, link: _Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    _link: _Link
    _number: int
    _is_class = False
    """True for a class that the tests name, whose objects may be asked for their methods."""
    _is_made = False
    __eq__, __lt__, __le__, __gt__, __ge__ = map(_both, ("eq", "lt", "le", "gt", "ge"))
    __add__, __sub__, __mul__, __truediv__ = map(_both, ("add", "sub", "mul", "truediv"))
    __getitem__, __setitem__, __delitem__, __next__ = map(_there, ("getitem", "setitem", "delitem", "next"))
    __len__, __bool__, __int__, __float__ = map(_there, ("len", "bool", "int", "float"))
    __neg__, __str__, __repr__ = map(_there, ("neg", "str", "repr"))

    def __hash__(self) -> int:
        return hash(self._number)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        value = self._link.ask("call", self, *arguments, **keywords)
        if self._is_class and isinstance(value, Remote):
            object.__setattr__(value, "_is_made", True)
        return value

    def __getattr__(self, name: str) -> Any:
        if name in _OF_DATA and not (self._is_made or self._is_class):
            raise AttributeError(f"an object of the program's is no data, and has no {name!r} here")
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __iter__(self) -> Any:
        there = self._link.ask("iter", self)
        while True:
            try:
                value = self._link.ask("next", there)
            except StopIteration:
                return
            yield value

    def __contains__(self, value: Any) -> bool:
        return any(item == value for item in self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._link.ask("isinstance", instance, self)
