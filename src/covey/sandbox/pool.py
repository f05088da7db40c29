"""Programs on their way into the sandbox and their verdicts on the way out: `Sandbox().run(code, tests=[...])`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.declared import CountOrZero, checked
from covey.errors import RewardError
from covey.process.cores import cores_of_rank
from covey.process.spawner import WorkerProcesses
from covey.sandbox import mutants, verdicts, wire
from covey.sandbox.confine import LAYERS, Limits
from covey.sandbox.forms import are_apart
from covey.sandbox.jail import MODULES, START
from covey.sandbox.verdicts import Isolation, ProcessOutput, Result

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0
"""Seconds for a worker to kill a program and answer, before it is killed itself."""
WALL = 4
"""Wall time of a program over its limit of processor time: programs that share a busy machine may wait."""


_ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # else each thread reserves 64 MiB of a program's memory
}  # fmt: skip


class Sandbox:
    """Processes that run model-written code where it can reach nothing. Thread-safe; at most `workers` programs at once.

    `layers` is what to use of `namespaces`, `landlock` and `seccomp`; without a reason, all. Where files, network or processes
    would be open to a program, nothing runs: RewardError says why, unless `allow_unisolated` is true. With `numpy` programs
    can import NumPy, which makes tests that are statements easier to cheat (docs/sandbox.md says how).
    """

    @checked
    def __init__(
        self,
        workers: CountOrZero | None = None,
        *,
        layers: Sequence[str] = LAYERS,
        allow_unisolated: bool = False,
        numpy: bool = False,
    ) -> None:
        if unknown := sorted(set(layers) - set(LAYERS)):
            raise RewardError(f"the sandbox has no layer {unknown[0]!r}; it has {', '.join(LAYERS)}.")
        self.workers = workers or cores_of_rank()
        self._settings = {
            "layers": list(layers),
            "allow_unisolated": allow_unisolated,
            "numpy": _numpy() if numpy else None,
        }
        self._jails = WorkerProcesses(partial(_Jail, self._settings), self.workers)

    @property
    def isolation(self) -> Isolation:
        """Isolation layers in force here. Starts a worker when there is none yet."""
        with self._jails.worker() as jail:
            return jail.isolation

    def run(
        self,
        code: str,
        tests: Sequence[Any] | str | None = None,
        *,
        setup: str = "",
        timeout: float = 10.0,
        memory_mb: int = 256,
        max_output: int = 16 * 2**20,
        strict: bool = False,
    ) -> Result:
        """Run Python `code` where it can reach nothing, and say whether it passes `tests`.

        `tests` are statements such as `assert f(2) == 4`, one text each (or one text for all), which see the names that `code`
        defines, after `setup`; or `{"input": ..., "output": ...}` pairs, for programs that read and print: compared line by line
        without trailing blanks, numbers with a tolerance unless the pair has `"exact": true`. `None`: the code only has to come to its end.
        Statements that only call functions run in another process, others in the program's process and again on mutants of themselves;
        with `strict` all in another process (docs/sandbox.md). `timeout` is in seconds of processor time for one run of all
        statements, and for all pairs together, which may take four times as long by the clock; `memory_mb` is in MiB beyond the interpreter's own; more than `max_output` bytes
        of output end the program. Only the standard library can be imported, and NumPy with `numpy`. Raises RewardError for bad
        arguments, and where this machine cannot isolate.
        """
        plan = verdicts.plan(tests, setup)
        verdicts.check_limits(code, timeout, memory_mb, max_output)
        started = time.perf_counter()
        limits = Limits(cpu_seconds=math.ceil(timeout), memory_mb=memory_mb)
        with self._jails.worker() as jail:
            try:
                result = self._judged(jail, code, plan, limits, timeout, max_output, strict)
            except (OSError, wire.Broken) as error:  # its worker is lost: this program's score, and no other's
                self._jails.drop(jail)
                result = verdicts.lost(error, plan)
        return replace(result, seconds=time.perf_counter() - started)

    def close(self) -> None:
        """End every worker and its programs."""
        self._jails.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _judged(
        self, jail: _Jail, code: str, plan: verdicts.Plan, limits: Limits, timeout: float, max_output: int, strict: bool
    ) -> Result:
        source, until = code.encode("utf-8", errors="replace"), lambda: time.monotonic() + WALL * timeout
        start = partial(jail.watch, source, limits, max_output=max_output, cpu_seconds=timeout)
        watch = partial(start, until=until())
        if plan.statements is not None:
            is_apart = strict or (not self._settings["numpy"] and are_apart(plan.setup, plan.statements))
            if is_apart:
                result, lines = verdicts.of_tests(watch(tests=plan.payload(), where="apart"), plan)
            if not is_apart or (not strict and any("beside" in line for line in lines)):
                result = _in_one_process(lambda **words: start(until=until(), **words), plan)
            return result
        seen: list[ProcessOutput] = []
        for text, _, _ in plan.pairs or ():
            left = timeout - sum(output.cpu_seconds for output in seen)
            seen.append(watch(stdin=text.encode("utf-8", errors="replace"), cpu_seconds=left))
            if seen[-1].late:
                break
        return verdicts.of_pairs(seen, plan)


def _in_one_process(watch: Callable[..., ProcessOutput], plan: verdicts.Plan) -> Result:
    """The verdict of tests that run in the program's process: a pass counts only if mutants of the tests fail."""

    def run(chosen: Sequence[int]) -> tuple[Result, list[dict[str, Any]]]:
        key = secrets.token_bytes(32)
        seen = watch(tests=plan.payload(key=key.hex(), chosen=list(chosen)), where="beside")
        return verdicts.of_tests(seen, plan, key)

    result, lines = run(())
    true = sorted({number for line in lines for number in line.get("true", ()) if result.tests[line["test"]]})
    first = {number for number in true if secrets.randbits(1)}
    halves = [half for half in (first, set(true) - first) if half] or [{mutants.PROBE}]
    for half in halves if any(result.tests) else []:
        held = _held(run(sorted(half))[1], result)
        if held:  # an honest comparison may hold with another value by chance
            again = [_held(run(sorted({number for _, number in held}))[1], result) for _ in range(_TIMES)]
            counts = Counter(pair for more in again for pair in more)
            tests = {test for test, number in held if counts[test, number] > (1 if number == mutants.PROBE else 2)}
            if tests:
                return verdicts.unproven(result, tests)
    return result


