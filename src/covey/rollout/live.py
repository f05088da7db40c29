"""Continuous batching of requests that come and go: each with its own sampling parameters, stop strings, seed and length."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from covey.models import context_limit, unwrapped
from covey.rollout.kv_cache import rounded
from covey.rollout.requests import OUTPUT_ROW, SLOT, WRITTEN, GroupRequest, RunningGroup
from covey.rollout.sampler import DEFAULT_ROWS, SamplingParams
from covey.rollout.sampling import Draw, draw, processed
from covey.rollout.scheduler import Scheduler
from covey.rollout.stopping import StopStrings
from covey.types import Group

if TYPE_CHECKING:
    from covey.rollout.engine import NativeSampler

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Log-probabilities of the model's own logits, or of the distribution after temperature and truncation; vLLM's names."""
Top = tuple[tuple[int, float], ...]
"""Likeliest tokens and their log-probabilities, the likeliest first."""


class Listener(Protocol):
    """Callbacks for a request's tokens, called on the decoding thread."""

    def token(self, sample: int, token: int, logprob: float | None, top: Top) -> None:
        """Completion number `sample` has one more token; `logprob` None: its sampler reports none."""

    def ended(self, sample: int, *, stopped: bool) -> None:
        """Completion number `sample` has ended, by itself (`stopped`) or at its token limit."""


@dataclass(frozen=True, eq=False)
class LiveRequest(GroupRequest):
    """A group to generate, with its own sampling parameters; `limit` and `keys` replace `params.max_tokens` and `params.seed`."""

    params: SamplingParams = field(default_factory=SamplingParams)
    listener: Listener | None = None
    num_top: int | None = None
    """Number of likeliest tokens reported to the listener. 0: the drawn token's log-probability only. None: the one already computed
    for the draw, at no cost."""
    logprobs: LogprobsMode = "raw_logprobs"
    ignores_eos: bool = False

    @cached_property
    def drawn_with(self) -> SamplingParams:
        """The parameters that shape the distribution; rows that share them are drawn together."""
        return replace(self.params, max_tokens=1, stop=(), seed=None)


@dataclass(frozen=True)
class _Row:
    """Owner of a running row."""

    request: LiveRequest
    output_row: int
    sample: int


