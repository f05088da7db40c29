"""Sharded tensors on disk by `torch.distributed.checkpoint`; they can be read by another number of processes than wrote them."""

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
"""Subfolder of a checkpoint for sharded tensors; the checkpoint's tree has a placeholder for each."""
_MARK = "covey_sharded"


def taken_out(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree with a placeholder for each sharded tensor, and these tensors by name."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, place: str) -> Any:
        if is_sharded(value):
            tensors[place] = value
            return {_MARK: place, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Mapping):
            return {key: visit(item, f"{place}.{key}") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(visit(item, f"{place}.{i}") for i, item in enumerate(value))
        return value

    return visit(tree, "state"), tensors


def put_back(tree: Any, folder: Path, world: World, *, is_split: bool, on_host: bool = False) -> Any:
    """The tree with its placeholders replaced by tensors from `folder`, sharded as the run is now (`is_split`, with shards in
    host memory if `on_host`) or whole.

    Every process must call it. Raises CheckpointError when the files are missing or damaged.
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, use: Callable[[dict[str, Any]], Any]) -> Any:
        if isinstance(value, Mapping):
            return use(dict(value)) if _MARK in value else {key: visit(item, use) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(visit(item, use) for item in value)
        return value

    def prepare(note: dict[str, Any]) -> None:
        tensors[note[_MARK]] = _empty(
            note["shape"], getattr(torch, note["dtype"]), world if is_split else None, on_host
        )

    visit(tree, prepare)
    if not tensors:
        return tree
    try:
        load_shards(tensors, folder / FOLDER, alone=not is_split)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{folder / FOLDER} does not hold the split state that {folder.name} names ({reason}); resume from another checkpoint."
        ) from error
    return visit(tree, lambda note: tensors[note[_MARK]])


def _empty(shape: list[int], dtype: torch.dtype, world: World | None, on_host: bool) -> Tensor:
    if world is None:
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import Shard, zeros

    sharded: Tensor = zeros(shape, dtype=dtype, device_mesh=mesh_of(world), placements=[Shard(0)])
    return sharded.cpu() if on_host else sharded


def shards_refused(tensors: Mapping[str, Tensor], folder: Path) -> OSError | None:
    """Write each process's shards into `folder`, which all must see. Returns the OSError of a process that could not, or None.

    Every process must call it, and all get the same answer.
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
    """Load the tensors, sharded or whole, from the files of `shards_refused`. Collective, unless `alone`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # reading alone is intended
            dcp.load(tensors, checkpoint_id=folder, no_dist=alone)
    except CheckpointException as error:
        raise RuntimeError("; ".join(str(cause[0]) for cause in error.failures.values())) from error
