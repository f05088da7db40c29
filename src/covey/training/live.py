"""Connection of a live training set to its run: processes, stop signal, time limit, and held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from covey.data.live import LiveDataset
from covey.data.live.order import digest


def attach(given: Any, check_stop: Callable[[], None]) -> None:
    """Give the live data set of a run (`RunInputs`) its process group, stop signal, time limit and evaluation prompts."""
    dataset = given.train_dataset
    if not isinstance(dataset, LiveDataset):
        return
    dataset.check_stop = check_stop
    dataset.timeout_seconds = given.args.live_timeout_seconds
    dataset.is_main, dataset.share = given.world.is_main, given.world.broadcast
    held_out = getattr(given.trainer, "eval_dataset", None)
    dataset.held_out = frozenset(digest(prompt) for prompt in _prompts(held_out))


def _prompts(dataset: Any) -> Iterator[Any]:
    sets = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    for one in sets:
        if one is not None and hasattr(one, "__len__"):
            yield from one["prompt"]
