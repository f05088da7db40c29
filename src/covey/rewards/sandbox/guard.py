"""Guards that keep a program from the tests that run beside it in one interpreter.

An audit hook refuses the ways to the tests' frames and to objects that were not handed over; the parts of Python that tests
lean on are restored to their state before the program was loaded, and checked again after each test. Standard library only.
"""

from __future__ import annotations

import _signal
import _thread
import dataclasses
import doctest
import functools
import importlib
import inspect
import operator
import sys
import traceback
import types
import unittest.result
from collections.abc import Callable, Sequence
from typing import Any

_REFUSED = frozenset(
    [
        "sys.settrace",
        "sys.setprofile",
        "sys._current_frames",
        "sys._current_exceptions",
        "sys.monitoring.register_callback",
        "gc.get_objects",
        "gc.get_referrers",
        "gc.get_referents",
        "cpython.PyInterpreterState_New",
        "sys.remote_exec",
    ]
)
_FRAMES = frozenset(("tb_frame", "gi_frame", "cr_frame", "ag_frame"))
_NO_IMPORT = ("ctypes", "_ctypes", "_testcapi", "_testinternalcapi", "_testlimitedcapi", "_xxsubinterpreters", "_interpreters", "_xxtestfuzz", "_testbuffer", "_testmultiphase")  # fmt: skip
WATCHED = (
    "builtins", "math", "cmath", "operator", "json", "json.decoder", "json.encoder", "re", "copy", "functools", "itertools",
    "collections", "heapq", "bisect", "decimal", "fractions", "datetime", "statistics", "string", "types", "enum", "abc",
    "contextlib", "dataclasses", "unittest", "unittest.case", "unittest.loader", "unittest.result", "unittest.suite", "unittest.util",
)  # fmt: skip
"""Modules that tests rely on. The program may not change their attributes, nor their classes' attributes."""


class Denied(AttributeError, ValueError):  # noqa: N818 - what happened
    """A program asked for what could lead it to the tests. The library takes either kind for "not to be had"."""


_KEPT: list[set[types.CodeType]] = []


def _codes(*found: Any) -> frozenset[int]:
    """The code of functions, and of the functions within them, by number (a program can make code that equals another's).

    Functions that this Python version lacks are left out.
    """
    codes: set[types.CodeType] = set()
    waiting = [getattr(inspect.unwrap(item), "__code__", None) for item in found if item is not None]
    while waiting:
        code = waiting.pop()
        if code is not None and code not in codes:
            codes.add(code)
            waiting += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    _KEPT.append(codes)
    return frozenset(map(id, codes))


def _part(owner: Any, name: str) -> Any:
    found = inspect.getattr_static(owner, name, None)
    return getattr(found, "__func__", found)


_CLEARING = _codes(
    traceback.clear_frames, _part(unittest.result.TestResult, "_is_relevant_tb_level"), inspect.getgeneratorstate,
    inspect.getcoroutinestate, _part(inspect, "getasyncgenstate"),
)  # fmt: skip
_WALKING = _codes(_part(traceback, "walk_tb"), _part(traceback, "_walk_tb_with_full_positions"))
_TELLING = _codes(
    _part(traceback.StackSummary, "_extract_from_extended_frame_gen"), _part(traceback.StackSummary, "extract"),
    _part(traceback.StackSummary, "_extract"),
)  # fmt: skip
"""They turn the frames of `_WALKING` into text."""


def place(trace: types.TracebackType) -> tuple[str, str]:
    """The file and function of one level of a traceback."""
    code = trace.tb_frame.f_code
    return code.co_filename, code.co_name


_OWN = _codes(place, doctest.DocTestRunner.run)


