"""What the learner measures of single tokens and nothing needs afterwards: kept for the steps that are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from covey.learner.packing import Row
from covey.process.world import World
from covey.types import Group, TokenNumbers


class TokenEntropies:
    """Entropies of the tokens of a step, on the processor, as the policy that made the gradient had them."""

    def __init__(self, is_wanted: Callable[[int], bool] = lambda step: False) -> None:
        """`is_wanted(step)` must say the same on every process."""
        self.is_wanted = is_wanted
        self._rows: dict[int, Tensor] | None = None

    def begin(self, step: int) -> None:
        self._rows = {} if self.is_wanted(step) else None

    def take(self, batch: Sequence[Row], entropy: Tensor) -> None:
        """`entropy` [N, T] of a micro-batch, in nats; again for the same completions, when a step is taken again."""
        if self._rows is not None:
            numbers = entropy.detach().float().cpu()
            self._rows |= {row.index: numbers[r, : row.completion.num_tokens].clone() for r, row in enumerate(batch)}

    def gathered(self, world: World, groups: Sequence[Group]) -> TokenNumbers:
        """Those of every process. Completions without a gradient are often not computed, and have none."""
        if self._rows is None:
            return {}
        found = {index: row for part in world.gather([self._rows]) for rows in part for index, row in rows.items()}
        self._rows = None
        ends = [sum(group.size for group in groups[: p + 1]) for p in range(len(groups))]
        places = [range(end - group.size, end) for end, group in zip(ends, groups, strict=True)]
        return {"entropy": [[found.get(index) for index in place] for place in places]}
