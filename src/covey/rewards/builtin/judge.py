"""A language model that judges: asked side by side within a deadline, again when its reply has the wrong form, and counted."""

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from covey.declared import Bound, Count, NotNegative, Positive, checked_dataclass
from covey.errors import ConfigError, RewardError, did_you_mean
from covey.rewards.builtin.chat_endpoint import Endpoint, Message, Reply, ReplyCache, ReplyError, side_by_side
from covey.rewards.contract import Total

T = TypeVar("T")
Metrics = Callable[[str, float], None]

_REMEMBER_SECONDS = 60.0
"""Seconds that a failure is cached: the scorer repeats a failed call on halves to find the completions that fail."""


@dataclass
class Spent:
    """Requests and tokens that a judge has used so far."""

    requests: int = 0
    remembered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


@checked_dataclass(frozen=True, kw_only=True, eq=False)
class Judge:
    """Client of one endpoint: caches replies, asks again when one has the wrong form, counts requests and tokens."""

    endpoint: Endpoint
    concurrency: Count = 16
    deadline_seconds: Positive = 100.0
    """Time limit for all questions of one call; the scorer's own limit must be longer."""
    asks: Count = 3
    """Attempts at a question until the reply has the requested form."""
    price_in: NotNegative = 0.0
    """Price of a million prompt tokens."""
    price_out: NotNegative = 0.0
    max_cost: Bound = math.inf
    """Most that one process may spend, since the start or resume: N processes may spend N times as much."""
    cache: ReplyCache = field(default_factory=ReplyCache)
    spent: Spent = field(default_factory=Spent)
    _id: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)
    _gate: Any = field(default=None, repr=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _failed: dict[str, tuple[float, Exception]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.max_cost < math.inf and not (self.price_in > 0 or self.price_out > 0):
            raise ConfigError(
                f"judge(max_cost={self.max_cost:g}) counts nothing without prices; give price_in or price_out, of a million tokens."
            )
        object.__setattr__(self, "_gate", threading.BoundedSemaphore(self.concurrency))

    def all(self, questions: Sequence[Sequence[Message]], read: Callable[[str], T]) -> list[T | Exception]:
        """`read(reply)` of each question, or the exception that it ended in. Equal questions are asked once."""
        until = time.monotonic() + self.deadline_seconds
        keys = [json.dumps([dict(message) for message in question]) for question in questions]
        first = dict(zip(keys, questions, strict=True))
        work = [
            lambda key=key, question=question: self._one(key, question, read, until) for key, question in first.items()
        ]
        results = dict(zip(first, side_by_side(work, self._gate, self.concurrency, until), strict=True))
        self._remember({key: value for key, value in results.items() if isinstance(value, Exception)})
        fatal = next((value for value in results.values() if isinstance(value, RewardError)), None)
        if fatal is not None:
            raise fatal
        return [results[key] for key in keys]

    def _remember(self, failures: Mapping[str, Exception]) -> None:
        now = time.monotonic()
        with self._lock:
            for key in [key for key, (until, _) in self._failed.items() if until < now]:
                del self._failed[key]
            self._failed.update({key: (now + _REMEMBER_SECONDS, error) for key, error in failures.items()})

    def _one(self, key: str, question: Sequence[Message], read: Callable[[str], T], until: float) -> T:
        with self._lock:
            failure = self._failed.get(key)
        if failure is not None and time.monotonic() < failure[0]:
            raise failure[1]
        request = {"url": self.endpoint.url.rstrip("/"), **self.endpoint.body(question)}
        remembered = self.cache.get(request)
        if remembered is not None:
            with self._lock:
                self.spent.remembered += 1
            return read(remembered)
        messages, problem = list(question), ""
        for _ in range(self.asks):
            reply = self._ask(messages, until)
            try:
                value = read(reply.text)
            except ReplyError as error:
                problem = str(error)
                remark = f"Your reply cannot be read: {problem}. Reply with the JSON object alone."
                messages = [
                    *question,
                    {"role": "assistant", "content": reply.text[:2000]},
                    {"role": "user", "content": remark},
                ]
                continue
            self.cache.put(request, reply.text)
            return value
        raise ReplyError(f"the judge's reply could not be read {self.asks} times: {problem}")

    def _ask(self, messages: Sequence[Message], until: float) -> Reply:
        if self.spent.cost >= self.max_cost:
            raise RewardError(
                f"The judge has cost this process {self.spent.cost:.2f}, and max_cost is {self.max_cost:.2f}; raise it to go on."
            )
        reply = self.endpoint.ask(messages, until)
        if self.max_cost < math.inf and not reply.prompt_tokens + reply.completion_tokens:
            raise RewardError(f"{self.endpoint.url} does not say how many tokens it used; leave max_cost out.")
        with self._lock:
            self.spent.requests += reply.num_requests
            self.spent.prompt_tokens += reply.prompt_tokens
            self.spent.completion_tokens += reply.completion_tokens
            self.spent.cost += (reply.prompt_tokens * self.price_in + reply.completion_tokens * self.price_out) / 1e6
        return reply

    def log(self, log_metric: Metrics | None) -> None:
        """The totals of this process so far, as metrics."""
        if log_metric is not None:
            for name, value in vars(self.spent).items():
                log_metric(f"judge/{name}", Total(value, f"{self._id}/{os.getpid()}"))


def judge_of(options: Mapping[str, Any]) -> Judge:
    """A judge of flat options, as a name such as `judge(url=..., model=..., retries=2)` gives them.

    Raises ConfigError for an option that neither `Endpoint` nor `Judge` has.
    """
    there = [f.name for f in fields(Endpoint) if f.name != "called"]
    here = [f.name for f in fields(Judge) if not f.name.startswith("_") and f.name not in ("endpoint", "spent")]
    for name in options:
        if name not in (*there, *here):
            raise ConfigError(
                f"a judge has no option {name!r}.{did_you_mean(name, [*there, *here])} It has {', '.join([*there, *here])}."
            )
    judge_options: dict[str, Any] = {name: value for name, value in options.items() if name in here}
    cache = judge_options.pop("cache", None)
    endpoint = Endpoint(**{name: value for name, value in options.items() if name in there})
    return Judge(
        endpoint=endpoint, cache=cache if isinstance(cache, ReplyCache) else ReplyCache(cache), **judge_options
    )
