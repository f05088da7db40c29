"""Rows of a data set, one at a time, with those that cannot be read. JSON lines are kept as they are written."""

import codecs
import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

from covey.errors import DataError, message_of
from covey.files.bounded import LONGEST_LINE

_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Record:
    """A row, or why there is none."""

    number: int
    """Counting from 0; blank lines do not count."""
    row: Mapping[str, Any] | None
    fault: str = ""
    line: bytes | None = None
    """The row as its file writes it, without the end of the line; None where it does not come from JSON lines."""


@dataclass(frozen=True)
class Rows:
    """All rows of a source, as often as they are asked for."""

    source: str
    """A file, a folder, a glob or a hub id, with `:split` if need be."""
    limit: int | None = None

    def __iter__(self) -> Iterator[Record]:
        for record in self._lines() if self.files else self._opened():
            if self.limit is not None and record.number >= self.limit:
                return
            yield record

    @property
    def expected(self) -> int | None:
        """Estimated number of rows: the lines of plain files; None where it would need a full read."""
        if not self.files or any(file.suffix.lower() == ".gz" for file in self.files):
            return self.limit
        count, is_open = 0, False
        for file in self.files:
            with file.open("rb") as content:
                while part := content.read(1 << 20):
                    count += part.count(b"\n")
                    is_open = not part.endswith(b"\n")
            count += is_open if file.stat().st_size else 0
        return count if self.limit is None else min(count, self.limit)

    @property
    def files(self) -> tuple[Path, ...]:
        """The JSON lines files that are read line by line; none for other sources."""
        path = Path(self.source).expanduser()
        is_pattern = glob.has_magic(self.source) and not path.exists()
        paths = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))] if is_pattern else [path]
        are_lines = all(path.name.lower().removesuffix(".gz").endswith(_LINES) and path.is_file() for path in paths)
        return tuple(paths) if are_lines else ()

    def _lines(self) -> Iterator[Record]:
        number = 0
        for file in self.files:
            with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as lines:
                for line in _whole(lines, str(file)):
                    if line.strip():
                        yield _read(number, line.rstrip(b"\r\n"))
                        number += 1

    def _opened(self) -> Iterator[Record]:
        from datasets.exceptions import DatasetsError

        from covey.data.loading import parted
        from covey.data.sources import opened, quiet

        source, split = parted(self.source, None)
        number = -1
        rows = iter(opened(source, split, True, None))
        try:
            with quiet():  # datasets logs an unreadable file, which is told below
                for number, row in enumerate(rows):
                    yield Record(number, row)
        except (ValueError, TypeError, OSError, NotImplementedError, DatasetsError) as error:
            if isinstance(error, DataError):
                raise
            reason = message_of(error) or type(error).__name__
            where = f"after row {number}" if number >= 0 else "at all"
            raise DataError(f"{self.source} cannot be read {where}: {reason.rstrip('.')}.") from error


def _whole(lines: gzip.GzipFile | BufferedReader, source: str) -> Iterator[bytes]:
    """The lines; a file that breaks off, cannot be read or holds an endless line is named."""
    try:
        for number in count(1):
            if not (line := lines.readline(LONGEST_LINE + 1)):
                return
            if len(line) > LONGEST_LINE:
                raise DataError(f"{source}, line {number} is longer than {LONGEST_LINE >> 20} MiB; a row is one line.")
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} cannot be read to its end: {error}.") from error


def _read(number: int, line: bytes) -> Record:
    line = line.removeprefix(codecs.BOM_UTF8)
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(number, None, f"not UTF-8 ({error.reason} at byte {error.start})", line)
    except (ValueError, RecursionError) as error:
        return Record(number, None, f"not JSON ({error})", line)
    if not isinstance(row, dict):
        return Record(number, None, f"a JSON {type(row).__name__}, not an object", line)
    return Record(number, row, line=line)
