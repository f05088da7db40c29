"""KV cache of the engine: one prefix a prompt, one suffix a completion.

Keys carry their positions, so their order in memory is free: all rows write their next key into the same column
(`step_column`) whenever they began, and a bias masks the columns before a row's first.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from covey.kernels import CacheTables, DecodeKernels, DecodeStep, Window, zeros
from covey.rollout.row_states import RowStates, StatePlaces
from covey.rollout.softmax_attention import HIDDEN, AttentionPart, KeyBias, RowMap, ScoreRule, by_one_softmax

STEP = 32
"""Granularity of allocated columns: kernels are fastest on whole blocks, and few shapes occur."""


@dataclass(frozen=True)
class LayerShape:
    """Number of key/value heads, head width and attention window of one layer."""

    heads: int
    width: int
    window: Window | None = None
    is_index: bool = False
    """True for the keys of an indexer, which stand where the keys of a layer do; their values are not used."""

    def window_within(self, positions: int) -> Window | None:
        """The window, if it masks a key in a sequence of `positions` tokens; else None."""
        return self.window if self.window is not None and self.window.hides(positions) else None

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the layer's keys and values of `rows` rows."""
        return 2, rows, self.heads, columns, self.width

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.heads * self.width * dtype.itemsize


def padded_rows(rows: int) -> int:
    """`rows` padded to one of few sizes: oneDNN takes about 3 ms to build a kernel for each new size."""
    block = 1 if rows <= 2 else 4 if rows <= 16 else 8
    return -(-rows // block) * block


def rounded(tokens: int) -> int:
    """The next multiple of `STEP`."""
    return -(-max(tokens, 1) // STEP) * STEP


class KVCache:
    """KV cache of the running prompts and rows, and the decode attention over it."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        device: torch.device,
        dtype: torch.dtype,
        context: int,
        kernels: DecodeKernels | None = None,
        states: StatePlaces | None = None,
    ) -> None:
        """`kernels` compute decode attention; without them, PyTorch's operations do. `states` are the model's, if it has some."""
        self.layers, self.device, self.dtype, self.context = tuple(layers), device, dtype, context
        self.kernels = kernels
        self.states = None if states is None else RowStates(states, device)
        new = lambda *shape: torch.zeros(*shape, device=device, dtype=dtype)
        self.prefix = [new(*layer.shape(0, 0)) for layer in layers]  # each [2, P, Hkv, columns, D]
        self.suffix = [new(*layer.shape(0, 0)) for layer in layers]  # each [2, R, Hkv, columns, D]
        self.prefix_bias, self.suffix_bias = new(0, 0), new(0, 0)  # [P, columns], [R, columns]
        self.prompt_lengths: list[int] = []  # of the P running prompts
        self.starts: list[int] = []  # first column of each of the R rows
        self.step_column = 0
        self.of_prompts, self.of_rows = dict[Hashable, Tensor](), dict[Hashable, Tensor]()  # see KeyBias
        self.windows = {layer.window for layer in layers if layer.window is not None}
        self.reach, self.in_window = 0, dict[Window, KeyBias]()  # of this step: longest text's positions, biases
        self.owners: list[int] = []  # the prompt slot of each row

    def _changed(self) -> None:
        """Drop the tables made from rows, prompts and buffers, one of which has changed."""
        for table in ("padded_owners", "row_map", "cache_tables", "_tables"):
            vars(self).pop(table, None)

    def _grown(self, name: Hashable, held: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
        """The buffer `name` in this shape: `held`, a part of it so far, in the first indices of each dimension, `value` elsewhere."""
        by_pages = self.device.type == "cpu" and not value
        out = zeros(shape, held.dtype) if by_pages else held.new_full(tuple(shape), value)
        out[tuple(map(slice, held.shape))] = held
        return out

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_computed(self) -> int:
        """Batch size of a decode step: the running rows, padded to one of few sizes. Results of the padding are not read."""
        return padded_rows(self.num_rows)

    def add_prompts(self, lengths: Sequence[int]) -> range:
        """Allocate slots for prompts of these lengths; returns the slots."""
        old = len(self.prompt_lengths)
        self.prompt_lengths += lengths
        slots = range(old, len(self.prompt_lengths))
        self._fit_prefixes(old, slots.stop, rounded(max(self.prompt_lengths)))
        column = torch.arange(self.prefix_bias.shape[1], device=self.device)
        ends = torch.tensor(lengths, device=self.device)
        self.prefix_bias[old : slots.stop] = torch.where(column < ends[:, None], 0.0, HIDDEN).to(self.dtype)
        return slots

    def _fit_prefixes(self, old: int, prompts: int, columns: int) -> None:
        """Reallocate the prefixes for `prompts` prompts; the first `old` keep their keys."""
        for i, layer in enumerate(self.layers):
            self.prefix[i] = self._grown(("prefix", i), self.prefix[i][:, :old], layer.shape(prompts, columns))
        self.prefix_bias = self._grown("prefix_bias", self.prefix_bias[:old], (prompts, columns), HIDDEN)
        self._changed()

    def add_rows(self, count: int) -> None:
        """Allocate `count` more rows, whose suffixes are empty."""
        old = self.num_rows
        if not old:
            self.step_column = 0
        self.starts += [self.step_column] * count
        self._fit_rows(old)
        if self.states is not None:
            self.states.reserve(old, len(self.suffix_bias), self._grown)  # no cycle that outlives the call

    def _fit_rows(self, old: int) -> None:
        """Allocate suffixes of the rows behind the first `old`."""
        self.resize(old)

    def reserve(self, steps: int) -> None:
        """Nothing to do: columns are added as steps need them."""

    def begin_rows(self, owners: Sequence[int]) -> None:
        """The last rows begin with the states that the prompts of the slots `owners` ended with; called after their prefill."""
        if self.states is not None:
            self.states.begin(self.num_rows - len(owners), owners)

    def set_starts(self, starts: list[int], step_column: int) -> None:
        """Set the first column of each row and the step column, after keys were moved."""
        self.starts, self.step_column = starts, step_column
        self._changed()

    def resize(self, old: int, more: int = 0) -> None:
        """Reallocate the suffixes: columns that none of the first `old` rows reads are dropped, and new ones added, at least `more`."""
        first = min(self.starts[:old], default=self.step_column)
        used = self.step_column - first
        # kernels read used columns only, and untouched pages take no memory
        soon = min(used // 2, 4 * STEP) if self.kernels is not None else 0
        columns = rounded(more + used + max(STEP, used // 8, soon))
        self._fit_suffixes(old, self.num_computed, columns, first)

    def _fit_suffixes(self, old: int, rows: int, columns: int, first: int = 0) -> None:
        """Reallocate the suffixes: the columns in use of the first `old` rows, from `first` on, become the first ones."""
        used = slice(first, self.step_column)
        for i, layer in enumerate(self.layers):
            held = self.suffix[i][:, :old, :, used]
            self.suffix[i] = self._grown(("suffix", i), held, layer.shape(rows, columns))
        self.suffix_bias = self._grown("suffix_bias", self.suffix_bias[:old, used], (rows, columns), HIDDEN)
        self.starts = [start - first for start in self.starts]
        self.step_column -= first
        self._changed()

    def drop_rows(self, freed: list[int], moved: list[int], left: int) -> None:
        """Keep `left` rows: the rows `moved`, from the end, replace the rows `freed`."""
        for freed_row, moved_row in zip(freed, moved, strict=True):
            self.starts[freed_row] = self.starts[moved_row]
        del self.starts[left:]
        if freed:
            to, source = (torch.tensor(x, device=self.device) for x in (freed, moved))
            for buffer in self.suffix:
                buffer[:, to, :, : self.step_column] = buffer[:, source, :, : self.step_column]
            self.suffix_bias[to] = self.suffix_bias[source]
            if self.states is not None:
                self.states.move(freed, moved)

    def drop_prompts(self, slots: list[int]) -> None:
        """Keep these prompts, in this order."""
        self.prompt_lengths = [self.prompt_lengths[p] for p in slots]
        self._changed()
        columns = rounded(max(self.prompt_lengths, default=0))
        for i, buffer in enumerate(self.prefix):  # one layer at a time, to bound the memory of copies
            shape = self.layers[i].shape(len(slots), columns)
            self.prefix[i] = self._grown(("prefix", i), buffer[:, :0, :, :columns], shape)
            for place, p in enumerate(slots):
                self.prefix[i][:, place] = buffer[:, p, :, :columns]
        self.prefix_bias = self.prefix_bias[slots, :columns]

    def set_row_owners(self, owners: list[int]) -> None:
        """Set the prompt slot of each row; called after every change of rows or prompts."""
        self.owners, self.of_prompts = owners, {}
        self._changed()

    @cached_property
    def padded_owners(self) -> Tensor:
        """[R] int64, the prompt slot of each row of a decode step, 0 for padding."""
        return torch.tensor(self.owners + [0] * (self.num_computed - self.num_rows), device=self.device)

    @cached_property
    def row_map(self) -> RowMap:
        """Index tables between rows and prompts, for PyTorch's operations."""
        return RowMap.of(self.owners, len(self.prompt_lengths), self.device, self.num_computed)

    @cached_property
    def cache_tables(self) -> CacheTables:
        """Addresses of all layers' keys and values, for the kernels."""
        return CacheTables(self.suffix, self.prefix)

    @cached_property
    def _tables(self) -> list[Tensor]:
        """First columns and prompt slots of the rows, and lengths of the prompts, for the kernels."""
        return [torch.tensor(numbers) for numbers in (self.starts, self.owners, self.prompt_lengths)]

    def step(self, heads: int, repeats: int, width: int, scale: float) -> DecodeStep:
        """Arguments of the kernels for this decode step, without rotary tables and norms."""
        starts, owners, lengths = self._tables
        return DecodeStep(
            rows=self.num_rows,
            heads=heads,
            repeats=repeats,
            width=width,
            column=self.step_column,
            threads=torch.get_num_threads(),
            starts=starts.data_ptr(),
            owners=owners.data_ptr(),
            lengths=lengths.data_ptr(),
            scale=scale,
        )

    def begin_step(self) -> None:
        """Open the column for the keys of this decode step."""
        if self.step_column >= self.suffix_bias.shape[1]:
            self.resize(self.num_rows)
        self.suffix_bias[:, self.step_column] = 0.0
        self.of_rows, self.in_window = {}, {}
        if self.windows:
            self.reach = max(self._positions(), default=0) + 1

    def end_step(self) -> None:
        self.step_column += 1

    def _positions(self) -> list[int]:
        """Position of each row's token in this step."""
        lengths, now = self.prompt_lengths, self.step_column
        return [lengths[owner] + now - start for owner, start in zip(self.owners, self.starts, strict=True)]

    def window_of(self, layer: int) -> Window | None:
        """The layer's window, if it masks a key of a running row; else None."""
        return self.layers[layer].window_within(self.reach)

    @property
    def is_windowed(self) -> bool:
        """True if some layer's window masks keys in this step, which the kernels do not support."""
        return any(window.hides(self.reach) for window in self.windows)

    def _in_window(self, window: Window, bias: KeyBias) -> KeyBias:
        """`bias` for the rows of this step, without the keys before the window of each."""
        padding = [0] * (self.num_computed - self.num_rows)
        position = torch.tensor(self._positions() + padding, device=self.device)
        return bias.in_window(window, self.padded_owners, position, self.step_column)

    def biases(self, layer: int, rows: int) -> KeyBias:
        """Biases of the prompts' keys and of the own keys of `rows` rows, computed once a step for layers with the same window."""
        window = self.window_of(layer)
        everything = KeyBias(self.prefix_bias, self.suffix_bias[:rows], self.of_prompts, self.of_rows)
        if window is not None and window not in self.in_window:
            self.in_window[window] = self._in_window(window, everything)
        return everything if window is None else self.in_window[window]

    def attend_decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        """[R, Hq, D] of one new token a row: `query` [R, Hq, D], `key` and `value` [R, Hkv, D]."""
        rows, heads, width = key.shape
        repeats = query.shape[1] // heads
        rule = rule if rule.chosen is None else rule.among(self.prefix_bias.shape[1] + self.suffix_bias.shape[1])
        if self.kernels is not None and rule.is_plain and self.window_of(layer) is None:
            step = self.step(heads, repeats, width, rule.scale)
            return self.kernels.attend(step, query, key, value, self.suffix[layer], self.prefix[layer])
        keys, values = self.suffix[layer][:, :rows]
        self._append(keys, key)
        self._append(values, value)
        parts = self._parts(layer, keys, values, repeats, rule.chosen)
        out = by_one_softmax(query.view(rows, heads, repeats, width), *parts, self.row_map, rule)
        return out.view(rows, -1, width)

    def _append(self, columns: Tensor, x: Tensor) -> None:
        """Write `x` [R, Hkv, D] to the step column of `columns` [R, Hkv, columns, D]."""
        columns[:, :, self.step_column] = x

    def _parts(
        self, layer: int, keys: Tensor, values: Tensor, repeats: int, chosen: Tensor | None
    ) -> tuple[AttentionPart, AttentionPart]:
        """Parts of the rows' own `keys` and `values` [R, Hkv, columns, D] and of their prompts', masked by the layer's window.

        `chosen` [R, 1, k] are the places that the layer's indexer chose.
        """
        rows, heads = keys.shape[:2]
        buffer, bias = self.prefix[layer], self.biases(layer, rows)
        bias = bias if chosen is None else bias.of_chosen(chosen[:, 0], self.padded_owners)
        suffix = AttentionPart(keys, values, bias.of_suffix(heads))
        return suffix, AttentionPart(buffer[0], buffer[1], bias.shared(self.row_map, repeats, heads))
