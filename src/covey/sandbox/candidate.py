"""The process that runs model-written code: as a script, or as a module whose functions its judge calls over a socket.

It holds no test, expected value or verdict; its replies are answers, never judgements. Standard library only.
"""

import builtins
import collections
import inspect
import linecache
import operator
import os
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from covey.sandbox import guard, wire

FILE = "<completion>"
_MUTABLE = (list, dict, set, bytearray, collections.deque)


def run_script(source: bytes) -> int:
    """Run `source` as `python file.py` would; the exit code: 0 at the end, 1 after an uncaught exception."""
    try:
        module = _module("__main__", source)
        exec(compile(source, FILE, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as left:
        return _exit_code(left.code)
    except BaseException:  # noqa: BLE001 - the border to foreign code
        _print_traceback()
        return 1
    finally:
        _flush()
    return 0


def serve(source: bytes, connection: socket.socket) -> None:
    """Run `source` as a module, then answer its judge until the judge has gone."""
    guard.refuse_made_code()
    try:
        module = _module("__candidate__", source)
        exec(compile(source, FILE, "exec", dont_inherit=True), module.__dict__)
        reply: dict[str, Any] = {"loaded": True}
    except BaseException as error:  # noqa: BLE001 - the border to foreign code
        _print_traceback()
        reply, module = _raised(error), types.ModuleType("__candidate__")
    table = _ObjectTable(connection, module)
    while True:
        _flush()
        wire.send(connection, reply)
        reply = table.answer(wire.receive(connection))


class _ObjectTable:
    """Objects kept here, by number, and the judge's operations on them."""

    def __init__(self, connection: socket.socket, module: types.ModuleType) -> None:
        self._connection, self._module = connection, module
        self._objects: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A value, or the exception raised."""
        try:
            if request["do"] == "name":
                return self._named(request["name"])
            arguments = [wire.decode(item, self._object) for item in request["arguments"]]
            keywords = {name: wire.decode(item, self._object) for name, item in request.get("keywords", {}).items()}
            mutable = [item if _is_mutable(item) else None for item in (*arguments, *keywords.values())]
            value = _FUNCTIONS[request["do"]](*arguments, **keywords)
            reply = {"value": self._encode(value)}
            if any(item is not None for item in mutable):
                reply["given"] = [None if item is None else self._encode(item) for item in mutable]
            return reply
        except BaseException as error:  # noqa: BLE001 - the border to foreign code
            if not isinstance(error, StopIteration):
                _print_traceback()
            return _raised(error)

    def _named(self, name: str) -> dict[str, Any]:
        if name not in self._module.__dict__:
            return {"missing": True}
        value = self._module.__dict__[name]
        if inspect.ismodule(value):
            return {"missing": True}
        return {"value": self._encode(value)}

    def _encode(self, value: Any) -> Any:
        try:
            return wire.encode(value, self._refer)
        except RecursionError:
            return self._refer(value)

    def _refer(self, value: Any) -> list[Any]:
        self._objects[id(value)] = value  # kept alive, so that no other object can get its number
        return ["R", id(value)]

    def _object(self, message: list[Any]) -> Any:
        if message[0] == "R":
            return self._objects[message[1]]
        return self._callback(message[1])

    def _callback(self, number: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            wire.send(self._connection, {"callback": number, "arguments": [self._encode(item) for item in arguments]})
            reply = wire.receive(self._connection)
            if "raised" in reply:
                raise _exception(reply["raised"])(reply["said"])
            return wire.decode(reply["value"], self._object)

        return call


def _call(function: Any, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "iter", "next", "len", "str", "repr", "bool", "int", "float", "isinstance")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "neg")},
}  # fmt: skip


def _module(name: str, source: bytes) -> types.ModuleType:
    """Registered under its name, where dataclasses and pickle look for it, and with its lines for tracebacks."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins  # not those of this module, which are its own
    sys.modules[name] = module
    linecache.cache[FILE] = _source_lines(source)
    return module


def _source_lines(source: bytes) -> tuple[int, None, list[str], str]:
    """The program's lines, as `linecache` keeps them."""
    text = source.decode(errors="replace")
    return len(text), None, text.splitlines(keepends=True), FILE


def _is_mutable(item: Any) -> bool:
    return isinstance(item, _MUTABLE) or (type(item) is tuple and any(map(_is_mutable, item)))


def _raised(error: BaseException) -> dict[str, Any]:
    """Name, text and arguments of an exception, and the first of its classes that is Python's."""
    base = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    reply = {"raised": type(error).__name__, "base": base.__name__, "said": _text(error), "arguments": None}
    if base is type(error):
        try:
            reply["arguments"] = wire.encode(list(error.args), _no_data)
        except (TypeError, RecursionError):  # an object of its own among them: the text has to do
            return reply
    return reply


def _no_data(value: Any) -> list[Any]:
    raise TypeError("no data")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except BaseException:  # noqa: BLE001 - foreign code again, in its `__str__`
        return ""


def _exception(name: str) -> type[Exception]:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception


def _exit_code(code: Any) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    os.write(2, f"{code}\n".encode(errors="replace"))
    return 1


def _print_traceback() -> None:
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace, limit=50))
    os.write(2, text[-8000:].encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):  # the code closed or replaced it
            continue
