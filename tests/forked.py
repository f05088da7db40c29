"""Python processes that start at once: forks of one that has imported torch, transformers and Covey, and has done nothing else.

Five seconds of imports are most of what a tiny run in a process of its own takes.
Run apart it is that process: `python forked.py SOCKET PLACE`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

PRELOADED = ("pytest", "kit", "datasets", "transformers.trainer", "torch.distributed.fsdp", "covey.training.trainer")


LOCK = threading.Lock()
STARTED: list[subprocess.Popen[bytes]] = []


class Forked:
    """A process that runs `python *words`, where the first word is a script, or `-c` and its code.

    `env` is added to this process's environment. Without `stdout` or `stderr`, what is written there is in `out` or `err` at the end.
    """

    def __init__(
        self,
        *words: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        is_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self.out = self.err = ""
        self._streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed at the process's end
        own_stdout, own_stderr = (stream.fileno() for stream in self._streams)
        asked = {"words": [str(word) for word in words], "env": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}}
        asked |= {"cwd": str(cwd or Path.cwd()), "is_session": is_session}
        with open(os.devnull) as nothing:
            given = [
                nothing.fileno() if stdin is None else stdin,
                own_stdout if stdout is None else stdout,
                own_stderr if stderr is None else stderr,
            ]
            self.pid = int(_answer(asked, given))

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = _answer({"poll": self.pid})
            if self.returncode is not None:
                self.out, self.err = map(_text, self._streams)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code at its end. Raises TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        """Killed if it still runs."""
        self.kill()
        self.wait()


def run(*words: str | Path, timeout: float = 280, **how: Any) -> Forked:
    """A process that has ended by itself. Raises TimeoutExpired."""
    with Forked(*words, **how) as process:
        process.wait(timeout)
    return process


def worker_of(module: str) -> Callable[[Connection], Forked]:
    """A start of the worker process that `python -m module DESCRIPTOR` would be; it takes the connection and closes it."""
    package, _, name = module.rpartition(".")
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from {package} import {name}; {name}.main()"

    def start(theirs: Connection) -> Forked:
        with theirs:
            return Forked("-c", code, "0", json.dumps(sys.path), stdin=theirs.fileno(), is_session=True)

    return start


def free_port() -> str:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def rank_environment(rank: int, port: str, size: int = 2) -> dict[str, str]:
    """Environment that torchrun gives to a process of one machine."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}


def _text(stream: IO[bytes]) -> str:
    with stream:
        stream.seek(0)
        return stream.read().decode(errors="replace")


# -- the process that is forked ------------------------------------------------------------------------------------------


@cache
def _parent() -> socket.socket:
    """A connection to it. The workers of pytest-xdist and the processes that they start share one, which the first to ask starts."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}-{time.time_ns()}")
    place = Path(os.environ.setdefault("FORKED_FROM", f"{tempfile.gettempdir()}/forked-{run}"))
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _locked(place.parent):
        try:
            ours.connect(str(place))
        except (FileNotFoundError, ConnectionRefusedError):
            place.unlink(missing_ok=True)
            _start(place)
            ours.connect(str(place))
    atexit.register(ours.close)
    return ours


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _start(place: Path) -> None:
    """In a session of its own: whoever starts it may be killed with its group, and others still ask."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place))
        listener.listen()
        command = [sys.executable, __file__, str(listener.fileno()), str(place)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        STARTED.append(subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment, start_new_session=True))


def _answer(asked: Mapping[str, Any], descriptors: list[int] | None = None) -> Any:
    sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    with LOCK:  # threads of a trainer ask as well
        _parent().sendmsg([json.dumps(asked).encode()], sent)
        return json.loads(_parent().recv(1000))


def _serve(listener: socket.socket, place: Path) -> dict[str, Any] | None:
    """None when the last connection is closed, and no child is left; in a child, the request that it is to fulfil."""
    children: dict[socket.socket, set[int]] = {}
    while True:
        for ready in select.select([listener, *children], [], [])[0]:
            if ready is listener:
                children[listener.accept()[0]] = set()
            elif (asked := _heed(ready, children[ready])) == "closed":
                del children[ready]
                ready.close()
            elif asked is not None:
                for connection in children:
                    connection.close()
                return asked
        if children:
            continue
        with _locked(place.parent):
            if not select.select([listener], [], [], 0)[0]:
                place.unlink()
                return None


def _heed(control: socket.socket, children: set[int]) -> dict[str, Any] | str | None:
    """Answer one message of a connection; in a child, the request. "closed" at its end, when its children have been killed."""
    message, descriptors = b"", []
    with contextlib.suppress(ConnectionError):
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
    if not message:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return "closed"
    asked: dict[str, Any] = json.loads(message)
    if "poll" in asked:
        ended, status = os.waitpid(asked["poll"], os.WNOHANG)
        children.discard(ended)
        _reply(control, os.waitstatus_to_exitcode(status) if ended else None)
        return None
    child = os.fork()
    if child == 0:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return asked
    for descriptor in descriptors:
        os.close(descriptor)
    children.add(child)
    _reply(control, child)
    return None


def _reply(control: socket.socket, value: int | None) -> None:
    with contextlib.suppress(ConnectionError):  # who asked may have been killed
        control.send(json.dumps(value).encode())


def _become(asked: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["is_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    first, *words = asked["words"]
    if first != "-c":
        sys.path[0], sys.argv = str(Path(first).parent), [first, *words]
        runpy.run_path(first, run_name="__main__")
        return
    sys.path[0], sys.argv = "", ["-c", *words[1:]]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(words[0], "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, which pytest heeds
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as listening:
        for module in PRELOADED:
            __import__(module)
        gc.collect()
        gc.freeze()  # as in conftest.py
        request = _serve(listening, Path(sys.argv[2]))
    if request is not None:
        _become(request)
