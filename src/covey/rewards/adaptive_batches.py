"""Batch sizes of a reward's model: texts of similar length together, the batch size halved when memory runs out."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from covey.errors import MemoryLimitError
from covey.process.memory import until_it_fits
from covey.types import Event

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class AdaptiveBatches:
    """Batches of at most `batch_size` texts, and of `max_tokens` with padding once memory has set a bound.

    The bound stays for the rest of the run and beyond a resume. A smaller batch changes no score, but for rounding.
    """

    name: str
    """Name of the model."""
    batch_size: int
    max_tokens: int | None = None
    events: list[Event] = field(default_factory=list)

    def run(self, lengths: Sequence[int], read: Callable[[list[int]], Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Places of texts of these lengths, and what `read` gave for them, until each text was read; the shortest first.

        Raises MemoryLimitError when one text does not fit alone.
        """
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])  # alike lengths together: little padding
        while order:
            yield self._first(order, lengths, read)

    def _first(
        self, order: list[int], lengths: Sequence[int], read: Callable[[list[int]], Tensor]
    ) -> tuple[list[int], Tensor]:
        """The next batch; it is taken out of `order` once it was read."""
        held: list[int] = []

        def work() -> Tensor:
            held[:] = order[: self._count(order, lengths)]
            return read(held)

        values = until_it_fits(work, lambda reason: self._halve(len(held), lengths[held[-1]], reason))
        del order[: len(held)]
        return held, values

    def _count(self, order: Sequence[int], lengths: Sequence[int]) -> int:
        most = min(self.batch_size, len(order))
        if self.max_tokens is None:
            return most
        return max([1, *(n for n in range(1, most + 1) if n * lengths[order[n - 1]] <= self.max_tokens)])

    def _halve(self, rows: int, longest: int, reason: str) -> None:
        if rows == 1:
            raise MemoryLimitError(
                f"a text of {longest} tokens does not fit in memory with {self.name!r}, even alone; lower max_completion_length, "
                f"or load that model in 16 bits (dtype) or on another device ({reason})."
            )
        self.max_tokens = rows // 2 * max(1, longest)
        sentence = (
            f"Memory ran out while {self.name!r} scored {rows} texts of up to {longest} tokens; from now on it reads at most "
            f"{self.max_tokens} tokens at a time, with the same scores."
        )
        logger.warning("%s", sentence)
        self.events.append(Event(kind="out_of_memory", said=sentence, details={"model": self.name, "error": reason}))

    def take_events(self) -> tuple[Event, ...]:
        """Events since the last call."""
        taken, self.events = tuple(self.events), []
        return taken

    def limit(self, max_tokens: int | None) -> None:
        """A bound that was found before a resume."""
        bounds = [bound for bound in (self.max_tokens, max_tokens) if bound is not None]
        self.max_tokens = min(bounds, default=None)


def portions_of(reward: Any) -> AdaptiveBatches | None:
    """Batches of a reward that runs a model in this process; None: it runs none."""
    batches = getattr(reward, "portions", None) or getattr(getattr(reward, "frozen", None), "portions", None)
    return batches if isinstance(batches, AdaptiveBatches) else None
