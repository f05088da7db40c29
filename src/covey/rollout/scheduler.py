"""Continuous batching of groups: admitted while there is room, prompts prefilled once, rows decoded together, removed when finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.kernels import DecodeKernels
from covey.rollout.answers import answer_rows
from covey.rollout.batches import DecodeBatch, PrefillBatch
from covey.rollout.environments import Environment
from covey.rollout.forward import UNLIMITED, Forward, ModulesForward, plain_cache
from covey.rollout.kv_cache import KVCache, rounded
from covey.rollout.requests import (
    LIMIT,
    OUTPUT_ROW,
    POSITION,
    SLOT,
    TOKEN,
    WRITTEN,
    GroupRequest,
    RunningGroup,
    prefill_batches,
)
from covey.rollout.sampler import SamplingParams
from covey.rollout.sampling import Draw, draw, uniforms
from covey.rollout.stopping import StopStrings
from covey.rollout.thinking import ThinkingBudget
from covey.types import Group, Prompt, widest_float

PREFILL_TOKENS = 8192
"""Tokens of a prefill batch, padding included; bounds the memory of activations."""
CPU_PREFILL_TOKENS = 1024
"""Tokens of a prefill batch on a CPU, which is no faster with more."""

OUTPUT_ROWS_PER_ROW = 4
"""Rows of the output table per decoded row: finished completions wait there for the rest of their group."""


class Scheduler:
    """State of one call of `sample`: request queue, R running rows (the first R of every table), and KV cache."""

    def __init__(
        self,
        forward: Forward,
        requests: deque[GroupRequest],
        params: SamplingParams,
        *,
        tokenizer: Any,
        eos_ids: Sequence[int],
        max_rows: int,
        cache_bytes: int,
        context: int | None,
        version: int,
        environment: Environment | None,
        check_stop: Callable[[], None] = lambda: None,
        kernels: DecodeKernels | None = None,
        banned: Sequence[int] = (),
        expect_media: Callable[[Prompt], None] = lambda prompt: None,
    ) -> None:
        """`expect_media` raises for a prompt with media that the forward pass cannot compute."""
        self.check_stop, self.kernels, self.expect_media = check_stop, kernels, expect_media
        self.forward, self.requests, self.params, self.tokenizer = forward, requests, params, tokenizer
        self.unfinished = list(requests)
        self.version, self.environment, self.barred = version, environment, frozenset(banned)
        self.n = max((len(request.keys) for request in requests), default=1)
        self.context = context or UNLIMITED
        self.budget, self.held = cache_bytes, 0
        self.open: dict[int, RunningGroup] = {}  # by the slot of its prompt, which stays a while after it
        self.max_rows, output_rows = self._table_rows(max_rows)
        device, longest = forward.device, max((request.limit for request in requests), default=0)
        self.prefill_tokens = CPU_PREFILL_TOKENS if device.type == "cpu" else PREFILL_TOKENS
        forward.reserve(rounded(max((len(request.prompt.token_ids) for request in requests), default=0)) + longest)
        self.cache = self._new_cache(longest)
        self.free_output_rows = list(range(output_rows))[::-1]
        computed, outputs = rounded(self.max_rows), (output_rows + 1, longest)  # with rows that are padding
        self.rows = torch.zeros(6, computed, dtype=torch.int64, device=device)  # by TOKEN, ..., SLOT of `requests`
        self.live = torch.zeros(computed, dtype=torch.bool, device=device)  # [R], running, so that their tokens count
        self.no_output = torch.tensor(output_rows, device=device)  # the output row of all others
        self.num_rows = 0
        self.tokens = torch.zeros(outputs, dtype=torch.int64, device=device)  # [output rows, T], as the next three
        self.logprobs = torch.zeros(outputs, device=device)
        self.uniforms = torch.zeros(outputs, dtype=widest_float(device), device=device)
        self.experts = None if forward.routers is None else forward.routers.table(*outputs, device)
        self.is_eos = torch.zeros(self.forward.vocab_size, dtype=torch.bool, device=device)
        self.is_eos[list(eos_ids)] = True
        self.banned = torch.tensor(banned, dtype=torch.int64, device=device) if banned else None  # never drawn
        self.replies = torch.full_like(self.tokens, -1) if environment is not None else None  # an environment's reply
        self.stop = StopStrings.of(params.stop, tokenizer, self.forward.vocab_size, device)
        self.seen = self.is_eos.new_zeros(computed, forward.vocab_size) if params.repetition_penalty != 1.0 else None

    def _table_rows(self, max_rows: int) -> tuple[int, int]:
        """Number of rows decoded at once, and number of output rows."""
        rows = min(max(max_rows, self.n), len(self.requests) * self.n)
        return rows, min(len(self.requests), OUTPUT_ROWS_PER_ROW * rows // self.n) * self.n

    def _new_cache(self, longest: int) -> KVCache:
        """A KV cache for rows of at most `longest` tokens."""
        return plain_cache(self.forward, self.context, self.kernels)

    @property
    def is_busy(self) -> bool:
        return bool(self.requests or self.num_rows)

    def change_weights(self, version: int) -> None:
        """Continue running rows with the new weights of the forward pass; their KV cache stays."""
        self.version = version
        for slot, output_row, written in self.rows[[SLOT, OUTPUT_ROW, WRITTEN], : self.num_rows].T.tolist():
            self.open[slot].spans.setdefault(output_row, []).append((written, version))

    def run(self) -> list[Group]:
        """Decode until at least one group is finished."""
        finished: list[Group] = []
        while not finished and self.is_busy:
            self.check_stop()
            self._admit()
            finished = self._step()
        return finished

    # -- admission --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit groups from the queue while there is room, and prefill their prompts."""
        taken: list[GroupRequest] = []
        room = min(self.max_rows - self.num_rows, len(self.free_output_rows))
        while self.requests and room >= len(self.requests[0].keys):
            need = self.requests[0].cache_bytes(self.forward)
            if self.held + need > self.budget and (taken or self.num_rows):
                break
            self.held += need
            room -= len(self.requests[0].keys)
            taken.append(self.requests.popleft())
        if not taken:
            return
        if self.forward.states is not None:
            # prompts of one length are prefilled together
            taken.sort(key=lambda request: len(request.prompt.token_ids))
        self._drop_finished_prompts()
        slots = self.cache.add_prompts([len(request.prompt.token_ids) - 1 for request in taken])
        self.cache.add_rows(sum(len(request.keys) for request in taken))
        for request, slot in zip(taken, slots, strict=True):
            self._place(request, slot)
        self._prefill(taken, slots)
        self.cache.begin_rows([slot for request, slot in zip(taken, slots, strict=True) for _ in request.keys])
        self._set_row_owners()

    def _place(self, request: GroupRequest, slot: int) -> None:
        """Create rows for the completions of a group; their first input token is the prompt's last."""
        ids, n = request.prompt.token_ids, len(request.keys)
        output_rows = [self.free_output_rows.pop() for _ in range(n)]
        self.open[slot] = RunningGroup(request, output_rows, {}, self.version)
        rows = slice(self.num_rows, self.num_rows + n)
        column = torch.tensor([ids[-1], len(ids) - 1, 0, request.limit, 0, slot], dtype=torch.int64)
        self.rows[:, rows] = column[:, None].to(self.rows.device)
        self.rows[OUTPUT_ROW, rows] = torch.tensor(output_rows, device=self.rows.device)
        self.live[rows] = True
        drawn = uniforms(request.keys, request.limit)
        self.uniforms[torch.tensor(output_rows), : request.limit] = drawn.to(self.uniforms)
        if self.seen is not None:
            self.seen[rows] = False
            self.seen[rows, torch.tensor(sorted(set(ids)), device=self.seen.device)[:, None]] = True
        self.num_rows += n

    def _prefill(self, requests: list[GroupRequest], slots: range) -> None:
        """Prefill the prompts except their last tokens, in batches of bounded size."""
        for batch in prefill_batches(requests, self.prefill_tokens, is_padded=self.forward.states is None):
            place = slots[batch.start : batch.stop]
            prompts = [request.prompt for request in requests[batch.start : batch.stop]]
            if prompts[0].media is not None:
                self._prefill_media(prompts[0], place)
            else:
                self._prefill_batch([prompt.token_ids[:-1] for prompt in prompts], place)

    def _prefill_media(self, prompt: Prompt, slots: range) -> None:
        """Prefill a prompt with media through the model's own modules; its rows continue at the position after them."""
        assert isinstance(self.forward, ModulesForward)  # `DecoderForward` takes text only
        position = self.forward.prefill_media(prompt, PrefillBatch(self.cache, slots))
        self._keep_prompt_experts([len(prompt.token_ids) - 1], slots)
        rows = self.rows[:, : self.num_rows]
        rows[POSITION, rows[SLOT] == slots.start] = position

    def _prefill_batch(self, prompts: list[tuple[int, ...]], slots: range) -> None:
        longest = max(map(len, prompts))
        if not longest:
            return
        if self.forward.states is None:  # a state would remember padding
            longest = min(rounded(longest), self.context)  # whole blocks are faster, and shapes repeat
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])  # [A, L]
        positions = torch.arange(longest).expand(len(prompts), -1)
        self.forward.prefill(ids.to(self.rows.device), positions.to(self.rows.device), PrefillBatch(self.cache, slots))
        self._keep_prompt_experts([len(prompt) for prompt in prompts], slots)

    def _keep_prompt_experts(self, lengths: Sequence[int], slots: range) -> None:
        """Experts of the tokens of a prefill, which were padded to one length."""
        if self.forward.routers is None:
            return
        taken = self.forward.routers.taken().cpu()
        for length, slot, experts in zip(lengths, slots, taken.chunk(len(lengths)), strict=True):
            self.open[slot].prompt_experts = experts[:length].clone()

    # -- decode step ------------------------------------------------------------------------------------------------

    def _step(self) -> list[Group]:
        """Decode one more token of every row. Returns the groups that it finishes."""
        self._write(self._forward(self.cache.num_computed)[: self.num_rows])
        ends, stops = self._judge()
        return self._retire(ends, stops) if bool(ends.any()) else []

    def _forward(self, rows: int) -> Tensor:
        """[rows, V] logits of the first `rows` rows. On static buffers no value goes to the host or comes from it."""
        self.cache.begin_step()
        logits = self.forward.decode(self.rows[TOKEN, :rows], self.rows[POSITION, :rows], DecodeBatch(self.cache))
        if self.experts is not None and self.forward.routers is not None:
            self.experts[self._places(rows)] = self.forward.routers.taken()
        self.cache.end_step()
        return logits if self.banned is None else logits.index_fill_(1, self.banned, -torch.inf)

    def _places(self, rows: int) -> tuple[Tensor, Tensor]:
        """Output row and column [rows] of each row's next token."""
        row, live = self.rows[:, :rows], self.live[:rows]
        return torch.where(live, row[OUTPUT_ROW], self.no_output), row[WRITTEN] * live

    def _write(self, logits: Tensor) -> None:
        """Draw and store one token for each row of `logits` [R, V]. No value goes to the host or comes from it."""
        rows = len(logits)
        row, seen, places = self.rows[:, :rows], None if self.seen is None else self.seen[:rows], self._places(rows)
        drawn = self._draw(logits, self.uniforms[places], seen)
        tokens, logprobs = drawn.tokens, drawn.logprobs
        if self.replies is not None:
            replies = self.replies[places]
            tokens, logprobs = torch.where(replies >= 0, replies, tokens), logprobs.masked_fill(replies >= 0, 0.0)
        self.tokens[places], self.logprobs[places] = tokens, logprobs
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        row[TOKEN] = tokens
        row[POSITION : WRITTEN + 1] += self.live[:rows]

    def _judge(self) -> tuple[Tensor, Tensor]:
        """[R] bool each: rows that are over after this step, and those that ended by themselves, without an answer."""
        rows = self.rows[:, : self.num_rows]
        stops = self._stops(rows[TOKEN]) & self.live[: self.num_rows]
        if self.replies is not None:
            stops &= self.replies[rows[OUTPUT_ROW], rows[WRITTEN] - 1] < 0  # not by a token of an answer
            stops &= ~answer_rows(self, stops & (rows[WRITTEN] < rows[LIMIT]))
        return stops | (rows[WRITTEN] >= rows[LIMIT]), stops

    def _draw(self, logits: Tensor, uniforms: Tensor, seen: Tensor | None) -> Draw:
        """One token for each row, from `logits` [R, V], which may be overwritten."""
        return draw(logits, uniforms, self.params, seen=seen, in_place=True)

    def _stops(self, tokens: Tensor) -> Tensor:
        """[R] bool, rows that end by EOS or a stop string with these tokens."""
        stops = self.is_eos[tokens]
        return stops | self.stop.completed(tokens, self._written) if self.params.stop else stops

    def _written(self, row: int) -> Tensor:
        """[T] tokens that the model has written in the row since the last reply, or since its begin."""
        count, _, output_row = self.rows[WRITTEN : OUTPUT_ROW + 1, row].tolist()
        read = [] if self.replies is None else (self.replies[output_row, :count] >= 0).nonzero().flatten().tolist()
        return self.tokens[output_row, read[-1] + 1 if read else 0 : count]

    # -- completion -------------------------------------------------------------------------------------------------

    def _retire(self, ends: Tensor, stops: Tensor) -> list[Group]:
        """Remove finished rows from the batch; the last rows move into their places."""
        ended = ends.nonzero().squeeze(-1)
        columns = self.rows[:, ended].T.tolist()
        finished = []
        for column, stopped in zip(columns, stops[ended].tolist(), strict=True):
            group = self.open[column[SLOT]]
            group.written[column[OUTPUT_ROW]] = (column[WRITTEN], stopped)
            if len(group.written) == len(group.request.keys):
                finished.append(self._finish(self.open.pop(column[SLOT])))
        left = self.num_rows - len(columns)
        gone = set(ended.tolist())
        freed = [row for row in sorted(gone) if row < left]
        moved = [row for row in range(left, self.num_rows) if row not in gone]
        if freed:
            self.rows[:, freed] = self.rows[:, moved]
            if self.seen is not None:
                self.seen[freed] = self.seen[moved]
        self.rows[:, left : self.num_rows] = 0  # padding rows are computed, so they must be valid
        self.live[:left], self.live[left : self.num_rows] = True, False
        self.cache.drop_rows(freed, moved, left)
        self.num_rows = left
        self._set_row_owners()
        return finished

    def _finish(self, group: RunningGroup) -> Group:
        completions = group.completions(self.tokens, self.logprobs, self.experts, self.replies, self.tokenizer)
        if isinstance(self.environment, ThinkingBudget):
            completions = tuple(map(self.environment.marked, completions))
        self.unfinished = [request for request in self.unfinished if request is not group.request]
        self.held -= group.request.cache_bytes(self.forward)
        self.free_output_rows += group.output_rows[::-1]
        if self.replies is not None:
            self.replies[group.output_rows] = -1
        return Group(prompt=group.request.prompt, completions=completions)

    def _drop_finished_prompts(self) -> None:
        """Free the prefixes of finished groups."""
        slots, prompts = list(self.open), len(self.cache.prompt_lengths)
        if len(slots) == prompts:
            return
        self.cache.drop_prompts(slots)
        new_slot = torch.zeros(prompts, dtype=torch.int64, device=self.rows.device)
        new_slot[slots] = torch.arange(len(slots), device=self.rows.device)
        self.rows[SLOT, : self.num_rows] = new_slot[self.rows[SLOT, : self.num_rows]]
        self.open = dict(enumerate(self.open.values()))

    def _set_row_owners(self) -> None:
        """Pass the prompt slot of each row to the cache; prompts without rows are dropped when they are many."""
        prompts = len(self.cache.prompt_lengths)
        if prompts - len(self.open) > prompts // (4 if self.kernels is None else 2):  # the kernels skip them
            self._drop_finished_prompts()
        if self.num_rows:
            self.cache.set_row_owners(self.rows[SLOT, : self.num_rows].tolist())
