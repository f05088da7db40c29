"""Rows that say the same: to the letter, or nearly. Memory grows by some 100 bytes a row, the rest lies in a temporary folder."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from covey.cleaning.grams import Hashes, common_runs, grams, mixed
from covey.errors import StorageError

SHINGLE = 3
"""Words of a run; two texts are as near as the share of runs that they have in common (Jaccard)."""
_BANDS, _ROWS_IN_BAND = 24, 3
"""72 minima in 24 bands of 3: a pair that shares 0.6 of its runs is met with probability 0.997, one of 0.5 with 0.96."""
_SHORT = 20
"""Words below which one word makes another question ("the surface of a cube", "of a cone"): such texts must have the same words."""
_COMMON, _ENOUGH = 0.1, 200
"""Runs of words in a tenth of the first rows that come together, if they are so many, are instructions, and do not count."""
_FEW = 64
"""Up to so many rows with the same band each meets each; of more, each meets the first so many."""


class Twin(NamedTuple):
    """A row that says what an earlier one says."""

    row: int
    earlier: int
    likeness: float
    """1 for the same text, else the share of runs of words in common."""


class Duplicates:
    """Takes rows in order, and says in the end which of them say the same.

    MinHash with bands (Broder 1997; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3), then the exact
    share of common runs for every pair that met. Rows with other numbers in them or with another answer are other
    questions, however alike their words are.
    """

    def __init__(self, near: float | None = 0.8) -> None:
        self.near = near
        self._folder = tempfile.TemporaryDirectory(prefix="covey-duplicates-")
        path = Path(self._folder.name)
        names = ["rows", "texts", "answers", "counts", "runs", *(f"band-{band}" for band in range(_BANDS))]
        self._instructions: Hashes | None = None
        self._files = {name: (path / name).open("w+b") for name in names}
        random = numpy.random.default_rng(20_240_317)
        self._factors = random.integers(1, 2**63, _BANDS * _ROWS_IN_BAND, dtype=numpy.uint64) * numpy.uint64(2) + numpy.uint64(1)  # fmt: skip

    def __enter__(self) -> Duplicates:
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # what could not be written is not wanted any more
                file.close()
        self._folder.cleanup()

    def add(
        self,
        rows: Sequence[int],
        texts: Sequence[int],
        numbers: Sequence[int],
        answers: Sequence[int],
        words: Sequence[Sequence[int]],
    ) -> None:
        """Take rows by their number, with what `same_text` and `numbers_in` say of them, their answer, and their words."""
        self._write("rows", numpy.array(rows, dtype=numpy.int64))
        self._write("texts", numpy.array(texts, dtype=numpy.uint64))
        self._write("answers", numpy.array(answers, dtype=numpy.uint64))
        if self.near is None:
            return
        runs, places = self._without_instructions(*grams(words, SHINGLE))
        counts = numpy.diff(places)
        self._write("counts", counts)
        self._write("runs", (runs >> numpy.uint64(32)).astype(numpy.uint32))
        guard = mixed(mixed(numpy.array(numbers, dtype=numpy.uint64)) + numpy.array(answers, dtype=numpy.uint64))
        has_words = counts > 0
        for band in range(_BANDS):
            keys = mixed(guard + numpy.uint64(band))
            for place in range(band * _ROWS_IN_BAND, (band + 1) * _ROWS_IN_BAND):
                stirred = (runs * self._factors[place]) >> numpy.uint64(32)
                lowest = numpy.zeros(len(counts), dtype=numpy.uint64)
                if len(runs):
                    lowest[has_words] = numpy.minimum.reduceat(stirred, places[:-1][has_words])
                keys = mixed(keys + lowest)
            self._write(f"band-{band}", keys)

    def same(self) -> Iterator[tuple[Twin, bool]]:
        """Rows with the text of an earlier row; and whether that is disputed: the text has another answer in another row.

        Of a disputed text all rows are given, each with one that answers otherwise.
        """
        rows, texts, answers = self._read("rows", "i8"), self._read("texts", "u8"), self._read("answers", "u8")
        for group in _groups(texts, numpy.arange(len(texts))):
            is_disputed = bool((answers[group] != answers[group[0]]).any())
            for index in group[0 if is_disputed else 1 :]:
                other = group[answers[group] != answers[index]][0] if is_disputed else group[0]
                yield Twin(int(rows[index]), int(rows[other]), 1.0), is_disputed

    def nearly(self) -> list[Twin]:
        """Rows that share at least `near` of their runs of words with an earlier row which is itself none of these."""
        if self.near is None:
            return []
        rows, texts = self._read("rows", "i8"), self._read("texts", "u8")
        firsts = numpy.sort(numpy.unique(texts, return_index=True)[1])
        size = max(len(rows), 1)
        met = [numpy.zeros(0, dtype=numpy.int64)]
        for band in range(_BANDS):
            keys = self._read(f"band-{band}", "u8")[firsts]
            pairs = numpy.fromiter((a * size + b for a, b in _pairs(keys, firsts)), numpy.int64)
            met.append(pairs)
        places = numpy.concatenate([[0], numpy.cumsum(self._read("counts", "i8"))])
        runs = self._mapped("runs")
        dropped: dict[int, Twin] = {}
        coded = numpy.unique(numpy.concatenate(met))
        order = numpy.lexsort((coded // size, coded % size))  # by the later row, then by the earlier
        for later, earlier in zip((coded % size)[order].tolist(), (coded // size)[order].tolist(), strict=True):
            if later in dropped or earlier in dropped:
                continue
            mine, theirs = runs[places[later] : places[later + 1]], runs[places[earlier] : places[earlier + 1]]
            likeness = jaccard(mine, theirs)
            if likeness >= (self.near if min(len(mine), len(theirs)) > _SHORT - SHINGLE else 1.0):
                dropped[later] = Twin(int(rows[later]), int(rows[earlier]), likeness)
        return list(dropped.values())

    def _without_instructions(self, runs: Hashes, places: numpy.ndarray) -> tuple[Hashes, numpy.ndarray]:
        """The runs but those that very many rows share; a row that has no others keeps them."""
        count = len(places) - 1
        owners = numpy.repeat(numpy.arange(count), numpy.diff(places))
        if self._instructions is None:
            known = numpy.unique(runs)
            self._instructions = (
                known[common_runs(runs, places, known) > _COMMON * count] if count >= _ENOUGH else known[:0]
            )
        is_own = ~numpy.isin(runs, self._instructions)
        is_bare = numpy.bincount(owners[is_own], minlength=count) == 0
        kept = is_own | is_bare[owners]
        counts = numpy.bincount(owners[kept], minlength=count)
        return runs[kept], numpy.concatenate([[0], numpy.cumsum(counts)])

    def _write(self, name: str, numbers: numpy.ndarray) -> None:
        try:
            self._files[name].write(numbers.tobytes())
        except OSError as error:
            raise StorageError(
                f"The temporary folder {self._folder.name} cannot be written ({error.strerror or error}); "
                "point TMPDIR to a disk with room, some 500 bytes a row."
            ) from error

    def _read(self, name: str, kind: str) -> numpy.ndarray:
        self._files[name].flush()
        return numpy.fromfile(Path(self._folder.name) / name, dtype=kind)

    def _mapped(self, name: str) -> numpy.ndarray:
        self._files[name].flush()
        path = Path(self._folder.name) / name
        return numpy.memmap(path, dtype=numpy.uint32, mode="r") if path.stat().st_size else numpy.zeros(0, numpy.uint32)


def jaccard(first: numpy.ndarray, second: numpy.ndarray) -> float:
    """Of all numbers in either, the share that is in both; 0 when there are none."""
    common = len(numpy.intersect1d(first, second))
    every = len(numpy.union1d(first, second))
    return common / every if every else 0.0


def _groups(keys: Hashes, indices: numpy.ndarray) -> Iterator[numpy.ndarray]:
    """The indices that share a key, in their order, for every key that more than one has."""
    order = numpy.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = numpy.concatenate([[0], numpy.flatnonzero(ordered[1:] != ordered[:-1]) + 1, [len(ordered)]])
    for place in numpy.flatnonzero(numpy.diff(starts) > 1):
        yield indices[order[starts[place] : starts[place + 1]]]


def _pairs(keys: Hashes, indices: numpy.ndarray) -> Iterator[tuple[int, int]]:
    """Pairs of indices that share a key, the earlier first."""
    for group in _groups(keys, indices):
        members = group.tolist()
        if len(members) <= _FEW:
            yield from itertools.combinations(members, 2)
        else:
            leaders = members[:_FEW]
            yield from itertools.combinations(leaders, 2)
            yield from itertools.product(leaders, members[_FEW:])
