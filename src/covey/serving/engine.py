"""The engine of an endpoint: one thread that decodes the requests of all its models, each model's in one running batch."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from covey.errors import MemoryLimitError
from covey.process.memory import is_out_of_memory, release
from covey.rewards.calling.deadline import settle
from covey.rollout import NativeSampler, SamplingParams
from covey.rollout.calls import CallScheduler, decoding, scheduler_of
from covey.rollout.live import LiveRequest, LogprobsMode, Top
from covey.rollout.sampling import sequence_key
from covey.serving.counters import Counters
from covey.serving.errors import APIError
from covey.serving.scoring import Scored, score_prompt
from covey.types import Group, Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Token(NamedTuple):
    """One more token of completion number `sample`."""

    sample: int
    token: int
    logprob: float | None
    top: Top


class Ended(NamedTuple):
    """Completion number `sample` is over."""

    sample: int
    stopped: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptRequest:
    """A prompt and how its completions are to be drawn."""

    prompt: Prompt
    n: int
    limit: int
    """Tokens of a completion at most. 0: none is written."""
    params: SamplingParams
    seed: int
    num_top: int | None = None
    """Likeliest tokens to report; None: no log-probabilities are asked for."""
    is_heard: bool = False
    """True if tokens are wanted as they come."""
    scores_prompt: bool = False
    ignores_eos: bool = False


class Ticket:
    """A prompt in the engine: `events` as they come, then `group`, or `error`. `wake` is called, from the engine, after each."""

    def __init__(
        self,
        model: str,
        prompt_request: PromptRequest,
        wake: Callable[[], None],
        call_id: str,
        session: str | None,
        user: str | None = None,
    ) -> None:
        self.model, self.prompt_request, self.wake = model, prompt_request, wake
        self.call_id, self.session, self.user = call_id, session, user
        self.events: deque[Token | Ended] = deque()
        self.group: Group | None = None
        self.scored: list[Scored] = []
        self.error: Exception | None = None
        self.submitted, self.created = time.monotonic(), time.time()
        self.is_touched = False

    @property
    def is_over(self) -> bool:
        return self.group is not None or self.error is not None

    def token(self, sample: int, token: int, logprob: float | None, top: Top) -> None:
        self.events.append(Token(sample, token, logprob, top))
        self.is_touched = True

    def ended(self, sample: int, *, stopped: bool) -> None:
        self.events.append(Ended(sample, stopped))
        self.is_touched = True

    def request(self, mode: LogprobsMode) -> LiveRequest:
        """Request with the random keys that `NativeSampler.sample` uses for the same prompt, number of completions and seed."""
        prompt_request = self.prompt_request
        return LiveRequest(
            prompt_request.prompt,
            tuple(
                sequence_key(prompt_request.seed, prompt_request.prompt.uid, 0, sample)
                for sample in range(prompt_request.n)
            ),
            prompt_request.limit,
            params=prompt_request.params,
            listener=self if prompt_request.is_heard or prompt_request.num_top is not None else None,
            num_top=prompt_request.num_top,
            logprobs=mode,
            ignores_eos=prompt_request.ignores_eos,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """An answered prompt, exact to the token, for a recorder that makes training data of it.

    Each completion of `group` has its `token_ids`, `logprobs` as drawn, `finish` and the `version` of the weights.
    """

    id: str
    """Id of the HTTP response: `chatcmpl-...`."""
    model: str
    group: Group
    params: SamplingParams
    seed: int
    session: str | None
    """The header `X-Session-Id` of the request."""
    user: str | None
    """The request's `user`."""
    created: float
    """Seconds since 1970 when the request came."""
    seconds: float
    """Time that it took, waiting included."""


@dataclass(eq=False)
class _Lane:
    """One model: its sampler, and its running batch while there is one."""

    sampler: NativeSampler
    scheduler: CallScheduler | None = None
    tickets: dict[int, Ticket] = field(default_factory=dict)
    requests: dict[int, LiveRequest] = field(default_factory=dict)

    def begin(self, ticket: Ticket, mode: LogprobsMode) -> None:
        if self.scheduler is None:
            self.scheduler = scheduler_of(self.sampler)
        request = ticket.request(mode)
        self.tickets[id(request)], self.requests[id(ticket)] = ticket, request
        self.scheduler.add(request)

    def forget(self, ticket: Ticket) -> LiveRequest | None:
        request = self.requests.pop(id(ticket), None)
        if request is not None:
            self.tickets.pop(id(request), None)
        return request


