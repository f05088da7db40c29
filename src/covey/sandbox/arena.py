"""Tests in the interpreter of the program under test: for tests that use its classes, exceptions or coroutines.

The tests see the program's names and Python's builtins, saved before the program was loaded. Each line of the verdict is
signed with a key that the program does not have. Standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import linecache
import os
import sys
import types
from collections.abc import Callable
from hashlib import blake2b
from json import encoder
from typing import Any

from covey.sandbox import candidate, guard, mutants, snapshot, suite

PROGRAM = "__candidate__"
_module_of: Any = vars(types.ModuleType)["__dict__"].__get__


def serve(source: bytes, tests: bytes, verdict: int) -> None:
    """Load the program, run `{"setup", "tests", "key", "chosen"}` in its interpreter, and write a line to `verdict` for each test."""
    plan = json.loads(tests)
    say = _lines(verdict, bytes.fromhex(plan["key"]))
    mutation = mutants.Mutation(frozenset(plan["chosen"]))
    try:
        made = suite.Suite(plan["setup"], plan["tests"], mutation.rewrite)
        library_names = made.library_values()
    except BaseException as error:  # noqa: BLE001 - the border to the tests' code
        return say({"setup": f"{type(error).__name__}: {error}"[:2000]})
    builtin = _Names(builtins.__dict__)
    builtin.update(library_names)
    for name in made.modules:
        with contextlib.suppress(Exception):  # one that the tests import in a function, or only if it is there
            importlib.import_module(name)
    guard.install()
    before = snapshot.Snapshot(made.modules, made.changed, (_Names, _Locals))
    count = len(plan["tests"])
    record = guard.unclassed(mutants.Record(mutation.constants, guard.codes_of(made.tests), snapshot.classes()))
    del plan, tests, mutation
    builtin.update({mutants.NOTE: record.note, mutants.PRETEND: record.pretend, mutants.SEEN: record.seen})
    run = guard.unclassed(_Run(say, builtin, guard.unclassed(made), guard.unclassed(before), record))
    guard.strip((_Names, _Locals))
    failed = _load(source, builtin)
    candidate._flush()
    if failed is not None:
        kind, text = _described(failed)
        return say({"code": {"raised": kind, "said": text}})
    run.all(count)


def _lines(verdict: int, key: bytes) -> Callable[[dict[str, Any]], None]:
    """A function that writes signed lines with what the program cannot have replaced: functions of C's, held on to."""
    text = encoder.c_make_encoder(  # type: ignore[attr-defined]  # json.dumps looks its parts up each time
        None, _refuse, encoder.encode_basestring_ascii, None, ":", ",", False, False, True
    )
    write, count = os.write, [0]

    def say(line: dict[str, Any]) -> None:
        body = "".join(text(line, 0))
        signed = blake2b(f"{count[0]} {body}".encode(), key=key, digest_size=16).hexdigest()
        data = f"{signed} {body}\n".encode()
        count[0] += 1
        while data:
            data = data[write(verdict, data) :]

    return say


def _refuse(value: Any) -> Any:
    raise TypeError("no text")


def _load(source: bytes, builtin: _Names) -> BaseException | None:
    """Loads the program as a module, whose names `builtin` falls back on. Returns its exception, or None."""
    try:
        module = candidate._module(PROGRAM, source)
        namespace = _module_of(module)
        builtin.program = namespace
        exec(compile(source, candidate.FILE, "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 - the border to foreign code
        return error
    linecache.cache[candidate.FILE] = candidate._source_lines(source)
    return None


class _Names(dict[str, Any]):
    """Python's own names, then those of the program, as they are at the time."""

    program: dict[str, Any]

    @guard.alone
    def __missing__(self, name: str) -> Any:
        return self.program[name]


class _Locals:
    """The tests' own names; one that the program has too is the program's, also when it is assigned."""

    _local: dict[str, Any]
    _program: dict[str, Any]
    _shared: frozenset[str]

    @guard.alone
    def __getitem__(self, name: str) -> Any:
        return self._local[name]

    @guard.alone
    def __setitem__(self, name: str, value: Any) -> None:
        self._local[name] = value
        if name in self._shared and name[:2] != "__":
            self._program[name] = value

    @guard.alone
    def __delitem__(self, name: str) -> None:
        del self._local[name]


def _locals(local_names: dict[str, Any], program: dict[str, Any]) -> _Locals:
    names = _Locals()
    names._local, names._program, names._shared = local_names, program, frozenset(program) - frozenset(local_names)
    return names


class _Run:
    """The tests, one after the other."""

    def __init__(self, say: Any, builtin: _Names, made: Any, before: Any, record: Any) -> None:
        self._say, self._builtin, self._made, self._before, self._record = say, builtin, made, before, record

    def all(self, count: int) -> None:
        space = self._namespace()
        names: Any = _locals(space, self._builtin.program) if not self._made.is_shared else space
        self._before.restore()
        error = _attempt(lambda: exec(self._made.setup, space, names))
        if error is not None:
            kind, text = _described(error)
            self._say({"code": {"raised": kind, "said": text}})
            return
        for number in range(count):
            error = _attempt(lambda number=number: self._made.run(number, space, names))  # type: ignore[misc]
            candidate._flush()
            self._say({"test": number, **self._record.taken(), **_outcome(error)})
        self._say({"done": True, "changed": self._before.changed()})

    def _namespace(self) -> dict[str, Any]:
        """The tests' globals: a module of their own, or the program's where tests rebind its names with `global`."""
        program = self._builtin.program
        self._builtin["map"], self._builtin["filter"] = _map, _filter
        if self._made.subject in program:
            self._builtin[self._made.subject] = program[self._made.subject]
        module = types.ModuleType("__main__")
        space: dict[str, Any] = program if self._made.is_shared else module.__dict__
        self._builtin[suite.MAIN] = self._made.main_of(space)
        space["__builtins__"] = self._builtin
        if self._made.is_main and not self._made.is_shared:
            sys.modules["__main__"] = module
        return space


def _attempt(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - the border to foreign code
        return error
    return None


def _outcome(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"outcome": "passed"}
    kind, text = _described(error)
    is_wrong = kind in ("AssertionError", "Failed")
    return {"outcome": "wrong" if is_wrong else "raised", "kind": kind, "said": f"{kind}: {text}" if text else kind}


def _map(function: Any, *inputs: Any) -> Any:
    """`map`, but for a StopIteration of the function's, which does not end it early."""
    for items in zip(*inputs):  # noqa: B905 - as map does
        yield function(*items)


def _filter(function: Any, inputs: Any) -> Any:
    for item in inputs:
        if item if function is None else function(item):
            yield item


_trace_of = BaseException.__dict__["__traceback__"].__get__
_name_of = type.__dict__["__name__"].__get__


def _described(error: BaseException) -> tuple[str, str]:
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
    report = "\n".join([*(["Traceback (most recent call last):", *lines] if lines else []), f"{name}: {text}"])
    os.write(2, f"{report}\n".encode(errors="replace")[-8000:])
    return name, text
