"""A data set read once, row by row, and everything that is wrong with it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from covey.cleaning.duplicates import Duplicates
from covey.cleaning.encoding import knows_mojibake, repaired
from covey.cleaning.findings import Findings, Kind
from covey.cleaning.grams import Words, number_list, numbers_in, same_text, text_of
from covey.cleaning.look import LONGEST_VALUE, Looked, Looker, Traits, answer_of
from covey.cleaning.overlap import Overlap
from covey.cleaning.rows import Record, Rows
from covey.cleaning.settings import Settings
from covey.errors import DataError, did_you_mean

_BATCH = 1000
_MOSTLY = 0.9
"""The share of rows from which the others are the odd ones."""
_NEAR, _NEAR_WITH_ANSWER = 0.8, 0.6
_TELLING = 0.1
"""Distinct answers a row from which an answer tells questions apart."""
_FEWEST = 20
"""Rows below which nothing is said about what is usual."""


@dataclass(frozen=True)
class Inspection:
    """What was looked at and what was found."""

    rows: Rows
    settings: Settings
    num_rows: int
    answer_column: str | None
    findings: Findings
    traits: Traits
    notes: Sequence[str]
    """What was not looked at, and why."""
    evaluation: Sequence[tuple[str, int]]
    """Each evaluation set, with the number that its row 0 has in the findings."""

    def reason(self, kind: Kind, other: int, amount: float) -> str:
        """Why a row was found, as the end of "row 7 ..."."""
        name = f"row {other}"
        if kind.name in ("contaminated", "akin"):
            source, start = max((one for one in self.evaluation if one[1] <= other), key=lambda one: one[1])
            name = f"row {other - start} of {source}"
        return kind.reason(name, amount)


def inspect(rows: Rows, settings: Settings) -> Inspection:
    """Read all rows and find what is wrong with them.

    Memory grows by about 150 bytes a row, not by the rows' size. Raises DataError when there are no rows, or no row has the
    prompt's column, or none the answer's column that `settings` names.
    """
    settings.check_against(rows.source)
    findings, traits, words, notes = Findings(), Traits(), Words(), []
    batches = _batches(iter(rows))
    first = next(batches, [])
    answer_column = _answer_column(first, settings, rows.source)
    sets, evaluation = _evaluation_sets(settings, words)
    looker = Looker(settings, answer_column, findings, traits)
    count = 0
    with Duplicates(_near(first, settings, answer_column)) as duplicates:
        for batch in itertools.chain([first], batches):
            count += len(batch)
            looked = _look(batch, looker, findings)
            of_words = [words(one.text) for one in looked]
            duplicates.add(
                [one.row for one in looked],
                [same_text(one.text) for one in looked],
                [numbers_in(one.text) for one in looked],
                [one.answer for one in looked],
                of_words,
            )
            _hold_against(sets, evaluation, looked, of_words, settings.overlap, findings)
        _compare(duplicates, findings)
    _odd_ones(traits, settings, findings)
    for kind in settings.ignore:
        findings.drop(kind)
    if not knows_mojibake():
        notes.append("Text in the wrong encoding was not looked for: pip install 'covey[data]'.")
    if answer_column is None:
        notes.append("The rows have no column 'answer' or 'solution'; --answer-column names another.")
    if not settings.against:
        notes.append("Not held against an evaluation set; --against names one.")
    if settings.tokenizer is None:
        notes.append("Lengths in tokens were not looked at; --tokenizer and --max-prompt-length do.")
    return Inspection(rows, settings, count, answer_column, findings, traits, notes, evaluation)


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(itertools.islice(records, _BATCH)):
        yield batch


def _answer_column(first: Sequence[Record], settings: Settings, name: str) -> str | None:
    """The column of answers, None when there is none; the columns that were named must be there."""
    if not first:
        raise DataError(f"{name} has no rows.")
    columns = list(dict.fromkeys(column for one in first for column in one.row or ()))
    if not columns:
        raise DataError(f"The first {len(first)} rows of {name} cannot be read: row 0 is {first[0].fault}.")
    for option, column in (("--prompt-column", settings.prompt_column), ("--answer-column", settings.answer_column)):
        if column is not None and column not in columns:
            near = did_you_mean(column, columns) or f" Name one of them with {option}."
            raise DataError(f"{name} has no column {column!r}; it has {', '.join(columns)}.{near}")
    if settings.answer_column is not None:
        return settings.answer_column
    return next((column for column in ("answer", "solution") if column in columns), None)


def _near(first: Sequence[Record], settings: Settings, answer_column: str | None) -> float | None:
    """The share from which prompts are near duplicates: less is enough where the same answer is itself a sign."""
    if settings.near is not None:
        return settings.near or None
    answers = [answer_of(record.row or {}, answer_column) for record in first]
    values = [answer for answer in answers if answer and len(answer) <= LONGEST_VALUE]
    is_telling = settings.answers != "text" and len(set(values)) >= max(_FEWEST, _TELLING * len(first))
    return _NEAR_WITH_ANSWER if is_telling else _NEAR


def _evaluation_sets(settings: Settings, words: Words) -> tuple[list[Overlap], list[tuple[str, int]]]:
    sets, starts, count = [], [], 0
    for source in settings.against:
        texts = []
        for record in Rows(source):
            row = record.row or {}
            prompt = row.get(settings.against_column or settings.prompt_column)
            texts.append(repaired(text_of(row.get("prompt") if prompt is None else prompt))[0])
        if not any(texts):
            raise DataError(
                f"The evaluation set {source} has no text in its column "
                f"{settings.against_column or settings.prompt_column!r}; name the right one with --against-column."
            )
        sets.append(Overlap(texts, settings.gram, words))
        starts.append((source, count))
        count += len(texts)
    return sets, starts


def _look(batch: Sequence[Record], looker: Looker, findings: Findings) -> list[Looked]:
    looked = []
    for record in batch:
        if record.row is None:
            findings.add("unreadable", record.number)
            continue
        one = looker.look(record.number, record.row)
        if one is not None:
            looked.append(one)
    return looked


def _hold_against(
    sets: Sequence[Overlap],
    evaluation: Sequence[tuple[str, int]],
    looked: Sequence[Looked],
    of_words: Sequence[Sequence[int]],
    least: float,
    findings: Findings,
) -> None:
    numbers = [number_list(one.text) for one in looked] if sets else []
    found: dict[int, tuple[bool, float, int]] = {}
    for overlap, (_, start) in zip(sets, evaluation, strict=True):
        for seen in overlap.of(of_words, numbers, least):
            one = (seen.has_numbers, seen.share, start + seen.question)
            found[seen.place] = max(found.get(seen.place, one), one, key=lambda one: one[:2])
    for place, (has_numbers, share, question) in sorted(found.items()):
        findings.add("contaminated" if has_numbers else "akin", looked[place].row, question, share)


def _compare(duplicates: Duplicates, findings: Findings) -> None:
    for twin, is_disputed in duplicates.same():
        findings.add("disputed" if is_disputed else "duplicate", twin.row, twin.earlier, twin.likeness)
    for twin in duplicates.nearly():
        findings.add("near_duplicate", twin.row, twin.earlier, twin.likeness)


def _odd_ones(traits: Traits, settings: Settings, findings: Findings) -> None:
    """Rows that are not as nearly all others are."""
    rows, kinds = numpy.array(traits.rows), numpy.array(traits.answers)
    has_answer = int((kinds >= 0).sum())
    is_number_set = has_answer >= _FEWEST and (kinds == 1).sum() >= _MOSTLY * has_answer
    if settings.answers == "number" or (settings.answers == "auto" and is_number_set):
        for row in rows[kinds == 0].tolist():
            findings.add("odd_answer", row)
    known = Counter(code for code in traits.languages if code is not None)
    if sum(known.values()) >= _FEWEST and known.most_common(1)[0][1] >= _MOSTLY * sum(known.values()):
        usual = known.most_common(1)[0][0]
        for row, code in zip(traits.rows, traits.languages, strict=True):
            if code not in (None, usual):
                findings.add("language", row)
    if len(rows) >= _FEWEST:
        logs = numpy.log(numpy.maximum(numpy.array(traits.characters), 1))
        middle = float(numpy.median(logs))
        spread = 1.4826 * float(numpy.median(numpy.abs(logs - middle)))
        far = numpy.abs(logs - middle) > max(6 * spread, float(numpy.log(4)))
        for place in numpy.flatnonzero(far).tolist():
            findings.add("length", int(rows[place]), amount=traits.characters[place])
