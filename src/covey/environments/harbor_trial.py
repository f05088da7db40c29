"""Trials of Harbor whose agent is a model that trains: a sandbox is started, takes commands in turn, is verified and removed."""

import asyncio
import atexit
import logging
import platform
import re
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from covey.data.harbor import task_folders
from covey.environments.tools import MAX_CHARACTERS
from covey.errors import ConfigError, DataError, message_of

logger = logging.getLogger(__name__)
logging.getLogger("harbor.utils.logger").setLevel(logging.WARNING)  # it sets itself to DEBUG

_HOST = f"covey-{zlib.crc32(platform.node().encode()):08x}"
_PROCESS = re.compile(rf"{_HOST}-(\d+)-(\d+)-")
_MOST_PRINTED = 100 * MAX_CHARACTERS
_FLOOD = f"the command printed more than {_MOST_PRINTED:,} characters and was ended"
_LATE = "the time for this task is over"
_ENDING_SECONDS = 10.0
"""For Harbor to end a command that is late."""
_LOOP = asyncio.new_event_loop()
"""One event loop for all trials, in a thread of its own: Harbor's locks belong to it."""
threading.Thread(target=_LOOP.run_forever, name="covey-harbor", daemon=True).start()
_SANDBOXES: dict[str, "Sandbox"] = {}
"""Those that are not removed yet, by the names of their trials."""


