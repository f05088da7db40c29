"""Tests and the program under test in one interpreter, as the harness of every benchmark runs them.

The tests see the program's names beside Python's builtins, saved before the program was loaded. Values that their
assertions compare go to the judge in another process, which knows the expected values and decides. Standard library only.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import itertools
import marshal
import os
import socket
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from covey.rewards.sandbox import candidate, decoys, guard, plain, wire
from covey.rewards.sandbox.channel import Channel, ends
from covey.rewards.sandbox.splitting import ALMOST

PROGRAM = "__candidate__"
_module_of: Any = vars(types.ModuleType)["__dict__"].__get__


def serve(source: bytes, connection: socket.socket, snapshot: guard.Snapshot) -> None:
    """Load the program, run the tests that the judge sent beforehand, and report the result of each. Raises Broken."""
    hello = wire.receive(connection)
    channel = guard.unclassed(ends(connection, bytes.fromhex(hello["key"]), judge=False))
    builtin = _Names(builtins.__dict__)
    for name, (module, attribute) in hello["known"].items():
        found = importlib.import_module(module)
        builtin[name] = getattr(found, attribute) if attribute else found
    for name in hello["imports"]:
        snapshot.hold(name)
    snapshot.leave(hello["changed"])
    snapshot.watch(_Names)
    snapshot.watch(_Locals)
    watch = guard.unclassed(snapshot)
    run = guard.unclassed(_Run(channel, builtin, hello, watch))
    guard.strip((_Names, _Locals))
    guard.install()
    failed = _load(source, builtin)
    candidate._flush()
    channel.send({"raised": _told(failed)} if failed is not None else {"loaded": True})
    if failed is None:
        run.all()


def _load(source: bytes, builtin: _Names) -> BaseException | None:
    """Loads the program as a module, whose names `builtin` falls back on. Returns its exception, or None."""
    try:
        module = candidate._module(PROGRAM, source)
        namespace = _module_of(module)
        builtin.program = namespace
        exec(compile(source, candidate.FILE, "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - the border to foreign code
        return error
    return None


class _Names(dict[str, Any]):
    """Python's own names, then those of the program, as they are at the time."""

    program: dict[str, Any]

    @guard.alone
    def __missing__(self, name: str) -> Any:
        return self.program[name]


class _Locals:
    """The tests' own names; one that the program has too is the program's, also when it is assigned."""

    _own: dict[str, Any]
    _program: dict[str, Any]
    _shared: frozenset[str]

    @guard.alone
    def __getitem__(self, name: str) -> Any:
        return self._own[name]

    @guard.alone
    def __setitem__(self, name: str, value: Any) -> None:
        self._own[name] = value
        if name in self._shared and name[:2] != "__":
            self._program[name] = value

    @guard.alone
    def __delitem__(self, name: str) -> None:
        del self._own[name]


def _locals(own: dict[str, Any], program: dict[str, Any]) -> _Locals:
    names = _Locals()
    names._own, names._program, names._shared = own, program, frozenset(program) - frozenset(own)
    return names


