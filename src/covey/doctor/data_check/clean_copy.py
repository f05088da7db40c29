"""A cleaned copy of a data set, with a report line for every changed row."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from covey.doctor.data_check.encoding import repaired_row
from covey.doctor.data_check.findings import Kind
from covey.doctor.data_check.inspection import Inspection
from covey.doctor.data_check.ngrams import text_of
from covey.doctor.data_check.rows import Record
from covey.errors import ConfigError, DataError, StorageError

_EXCERPT = 120
_AROUND = 30


@dataclass(frozen=True)
class Cleaned:
    """Result of a cleaning: the files written and the number of rows."""

    output: Path
    report: Path
    num_rows: int
    kept: int
    changed: int
    dropped: Mapping[str, int]
    """Rows dropped by each kind of fault, counted by a row's first fault."""


def report_of(output: Path) -> Path:
    """Path of the report of a cleaned file: `clean.report.jsonl` for `clean.jsonl`, in the same folder."""
    return output.with_name(output.name.removesuffix(".jsonl") + ".report.jsonl")


def check_output(output: Path) -> None:
    """Raise ConfigError unless the file and its report can be written, and nothing is there yet."""
    if output.suffix != ".jsonl":
        raise ConfigError(f"{output} should end in .jsonl: cleaned rows are written as JSON lines.")
    if not output.parent.is_dir():
        raise ConfigError(f"There is no folder {str(output.parent)!r} to write {output.name} to; make it first.")
    refuse_taken(output, report_of(output))


def refuse_taken(*paths: Path) -> None:
    """Raise ConfigError if one of the files is there."""
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} is there already, and nothing is overwritten; give --output another name.")


def clean(inspection: Inspection, output: Path) -> Cleaned:
    """Read the rows a second time and write the good ones, repaired where possible, in their order.

    A row that is neither dropped nor changed keeps its bytes. Both files appear when they are complete, or not at all. Raises
    ConfigError when a file is there already, DataError when the source has changed since it was inspected.
    """
    check_output(output)
    report = report_of(output)
    count = Counter[str]()
    dropped = Counter[str]()
    with appearing(output, report) as (rows, lines):
        for record, faults in _with_faults(inspection):
            count["rows"] += 1
            fatal = [kind.name for kind, _, _ in faults if kind.action == "drop"]
            if fatal:
                dropped[fatal[0]] += 1
                why = [f"is {record.fault}"] if record.row is None else _reasons(faults, "drop", inspection)
                facts = {"row": record.number, "did": "dropped", "kinds": fatal, "why": why}
                lines.write(_line({**facts, "begins": begins(record, inspection)}))
                continue
            if any(kind.action == "change" for kind, _, _ in faults):
                assert record.row is not None
                mended, _ = repaired_row(dict(record.row), inspection.settings.mended)
                changes = {"row": record.number, "did": "changed", "new_row": count["kept"]}
                changes |= {"why": _reasons(faults, "change", inspection), "columns": _differences(record.row, mended)}
                lines.write(_line(changes))
                rows.write(_line(mended))
                count["changed"] += 1
            else:
                rows.write(_line(record.row) if record.line is None else record.line + b"\n")
            count["kept"] += 1
        if count["rows"] != inspection.num_rows:
            raise DataError(
                f"{inspection.rows.source} had {inspection.num_rows} rows and now has {count['rows']}; clean it when nothing writes to it."
            )
    return Cleaned(output, report, count["rows"], count["kept"], count["changed"], dict(dropped))


def _with_faults(inspection: Inspection) -> Iterator[tuple[Record, list[tuple[Kind, int, float]]]]:
    faulty_rows = inspection.findings.by_row()
    row, faults = next(faulty_rows, (-1, []))
    for record in inspection.rows:
        if record.number == row:
            yield record, faults
            row, faults = next(faulty_rows, (-1, []))
        else:
            yield record, []


def _reasons(faults: list[tuple[Kind, int, float]], action: str, inspection: Inspection) -> list[str]:
    return [inspection.reason(kind, other, amount) for kind, other, amount in faults if kind.action == action]


def begins(record: Record, inspection: Inspection) -> str:
    """The first characters of a row's prompt, or of its line where it has none."""
    text = text_of((record.row or {}).get(inspection.settings.prompt_column))
    if not text:
        text = (record.line or b"").decode("utf-8", "replace") or json.dumps(record.row, default=str)
    plain = " ".join(text[: 4 * _EXCERPT].split())
    return plain[:_EXCERPT].encode("utf-8", "replace").decode()


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, str]]:
    """Text around the first change of each changed column, before and after."""
    differences = []
    for name, old in before.items():
        first, second = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            for value in (old, after[name])
        )
        if first != second:
            signs = enumerate(zip(first, second, strict=False))
            place = next((place for place, (char, other) in signs if char != other), min(len(first), len(second)))
            start = max(place - _AROUND, 0)
            old_part, new_part = first[start : place + _AROUND], second[start : place + _AROUND]
            differences.append({"column": name, "before": old_part, "after": new_part})
    return differences  # fmt: skip


def _line(row: Any) -> bytes:
    text = json.dumps(row, ensure_ascii=False, default=_refuse)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # halves of characters, in a report of them
        return json.dumps(row, default=_refuse).encode("utf-8") + b"\n"


def _refuse(value: Any) -> Any:
    raise DataError(
        f"A row holds a {type(value).__name__}, which JSON lines cannot hold; turn that column into text or numbers first."
    )


@contextmanager
def appearing(*paths: Path) -> Iterator[Sequence[IO[bytes]]]:
    """Files to write to that have their names only once all are complete; never in the place of another."""
    partial = [path.with_name(f".{path.name}.{os.getpid()}.partial") for path in paths]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(unfinished.open("xb")) for unfinished in partial]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        # the rows last: where they are, all is
        for path, unfinished in zip(reversed(paths), reversed(partial), strict=True):
            _place(unfinished, path)
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename2 or error.filename} is there already, and nothing is overwritten."
        ) from error
    except OSError as error:
        raise StorageError(f"{paths[0]} cannot be written: {error.strerror or error}.") from error
    finally:
        for unfinished in partial:
            unfinished.unlink(missing_ok=True)


def _place(partial: Path, path: Path) -> None:
    """Give a file its name, in one step and never another file's. Where a file cannot have two names, in two steps."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:
        path.touch(exist_ok=False)
        partial.replace(path)
