"""Sums of gradients in a fixed order on a CPU, whatever the number of threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import deterministic as _deterministic

filling: Any = _deterministic  # a module whose attribute is a property, which its type does not say


@dataclass(eq=False)
class OrderedSums:
    """torch's deterministic mode inside the contexts of `on`; a setting of the process, so that of any thread.

    On a CPU, the backward of indexing by a repeated index (a row of the model's experts, of a user's algorithm) is
    `index_put_(accumulate=True)`: from 32,768 elements on it adds by atomics across threads, in another order each time. In
    deterministic mode it adds in the order of the index.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _inside: int = 0
    """Contexts that are open now."""
    _outside: tuple[int, bool] = (0, True)
    """Deterministic mode, and whether new tensors are filled, outside of them."""

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Context of a computation on `device`; of effect on a CPU only, since CUDA sorts such an index."""
        if device.type != "cpu":
            yield
            return
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._outside = torch.get_deterministic_debug_mode(), filling.fill_uninitialized_memory
                self._apply(max(1, self._outside[0]), fills=self._outside[0] > 0 and self._outside[1])
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._apply(*self._outside)

    def mode(self) -> int:
        """torch's deterministic debug mode outside of the contexts."""
        return self._outside[0] if self._inside else torch.get_deterministic_debug_mode()

    def set_mode(self, mode: int) -> None:
        """Set torch's deterministic debug mode outside of the contexts."""
        with self._lock:
            if self._inside:
                self._outside = mode, self._outside[1]
            else:
                torch.set_deterministic_debug_mode(mode)

    @staticmethod
    def _apply(mode: int, fills: bool) -> None:
        torch.set_deterministic_debug_mode(mode)
        filling.fill_uninitialized_memory = fills


ordered_sums = OrderedSums()
