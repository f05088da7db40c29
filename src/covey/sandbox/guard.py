"""Guards that keep a program from the tests that run in its interpreter.

An audit hook refuses the ways to the tests' frames, to memory and to objects that were not handed over. Standard library only.
"""

import _imp
import _signal
import _thread
import dataclasses
import doctest
import functools
import gc
import inspect
import os
import sys
import traceback
import types
import unittest.result
from collections.abc import Callable, Iterator
from importlib import _bootstrap_external
from typing import Any

from covey.sandbox import snapshot

_REFUSED = frozenset(
    [
        "sys.settrace", "sys.setprofile", "sys._current_frames", "sys._current_exceptions", "sys.monitoring.register_callback",
        "gc.get_objects", "gc.get_referrers", "gc.get_referents", "cpython.PyInterpreterState_New", "sys.remote_exec",
    ]
)  # fmt: skip
_FRAMES = frozenset(("tb_frame", "gi_frame", "cr_frame", "ag_frame"))


class Denied(AttributeError, ValueError):  # noqa: N818 - what happened
    """A program asked for what could lead it to the tests. The library takes either kind for "not to be had"."""


_ALIVE: list[set[types.CodeType]] = []


def _codes(*functions: Any) -> frozenset[int]:
    """The code of functions, and of the functions within them, by number (a program can make code that equals another's).

    Functions that this Python version lacks are left out.
    """
    return codes_of([getattr(inspect.unwrap(item), "__code__", None) for item in functions if item is not None])


def codes_of(waiting: list[Any]) -> frozenset[int]:
    """The numbers of these code objects, and of those within them."""
    codes: set[types.CodeType] = set()
    waiting = list(waiting)
    while waiting:
        code = waiting.pop()
        if code is not None and code not in codes:
            codes.add(code)
            waiting += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    _ALIVE.append(codes)
    return frozenset(map(id, codes))


def _part(owner: Any, name: str) -> Any:
    value = inspect.getattr_static(owner, name, None)
    return getattr(value, "__func__", value)


def place(trace: types.TracebackType) -> tuple[str, str]:
    """The file and function of one level of a traceback."""
    code = trace.tb_frame.f_code
    return code.co_filename, code.co_name


def _frame_of(trace: types.TracebackType) -> Any:
    return trace.tb_frame


_MAY_SEE = _codes(
    place, _frame_of, doctest.DocTestRunner.run, traceback.clear_frames, _part(unittest.result.TestResult, "_is_relevant_tb_level"),
    inspect.getgeneratorstate, inspect.getcoroutinestate, _part(inspect, "getasyncgenstate"),
)  # fmt: skip
"""Code that asks for frames, and gives none away."""
_MAKING = _codes(_part(types, "coroutine"), _part(dataclasses, "_update_func_cell_for__class__"))
_LOADING = _codes(_bootstrap_external._compile_bytecode)  # type: ignore[attr-defined]


def _shown(frame: Any) -> types.SimpleNamespace:
    """A frame of the program's, or of the library's that it called, as it is now; none of the tests' above it."""
    chain = [frame]
    while (
        len(chain) < _DEEPEST and _is_shown(chain[-1]) and chain[-1].f_back is not None and _is_shown(chain[-1].f_back)
    ):
        chain.append(chain[-1].f_back)
    above = None
    for caller in reversed(chain):
        is_visible = _is_shown(caller)
        above = types.SimpleNamespace(
            f_code=caller.f_code if is_visible else _NO_CODE,
            f_lineno=caller.f_lineno,
            f_lasti=caller.f_lasti,
            f_trace=None,
            f_globals=caller.f_globals if is_visible else {"__name__": caller.f_globals.get("__name__")},
            f_locals=dict(caller.f_locals) if is_visible else {},
            f_builtins={},
            f_back=above,
        )
    assert above is not None
    return above


_NO_CODE = types.SimpleNamespace(
    co_filename="<tests>", co_name="<tests>", co_qualname="<tests>", co_positions=lambda: iter(())
)
_DEEPEST = 100


def _is_shown(frame: Any) -> bool:
    return not frame.f_code.co_filename.startswith(("<tests", "<sandbox>"))


def _walk(trace: Any) -> Iterator[tuple[Any, int]]:
    """`traceback.walk_tb`, of shown frames."""
    while trace is not None:
        yield _shown(_frame_of(trace)), trace.tb_lineno
        trace = trace.tb_next


