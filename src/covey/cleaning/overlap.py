"""Questions of an evaluation set that a training set has seen: runs of words that both have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy

from covey.cleaning.grams import Words, grams, same_text


class Seen(NamedTuple):
    """A row that holds much of an evaluation question."""

    place: int
    """In the sequence of rows that was asked about."""
    question: int
    """The evaluation question that it shares most with."""
    share: float
    """Of the row's words, those in runs that an evaluation question has too."""


class Overlap:
    """Knows every run of `size` words of an evaluation set.

    Runs that more than ten questions and more than one in a hundred of them share are instructions, not questions; their words
    do not count. Texts with fewer words than a run must be the same.
    """

    def __init__(self, texts: Iterable[str], size: int, words: Words) -> None:
        self.size = size
        seen: dict[int, int] = {}
        rows = []
        self.questions: list[int] = []
        """The number of the row that each question was first seen in."""
        for number, text in enumerate(texts):
            if seen.setdefault(same_text(text), number) == number:
                rows.append(words(text))
                self.questions.append(number)
        self.count = len(rows)
        runs, places = grams(rows, size)
        owners = numpy.repeat(numpy.arange(len(rows)), numpy.diff(places))
        order = numpy.lexsort((owners, runs))
        runs, owners = runs[order], owners[order]
        is_new = numpy.concatenate([[True], (runs[1:] != runs[:-1]) | (owners[1:] != owners[:-1])])[: len(runs)]
        runs, owners = runs[is_new], owners[is_new]
        self._runs, first, counts = numpy.unique(runs, return_index=True, return_counts=True)
        self._owners = owners[first]
        self._is_instruction = counts > max(10, len(rows) / 100)

    def of(self, rows: Sequence[Sequence[int]], least: float) -> list[Seen]:
        """Of these rows (as words), those of which at least the share `least` is in the evaluation set."""
        if not len(self._runs):
            return []
        runs, places = grams(rows, self.size)
        where = numpy.minimum(numpy.searchsorted(self._runs, runs), len(self._runs) - 1)
        is_known = self._runs[where] == runs
        found = []
        owners = numpy.repeat(numpy.arange(len(rows)), numpy.diff(places))
        for place in numpy.unique(owners[is_known]).tolist():
            start, end = places[place], places[place + 1]
            hits = numpy.flatnonzero(is_known[start:end])
            one = self._one(place, len(rows[place]), hits, where[start:end][hits])
            if one is not None and one.share >= least:
                found.append(one)
        return found

    def _one(self, place: int, length: int, hits: numpy.ndarray, where: numpy.ndarray) -> Seen | None:
        told = self._is_instruction[where]
        instruction, covered = _mask(hits[told], self.size, length), _mask(hits[~told], self.size, length)
        if not covered.any():
            return None
        counted = length - int((instruction & ~covered).sum())
        question = int(numpy.bincount(self._owners[where[~told]]).argmax())
        return Seen(place, self.questions[question], float(covered.sum()) / counted)


def _mask(starts: numpy.ndarray, size: int, length: int) -> numpy.ndarray:
    """[length] whether a word lies in one of the runs that start there."""
    edges = numpy.zeros(length + size + 1, dtype=numpy.int64)
    numpy.add.at(edges, starts, 1)
    numpy.add.at(edges, starts + size, -1)
    return numpy.cumsum(edges)[:length] > 0
