"""Scores of rewards that are declared pure, kept by the content of what they score."""

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.rewards.calling.outcome import Outcome
from covey.rewards.contract import Batch

_MOST = 100_000


class ScoreCache:
    """Values by the content of a completion's keywords, the least recently used one leaving at 100,000."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def score(self, batch: Batch, name: str, call: Callable[[Batch], Outcome]) -> Outcome:
        """Score the batch: known scores at once, the rest by `call`, whose sound ones are kept."""
        lists = {"prompts": batch.prompts, "completions": batch.completions, "completion_ids": batch.completion_ids}
        keys = keys_of({**batch.columns, **lists}, len(batch))
        if keys is None:
            return call(batch)
        cached = self.get(keys)
        missing = [i for i, value in enumerate(cached) if value is None]
        parts: list[tuple[Sequence[int], Outcome]] = []
        if missing:
            called = call(batch if len(missing) == len(batch) else batch.take(missing))
            parts.append((missing, called))
            if not (called.extras or called.metrics):  # those must come again the next time
                failed = {i for failure in called.failures for i in range(failure.start, failure.stop)}
                good = [i for i in range(len(missing)) if i not in failed]
                self.put([keys[missing[i]] for i in good], [float(called.scores[i]) for i in good])
        outcome = Outcome.joined(name, parts, len(batch))
        for i, value in enumerate(cached):
            if value is not None:
                outcome.scores[i] = value
        outcome.num_cached = len(batch) - len(missing)
        return outcome

    def get(self, keys: Sequence[bytes]) -> list[float | None]:
        """Each key's score, NaN of an abstention; None where it is not known."""
        with self._lock:
            for key in keys:
                if key in self._values:
                    self._values.move_to_end(key)
            return [self._values.get(key) for key in keys]

    def put(self, keys: Sequence[bytes], values: Sequence[float]) -> None:
        with self._lock:
            self._values.update(zip(keys, values, strict=True))
            while len(self._values) > _MOST:
                self._values.popitem(last=False)


def keys_of(keywords: Mapping[str, Sequence[Any]], size: int) -> list[bytes] | None:
    """A digest for each of `size` completions of aligned `keywords`; None when their content cannot be hashed.

    Equal digests mean equal content. The reverse need not hold, which costs a call and nothing else.
    """
    names = sorted(keywords)
    try:
        rows = [pickle.dumps([(name, keywords[name][i]) for name in names], protocol=5) for i in range(size)]
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
