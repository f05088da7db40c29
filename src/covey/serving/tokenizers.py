"""Tokenizers of an endpoint: one user at a time, and long prompts on copies, so that short ones need not wait for them."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from covey.rollout import NativeSampler

_LONG = 50_000
"""Characters from which a prompt is long: tokenizing it takes more than some hundredths of a second."""


class Tokenizers:
    """Fast tokenizers may not be used by two threads at once."""

    def __init__(self) -> None:
        self._short, self._long = threading.Lock(), threading.Lock()
        self._copies: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @contextmanager
    def of(self, sampler: NativeSampler, size: int) -> Iterator[Any]:
        """A sampler's tokenizer, for a prompt of `size` characters."""
        if size < _LONG:
            with self._short:
                yield sampler.tokenizer
            return
        with self._long:
            if sampler.tokenizer not in self._copies:
                with self._short:
                    self._copies[sampler.tokenizer] = copy.deepcopy(sampler.tokenizer)
            yield self._copies[sampler.tokenizer]
