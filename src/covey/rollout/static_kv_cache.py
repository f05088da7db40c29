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
from covey.rollout.row_states import RowStates, StatePlaces
from covey.rollout.softmax_attention import HIDDEN, KeyBias, RowMap, ScoreRule, by_one_softmax
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
        super().__init__(layers, device, dtype, context)
        self.buffers = buffers or StaticBuffers(device)
        if states is not None:
            self.states = RowStates(states, device, lambda i, x, shape: self.buffers.grown(("state", i), x, shape))
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
        old = len(self.prompt_lengths)
        self.prompt_lengths += lengths
        columns, prompts = rounded(max(self.prompt_lengths)), len(self.prompt_lengths)
        room, held_columns = self.prefix_bias.shape
        if prompts > room or columns > held_columns:
            more = prompts if not room else max(prompts, room * 5 // 4)
            self._grow_prefix(old, room if prompts <= room else more, max(columns, held_columns))
        column = torch.arange(self.prefix_bias.shape[1], device=self.device)
        ends = torch.tensor(lengths, device=self.device)
        self.prefix_bias[old:prompts] = torch.where(column < ends[:, None], 0.0, HIDDEN).to(self.dtype)
        self.lengths[old:prompts] = ends.to(torch.int32)
        self.reach = max(self.reach, min(max(lengths, default=0) + self.longest + 1, self.context))
        return range(old, prompts)

    def _grow_prefix(self, old: int, prompts: int, columns: int) -> None:
        grown = self.buffers.grown
        for i, layer in enumerate(self.layers):
            shape = (2, prompts, layer.heads, columns, layer.width)
            self.prefix[i] = grown(("prefix", i), self.prefix[i][:, :old], shape)
        self.prefix_bias = grown("prefix_bias", self.prefix_bias[:old], (prompts, columns), HIDDEN)
        self.lengths = grown("lengths", self.lengths[:old], (prompts,))
        self._new_owners(prompts, len(self.first))

    def drop_prompts(self, slots: list[int]) -> None:
        self.prompt_lengths = [self.prompt_lengths[p] for p in slots]
        index, left = torch.tensor(slots, dtype=torch.int64, device=self.device), len(slots)
        for buffer in self.prefix:
            buffer[:, :left] = buffer[:, index]
        self.prefix_bias[:left], self.lengths[:left] = self.prefix_bias[index], self.lengths[index]
        self.prefix_bias[left:], self.lengths[left:] = HIDDEN, 0

    def add_rows(self, count: int) -> None:
        old = self.num_rows
        if not old:
            self._set_step_column(0)
        self.starts += [self.step_column] * count
        if self.num_computed > len(self.first):
            columns = max(self.suffix_bias.shape[1], min(columns_for(STEP), self.most_columns))
            self._grow_suffix(old, self.num_computed, columns)
            self._new_owners(len(self.lengths), len(self.first))
        if self.states is not None:
            self.states.reserve(old, len(self.first))
        self.suffix_bias[old:] = HIDDEN
        self.first[old : self.num_rows], self.first[self.num_rows :] = self.step_column, NEVER

    def drop_rows(self, freed: list[int], moved: list[int], left: int) -> None:
        super().drop_rows(freed, moved, left)
        if freed:
            self.first[freed] = self.first[moved]
        self.first[left:] = NEVER

    def reserve(self, steps: int) -> None:
        """Allocate columns for this many more decode steps. Columns that no row reads any more are dropped first."""
        columns = self.suffix_bias.shape[1]
        if self.step_column + steps <= columns:
            return
        self._forget(min(self.starts, default=self.step_column))
        if self.step_column + max(steps, columns // 8) > columns < self.most_columns:
            target = columns_for(max(self.step_column + steps, columns + 1))
            self._grow_suffix(self.num_rows, len(self.first), min(target, self.most_columns))

    def _forget(self, first: int) -> None:
        """Move all columns from `first` on to the front."""
        if not first:
            return
        used = self.step_column - first
        for buffer in self.suffix:
            buffer[:, :, :, :used] = buffer[:, :, :, first : self.step_column].clone()
        self.suffix_bias[:, :used] = self.suffix_bias[:, first : self.step_column].clone()
        self.suffix_bias[:, used:] = HIDDEN
        self.starts = [start - first for start in self.starts]
        self.first[: self.num_rows] -= first
        self._set_step_column(used)

    def _grow_suffix(self, old: int, rows: int, columns: int) -> None:
        used, grown = slice(self.step_column), self.buffers.grown
        for i, layer in enumerate(self.layers):
            shape = (2, rows, layer.heads, columns, layer.width)
            self.suffix[i] = grown(("suffix", i), self.suffix[i][:, :old, :, used], shape)
        self.suffix_bias = grown("suffix_bias", self.suffix_bias[:old, used], (rows, columns), HIDDEN)
        self.first = grown("first", self.first[:old], (rows,), NEVER)

    def _set_step_column(self, step_column: int) -> None:
        self.step_column = step_column
        self.now.fill_(step_column)

    def set_starts(self, starts: list[int]) -> None:
        super().set_starts(starts)
        self.first[: self.num_rows] = torch.tensor(starts, dtype=torch.int32)

    def resize(self, old: int, ahead: int = 0) -> None:
        self._forget(min(self.starts))
        used, columns = self.step_column, self.suffix_bias.shape[1]
        if used + ahead > columns:
            self._grow_suffix(self.num_rows, len(self.first), columns_for(used + ahead))
        for buffer in self.suffix:
            buffer[:, :, :, ahead : ahead + used] = buffer[:, :, :, :used].clone()
        self.suffix_bias[:, ahead : ahead + used] = self.suffix_bias[:, :used].clone()
        self.suffix_bias[:, :ahead] = HIDDEN
        self.starts = [start + ahead for start in self.starts]
        self._set_step_column(used + ahead)

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
        rows, heads, width = key.shape
        if self.attention == "triton":
            return self.attend_in_kernels(layer, query, key, value, rule)
        suffix = self.suffix[layer][:, :rows]
        suffix[0].index_copy_(2, self.now, key[:, :, None])
        suffix[1].index_copy_(2, self.now, value[:, :, None])
        row_map = RowMap(self.members, self.back[:rows], is_regular=False)
        parts = self._parts(layer, suffix[0], suffix[1], row_map, query.shape[1] // heads)
        out = by_one_softmax(query.view(rows, heads, -1, width), *parts, row_map, rule)
        return out.view(rows, -1, width)

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
