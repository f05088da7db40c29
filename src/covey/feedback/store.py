"""Answers and their scores in one SQLite file: an answer waits for its score, a scored one for its candidate."""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from covey.errors import StorageError
from covey.types import Completion, Group, Prompt

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT, choice INTEGER, model TEXT NOT NULL, version INTEGER NOT NULL, created REAL NOT NULL,
    prompt TEXT NOT NULL, tokens TEXT NOT NULL, logprobs BLOB, finish TEXT NOT NULL, refused TEXT,
    score REAL, scored REAL, comment TEXT, candidate INTEGER,
    PRIMARY KEY (id, choice)
);
CREATE INDEX IF NOT EXISTS waiting ON answers (model, scored) WHERE score IS NOT NULL AND candidate IS NULL AND refused IS NULL;
CREATE INDEX IF NOT EXISTS ages ON answers (created) WHERE score IS NULL;
CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, count INTEGER NOT NULL);
"""


MOST_BYTES = 1 << 30
"""Bytes of answers that wait for a score."""
_ROW_BYTES = 200
"""Of an answer's other columns, about."""


class FeedbackError(Exception):
    """A score that is not taken: the HTTP status and a sentence. `outcome` is its name in counts."""

    def __init__(self, status: int, outcome: str, message: str) -> None:
        super().__init__(message)
        self.status, self.outcome = status, outcome


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A score that was taken."""

    version: int
    """Version of the weights that sampled the answer."""
    refused: str | None
    """Reason why the answer is not trained on; None: it is."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A scored answer, exact to the token."""

    id: str
    choice: int
    version: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    score: float

    def group(self) -> Group:
        """A group of one completion, whose reward is the score."""
        completion = Completion(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            text="",
            finish=self.finish,  # type: ignore[arg-type]
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            version=self.version,
        )
        prompt = Prompt(uid=f"{self.id}:{self.choice}", token_ids=self.prompt_ids)
        return Group(prompt=prompt, completions=(completion,), rewards=torch.tensor([[self.score]]))


