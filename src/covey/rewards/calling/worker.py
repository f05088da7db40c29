"""The process that runs one isolated reward: pickled keywords in, JSON out. See `covey.rewards.calling.workers`.

The run never unpickles its output. The kernel ends this process when the run ends, however that happens.
"""

import faulthandler
import importlib.util
import itertools
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Set
from typing import Any, BinaryIO

from covey.raised import text_of, traceback_of
from covey.rewards.calling.state_log import with_log

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the socket whose number is the first argument until it is closed."""
    descriptor, parent, trace = (int(word) for word in sys.argv[1:4])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    connection = socket.socket(fileno=descriptor).makefile("rwb")
    reward: Any = None
    log: list[dict[str, Any]] = []
    while (request := _read(connection)) is not None:
        if "load" in request:
            reply, reward = _load(request["load"])
        else:
            start, entries = request["log"]
            log[start:] = entries
            if "trainer_state" in request["keywords"]:
                state = request["keywords"]["trainer_state"]
                request["keywords"]["trainer_state"] = with_log(type(state), vars(state), log)
            with os.fdopen(os.dup(trace), "wb") as file:
                reply = _call(reward, request, file)
        _write(connection, reply)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel knew
        os._exit(1)


def _load(request: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The reward, with the modules that have no importable name loaded from their files first."""
    try:
        sys.path[:] = [*request["path"], *(entry for entry in sys.path if entry not in request["path"])]
        for name, file in request["modules"]:
            _import_file(name, file)
        return {"loaded": True}, pickle.loads(request["reward"])
    except BaseException as error:  # noqa: BLE001 - sent to the run, which stops with it
        return _failure(error), None


def _import_file(name: str, file: str) -> None:
    """As multiprocessing does with a script: under another name, so that `if __name__ == "__main__"` stays asleep."""
    spec = importlib.util.spec_from_file_location("__covey_main__" if name == "__main__" else name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[module.__name__] = module
    spec.loader.exec_module(module)


def _call(reward: Any, request: Mapping[str, Any], trace: BinaryIO) -> dict[str, Any]:
    extras: dict[str, list[Any]] = {}
    metrics: list[tuple[str, Any]] = []
    keywords = dict(request["keywords"])
    if "log_extra" in request["logs"]:
        keywords["log_extra"] = lambda column, values: extras.__setitem__(str(column), [_plain(v) for v in values])
    if "log_metric" in request["logs"]:
        keywords["log_metric"] = lambda name, value: metrics.append((str(name), _metric(value)))
    started = time.perf_counter()
    if request["seconds"] is not None:
        faulthandler.dump_traceback_later(0.9 * request["seconds"], file=trace)  # where it hangs, also in C
    try:
        size = next((len(value) for value in keywords.values() if isinstance(value, list)), None)
        values = _values(reward(**keywords), None if size is None else size + 1)
    except BaseException as error:  # noqa: BLE001 - the border to user code: sent to the run, which counts it
        return _failure(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
        trace.truncate(0)
    return {"values": values, "extras": extras, "metrics": metrics, "seconds": time.perf_counter() - started}


def _values(returned: Any, most: int | None) -> Any:
    """A reward's return value as JSON, at most `most` values; any other type as text, which the run refuses."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
        return _plain(returned)
    return [_plain(value) for value in itertools.islice(returned, most)]  # it may never end


def _metric(value: Any) -> Any:
    """A number, or a `Total` as a list of the number and its place."""
    place = getattr(value, "place", None)
    return _plain(value) if place is None else [_plain(value), str(place)]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**1023 else math.copysign(math.inf, value)
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        return _plain(value.item())
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # noqa: BLE001 - no number, or one of the user's own making
        return f"a {type(value).__name__}"


def _failure(error: BaseException) -> dict[str, Any]:
    return {"error": type(error).__name__, "said": text_of(error), "traceback": traceback_of(error)[-8000:]}


def _read(connection: Any) -> dict[str, Any] | None:
    head = connection.read(8)
    return pickle.loads(connection.read(struct.unpack("!Q", head)[0])) if len(head) == 8 else None


def _write(connection: Any, reply: Mapping[str, Any]) -> None:
    body = json.dumps(reply).encode()
    connection.write(struct.pack("!Q", len(body)) + body)
    connection.flush()


if __name__ == "__main__":
    main()
