"""Sources of live rows: the protocol, and four implementations."""

import itertools
import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from covey.errors import DataError
from covey.files.bounded import LONGEST_LINE
from covey.process.addresses import opener_of

logger = logging.getLogger(__name__)

Position = Any
"""A place in a source, as a plain value that JSON can hold."""
Items = Sequence[tuple[Position, "Mapping[str, Any] | DataError"]]
"""Rows with the place right after each; a DataError stands for a row that cannot be read, which is left out and counted."""

LINES = (".jsonl", ".ndjson")
"""Endings of the names of JSON Lines files."""
_HTTP_SECONDS = 30.0
_LARGEST_ANSWER = 64 * 2**20
_MOST_UNREAD = 100_000


class Source(Protocol):
    """Protocol of a live source. `poll` may give a row more than once, and must give each until it is committed."""

    def poll(self, after: Position | None, limit: int) -> Items:
        """Up to `limit` rows behind `after` (None: from the start), without waiting; [] where none is there yet.

        Raises OSError while the source cannot be reached, and EOFError once it has ended for good.
        """

    def commit(self, position: Position) -> None:
        """Acknowledge all rows up to here: a checkpoint on disk holds them, and they will not be requested again."""


class FollowFile:
    """A JSON Lines file that grows. The position is the byte offset after a line; a last line that is no whole row is read later.

    A file that is shorter than the place was replaced, and is read from its start. One that was never there has no rows yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def poll(self, after: Position | None, limit: int) -> Items:
        start = int(after or 0)
        if not start and not self.path.exists() and self.path.parent.is_dir():
            return []
        if self.path.stat().st_size < start:
            logger.warning("%s is shorter than it was: it was replaced, and is read from its start.", self.path)
            start = 0
        return [(end, row) for end, row in _lines(self.path, start, limit)]

    def commit(self, position: Position) -> None:
        """A file needs no word of it."""


class FollowFolder:
    """The JSON Lines files (.jsonl, .ndjson) of a folder, in the order of their names; they may grow, and new ones may come at any time.

    The place is how many bytes of each file were read. A file that is written elsewhere and moved in is read whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def poll(self, after: Position | None, limit: int) -> Items:
        places = {str(name): int(end) for name, end in dict(after or {}).items()}
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}")
        items: list[tuple[Position, Mapping[str, Any] | DataError]] = []
        for file in sorted(file for end in LINES for file in self.folder.glob(f"*{end}")):
            start = places.get(file.name, 0)
            start = 0 if file.stat().st_size < start else start
            for end, row in _lines(file, start, limit - len(items)):
                places = {**places, file.name: end}
                items.append((places, row))
            if len(items) >= limit:
                break
        return items

    def commit(self, position: Position) -> None:
        """A folder needs no word of it."""


class HttpQueue:
    """A queue behind an address. `GET URL?limit=64&after=JSON` answers `[{"position": 8, "row": {"prompt": "..."}}, ...]`.

    `after` is the JSON of a position, left out at the start; an empty list is "nothing yet", status 410 "ended for good". A
    commit is `POST URL` with `{"commit": position}`. Any other failure counts as a source that is away for a while.
    """

    def __init__(self, url: str, seconds: float = _HTTP_SECONDS) -> None:
        self.url, self.seconds = url, seconds

    def poll(self, after: Position | None, limit: int) -> Items:
        query = {"limit": str(limit), **({} if after is None else {"after": json.dumps(after)})}
        joint = "&" if urllib.parse.urlsplit(self.url).query else "?"
        answer = self._ask(urllib.request.Request(f"{self.url}{joint}{urllib.parse.urlencode(query)}"))
        try:
            items = json.loads(answer)
            return [(item["position"], _as_row(item["row"], f"{self.url}, {item['position']}")) for item in items]
        except (ValueError, TypeError, KeyError) as error:
            raise ConnectionError(f"its answer is no list of positions and rows ({error})") from error

    def commit(self, position: Position) -> None:
        body = json.dumps({"commit": position}).encode()
        self._ask(urllib.request.Request(self.url, body, {"Content-Type": "application/json"}))

    def _ask(self, request: urllib.request.Request) -> bytes:
        try:
            with opener_of(self.url).open(request, timeout=self.seconds) as answer:
                body: bytes = answer.read(_LARGEST_ANSWER + 1)
        except urllib.error.HTTPError as error:
            if error.code == 410:
                raise EOFError(f"{self.url} has ended") from error
            raise
        if len(body) > _LARGEST_ANSWER:
            raise ConnectionError(f"its answer is larger than {_LARGEST_ANSWER // 2**20} MiB")
        return body


class FollowIterable:
    """A `datasets.IterableDataset` or any iterable of rows, read as its rows come. The place is how many were read.

    Rows since the last commit are kept, so that a step that is undone finds them again. To go on in a new process the iterable
    starts anew and skips to the place, by its own `state_dict` or not at all faster than by reading.
    """

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows
        self._iterator: Iterator[Any] | None = None
        self._read = 0
        self._unread: deque[tuple[int, Any]] = deque(maxlen=_MOST_UNREAD)

    def poll(self, after: Position | None, limit: int) -> Items:
        place = int(after or 0)
        first = self._unread[0][0] if self._unread else self._read + 1
        if self._iterator is None or place + 1 < first:
            self._iterator, self._read = iter(self._rows), 0
            self._unread.clear()
        if self._read < place:
            self._read += sum(1 for _ in itertools.islice(self._iterator, place - self._read))
        again = [item for item in self._unread if item[0] > place][:limit]
        if not again:
            row = next(self._iterator, None)  # one at a time, since it may wait for each
            if row is None:
                raise EOFError("the iterable has ended")
            self._read += 1
            again = [(self._read, row)]
            self._unread.extend(again)
        return [(place, _as_row(row, f"row {place}")) for place, row in again]

    def commit(self, position: Position) -> None:
        while self._unread and self._unread[0][0] <= int(position):
            self._unread.popleft()


def _lines(path: Path, start: int, limit: int) -> Iterator[tuple[int, Mapping[str, Any] | DataError]]:
    """Up to `limit` whole lines from byte `start`, each with the offset of the next; blank lines are skipped."""
    with path.open("rb") as file:
        file.seek(start)
        count = 0
        while count < limit:
            line = file.readline(LONGEST_LINE + 1)
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path} has a line of more than {LONGEST_LINE} bytes from byte {start} on; split it.")
            if not line.endswith(b"\n") and not _is_whole(line):
                return
            where, start = f"{path}, byte {start}", file.tell()
            if line.strip():
                count += 1
                yield start, _parse(line, where)


def _is_whole(line: bytes) -> bool:
    """True if a line without its end is a row: the beginning of an object is none."""
    return line.rstrip().endswith(b"}") and isinstance(_parse(line, ""), Mapping)


def _parse(line: bytes, where: str) -> Mapping[str, Any] | DataError:
    try:
        return _as_row(json.loads(line), where)
    except (ValueError, RecursionError) as error:
        return DataError(f"{where} is no JSON ({type(error).__name__}).")


def _as_row(value: Any, where: str) -> Mapping[str, Any] | DataError:
    kind = type(value).__name__
    return value if isinstance(value, Mapping) else DataError(f"{where} is {kind}, not a row of columns.")
