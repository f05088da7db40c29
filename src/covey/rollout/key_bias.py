"""Additive attention mask of a decode step: 0 for a visible key, `HIDDEN` for a masked one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.kernels import is_chosen
from covey.rollout.attention import HIDDEN, RowMap, wide


@dataclass(frozen=True, eq=False)
class KeyBias:
    """Biases of P prompts' keys and of R rows' own keys."""

    prefix: Tensor
    """[P, columns]; with `is_by_row` [R, columns], as each row sees the keys of its prompt."""
    suffix: Tensor
    """[R, columns]"""
    of_prompts: dict[Hashable, Tensor] = field(default_factory=dict)
    """Biases of the prompts' keys by query and by head, filled on first use."""
    of_rows: dict[Hashable, Tensor] = field(default_factory=dict)
    """Biases of the rows' own keys by head, filled on first use."""
    is_by_row: bool = False

    def in_window(self, owners: Tensor, first_of_prompts: Tensor, first_of_rows: Tensor) -> KeyBias:
        """A copy by row, with the columns before `first_of_prompts` and `first_of_rows` [R or more] hidden too.

        `owners` [R or more] are the prompts of the rows.
        """
        rows = len(self.suffix)
        prefix = _hidden_before(self.prefix[owners[:rows]], first_of_prompts[:rows])
        return KeyBias(prefix, _hidden_before(self.suffix, first_of_rows[:rows]), is_by_row=True)

    def of_chosen(self, places: Tensor, owners: Tensor) -> KeyBias:
        """A copy by row, with all keys hidden but those at `places` [R, k] among the prompt's and the row's own. `owners` as above."""
        rows = len(self.suffix)
        prefix = self.prefix if self.is_by_row else self.prefix[owners[:rows]]
        both = torch.cat((prefix, self.suffix), 1)
        both = both.masked_fill(~is_chosen(places, both.shape[1]), HIDDEN)
        prefix, suffix = both.split((prefix.shape[1], self.suffix.shape[1]), 1)
        return KeyBias(prefix, suffix, is_by_row=True)

    def shared(self, row_map: RowMap, repeats: int, heads: int) -> Tensor:
        """Biases [P * H, Q or 1, columns] of the prompts' keys for the queries that `row_map` gathers."""
        return _made(self.of_prompts, (repeats, heads), lambda: wide(self._gathered(row_map, repeats), heads))

    def of_suffix(self, heads: int) -> Tensor:
        """Biases [R * H, 1, columns] of the rows' own keys."""
        return _made(self.of_rows, heads, lambda: wide(self.suffix[:, None], heads))

    def _gathered(self, row_map: RowMap, repeats: int) -> Tensor:
        if not self.is_by_row:
            return self.prefix[:, None]
        return self.prefix[row_map.members].repeat_interleave(repeats, 1)


def _made(cache: dict[Hashable, Tensor], key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    if key not in cache:
        cache[key] = make()
    return cache[key]


def _hidden_before(bias: Tensor, first: Tensor) -> Tensor:
    """`bias` [B, K] with the columns before `first` [B] hidden too."""
    column = torch.arange(bias.shape[1], device=bias.device)
    return bias.masked_fill(column < first[:, None], HIDDEN)
