"""A reward function on Ray actors, on this machine or others: `on_ray(reward, replicas=2)` is a reward as the function is."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from covey.errors import RewardError
from covey.process.cluster import connected
from covey.rewards.calling.state_log import log_of
from covey.rewards.calling.workers import LOGS, WorkerDied, light_state
from covey.rewards.decorators import CallOptions, call_options_of, mark

if TYPE_CHECKING:
    from covey.types import Reward

_DEATHS = 2
"""Actors that may end on one part before it is given up; halving then finds the completion that ends them."""
_LOOK_SECONDS = 0.2
_START_SECONDS = 120.0


def on_ray(reward: Reward, *, replicas: int = 1, num_cpus: float = 1, num_gpus: float = 0) -> Reward:
    """The reward function, computed by `replicas` Ray actors with `num_cpus` and `num_gpus` each.

    A call's completions are split over the actors, those of one prompt together; `replicas=1` leaves calls whole. An actor that
    ends is replaced and its part asked again; one that is late is killed and replaced. Exceptions of the function are raised
    as its own. Marks of `@reward` are kept, `isolated` excepted, which an actor is. The cluster is that of RAY_ADDRESS or one
    on this machine, joined at the first call; raises ConfigError then if Ray is not installed. Actors end with the run.
    """
    if replicas < 1:
        raise RewardError(f"on_ray(replicas={replicas}) leaves no actor; use at least 1.")
    made = OnRay(reward, replicas, {"num_cpus": num_cpus, "num_gpus": num_gpus})
    options = call_options_of(reward)
    concurrency = (options.concurrency or replicas) if options.streams else options.concurrency
    return mark(made, replace(options, in_thread=True, isolated=False, concurrency=concurrency, before=made.start))


@dataclass(frozen=True, eq=False)
class _Part:
    """Completions `start` to `stop` of a call, at an actor."""

    start: int
    stop: int
    actor: Any
    num_deaths: int = 0


class OnRay:
    """Callable with the name and the signature of the function. `start` first keeps the actors' start out of a call's limit."""

    def __init__(self, reward: Reward, replicas: int, needs: Mapping[str, float]) -> None:
        self.reward, self.replicas, self.needs = reward, replicas, dict(needs)
        self.options: CallOptions = call_options_of(reward)
        self.__name__ = str(getattr(reward, "__name__", type(reward).__name__))
        signature = inspect.signature(reward)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        takes_any = "prompts" in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds
        self.takes_prompts = self.options.is_singular or takes_any
        if not self.takes_prompts:  # where one prompt's completions end
            first = inspect.Parameter("prompts", inspect.Parameter.KEYWORD_ONLY)
            signature = signature.replace(
                parameters=sorted([first, *signature.parameters.values()], key=lambda parameter: parameter.kind)
            )
        self.__signature__ = signature
        self._actors: list[Any] = [None] * replicas
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def __call__(self, **keywords: Any) -> Any:
        ray = connected("on_ray", "call the reward without on_ray")
        if "trainer_state" in keywords:
            log, count = log_of(keywords["trainer_state"])
            keywords["trainer_state"] = light_state(keywords["trainer_state"])
            keywords["trainer_state"].log_history = log[:count]
        logs = {name: keywords.pop(name) for name in LOGS if name in keywords}
        bounds = [(0, 1)] if self.options.is_singular else _bounds(keywords["prompts"], self.replicas)
        if not self.takes_prompts:
            del keywords["prompts"]
        answers = self._answers(ray, keywords, tuple(logs), bounds)
        _log(logs, answers)
        if self.options.is_singular:
            return answers[0]["values"]
        return [value for answer in answers for value in answer["values"]]

    def start(self) -> None:
        """Start the actors that are missing, and wait for them. Raises WorkerDied for one that does not come up."""
        ray = connected("on_ray", "call the reward without on_ray")
        with self._lock:
            running = {id(actor) for actor in self._actors if actor is not None}
        actors = {id(actor): actor for actor in (self._actor(ray) for _ in range(self.replicas))}
        fresh = [actor for key, actor in actors.items() if key not in running]
        try:
            ray.get([actor.ready.remote() for actor in fresh], timeout=_START_SECONDS)
        except ray.exceptions.RayError as error:
            for actor in fresh:
                self._drop(actor)
            raise WorkerDied(f"Ray could not start its actor: {str(error).strip().splitlines()[0]}") from error

    # -- parts and actors -------------------------------------------------------------------------------------------

    def _answers(
        self, ray: Any, keywords: dict[str, Any], logs: tuple[str, ...], bounds: Sequence[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """One answer for each part, in order. The actors of parts that a deadline interrupts are killed."""
        size = bounds[-1][1]

        def ask(start: int, stop: int, num_deaths: int = 0) -> tuple[Any, _Part]:
            actor = self._actor(ray)
            part_keywords = keywords if stop - start == size else _cut(keywords, size, start, stop)
            return actor.score.remote(part_keywords, logs), _Part(start, stop, actor, num_deaths)

        waiting = dict(ask(*bound) for bound in bounds)
        by_start: dict[int, dict[str, Any]] = {}
        try:
            while waiting:
                for reference in ray.wait(list(waiting), timeout=_LOOK_SECONDS)[0]:
                    part = waiting.pop(reference)
                    answer = self._answer(ray, reference, part)
                    if answer is None:
                        waiting.update([ask(part.start, part.stop, part.num_deaths + 1)])
                    else:
                        by_start[part.start] = answer
        except Exception:
            raise
        except BaseException:
            for part in waiting.values():
                self._drop(part.actor)
                ray.kill(part.actor, no_restart=True)
            raise
        answers = [by_start[start] for start, _ in bounds]
        for answer, (start, stop) in zip(answers, bounds, strict=True):
            if len(bounds) > 1 and len(answer["values"]) != stop - start:
                raise RewardError(
                    f"reward {self.__name__!r} returned {len(answer['values'])} values for {stop - start} completions; return one "
                    "for each."
                )
        return answers

    def _answer(self, ray: Any, reference: Any, part: _Part) -> dict[str, Any] | None:
        """The answer for a part; None if its actor ended. Raises the function's own exception, or WorkerDied."""
        try:
            return dict(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except ray.exceptions.RayError as error:
            self._drop(part.actor)
            if part.num_deaths + 1 >= _DEATHS:
                raise WorkerDied(f"its actor ended {_DEATHS} times on these completions") from error
            return None

    def _actor(self, ray: Any) -> Any:
        """The next actor in turn, started if it is new or replaces one that ended."""
        with self._lock:
            i = next(self._turn) % self.replicas
            if self._actors[i] is None:
                self._actors[i] = ray.remote(max_restarts=0, **self.needs)(_Actor).remote(self.reward)
            return self._actors[i]

    def _drop(self, actor: Any) -> None:
        with self._lock:
            self._actors = [None if running is actor else running for running in self._actors]


class _Actor:
    """Body of the Ray actor."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def ready(self) -> None:
        """Nothing more than that the actor is up."""

    def score(self, keywords: dict[str, Any], logs: tuple[str, ...]) -> dict[str, Any]:
        """`{"values", "extras", "metrics"}` of one call."""
        extras: dict[str, list[Any]] = {}
        metrics: list[tuple[str, Any]] = []
        if "log_extra" in logs:
            keywords["log_extra"] = lambda column, values: extras.__setitem__(column, list(values))
        if "log_metric" in logs:
            keywords["log_metric"] = lambda name, value: metrics.append((name, value))
        values: Any = self.reward(**keywords)
        if inspect.isawaitable(values):
            values = asyncio.run(_await(values))
        if not call_options_of(self.reward).is_singular:
            values = list(values)
        return {"values": values, "extras": extras, "metrics": metrics}


async def _await(values: Any) -> Any:
    return await values


def _bounds(prompts: Sequence[Any], most: int) -> list[tuple[int, int]]:
    """At most `most` parts of about one size, as (start, stop), that keep equal prompts which follow each other together."""
    size, cuts = len(prompts), [0]
    edges = [i for i in range(1, size) if prompts[i] != prompts[i - 1]]
    for k in range(1, most):
        later = [i for i in edges if i >= k * size / most and i > cuts[-1]]
        cuts += later[:1]
    return list(itertools.pairwise([*cuts, size]))


def _cut(keywords: Mapping[str, Any], size: int, start: int, stop: int) -> dict[str, Any]:
    is_column = lambda value: isinstance(value, list) and len(value) == size
    return {name: value[start:stop] if is_column(value) else value for name, value in keywords.items()}


def _log(logs: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
    """Hand on the columns that all parts logged, and every number."""
    shared = [name for name in answers[0]["extras"] if all(name in answer["extras"] for answer in answers)]
    for name in shared:
        logs["log_extra"](name, [value for answer in answers for value in answer["extras"][name]])
    for answer in answers:
        for name, value in answer["metrics"]:
            logs["log_metric"](name, value)
