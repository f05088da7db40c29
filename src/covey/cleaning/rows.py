"""Rows of a data set, one at a time, with those that cannot be read. JSON lines are kept as they are written."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import DataError

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
        found = self._lines() if self.file is not None else self._opened()
        for record in found:
            if self.limit is not None and record.number >= self.limit:
                return
            yield record

    @property
    def file(self) -> Path | None:
        """The JSON lines file that is read line by line; None for other sources."""
        path = Path(self.source).expanduser()
        name = path.name.lower().removesuffix(".gz")
        return path if name.endswith(_LINES) and path.is_file() else None

    def _lines(self) -> Iterator[Record]:
        assert self.file is not None
        number = 0
        with gzip.open(self.file) if self.file.suffix.lower() == ".gz" else self.file.open("rb") as lines:
            for line in _whole(lines, self.source):
                if line.strip():
                    yield _read(number, line.rstrip(b"\r\n"))
                    number += 1

    def _opened(self) -> Iterator[Record]:
        from covey.data.loading import parted
        from covey.data.sources import opened

        source, split = parted(self.source, None)
        for number, row in enumerate(opened(source, split, True, None)):
            yield Record(number, row)


def _whole(lines: Iterable[bytes], source: str) -> Iterator[bytes]:
    """The lines; a file that breaks off or cannot be read is named."""
    try:
        yield from lines
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