class Engine:
    """Runs `samplers`, by model name, on a thread of its own. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        samplers: Mapping[str, NativeSampler],
        *,
        max_waiting: int,
        mode: LogprobsMode = "raw_logprobs",
        on_call: Callable[[Call], None] | None = None,
    ) -> None:
        self.mode, self.max_waiting, self.on_call = mode, max_waiting, on_call
        self.counters = Counters()
        self._lanes = {name: _Lane(sampler) for name, sampler in samplers.items()}
        self._changed = threading.Condition()
        self._inbox: deque[Ticket] = deque()
        self._gone: deque[Ticket] = deque()
        self._idle_jobs: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # -- from any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="covey-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Running requests are answered with an error."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def num_waiting(self) -> int:
        """Prompts that are not being decoded yet."""
        return len(self._inbox) + sum(len(x.requests) for lane in self._lanes.values() if (x := lane.scheduler))

    @property
    def num_running(self) -> int:
        """Completions that are being decoded."""
        return sum(x.num_rows for lane in self._lanes.values() if (x := lane.scheduler))

    @property
    def retry_after(self) -> int:
        """Seconds until a full queue has probably moved on."""
        return min(60, max(1, round(self.counters.mean_seconds)))

    def submit(self, tickets: list[Ticket]) -> None:
        """Queue the prompts of a request. Raises APIError 429 for more than may wait, 503 when the engine is closing."""
        with self._changed:
            if self._is_closing:
                raise APIError(503, "The server is stopping.", retry_after=self.retry_after)
            if self.num_waiting and self.num_waiting + len(tickets) > self.max_waiting:
                raise APIError(
                    429,
                    f"{self.num_waiting} prompts are waiting and at most {self.max_waiting} may; try again later.",
                    code="queue_full",
                    retry_after=self.retry_after,
                )
            self._inbox.extend(tickets)
            self._changed.notify()

    def add(self, name: str, sampler: NativeSampler) -> None:
        """Run one more model from now on."""
        self._lanes = {**self._lanes, name: _Lane(sampler)}

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request that no client waits for; nothing happens if it is over."""
        with self._changed:
            self._gone.append(ticket)
            self._changed.notify()

    def when_idle(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on the engine's thread once what runs is finished; later requests wait until it has returned.

        An engine that closes first gives APIError 503.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._is_closing:
                raise APIError(503, "The server is stopping.")
            self._idle_jobs.append((partial(settle, future, function), future))
            self._changed.notify()
        return future

    # -- on the engine's thread -------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return any(lane.scheduler is not None for lane in self._lanes.values())

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._inbox or self._gone or self._idle_jobs or self._is_closing or self._is_busy
                )
                if self._is_closing:
                    break
                gone = set(map(id, self._gone))
                arrived = [] if self._idle_jobs else [ticket for ticket in self._inbox if id(ticket) not in gone]
                self._inbox = (
                    deque(ticket for ticket in self._inbox if id(ticket) not in gone) if not arrived else deque()
                )
                cancelled = list(self._gone)
                self._gone.clear()
            self._turn(arrived, cancelled)
        for lane in self._lanes.values():
            self._fail(lane, APIError(503, "The server is stopping."))
        for ticket in self._inbox:
            self._answer(ticket, error=APIError(503, "The server is stopping."))
        for _, future in self._idle_jobs:
            future.set_exception(APIError(503, "The server is stopping."))

    def _turn(self, arrived: list[Ticket], cancelled: list[Ticket]) -> None:
        for ticket in cancelled:
            self._cancel(ticket)
        for ticket in arrived:
            self._begin(ticket)
        if not self._is_busy:
            while self._idle_jobs:
                self._idle_jobs.popleft()[0]()
        for lane in self._lanes.values():
            if lane.scheduler is not None:
                self._step(lane, lane.scheduler)

    def _begin(self, ticket: Ticket) -> None:
        lane, prompt_request = self._lanes[ticket.model], ticket.prompt_request
        try:
            if prompt_request.scores_prompt and not isinstance(lane.sampler, NativeSampler):
                raise APIError(400, "The sampler of this run scores no prompts; leave echo with logprobs out.")
            if prompt_request.scores_prompt:
                prompt_ids, num_top = prompt_request.prompt.token_ids, prompt_request.num_top or 0
                ticket.scored = score_prompt(lane.sampler, prompt_ids, num_top)
            if prompt_request.limit:
                lane.begin(ticket, self.mode)
            else:
                self._answer(ticket, group=Group(prompt=prompt_request.prompt, completions=()))
        except Exception as error:  # noqa: BLE001 - returned to the request
            lane.forget(ticket)
            self._answer(ticket, error=error)

    def _cancel(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.model]
        request = lane.forget(ticket)
        if request is not None and lane.scheduler is not None:
            lane.scheduler.cancel(request)
            self.counters.add("covey_cancelled_total")
            self._rest(lane)

    def _step(self, lane: _Lane, scheduler: CallScheduler) -> None:
        try:
            with decoding(lane.sampler):
                finished = scheduler.step()
        except Exception as error:  # noqa: BLE001 - returned to every request that lost its rows
            self._broke(lane, scheduler, error)
            return
        for request, group in finished:
            ticket = lane.tickets[id(request)]
            lane.forget(ticket)
            self._answer(ticket, group=group)
        for ticket in list(lane.tickets.values()):
            if ticket.is_touched:
                ticket.is_touched = False
                ticket.wake()
        self._rest(lane)

    def _rest(self, lane: _Lane) -> None:
        """Free the KV cache of an idle model; the next batch starts with its weights at that time."""
        if lane.scheduler is not None and not lane.scheduler.is_busy:
            lane.scheduler = None

    def _broke(self, lane: _Lane, scheduler: CallScheduler, error: Exception) -> None:
        logger.error("Decoding failed (%s: %s); its requests are answered with an error.", type(error).__name__, error)
        if is_out_of_memory(error):
            lane.sampler.max_rows, lane.sampler.cache_bytes = max(1, scheduler.max_rows // 2), scheduler.held // 2
            logger.warning("Memory ran out; from now on at most %d completions at once.", lane.sampler.max_rows)
            error = MemoryLimitError("Memory ran out while decoding; the server goes on with fewer requests at once.")
        self._fail(lane, error)
        release()

    def _fail(self, lane: _Lane, error: Exception) -> None:
        tickets = list(lane.tickets.values())
        lane.tickets, lane.requests, lane.scheduler = {}, {}, None
        for ticket in tickets:
            self._answer(ticket, error=error)

    def _answer(self, ticket: Ticket, *, group: Group | None = None, error: Exception | None = None) -> None:
        seconds = time.monotonic() - ticket.submitted
        if group is not None:
            self.counters.took(seconds)
            self.counters.add("covey_prompt_tokens_total", len(group.prompt.token_ids))
            self.counters.add(
                "covey_completion_tokens_total", sum(completion.num_tokens for completion in group.completions)
            )
            error = self._record(ticket, group, seconds)
        ticket.group, ticket.error = (group, None) if error is None else (None, error)
        ticket.wake()

    def _record(self, ticket: Ticket, group: Group, seconds: float) -> Exception | None:
        """Error of the recorder, returned to the client: a call that is not recorded must not look like one that is."""
        if self.on_call is None or not group.completions:
            return None
        call = Call(
            id=ticket.call_id,
            model=ticket.model,
            group=group,
            params=ticket.prompt_request.params,
            seed=ticket.prompt_request.seed,
            session=ticket.session,
            user=ticket.user,
            created=ticket.created,
            seconds=seconds,
        )
        try:
            self.on_call(call)
        except Exception as error:
            logger.exception("The recorder of calls failed.")
            return error
        return None

    def info(self) -> dict[str, Any]:
        """Present values for the metrics page."""
        return {
            "covey_requests_waiting": ("Prompts that wait for room in the batch.", self.num_waiting),
            "covey_rows_running": ("Completions that are being decoded.", self.num_running),
        }
