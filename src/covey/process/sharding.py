"""A model's parameters, gradients and optimizer state split over the processes of a run: PyTorch's FSDP2 (`fully_shard`).

Each block of layers is gathered when its forward or backward begins and freed when it ends. A parameter is then a `DTensor`
of which every process holds the rows `torch.chunk` gives it; a gradient arrives summed and split in the same way.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from covey.errors import ModelError
from covey.process.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """How a model is split."""

    reshard_after_forward: bool = True
    """True: a block's parameters are freed after its forward and gathered again for its backward (ZeRO-3). False: kept (ZeRO-2)."""
    blocks: tuple[str, ...] | None = None
    """Classes of the modules that are gathered one at a time; None: those that the model names, (): the whole model at once."""


class Shards:
    """A module that is split. Every process must call each method, in the same order and as often."""

    def __init__(self, module: nn.Module, world: World, sharding: Sharding, *, keeps_whole: bool = False) -> None:
        """Split `module` in place. `keeps_whole`: for whoever needs plain weights at times, see `gathered`.

        Raises ModelError for a model without blocks of the classes that are wanted.
        """
        from torch.distributed.fsdp import fully_shard

        self.module, self.world = module, world
        self.whole: nn.Module | None = _alias(module) if keeps_whole else None
        """A plain copy of the module; its weights are in memory until the first `free`, and while `gathered`."""
        mesh = mesh_of(world)
        for block in _blocks(module, sharding.blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
        self.root = _Root(module)
        fully_shard(self.root, mesh=mesh, reshard_after_forward=None if sharding.reshard_after_forward else False)
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)  # denominators are those of the whole step already
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def run(self, work: Callable[[], T]) -> T:
        """`work()`, in which the module may be called and the weights outside of its blocks be read. Returns tensors in a tuple or alone."""
        with self.world.passes():
            found: T = self.root(work)
        if not torch.is_grad_enabled():  # else the backward pass still needs them
            for part in self._parts():
                part.reshard()
        return found

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """`whole`, with the weights of this moment: one collective a block, and the memory is given back at the end."""
        assert self.whole is not None
        with self.world.passes():
            self._fill(self.whole)
        try:
            yield self.whole
        finally:
            self.free()

    def free(self) -> None:
        """Give the memory of `whole` back."""
        for parameter in () if self.whole is None else self.whole.parameters():
            parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def _fill(self, whole: nn.Module) -> None:
        done: set[int] = set()
        for part in self._parts():
            part.unshard()
            for i, (mine, theirs) in enumerate(zip(self.module.parameters(), whole.parameters(), strict=True)):
                if i not in done and not is_sharded(mine):
                    done.add(i)
                    theirs.untyped_storage().resize_(theirs.nbytes)
                    theirs.data.copy_(mine.data)
            part.reshard()

    def _parts(self) -> list[Any]:
        """The root and the blocks, each gathered as one."""
        from torch.distributed.fsdp import FSDPModule

        return [part for part in self.root.modules() if isinstance(part, FSDPModule)]


class _Root(nn.Module):
    """Runs work inside of FSDP's hooks: the model's own forward is not what the learner calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], T]) -> T:
        owned = lambda x: x.clone() if isinstance(x, Tensor) and x._is_view() else x  # FSDP hooks what is returned
        found: T = tree_map(owned, work())
        return found


def mesh_of(world: World) -> Any:
    """All processes of the run in one row."""
    return _mesh(world.device.type, world.size)


@cache
def _mesh(device: str, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (size,))  # named, or `fully_shard` would take an accelerator for a model on the CPU


def _blocks(module: nn.Module, wanted: Sequence[str] | None) -> list[nn.Module]:
    named = wanted if wanted is not None else _no_split(module)
    found = [part for part in module.modules() if type(part).__name__ in named]
    if named and not found:
        raise ModelError(
            f"{type(module).__name__} has no module of the class {', '.join(sorted(named))} to split; name the class of its layers "
            "in fsdp_config={'transformer_layer_cls_to_wrap': [...]}, or set 'auto_wrap_policy': 'NO_WRAP'."
        )
    inner = {id(below) for part in found for below in part.modules() if below is not part}
    return [part for part in found if id(part) not in inner]


def _no_split(module: nn.Module) -> list[str]:
    """Classes of layers that transformers never splits over devices: the blocks of its models."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    if not names:
        raise ModelError(
            f"{type(module).__name__} does not say which of its modules are its layers; name their class in "
            "fsdp_config={'transformer_layer_cls_to_wrap': [...]}."
        )
    return sorted(names)


