"""Duplicate rows, exact or near. The index is on disk, except for two bytes a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from covey.doctor.data_check import spill
from covey.doctor.data_check.ngrams import Hashes, common_runs, grams, mixed
from covey.doctor.data_check.spill import Spill

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
_BLOCKS = 4096
"""Parts of the rows by which pairs are counted, so that those of some rows can be taken at a time."""


class Twin(NamedTuple):
    """A row that duplicates an earlier one."""

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
        self._rows = Spill([("row", "<i8"), ("text", "<u8"), ("answer", "<u8")])
        self._places, self._runs = Spill("<i8"), Spill("<u4")
        self._bands = [Spill("<u8") for _ in range(_BANDS)]
        self._instructions: Hashes | None = None
        random = numpy.random.default_rng(20_240_317)
        self._factors = random.integers(1, 2**63, _BANDS * _ROWS_IN_BAND, dtype=numpy.uint64) * numpy.uint64(2) + numpy.uint64(1)  # fmt: skip

    def close(self) -> None:
        """Give its files up."""
        for store in (self._rows, self._places, self._runs, *self._bands):
            store.close()

    def add(
        self,
        rows: Sequence[int],
        texts: Sequence[int],
        numbers: Sequence[int],
        answers: Sequence[int],
        words: Sequence[Sequence[int]],
    ) -> None:
        """Take rows by their number, with what `same_text` and `numbers_in` say of them, their answer, and their words."""
        taken = numpy.zeros(len(rows), self._rows.kind)
        taken["row"], taken["text"], taken["answer"] = rows, numpy.array(texts, "u8"), numpy.array(answers, "u8")
        self._rows.extend(taken)
        if self.near is None:
            return
        runs, places = self._without_instructions(*grams(words, SHINGLE))
        counts = numpy.diff(places)
        self._places.extend(len(self._runs) + places[:-1])
        self._runs.extend((runs >> numpy.uint64(32)).astype(numpy.uint32))
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
            self._bands[band].extend(keys)

    def same(self) -> Iterator[tuple[Twin, bool]]:
        """Rows with the text of an earlier row; and whether that is disputed: the text has another answer in another row.

        Of a disputed text all rows are given, each with one that answers otherwise.
        """
        for _, part in self._rows.by_hash("text"):
            rows, answers = part["row"], part["answer"]
            for group in _groups(part["text"], numpy.arange(len(part))):
                is_disputed = bool((answers[group] != answers[group[0]]).any())
                for index in group[0 if is_disputed else 1 :]:
                    other = group[answers[group] != answers[index]][0] if is_disputed else group[0]
                    yield Twin(int(rows[index]), int(rows[other]), 1.0), is_disputed

    def nearly(self) -> Iterator[Twin]:
        """Rows that share at least `near` of their runs of words with an earlier row which is itself none of these."""
        if self.near is None or not len(self._rows):
            return
        size = len(self._rows)
        if len(self._places) == size:
            self._places.add(len(self._runs))
        is_dropped = numpy.zeros(size, dtype=bool)
        for pair in self._met(size):
            later, earlier = divmod(pair, size)
            if is_dropped[later] or is_dropped[earlier]:
                continue
            mine, theirs = self._runs_of(later), self._runs_of(earlier)
            likeness = jaccard(mine, theirs)
            if likeness >= (self.near if min(len(mine), len(theirs)) > _SHORT - SHINGLE else 1.0):
                is_dropped[later] = True
                yield Twin(self._row(later), self._row(earlier), likeness)

    def _met(self, size: int) -> Iterator[int]:
        """Pairs that share a band, as `later * size + earlier`, ascending, each once; of rows whose text comes first."""
        is_first = numpy.zeros(size, dtype=bool)
        for places, part in self._rows.by_hash("text"):
            is_first[places[numpy.unique(part["text"], return_index=True)[1]]] = True
        met, block = Spill("<u8"), -(-size // _BLOCKS)
        counts = numpy.zeros(_BLOCKS + 1, dtype=numpy.int64)
        for band in self._bands:
            for places, keys in band.by_hash():
                mask = is_first[places]
                pairs = (later * size + earlier for earlier, later in _pairs(keys[mask], places[mask]))
                while len(part := numpy.fromiter(itertools.islice(pairs, spill.AT_ONCE), numpy.uint64)):
                    met.extend(part)
                    counts += numpy.bincount(part // numpy.uint64(size * block), minlength=len(counts))
        low = 0
        while low < _BLOCKS:  # as many blocks as have pairs for one part, at least one
            high = low + 1
            while high < _BLOCKS and counts[low : high + 1].sum() <= spill.AT_ONCE:
                high += 1
            if counts[low:high].any():
                yield from numpy.unique(met.within(low * block * size, high * block * size)[1]).tolist()
            low = high

    def _runs_of(self, place: int) -> numpy.ndarray:
        return self._runs.read(*self._places.read(place, place + 2).tolist())

    def _row(self, place: int) -> int:
        return int(self._rows.read(place, place + 1)["row"][0])

    def _without_instructions(self, runs: Hashes, places: numpy.ndarray) -> tuple[Hashes, numpy.ndarray]:
        """The runs but those that very many rows share; a row that has no others keeps them."""
        count = len(places) - 1
        owners = numpy.repeat(numpy.arange(count), numpy.diff(places))
        if self._instructions is None:
            unique_runs = numpy.unique(runs)
            self._instructions = (
                unique_runs[common_runs(runs, places, unique_runs) > _COMMON * count]
                if count >= _ENOUGH
                else unique_runs[:0]
            )
        is_distinctive = ~numpy.isin(runs, self._instructions)
        is_bare = numpy.bincount(owners[is_distinctive], minlength=count) == 0
        mask = is_distinctive | is_bare[owners]
        counts = numpy.bincount(owners[mask], minlength=count)
        return runs[mask], numpy.concatenate([[0], numpy.cumsum(counts)])


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
