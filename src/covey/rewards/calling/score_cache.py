"""Scores that need no second call: a reward that says it is pure gets each content once."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

_MOST = 100_000


class ScoreCache:
    """Values by the content of a completion's keywords, the least recently used one leaving at 100,000."""

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self._values: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[bytes]) -> list[tuple[Any] | None]:
        """Each key's value in a tuple, None where it is not known."""
        with self._lock:
            for key in keys:
                if key in self._values:
                    self._values.move_to_end(key)
            return [(self._values[key],) if key in self._values else None for key in keys]

    def put(self, keys: Sequence[bytes], values: Sequence[Any]) -> None:
        with self._lock:
            self._values.update(zip(keys, values, strict=True))
            while len(self._values) > self.most:
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
