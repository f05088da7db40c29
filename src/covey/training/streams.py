"""Streaming data sets: checks and conversion before training and evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from covey.config import GRPOConfig
from covey.errors import ConfigError, DataError

_MOST_ROWS = 100_000
"""Most rows of a streamed evaluation set; a longer or infinite one is refused."""


def refuse_no_data(train_dataset: Any, eval_dataset: Any, args: GRPOConfig) -> None:
    """Raise ConfigError or DataError without data to train on or evaluate, or for options that do not work with a stream."""
    if train_dataset is None and eval_dataset is None:
        raise DataError("train_dataset is missing; give a data set with a column 'prompt', or an environment_factory.")
    if isinstance(train_dataset, IterableDataset) and not hasattr(train_dataset, "__len__") and args.max_steps <= 0:
        raise ConfigError("train_dataset is a stream, which has no length: set max_steps.")
    held_out = eval_dataset.values() if isinstance(eval_dataset, Mapping) else (eval_dataset,)
    has_stream = any(isinstance(one, IterableDataset) for one in (train_dataset, *held_out))
    if has_stream and getattr(args.accelerator_config, "dispatch_batches", None):
        raise ConfigError(
            "accelerator_config has dispatch_batches=True, where one process reads for all; of a stream every process reads its own "
            "share: leave it out."
        )


def finite(dataset: Any) -> Any:
    """The evaluation set with a length: one pass over a stream, held in memory. Raises DataError if it is too long or empty."""
    if hasattr(dataset, "__len__"):
        return dataset
    rows = list(itertools.islice(iter(dataset), _MOST_ROWS + 1))
    if len(rows) > _MOST_ROWS:
        raise DataError(
            f"eval_dataset is a stream of more than {_MOST_ROWS:,} rows, or without end; pass stream.take(200), for one."
        )
    if not rows:
        raise DataError("eval_dataset is a stream without a single row.")
    return Dataset.from_list([dict(row) for row in rows])