class Sandbox:
    """The sandbox of one task, which begins to start at once. At most `at_once` of the process start, or are verified, at a time.

    `setup` is awaited with Harbor's environment before the first command.
    """

    def __init__(self, folder: Path, kind: str, at_once: int, setup: Callable[[Any], Awaitable[None]]) -> None:
        self.folder, self.kind, self.at_once, self.setup = folder, kind, at_once, setup
        self.name = f"{_this_process()}-{uuid4().hex[:12]}"
        self.is_over, self._is_stopped, self._has_slot = False, False, False
        """`is_over`: there is no time left for the task, or no sandbox."""
        self._started, self._ends, self._ended, self._judged = (asyncio.Event() for _ in range(4))
        self._rewards: dict[str, float] | None = None
        self._problem = "was removed before it was verified"
        self._trial: asyncio.Task[Any] | None = None
        self._commands: set[asyncio.Task[tuple[str, int]]] = set()
        _SANDBOXES[self.name] = self
        self.removed = _submit(self._live())

    def execute(self, command: str, seconds: float) -> tuple[str, int]:
        """(output, exit code) of a shell command, once the sandbox has started. Raises an error for the model to read."""
        return _submit(self._execute(command, seconds)).result()  # type: ignore[no-any-return]

    def judged(self) -> "Future[dict[str, float]]":
        """Future rewards of the verifier, which runs once this is called. RuntimeError, with the reason, where there are none."""
        return _submit(self._judge())

    def stop(self) -> None:
        """Begin to remove the sandbox, verified or not."""
        if not self.is_ending:
            self._is_stopped = True
            _submit(self._stop())

    @property
    def is_ending(self) -> bool:
        """True from when it is verified, or told to stop."""
        return self._is_stopped or self._judged.is_set()

    async def serve(self, environment: Any) -> None:
        """The run of Harbor's agent: until the episode is over, or the task's time for it."""
        self._give_slot()
        try:
            await self.setup(environment)
            self._environment = environment
            self._context = copy_context()  # with Harbor's user and variables for agents
            self._started.set()
            await self._ends.wait()
            await self._take_slot()
        finally:
            self.is_over = True
            self._ended.set()
            for command in self._commands:
                command.cancel()

    async def _live(self) -> None:
        """From its start to its removal. Rewards are kept before the removal, which takes seconds."""
        try:
            with tempfile.TemporaryDirectory(prefix="covey-harbor-", ignore_cleanup_errors=True) as trials:
                agent = AgentConfig(import_path=f"{__name__}:Seat", kwargs={"sandbox": self.name})
                place = {"trial_name": self.name, "trials_dir": Path(trials), "task": TaskConfig(path=self.folder)}
                environment = EnvironmentConfig(type=EnvironmentType(self.kind))
                await self._take_slot()
                trial = await Trial.create(TrialConfig(agent=agent, environment=environment, **place))
                if self._is_stopped:
                    return
                self._trial = asyncio.ensure_future(trial.run())
                ended = asyncio.ensure_future(self._ended.wait())
                await asyncio.wait([self._trial, ended], return_when=asyncio.FIRST_COMPLETED)
                while not self._trial.done() and not _is_judged(trial.result):
                    await asyncio.sleep(0.05)
                self._keep(trial.result)
                with suppress(asyncio.CancelledError):
                    await self._trial
        except Exception as error:  # noqa: BLE001 - of Harbor, a provider or the task: this completion is not scored
            self._problem = f"did not start: {type(error).__name__}: {message_of(error)}"
        finally:
            self.is_over = True
            self._give_slot()
            for event in (self._started, self._ended, self._judged):
                event.set()
            del _SANDBOXES[self.name]

    def _keep(self, result: Any) -> None:
        verified, problem = result.verifier_result, result.exception_info
        if verified is not None and self._started.is_set():
            self._rewards = {name: float(value) for name, value in (verified.rewards or {}).items()}
        elif problem is not None and not self._is_stopped:
            phase = "was not scored by its verifier" if self._started.is_set() else "did not start"
            self._problem = f"{phase}: {problem.exception_type}: {_short(problem.exception_message)}"
        self._judged.set()
        self._give_slot()

    async def _execute(self, command: str, seconds: float) -> tuple[str, int]:
        await self._started.wait()
        if self._ended.is_set():
            has_failed = self._judged.is_set() and self._rewards is None
            raise RuntimeError(f"the sandbox {self._problem}") if has_failed else TimeoutError(_LATE)
        task = self._context.run(asyncio.create_task, _run(self._environment, command, seconds))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        try:
            return await task
        except asyncio.CancelledError:
            raise TimeoutError(_LATE) from None

    async def _judge(self) -> dict[str, float]:
        self._ends.set()
        await self._judged.wait()
        if self._rewards is None:
            raise RuntimeError(f"the sandbox of the task {self.folder} {self._problem}")
        return self._rewards

    async def _stop(self) -> None:
        if self._trial is not None and not self._judged.is_set():
            if not self._started.is_set():
                _end_children(self.name)  # a client of docker that outlives the trial would start what is being removed
            self._trial.cancel()

    async def _take_slot(self) -> None:
        await _slots(self.at_once).acquire()
        self._has_slot = True

    def _give_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            _slots(self.at_once).release()