class _Run:
    """The tests, one after the other."""

    def __init__(self, channel: Channel, builtin: _Names, hello: dict[str, Any], snapshot: guard.Snapshot) -> None:
        self._channel, self._builtin, self._hello, self._snapshot = channel, builtin, hello, snapshot
        self._codes = {name: marshal.loads(base64.b64decode(hello[name])) for name in ("setup", "tests", "expressions")}
        self._cases, self._loader, self._suite = unittest.TestCase, unittest.TestLoader, unittest.TestSuite
        self._outcome = unittest.TestResult
        self._has_run_suites = False

    def all(self) -> None:
        space = self._namespace()
        names: Any = _locals(space, self._builtin.program) if not self._hello["shared"] else space
        self._snapshot.restore()
        error = self._attempt(lambda: exec(self._codes["setup"], space, names))
        if error is not None:
            return self._channel.send({"setup": _told(error)})
        tampered = ""
        for number, code in enumerate(self._codes["tests"]):
            if tampered:
                self._snapshot.restore()
            error = self._attempt(lambda code=code: self._test(code, space, names))  # type: ignore[misc]
            tampered = self._snapshot.changed()
            candidate._flush()
            said = {"passed": error is None and not tampered, "raised": None if error is None else _told(error)}
            self._channel.send({"test": number, **said, "tampered": tampered})
        self._channel.send({"done": True})

    def _attempt(self, action: Callable[[], Any]) -> BaseException | None:
        try:
            action()
        except wire.Broken:
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the border to foreign code
            return error
        return None

    def _namespace(self) -> dict[str, Any]:
        """The tests' globals: a module of their own, or the program's where tests rebind its names with `global`."""
        program = self._builtin.program
        self._builtin.update({self._hello["check"]: self.check, self._hello["truth"]: self.truth, self._hello["main"]: self._main})  # fmt: skip
        self._builtin[ALMOST] = decoys.almost
        self._builtin["map"], self._builtin["filter"] = _map, _filter
        for name in self._hello["subjects"]:
            if name in program:
                self._builtin[name] = program[name]
        if self._hello["shared"]:
            program["__builtins__"] = self._builtin
            return program
        module = types.ModuleType("__main__")
        space: dict[str, Any] = module.__dict__
        space["__builtins__"] = self._builtin
        if self._hello["is_main"]:
            sys.modules["__main__"] = module
        return space

    def _test(self, code: types.CodeType, space: dict[str, Any], names: Any) -> None:
        before = dict(space)
        self._has_run_suites = False
        exec(code, space, names)
        fresh = {name: value for name, value in space.items() if before.get(name) is not value}
        if not self._has_run_suites:
            self._run_suites(fresh)
        for name in self._hello["functions"]:
            if name in fresh and type(fresh[name]) is types.FunctionType:
                fresh[name]()

    def _run_suites(self, fresh: dict[str, Any]) -> None:
        loader, suite = self._loader(), self._suite()
        for value in fresh.values():
            if type in _mro(type(value)) and self._cases in _mro(value) and value.__module__ != "unittest.case":
                suite.addTests(loader.loadTestsFromTestCase(value))
        count, result = suite.countTestCases(), self._outcome()
        if not count:
            return
        passed: list[Any] = []
        result.failfast = True
        result.addSuccess = passed.append  # type: ignore[assignment,method-assign]
        suite.run(result)
        bad = [*result.failures, *result.errors]
        if bad:
            raise _Failed("\n".join(text for _, text in bad[:3])[-1500:])
        excused = len(result.skipped) + len(result.expectedFailures)
        if len(passed) + excused != count or (excused and not self._hello["skips"]):
            raise _Failed("a test was left out")

    def _main(self, *arguments: Any, **keywords: Any) -> None:
        """`unittest.main` of the tests: runs the cases defined so far, and returns."""
        self._has_run_suites = True
        self._run_suites(dict(sys.modules["__main__"].__dict__))

    def check(self, number: int, *given: Any) -> bool:
        """True if the judge finds assertion `number` true of the program's values."""
        sent = [plain.encode(item) for item in given]
        self._channel.send({"site": number, "given": [item for item, _ in sent], "whole": [whole for _, whole in sent]})
        reply = self._channel.receive()
        if "ask" in reply:
            reply = self._asked(number, given, reply["ask"])
        if "raise" in reply:
            kind = builtins_of.get(reply["raise"][0])
            raise (kind if isinstance(kind, type) else Exception)(reply["raise"][1])
        return bool(reply["holds"])

    def _asked(self, number: int, given: tuple[Any, ...], questions: list[dict[str, Any]]) -> dict[str, Any]:
        """The judge's answer, after it has heard what the assertion comes to with each of the values that it proposes."""
        expression = types.FunctionType(self._codes["expressions"][number], {"__builtins__": self._builtin})
        answers: list[int] = []
        errors: dict[int, BaseException] = {}
        copies = [_copies(item, len(questions)) for item in given]
        for place, question in enumerate(questions):
            words = {f"given{n}": items[place] for n, items in enumerate(copies)}
            words.update({name: wire.decode(item, _no_reference) for name, item in question.items()})
            try:
                answers.append(1 if expression(**words) else 0)
            except Exception as error:  # noqa: BLE001 - the border to foreign code
                answers.append(-1)
                errors[place] = error
        self._channel.send({"answers": answers})
        reply = self._channel.receive()
        if "raised" in reply:
            raise errors[reply["raised"]]
        return reply

    def truth(self, left: Any, right: Any) -> bool:
        """`left == right`, which must not hold for values that are not equal: an object may say yes to all."""
        known, other = plain.encode(left)[1], plain.encode(right)[1]
        if not left == right:  # noqa: SIM201 - `!=` is another method of theirs
            return False
        if known and other:
            return True
        item, expected = (left, right) if other else (right, left)
        foreign = decoys.near(expected) if known or other else list(decoys.FOREIGN)
        return not any(_holds(item, decoy) for decoy in decoys.shuffled(foreign))


def _map(function: Any, *inputs: Any) -> Any:
    """`map`, but for a StopIteration of the function's, which does not end it early."""
    for items in zip(*inputs):  # noqa: B905 - as map does
        yield function(*items)


def _filter(function: Any, inputs: Any) -> Any:
    for item in inputs:
        if item if function is None else function(item):
            yield item


def _copies(item: Any, count: int) -> list[Any]:
    """The same object for each question; of an iterator of Python's own, which one question would use up, a copy for each."""
    kind = type(item)
    if kind.__flags__ & guard._HEAP or not hasattr(kind, "__next__"):
        return [item] * count
    return [itertools.islice(copy, _MOST_ITEMS) for copy in itertools.tee(item, count)]


_MOST_ITEMS = 200_000


class _Failed(AssertionError):  # noqa: N818 - what happened
    """A case of the tests' did not pass."""


builtins_of = dict(builtins.__dict__)
_trace_of = BaseException.__dict__["__traceback__"].__get__
_mro = type.__dict__["__mro__"].__get__
_name_of = type.__dict__["__name__"].__get__


def _holds(item: Any, decoy: Any) -> bool:
    try:
        return bool(item == decoy)
    except Exception:  # noqa: BLE001 - the border to foreign code
        return False


def _no_reference(message: list[Any]) -> Any:
    raise wire.Broken("a reference")


def _told(error: BaseException) -> list[str]:
    """Kind and text of an exception; its place, where that is in the program, goes to the error output."""
    kind = type(error)
    name = str(_name_of(kind))
    text = candidate._text(error)
    lines: list[str] = []
    trace = _trace_of(error)
    while trace is not None and len(lines) < 50:
        file, function = guard.place(trace)
        if file == candidate.FILE:
            lines.append(f'  File "{file}", line {trace.tb_lineno}, in {function}')
        trace = trace.tb_next
    said = "\n".join([*(["Traceback (most recent call last):", *lines] if lines else []), f"{name}: {text}"])
    os.write(2, f"{said}\n".encode(errors="replace")[-8000:])
    return [name, text]
