"""Rendezvous of the processes of one attempt, unaffected by keys that earlier attempts left in the launcher's store.

An agent of `torchrun` keeps one store for all the attempts of `--max-restarts` (torch 2.13, static and c10d alike), and torch joins
its process group under the same keys in each. The first process to be ready may then read the address of a dead one, and fail to connect
or wait for the whole timeout. pytorch/pytorch#135712 describes it.
"""

import time
import uuid
from collections.abc import Callable

from covey.errors import RankError
from covey.process.heartbeat import Store

_LOOK_SECONDS = 0.05


def agree(store: Store, rank: int, size: int, seconds: float) -> str:
    """Key prefix shared by the `size` processes of this attempt and by no earlier attempt. Collective.

    Each process writes a random word; rank 0 draws the prefix and answers every word with it, so no process reads the answer
    to a dead one. A process that replaces a dead one is answered again. Raises RankError if a process does not arrive within
    `seconds`.
    """
    mine = uuid.uuid4().hex
    store.set(f"covey/hello/{rank}", mine)
    return _lead(store, mine, size, seconds) if rank == 0 else _follow(store, mine, rank, seconds)


def _lead(store: Store, name: str, size: int, seconds: float) -> str:
    """Rank 0: answer every word until all processes have acknowledged `name`."""

    def missing() -> str:
        for rank in range(1, size):
            word = _read(store, f"covey/hello/{rank}")
            if word is None:
                return f"rank {rank}"
            if _read(store, f"covey/answer/{word}") != name:  # also if an earlier rank 0 answered
                store.set(f"covey/answer/{word}", name)
            if _read(store, f"covey/taken/{name}/{rank}") != word:
                return f"rank {rank}"
        return ""

    _wait(missing, seconds, 0)
    store.set(f"covey/go/{name}", "1")
    return name


def _follow(store: Store, word: str, rank: int, seconds: float) -> str:
    """Other ranks: read the newest answer to `word` until rank 0 confirms that all have it."""
    name: str | None = None

    def missing() -> str:
        nonlocal name
        answer = _read(store, f"covey/answer/{word}")
        if answer is not None and answer != name:
            name = answer
            store.set(f"covey/taken/{name}/{rank}", word)
        return "" if name is not None and store.check([f"covey/go/{name}"]) else "rank 0, or one that it waits for,"

    _wait(missing, seconds, rank)
    assert name is not None
    return name


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _wait(missing: Callable[[], str], seconds: float, rank: int) -> None:
    started = time.monotonic()
    while who := missing():
        waited = time.monotonic() - started
        if waited > seconds:
            raise RankError(
                f"{who} did not come to the start within {waited:.0f} s; rank {rank} ends here. "
                "Start the run again with --resume auto; ddp_timeout says how long to wait."
            )
        time.sleep(_LOOK_SECONDS)
