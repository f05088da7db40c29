"""Micro-batch sizes: rows and tokens bounded by options, halved when memory runs out, and kept for the rest of the run."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from covey.errors import MemoryLimitError
from covey.learner.packing import Row, microbatches, tokens_in
from covey.process.memory import until_it_fits
from covey.types import Event, Metric, Sum

logger = logging.getLogger(__name__)
T = TypeVar("T")


_SHARE = 8
"""Divisor of the completions of a step that may be left out: more would bias the gradient."""


@dataclass(eq=False)
class SkippedCompletions:
    """Completions left out of a step because they do not fit. Their gradient is zero; denominators still count them."""

    counted: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """Completions of the step, and its supervised examples, by the metric that counts those left out."""
    rows: list[Row] = field(default_factory=list)

    def begin(self, **counted: Sequence[Row]) -> None:
        """Start a step: one in eight of the rows of each metric may be left out, and at least one if there are several."""
        self.counted, self.rows = {f"{name}/left_out": rows for name, rows in counted.items()}, []

    def end(self) -> dict[str, Metric]:
        """End the step: metrics of the rows left out on this process, if any. None may be left out until `begin`."""
        counts = {name: len(_common(self.rows, rows)) for name, rows in self.counted.items()}
        self.counted, self.rows = {}, []
        return {name: Sum(float(count)) for name, count in counts.items() if count}

    def take(self, row: Row) -> bool:
        """Leave this completion out; False if the limit is reached."""
        of_kind = next((rows for rows in self.counted.values() if _common([row], rows)), ())
        most = max(1, len(of_kind) // _SHARE) if len(of_kind) > 1 else 0
        if len(_common(self.rows, of_kind)) >= most:
            return False
        self.rows.append(row)
        return True

    def without(self, rows: Sequence[Row]) -> list[Row]:
        """`rows` without the completions left out."""
        return [row for row in rows if not any(row is gone for gone in self.rows)]


def _common(some: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    return [row for row in some if any(row is other for other in rows)]


def _sentence(row: Row) -> str:
    """Event message of a completion left out."""
    return (
        f"A completion of {row.completion.num_tokens} tokens to prompt {row.prompt.uid} ({row.num_tokens} tokens together) does not fit "
        "in memory even alone. It is left out of this step, and the others keep their share; lower max_completion_length to learn from all."
    )


@dataclass(eq=False)
class MicroBatcher:
    """Splits a step into micro-batches; affects memory and speed, never a gradient."""

    max_rows: int
    max_tokens: int | None = None
    """Tokens of one forward pass, a shared prompt counted once, padding included."""
    shares_prompts: Callable[[], bool] = lambda: False
    """True if the rows of a group share their prompt."""
    enough_tokens: int | None = None
    """Tokens up to which groups are joined; None: up to `max_tokens`."""
    enable_recomputation: Callable[[], bool] = lambda: False
    """Turns on activation checkpointing, to save memory; False if it is on already or not possible."""
    is_last_resort: bool = False
    """True once `enable_recomputation` was called."""
    largest: tuple[int, int] = (0, 0)
    """Rows and tokens of the current attempt's largest micro-batch, for work that does not iterate `each`."""
    events: list[Event] = field(default_factory=list)
    left_out: SkippedCompletions = field(default_factory=SkippedCompletions)
    """Completions of the step that did not fit even alone."""
    device: str = "cpu"
    """Type of the device whose memory limits the sizes."""
    agree: Callable[[int], int] | None = None
    """Maximum of the processes' counts, for a sharded model: all processes must run the same number of passes."""
    is_last: bool = False
    """True while `each` is at its last micro-batch."""
    options: Sequence[Any] = ()
    """Options that the sizes at the start come from, as JSON."""
    is_learned: bool = False
    """True once memory ran out with larger sizes."""
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
        remaining = self.left_out.without(rows)
        batches = microbatches(
            remaining,
            max_rows=factor * self.max_rows,
            max_tokens=self.max_tokens,
            enough_tokens=self.enough_tokens,
            shares_prompts=is_shared,
        )
        for batch in batches:
            self.largest = max(self.largest, (len(batch), tokens_in(batch, is_shared)))
        return batches

    def attempt(self, work: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Result of `work()`; when memory runs out, `undo()` and retry with half the micro-batch size, which is then kept.

        Within a step, a completion that does not fit alone is left out (`left_out`). Raises MemoryLimitError when more do not
        fit than may be left out.
        """

        def shrink(reason: str) -> None:
            undo()
            self._halve(reason)
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

    def _halve(self, reason: str) -> None:
        current = self._current
        rows, tokens = (len(current), tokens_in(current, self.shares_prompts())) if current else self.largest
        if rows <= 1 and self.enable_recomputation():
            self.is_last_resort = True
            self._tell(
                f"Memory ran out on one completion ({tokens} tokens); activations are computed again from now on.",
                reason,
            )
            return
        if rows <= 1 and current and self.left_out.take(current[0]):
            self._tell(_sentence(current[0]), reason, kind="completion_left_out")
            return
        if rows <= 1:
            raise MemoryLimitError(
                f"One completion of {tokens} tokens with its prompt does not fit in memory ({reason}); lower max_completion_length, "
                "set gradient_checkpointing=True, train an adapter (peft_config), or choose a smaller model."
            )
        self.max_rows, self.max_tokens, self.is_learned = max(1, rows // 2), max(1, tokens // 2), True
        sentence = (
            f"Memory ran out on a micro-batch of {rows} completions ({tokens} tokens); from now on at most {self.max_rows} and "
            f"{self.max_tokens} tokens, with the same gradient."
        )
        self._tell(sentence, reason)

    def _tell(self, sentence: str, error: str, kind: str = "out_of_memory") -> None:
        logger.warning("%s", sentence)
        self.events.append(Event(kind=kind, said=sentence, details={"error": error}))

    def take_events(self) -> tuple[Event, ...]:
        """Events since the last call."""
        taken, self.events = tuple(self.events), []
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Micro-batch sizes found to fit, so that a resumed run does not run out of memory again."""
        return {
            "max_rows": self.max_rows,
            "max_tokens": self.max_tokens,
            "is_last_resort": self.is_last_resort,
            "device": self.device,
            "options": list(self.options),
            "is_learned": self.is_learned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sizes found to fit; smaller ones from the options win. Those of another type of device are not restored, nor those
        of other options, unless memory ran out.
        """
        if state.get("device", self.device) != self.device:
            return
        is_changed = state.get("options", list(self.options)) != list(self.options)
        if is_changed and not state.get("is_learned", True) and not state.get("is_last_resort"):
            return
        self.is_learned = state.get("is_learned", True)
        if state.get("is_last_resort") and not self.is_last_resort:
            self.is_last_resort = self.enable_recomputation()
        max_rows, self.max_rows = self.max_rows, min(self.max_rows, state["max_rows"])
        limits = [limit for limit in (self.max_tokens, state["max_tokens"]) if limit is not None]
        started, self.max_tokens = (max_rows, self.max_tokens), min(limits, default=None)
        if is_changed and (self.max_rows, self.max_tokens) != started:
            sentence = "Memory ran out before, so micro-batches stay at most %d completions and %s tokens, whatever the options say now."
            logger.warning(sentence, self.max_rows, self.max_tokens)
