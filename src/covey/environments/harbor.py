"""Tasks in containers by the library Harbor (extra `harbor`): TRL's `HarborSpec`, a sandbox for each completion, verifiers as rewards."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.data import harbor as tasks
from covey.declared import Count, checked
from covey.environments.tools import tool
from covey.errors import ConfigError, DataError, RewardError, needed
from covey.names import find
from covey.rewards import reward
from covey.rewards.decorators import call_options_of, mark

if TYPE_CHECKING:
    from covey.environments.harbor_trial import Sandbox

SECONDS = 180.0
"""Time limit of one command."""
_AT_ONCE = 16
_DAY = 86_400.0
"""Limit of a call of a tool, which may wait for an image to be built; Harbor limits that, and each command has its own limit."""


class HarborEnv:
    """An environment whose episodes are trials of Harbor; tools of a subclass call `self._exec(command)`.

    `environment_type`: `docker`, `podman`, `e2b`, `daytona`, `modal` or another of Harbor's. `folder`: the tasks, looked through
    for errors at once, and searched for a row's task that is no longer at its `task_dir`. `at_once`: most sandboxes that start, or
    are verified, at the same time. Raises ConfigError where Harbor or what it starts sandboxes with is missing.
    """

    PROMPT_SUFFIX = ""
    """Text after the instruction, where `reset` writes the prompt."""

    @checked
    def __init__(
        self, environment_type: str = "docker", *, folder: str | Path | None = None, at_once: Count = _AT_ONCE
    ) -> None:
        self.environment_type, self.at_once = environment_type, at_once
        self.folder = None if folder is None else str(folder)
        self.is_over = False
        """True once the task's `[agent] timeout_sec` are over, or its sandbox is lost."""
        self._sandbox: Sandbox | None = None
        if sys.version_info < (3, 12):
            raise ConfigError(f"Harbor needs Python 3.12 or newer; this is {sys.version.split()[0]}.")
        with needed("Harbor's tasks need harbor", "harbor"):
            from covey.environments import harbor_trial
        harbor_trial.expect_ready(environment_type, self.folder)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for function in vars(cls).values():
            if inspect.isfunction(function) and not hasattr(function, "__covey_tool__"):
                tool(timeout=_DAY)(function)

    def reset(self, task_dir: str | None = None, prompt: Any = None, **row: Any) -> str | None:
        """Start the sandbox of a row's task, without waiting for it. Returns the instruction where the row's prompt is empty."""
        from covey.environments.harbor_trial import Sandbox

        if task_dir is None:
            raise DataError('the row has no column task_dir; give the rows of `--dataset "harbor:FOLDER"`')
        folder = Path(task_dir)
        if not folder.is_dir() and self.folder is not None:
            folder = {each.name: each for each in tasks.task_folders(self.folder)}.get(folder.name, folder)
        instruction = tasks.instruction_of(folder) + self.PROMPT_SUFFIX
        if self._sandbox is not None:
            self._sandbox.stop()
        self._sandbox = Sandbox(folder, self.environment_type, self.at_once, self._setup)
        self.is_over = False
        last = prompt[-1] if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, str) else {}
        return None if str(last.get("content") or "").strip() else instruction

    def _exec(self, command: str, timeout: float = SECONDS) -> str:
        """Output of a shell command in the sandbox, with its exit code where that is not 0. Each has a shell of its own."""
        assert self._sandbox is not None
        try:
            output, code = self._sandbox.execute(command, timeout)
        finally:
            self.is_over = self._sandbox.is_over
        return output if code == 0 and output else "\n".join(filter(None, (output, f"[exit code {code}]")))

    async def _setup(self, environment: Any) -> None:
        """Prepare the sandbox, a `BaseEnvironment` of Harbor, before the first command; for subclasses."""

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards of the task's verifier by name, once it has judged. Raises RuntimeError where there are none, and says why."""
        return self._judged().result()

    @property
    def reward(self) -> float:
        """The verifier's reward."""
        return self._chosen("reward", self.rewards)

    async def _reward_of(self, name: str) -> float:
        return self._chosen(name, await asyncio.wrap_future(self._judged()))

    def _judged(self) -> Future[dict[str, float]]:
        if self._sandbox is None:
            raise RuntimeError("the environment has no task yet; reset() gives it one")
        return self._sandbox.judged()

    def _chosen(self, name: str, rewards: dict[str, float]) -> float:
        if name == "reward" and len(rewards) == 1:
            return next(iter(rewards.values()))
        if name not in rewards:
            raise RewardError(
                f"a verifier gives {', '.join(rewards) or 'nothing'} and no {name!r}; choose by HarborSpec(rewards=[...])."
            )
        return rewards[name]

    def close(self) -> None:
        """Remove the sandbox. The last of several that are closed waits until all are gone."""
        if self._sandbox is not None:
            from covey.environments.harbor_trial import wait_for_all

            self._sandbox.stop()
            wait_for_all()


