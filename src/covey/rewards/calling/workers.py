"""Worker processes that run a reward and are killed when it hangs: `WorkerPool(name, reward, size).call(keywords, seconds)`.

A worker is a fresh interpreter that imports the reward; it shares no lock, no thread and no memory with the run. Past the
limit its whole process group is killed and the next call gets a new one. Linux ends workers with the run, even when the run
is killed. Requests are pickled, since they come from the run; replies are JSON, since the worker has read model output.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from covey.errors import RewardError
from covey.process.spawner import WorkerProcesses, start_module
from covey.rewards.calling.deadline import DeadlineError
from covey.rewards.calling.state_log import log_of

if TYPE_CHECKING:
    from covey.rewards.contract import Logged, RewardSpec

logger = logging.getLogger(__name__)

INSIDE = "COVEY_REWARD_WORKER"
"""Set in a worker's environment, where no scorer may be built: a script without a guard would train a second time."""
LOGS = ("log_extra", "log_metric")
Log = tuple[list[dict[str, Any]], int]
_START_SECONDS = 120.0
_LARGEST_REPLY = 256 * 2**20


class WorkerError(Exception):
    """The reward raised inside its worker; the cause shows the traceback there."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.__cause__ = Exception(f"in its worker process:\n{trace}")


class WorkerDied(Exception):  # noqa: N818 - what happened, not what is wrong
    """The worker process ended during the call: it was killed, crashed in C, or exited."""


class WorkerPool:
    """At most `size` worker processes for one reward; started when first needed, ended by `close` or with the run."""

    def __init__(self, name: str, reward: Any, size: int = 1) -> None:
        self.processes = WorkerProcesses(partial(_Worker, name, packed(name, reward)), size)

    def call(
        self, keywords: dict[str, Any], logs: tuple[str, ...], seconds: float | None, log: Log = ([], 0)
    ) -> dict[str, Any]:
        """`{"values", "extras", "metrics", "seconds"}` of one call. `log`: of the trainer's state, as from `log_of`.

        Raises WorkerError when the reward raised, WorkerDied when its process ended, DeadlineError past `seconds` (`None` or infinity: never), and
        RewardError when the worker cannot load the reward.
        """
        seconds = None if seconds == float("inf") else seconds
        with self.processes.worker() as worker:
            request = {"keywords": keywords, "logs": logs, "seconds": seconds, "log": worker.unsent(*log)}
            reply = worker.ask(request, seconds)
        if "error" in reply:
            raise WorkerError(reply["error"], reply["said"], reply["traceback"])
        return reply

    def close(self) -> None:
        """Kill every worker."""
        self.processes.close()


class _Worker:
    """One process and the socket to it."""

    def __init__(self, name: str, load: dict[str, Any]) -> None:
        self.name, self.load = name, load
        self._sent: tuple[int, Any] = (0, None)
        """Entries of the state's log that the process has, and the newest."""
        self.socket, theirs = socket.socketpair()
        self.trace = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        words = (theirs.fileno(), os.getpid(), self.trace.fileno())
        with theirs:
            self.process = start_module("covey.rewards.calling.worker", words, (words[0], words[2]), **{INSIDE: "1"})

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def begin(self) -> None:
        """Load the reward. Raises RewardError where it cannot be loaded."""
        reply = self.ask({"load": self.load}, _START_SECONDS)
        if "error" in reply:
            raise RewardError(
                f"reward {self.name!r} cannot be loaded in a worker process: {reply['error']}: {reply['said']}. Put it in a "
                "file that can be imported by itself (a script needs `if __name__ == '__main__':` around what trains)."
            )

    def unsent(self, entries: list[dict[str, Any]], count: int) -> tuple[int, list[dict[str, Any]]]:
        """Entries of a log that the process lacks, and their place: all where the log is another one now."""
        num, newest = self._sent
        start = num if 0 < num <= count and entries[num - 1] is newest else 0
        self._sent = count, entries[count - 1] if count else None
        return start, entries[start:count]

    def ask(self, request: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        until = None if seconds is None else time.monotonic() + seconds
        try:
            body = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
            self._limit(until)
            self.socket.sendall(struct.pack("!Q", len(body)) + body)
            size = struct.unpack("!Q", self._receive(8, until))[0]
            if size > _LARGEST_REPLY:
                raise WorkerDied(f"it sent {size} bytes, more than a reward can mean")
            return dict(json.loads(self._receive(size, until)))
        except TimeoutError:
            trace = os.pread(self.trace.fileno(), 8000, 0).decode(errors="replace")
            where = Exception(f"in its worker process, shortly before the limit:\n{trace}")
            raise DeadlineError(f"it did not return within {seconds:g} seconds and was killed") from where
        except (OSError, EOFError) as error:
            raise WorkerDied(f"its worker process {self._end()}") from error

    def kill(self) -> None:
        """End it and everything it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.poll()
        self.process.wait()
        self.socket.close()
        self.trace.close()

    def _limit(self, until: float | None) -> None:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)

    def _receive(self, size: int, until: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._limit(until)
            part = self.socket.recv(min(size - len(parts), 2**20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _end(self) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"left with exit code {code}"


class _Pickler(pickle.Pickler):
    """Pickler that records the modules of the objects it pickles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        owner = obj if isinstance(obj, type) or callable(obj) else type(obj)
        self.modules.add(str(getattr(owner, "__module__", None)))
        self.modules.add(type(obj).__module__)
        return NotImplemented


def packed(name: str, reward: Any) -> dict[str, Any]:
    """Fields that a worker needs to load `reward`. Raises RewardError, with the reason, if it cannot be imported there."""
    if os.name != "posix":
        raise RewardError(f"reward {name!r} asks for a worker process, which needs Linux or macOS; leave isolated out.")
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RewardError(
            f"reward {name!r} cannot run in a worker process ({error}); define it with `def` at the top of a file, or leave "
            "isolated out."
        ) from error
    modules = [(module, _file_of(name, module)) for module in sorted(pickler.modules) if not _is_importable(module)]
    path = [entry or os.getcwd() for entry in sys.path]
    return {"path": path, "modules": modules, "reward": file.getvalue()}


def isolated(spec: RewardSpec) -> RewardSpec:
    """The reward in worker processes, if it is a function of the user's own that they can import; else as it is."""
    from covey.rewards.contract import is_async

    target = spec.call if hasattr(spec.call, "__module__") else type(spec.call)
    is_user_function = not str(getattr(target, "__module__", "")).startswith("covey.")
    if is_async(spec.call) or not is_user_function or spec.how.isolated or hasattr(spec.call, "parameters"):
        return spec
    try:
        packed(spec.name, spec.call)
    except RewardError as reason:
        logger.warning("reward_workers: %s It runs in the process of training.", reason)
        return spec
    return replace(spec, call_options=replace(spec.how, isolated=True))


def light_state(trainer_state: Any) -> SimpleNamespace:
    """The plain numbers and texts of the state, without its log: a worker need not import transformers to read them."""
    values = vars(trainer_state or SimpleNamespace()).items()
    return SimpleNamespace(**{name: value for name, value in values if isinstance(value, int | float | str | None)})


def _is_importable(module: str) -> bool:
    if module in ("__main__", "None") or module.startswith("covey_user_"):
        return module == "None"
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _file_of(name: str, module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise RewardError(
            f"reward {name!r} lives in {module}, which has no file that a worker process could import; write it to one."
        )
    return str(Path(file).resolve())


def call_in_worker(pool: WorkerPool, keywords: dict[str, Any], logged: Logged, limit: float | None) -> Any:
    """Values of a call in a worker process; what it logged is added to `logged`."""
    from covey.rewards.contract import Total  # with torch, which an actor on Ray does without

    plain = {name: value for name, value in keywords.items() if name not in LOGS}
    if "trainer_state" in plain:
        plain["trainer_state"] = light_state(plain["trainer_state"])
    log = log_of(keywords.get("trainer_state"))
    reply = pool.call(plain, tuple(name for name in LOGS if name in keywords), limit, log)
    for column, values in reply["extras"].items():
        logged.extra(column, values)
    for name, value in reply["metrics"]:
        logged.metric(name, Total(*value) if isinstance(value, list) else value)
    return reply["values"]
