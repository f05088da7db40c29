"""DataLoaders in the order of training with TRL's batches, for scripts that count or inspect batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from covey.config import GRPOConfig
from covey.data.order import permutation
from covey.errors import ConfigError


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
            own = [self.rows[(start + i) % len(self.rows)] for i in range(self.prompts)]
            for _ in range(self.repeats):
                yield [row for row in own for _ in range(self.group)]

    def __len__(self) -> int:
        return -(-len(self.rows) // self.prompts) * self.repeats


class RepeatedStream(IterableDataset[list[Any]]):
    """`Repeated` for a stream: one pass in the stream's order."""

    def __init__(self, rows: Any, group: int, prompts: int, repeats: int) -> None:
        self.rows, self.group, self.prompts, self.repeats = rows, group, prompts, repeats

    def __iter__(self) -> Iterator[list[Any]]:
        own: list[Any] = []
        for row in self.rows:
            own.append(row)
            if len(own) == self.prompts:
                for _ in range(self.repeats):
                    yield [one for one in own for _ in range(self.group)]
                own = []


def train_loader(dataset: Any, args: GRPOConfig) -> DataLoader[Any]:
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
        return DataLoader(RepeatedStream(dataset, args.num_generations, prompts, repeats), batch_size=None)
    seed = args.seed if args.data_seed is None else args.data_seed
    order = permutation(len(dataset), seed, 0) if args.shuffle_dataset else torch.arange(len(dataset))
    rows = tuple(order.tolist())
    return DataLoader(dataset, batch_sampler=Repeated(rows, args.num_generations, prompts, repeats), collate_fn=list)


def loader_for_callbacks(dataset: Any, args: GRPOConfig) -> DataLoader[Any] | None:
    """`train_loader` as callbacks get it in `train_dataloader`; None where a curriculum chooses the order."""
    return train_loader(dataset, args) if args.curriculum == "none" else None


def eval_loader(dataset: Any, args: GRPOConfig) -> DataLoader[Any]:
    """Rows of the evaluation set in order, `per_device_eval_batch_size` completions per batch."""
    group = args.num_generations_eval or args.num_generations
    prompts = max(1, args.per_device_eval_batch_size // group)
    if not hasattr(dataset, "__len__"):
        return DataLoader(RepeatedStream(dataset, group, prompts, 1), batch_size=None)
    rows = tuple(range(len(dataset)))
    batches = [[row for row in rows[i : i + prompts] for _ in range(group)] for i in range(0, len(rows), prompts)]
    return DataLoader(dataset, batch_sampler=batches, collate_fn=list)