def _alias(module: nn.Module) -> nn.Module:
    """A copy of the module whose parameters share the memory of the module's own."""
    shared = {id(p): nn.Parameter(_own(p.data), requires_grad=p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, dict[int, Any](shared))


def _own(value: Tensor) -> Tensor:
    """The tensor, or a copy where others share its memory: it can be freed alone."""
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


# -- tensors that are split ---------------------------------------------------------------------------------------------


def is_sharded(value: Any) -> bool:
    """True for a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh") and hasattr(value, "to_local")


def are_split(module: nn.Module) -> bool:
    """True for a module of which a parameter is split."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def local(value: Tensor) -> Tensor:
    """This process's rows of a tensor that is split, sharing their memory; any other tensor as it is."""
    return value.detach().to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def whole(value: Tensor) -> Tensor:
    """A tensor that is split, put together: every process must call it. Any other tensor as it is."""
    return value.detach().full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor split as `like` is; as it is where `like` is not split or has another shape. Needs no other process."""
    if not is_sharded(like) or is_sharded(value) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    part = _rows(value, mesh.get_local_rank(), mesh.size()).to(like.device, copy=True)
    return DTensor.from_local(part, mesh, like.placements, shape=like.shape, stride=like.stride())  # type: ignore[attr-defined]


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """`target.copy_(value)`, where either may be split. Needs no other process unless `value` alone is split."""
    if is_sharded(target):
        local(target).copy_(local(shard_like(value, target)))
    else:
        target.copy_(whole(value))


def _rows(value: Tensor, rank: int, size: int) -> Tensor:
    parts = value.chunk(size)
    return parts[rank] if rank < len(parts) else value[:0]


def total_norm(tensors: Iterable[Tensor], world: World) -> float:
    """L2 norm of all tensors together, those that are split whole; 0 without any. Every process must call it."""
    given = list(tensors)
    split, plain = [x for x in given if is_sharded(x)], [x for x in given if not is_sharded(x)]
    norm = lambda values: (
        torch.nn.utils.get_total_norm(values).double().square() if values else torch.zeros(()).double()
    )
    if not split:
        return torch.nn.utils.get_total_norm(plain).item() if plain else 0.0
    part = world.sum(norm([local(x) for x in split]).to(split[0].device)).item()
    return math.sqrt(part + norm(plain).item())


def whole_state(module: nn.Module, *, trained_only: bool = False, keeps: bool = True) -> dict[str, Tensor]:
    """The module's `state_dict` put together on the CPU; tensors tied to each other stay tied. Every process must call it.

    `trained_only`: without what is frozen. `keeps` False: this process only takes part, and gets an empty dict.
    """
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    known: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        if trained_only and name in frozen:
            continue
        key = id(parameters.get(name, value))
        if key not in known:
            known[key] = whole(value).cpu() if keeps else whole(value)[:0] if value.dim() else whole(value)
        if keeps:
            found[name] = known[key]
    return found


def load_whole_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """The values of a whole `state_dict` into `own`, that of a module that is split. Raises ModelError for a name that one lacks."""
    if odd := sorted(set(own) ^ set(state)):
        raise ModelError(f"The weights do not fit the model: {odd[0]} is in one of them only.")
    for name, target in own.items():
        copy_into(target, state[name])
