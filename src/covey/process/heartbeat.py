"""Heartbeats between processes: each publishes its state twice a second, and a collective with a dead process is abandoned."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from covey.errors import RankError, first_line

logger = logging.getLogger(__name__)
R = TypeVar("R")

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 60.0
"""Seconds without a heartbeat after which a process counts as dead; less if `ddp_timeout` is less."""
BROKEN_SECONDS = 5.0
"""Seconds after a broken connection after which a process without a heartbeat since then is named as the cause."""
PARTED_SECONDS = 10.0
"""Seconds two processes may block in different collectives before both fail."""
_LOOK_SECONDS = 0.05
_HOST = socket.gethostname()


class Store(Protocol):
    """A key-value store shared by all processes, such as `torch.distributed.TCPStore`."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class HeartbeatState:
    """State that a process publishes with its heartbeat."""

    beat: int = 0
    collectives: int = 0
    """Number of collectives started; equal on processes that are in step."""
    collective: str = ""
    """Call site of the collective that it waits in; empty: none."""
    place: str = ""
    """Current function and line of its main thread."""
    ended: str = ""
    """Reason why it takes part in no further collective; empty: it does."""
    error: str = ""
    """The exception that ends its run, published so that others can compare theirs."""
    process: str = ""
    runs: int = 0
    """Number of runs started in this process, the current one included."""
    is_stopping: bool = False
    """True once a signal asked this process to stop the current run."""

    @staticmethod
    def parse(text: bytes) -> HeartbeatState:
        content = json.loads(text)
        return HeartbeatState(
            **{item.name: content[item.name] for item in fields(HeartbeatState) if item.name in content}
        )


