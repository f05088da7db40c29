"""Tensors that are split over processes on disk, by `torch.distributed.checkpoint`: any number of processes reads what any number wrote."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.errors import CheckpointError
from covey.process.sharding import is_sharded, mesh_of
from covey.process.world import World

FOLDER = "sharded"
"""Of a checkpoint; what it holds, the tree of the checkpoint names."""
_MARK = "covey_sharded"


def taken_out(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree with a note in place of each tensor that is split, and these by their names."""
    found: dict[str, Tensor] = {}

    def visit(value: Any, place: str) -> Any:
        if is_sharded(value):
            found[place] = value
            return {_MARK: place, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Mapping):
            return {key: visit(one, f"{place}.{key}") for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(visit(one, f"{place}.{i}") for i, one in enumerate(value))
        return value

    return visit(tree, "state"), found


def put_back(tree: Any, folder: Path, world: World, *, is_split: bool) -> Any:
    """The tree with tensors for its notes, read from `folder`: split as the run is now, or whole where it is not (`is_split`).

    Every process must call it. Raises CheckpointError when the files are missing or damaged.
    """
    wanted: dict[str, Tensor] = {}

    def visit(value: Any, use: Callable[[dict[str, Any]], Any]) -> Any:
        if isinstance(value, Mapping):
            return use(dict(value)) if _MARK in value else {key: visit(one, use) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(visit(one, use) for one in value)
        return value

    def prepare(note: dict[str, Any]) -> None:
        wanted[note[_MARK]] = _empty(note["shape"], getattr(torch, note["dtype"]), world if is_split else None)

    visit(tree, prepare)
    if not wanted:
        return tree
    try:
        load_shards(wanted, folder / FOLDER, alone=not is_split)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{folder / FOLDER} does not hold the split state that {folder.name} names ({said}); resume from another checkpoint."
        ) from error
    return visit(tree, lambda note: wanted[note[_MARK]])


def _empty(shape: list[int], dtype: torch.dtype, world: World | None) -> Tensor:
    if world is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import Shard, zeros

    found: Tensor = zeros(shape, dtype=dtype, device_mesh=mesh_of(world), placements=[Shard(0)])
    return found


def shards_refused(tensors: Mapping[str, Tensor], folder: Path) -> OSError | None:
    """Each process writes its part into `folder`, which all must see; what the disk said where it refused any of them.

    Every process must call it, and all get an answer.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(dict(tensors), checkpoint_id=folder)
    except CheckpointException as error:
        causes = [cause[0] for cause in error.failures.values()]
        refused = next((cause for cause in causes if isinstance(cause, OSError)), None)
        if refused is None:
            raise
        return refused
    return None


def load_shards(tensors: dict[str, Tensor], folder: Path, *, alone: bool) -> None:
    """Fill the tensors, split or whole, from what `shards_refused` wrote. Every process must call it, unless each reads `alone`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone is what is meant
            dcp.load(tensors, checkpoint_id=folder, no_dist=alone)
    except CheckpointException as error:
        raise RuntimeError("; ".join(str(cause[0]) for cause in error.failures.values())) from error
