"""Orders of the rows of a data set. Both resume from a few numbers, without replaying earlier draws."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from covey.data.checks import row_at
from covey.errors import DataError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of one drawn prompt: its completions' mean reward (1: full marks), and True if their rewards differed."""

    score: float
    has_signal: bool
    is_judged: bool = True
    """False where the rewards or the sampler failed, so that the prompt counts as not asked."""

    @staticmethod
    def mean(outcomes: Sequence[Outcome]) -> Outcome:
        """Mean outcome of the prompts of one question."""
        score = sum(outcome.score for outcome in outcomes) / len(outcomes)
        signal = any(outcome.has_signal for outcome in outcomes)
        return Outcome(score, signal, signal or all(outcome.is_judged for outcome in outcomes))


class Order(Protocol):
    """Order of rows; resumes from its `state_dict`."""

    @property
    def num_rows(self) -> int | None: ...

    def next(self) -> tuple[str, Row]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def pass_on(order: Any, name: str, *arguments: Any) -> None:
    """Call a method that some orders have: `learn` of those that adapt to outcomes, `commit` of those of live sources."""
    method = getattr(order, name, None)
    if method is not None:
        method(*arguments)


class Permutation:
    """Rows of a data set with a length: all of them once an epoch, each epoch in an order of its own."""

    def __init__(self, dataset: Any, *, seed: int, shuffle: bool) -> None:
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.num_rows: int = len(dataset)
        self._epoch, self._position = 0, 0
        self._rows = self._permuted(0)

    def next(self) -> tuple[str, Row]:
        """The uid `epoch:row` of the next draw, and the row."""
        if self._position == self.num_rows:
            self._epoch, self._position = self._epoch + 1, 0
            self._rows = self._permuted(self._epoch)
        row = int(self._rows[self._position])
        self._position += 1
        return f"{self._epoch}:{row}", row_at(self.dataset, row)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._rows = self._permuted(self._epoch)

    def _permuted(self, epoch: int) -> torch.Tensor:
        return permutation(self.num_rows, self.seed, epoch) if self.shuffle else torch.arange(self.num_rows)


class BlockOrder:
    """Rows of a stream: block after block of `block_size` rows, each block in an order of its own.

    A buffer that rows leave at random could not be resumed without storing it; a block is read again from the source's own
    `state_dict`, at most `block_size` rows. A source that cannot come back to its position (it has no `state_dict`, or a
    shuffle buffer, whose content `datasets` does not save) is read from the start of the epoch.
    """

    num_rows = None

    def __init__(self, dataset: Any, *, seed: int, shuffle: bool, block_size: int) -> None:
        self.dataset, self._unread, self.seed = dataset, dataset, seed
        self.shuffle, self.block_size = shuffle, block_size
        self._epoch, self._block, self._position = 0, 0, 0
        self._source: Iterator[Row] | None = None
        self._before: Any = None
        """The source's state before the block; None at the start of an epoch."""
        self._has_before = False
        self._rows: list[Row] = []
        self._digested: tuple[list[Row], str] | None = None
        self._order = torch.arange(0)

    def next(self) -> tuple[str, Row]:
        """The uid `epoch:row` of the next draw, and the row; `row` counts the rows of the stream in their first order."""
        if self._position == len(self._rows):
            self._next_block()
        index = int(self._order[self._position])
        self._position += 1
        return f"{self._epoch}:{self._block * self.block_size + index}", self._rows[index]

    def state_dict(self) -> dict[str, Any]:
        state = {"epoch": self._epoch, "block": self._block, "position": self._position, "digest": self._digest()}
        return {**state, "source": copy.deepcopy(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._block = int(state["epoch"]), int(state["block"])
        self._open(state["source"])
        if state["source"] is None:  # the start of an epoch, or a source that cannot say where it is
            self._skip(self._block * self.block_size)
        self._rows, self._position = [], int(state["position"])
        if not self._position:
            return
        self._read()
        if self._digest() == state["digest"]:
            return
        logger.warning(
            "The stream of prompts did not come back to its position (a shuffle buffer?); reading it from the start."
        )
        self._open(None)
        self._skip(self._block * self.block_size)
        self._read()
        if self._digest() != state["digest"]:
            raise DataError(
                "The stream of prompts gives other rows than at the checkpoint; restore it, or start a new run."
            )

    def _next_block(self) -> None:
        if self._source is None:
            self._open(None)
        elif self._rows:
            self._block += 1
        self._position = 0
        self._read()
        if self._rows:
            return
        if self._block == 0:
            raise DataError("The data set's stream gave no row; there is nothing to draw from.")
        self._epoch, self._block = self._epoch + 1, 0
        self._open(None)
        self._read()
        if not self._rows:
            raise DataError(
                "The data set's stream gave rows once and none in the next epoch; give a source that starts again."
            )

    def _open(self, state: Any) -> None:
        self.dataset = _twin(self._unread)  # `load_state_dict` would outlast the epoch it is meant for
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        if state is not None:
            self.dataset.load_state_dict(state)
        self._source = iter(self.dataset)
        self._before, self._has_before = state, True

    def _digest(self) -> str:
        """Digest of the block's rows, computed once a block: every rollout asks for the state."""
        if self._digested is None or self._digested[0] is not self._rows:
            shown = repr(self._rows).encode("utf-8", "surrogatepass")
            self._digested = self._rows, hashlib.sha256(shown).hexdigest()[:16]
        return self._digested[1]

    def _skip(self, rows: int) -> None:
        for _ in itertools.islice(self._source or (), rows):
            pass

    def _read(self) -> None:
        """Read the next block; the state before it is what a checkpoint needs."""
        assert self._source is not None
        if not self._has_before:
            self._before = copy.deepcopy(self.dataset.state_dict()) if hasattr(self.dataset, "state_dict") else None
        self._has_before = False
        self._rows = list(itertools.islice(self._source, self.block_size))
        size = len(self._rows)
        self._order = permutation(size, self.seed, self._epoch, self._block) if self.shuffle else torch.arange(size)


def _twin(dataset: Any) -> Any:
    """A shallow copy with attributes of its own; `copy.copy` of a `datasets.IterableDataset` shares them."""
    twin = copy.copy(dataset)
    if hasattr(twin, "__dict__"):
        twin.__dict__ = dict(dataset.__dict__)
    return twin


def permutation(size: int, seed: int, epoch: int, block: int = 0) -> torch.Tensor:
    """[size] int64. Epoch 0 is `torch.randperm` from the seed itself, as in TRL; others mix the numbers into a new seed."""
    if epoch or block:
        digest = hashlib.sha256(f"{seed}:{epoch}:{block}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