async def _run(environment: Any, command: str, seconds: float) -> tuple[str, int]:
    """(output, exit code). A command that prints far more than a model reads is ended.

    Harbor ends a command by waiting for its client, which may take for ever where its output is not read; so nobody waits for Harbor.
    """
    printed, flood = 0, asyncio.Event()

    async def count(text: str, stream: Any) -> None:
        nonlocal printed
        printed += len(text)
        if printed > _MOST_PRINTED:
            flood.set()
            raise RuntimeError(_FLOOD)

    async def execute() -> Any:
        with environment.scoped_output_callback(count):
            return await environment.exec(command, timeout_sec=max(1, round(seconds)))

    work, flooded = asyncio.create_task(execute()), asyncio.create_task(flood.wait())
    try:
        await asyncio.wait({work, flooded}, timeout=seconds + _ENDING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise (
                RuntimeError(_FLOOD)
                if flood.is_set()
                else TimeoutError(f"the command did not end in {seconds:g} seconds")
            )
        done = work.result()
    finally:
        work.cancel()
        flooded.cancel()
    return "".join(filter(None, (done.stdout, done.stderr))), done.return_code


class Seat(BaseAgent):  # type: ignore[misc]
    """The agent of a trial, in whose place a model acts."""

    capabilities = AgentCapabilities(skills=True)

    def __init__(self, *arguments: Any, sandbox: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sandbox = _SANDBOXES[sandbox]

    @staticmethod
    def name() -> str:
        return "covey"

    def version(self) -> str | None:
        return None

    async def set_web_tools_disabled(self, disabled: bool, environment: Any) -> None:
        """It has none."""

    async def setup(self, environment: Any) -> None:
        """Nothing is installed in the sandbox."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await self.sandbox.serve(environment)


@cache
def expect_ready(kind: str, source: str | None) -> None:
    """Raise ConfigError where no sandbox of this kind can start, DataError for a task of `source` that Harbor refuses. Removes what
    killed runs left."""
    try:
        EnvironmentFactory.run_preflight(EnvironmentType(kind))
    except (SystemExit, Exception) as error:
        raise ConfigError(f"Harbor cannot start sandboxes of the kind {kind!r}: {message_of(error, 400)}") from error
    if kind in ("docker", "podman"):
        if kind == "docker" and _engine("docker", "compose", "version") is None:
            raise ConfigError("Harbor starts containers by `docker compose`, which is missing; install its version 2.")
        _remove_leftovers(kind)
    for folder in () if source is None else task_folders(source):
        try:
            task = Task(folder)
        except (ValueError, OSError, RuntimeError) as error:
            raise DataError(f"The task {folder} cannot be used: {message_of(error, 400)}") from error
        if not (task.config.environment.docker_image or (folder / "environment").is_dir()):
            raise DataError(f"The task {folder} has neither a folder environment nor [environment] docker_image.")


def wait_for_all() -> None:
    """Wait until all sandboxes are gone, once the last of them is being removed: they are removed side by side."""
    living = list(_SANDBOXES.values())
    if all(sandbox.is_ending for sandbox in living):
        wait([sandbox.removed for sandbox in living])


@atexit.register
def _stop_all() -> None:
    for sandbox in list(_SANDBOXES.values()):
        sandbox.stop()
    wait_for_all()


def _remove_leftovers(kind: str) -> None:
    """Remove containers and networks of killed processes of this machine, and name them."""
    form = ("--format", '{{.Label "com.docker.compose.project"}}')
    listed = [_engine(kind, *words, *form) or "" for words in (("ps", "--all"), ("network", "ls"))]
    matches = [_PROCESS.match(project) for project in sorted(set(" ".join(listed).split()))]
    gone = [match.string for match in matches if match and not _is_alive(int(match[1]), int(match[2]))]
    for project in gone:
        _engine(kind, "compose", "--project-name", project, "down", "--volumes", "--remove-orphans", "--timeout", "0")
    if gone:
        logger.warning("removed containers and networks that a killed run had left: %s", ", ".join(gone))


def _engine(*command: str) -> str | None:
    """Output of a command of docker or podman; None where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _this_process() -> str:
    process = psutil.Process()
    return f"{_HOST}-{process.pid}-{int(process.create_time())}"


def _is_alive(pid: int, started: int) -> bool:
    try:
        return abs(int(psutil.Process(pid).create_time()) - started) <= 1
    except psutil.Error:
        return False


def _end_children(name: str) -> None:
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any(name in word for word in child.cmdline()):
                child.terminate()


def _submit(work: Any) -> "Future[Any]":
    return asyncio.run_coroutine_threadsafe(work, _LOOP)


@cache
def _slots(at_once: int) -> asyncio.Semaphore:
    return asyncio.Semaphore(at_once)


def _is_judged(result: Any) -> bool:
    is_done = result.verifier is not None and result.verifier.finished_at is not None
    return result.verifier_result is not None or (is_done and result.exception_info is not None)


def _short(message: str) -> str:
    """The last line of what compose printed, or the whole message."""
    printed = message.partition("Stderr: None")[0].rpartition("Stdout:")[2].strip(" .\n")
    return (printed.splitlines() or [""])[-1][-400:]
