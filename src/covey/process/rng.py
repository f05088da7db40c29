"""Every random generator that a process draws from, as a state tree: saved and put back, never re-seeded."""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def snapshot() -> dict[str, Any]:
    """States of the random generators of Python, NumPy, torch and every CUDA device in this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(state: Mapping[str, Any]) -> None:
    """Continue the sequences of `snapshot`.

    On a machine with another number of GPUs the common ones are restored, and a warning says that the rest is not exact.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    saved, present = list(state["cuda"]), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(saved) != present:
        warnings.warn(
            f"The checkpoint holds the random state of {len(saved)} GPU(s) and this machine has {present}; "
            "what is drawn on the others will differ from an uninterrupted run.",
            stacklevel=2,
        )
    for device, device_state in enumerate(saved[:present]):
        torch.cuda.set_rng_state(device_state, device)


@contextmanager
def unchanged() -> Iterator[None]:
    """Context after which the random generators are as before, such as of a library that seeds them."""
    before = snapshot()
    try:
        yield
    finally:
        restore(before)
