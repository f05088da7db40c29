"""Rows of a live source in the order in which they come: each once, from a place that a checkpoint remembers."""

import hashlib
import json
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from covey.data.live.dataset import LiveDataset
from covey.data.media import row_media
from covey.data.order import Row
from covey.data.prompts import check_prompt
from covey.data.rendering import clean
from covey.errors import CoveyError, DataError

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a source that is away is tried again; doubled each time."""


def digest(value: Any) -> str:
    """Digest that tells a row or a prompt from another."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt_digest(prompt: Any) -> str:
    """Digest of a prompt, the same where a data set has filled in nulls."""
    return digest(list(map(clean, prompt)) if isinstance(prompt, list) else prompt)


class HeldOut:
    """True for a row that is measured on: one with the prompt, images, sounds and videos of a row of these data sets."""

    def __init__(self, sets: Iterable[Any]) -> None:
        self._places: dict[str, list[tuple[Any, int]]] = {}
        for rows in sets:
            for index, prompt in enumerate(rows["prompt"][:]):
                self._places.setdefault(prompt_digest(prompt), []).append((rows, index))

    def __call__(self, row: Row, where: str) -> bool:
        places = self._places.get(prompt_digest(row["prompt"]), ())
        media = row_media(row, where) if places else {}
        return any(row_media(rows[index], "a row of the evaluation set") == media for rows, index in places)