_TIMES = 3


def _held(lines: list[dict[str, Any]], result: Result) -> set[tuple[int, int]]:
    """Tests that passed, and numbers of their comparisons that hold with other values; all of a test that did not end again."""
    pairs = {(line["test"], number) for line in lines for number in line.get("held", ())}
    ended = {line["test"] for line in lines if "test" in line}
    missing = {(test, mutants.PROBE) for test in range(len(result.tests)) if test not in ended}
    return {(test, number) for test, number in pairs | missing if result.tests[test]}


class _Jail:
    """One worker: a process that has locked itself in, and the socket to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if os.name != "posix":
            raise RewardError("the sandbox needs Linux (or macOS with allow_unisolated=True).")
        self._control, theirs = socket.socketpair()
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        texts = [(name, (Path(__file__).parent / f"{name}.py").read_text()) for name in MODULES]
        self._allowed = bool(settings["allow_unisolated"])
        self.isolation = Isolation((), {}, ("files", "network", "processes"))
        with theirs:
            self._process = subprocess.Popen(
                [_interpreter(), "-S", "-s", "-c", START],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._trace,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        self._settings = {**settings, "modules": texts, "slot": secrets.randbelow(200_000_000)}

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def begin(self) -> None:
        """Wait until it has locked itself in. Raises RewardError where it cannot, or does not."""
        self._control.settimeout(_START_SECONDS)
        try:
            wire.send(self._control, self._settings)
            reply = wire.receive(self._control)
        except wire.Broken as error:
            trace = os.pread(self._trace.fileno(), 4000, 0).decode(errors="replace").strip()
            raise RewardError(f"the sandbox could not start a worker: {error}. {trace}") from error
        self.isolation = Isolation(tuple(reply["layers"]), dict(reply["missing"]), tuple(reply["uncovered"]))
        if not self.isolation.safe and not self._allowed:
            raise RewardError(
                f"code cannot be run safely on this machine: {self.isolation}. Allow unprivileged user namespaces (in a "
                "container: `--security-opt seccomp=unconfined`), or use a Linux kernel of 5.13 or later with Landlock and "
                "seccomp; pass allow_unisolated=True only for code that you would run by hand."
            )

    def watch(
        self,
        source: bytes,
        limits: Limits,
        *,
        until: float,
        cpu_seconds: float,
        max_output: int,
        stdin: bytes = b"",
        tests: bytes | None = None,
        where: str = "",
    ) -> ProcessOutput:
        """Run one program to its verdict or its end, for `cpu_seconds`, or until the time `until`; `where`: its tests run `apart`, or in its process."""
        watched = ProcessOutput()
        pipes = {name: os.pipe() for name in ("stdout", "stderr", *(["verdict"] if tests is not None else []))}
        files = {"code": _file(source), "stdin": _file(stdin), **({"tests": _file(tests)} if tests is not None else {})}
        try:
            passed = {**files, **{name: ends[1] for name, ends in pipes.items()}}
            request = {"do": "start", "descriptors": list(passed), "limits": asdict(limits), "tests": where}
            self._control.settimeout(_GRACE_SECONDS)
            socket.send_fds(self._control, [json.dumps(request).encode()], list(passed.values()))
            for _, end in pipes.values():
                os.close(end)
            _drain({name: ends[0] for name, ends in pipes.items()}, watched, until, max_output)
            reply = self._end(0.0 if watched.late or watched.loud else min(max(until - time.monotonic(), 0.0), 5.0))
            watched.ended, watched.is_open = dict(reply["ended"]), bool(reply["open"])
            watched.cpu_seconds = float(reply["cpu_seconds"])
            watched.late |= watched.cpu_seconds > cpu_seconds
        finally:
            for descriptor in (*files.values(), *(ends[0] for ends in pipes.values())):
                os.close(descriptor)
        return watched

    def _end(self, wait: float) -> dict[str, Any]:
        self._control.settimeout(wait + _GRACE_SECONDS)
        self._control.sendall(json.dumps({"do": "end", "wait": wait}).encode())
        return wire.receive(self._control)

    def kill(self) -> None:
        """End it and everything in it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()
        self._trace.close()


