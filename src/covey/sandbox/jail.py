"""The process that programs are forked from, one for each of the sandbox's workers. `START` is what its interpreter runs.

It locks itself in, then serves one socket. It is handed descriptors and never reads them: programs, tests, expected values
and verdicts pass it by, so a program, which is a copy of this process, finds no trace of earlier ones, nor of the process that
started it: no path, no number, no argument. Even these modules come as text over the socket. Standard library only.
"""

import _sitebuiltins
import builtins
import gc
import importlib
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.sandbox import arena, candidate, confine, guard, judge, kernel, snapshot, wire

# fmt: off
_PRELOADED = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "binascii", "bisect", "bz2", "calendar", "cmath",
    "cmd", "collections", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal", "difflib", "doctest", "enum",
    "fractions", "functools", "hashlib", "heapq", "hmac", "html", "inspect", "io", "itertools", "json", "keyword",
    "lzma", "math", "numbers", "operator", "os", "pickle", "pprint", "queue", "random", "re", "secrets", "sqlite3",
    "statistics", "string", "struct", "sys", "textwrap", "threading", "time", "traceback", "types", "typing",
    "unicodedata", "unittest", "unittest.mock", "urllib.parse", "uuid", "zlib",
)
_NUMPY = (
    "numpy", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.random", "numpy.testing", "numpy.typing",
)
# fmt: on
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_COVERED = {
    "files": ("namespaces", "landlock"),
    "network": ("namespaces", "seccomp"),
    "processes": ("namespaces", "seccomp"),
}
"""Resources to keep from a program, each with the layers of which any one suffices."""
CANNOT = 70
"""Exit code of a program's process that could not lock itself in, and has therefore run nothing."""


MODULES = (
    "wire", "kernel", "seccomp", "confine", "snapshot", "guard", "suite", "judge", "candidate", "mutants", "arena", "jail",
)  # fmt: skip
"""The modules of this package that the process runs, each after those that it imports."""
START = """
def start():
    import builtins, json, os, socket, struct, sys, types
    def read(size):
        data = b""
        while len(data) < size:
            part = control.recv(size - len(data))
            if not part:
                os._exit(1)
            data += part
        return data
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    settings = json.loads(read(struct.unpack("!Q", read(8))[0]))
    own = dict(builtins.__dict__)
    package = None
    for name in ("covey", "covey.sandbox"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = []
    for name, text in settings["modules"]:
        module = sys.modules[package.__name__ + "." + name] = types.ModuleType(package.__name__ + "." + name)
        module.__builtins__ = own
        exec(compile(text, "<sandbox>", "exec", dont_inherit=True), module.__dict__)
        setattr(package, name, module)
    return module, control, settings["layers"], settings["slot"], settings["allow_unisolated"], settings["numpy"]
jail, *words = start()
del start
jail.main(*words)
"""


