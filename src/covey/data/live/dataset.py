"""A live source as a training set: `follow("prompts.jsonl")`."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from covey import names
from covey.data.live.sources import LINES, FollowFile, FollowFolder, FollowIterable, HttpQueue, Source
from covey.errors import CoveyError, DataError
from covey.files.places import nearest_sibling

logger = logging.getLogger(__name__)

PREFIX = "follow:"


class LiveDataset:
    """A training set without length whose rows come from a `Source` while the run trains; `follow` makes one.

    `buffer`: rows that are taken from the source ahead of training, at most. `memory`: rows back over which a second delivery
    is told, by the column `id`, or the whole row where there is none. `replay_rows`: size of the sample of earlier rows that
    `curriculum="replay"` draws from.
    """

    features: ClassVar[Mapping[str, Any]] = {}
    """Rows are as their source gives them: no table fills nulls in."""

    def __init__(
        self, source: Source, name: str, *, buffer: int = 64, memory: int = 20_000, replay_rows: int = 1000
    ) -> None:
        for option, value in (("buffer", buffer), ("memory", memory), ("replay_rows", replay_rows)):
            if value < 1:
                raise DataError(f"{name}: {option}={value} must be at least 1.")
        for method in ("poll", "commit"):
            if not callable(getattr(source, method, None)):
                raise DataError(f"{name} has no method {method}; a source has poll(after, limit) and commit(position).")
        self.source, self.name = source, name
        self.buffer, self.memory, self.replay_rows = buffer, memory, replay_rows
        self.changes: tuple[Callable[[Mapping[str, Any]], Mapping[str, Any]], ...] = ()
        self.poll_seconds = 0.2
        # Set by the run:
        self.timeout_seconds: float | None = None
        self.check_stop: Callable[[], None] = lambda: None
        self.share: Callable[[Any], Any] = lambda item: item
        """Broadcasts an object from the main process to every rank."""
        self.is_main = True
        self.is_held_out: Callable[[Mapping[str, Any], str], bool] = lambda row, where: False
        """True for a row (named in errors) that is measured on and never trained on."""

    @property
    def column_names(self) -> list[str] | None:
        """The columns of the first row, None where there is none yet (or an iterable would have to be begun)."""
        if isinstance(self.source, FollowIterable):
            return None
        with contextlib.suppress(OSError, EOFError, CoveyError):
            for _, row in self.source.poll(None, 1):
                return None if isinstance(row, DataError) else list(self.changed(row))
        return None

    def changed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row with columns renamed and so on."""
        for change in self.changes:
            row = change(row)
        return row

    def map(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> LiveDataset:
        """The same source, each row changed as it comes."""
        other = copy.copy(self)
        other.changes = (*self.changes, change)
        return other

    def rename_columns(self, renames: Mapping[str, str]) -> LiveDataset:
        """The data set with renamed columns, old name to new."""
        return self.map(lambda row: {renames.get(name, name): value for name, value in row.items()})

    def select_columns(self, columns: Iterable[str]) -> LiveDataset:
        names = tuple(columns)
        return self.map(lambda row: {name: row[name] for name in names if name in row})


def follow(source: str | Path | Iterable[Any] | Source, **options: Any) -> LiveDataset:
    """A training set that grows: a JSON Lines file, a folder of them, an `http(s)://` queue, an iterable of rows, or a `Source`.

    A string may also be the import path of a source, or of a function that makes one, as `my_file.py:make_source`. `options` are
    those of `LiveDataset`. A file need not exist yet, its folder must. Raises DataError for what is none of these.
    """
    if isinstance(source, str | Path):
        name = str(source).removeprefix(PREFIX)
        return LiveDataset(_source_by_name(name), name, **options)
    if callable(getattr(source, "poll", None)):
        return LiveDataset(source, type(source).__name__, **options)  # type: ignore[arg-type]
    if isinstance(source, Iterable):
        return LiveDataset(FollowIterable(source), type(source).__name__, **options)
    raise DataError(f"A {type(source).__name__} cannot be followed; give a file, folder, address, iterable or source.")


def _source_by_name(name: str) -> Source:
    if not name.strip():
        raise DataError("follow: names no source; write follow:prompts.jsonl, a folder, an address or file.py:source.")
    if name.startswith(("http://", "https://")):
        return HttpQueue(name)
    path = Path(name).expanduser()
    if path.is_dir() or name.endswith("/"):
        if not path.is_dir():
            raise DataError(f"follow:{name}: there is no such folder; make it first, files may come later.")
        return FollowFolder(path)
    module = name.rpartition(":")[0]
    if module and not path.exists():
        return _import_source(name, module)
    if path.suffix not in LINES:
        there = "" if path.exists() else f" There is nothing of that name here.{nearest_sibling(path)}"
        raise DataError(f"follow:{name} is no JSON Lines file (.jsonl), folder, http address or file.py:source.{there}")
    if not path.parent.is_dir():
        raise DataError(
            f"follow:{name}: there is no folder {str(path.parent)!r}; make it first, the file may come later."
        )
    if not path.exists():
        logger.warning("follow:%s does not exist yet; training waits until it is there.%s", name, nearest_sibling(path))
    return FollowFile(path)


def _import_source(name: str, module: str) -> Source:
    """A source, or an iterable as one, by its import path."""
    if module.endswith(LINES):
        raise DataError(f"follow:{name}: a live source has no splits; write follow:{module}.")
    target = names.load(name, "source")
    made = target() if isinstance(target, type) or not hasattr(target, "poll") else target
    return FollowIterable(made) if not hasattr(made, "poll") and isinstance(made, Iterable) else made