class LiveOrder:
    """The order of a `LiveDataset`: waits for rows, leaves out second deliveries, and mixes in a share of earlier rows.

    The state holds the place behind the last row that was drawn; rows that were only read are read again. Of each row drawn a
    uniform sample stays for replays (reservoir sampling, Vitter 1985, algorithm R). A row that cannot be used is named in the
    log, left out and counted.
    """

    num_rows = None

    def __init__(self, dataset: LiveDataset, *, seed: int, replay: float | None = None) -> None:
        self.dataset, self.seed, self.replay = dataset, seed, replay
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._position: Any = None
        self._read: Any = None
        """The place behind the last row that waits."""
        self._seen: dict[str, str | None] = {}
        self._sample: list[tuple[int, Row]] = []
        self._drawn, self._replayed, self._left_out = 0, 0, 0
        self._is_away = self._has_warned = False

    def next(self) -> tuple[str, Row]:
        """The uid and the row of the next draw: `0:N`, or `rK:N` for the K-th replay, N counting the rows that came."""
        if self._is_replay_due():
            pick = random.Random(f"{self.seed}/replay/{self._replayed}").randrange(len(self._sample))
            number, row = self._sample[pick]
            self._replayed += 1
            return f"r{self._replayed - 1}:{number}", row
        while True:
            while not self._waiting:
                self._fill()
            self._position, raw = self._waiting.popleft()
            usable = self._usable(raw)
            if usable is not None:
                return f"0:{self._drawn - 1}", usable

    def commit(self, state: Mapping[str, Any]) -> None:
        """Notify the source that a checkpoint with this state is on disk. An unreachable source is notified at the next one."""
        if state["position"] is None or not self.dataset.is_main:
            return
        try:
            self.dataset.source.commit(state["position"])
        except (OSError, EOFError) as error:
            logger.warning("%s took no commit (%s); the next checkpoint says it again.", self.dataset.name, error)

    def state_dict(self) -> dict[str, Any]:
        counts = {"drawn": self._drawn, "replayed": self._replayed, "left_out": self._left_out}
        sample = [[number, dict(row)] for number, row in self._sample]
        return {"position": self._position, **counts, "seen": list(self._seen), "sample": sample}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = self._read = state["position"]
        self._drawn, self._replayed = int(state["drawn"]), int(state["replayed"])
        self._left_out = int(state["left_out"])
        self._seen = dict.fromkeys(state["seen"])
        self._sample = [(int(number), row) for number, row in state["sample"]]
        self._waiting.clear()

    def _is_replay_due(self) -> bool:
        """True if replays are behind their share of all draws, once there is something to replay."""
        draws = self._drawn + self._replayed + 1
        return self.replay is not None and bool(self._sample) and self._replayed + 1 <= self.replay * draws

    def _usable(self, raw: Any) -> Row | None:
        """The row, or None for a second delivery and for one that cannot be used or is measured on."""
        if isinstance(raw, DataError):
            return self._left_out_for(str(raw))
        key = str(raw["id"]) if raw.get("id") is not None else digest(raw)
        content = digest(raw)
        if key in self._seen:
            if self._seen[key] not in (None, content) and not self._has_warned:
                self._has_warned = True
                sentence = f"{self.dataset.name} has rows with the id of an earlier row and other content, such as {key[:40]!r}. They count as delivered twice and are left out; give each row an id of its own, or none."
                logger.warning(sentence)
            return None
        self._seen[key] = content
        if len(self._seen) > self.dataset.memory:
            del self._seen[next(iter(self._seen))]
        row = self.dataset.changed(raw)
        try:
            check_prompt(row.get("prompt"), f"A row of {self.dataset.name}")
            is_held_out = self.dataset.is_held_out(row, f"A row of {self.dataset.name}")
        except DataError as error:
            return self._left_out_for(str(error))
        if is_held_out:
            return self._left_out_for(f"A row of {self.dataset.name} is a prompt of the evaluation set.")
        self._keep(row)
        self._drawn += 1
        return row

    def _keep(self, row: Row) -> None:
        if self.replay is None:
            return
        if len(self._sample) < self.dataset.replay_rows:
            self._sample.append((self._drawn, row))
            return
        place = random.Random(f"{self.seed}/{self._drawn}").randrange(self._drawn + 1)
        if place < len(self._sample):
            self._sample[place] = (self._drawn, row)

    def _left_out_for(self, why: str) -> Row | None:
        self._left_out += 1
        logger.warning("%s It is left out (%d so far).", why, self._left_out)
        return None

    # -- waiting --------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Wait for rows. Raises DataError when none comes in time, or when none will come any more."""
        started, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            kind, content = self.dataset.share(self._poll() if self.dataset.is_main else None)
            if kind == "rows" and content:
                self._tell(None)
                self._waiting.extend(content)
                self._read = content[-1][0]
                return
            if kind == "error":
                raise DataError(content)
            limit, waited = self.dataset.timeout_seconds, time.monotonic() - started
            if limit is not None and waited > limit:
                raise DataError(
                    f"No prompt came from {self.dataset.name} for {waited:.0f} s (live_timeout_seconds={limit:g}); see "
                    "whether its writer is alive, then go on with --resume auto."
                )
            self._tell(content if kind == "away" else None)
            self._pause(pause if kind == "away" else self.dataset.poll_seconds)
            pause = min(2 * pause, _LONGEST_PAUSE) if kind == "away" else _FIRST_PAUSE

    def _poll(self) -> tuple[str, Any]:
        """Result of one poll of the source: rows, `away` and the reason, or `error` and its sentence."""
        try:
            return "rows", list(self.dataset.source.poll(self._read, self.dataset.buffer))
        except EOFError as error:
            return "error", f"{self.dataset.name} has ended after {self._drawn} prompts ({error}); lower max_steps."
        except OSError as error:
            return "away", str(error)
        except CoveyError as error:
            return "error", str(error)
        except Exception as error:  # code of the user: it has to end every rank, also those that wait for rows
            logger.error("%s failed.", self.dataset.name, exc_info=error)
            return "error", f"{self.dataset.name} failed in poll(): {type(error).__name__}: {error}"

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.dataset.check_stop()
            time.sleep(min(left, 0.2))
        self.dataset.check_stop()

    def _tell(self, absence: str | None) -> None:
        """Log that the source is away, for this reason, or back (None), where that is new."""
        if absence is not None and not self._is_away:
            logger.warning("%s is away (%s); training waits and tries again.", self.dataset.name, absence)
        if absence is None and self._is_away:
            logger.warning("%s is back.", self.dataset.name)
        self._is_away = absence is not None
