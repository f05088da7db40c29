"""Micro-batches of a step: rows and tokens bounded by limits, which affect memory and speed, never a gradient."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from covey.errors import MemoryLimitError
from covey.learner.out_of_memory import BatchLimits
from covey.learner.packing import Row, microbatches, tokens_in
from covey.process.memory import until_it_fits

T = TypeVar("T")


@dataclass(eq=False)
class MicroBatcher:
    """Splits a step into micro-batches."""

    limits: BatchLimits
    shares_prompts: Callable[[], bool] = lambda: False
    """True if the rows of a group share their prompt."""
    agree: Callable[[int], int] | None = None
    """Maximum of the processes' counts, for a sharded model: all processes must run the same number of passes."""
    largest: tuple[int, int] = (0, 0)
    """Rows and tokens of the current attempt's largest micro-batch, for work that does not iterate `each`."""
    is_last: bool = False
    """True while `each` is at its last micro-batch."""
    _current: Sequence[Row] = ()
    """The current micro-batch."""

    def each(self, rows: Sequence[Row], factor: int = 1) -> Iterator[list[Row]]:
        """Iterate `batches`, recording the current one for the case that memory runs out.

        With a sharded model, empty batches follow until all processes have the same number.
        """
        batches = self.batches(rows, factor)
        batches += [[]] * (0 if self.agree is None else self.agree(len(batches)) - len(batches))
        for place, batch in enumerate(batches, 1):
            self._current, self.is_last = batch, place == len(batches)
            yield batch
        self._current = ()

    def batches(self, rows: Sequence[Row], factor: int = 1) -> list[list[Row]]:
        """Micro-batches of the rows; `factor` multiplies the row limit of passes without backward."""
        is_shared = self.shares_prompts()
        remaining = self.limits.left_out.without(rows)
        batches = microbatches(
            remaining,
            max_rows=factor * self.limits.max_rows,
            max_tokens=self.limits.max_tokens,
            enough_tokens=self.limits.enough_tokens,
            shares_prompts=is_shared,
        )
        for batch in batches:
            self.largest = max(self.largest, (len(batch), tokens_in(batch, is_shared)))
        return batches

    def attempt(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Result of `work()`; when memory runs out, `undo()` and retry with half the micro-batch size, which is then kept.

        Within a step, a completion that does not fit alone is left out (`BatchLimits.left_out`). Raises MemoryLimitError when more do not
        fit than may be left out.
        """

        def shrink(reason: str) -> None:
            undo()
            current = self._current
            rows, tokens = (len(current), tokens_in(current, self.shares_prompts())) if current else self.largest
            self.limits.lower(rows, tokens, current, reason)
            self.largest, self._current = (0, 0), ()

        self.largest, self._current = (0, 0), ()
        return until_it_fits(work, shrink if self.agree is None else self._refuse)

    def _refuse(self, reason: str) -> None:
        """Raise MemoryLimitError for a sharded model: the other processes wait in the collectives of the pass that failed here."""
        rows, tokens = len(self._current), tokens_in(self._current, self.shares_prompts())
        raise MemoryLimitError(
            f"Memory ran out on a micro-batch of {rows} completions ({tokens} tokens), and a pass that processes make together "
            f"cannot be taken again by one of them ({reason}); set max_tokens_per_microbatch below {max(1, tokens)}, "
            "per_device_train_batch_size lower, or gradient_checkpointing=True, and resume."
        )
