"""A sampler in another process, for completions that something of this one drives: tools and environments, or an agent's calls."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from covey.errors import CoveyError
from covey.rollout.calls import refuse_extras, report
from covey.rollout.environments import Environment
from covey.rollout.live import LiveRequest
from covey.rollout.prompts import PromptLike
from covey.rollout.sampler import DEFAULT_ROWS, SamplingParams
from covey.rollout.worker import Call, Cancelled, Order, Replies
from covey.rollout.worker_process import AskingWorker, Tell
from covey.types import Group, Prompt

_LOOK_SECONDS = 0.05
"""Polling interval for a stop while a worker writes."""
_JOIN_SECONDS = 0.002
"""Longest time that a new call waits before it is sent to the worker."""


class RemoteSampler:
    """A sampler whose completions the worker writes that `start` begins, by the weights of the newest order.

    The worker's sampler asks for the environment's replies within its decode steps, as it would here.
    """

    max_rows = DEFAULT_ROWS

    def __init__(
        self, model: Any, tokenizer: Any, eos_ids: Sequence[int], version: int, start: Callable[[Tell], AskingWorker]
    ) -> None:
        self.model, self.tokenizer, self.eos_ids, self.version = model, tokenizer, tuple(eos_ids), version
        self.environment: Environment | None = None
        self.check_stop: Callable[[], None] = lambda: None
        """Called while waiting for the worker; what it raises ends the wait."""
        self.at_least = version
        """Oldest weights of the running order."""
        self.start, self.numbers = start, count()
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def over(self, environment: Environment | None = None) -> RemoteSampler:
        """This sampler, whose completions the environment may answer."""
        self.environment = environment
        return self

    # -- what a thread's worker draws from ---------------------------------------------------------------------------

    def attach(self, tell: Tell, check_open: Callable[[], None]) -> None:
        """Start the worker; it tells `tell` of its weights and of its end."""
        self.tell, self.check_stop = tell, check_open
        self.worker = self.start(self._hear)

    def begin(self, order: Order) -> None:
        self.at_least = order.at_least

    def publish(self, version: int) -> bool:
        return self.worker.publish(version)

    def end(self) -> None:
        self.worker.close()

    def _hear(self, message: tuple[Any, ...]) -> None:
        """Pass a message of the worker on; in any thread."""
        if message[0] in ("group", "turns", "answered"):
            self._inbox.put(message)
        elif message[0] not in ("began", "done"):  # of what the order is made of
            if message[0] == "took":
                self.version = message[1]
            self.tell(message)

    def receive(self, seconds: float = _LOOK_SECONDS) -> tuple[Any, ...] | None:
        """The next message of the worker; None: there was none in this time."""
        self.check_stop()
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None

    # -- the sampler interface ---------------------------------------------------------------------------------------

    def load(self, policy: Any, version: int) -> None:
        """Weights reach the worker by `publish`. Raises CoveyError."""
        raise CoveyError("the weights of a worker change by what it is published.")

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish. Without prompts: the weights of the order, for later calls."""
        number = next(self.numbers)
        plain = tuple(replace(prompt, columns={}) for prompt in prompts if isinstance(prompt, Prompt))
        self.worker.send(Order(number, plain, n, params, self.at_least))
        return self._groups(number, len(plain))

    go_on = sample
    """Further turns of an order; its presence has an agent's rollout begin with an order of no prompts."""

    def _groups(self, number: int, left: int) -> Iterator[Group]:
        while left:
            match self.receive():
                case ("group", order, group) if order == number:
                    left -= 1
                    yield group
                case ("turns", turns):
                    assert self.environment is not None  # the worker has a sampler without turns otherwise
                    self.worker.send(Replies(tuple(self.environment(turns))))

    def scheduler(self) -> RemoteScheduler:
        """Scheduler of an agent's calls."""
        return RemoteScheduler(self)


class RemoteScheduler:
    """Calls on their way to the worker, which answers those that it has side by side; see `covey.rollout.calls.CallScheduler`."""

    held = 0

    def __init__(self, sampler: RemoteSampler) -> None:
        self.sampler, self.max_rows = sampler, sampler.max_rows
        self.requests: deque[LiveRequest] = deque()
        self.running: dict[int, LiveRequest] = {}

    @property
    def num_rows(self) -> int:
        return sum(len(request.keys) for request in self.running.values())

    @property
    def is_busy(self) -> bool:
        return bool(self.running)

    def add(self, request: LiveRequest) -> None:
        """Send a request. Raises NotReportedError for one with more than token ids and their log-probabilities."""
        refuse_extras(request)
        number = next(self.sampler.numbers)
        self.running[number] = request
        prompt = Prompt(uid=request.prompt.uid, token_ids=request.prompt.token_ids, media=request.prompt.media)
        self.sampler.worker.send(Call(number, replace(request, prompt=prompt, listener=None, num_top=None)))

    def step(self) -> list[tuple[LiveRequest, Group]]:
        """The next answer, if it comes at once."""
        try:
            message = self.sampler.receive(_JOIN_SECONDS)
        except BaseException:  # the rollout is over
            for request in list(self.running.values()):
                self.cancel(request)
            raise
        match message:
            case ("answered", number, group) if number in self.running:
                request = self.running.pop(number)
                report(request, group.completions)
                return [(request, replace(group, prompt=request.prompt))]
        return []

    def cancel(self, request: LiveRequest) -> None:
        """Have the worker drop a request."""
        for number in [number for number, other in self.running.items() if other is request]:
            del self.running[number]
            self.sampler.worker.send(Cancelled(number))