class Store:
    """The file of a folder. Its methods may be called from any thread; they raise StorageError where the disk refuses."""

    def __init__(self, folder: Path, max_age_seconds: float, most_bytes: int = MOST_BYTES) -> None:
        """`most_bytes`: of answers that wait for a score; beyond them the oldest are deleted."""
        self.max_age_seconds, self.most_bytes = max_age_seconds, most_bytes
        self._lock = threading.Lock()
        self.path = path = folder / "feedback.sqlite"
        try:
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(_TABLES)
            self._num_bytes = self._unscored_bytes()
        except sqlite3.Error as error:
            with suppress(AttributeError):  # it could not be opened
                self._file.close()
            raise StorageError(f"{path} cannot be used ({error}); give another --learn-folder.") from error

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Context in which no other thread uses the file. Raises StorageError where SQLite fails, with no transaction left open."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                with suppress(sqlite3.Error):
                    self._file.rollback()
                raise StorageError(f"{self.path} cannot be used ({error}); look at its disk.") from error

    def add(
        self, id: str, choice: int, model: str, prompt: Prompt, completion: Completion, refused: str | None
    ) -> None:
        """Keep an answer until its score comes. `refused`: why it will not be trained on; its tokens are not kept then."""
        keeps = refused is None and completion.logprobs is not None
        logprobs = completion.logprobs.numpy().astype(np.float32).tobytes() if keeps and completion.logprobs is not None else None  # fmt: skip
        row = (
            id, choice, model, completion.version, time.time(),
            json.dumps(list(prompt.token_ids)) if keeps else "[]",
            json.dumps(completion.token_ids.tolist()) if keeps else "[]",
            logprobs, completion.finish, refused,
        )  # fmt: skip
        with self._using():
            self._file.execute(
                "INSERT OR REPLACE INTO answers (id, choice, model, version, created, prompt, tokens, logprobs, finish, refused) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            self._num_bytes += _ROW_BYTES + len(row[5]) + len(row[6]) + len(logprobs or b"")
            if self._num_bytes > self.most_bytes:
                self._forget_oldest()

    def _unscored_bytes(self) -> int:
        cursor = self._file.execute(
            f"SELECT SUM({_ROW_BYTES} + LENGTH(prompt) + LENGTH(tokens) + COALESCE(LENGTH(logprobs), 0)) FROM answers WHERE score IS NULL"
        )
        return int(cursor.fetchone()[0] or 0)

    def _forget_oldest(self) -> None:
        """Delete the oldest answers without a score, until a tenth of the room is free."""
        self._num_bytes = self._unscored_bytes()
        while self._num_bytes > 0.9 * self.most_bytes:
            oldest = "SELECT rowid FROM answers WHERE score IS NULL ORDER BY created LIMIT 64"
            if not self._file.execute(f"DELETE FROM answers WHERE rowid IN ({oldest})").rowcount:
                return
            self._num_bytes = self._unscored_bytes()

    def score(self, id: str, choice: int, score: float, comment: str | None) -> Taken:
        """Give an answer its score. Raises FeedbackError for an unknown one, a second score, or one that comes too late."""
        with self._using():
            row = self._file.execute(
                "SELECT version, refused, score, created FROM answers WHERE id = ? AND choice = ?", (id, choice)
            ).fetchone()
            if row is None:
                raise FeedbackError(
                    404, "unknown", f"No answer {id!r} with index {choice} is waiting for a score here."
                )
            version, refused, former, created = row
            if former is not None:
                sentence = f"Answer {id!r} has the score {former:g} already; one score is taken."
                raise FeedbackError(409, "second", sentence)
            age = time.time() - created
            if age > self.max_age_seconds:
                sentence = f"Answer {id!r} is {age:.0f} s old; scores are taken for {self.max_age_seconds:.0f} s."
                raise FeedbackError(410, "late", sentence)
            self._file.execute(
                "UPDATE answers SET score = ?, scored = ?, comment = ? WHERE id = ? AND choice = ?",
                (score, time.time(), comment, id, choice),
            )
        return Taken(version=version, refused=refused)

    def due(self, least: int) -> str | None:
        """Model with at least so many conversations to train on, the one that has waited longest; None where there is none."""
        with self._using():
            row = self._file.execute(
                f"SELECT model FROM answers WHERE {_WAITING} GROUP BY model HAVING COUNT(*) >= ? ORDER BY MIN(scored) LIMIT 1",
                (least,),
            ).fetchone()
        return None if row is None else str(row[0])

    def waiting(self) -> dict[str, int]:
        """Conversations to train on, by model."""
        with self._using():
            return dict(self._file.execute(f"SELECT model, COUNT(*) FROM answers WHERE {_WAITING} GROUP BY model"))

    def oldest(self, model: str, count: int) -> list[Conversation]:
        """The first `count` conversations that wait, in the order of their scores."""
        with self._using():
            rows = self._file.execute(
                "SELECT id, choice, version, prompt, tokens, logprobs, finish, score FROM answers "
                f"WHERE {_WAITING} AND model = ? ORDER BY scored, id, choice LIMIT ?",
                (model, count),
            ).fetchall()
        return [
            Conversation(
                id=id,
                choice=choice,
                version=version,
                prompt_ids=tuple(json.loads(prompt)),
                token_ids=tuple(json.loads(tokens)),
                logprobs=tuple(np.frombuffer(logprobs, dtype=np.float32).tolist()),
                finish=finish,
                score=score,
            )
            for id, choice, version, prompt, tokens, logprobs, finish, score in rows
        ]

    def used(self, conversations: Sequence[Conversation], candidate: int) -> None:
        """Mark conversations as used by a candidate: they are not taken again, and their tokens are deleted."""
        keys = [(candidate, conversation.id, conversation.choice) for conversation in conversations]
        with self._using():
            self._file.execute("BEGIN")
            self._file.executemany(
                "UPDATE answers SET candidate = ?, prompt = '[]', tokens = '[]', logprobs = NULL WHERE id = ? AND choice = ?",
                keys,
            )
            self._file.execute("COMMIT")

    def forget_old(self) -> int:
        """Delete answers whose time for a score has long passed. Returns their number."""
        with self._using():
            before = time.time() - 2 * self.max_age_seconds
            return self._file.execute("DELETE FROM answers WHERE score IS NULL AND created < ?", (before,)).rowcount

    def count(self, name: str) -> None:
        with self._using():
            self._file.execute(
                "INSERT INTO counts VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET count = count + 1", (name,)
            )

    def counts(self) -> dict[str, int]:
        """Counts of scores by outcome: `taken`, `not_trained`, `unknown`, `second`, `late`."""
        with self._using():
            return dict(self._file.execute("SELECT name, count FROM counts ORDER BY name"))


_WAITING = "score IS NOT NULL AND candidate IS NULL AND refused IS NULL"