class Heartbeat:
    """Heartbeat thread: publishes this process's state and reads the others'; `collective` runs a collective that cannot hang.

    A process counts as lost when it reported its end, sent no heartbeat for `silence` seconds, or did not enter a collective
    within `patience` seconds. `collective` then raises RankError, which names the process and its last call site.
    `is_pollable` is False for collectives that must run on the calling thread (NCCL): there the heartbeat thread logs the
    same error and ends the process with RankError's exit code.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, silence: float, patience: float, is_pollable: bool = True
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.silence, self.patience, self.is_pollable = silence, patience, is_pollable
        self.others: dict[int, HeartbeatState] = {}
        self.heard: dict[int, float] = dict.fromkeys((r for r in range(size) if r != rank), time.monotonic())
        self.is_abandoned = False
        """True if a collective was abandoned that may never end: the process must not join its threads."""
        self.is_stop_requested: Callable[[], bool] = lambda: False
        """Read at each beat, so that others hear of a stop while this process waits in a collective."""
        self._mine = HeartbeatState(process=f"process {os.getpid()} on {_HOST}")
        self._waits_since: float | None = None
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._stop, self._wake, self._published = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="covey-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- the main thread --------------------------------------------------------------------------------------------

    def collective(self, call: Callable[[], R]) -> R:
        """Result of the collective `call`. Raises RankError if another process does not take part."""
        self._waits_since = time.monotonic()
        self._now(collectives=self._mine.collectives + 1, collective=_caller(sys._getframe(1)), error="")
        try:
            return self._apart(call) if self.is_pollable else call()
        except RuntimeError as error:
            self.is_abandoned = True
            raise RankError(self._why_broken(error)) from error
        except KeyboardInterrupt:
            self.is_abandoned = True
            raise
        finally:
            self._waits_since = None
            self._now(collective="")

    def broken(self, error: RuntimeError) -> RankError:
        """Error to raise for a broken collective that torch started by itself (FSDP)."""
        self.is_abandoned = True
        return RankError(self._why_broken(error))

    def _apart(self, call: Callable[[], R]) -> R:
        """Result of `call` in a separate thread, so that this one can stop waiting."""
        done = threading.Event()
        results: list[R] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - raised again on the calling thread
                failed.append(error)
            done.set()

        threading.Thread(target=work, name="covey-collective", daemon=True).start()
        while not done.wait(_LOOK_SECONDS):
            why = self.failure_reason()
            if why is not None:
                self.is_abandoned = True
                raise RankError(why)
        if failed:
            raise failed[0]
        return results[0]

    def fails_together(self, error: BaseException) -> bool:
        """Publish an exception that ends this run. Returns True if every process has one at this same point.

        If so, collectives for a last checkpoint are still possible. If not, this process is published as ended.
        """
        sentence = f"{type(error).__name__}: {error}"
        self._tell(error=sentence)
        deadline = time.monotonic() + BROKEN_SECONDS
        while time.monotonic() < deadline and not isinstance(error, RankError):
            states = [self.others.get(r, HeartbeatState()) for r in self.heard]
            if all(state.error and state.collectives == self._mine.collectives for state in states):
                return True
            if any(
                state.ended or (state.collective and state.collectives > self._mine.collectives) for state in states
            ):
                break
            time.sleep(_LOOK_SECONDS)
        self.end(f"failed with {sentence}")
        return False

    def end(self, why: str) -> None:
        """Publish that this process takes part in no further collective."""
        self._tell(ended=self._mine.ended or why)

    def begin(self) -> None:
        """Reset the published end and error for another run in the same process."""
        self.is_stop_requested = lambda: False
        self._tell(ended="", error="", is_stopping=False, runs=self._mine.runs + 1)

    def hears_stop(self, is_requested: bool) -> bool:
        """True once this process (`is_requested`) or another was asked to stop this run; known to all within a few heartbeats."""
        if is_requested and not self._mine.is_stopping:
            self._now(is_stopping=True)
        return is_requested or any(
            state.is_stopping and state.runs == self._mine.runs for state in list(self.others.values())
        )

    def stop(self) -> None:
        """Stop the heartbeat thread."""
        self._stop.set()
        self._wake.set()
        self._thread.join(2 * BEAT_SECONDS)

    # -- state of the other processes -------------------------------------------------------------------------------

    def has_left(self, rank: int) -> bool:
        """True if the process has published its end, or is silent: for `silence` seconds, or a few once a collective broke."""
        limit = BROKEN_SECONDS if self.is_abandoned else self.silence
        is_silent = time.monotonic() - self.heard.get(rank, time.monotonic()) > limit
        return is_silent or bool(self.others.get(rank, HeartbeatState()).ended)

    def failure_reason(self) -> str | None:
        """Reason why the current collective cannot complete; None if it still can."""
        since, mine = self._waits_since, self._mine
        if since is None:
            return None
        now = time.monotonic()
        waited = now - since
        for rank, heard in self.heard.items():
            other = self.others.get(rank, HeartbeatState())
            if other.ended and (other.collectives < mine.collectives or now - heard > PARTED_SECONDS):
                return f"{self._name(rank)} {other.ended.rstrip('.')}. {self._we(waited)}"
            if now - heard > self.silence:
                return f"{self._name(rank)} has not been heard of for {now - heard:.0f} s; {self._last(other)}. {self._we(waited)}"
            lives = heard > since + self.patience  # a silent process is waited for until `silence` has passed
            if waited > self.patience and lives and other.collectives < mine.collectives:
                return f"{self._name(rank)} lives but did not come within {waited:.0f} s; {self._last(other)}. {self._we(waited)}"
            if (
                waited > PARTED_SECONDS
                and other.collectives == mine.collectives
                and other.collective not in ("", mine.collective)
            ):
                return (
                    f"{self._name(rank)} waits in {other.collective} while this one waits in {mine.collective}: "
                    "they have parted; give every process the same data, options and code."
                )
        return None

    def _why_broken(self, error: RuntimeError) -> str:
        """Reason for a broken connection: waits until the process that ended is known."""
        if isinstance(error, RankError):
            return str(error)
        broke = time.monotonic()
        since = self._waits_since or broke
        while time.monotonic() < broke + 2 * BROKEN_SECONDS:
            why = self.failure_reason()
            if why is not None:
                return why
            for rank, heard in self.heard.items():
                if time.monotonic() - max(heard, broke - 2 * BEAT_SECONDS) > BROKEN_SECONDS:
                    last = self._last(self.others.get(rank, HeartbeatState()))
                    return f"{self._name(rank)} ended without a word (killed?); {last}. {self._we(broke - since)}"
            time.sleep(_LOOK_SECONDS)
        return f"the connection to another process broke: {first_line(error)} {self._we(broke - since)}"

    def _name(self, rank: int) -> str:
        process = self.others.get(rank, HeartbeatState()).process
        return f"rank {rank}" + (f" ({process})" if process else "")

    def _last(self, other: HeartbeatState) -> str:
        return f"it was last in {other.collective or other.place or 'its start'}"

    def _we(self, waited: float) -> str:
        return (
            f"Rank {self.rank} waited {waited:.0f} s for it in {self._mine.collective}; the run ends here. "
            "Start it again with --resume auto to go on from its newest checkpoint."
        )

    # -- the thread -------------------------------------------------------------------------------------------------

    def _now(self, **changed: Any) -> None:
        with self._lock:  # called by both threads
            self._mine = replace(self._mine, **changed)

    def _tell(self, **changed: Any) -> None:
        """Publish a heartbeat now; wait two intervals at most for a store that does not answer."""
        self._now(**changed)
        self._published.clear()
        self._wake.set()
        self._published.wait(2 * BEAT_SECONDS)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()
            now = time.monotonic()
            if now - last > self.silence / 2:  # this process itself was suspended
                self.heard = dict.fromkeys(self.heard, now)
            last = now
            try:
                self._beat()
                self._listen()
            except RuntimeError as error:  # the process that hosts the store is gone
                logger.debug("the store of heartbeats does not answer: %s", error)
            self._guard()

    def _beat(self) -> None:
        self._now(beat=self._mine.beat + 1, place=_place(sys._current_frames().get(self._main or 0)))
        mine = self._mine  # before the question, which `begin` resets first: no answer is of an earlier run
        is_stopping = mine.is_stopping or self.is_stop_requested()
        self.store.set(_key(self.rank), json.dumps(asdict(replace(mine, is_stopping=is_stopping))))
        self._published.set()

    def _listen(self) -> None:
        ranks = [rank for rank in self.heard if rank in self.others or self.store.check([_key(rank)])]
        if not ranks:
            return
        replies = self.store.multi_get([_key(rank) for rank in ranks])  # one request for all ranks
        for rank, reply in zip(ranks, replies, strict=True):
            beat = HeartbeatState.parse(reply)
            if beat != self.others.get(rank):
                self.others[rank] = beat
                self.heard[rank] = time.monotonic()

    def _guard(self) -> None:
        """Exit if this process blocks in a collective that cannot be interrupted."""
        why = None if self.is_pollable else self.failure_reason()
        if why is not None:
            logger.error("%s", why)
            leave_now()


def _key(rank: int) -> str:
    return f"covey/heartbeat/{rank}"


def leave_now() -> None:
    """Exit at once with RankError's exit code, without joining threads: a collective may never end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(RankError.exit_code)


def _caller(frame: FrameType | None) -> str:
    """Call site of a collective: the first frame outside of this room."""
    while frame is not None and Path(frame.f_code.co_filename).name in (
        "world.py",
        "gradient_buckets.py",
        "heartbeat.py",
    ):
        frame = frame.f_back
    return _place(frame)


def _place(frame: FrameType | None) -> str:
    """A frame as `score (loop.py:106)`."""
    if frame is None:
        return ""
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
