"""Scheduler for a GPU: decode steps on static buffers, replayed as a CUDA graph; the host reads results every few steps, one look behind.

A step reads and writes tensors at fixed addresses, for the rows of a bucket. Finished rows stay in the batch without effect
until the host removes them. Completions do not depend on the bucket or on when the host looks.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.kernels import TritonDecode
from covey.rollout.answers import answer_rows
from covey.rollout.batches import DecodeBatch
from covey.rollout.kernel_choice import AttentionChoice, draws_in_kernels
from covey.rollout.requests import LIMIT, OUTPUT_ROW, POSITION, TOKEN, WRITTEN, GroupRequest, RunningGroup
from covey.rollout.sampling import Draw, draw
from covey.rollout.scheduler import Scheduler
from covey.rollout.static_buffers import StaticState
from covey.rollout.static_kv_cache import NEVER, Attention, StaticKVCache, rows_for
from covey.rollout.truncation import kernel_options
from covey.types import Group

WINDOW = 4
"""Decode steps between two checks of the host for finished rows."""
FEW = 32
"""Finished rows are removed when they are more than 1 of this many, ..."""
PATIENCE = 16
"""... and at the latest after this many checks."""
TABLES = (
    "rows", "tokens", "logprobs", "uniforms", "is_eos", "banned", "replies", "seen", "no_output", "live",
    "stopped", "is_reply", "experts",
)  # fmt: skip
"""Tensors of a scheduler that a decode step reads or writes."""


class GraphScheduler(Scheduler):
    """`Scheduler` whose decode steps run eagerly, or captured as CUDA graphs, on the buffers of `static`."""

    def __init__(
        self,
        *args: Any,
        static: StaticState,
        attention: Attention = "torch",
        choice: AttentionChoice = "auto",
        **options: Any,
    ) -> None:
        """Arguments of `Scheduler`, buffers and runner of the decode steps, the attention kernels, and which of them were requested."""
        self.attention: Attention = attention
        self.cache: StaticKVCache
        self.static = static
        super().__init__(*args, **options)
        self.draws = (
            attention == "triton" and self.replies is None and draws_in_kernels(self.forward, self.params, choice)
        )
        self.window = 1 if self.environment is not None or self.params.stop else WINDOW
        self.looks, self.steps = 0, 0
        self.due: list[
            tuple[GroupRequest, int]
        ] = []  # number of steps after which all rows of a running group have ended
        self.ended = LateCount()
        device, rows = self.forward.device, rows_for(self.max_rows, self.max_rows)
        self.no_output = torch.tensor(len(self.tokens), device=device)  # output row for the tokens of padding rows
        self.tokens, self.logprobs, self.uniforms = map(_with_one_more, (self.tokens, self.logprobs, self.uniforms))
        self.replies = None if self.replies is None else _with_one_more(self.replies, -1)
        self.experts = None if self.experts is None else torch.cat([self.experts, self.experts[:1]])
        self.rows = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self.seen = None if self.seen is None else self.seen.new_zeros(rows, self.seen.shape[1])
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)  # running and not finished
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)  # ended by itself
        self.is_reply = torch.zeros(rows, dtype=torch.bool, device=device)  # the last token comes from an environment
        self.weights = self.forward.capture_key()
        shapes = []
        for name in TABLES:
            table: Tensor | None = getattr(self, name)
            shapes.append(None if table is None else table.shape)
            if table is not None:
                setattr(self, name, static.buffers.copied(name, table))
        same = replace(self.params, seed=None, max_tokens=1)  # neither is frozen into a step
        self.fixed: Hashable = same, self.environment is not None, tuple(shapes)

    def change_weights(self, version: int) -> None:
        super().change_weights(version)
        self.weights = self.forward.capture_key()

    def _new_cache(self, longest: int) -> StaticKVCache:
        forward = self.forward
        return StaticKVCache(
            forward.layers,
            forward.device,
            forward.dtype,
            self.context,
            group_size=self.n,
            most_rows=self.max_rows,
            longest=longest + (PATIENCE + 1) * WINDOW,  # rows that have ended wait so long, and one look more
            attention=self.attention,
            buffers=self.static.buffers,
            states=forward.states,
        )

    def _place(self, request: GroupRequest, slot: int) -> None:
        rows = slice(self.num_rows, self.num_rows + self.n)
        super()._place(request, slot)
        self.live[rows], self.stopped[rows] = True, False
        self.due.append((request, self.steps + request.limit))
        self.ended.forget()

    def _finish(self, group: RunningGroup) -> Group:
        self.due = [(request, steps) for request, steps in self.due if request is not group.request]
        return super()._finish(group)

    # -- decode steps -----------------------------------------------------------------------------------------------

    def _step(self) -> list[Group]:
        """Decode `window` more tokens of every row. Returns the groups found finished."""
        cache = self.cache
        cache.reserve(self.window)
        rows = cache.num_computed
        for _ in range(self.window):
            self._one(rows)
        cache.advance(self.window)
        if self.window == 1:
            self._judge()
        self.steps += self.window
        ends = ~self.live[: self.num_rows]
        # the host waits for the steps before these, but for those in which it knows that a group ends
        is_due = self.window == 1 or any(self.steps >= steps for _, steps in self.due)
        num_ended = int(ends.sum()) if is_due else self.ended.next(ends.sum())
        self.looks += 1
        if not num_ended or (num_ended <= self.num_rows // FEW and self.looks < PATIENCE):
            return []
        self.looks = 0
        self.ended.forget()
        return self._retire(ends, self.stopped[: self.num_rows].clone())

    def _one(self, rows: int) -> None:
        """One decode step of the first `rows` rows.

        PyTorch's operations for top-p need values on the host, so with it only the forward pass is captured.
        """
        key, epoch = (rows, self.cache.layout, self.fixed), (self.weights, self.static.buffers.moves)
        if not self.draws and self.params.top_p < 1 and not self.params.is_greedy:
            self._write(self.static.steps.run(key, epoch, lambda: self._forward(rows)), rows)
        else:
            self.static.steps.run(key, epoch, lambda: self._write(self._forward(rows), rows))

    def _forward(self, rows: int) -> Tensor:
        """[rows, V] logits. Tensors only: no synchronization, so that it can be captured."""
        self.cache.begin_step()
        logits = self.forward.decode(self.rows[TOKEN, :rows], self.rows[POSITION, :rows], DecodeBatch(self.cache))
        if self.experts is not None and self.forward.routers is not None:
            row, live = self.rows[:, :rows], self.live[:rows]
            output_row = torch.where(live, row[OUTPUT_ROW], self.no_output)
            self.experts[output_row, row[WRITTEN] * live] = self.forward.routers.taken()
        self.cache.end_step()
        return logits

    def _write(self, logits: Tensor, rows: int) -> None:
        """Draw and store one token for each live row. Tensors only."""
        seen = None if self.seen is None else self.seen[:rows]
        if self.banned is not None:
            logits = logits.index_fill_(1, self.banned, -torch.inf)
        if self.draws:
            TritonDecode.draw_into(self._row_state(rows), logits, seen=seen, **kernel_options(self.params))
            return
        row, live = self.rows[:, :rows], self.live[:rows]
        written = row[WRITTEN] * live
        output_row = torch.where(live, row[OUTPUT_ROW], self.no_output)  # a Python 0 would be copied from the host
        uniforms = self.uniforms[output_row, written]
        drawn: Draw = draw(logits, uniforms, self.params, seen=seen, in_place=True)
        tokens, logprobs = drawn.tokens, drawn.logprobs
        if self.replies is not None:
            replies = self.replies[output_row, written]
            self.is_reply[:rows] = replies >= 0
            tokens, logprobs = torch.where(replies >= 0, replies, tokens), logprobs.masked_fill(replies >= 0, 0.0)
        self.tokens[output_row, written], self.logprobs[output_row, written] = tokens, logprobs
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        row[TOKEN] = tokens
        row[POSITION : WRITTEN + 1] += live
        self.stopped[:rows] |= self.is_eos[tokens] & live & ~self.is_reply[:rows]
        if self.window > 1:  # otherwise the host decides on stop strings and environments
            live &= ~(self.stopped[:rows] | (row[WRITTEN] >= row[LIMIT]))
            self.cache.first[:rows].masked_fill_(~live, NEVER)

    def _row_state(self, rows: int) -> dict[str, Any]:
        """Tables that the draw advances; see `RowState` in `triton_sampling.py`."""
        row = self.rows[:, :rows]
        return {
            "token": row[TOKEN],
            "position": row[POSITION],
            "written": row[WRITTEN],
            "limit": row[LIMIT],
            "output_row": row[OUTPUT_ROW],
            "live": self.live[:rows],
            "stopped": self.stopped[:rows],
            "first": self.cache.first[:rows],
            "is_eos": self.is_eos,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "uniforms": self.uniforms,
            "never": NEVER,
            "ends": self.window > 1,  # otherwise the host decides on stop strings
        }

    def _judge(self) -> None:
        """Checks of the last token on the host: stop strings and replies of an environment."""
        count = self.num_rows
        live, is_full = self.live[:count], self.rows[WRITTEN, :count] >= self.rows[LIMIT, :count]
        stops = self.stopped[:count] & live
        if self.params.stop:
            stops |= self.stop.completed(self.rows[TOKEN, :count], self._written) & live & ~self.is_reply[:count]
        if self.environment is not None:
            stops &= ~answer_rows(self, stops & ~is_full)
            is_full = self.rows[WRITTEN, :count] >= self.rows[LIMIT, :count]
        self.stopped[:count] = torch.where(live, stops, self.stopped[:count])
        live &= ~(stops | is_full)

    def _retire(self, ends: Tensor, stops: Tensor) -> list[Group]:
        finished = super()._retire(ends, stops)
        self.live[: self.num_rows], self.live[self.num_rows :] = True, False
        self.stopped.zero_()
        return finished


class LateCount:
    """A count on the device that the host reads one call later, when the device has long computed it."""

    def __init__(self) -> None:
        self.waiting: tuple[Tensor, Any] | None = None

    def forget(self) -> None:
        """Drop the count that waits: it is one of other rows."""
        self.waiting = None

    def next(self, count: Tensor) -> int:
        """Hand over `count`, a scalar; returns that of the call before, 0 for the first."""
        on_host = torch.empty((), dtype=count.dtype, pin_memory=count.is_cuda)
        on_host.copy_(count, non_blocking=True)
        event = None
        if count.is_cuda:
            event = torch.cuda.Event()
            event.record()
        before, self.waiting = self.waiting, (on_host, event)
        if before is None:
            return 0
        if before[1] is not None:
            before[1].synchronize()
        return int(before[0])


def _with_one_more(table: Tensor, value: int = 0) -> Tensor:
    """[output rows + 1, T], the last row filled with `value`."""
    return torch.nn.functional.pad(table, (0, 0, 0, 1), value=value)
