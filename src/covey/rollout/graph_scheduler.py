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
from covey.rollout.kernel_choice import AttentionChoice, draws_in_kernels
from covey.rollout.requests import LIMIT, OUTPUT_ROW, POSITION, TOKEN, WRITTEN, GroupRequest
from covey.rollout.scheduler import Scheduler
from covey.rollout.static_buffers import StaticState
from covey.rollout.static_kv_cache import NEVER, Attention, StaticKVCache
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
    "stopped", "experts",
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
        self.ended = LateCount()
        self.stopped = torch.zeros_like(self.live)  # ended by itself, and still in the batch
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
        super()._place(request, slot)
        self.open[slot].last_step = self.steps + request.limit
        self.ended.forget()

    # -- decode steps -----------------------------------------------------------------------------------------------

    def _step(self) -> list[Group]:
        """Decode `window` more tokens of every row. Returns the groups found finished."""
        cache = self.cache
        cache.reserve(self.window)
        rows = cache.num_computed
        for _ in range(self.window):
            self._one(rows)
        cache.advance(self.window)
        live, stopped = self.live[: self.num_rows], self.stopped[: self.num_rows]
        if self.window == 1:
            ends, stops = self._judge()
            live &= ~ends
            stopped |= stops
        self.steps += self.window
        # the host waits for the steps before these, but for those in which it knows that a group ends
        is_due = self.window == 1 or any(self.steps >= group.last_step for group in self.open.values())
        over = ~live
        num_ended = int(over.sum()) if is_due else self.ended.next(over.sum())
        self.looks += 1
        if not num_ended or (num_ended <= self.num_rows // FEW and self.looks < PATIENCE):
            return []
        self.looks = 0
        self.ended.forget()
        finished = self._retire(over, stopped)
        self.stopped.zero_()
        return finished

    def _one(self, rows: int) -> None:
        """One decode step of the first `rows` rows.

        PyTorch's operations for top-p need values on the host, so with it only the forward pass is captured.
        """
        key, epoch = (rows, self.cache.layout, self.fixed), (self.weights, self.static.buffers.moves)
        if not self.draws and self.params.top_p < 1 and not self.params.is_greedy:
            self._write(self.static.steps.run(key, epoch, lambda: self._forward(rows)))
        else:
            self.static.steps.run(key, epoch, lambda: self._write(self._forward(rows)))

    def _write(self, logits: Tensor) -> None:
        """The draw in Triton's kernels where they can; rows end here unless the host judges them."""
        rows = len(logits)
        if self.draws:
            seen = None if self.seen is None else self.seen[:rows]
            TritonDecode.draw_into(self._row_state(rows), logits, seen=seen, **kernel_options(self.params))
            return
        super()._write(logits)
        if self.window > 1:
            row, live = self.rows[:, :rows], self.live[:rows]
            self.stopped[:rows] |= self.is_eos[row[TOKEN]] & live
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
