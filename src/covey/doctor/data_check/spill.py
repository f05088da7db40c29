"""Records of numbers in an anonymous temporary file, read back a part at a time, so that memory stays flat."""

import contextlib
import itertools
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy

from covey.errors import StorageError

AT_ONCE = 200_000
"""Records that are held in memory at a time where some order is asked for."""
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

    def read(self, start: int, stop: int) -> Records:
        """Records `start` to `stop`; nothing else of the file is in memory."""
        self._write_out()
        if self._file is None or stop <= start:
            return numpy.zeros(0, self.kind)
        try:
            self._file.flush()
        except OSError as error:
            raise _full(error) from error
        size, place = self.kind.itemsize, start * self.kind.itemsize
        parts, left = [], (min(stop, self._written) - start) * size
        while left > 0 and (part := os.pread(self._file.fileno(), left, place)):
            parts.append(part)
            place, left = place + len(part), left - len(part)
        return numpy.frombuffer(b"".join(parts), self.kind)

    def chunks(self) -> Iterator[tuple[int, Records]]:
        """All records in their order, some at a time, each time with the place of the first."""
        size = max(AT_ONCE // 8, 1)
        for start in range(0, len(self), size):
            yield start, self.read(start, start + size)

    def within(self, low: int, high: int, field: str | None = None) -> tuple[Records, Records]:
        """Places and records whose number (or `field`) is in [low, high), in order."""
        places, records = [numpy.zeros(0, numpy.int64)], [numpy.zeros(0, self.kind)]
        for start, chunk in self.chunks():
            numbers = chunk if field is None else chunk[field]
            is_in = numbers >= numbers.dtype.type(low)
            if high <= numpy.iinfo(numbers.dtype).max:
                is_in &= numbers < numbers.dtype.type(high)
            places.append(start + numpy.flatnonzero(is_in))
            records.append(chunk[is_in])
        return numpy.concatenate(places), numpy.concatenate(records)

    def by_hash(self, field: str | None = None) -> Iterator[tuple[Records, Records]]:
        """All records with their places, those with equal hashes (64 bits) together: a part of all hashes at a time, ascending."""
        parts = -(-len(self) // AT_ONCE)
        edges = [part * 2**64 // parts for part in range(parts)] + [2**64]
        for low, high in itertools.pairwise(edges) if parts else ():
            yield self.within(low, high, field)

    def by_number(self, field: str, most: int) -> Iterator[Records]:
        """All records by a number from 0 to `most`, ascending, of which few are equal; equal ones in their order."""
        span = AT_ONCE if len(self) > AT_ONCE else most + 1
        for low in range(0, most + 1, span):
            _, records = self.within(low, low + span, field)
            yield records[numpy.argsort(records[field], kind="stable")]

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
        "point TMPDIR to a disk with room, some 600 bytes a row."
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
