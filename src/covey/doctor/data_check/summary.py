"""Summary of an inspection, in figures and with examples, for a terminal, a page or a program."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.doctor.data_check.clean_copy import begins
from covey.doctor.data_check.findings import Findings, Kind
from covey.doctor.data_check.inspection import Inspection
from covey.doctor.data_check.rows import Record
from covey.doctor.data_check.spill import percentile

_ROWS_SHOWN = 200


@dataclass(frozen=True)
class Example:
    """A row with a fault."""

    row: int
    why: str
    begins: str
    """The first characters of its prompt."""


@dataclass(frozen=True)
class Entry:
    """A kind of fault that was found."""

    kind: Kind
    count: int
    rows: Sequence[int]
    """The first of them."""
    examples: Sequence[Example]


@dataclass(frozen=True)
class Summary:
    """Summary of all findings of an inspection."""

    source: str
    num_rows: int
    entries: Sequence[Entry]
    to_drop: int
    """Rows that cleaning would leave out."""
    to_change: int
    lengths: Mapping[str, Mapping[str, float]]
    """Quantiles of characters, and of tokens where they were counted."""
    languages: Mapping[str, int]
    """Rows by language; `?` where it is not identified."""
    notes: Sequence[str]
    findings: Findings

    @property
    def is_ok(self) -> bool:
        """True if no finding must be fixed before training."""
        return not any(entry.kind.must_be_mended for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; every finding with all its rows."""
        findings = [
            {
                "kind": entry.kind.name,
                "title": entry.kind.title,
                "must_be_mended": entry.kind.must_be_mended,
                "clean": entry.kind.action,
                "count": entry.count,
                "rows": self.findings.rows(entry.kind.name),
                "examples": [vars(example) for example in entry.examples],
                "fix": entry.kind.fix,
            }
            for entry in self.entries
        ]
        return {
            "ok": self.is_ok,
            "dataset": self.source,
            "rows": self.num_rows,
            "findings": findings,
            "would_drop": self.to_drop,
            "would_change": self.to_change,
            "lengths": self.lengths,
            "languages": self.languages,
            "notes": list(self.notes),
        }


def summary(inspection: Inspection, num_examples: int = 3) -> Summary:
    """Counts of the findings, each with its first rows as examples; the source is read again up to the last example."""
    findings = inspection.findings
    first = {}
    for kind in findings.kinds():
        first[kind.name] = list(itertools.islice(findings.of(kind.name), num_examples))
    shown = _records(inspection, {row for triples in first.values() for row, _, _ in triples})
    entries = []
    for kind in findings.kinds():
        examples = []
        for row, other, amount in first[kind.name]:
            record = shown.get(row)
            why = (
                f"is {record.fault}" if record is not None and record.fault else inspection.reason(kind, other, amount)
            )
            examples.append(Example(row, why, "" if record is None else begins(record, inspection)))
        rows = [row for row, _, _ in itertools.islice(findings.of(kind.name), _ROWS_SHOWN)]
        entries.append(Entry(kind, findings.count(kind.name), rows, examples))
    dropped = changed = 0
    for _, faults in findings.by_row():
        actions = {kind.action for kind, _, _ in faults}
        dropped += "drop" in actions
        changed += "change" in actions and "drop" not in actions
    traits = inspection.traits
    lengths = {"characters": _quantiles(traits.characters)}
    if traits.tokens:
        lengths["tokens"] = _quantiles(traits.tokens)
    languages = Counter({code or "?": count for code, count in traits.languages.items()})
    return Summary(
        inspection.rows.source,
        inspection.num_rows,
        entries,
        dropped,
        changed,
        lengths,
        dict(languages.most_common()),
        inspection.notes,
        findings,
    )


def _records(inspection: Inspection, numbers: set[int]) -> dict[int, Record]:
    records: dict[int, Record] = {}
    for record in inspection.rows if numbers else ():
        if record.number in numbers:
            records[record.number] = record
            if len(records) == len(numbers):
                break
    return records


def _quantiles(lengths: Counter[int]) -> dict[str, float]:
    if not lengths:
        return {}
    values = sorted(lengths)
    counts = [lengths[value] for value in values]
    points = {"least": 0, "p05": 5, "median": 50, "p95": 95, "most": 100}
    return {name: percentile(values, counts, point) for name, point in points.items()}
