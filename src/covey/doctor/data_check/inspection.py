"""A data set read once, row by row, and everything that is wrong with it."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy

from covey.doctor.data_check.duplicates import Duplicates
from covey.doctor.data_check.encoding import knows_mojibake, repaired
from covey.doctor.data_check.findings import Findings, Kind
from covey.doctor.data_check.languages import knows_many
from covey.doctor.data_check.ngrams import Words, number_list, numbers_in, same_text, text_of
from covey.doctor.data_check.overlap import Overlap
from covey.doctor.data_check.row_checks import LONGEST_VALUE, Looked, Looker, Traits, answer_of
from covey.doctor.data_check.rows import Record, Rows
from covey.doctor.data_check.settings import Settings
from covey.doctor.data_check.spill import median
from covey.errors import DataError, did_you_mean
from covey.process.counting import tell

_BATCH = 1000
_MOSTLY = 0.9
"""The share of rows from which the others are the odd ones."""
_NEAR, _NEAR_WITH_ANSWER = 0.8, 0.6
_TELLING = 0.1
"""Distinct answers per row from which answers count as evidence that two questions differ."""
_FEWEST = 20
"""Fewest rows for statements about outliers."""


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection: the rows, the settings and the findings."""

    rows: Rows
    settings: Settings
    num_rows: int
    answer_column: str | None
    findings: Findings
    traits: Traits
    notes: Sequence[str]
    """Checks that were skipped, and why."""
    evaluation: Sequence[tuple[str, int]]
    """Each evaluation set, with the number that its row 0 has in the findings."""

    def reason(self, kind: Kind, other: int, amount: float) -> str:
        """Reason for a finding, as the end of "row 7 ..."."""
        name = f"row {other}"
        if kind.name in ("contaminated", "akin"):
            source, start = max((entry for entry in self.evaluation if entry[1] <= other), key=lambda entry: entry[1])
            name = f"row {other - start} of {source}"
        return kind.reason(name, amount)


def inspect(rows: Rows, settings: Settings) -> Inspection:
    """Read all rows and find their faults.

    The index of rows lies on disk; memory holds two bytes a row and grows no further. Raises DataError when there are no rows, or no row has the
    prompt's column, or none the answer's column that `settings` names.
    """
    settings.check_evaluation_sets(rows.source)
    findings, traits, words, notes = Findings(), Traits(), Words(), []
    batches = _batches(iter(rows))
    first = next(batches, [])
    answer_column = _answer_column(first, settings, rows.source)
    sets, evaluation = _evaluation_sets(settings, words)
    looker = Looker(settings, answer_column, findings, traits)
    count, total = 0, rows.expected
    with closing(Duplicates(_near(first, settings, answer_column))) as duplicates:
        for batch in itertools.chain([first], batches):
            count += len(batch)
            looked = _look(batch, looker, findings)
            of_words = [words(item.text) for item in looked]
            duplicates.add(
                [item.row for item in looked],
                [same_text(item.text) for item in looked],
                [numbers_in(item.text) for item in looked],
                [item.answer for item in looked],
                of_words,
            )
            _compare_with_evaluation(sets, evaluation, looked, of_words, settings.overlap, findings)
            tell("rows", count, total)
        for twin, is_disputed in duplicates.same():
            findings.add("disputed" if is_disputed else "duplicate", twin.row, twin.earlier, twin.likeness)
        for twin in duplicates.nearly():
            findings.add("near_duplicate", twin.row, twin.earlier, twin.likeness)
    _odd_ones(traits, settings, findings)
    for kind in settings.ignore:
        findings.drop(kind)
    if not knows_mojibake():
        notes.append("Text in the wrong encoding was not looked for: pip install 'covey[data]'.")
    if answer_column is None:
        notes.append("The rows have no column 'answer' or 'solution'; --answer-column names another.")
    if not settings.against:
        notes.append("Not compared with an evaluation set: --against names one.")
    if settings.tokenizer is None:
        notes.append("Lengths in tokens were not checked: give --tokenizer and --max-prompt-length.")
    if not knows_many() and traits.languages[None]:
        notes.append("Sixteen languages were looked for; pip install 'covey[data]' brings py3langid, which knows 97.")
    return Inspection(rows, settings, count, answer_column, findings, traits, notes, evaluation)


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(itertools.islice(records, _BATCH)):
        yield batch


def _answer_column(first: Sequence[Record], settings: Settings, name: str) -> str | None:
    """The column of answers, None when there is none; the columns that were named must be there."""
    if not first:
        raise DataError(f"{name} has no rows.")
    columns = list(dict.fromkeys(column for record in first for column in record.row or ()))
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
        item = looker.look(record.number, record.row)
        if item is not None:
            looked.append(item)
    return looked


def _compare_with_evaluation(
    sets: Sequence[Overlap],
    evaluation: Sequence[tuple[str, int]],
    looked: Sequence[Looked],
    of_words: Sequence[Sequence[int]],
    least: float,
    findings: Findings,
) -> None:
    numbers = [number_list(item.text) for item in looked] if sets else []
    best: dict[int, tuple[bool, float, int]] = {}
    for overlap, (_, start) in zip(sets, evaluation, strict=True):
        for seen in overlap.of(of_words, numbers, least):
            candidate = (seen.has_numbers, seen.share, start + seen.question)
            best[seen.place] = max(best.get(seen.place, candidate), candidate, key=lambda match: match[:2])
    for place, (has_numbers, share, question) in sorted(best.items()):
        findings.add("contaminated" if has_numbers else "akin", looked[place].row, question, share)


def _odd_ones(traits: Traits, settings: Settings, findings: Findings) -> None:
    """Rows that are not as nearly all others are."""
    wants_numbers = settings.answers == "number" or (settings.answers == "auto" and _are_numbers(traits))
    languages = Counter({code: count for code, count in traits.languages.items() if code is not None})
    usual = languages.most_common(1)[0] if sum(languages.values()) >= _FEWEST else ("", 0)
    codes = numpy.array(
        [usual[1] >= _MOSTLY * languages.total() and code not in (None, usual[0]) for code in traits.codes]
    )
    far = _far(traits.characters)
    for _, part in traits.rows.chunks():
        odd = part["answer"] == 0 if wants_numbers else numpy.zeros(len(part), bool)
        for row in part["row"][odd].tolist():
            findings.add("odd_answer", row)
        for row in part["row"][codes[part["language"]]].tolist():
            findings.add("language", row)
        for row, characters in part[["row", "characters"]][numpy.isin(part["characters"], far)].tolist():
            findings.add("length", row, amount=characters)


def _are_numbers(traits: Traits) -> bool:
    """True if nearly all answers are numbers."""
    count = Counter[int]()
    for _, part in traits.rows.chunks():
        count.update(Counter(part["answer"].tolist()))
    has_answer = count[0] + count[1]
    return has_answer >= _FEWEST and count[1] >= _MOSTLY * has_answer


def _far(characters: Counter[int]) -> list[int]:
    """The lengths that are far from the usual one: six times the median distance from it, and four times longer or shorter."""
    if characters.total() < _FEWEST:
        return []
    lengths = numpy.array(sorted(characters))
    counts = numpy.array([characters[length] for length in lengths.tolist()])
    logs = numpy.log(numpy.maximum(lengths, 1))
    middle = median(logs, counts)
    distances = numpy.abs(logs - middle)
    spread = 1.4826 * median(distances, counts)
    return list(lengths[distances > max(6 * spread, float(numpy.log(4)))].tolist())
