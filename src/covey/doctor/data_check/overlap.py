"""Questions of an evaluation set that a training set has seen: runs of words that both have."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy

from covey.doctor.data_check.ngrams import Hashes, Words, common_runs, grams, number_list, same_text

_BEST = 5
"""Most questions compared closely with a row, among those that share n-grams with it."""


class Seen(NamedTuple):
    """A row that holds much of an evaluation question, or is much of one."""

    place: int
    """Index in the given sequence of rows."""
    question: int
    """The evaluation question that it shares most with."""
    share: float
    """Share of the row's words, or of the question's if that is more, in n-grams that the other has too."""
    has_numbers: bool
    """True if all numbers of one text are in the other; else it is the same question with other numbers."""


class Overlap:
    """Knows every run of `size` words of an evaluation set.

    Runs that more than ten questions and more than one in a hundred of them share are instructions, not questions, as are those
    in a tenth of the first rows; their words do not count. Texts with fewer words than a run must be the same.
    """

    def __init__(self, texts: Iterable[str], size: int, words: Words) -> None:
        self.size = size
        seen: dict[int, int] = {}
        rows = []
        self._numbers: list[Counter[str]] = []
        self._questions: list[int] = []
        for number, text in enumerate(texts):
            if seen.setdefault(same_text(text), number) == number:
                rows.append(words(text))
                self._numbers.append(Counter(number_list(text)))
                self._questions.append(number)
        runs, places = grams(rows, size)
        owners = numpy.repeat(numpy.arange(len(rows)), numpy.diff(places))
        positions = numpy.arange(len(runs)) - places[:-1][owners]
        order = numpy.lexsort((owners, runs))
        self._owners, self._positions = owners[order], positions[order]
        self._runs, self._firsts, self._counts = numpy.unique(runs[order], return_index=True, return_counts=True)
        self._is_instruction = common_runs(runs, places, self._runs) > max(10, len(rows) / 100)
        where = numpy.searchsorted(self._runs, runs)
        masks = numpy.split(self._is_instruction[where], places[1:-1]) if rows else []
        self._lengths = [
            len(row) - int(_mask(numpy.flatnonzero(mask), size, len(row)).sum())
            for row, mask in zip(rows, masks, strict=True)
        ]
        self._instructions: Hashes | None = None
        """Runs that are instructions of the rows that are asked about; known from the first of them."""

    def of(self, rows: Sequence[Sequence[int]], numbers: Sequence[Sequence[str]], least: float) -> list[Seen]:
        """Of these rows (as words, with the numbers in them), those that share at least `least` with a question."""
        if not len(self._runs):
            return []
        runs, places = grams(rows, self.size)
        if self._instructions is None:
            unique_runs = numpy.unique(runs)
            self._instructions = unique_runs[common_runs(runs, places, unique_runs) > max(20, len(rows) / 10)]
        where = numpy.minimum(numpy.searchsorted(self._runs, runs), len(self._runs) - 1)
        is_match = self._runs[where] == runs
        is_instruction = numpy.isin(runs, self._instructions) | (is_match & self._is_instruction[where])
        overlaps = []
        owners = numpy.repeat(numpy.arange(len(rows)), numpy.diff(places))
        for place in numpy.unique(owners[is_match & ~is_instruction]).tolist():
            part = slice(places[place], places[place + 1])
            length = len(rows[place])
            instruction_mask = _mask(numpy.flatnonzero(is_instruction[part]), self.size, length)
            hits = numpy.flatnonzero(is_match[part] & ~is_instruction[part])
            best = self._best(hits, where[part][hits], instruction_mask, Counter(numbers[place]), least)
            if best is not None:
                overlaps.append(Seen(place, *best))
        return overlaps

    def _best(
        self,
        hits: numpy.ndarray,
        where: numpy.ndarray,
        instruction_mask: numpy.ndarray,
        numbers: Counter[str],
        least: float,
    ) -> tuple[int, float, bool] | None:
        """The question that the row shares most with, one with its numbers first; None where none shares enough."""
        counts = self._counts[where]
        steps = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        entries = numpy.repeat(self._firsts[where], counts) + steps
        owners, starts = self._owners[entries], numpy.repeat(hits, counts)
        names, sizes = numpy.unique(owners, return_counts=True)
        best: tuple[bool, float, int] | None = None
        for owner in names[numpy.argsort(-sizes, kind="stable")[:_BEST]].tolist():
            of_owner = owners == owner
            in_row = _mask(starts[of_owner], self.size, len(instruction_mask))
            counted = int((in_row | ~instruction_mask).sum())
            ends = self._positions[entries[of_owner]]
            in_question = _mask(ends, self.size, int(ends.max()) + self.size)
            share = max(in_row.sum() / counted, min(in_question.sum() / max(self._lengths[owner], self.size), 1.0))
            theirs = self._numbers[owner]
            candidate = (not theirs - numbers or not numbers - theirs, float(share), -owner)
            if share >= least and (best is None or candidate > best):
                best = candidate
        return None if best is None else (self._questions[-best[2]], best[1], best[0])


def _mask(starts: numpy.ndarray, size: int, length: int) -> numpy.ndarray:
    """[length] bool, True for words inside one of the n-grams that start at these places."""
    edges = numpy.zeros(length + size + 1, dtype=numpy.int64)
    numpy.add.at(edges, starts, 1)
    numpy.add.at(edges, starts + size, -1)
    return numpy.cumsum(edges)[:length] > 0