def _drain(ends: dict[str, int], watched: ProcessOutput, until: float, max_output: int) -> None:
    """Read until the verdict is complete (or, without one, until the program has closed its output) or `until` has come."""
    with selectors.DefaultSelector() as selector:
        for name, end in ends.items():
            selector.register(end, selectors.EVENT_READ, name)
        awaited = {"verdict"} if "verdict" in ends else {"stdout", "stderr"}
        while awaited:
            events = selector.select(max(0.0, until - time.monotonic()))
            for key, _ in events:
                part = os.read(key.fd, 2**16)
                getattr(watched, key.data).extend(part)
                if not part:
                    selector.unregister(key.fd)
                    awaited.discard(key.data)
            if not events or time.monotonic() > until:
                watched.late = True
                return
            if len(watched.stdout) + len(watched.stderr) > max_output or len(watched.verdict) > wire.LARGEST:
                watched.loud = True
                return
        for name in ("stdout", "stderr"):  # output written before the verdict is in the pipe by now
            os.set_blocking(ends[name], False)
            while "verdict" in ends and (part := _available(ends[name])):
                getattr(watched, name).extend(part)


def _available(end: int) -> bytes:
    try:
        return os.read(end, 2**16)
    except BlockingIOError:
        return b""


def _file(data: bytes) -> int:
    """A file without a name that holds `data`."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("covey")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    for start in range(0, len(data), 2**20):
        os.write(descriptor, data[start : start + 2**20])
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _numpy() -> str:
    """The folder that NumPy is in; found, not imported, for programs alone need it."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        raise RewardError("the sandbox was asked for NumPy, which is not installed: pip install numpy.")
    return str(Path(spec.origin).resolve().parents[1])


def _interpreter() -> str:
    """The Python that this one is, not the link of a virtual environment's: its path would name the user's folder."""
    base = getattr(sys, "_base_executable", None)
    return base if base and os.access(base, os.X_OK) else sys.executable
