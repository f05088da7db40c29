"""Single requests that come and go, as an endpoint has them, over any sampler: the native engine decodes them in one running batch."""

from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from covey.errors import CoveyError, Unsupported
from covey.models import reads_media, unwrapped
from covey.rollout.engine import NativeSampler
from covey.rollout.live import LiveRequest, LiveScheduler
from covey.rollout.sampler import DEFAULT_ROWS, Sampler
from covey.types import Completion, Group, Prompt


class NotReportedError(CoveyError, ValueError):
    """A request for more than its sampler gives."""


class CallScheduler(Protocol):
    """Requests that are answered side by side."""

    held: int
    """Bytes of KV cache at once."""
    max_rows: int

    @property
    def num_rows(self) -> int:
        """Completions that are being written."""

    @property
    def requests(self) -> Sized:
        """Requests that wait for room."""

    @property
    def is_busy(self) -> bool: ...

    def add(self, request: LiveRequest) -> None:
        """Queue a request. Raises NotReportedError for one that this sampler cannot answer."""

    def step(self) -> list[tuple[LiveRequest, Group]]:
        """A bit of work; the requests that it finished."""

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request; nothing happens if it is over."""


class SampledScheduler:
    """A scheduler like `LiveScheduler` over any `Sampler`: token ids in, token ids and their log-probabilities out.

    A batch is what waits when the one before it is over, so a request that comes meanwhile waits for that one's end.
    Draws repeat where the sampler's do: each request has a seed of its own, whatever shares its batch.
    """

    held = 0

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.max_rows: int = getattr(sampler, "max_rows", None) or DEFAULT_ROWS
        self.requests: deque[LiveRequest] = deque()
        self.running: dict[str, LiveRequest | None] = {}
        """By the uid of its prompt; None: it was cancelled."""
        self.drawn: Iterator[Group] = iter(())

    @property
    def num_rows(self) -> int:
        return sum(len(request.keys) for request in self.running.values() if request is not None)

    @property
    def is_busy(self) -> bool:
        return bool(self.requests or self.running)

    def add(self, request: LiveRequest) -> None:
        """Queue a request. Raises NotReportedError for what only the native engine of this process answers."""
        refuse_extras(request)
        self.requests.append(request)

    def step(self) -> list[tuple[LiveRequest, Group]]:
        """The next finished request of the batch, or of the next one."""
        if not self.running:
            self._begin()
        group = next(self.drawn, None)
        if group is None:
            missing, self.running = len(self.running), {}
            if missing:
                raise CoveyError(f"the sampler left {missing} requests of an agent without an answer.")
            return []
        request = self.running.pop(group.prompt.uid)
        if request is None:
            return []
        completions = tuple(_cut(completion, request.limit, self.sampler) for completion in group.completions)
        report(request, completions)
        return [(request, Group(prompt=request.prompt, completions=completions))]

    def cancel(self, request: LiveRequest) -> None:
        """Remove a request from the queue, or drop its answer."""
        if request in self.requests:
            self.requests.remove(request)
        self.running = {uid: None if other is request else other for uid, other in self.running.items()}

    def _begin(self) -> None:
        """Draw the first request that waits, and all that can share its batch: those of one shape, one of each key."""
        first = self.requests[0]
        shared = [request for request in self.requests if _shape(request) == _shape(first)]
        alike = list({request.keys[0]: request for request in reversed(shared)}.values())[::-1]
        self.requests = deque(request for request in self.requests if request not in alike)
        prompts = [
            Prompt(uid=f"{request.keys[0]}", token_ids=request.prompt.token_ids, media=request.prompt.media)
            for request in alike
        ]
        self.running = {prompt.uid: request for prompt, request in zip(prompts, alike, strict=True)}
        go_on: Callable[..., Iterator[Group]] = getattr(self.sampler, "go_on", self.sampler.sample)
        most = max(request.limit for request in alike)
        self.drawn = iter(go_on(prompts, len(first.keys), replace(first.params, max_tokens=most, seed=0)))


class SeeingScheduler:
    """The native engine's scheduler of a model that reads media, and batches for prompts with media that the engine cannot compute."""

    def __init__(self, sampler: NativeSampler) -> None:
        self.sampler, self.live, self.sampled = sampler, LiveScheduler.of(sampler), SampledScheduler(sampler)
        self.held, self.max_rows = self.live.held, self.live.max_rows

    @property
    def num_rows(self) -> int:
        return self.live.num_rows + self.sampled.num_rows

    @property
    def requests(self) -> Sized:
        return range(len(self.live.requests) + len(self.sampled.requests))  # other threads ask while they change

    @property
    def is_busy(self) -> bool:
        return self.live.is_busy or self.sampled.is_busy

    def add(self, request: LiveRequest) -> None:
        """Queue a request. Raises Unsupported for media that this sampler cannot compute in any way."""
        prompt = request.prompt
        reason = None if prompt.media is None else self.sampler.reason_against_media(prompt)
        if reason is not None and type(self.sampler) is NativeSampler:
            raise Unsupported(f"{type(unwrapped(self.sampler.model)).__name__} reads text alone here: {reason}.")
        (self.live if reason is None else self.sampled).add(request)

    def step(self) -> list[tuple[LiveRequest, Group]]:
        """A token of every row, and the next answer of the batch."""
        return [done for part in (self.live, self.sampled) if part.is_busy for done in part.step()]

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request; nothing happens if it is over."""
        self.live.cancel(request)
        self.sampled.cancel(request)


def scheduler_of(sampler: Any) -> CallScheduler:
    """Scheduler of single requests over this sampler: its own, within the native engine's decode steps, or by batches."""
    if isinstance(sampler, NativeSampler):
        return SeeingScheduler(sampler) if reads_media(sampler.model) else LiveScheduler.of(sampler)
    made: Callable[[], CallScheduler] | None = getattr(sampler, "scheduler", None)
    return SampledScheduler(sampler) if made is None else made()


def refuse_extras(request: LiveRequest) -> None:
    """Raise NotReportedError for what only the native engine of this process answers."""
    if request.num_top:
        raise NotReportedError("The sampler of this run reports no other likely tokens; leave top_logprobs out.")
    if request.ignores_eos:
        raise NotReportedError("The sampler of this run ends a completion at its end token; leave ignore_eos out.")


def decoding(sampler: Any) -> AbstractContextManager[Any]:
    """The model's state while the sampler decodes; only the native engine needs one."""
    return sampler.forward.evaluating() if isinstance(sampler, NativeSampler) else nullcontext()


def _shape(request: LiveRequest) -> tuple[Any, ...]:
    return request.drawn_with, request.params.stop, len(request.keys)


def _cut(completion: Completion, limit: int, sampler: Sampler) -> Completion:
    """The completion, ended at its own request's limit."""
    if completion.num_tokens <= limit:
        return completion
    ids = completion.token_ids[:limit]
    logprobs = None if completion.logprobs is None else completion.logprobs[:limit]
    text = sampler.tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    return replace(completion, token_ids=ids, logprobs=logprobs, text=text, finish="length")


def report(request: LiveRequest, completions: tuple[Completion, ...]) -> None:
    """Tell a listener of the tokens, at once."""
    if request.listener is None:
        return
    for sample, completion in enumerate(completions):
        logprobs = completion.logprobs
        for t, token in enumerate(completion.token_ids.tolist()):
            request.listener.token(sample, token, None if logprobs is None else float(logprobs[t]), ())
        request.listener.ended(sample, stopped=completion.finish == "stop")
