"""KV cache in static buffers (fixed addresses), so that a captured decode step can be replayed on them.

The layout is that of `KVCache`. A decode step reads its indices from tensors: the step column, each row's first column, and the
rows of each prompt. Buffers grow by buckets; only then does `layout` change, and with it the key of captured steps.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from covey.kernels import TritonDecode, Window
from covey.rollout.kv_cache import STEP, KVCache, LayerShape, rounded
from covey.rollout.row_states import StatePlaces
from covey.rollout.softmax_attention import HIDDEN, KeyBias, RowMap, ScoreRule
from covey.rollout.static_buffers import StaticBuffers

Attention = Literal["torch", "triton"]
"""Kernels of a decode step around its matrix products: PyTorch's operations, or Triton's."""

SMALLEST = 8
"""Rows of the smallest bucket; a bucket that is cut short is a multiple of it."""
NEVER = 2**30
"""First column of a row that sees none of its own keys."""


def bucket(count: int) -> int:
    """`count` rounded up to 8, 12, 16, 24, 32, 48, ...: at most half more, and few sizes."""
    size = SMALLEST
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def bucket_below(count: int) -> int:
    """The largest bucket of at most `count`, else the smallest bucket."""
    size = SMALLEST
    while bucket(size + 1) <= count:
        size = bucket(size + 1)
    return size


def rows_for(rows: int, most: int) -> int:
    """Bucket for `rows` rows, at most `most`."""
    return min(bucket(rows), -(-most // SMALLEST) * SMALLEST)


def columns_for(columns: int) -> int:
    """`columns` rounded up to 64, 96, 128, 192, 256, ...: buckets of column blocks."""
    return bucket(-(-columns // STEP) * 4) * STEP // 4


class StaticKVCache(KVCache):
    """`KVCache` with tensors at fixed addresses: all rows of a bucket are computed, also unused ones."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        device: torch.device,
        dtype: torch.dtype,
        context: int,
        *,
        group_size: int,
        most_rows: int,
        longest: int,
        attention: Attention = "torch",
        buffers: StaticBuffers | None = None,
        states: StatePlaces | None = None,
    ) -> None:
        """For at most `most_rows` rows of at most `longest` decode steps; at most `group_size` rows share a prompt.

        `buffers` may be those of an earlier cache that is no longer used; by default they are new.
        """
        super().__init__(layers, device, dtype, context, states=states)
        self.buffers = buffers or StaticBuffers(device)
        self.group_size, self.most_rows, self.attention = group_size, most_rows, attention
        self.longest = longest
        self.most_columns = rounded(longest + max(longest // 8, 2 * STEP))
        self.now = self.buffers.full("now", (1,), torch.int64)  # the step column, read by kernels
        self.first = self._table("first", 0)  # [rows] int32, first column of each
        self.lengths = self._table("lengths", 0)  # [prompts] int32, keys of each
        self._new_owners(0, 0)

    @property
    def layout(self) -> Hashable:
        """Shapes of all buffers, and the windows that mask a key; a captured step is valid for one layout."""
        shapes = tuple(x.shape for x in (self.prefix_bias, self.suffix_bias, self.members, self.first, self.back))
        rows = 0 if self.states is None else self.states.capacity
        return shapes, rows, frozenset(window for window in self.windows if window.hides(self.reach))

    def _grown(self, name: Hashable, held: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
        return self.buffers.grown(name, held, shape, value)

    def _table(self, name: str, size: int, value: int = 0) -> Tensor:
        return self.buffers.full(name, (size,), torch.int32, value)

    def _new_owners(self, prompts: int, rows: int) -> None:
        """Tables that `set_row_owners` fills."""
        self.members = self.buffers.full("members", (prompts, self.group_size), torch.int64)
        self.counts, self.owned = self._table("counts", prompts), self._table("owned", rows)  # see `Spans`
        self.back = self.buffers.full("back", (rows,), torch.int64)  # see `RowMap`

    @property
    def num_computed(self) -> int:
        return rows_for(self.num_rows, self.most_rows)

    # -- prompts and rows come and go -------------------------------------------------------------------------------

    def add_prompts(self, lengths: Sequence[int]) -> range:
        slots = super().add_prompts(lengths)
        self.lengths[slots.start : slots.stop] = torch.tensor(lengths, dtype=torch.int32)
        self.reach = max(self.reach, min(max(lengths, default=0) + self.longest + 1, self.context))
        return slots

    def _fit_prefixes(self, old: int, prompts: int, columns: int) -> None:
        """Grow the prefixes where there is no room for these prompts."""
        room, held_columns = self.prefix_bias.shape
        if prompts <= room and columns <= held_columns:
            return
        if prompts > room:
            room = max(prompts, room * 5 // 4) if room else prompts
        super()._fit_prefixes(old, room, max(columns, held_columns))
        self.lengths = self._grown("lengths", self.lengths[:old], (room,))
        self._new_owners(room, len(self.first))

    def drop_prompts(self, slots: list[int]) -> None:
        self.prompt_lengths = [self.prompt_lengths[p] for p in slots]
        index, left = torch.tensor(slots, dtype=torch.int64, device=self.device), len(slots)
        for buffer in self.prefix:
            buffer[:, :left] = buffer[:, index]
        self.prefix_bias[:left], self.lengths[:left] = self.prefix_bias[index], self.lengths[index]
        self.prefix_bias[left:], self.lengths[left:] = HIDDEN, 0

    def _fit_rows(self, old: int) -> None:
        """Grow the suffixes where there is no room for the rows; those behind the first `old` see no key."""
        self.now.fill_(self.step_column)
        if self.num_computed > len(self.first):
            columns = max(self.suffix_bias.shape[1], min(columns_for(STEP), self.most_columns))
            self._fit_suffixes(old, self.num_computed, columns)
            self._new_owners(len(self.lengths), len(self.first))
        self.suffix_bias[old:] = HIDDEN
        self.first[old : self.num_rows], self.first[self.num_rows :] = self.step_column, NEVER

    def drop_rows(self, freed: list[int], moved: list[int], left: int) -> None:
        super().drop_rows(freed, moved, left)
        if freed:
            self.first[freed] = self.first[moved]
        self.first[left:] = NEVER

    def reserve(self, steps: int) -> None:
        """Allocate columns for this many more decode steps. Columns that no row reads any more are dropped first."""
        columns, first = self.suffix_bias.shape[1], min(self.starts, default=self.step_column)
        if self.step_column + steps <= columns:
            return
        used = self.step_column - first
        if used + max(steps, columns // 8) > columns < self.most_columns:
            columns = min(columns_for(max(used + steps, columns + 1)), self.most_columns)
        self._fit_suffixes(self.num_rows, len(self.first), columns, first)

    def _fit_suffixes(self, old: int, rows: int, columns: int, first: int = 0) -> None:
        super()._fit_suffixes(old, rows, columns, first)
        self.first = self._grown("first", self.first[:old], (rows,), NEVER)
        self.first[:old] -= first
        self.now.fill_(self.step_column)

    def set_starts(self, starts: list[int], step_column: int) -> None:
        super().set_starts(starts, step_column)
        self.first[: self.num_rows] = torch.tensor(starts, dtype=torch.int32)
        self.now.fill_(step_column)

    def resize(self, old: int, more: int = 0) -> None:
        first, columns = min(self.starts), self.suffix_bias.shape[1]
        used = self.step_column - first + more
        self._fit_suffixes(self.num_rows, len(self.first), columns if used <= columns else columns_for(used), first)

    def set_row_owners(self, owners: list[int]) -> None:
        self.owners = owners
        members: list[list[int]] = [[] for _ in range(len(self.lengths))]
        back = [0] * len(self.back)
        for row, owner in enumerate(owners):
            back[row] = owner * self.group_size + len(members[owner])
            members[owner].append(row)
        padded = [rows + [0] * (self.group_size - len(rows)) for rows in members]
        self.members.copy_(torch.tensor(padded, dtype=torch.int64))
        self.counts.copy_(torch.tensor([len(rows) for rows in members], dtype=torch.int32))
        self.back.copy_(torch.tensor(back, dtype=torch.int64))
        self.owned.zero_()[: len(owners)] = 1

    # -- one step: tensors only, so that it can be captured ----------------------------------------------------------

    def begin_step(self) -> None:
        """Make the step column visible to every row. No buffer grows in a step."""
        self.suffix_bias.index_fill_(1, self.now, 0.0)
        self.of_prompts, self.of_rows, self.in_window = {}, {}, {}

    def _in_window(self, window: Window, bias: KeyBias) -> KeyBias:
        """`KVCache._in_window` from tensors, for every row; arbitrary for unused ones."""
        owners = self.back // self.group_size
        return bias.in_window(window, owners, self.lengths[owners] + self.now - self.first, self.now)

    def end_step(self) -> None:
        """Increment the step column on the device; the host's copy follows in `advance`."""
        self.now.add_(1)

    def advance(self, steps: int) -> None:
        """Advance the host's step column by `steps` computed steps."""
        self.step_column += steps

    def attend_decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        if self.attention == "triton":
            return self.attend_in_kernels(layer, query, key, value, rule)
        return super().attend_decode(layer, query, key, value, rule)

    @property
    def row_map(self) -> RowMap:
        return RowMap(self.members, self.back[: self.num_computed], is_regular=False)

    def _append(self, columns: Tensor, x: Tensor) -> None:
        columns.index_copy_(2, self.now, x[:, :, None])

    def attend_in_kernels(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, rotation: Any = None
    ) -> Tensor:
        """`attend_decode` by Triton's kernels; with `rotation` (see `TritonDecode`) from queries and keys as projected."""
        rows = len(key)
        hides = self.window_of(layer) is not None  # else lengths and first columns say all
        bias = self.biases(layer, rows) if hides else None
        return TritonDecode.attend(
            query,
            key,
            value,
            suffix=self.suffix[layer],
            suffix_bias=None if bias is None else bias.suffix,
            prompts=self.prefix[layer],
            prompt_bias=None if bias is None else bias.prefix,
            members=self.members,
            counts=self.counts,
            lengths=self.lengths,
            owned=self.owned[:rows],
            first=self.first[:rows],
            step_column=self.now,
            scale=rule.scale,
            softcap=rule.softcap,
            sinks=rule.sinks,
            rotation=rotation,
        )