class HarborBashEnv(HarborEnv):
    """The environment whose only tool is a shell."""

    def bash(self, command: str) -> str:
        """Run a shell command in the sandbox of the task. Files stay; the working folder and variables of the shell do not.

        Args:
            command: The command, as bash reads it.

        Returns:
            What it printed, and its exit code if that is not 0.
        """
        return self._exec(command)


class HarborTask(HarborBashEnv):
    """The same, which scores its own episodes: what `--environment-factory harbor:FOLDER` makes."""

    @reward(timeout=math.inf, concurrency=64)
    async def get_reward(self) -> float:
        return await self._reward_of("reward")


AGENTS: dict[str, type[HarborEnv]] = {"bash": HarborBashEnv}


class HarborSpec:
    """Data set, environment and reward of a folder of tasks, or of a data set on the hub; TRL 1.16's class of that name.

    `agent`: `bash`, a subclass of `HarborEnv`, or its import path. `num_tasks`, `indices`: the first of the tasks, or those at these places
    in order of their names. `rewards`: names in `reward.json`, a reward function each. The others are those of `rows` and `HarborEnv`.
    """

    @checked
    def __init__(
        self,
        dataset: str | Path,
        *,
        agent: str | type[HarborEnv] = "bash",
        environment_type: str = "docker",
        num_tasks: Count | None = None,
        indices: Sequence[int] | None = None,
        include_metadata: bool = True,
        rewards: str | Sequence[str] = ("reward",),
        at_once: Count = _AT_ONCE,
    ) -> None:
        if num_tasks is not None and indices is not None:
            raise ConfigError("num_tasks and indices both choose tasks; give one of them.")
        self.dataset, self.include_metadata = str(dataset), include_metadata
        self.rewards = (rewards,) if isinstance(rewards, str) else tuple(rewards)
        places = range(min(num_tasks, len(tasks.task_folders(self.dataset)))) if num_tasks is not None else indices
        self.places = None if places is None else list(places)
        self.environment_factory: Callable[[], HarborEnv] = partial(
            _agent(agent), environment_type=environment_type, folder=self.dataset, at_once=at_once
        )
        """A factory for `environment_factory`."""

    @cached_property
    def train_dataset(self) -> Any:
        """A `datasets.Dataset` with a row for each task."""
        from datasets import Dataset

        rows = tasks.rows(self.dataset, self.include_metadata, self.places)
        suffix = self.environment_factory.func.PROMPT_SUFFIX  # type: ignore[attr-defined]
        for row in rows:
            row["prompt"][0]["content"] += suffix
        return Dataset.from_list(rows)

    @property
    def reward_funcs(self) -> Any:
        """The reward function, or a list of them where `rewards` has several names."""
        functions = [_reward_named(name) for name in self.rewards]
        return functions[0] if len(functions) == 1 else functions


def harbor_environment(
    folder: str | Path, environment_type: str = "docker", at_once: int = _AT_ONCE
) -> Callable[[], HarborEnv]:
    """A factory for `environment_factory` from a folder of tasks; its environments score their own episodes."""
    return partial(HarborTask, environment_type=environment_type, folder=folder, at_once=at_once)


def _reward_named(name: str) -> Callable[..., Any]:
    async def verifier(environments: Sequence[HarborEnv], **columns: Any) -> list[float]:
        return [await environment._reward_of(name) for environment in environments]

    verifier.__name__ = "verifier" if name == "reward" else name
    return mark(verifier, replace(call_options_of(HarborTask.get_reward), unit="completion"))


def _agent(agent: str | type[HarborEnv]) -> type[HarborEnv]:
    kind = find(agent, AGENTS, "agent") if isinstance(agent, str) else agent
    if not (isinstance(kind, type) and issubclass(kind, HarborEnv)):
        raise ConfigError(f"agent is {agent!r}; give 'bash', a subclass of HarborEnv, or its import path.")
    return kind