class LiveScheduler(Scheduler):
    """`Scheduler` whose requests join and leave while it runs. `add`, then `step` until `is_busy` is False; `cancel` at any time.

    A completion equals that of `NativeSampler.sample` with the same key and parameters, in any batch. CUDA
    graphs are not used: a captured step has one set of sampling parameters.
    """

    @staticmethod
    def of(sampler: NativeSampler) -> LiveScheduler:
        """A scheduler over the current weights of `sampler`; valid until its next `load`, and changed by its `change_weights`."""
        made = LiveScheduler(
            sampler.forward,
            deque(),
            SamplingParams(),
            tokenizer=sampler.tokenizer,
            eos_ids=sampler.eos_ids,
            max_rows=sampler.max_rows or DEFAULT_ROWS,
            cache_bytes=sampler.budget(),
            context=context_limit(unwrapped(sampler.model)),
            version=sampler.version,
            environment=None,
            kernels=sampler.kernels,
            banned=sampler.banned,
        )
        sampler.runs(made)
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.experts = None  # served answers are not learnt from
        self.running: list[_Row] = []
        self.batches: list[tuple[SamplingParams, Tensor]] = []
        self.finished: list[tuple[LiveRequest, Group]] = []
        self.stop_strings: dict[GroupRequest, StopStrings] = {}

    def _table_rows(self, max_rows: int) -> tuple[int, int]:
        return max_rows, 2 * max_rows

    def add(self, request: LiveRequest) -> None:
        """Queue a request. Raises ValueError for more completions than can be decoded at once."""
        if len(request.keys) > self.max_rows:
            raise ValueError(f"a group of {len(request.keys)} does not fit into {self.max_rows} rows")
        missing = request.limit - self.tokens.shape[1]
        if missing > 0:
            widened = lambda table: torch.nn.functional.pad(table, (0, rounded(missing)))
            self.tokens, self.logprobs, self.uniforms = map(widened, (self.tokens, self.logprobs, self.uniforms))
        if request.params.repetition_penalty != 1.0 and self.seen is None:
            self.seen = self.is_eos.new_zeros(self.max_rows, self.forward.vocab_size)
        if request.params.stop:
            self.stop_strings[request] = StopStrings.of(request.params.stop, self.tokenizer, self.forward.vocab_size)
        self.forward.reserve(rounded(len(request.prompt.token_ids)) + request.limit)
        self.requests.append(request)
        self.unfinished.append(request)

    def step(self) -> list[tuple[LiveRequest, Group]]:
        """Admit requests that fit, and decode one more token of every running row. Returns the finished requests."""
        self._admit()
        if self.num_rows:
            self._step()
        finished, self.finished = self.finished, []
        return finished

    def cancel(self, request: LiveRequest) -> None:
        """Remove a request from the queue, or its rows from the batch; its listener gets no further calls."""
        if request in self.requests:
            self.requests.remove(request)
            self.unfinished = [other for other in self.unfinished if other is not request]
            self.stop_strings.pop(request, None)
            return
        mine = torch.tensor([row.request is request for row in self.running], dtype=torch.bool)
        if bool(mine.any()):
            super()._retire(mine.to(self.rows.device), torch.zeros_like(mine))
            self.finished = [entry for entry in self.finished if entry[0] is not request]

    # -- one token --------------------------------------------------------------------------------------------------

    def _set_row_owners(self) -> None:
        super()._set_row_owners()
        slots, output_rows = self.rows[SLOT, : self.num_rows].tolist(), self.rows[OUTPUT_ROW, : self.num_rows].tolist()
        self.running = []
        for slot, output_row in zip(slots, output_rows, strict=True):
            group = self.open[slot]
            request = cast("LiveRequest", group.request)
            self.running.append(_Row(request, output_row, group.output_rows.index(output_row)))
        batches: dict[SamplingParams, list[int]] = {}
        for i, row in enumerate(self.running):
            batches.setdefault(row.request.drawn_with, []).append(i)
        device = self.rows.device
        self.batches = [(params, torch.tensor(rows, device=device)) for params, rows in batches.items()]

    def _draw(self, logits: Tensor, uniforms: Tensor, seen: Tensor | None) -> Draw:
        reports = self._reports(logits, seen)
        if len(self.batches) == 1:
            drawn = draw(logits, uniforms, self.batches[0][0], seen=seen, in_place=True)
        else:
            tokens, logprobs = torch.zeros_like(self.rows[0, : self.num_rows]), torch.zeros_like(uniforms).float()
            for params, rows in self.batches:
                part = draw(logits[rows], uniforms[rows], params, seen=None if seen is None else seen[rows])
                tokens[rows], logprobs[rows] = part.tokens, part.logprobs
            drawn = Draw(tokens, logprobs)
        self._tell(drawn, reports)
        return drawn

    def _reports(self, logits: Tensor, seen: Tensor | None) -> dict[int, Tensor]:
        """Log-probabilities [V] by row, for rows whose request asks for them."""
        by_row = {}
        for i, row in enumerate(self.running):
            request = row.request
            if request.num_top is None or request.listener is None:
                continue
            scores = logits[i : i + 1].float()
            if request.logprobs == "processed_logprobs":
                scores = processed(scores, request.drawn_with, None if seen is None else seen[i : i + 1])
            by_row[i] = scores.log_softmax(-1)[0]
        return by_row

    def _tell(self, drawn: Draw, reports: dict[int, Tensor]) -> None:
        if all(row.request.listener is None for row in self.running):
            return
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        for i, row in enumerate(self.running):
            if row.request.listener is None:
                continue
            top: Top = ()
            logprob = logprobs[i]
            if i in reports:
                logprob = float(reports[i][tokens[i]])
                top = top_of(reports[i], row.request.num_top or 0)
            row.request.listener.token(row.sample, tokens[i], logprob, top)

    def _stops(self, tokens: Tensor) -> Tensor:
        stops = self.is_eos[tokens]
        for i, row in enumerate(self.running):
            if row.request.ignores_eos:
                stops[i] = False
            stop = self.stop_strings.get(row.request)
            if stop is not None and bool(stop.enders[tokens[i]]):
                written = int(self.rows[WRITTEN, i])
                stops[i] |= stop.is_reached(self.tokens[row.output_row, :written].tolist())
        return stops

    # -- out --------------------------------------------------------------------------------------------------------

    def _retire(self, ends: Tensor, stops: Tensor) -> list[Group]:
        stopped = stops.tolist()
        for i in ends.nonzero().squeeze(-1).tolist():
            row = self.running[i]
            if row.request.listener is not None:
                row.request.listener.ended(row.sample, stopped=stopped[i])
        return super()._retire(ends, stops)

    def _finish(self, group: RunningGroup) -> Group:
        made = super()._finish(group)
        self.stop_strings.pop(group.request, None)
        self.finished.append((cast("LiveRequest", group.request), made))
        return made


def top_of(logprobs: Tensor, count: int) -> Top:
    """The `count` likeliest tokens of `logprobs` [V]."""
    if not count:
        return ()
    best = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
