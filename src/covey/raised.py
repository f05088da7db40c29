"""An exception of the user's code in one line with its place, robust against a broken `__str__`, and distinct from a real Ctrl-C."""

import dis
import re
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_LINE = re.compile(r'File "([^"\n]+)", line (\d+)')
_COVEY = str(Path(__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_RAISE = dis.opmap["RAISE_VARARGS"]


def describe(error: BaseException) -> str:
    """An exception in one line: `ValueError: no number in it`."""
    kind, text = kind_of(error), " ".join(text_of(error).split()).rstrip(".")
    return f"{kind}: {text[:300]}" if text else kind


def text_of(error: BaseException) -> str:
    """An exception's message, of at most 2,000 characters."""
    try:
        return str(error)[:2000]
    except BaseException as again:  # noqa: BLE001 - the user's __str__
        return f"its text cannot be shown, for __str__ raises {type(again).__name__}"


def kind_of(error: BaseException) -> str:
    """Name of its class; in the run the class name reported by a worker process."""
    kind = vars(error).get("kind") if type(error).__module__.startswith("covey.") else None
    return str(kind or type(error).__name__)


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it, with its causes."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as again:  # noqa: BLE001 - attributes of the user's own exception
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{describe(error)} (it cannot be formatted: {type(again).__name__})"


def place_of(error: BaseException) -> str:
    """`file.py:12`, the last line of the user's own code that it came through; the last of any code but Covey's; or empty."""
    lines = [match for match in _LINE.findall(traceback_of(error)) if not match[0].startswith(_COVEY)]
    user_lines = [
        match for match in lines if not match[0].startswith(_INSTALLED) and not match[0].startswith("<frozen")
    ]
    file, line = (user_lines or lines or [("", "")])[-1]
    return f"{file}:{line}" if file else ""


def with_place(error: BaseException) -> str:
    """`ValueError: no number in it (my_rewards.py:12)`."""
    place = place_of(error)
    return f"{describe(error)} ({place})" if place else describe(error)


def is_ctrl_c(error: BaseException) -> bool:
    """True for a KeyboardInterrupt that a signal brought, False for one that a `raise` statement of the reward's made.

    A signal reaches the main thread alone, and leaves no `raise` at the innermost place of the traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    chain = [interrupt for interrupt in _chain(error) if isinstance(interrupt, KeyboardInterrupt)]
    return isinstance(error, KeyboardInterrupt) and any(not _is_raised(interrupt.__traceback__) for interrupt in chain)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            todo += [current.__cause__, current.__context__]
            yield current


def _is_raised(trace: TracebackType | None) -> bool:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_lasti < 0:
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE
