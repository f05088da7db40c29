"""Short memory of the learner: saved activations on the host, and sizes of micro-batches, halved when memory runs out and kept for the run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from covey.errors import MemoryLimitError
from covey.learner.packing import Row
from covey.types import Event, Metric, Sum


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A saved tensor on the host. Dimensions of stride 0, as `expand` makes them, have one element there."""

    host: Tensor
    size: torch.Size
    device: torch.device


def offloaded(*, pins: bool) -> saved_tensors_hooks:
    """Context in which saved tensors are moved to the host, and back for the backward pass.

    `torch.autograd.graph.save_on_cpu` brings them back contiguous, and compiled kernels assert the strides that they saved.
    Parameters stay where they are: they keep their memory anyway. `pins`: copy through page-locked memory.
    """

    def pack(tensor: Tensor) -> Tensor | _Waiting:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        sizes = [1 if step == 0 else count for count, step in zip(tensor.size(), tensor.stride(), strict=True)]
        once = tensor.as_strided(sizes, tensor.stride())
        if torch._debug_has_internal_overlap(once) == 1:  # several indices of one element: no copy has such strides
            return tensor
        host = torch.empty_strided(once.size(), once.stride(), dtype=tensor.dtype, pin_memory=pins)
        return _Waiting(host.copy_(once), tensor.size(), tensor.device)

    def unpack(packed: Tensor | _Waiting) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host = packed.host
        back = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=packed.device)
        return back.copy_(host, non_blocking=pins).expand(packed.size)

    return saved_tensors_hooks(pack, unpack)


logger = logging.getLogger(__name__)

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
class BatchLimits:
    """Largest micro-batch; a smaller one never changes a gradient."""

    max_rows: int = 8
    max_tokens: int | None = None
    """Tokens of one forward pass, a shared prompt counted once, padding included."""
    enough_tokens: int | None = None
    """Tokens up to which groups are joined; None: up to `max_tokens`."""
    enable_recomputation: Callable[[], bool] = lambda: False
    """Turns on activation checkpointing, to save memory; False if it is on already or not possible."""
    is_last_resort: bool = False
    """True once `enable_recomputation` was called."""
    events: list[Event] = field(default_factory=list)
    left_out: SkippedCompletions = field(default_factory=SkippedCompletions)
    """Completions of the step that did not fit even alone."""
    device: str = "cpu"
    """Type of the device whose memory limits the sizes."""
    options: Sequence[Any] = ()
    """Options that the sizes at the start come from, as JSON."""
    is_learned: bool = False
    """True once memory ran out with larger sizes."""

    def lower(self, rows: int, tokens: int, batch: Sequence[Row], reason: str) -> None:
        """Halve the sizes after a micro-batch of `rows` and `tokens` did not fit: `batch`, where it is known.

        A single completion is first tried with recomputed activations, then left out of the step. Raises MemoryLimitError when
        more do not fit than may be left out.
        """
        if rows <= 1 and self.enable_recomputation():
            self.is_last_resort = True
            self._tell(
                f"Memory ran out on one completion ({tokens} tokens); activations are computed again from now on.",
                reason,
            )
            return
        if rows <= 1 and batch and self.left_out.take(batch[0]):
            self._tell(_sentence(batch[0]), reason, kind="completion_left_out")
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