class Snapshot:
    """The parts of Python that tests lean on, as they were when this was made."""

    def __init__(self, others: Sequence[str] = ()) -> None:
        """Of the modules `WATCHED` and these `others`."""
        self._modules: dict[str, types.ModuleType] = {}
        self._dicts: list[tuple[Any, Any, dict[str, Any], str]] = []
        seen: set[int] = set()
        for name in (*WATCHED, *others):
            if not self.hold(name):
                continue
            module = self._modules[name]
            self._dicts.append((None, module.__dict__, dict(module.__dict__), name))
            for value in list(module.__dict__.values()):
                is_own = isinstance(value, type) and value.__module__.partition(".")[0] == name.partition(".")[0]
                if is_own and value.__flags__ & _HEAP and id(value) not in seen:
                    seen.add(id(value))
                    self._dicts.append((value, _dict_of(value), dict(_dict_of(value)), value.__module__))

    def hold(self, name: str) -> bool:
        """Import a module, which is to stay the one of its name; false where this Python does not have it."""
        try:
            self._modules[name] = importlib.import_module(name)
        except ImportError:
            return False
        return True

    def watch(self, kind: type) -> None:
        """Watch one more class."""
        self._dicts.append((kind, _dict_of(kind), dict(_dict_of(kind)), ""))

    def leave(self, names: list[str]) -> None:
        """Watch these modules no longer: the tests change them."""
        self._dicts = [entry for entry in self._dicts if entry[3].partition(".")[0] not in names]

    def restore(self) -> None:
        """Restore changed and removed attributes; added ones stay."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
        for owner, now, before, _ in self._dicts:
            if _is_as_it_was(now, before):
                continue
            for name, value in before.items():
                if now.get(name, _GONE) is not value and not (owner is not None and name in _OWN_BUSINESS):
                    _put(owner, now, name, value)

    def changed(self) -> str:
        """The name of something that is not as it was; empty where all is."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"sys.modules[{name!r}]"
        for owner, now, before, _ in self._dicts:
            if not _is_as_it_was(now, before):
                for name, value in before.items():
                    if now.get(name) is not value and not (owner is not None and name in _OWN_BUSINESS):
                        return f"{getattr(owner, '__qualname__', before.get('__name__', ''))}.{name}"
        return ""


def _is_as_it_was(now: Any, before: dict[str, Any]) -> bool:
    return all(map(_is, map(now.get, before), before.values()))


_is = operator.is_
_GONE = object()
_HEAP = 1 << 9
"""The flag of classes that can be changed."""
_OWN_BUSINESS = frozenset(("__annotations__", "__abstractmethods__", "_abc_impl", "__annotations_cache__", "__doc__"))
_dict_of = type.__dict__["__dict__"].__get__


def _put(owner: Any, now: Any, name: str, value: Any) -> None:
    if owner is None:
        now[name] = value
    else:
        type.__setattr__(owner, name, value)


def _shown(frame: Any) -> types.SimpleNamespace:
    """A frame of the program's, or of the library's that it called, as it is now; none of the tests' above it."""
    chain = [frame]
    while (
        len(chain) < _DEEPEST and _is_shown(chain[-1]) and chain[-1].f_back is not None and _is_shown(chain[-1].f_back)
    ):
        chain.append(chain[-1].f_back)
    above = None
    for one in reversed(chain):
        is_own = _is_shown(one)
        above = types.SimpleNamespace(
            f_code=one.f_code if is_own else None,
            f_lineno=one.f_lineno,
            f_lasti=one.f_lasti,
            f_trace=None,
            f_globals=one.f_globals if is_own else {"__name__": one.f_globals.get("__name__")},
            f_locals=dict(one.f_locals) if is_own else {},
            f_builtins={},
            f_back=above,
        )
    assert above is not None
    return above


_DEEPEST = 100


def _is_shown(frame: Any) -> bool:
    return frame.f_code.co_filename not in ("<tests>", "<sandbox>")


def _frame_at(raw: Callable[[int], Any], busy: set[int]) -> Callable[..., types.SimpleNamespace]:
    def getframe(depth: int = 0) -> types.SimpleNamespace:
        here = _thread.get_ident()
        busy.add(here)
        try:
            frame = raw(depth + 1)
        finally:
            busy.discard(here)
        return _shown(frame)

    return getframe