def main(control: socket.socket, requested: list[str], slot: int, allow_unisolated: bool, numpy_at: str | None) -> None:
    """Lock this process in, then serve `control` until it is closed. `numpy_at`: the folder that NumPy is imported from before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to handle
    os.environ.clear()
    for name in _PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:  # a Python without it: then programs have it neither
            continue
    for name in ("exit", "quit"):  # the site module brings them, which is not imported here
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    if numpy_at is not None:
        _import_numpy(numpy_at)
    guard.family += [module for name, module in sys.modules.items() if name.startswith("covey.sandbox.")]
    layers, missing = _enter(requested, slot)
    uncovered = [what for what, by in _COVERED.items() if not set(by) & set(layers)]
    wire.send(
        control, {"layers": layers, "missing": missing, "uncovered": uncovered, "scratch": "namespaces" in layers}
    )
    if not uncovered or allow_unisolated:
        for name in list(sys.modules):
            snapshot.take(name)
        gc.collect()
        gc.freeze()  # a program's collector would touch, and so copy, all that this process has
        _serve(control, tuple(layers))


def _import_numpy(folder: str) -> None:
    """Import NumPy while its files can be read: programs get a copy of this process, and never see the folder."""
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))  # a fork has no threads but its own
    sys.path.append(folder)
    try:
        for name in _NUMPY:
            importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        for name in _ONE_THREAD:
            del os.environ[name]
    importlib.import_module("numpy._core._internal").ctypes = None  # type: ignore[attr-defined]


def _enter(requested: list[str], slot: int) -> tuple[list[str], dict[str, str]]:
    """The layers in force from here on, and for each of the others the reason why not."""
    layers: list[str] = []
    missing: dict[str, str] = {name: "switched off" for name in confine.LAYERS if name not in requested}
    if sys.platform == "linux":
        kernel.die_with_parent()
    confine.measured = confine._virtual_memory()
    if "namespaces" in requested:
        reason = _tried(lambda: confine.new_namespaces(slot))
        if reason is None:
            confine.new_namespaces(slot)
            layers.append("namespaces")
        else:
            missing["namespaces"] = reason
    if "namespaces" not in layers and os.getuid() == 0 and _tried(lambda: _read_as(slot)) is None:
        confine.become(confine._FIRST_USER + slot)
        if sys.platform == "linux":
            kernel.die_with_parent()  # a change of user takes it back
    for layer in ("landlock", "seccomp"):
        if layer in requested:
            reason = _tried(lambda layer=layer: confine.confine((*layers, layer), confine.Limits()))  # type: ignore[misc]
            if reason is None:
                layers.append(layer)
            else:
                missing[layer] = reason
    return layers, missing


def _tried(action: Callable[[], None]) -> str | None:
    """Error of `action`, tried in a child process; `None` when it succeeds."""
    read_end, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            action()
            os.write(tell, b"\0")
        except BaseException as error:  # noqa: BLE001 - sent to the parent
            os.write(tell, str(error).encode()[:500] or type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(read_end, "rb") as file:
        reason = file.read(500)
    os.waitpid(child, 0)
    return None if reason == b"\0" else reason.decode(errors="replace") or "its process was killed"


def _read_as(slot: int) -> None:
    confine.become(confine._FIRST_USER + slot)
    with open(os.__file__, "rb"):
        os.listdir(confine.library())


def _serve(control: socket.socket, layers: tuple[str, ...]) -> None:
    children: dict[str, _Child] = {}
    before = 0.0
    while True:
        request, descriptors = _receive(control)
        if request is None:
            _end(children)
            return
        if request["do"] == "start":
            children, before = _start(request, descriptors, layers), _cpu_seconds()
        else:
            reply = _end(children, request.get("wait", 0.0))
            wire.send(control, {**reply, "cpu_seconds": _cpu_seconds() - before})
            children = {}


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(control, 65536, 8)
    return (json.loads(data), list(descriptors)) if data else (None, [])


@dataclass(frozen=True)
class _Child:
    """A program's process: its PID, and a pipe on which it reports that it has locked itself in."""

    process: int
    locked: int


def _start(request: dict[str, Any], descriptors: list[int], layers: tuple[str, ...]) -> dict[str, _Child]:
    """Fork the program and, where its tests run apart from it, their judge: neither gets a descriptor of the other's."""
    by_name = dict(zip(request["descriptors"], descriptors, strict=True))
    limits = confine.Limits(**request["limits"])
    ours, theirs = socket.socketpair()
    streams = [by_name[name] for name in ("stdin", "stdout", "stderr")]
    passed: list[int] = [by_name["code"]]
    run: Callable[[list[int]], int] = _script
    if request["tests"] == "beside":
        passed += [by_name["tests"], by_name["verdict"]]
        run = _arena
    elif request["tests"] == "apart":
        passed, run = [*passed, theirs.fileno()], _candidate
    children = {"candidate": _fork(layers, limits, streams, passed, run)}
    if request["tests"] == "apart":
        passed = [by_name["tests"], ours.fileno(), by_name["verdict"]]
        children["judge"] = _fork(layers, limits, [0, 1, 1], passed, _judge)  # prints nothing
    ours.close()
    theirs.close()
    for descriptor in descriptors:
        os.close(descriptor)
    return children