def _walk_with_positions(trace: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for frame, line in _walk(trace):
        yield frame, (line, None, None, None)


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


def strip(exempt: tuple[type, ...]) -> None:
    """Take the functions out of all classes of these modules: each would lead to the module's names. `exempt` have none."""
    for module in family:
        for kind in [value for value in vars(module).values() if isinstance(value, type)]:
            if kind.__module__.startswith("covey.") and kind not in exempt:
                for name in [name for name, value in vars(kind).items() if isinstance(value, _LEADING)]:
                    type.__delattr__(kind, name)


family: list[types.ModuleType] = []
"""The sandbox's own modules, which are in `sys.modules` no more when a program is loaded."""
_LEADING = (types.FunctionType, property, classmethod, staticmethod)


def alone(function: Any) -> Any:
    """`function` with no names to look up, its own module's or Python's."""
    return types.FunctionType(function.__code__, {"__builtins__": {}}, function.__name__, function.__defaults__)


def refuse_made_code() -> None:
    """Refuse, for good, code that the compiler did not make."""
    sys.addaudithook(_code_hook(sys._getframe, 1))


def install() -> None:
    """Refuse, from here on and for good, what leads to frames, code, memory and objects that were not handed over."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]
    _signal.signal = _hidden(_without_frame(_signal.signal))
    sys.settrace = _hidden(lambda function: _refuse(function))
    sys.setprofile = _hidden(lambda function: _refuse(function))
    gc.set_debug = _hidden(lambda flags: _refuse(flags))
    _imp.create_builtin = _hidden(_made_once(_imp.create_builtin))
    traceback.walk_tb = _hidden(_walk)
    if hasattr(traceback, "_walk_tb_with_full_positions"):
        traceback._walk_tb_with_full_positions = _hidden(_walk_with_positions)
    busy: set[int] = set()
    raw = sys._getframe
    sys._getframe = _hidden(_frame_at(raw, busy))
    for name in ("_signal", "sys", "gc", "_imp", "traceback"):
        snapshot.taken.pop(name, None)
    sys.addaudithook(_hook(raw, busy))


def _refuse(tracer: Any) -> None:
    if tracer:
        raise Denied("the tests' run cannot be traced")


def _made_once(create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    names = frozenset(sys.modules)

    def create_builtin(spec: Any) -> Any:
        if spec.name in names:
            raise Denied(f"{spec.name} is loaded")
        return create(spec)

    return create_builtin


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


def _code_hook(frame_at: Callable[[int], Any], depth: int) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "code.__new__":
            if id(frame_at(depth).f_code) not in _MAKING:
                raise Denied("code is made by the compiler alone")
        elif event == "marshal.loads" and id(frame_at(depth).f_code) not in _LOADING:
            raise Denied("code is made by the compiler alone")

    return hook


def _hook(raw: Callable[[int], Any], busy: set[int]) -> Callable[[str, tuple[Any, ...]], None]:
    thread = _thread.get_ident
    library = os.path.dirname(os.__file__)

    def frame_at(depth: int) -> Any:
        here = thread()
        busy.add(here)
        try:
            return raw(depth + 1)
        finally:
            busy.discard(here)

    code_hook = _code_hook(frame_at, 2)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "sys._getframe":
            if thread() not in busy:
                raise Denied("frames are out of reach")
        elif event == "object.__getattr__":
            if arguments[1] in _FRAMES and thread() not in busy and id(frame_at(1).f_code) not in _MAY_SEE:
                raise Denied("frames are out of reach")
        elif event == "object.__setattr__":
            is_theirs = arguments[1] in ("__defaults__", "__kwdefaults__") and _is_theirs(arguments[0], library)
            if arguments[1] == "__code__" or is_theirs:
                raise Denied("functions cannot be changed")
        elif event == "import":
            name, file = arguments[0], arguments[1]
            if set(name.split(".")) & _NO_IMPORT_SET or (file and not _is_library(file, library)):
                raise ImportError(f"no module {name} beside tests")
        elif event in _REFUSED or event[:7] == "ctypes.":
            raise Denied(f"{event} is out of reach")
        else:
            code_hook(event, arguments)

    return hook


_NO_IMPORT_SET = frozenset(snapshot.NO_IMPORT)


def _is_library(file: str, library: str) -> bool:
    """A file of machine code that is Python's."""
    return file.startswith(library) and not any(f"/{name}." in file for name in snapshot.NO_IMPORT)


def _is_theirs(function: Any, library: str) -> bool:
    """A function of Python's, or of the tests'."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith((library, "<frozen", "<tests", "<sandbox>"))
