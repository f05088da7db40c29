"""Records of numbers in an anonymous temporary file, mapped into memory, so that those at hand alone take room there."""

import contextlib
import tempfile
import weakref
from collections.abc import Sequence
from typing import IO, Any

import numpy

from covey.errors import StorageError

_BUFFERED = 4096
"""Single records that wait in memory to be written together."""

Records = numpy.ndarray[Any, Any]


class Spill:
    """Records of one kind in the order they came. The file is gone with the object, or with the process, however that ends."""

    def __init__(self, kind: Any) -> None:
        self.kind = numpy.dtype(kind)
        self._file: IO[bytes] | None = None
        self._waiting: list[Any] = []
        self._written = 0

    def __len__(self) -> int:
        return self._written + len(self._waiting)

    def add(self, record: Any) -> None:
        """Take one record: a number, or a tuple of them."""
        self._waiting.append(record)
        if len(self._waiting) >= _BUFFERED:
            self._write_out()

    def extend(self, records: Records) -> None:
        """Take many. Raises StorageError when the disk is full."""
        self._write_out()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="covey-data-")  # noqa: SIM115 - lives as long as this
                self._closing = weakref.finalize(self, _close, self._file)
            self._file.write(records.astype(self.kind, copy=False).tobytes())
        except OSError as error:
            raise _full(error) from error
        self._written += len(records)

    def all(self) -> Records:
        """All records so far, in their order, in the file. Raises StorageError when the disk is full."""
        self._write_out()
        if self._file is None or not self._written:
            return numpy.zeros(0, self.kind)
        try:
            self._file.flush()
        except OSError as error:
            raise _full(error) from error
        return numpy.asarray(numpy.memmap(self._file, self.kind, "r", shape=(self._written,)))

    def close(self) -> None:
        """Give the file up."""
        if self._file is not None:
            self._closing()

    def _write_out(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self.extend(numpy.array(waiting, self.kind))


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # unwritten records are no longer needed
        file.close()


def _full(error: OSError) -> StorageError:
    return StorageError(
        f"The temporary folder {tempfile.gettempdir()} cannot be written ({error.strerror or error}); "
        "point TMPDIR to a disk with room, some 900 bytes a row."
    )


def order_statistic(values: Sequence[float] | Records, counts: Sequence[int] | Records, place: int) -> float:
    """The value at `place` (from 0) of the sorted list in which each of the ascending `values` stands `counts` times."""
    return float(values[int(numpy.searchsorted(numpy.cumsum(counts), place, side="right"))])


def median(values: numpy.ndarray, counts: numpy.ndarray) -> float:
    """Median of values with counts."""
    order = numpy.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    size = int(counts.sum())
    return (order_statistic(values, counts, (size - 1) // 2) + order_statistic(values, counts, size // 2)) / 2


def percentile(values: Sequence[float], counts: Sequence[int], percent: float) -> float:
    """As `numpy.percentile` of the list in which each of the ascending `values` stands `counts` times."""
    place = percent / 100 * (sum(counts) - 1)
    low = order_statistic(values, counts, int(place))
    high = order_statistic(values, counts, min(int(place) + 1, sum(counts) - 1))
    share = place - int(place)
    return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share