def _fork(
    layers: tuple[str, ...],
    limits: confine.Limits,
    streams: list[int],
    passed: list[int],
    body: Callable[[list[int]], int],
) -> _Child:
    read_end, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return _Child(child, read_end)
    code = CANNOT
    try:
        high = 200  # above every other descriptor, so that what is kept can be moved below
        moved = [os.dup2(descriptor, high + place) for place, descriptor in enumerate([*streams, *passed, tell])]
        for place in range(3):
            os.dup2(moved[min(place, len(streams) - 1)], place)
        final = [os.dup2(descriptor, 3 + place) for place, descriptor in enumerate(moved[len(streams) :])]
        os.closerange(3 + len(final), 4096)
        confine.confine(layers, limits)
        tell = final.pop()
        os.write(tell, b".")
        os.close(tell)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = body(final)
    except BaseException as error:  # noqa: BLE001 - no caller above
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _script(descriptors: list[int]) -> int:
    return candidate.run_script(_prepared(descriptors))


def _candidate(descriptors: list[int]) -> int:
    source = _prepared(descriptors)
    try:
        candidate.serve(source, socket.socket(fileno=descriptors[1]))
    except wire.Broken:
        return 0  # the judge has gone: it has seen enough
    return 0


def _arena(descriptors: list[int]) -> int:
    source, tests = _prepared(descriptors), _read(descriptors[1])
    arena.serve(source, tests, descriptors[2])
    return 0


def _prepared(descriptors: list[int]) -> bytes:
    """The program's text, in an interpreter as `python main.py` would find it."""
    source = _read(descriptors[0])
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["main.py"]
    threading.stack_size(2 * 2**20)  # each thread reserves one, which counts as the program's memory
    random.seed(0)  # a fork draws anew: a program is to come out the same each time
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "covey"]:
        del sys.modules[name]
    sys.modules["__main__"] = type(sys)("__main__")
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    return source


def _judge(descriptors: list[int]) -> int:
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    judge.judge(_read(descriptors[0]), socket.socket(fileno=descriptors[1]), descriptors[2])
    return 0


def _read(descriptor: int) -> bytes:
    data = b""
    while part := os.pread(descriptor, 2**20, len(data)):
        data += part
    os.close(descriptor)
    return data


def _end(children: dict[str, _Child], seconds: float = 0.0) -> dict[str, Any]:
    """Kill the remaining processes of a program and all their children. Returns how they ended."""
    until = time.monotonic() + seconds
    ended: dict[str, int] = {}
    while children and time.monotonic() < until and len(ended) < len(children):
        ended.update(_reaped(children, os.WNOHANG, ended))
        time.sleep(0.0005)
    ended.update(_reaped(children, os.WNOHANG, ended))
    if os.getpid() == 1:
        _kill(os.kill, -1)  # all of this process namespace but ourselves
    for name, child in children.items():
        _kill(os.killpg, child.process)
        if name not in ended:
            _kill(os.kill, child.process)
    ended.update(_reaped(children, 0, ended))
    while os.getpid() == 1 and _any_left():
        continue
    open_ones = [name for name, child in children.items() if not _has_locked(child) and ended[name] == CANNOT]
    return {"ended": ended, "open": open_ones}


def _cpu_seconds() -> float:
    """Processor time of all children that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _has_locked(child: _Child) -> bool:
    """True if the child had locked itself in; it reports so before it reads a program."""
    reply = os.read(child.locked, 1)
    os.close(child.locked)
    return reply == b"."


def _reaped(children: dict[str, _Child], options: int, ended: dict[str, int]) -> dict[str, int]:
    codes = {}
    for name, child in children.items():
        if name not in ended:
            done, status = os.waitpid(child.process, options)
            if done:
                codes[name] = os.waitstatus_to_exitcode(status)
    return codes


def _kill(how: Callable[[int, int], None], target: int) -> None:
    try:
        how(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _any_left() -> bool:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True
