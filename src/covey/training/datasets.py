"""Data sets of a run: finite ones and streams, live ones connected to the run, and the loaders that callbacks read."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch.utils import data as torch_data

from covey.config import GRPOConfig
from covey.data import check_dataset
from covey.data.live import LiveDataset
from covey.data.live.order import HeldOut
from covey.data.order import permutation
from covey.errors import ConfigError, DataError
from covey.rewards.contract import ALWAYS, NOT_PASSED
from covey.training.build_algorithm import check_columns

logger = logging.getLogger(__name__)

_MOST_ROWS = 100_000
"""Most rows of a streamed evaluation set; a longer or infinite one is refused."""


def refuse_no_data(train_dataset: Any, eval_dataset: Any, args: GRPOConfig) -> None:
    """Raise ConfigError or DataError without data to train on or evaluate, or for options that do not work with a stream.

    Warns of a column that no reward can read.
    """
    if train_dataset is None and eval_dataset is None:
        raise DataError("train_dataset is missing; give a data set with a column 'prompt', or an environment_factory.")
    is_stream = isinstance(train_dataset, IterableDataset | LiveDataset) and not hasattr(train_dataset, "__len__")
    if is_stream and args.max_steps <= 0:
        raise ConfigError("train_dataset is a stream, which has no length: set max_steps.")
    held_out = eval_dataset.values() if isinstance(eval_dataset, Mapping) else (eval_dataset,)
    has_stream = any(isinstance(dataset, IterableDataset) for dataset in (train_dataset, *held_out))
    if has_stream and getattr(args.accelerator_config, "dispatch_batches", None):
        raise ConfigError(
            "accelerator_config has dispatch_batches=True, where one process reads for all; of a stream every process reads its own "
            "share: leave it out."
        )
    columns = () if args.remove_unused_columns else getattr(train_dataset, "column_names", None) or ()
    if replaced := [name for name in columns if name in ALWAYS and name not in NOT_PASSED]:
        logger.warning(
            "train_dataset has a column %s, and rewards get what the run itself has by this name: none reads the column. Where one "
            "should, rename it (columns=, or --columns new=old).", replaced[0],
        )  # fmt: skip


def checked_eval(eval_dataset: Any, args: GRPOConfig) -> Any:
    """The evaluation set, or every set of a dict, checked for prompts."""
    if eval_dataset is None:
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
            raise ConfigError(
                "eval_strategy asks for evaluations, but there is no eval_dataset; give one, or eval_strategy='no'."
            )
        return None
    if isinstance(eval_dataset, Mapping):
        return {name: checked_dataset(each, f"eval_dataset[{name!r}]", args) for name, each in eval_dataset.items()}
    return checked_dataset(eval_dataset, "eval_dataset", args)


def checked_dataset(dataset: Any, name: str, args: GRPOConfig) -> Any:
    """The data set, checked for prompts, without the columns dropped by `remove_unused_columns`."""
    return check_dataset(dataset, name, prompt_only=bool(args.remove_unused_columns))


def checked_late(trainer: Any, name: str, value: Any) -> Any:
    """A `train_dataset` or `eval_dataset` that is set on a trainer that is made, checked as by the constructor."""
    if name == "eval_dataset":
        return checked_eval(value, trainer.args)
    refuse_no_data(value, None, trainer.args)
    checked = checked_dataset(value, name, trainer.args)
    check_columns(trainer.args, checked, trainer.agents, trainer.scorer, trainer.algorithm)
    return checked


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


def attach(inputs: Any, check_stop: Callable[[], None]) -> None:
    """Give the live data set of a run (`RunInputs`) its process group, stop signal, time limit and evaluation prompts."""
    dataset = inputs.train_dataset
    if not isinstance(dataset, LiveDataset):
        return
    dataset.check_stop = check_stop
    dataset.timeout_seconds = inputs.args.live_timeout_seconds
    dataset.is_main, dataset.share = inputs.world.is_main, inputs.world.broadcast
    held_out = getattr(inputs.trainer, "eval_dataset", None)
    sets = held_out.values() if isinstance(held_out, Mapping) else [held_out]
    dataset.is_held_out = HeldOut(rows for rows in sets if rows is not None and hasattr(rows, "__len__"))


@dataclass(frozen=True)
class Repeated:
    """Batch sampler over one epoch: each row G times in a row, each generation batch as often as TRL's loader repeats it.

    A batch has `per_device_train_batch_size * steps_per_generation` entries, and there is one for every
    micro-batch of the epoch, as in TRL 1.16. The last generation batch of an epoch is filled up from its beginning.
    """

    rows: tuple[int, ...]
    group: int
    """G, completions per prompt."""
    prompts: int
    """Prompts of a generation batch."""
    repeats: int

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.rows), self.prompts):
            batch = [self.rows[(start + i) % len(self.rows)] for i in range(self.prompts)]
            for _ in range(self.repeats):
                yield [row for row in batch for _ in range(self.group)]

    def __len__(self) -> int:
        return -(-len(self.rows) // self.prompts) * self.repeats


class RepeatedStream(torch_data.IterableDataset[list[Any]]):
    """`Repeated` for a stream: one pass in the stream's order."""

    def __init__(self, rows: Any, group: int, prompts: int, repeats: int) -> None:
        self.rows, self.group, self.prompts, self.repeats = rows, group, prompts, repeats

    def __iter__(self) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for row in self.rows:
            batch.append(row)
            if len(batch) == self.prompts:
                for _ in range(self.repeats):
                    yield [row for row in batch for _ in range(self.group)]
                batch = []


def train_loader(dataset: Any, args: GRPOConfig) -> torch_data.DataLoader[Any]:
    """One epoch as batches of rows (dicts), in the order in which training draws them.

    Raises ConfigError for a curriculum, whose order depends on training.
    """
    if args.curriculum != "none":
        raise ConfigError(
            f"curriculum={args.curriculum!r} chooses prompts while it trains, so no loader knows their order; `rollouts/` holds it."
        )
    prompts = int(args.generation_batch_size or 1) // args.num_generations
    repeats = int(args.steps_per_generation or 1) * args.num_iterations
    if not hasattr(dataset, "__len__"):
        return torch_data.DataLoader(RepeatedStream(dataset, args.num_generations, prompts, repeats), batch_size=None)
    seed = args.seed if args.data_seed is None else args.data_seed
    order = permutation(len(dataset), seed, 0) if args.shuffle_dataset else torch.arange(len(dataset))
    rows = tuple(order.tolist())
    return torch_data.DataLoader(
        dataset, batch_sampler=Repeated(rows, args.num_generations, prompts, repeats), collate_fn=list
    )


def loader_for_callbacks(dataset: Any, args: GRPOConfig) -> torch_data.DataLoader[Any] | None:
    """`train_loader` as callbacks get it in `train_dataloader`; None where a curriculum chooses the order."""
    return train_loader(dataset, args) if args.curriculum == "none" else None


def eval_loader(dataset: Any, args: GRPOConfig) -> torch_data.DataLoader[Any]:
    """Rows of the evaluation set in order, `per_device_eval_batch_size` completions per batch."""
    group = args.num_generations_eval or args.num_generations
    prompts = max(1, args.per_device_eval_batch_size // group)
    if not hasattr(dataset, "__len__"):
        return torch_data.DataLoader(RepeatedStream(dataset, group, prompts, 1), batch_size=None)
    rows = tuple(range(len(dataset)))
    batches = [[row for row in rows[i : i + prompts] for _ in range(group)] for i in range(0, len(rows), prompts)]
    return torch_data.DataLoader(dataset, batch_sampler=batches, collate_fn=list)
