"""A log of one JSON object a line: appended whole, readable while it grows, and never a reason for training to stop."""

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from covey.errors import RunFolderError
from covey.runs.storage import NotPlainError, open_plain, refusal, write_atomically

NON_FINITE = "non_finite"
"""The key under which a line names its NaN and infinite values: JSON has no word for them, so they are written as null."""
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_WAITING = 10_000
_LONGEST_LINE = 8 << 20
"""Bytes; a longer line is no row."""


class JsonLines:
    """Appends to `metrics.jsonl` or `alerts.jsonl`. A disk that refuses is one warning; the lines wait and follow later.

    Each line goes to the operating system in one piece before `append` returns, so a killed process loses none.
    A line that a power failure tore is removed when the file is opened again. A file that was deleted or moved away in the middle of a
    run is written again whole: it stays open, so what it held can still be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        self._descriptor: int | None = None
        """Of the file as it was last written or truncated."""
        self._is_refused = False
        self._lost = 0
        """Lines that waited beyond the limit, since the disk refused."""
        self._mend()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line. Values: numbers (0-d tensors too), text, None, lists and mappings of them; TypeError otherwise."""
        self._waiting.append(line_of(row))
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            self._refused(error)
            return
        self._waiting.clear()
        if self._is_refused:
            lost = f"the oldest {self._lost} of those that waited are lost" if self._lost else "no line was lost"
            warnings.warn(f"{self.path} can be written again; {lost}.", stacklevel=3)
            self._is_refused, self._lost = False, 0

    def truncate_to(self, step: int) -> int:
        """Drop every line of a later step, before a run resumes from `step`; how many were dropped from the file."""
        self._waiting = [line for line in self._waiting if not _is_after(line, step)]
        lines = self._content().splitlines(keepends=True)
        remaining = [line for line in lines if not _is_after(line, step)]
        if len(remaining) < len(lines):
            write_atomically(self.path, b"".join(remaining))
        self._keep_open(open_plain(self.path) if lines else None)
        return len(lines) - len(remaining)

    def restore(self) -> bool:
        """Write the lines so far again where the file is gone or an earlier copy has replaced it. OSError when the disk refuses.

        False, with a warning, where they can no longer be read.
        """
        if self._descriptor is None:
            return True
        try:
            with open(self._descriptor, "rb", closefd=False) as file:
                file.seek(0)
                lines = file.read()
        except OSError as error:  # a network disk whose file another machine has deleted
            self._keep_open(None)
            warnings.warn(
                f"The lines of {self.path} so far are lost ({error.strerror}); later ones follow.", stacklevel=4
            )
            return False
        content = self._content()
        if len(content) < len(lines) and lines.startswith(content):
            write_atomically(self.path, lines)
        return True

    def sync(self) -> None:
        """Bring the file to the disk, so that a checkpoint is never ahead of its metrics after a power failure.

        Lines that wait are written first, where there is room now.
        """
        if self._waiting:
            self._write_waiting()
        try:
            descriptor = open_plain(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            self._refused(error)
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._refused(error)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """`sync`, and a warning that counts the lines for which there never was room."""
        self.sync()
        if missing := len(self._waiting) + self._lost:
            warnings.warn(
                f"{missing} lines of {self.path} are lost: the disk took no more until the end.", stacklevel=2
            )
            self._waiting, self._lost = [], 0
        self._keep_open(None)

    def _write(self, content: bytes) -> None:
        """All of `content`, or none of it and OSError."""
        descriptor = self._opened()
        size = os.fstat(descriptor).st_size
        try:
            for start in range(0, len(content), 1 << 20):
                chunk = content[start : start + (1 << 20)]
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        finally:
            self._keep_open(descriptor)

    def _opened(self) -> int:
        """Descriptor to append with, of a file that is made or, where it was there before, restored."""
        flags = os.O_RDWR | os.O_APPEND
        if self._descriptor is None:
            return open_plain(self.path, flags | os.O_CREAT)
        try:
            return open_plain(self.path, flags)
        except FileNotFoundError:
            if self.restore():
                warnings.warn(
                    f"{self.path} was deleted or moved in the middle of the run; its lines are written again.",
                    stacklevel=4,
                )
            return open_plain(self.path, flags | os.O_CREAT)

    def _keep_open(self, descriptor: int | None) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = descriptor

    def _refused(self, error: OSError) -> None:
        lost = len(self._waiting) - _MAX_WAITING
        if lost > 0:
            del self._waiting[:lost]
            self._lost += lost
        if not self._is_refused:
            sentence = refusal(error, "A line", self.path) or error
            warnings.warn(f"{sentence} Training goes on; lines wait in memory until there is room.", stacklevel=3)
        self._is_refused = True

    def _mend(self) -> None:
        try:
            content = self._content()
        except NotPlainError:
            return  # the first line that is written says so
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with open(open_plain(self.path, os.O_RDWR), "r+b") as file:
                file.truncate(whole)

    def _content(self) -> bytes:
        """All that is there; nothing where there is no file. NotPlainError for what is no file."""
        try:
            descriptor = open_plain(self.path)
        except FileNotFoundError:
            return b""
        with open(descriptor, "rb") as file:
            return file.read()


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line, NaN and infinities restored; a torn line is left out. Empty when there is no file.

    RunFolderError for one that cannot be read, a link or a pipe among others.
    """
    return list(iterate(path))


def iterate(path: Path) -> Iterator[dict[str, Any]]:
    """`read`, a line at a time; lines share the texts of their names, which would take more than the numbers."""
    names: dict[str, str] = {}
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({error.strerror}); remove it, or put the file itself there."
        ) from error
    with open(descriptor, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if (row := parse(line)) is not None:
                yield {names.setdefault(name, name): value for name, value in row.items()}


def line_of(row: Mapping[str, Any]) -> bytes:
    """The JSON of a row, with its NaN and infinite values (also nested ones) as null and named under `non_finite`."""
    non_finite: dict[str, str] = {}
    plain = {str(key): _plain(value, str(key), non_finite) for key, value in row.items()}
    if non_finite:
        plain[NON_FINITE] = non_finite
    return json.dumps(plain, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _plain(value: Any, where: str, non_finite: dict[str, str]) -> Any:
    if hasattr(value, "item") and not isinstance(value, Mapping):
        value = value.item()  # a 0-d tensor or a NumPy number
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[where] = str(float(value))
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}.{i}", non_finite) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}; a line of metrics holds numbers, text, lists and mappings.")


def parse(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None when it is torn or no row."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    words = row.pop(NON_FINITE, None)
    for name, word in words.items() if isinstance(words, dict) else ():
        if row.get(name, 0) is None and isinstance(word, str):
            row[name] = _WORDS.get(word)
    return row


def _is_after(line: bytes, step: int) -> bool:
    row = parse(line)
    return row is None or (isinstance(row.get("step"), int) and row["step"] > step)