def unclassed(thing: Any) -> Any:
    """`thing` without its class, which a program could find among `object.__subclasses__()` and change."""
    box = types.SimpleNamespace(**vars(thing))
    for name, value in vars(type(thing)).items():
        if isinstance(value, types.FunctionType):
            setattr(box, name, functools.partial(value, box))
    return box


def strip(kept: tuple[type, ...]) -> None:
    """Take the functions out of all classes of these modules: each would lead to the module's names. `kept` have none."""
    for module in family:
        for kind in [value for value in vars(module).values() if isinstance(value, type)]:
            if kind.__module__.startswith("covey.") and kind not in kept:
                for name in [name for name, value in vars(kind).items() if isinstance(value, _LEADING)]:
                    type.__delattr__(kind, name)


family: list[types.ModuleType] = []
"""The sandbox's own modules, which are in `sys.modules` no more when a program is loaded."""
_LEADING = (types.FunctionType, property, classmethod, staticmethod)


def alone(function: Any) -> Any:
    """`function` with no names to look up, its own module's or Python's."""
    return types.FunctionType(function.__code__, {"__builtins__": {}}, function.__name__, function.__defaults__)


def install() -> None:
    """Refuse, from here on and for good, what leads to frames, code and objects that were not handed over."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]
    _signal.signal = _hidden(_without_frame(_signal.signal))
    sys.settrace = _hidden(lambda function: _refuse_tracing(function))
    sys.setprofile = _hidden(lambda function: _refuse_tracing(function))
    busy: set[int] = set()
    raw = sys._getframe
    sys._getframe = _hidden(_frame_at(raw, busy))
    sys.addaudithook(_hook(raw, busy))


def _refuse_tracing(function: Any) -> None:
    if function is not None:
        raise Denied("the tests' run cannot be traced")


def _hidden(function: Callable[..., Any]) -> Any:
    """`function` in a wrapper of C's that does not give it away."""
    wrapper: Any = functools.lru_cache(maxsize=0)(function)
    del wrapper.__wrapped__
    return wrapper


def _without_frame(signal: Callable[..., Any]) -> Callable[..., Any]:
    def install(number: int, handler: Any) -> Any:
        if not callable(handler) or handler is _signal.default_int_handler:
            return signal(number, handler)
        return signal(number, _hidden(lambda number, frame: handler(number, None)))

    return install


def _hook(frame_at: Callable[[int], Any], busy: set[int]) -> Callable[[str, tuple[Any, ...]], None]:
    thread = _thread.get_ident

    def caller() -> tuple[int, int]:
        """The code that asks, and the code that called it."""
        here = thread()
        busy.add(here)
        try:
            frame = frame_at(2)
            codes = (id(frame.f_code), 0 if frame.f_back is None else id(frame.f_back.f_code))
        finally:
            busy.discard(here)
        return codes

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "sys._getframe":
            if thread() not in busy:
                raise Denied("frames are out of reach")
        elif event == "object.__getattr__":
            if arguments[1] in _FRAMES and thread() not in busy:
                code, above = caller()
                if code not in _CLEARING and code not in _OWN and not (code in _WALKING and above in _TELLING):
                    raise Denied("frames are out of reach")
        elif event == "object.__setattr__":
            if arguments[1] == "__code__":
                raise Denied("the code of functions cannot be changed")
        elif event == "import":
            if arguments[0].partition(".")[0] in _NO_IMPORT:
                raise ImportError(f"no module {arguments[0]} beside tests")
        elif event == "code.__new__":
            if caller()[0] not in _MAKING:
                raise Denied("code is made by the compiler alone")
        elif event in _REFUSED or event[:7] == "ctypes.":
            raise Denied(f"{event} is out of reach")

    return hook


_MAKING = _codes(_part(types, "coroutine"), *(_part(dataclasses, name) for name in ("_update_func_cell_for__class__",)))
