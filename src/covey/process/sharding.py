"""A model's parameters, gradients and optimizer state split over the processes of a run: PyTorch's FSDP2 (`fully_shard`).

Each block of layers is all-gathered when its forward or backward begins and freed when it ends. A parameter is then a `DTensor`
of which every process holds its rows of `torch.chunk`; a gradient arrives reduce-scattered in the same way.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from covey.errors import ModelError
from covey.process.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """Options of sharding."""

    reshard_after_forward: bool = True
    """True: a block's parameters are freed after its forward and gathered again for its backward (ZeRO-3). False: kept (ZeRO-2)."""
    blocks: tuple[str, ...] | None = None
    """Classes of the modules that are gathered one at a time; None: the model's `_no_split_modules`, (): the whole model at once."""
    offloads: bool = False
    """Shards, their gradients and the optimizer's state are in host memory; each gather copies a block to the device."""


class Shards:
    """A sharded module. All methods are collective."""

    def __init__(self, module: nn.Module, world: World, sharding: Sharding, *, keeps_whole: bool = False) -> None:
        """Shard `module` in place. `keeps_whole` enables `gathered`, for samplers that need the full weights.

        Raises ModelError for a model without blocks of the requested classes, and for parameters that cannot be split.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        blocks = _blocks(module, sharding.blocks)
        _refuse_unsplittable(module, blocks)
        self.module, self.world = module, world
        self.whole: nn.Module | None = _alias(module) if keeps_whole else None
        """An unsharded copy of the module; its weights are in memory until the first `free`, and inside `gathered`."""
        pins = world.device.type == "cuda"
        place = CPUOffloadPolicy(pin_memory=pins) if sharding.offloads else OffloadPolicy()
        split = partial(fully_shard, mesh=mesh_of(world), offload_policy=place)
        for block in blocks:
            split(block, reshard_after_forward=sharding.reshard_after_forward)
        self.root = _Root(module)
        split(self.root, reshard_after_forward=None if sharding.reshard_after_forward else False)
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)  # losses are divided by the whole step's denominators already
            part.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction

    def run(self, work: Callable[[], T]) -> T:
        """Result of `work()` (a tensor or a tuple of tensors), with the weights outside of the blocks gathered."""
        with self.world.passes():
            result: T = self.root(work)
        if not torch.is_grad_enabled():  # otherwise the backward pass still needs them
            for part in self._parts():
                part.reshard()
        return result

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Context of `whole` with the current weights: one all-gather per block; the memory is freed at the end."""
        assert self.whole is not None
        self.fill(self.whole)
        try:
            yield self.whole
        finally:
            self.free()

    def free(self) -> None:
        """Free the memory of `whole`."""
        for parameter in () if self.whole is None else self.whole.parameters():
            parameter.untyped_storage().resize_(0)

    def each_block(self) -> Iterator[nn.Module]:
        """The module, once for each block, with the parameters of that block whole; they are freed when the next is asked for.

        Parameters of other blocks are DTensors. Every process must go on to the end.
        """
        with self.world.passes():
            for part in self._parts():
                part.unshard()
                try:
                    yield self.module
                finally:
                    part.reshard()

    def copy_on_host(self) -> nn.Module:
        """A plain copy of the module in the host's memory, to be filled again by `fill`. Before the first `free`."""
        assert self.whole is not None
        held = {id(p): nn.Parameter(p.data.cpu().clone(), p.requires_grad) for p in self.whole.parameters()}
        return copy.deepcopy(self.whole, dict[int, Any](held)).cpu()

    @torch.no_grad()
    def fill(self, whole: nn.Module | None) -> None:
        """Copy the current weights into a plain copy, one all-gather per block. None: only take part."""
        done: set[int] = set()
        for module in self.each_block():
            for i, (mine, theirs) in enumerate(
                zip(module.parameters(), () if whole is None else whole.parameters(), strict=whole is not None)
            ):
                if i not in done and not is_sharded(mine):
                    done.add(i)
                    theirs.untyped_storage().resize_(theirs.nbytes)
                    theirs.data.copy_(mine.data)

    def _parts(self) -> list[Any]:
        """The FSDP modules: the root and the blocks."""
        from torch.distributed.fsdp import FSDPModule

        return [part for part in self.root.modules() if isinstance(part, FSDPModule)]


class _Root(nn.Module):
    """FSDP root whose forward runs any work: the learner calls parts of the model, not its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], T]) -> T:
        owned = lambda x: x.clone() if isinstance(x, Tensor) and x._is_view() else x  # FSDP hooks the outputs
        outputs: T = tree_map(owned, work())
        return outputs


def mesh_of(world: World) -> Any:
    """One-dimensional device mesh of all processes."""
    return _mesh(world.device.type, world.size)


@cache
def _mesh(device: str, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (size,))  # explicit: `fully_shard` would pick an accelerator for a model on the CPU


def _blocks(module: nn.Module, class_names: Sequence[str] | None) -> list[nn.Module]:
    named = class_names if class_names is not None else layer_classes(module)
    blocks = [part for part in module.modules() if type(part).__name__ in named]
    if named and not blocks:
        raise ModelError(
            f"{type(module).__name__} has no module of the class {', '.join(sorted(named))} to split; name the class of its layers "
            "in fsdp_config={'transformer_layer_cls_to_wrap': [...]}, or set 'auto_wrap_policy': 'NO_WRAP'."
        )
    inner = {id(below) for part in blocks for below in part.modules() if below is not part}
    return [part for part in blocks if id(part) not in inner]


def _refuse_unsplittable(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise ModelError for a parameter in several blocks, which FSDP2 cannot gather, or with a hook on its gradient, which it drops."""
    count = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    for name, parameter in module.named_parameters():
        if count[id(parameter)] > 1:
            why = "is shared by several blocks of layers, and a split model gathers one block at a time"
        elif parameter._backward_hooks:
            why = "has a hook on its gradient, which is lost where a model is split"
        else:
            continue
        raise ModelError(f"The parameter {name} {why}; leave fsdp out.")


def layer_classes(module: nn.Module) -> list[str]:
    """Class names in transformers' `_no_split_modules`: the decoder blocks."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    if not names:
        raise ModelError(
            f"{type(module).__name__} does not say which of its modules are its layers; name their class in "
            "fsdp_config={'transformer_layer_cls_to_wrap': [...]}."
        )
    return sorted(names)


def _alias(module: nn.Module) -> nn.Module:
    """A copy of the module whose parameters share the memory of the module's own."""
    shared = {id(p): nn.Parameter(_owning(p.data), requires_grad=p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, dict[int, Any](shared))


def _owning(value: Tensor) -> Tensor:
    """The tensor, or a copy if it shares storage with others or with a library, so that it can be freed alone."""
    storage = value.untyped_storage()
    return value if storage.nbytes() == value.nbytes and storage.resizable() else value.clone()


# -- sharded tensors ----------------------------------------------------------------------------------------------------


def is_sharded(value: Any) -> bool:
    """True for a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh") and hasattr(value, "to_local")


def depending(hidden: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The tensor, which depends with gradient 0 on the parameters outside of the blocks.

    A pass may not run all of them, such as the vision tower, and every process must reduce the same gradients.
    """
    rest = [parameter.sum() for parameter in parameters if not is_sharded(parameter)]
    return hidden + 0.0 * torch.stack(rest).sum() if rest else hidden


def are_split(module: nn.Module) -> bool:
    """True if a parameter of the module is sharded."""
    return any(is_sharded(parameter) for parameter in module.parameters())


def are_on_host(module: nn.Module) -> bool:
    """True if the module's shards are in host memory, and another device computes with them."""
    return any(compute_device(parameter) != parameter.device for parameter in module.parameters())


def compute_device(value: Tensor) -> torch.device:
    """Device that computes with a parameter: that of its mesh if it is sharded, whose shards may be in host memory."""
    if not is_sharded(value) or value.device.type == (kind := value.device_mesh.device_type):  # type: ignore[attr-defined]
        return value.device
    return torch.device(kind, torch.get_device_module(kind).current_device())


def local(value: Tensor) -> Tensor:
    """Local shard of a DTensor, sharing its memory; any other tensor unchanged."""
    return value.detach().to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def whole(value: Tensor) -> Tensor:
    """Full tensor of a DTensor (all-gather, collective); any other tensor unchanged."""
    if not is_sharded(value):
        return value
    full: Tensor = _on_mesh(local(value), value).full_tensor()  # type: ignore[attr-defined]
    return full


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """A full tensor sharded like `like`; unchanged if `like` is not sharded or has another shape. Not collective."""
    if not is_sharded(like) or is_sharded(value) or value.shape != like.shape:
        return value
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    return shard_as(_rows(value, mesh.get_local_rank(), mesh.size()).to(like.device, copy=True), like)


def shard_as(part: Tensor, like: Tensor) -> Tensor:
    """The DTensor sharded like `like` whose local shard is `part`, sharing its memory, or a copy in host memory if `like` is there.

    Not collective.
    """
    if compute_device(like) == like.device:
        return _on_mesh(part, like)
    made = torch.empty_like(like.detach(), dtype=part.dtype)
    local(made).copy_(part)
    return made


def _on_mesh(part: Tensor, like: Tensor) -> Tensor:
    """The DTensor sharded like `like` with the local shard `part`, moved to the device of the mesh, where collectives run."""
    from torch.distributed.tensor import DTensor

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, like.placements, shape=like.shape, stride=like.stride())  # type: ignore[attr-defined]


def row_of_each(values: Tensor, length: int, like: Tensor) -> Tensor:
    """A sharded [P, length] with one row for each of the P processes that hold `like`: its `values` [<= length], then zeros."""
    from torch.distributed.tensor import DTensor, Shard

    row = values.new_zeros(1, length)
    row[0, : len(values)] = values
    return DTensor.from_local(row, like.device_mesh, [Shard(0)])  # type: ignore[attr-defined]


def shard_size(value: Tensor, processes: int) -> int:
    """Elements of the largest shard: all but the last processes have this many."""
    return math.ceil(len(value) / processes) * (value.numel() // len(value))


def shard_start(value: Tensor) -> int:
    """Place in the flattened full tensor at which this process's shard begins; 0 for a tensor that is not sharded."""
    if not is_sharded(value):
        return 0
    mesh: Any = value.device_mesh  # type: ignore[attr-defined]
    return int(min(shard_size(value, mesh.size()) * mesh.get_local_rank(), value.numel()))


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """`target.copy_(value)`, where either may be sharded. Collective only if `value` alone is sharded."""
    if is_sharded(target):
        local(target).copy_(local(shard_like(value, target)))
    else:
        target.copy_(whole(value))


def _rows(value: Tensor, rank: int, size: int) -> Tensor:
    parts = value.chunk(size)
    return parts[rank] if rank < len(parts) else value[:0]


def total_norm(tensors: Iterable[Tensor], world: World) -> float:
    """L2 norm of all tensors together, sharded ones in full; 0 without any. Collective."""
    items = list(tensors)
    split, plain = [x for x in items if is_sharded(x)], [x for x in items if not is_sharded(x)]
    norm = lambda values: (
        torch.nn.utils.get_total_norm(values).double().square() if values else torch.zeros(()).double()
    )
    if not split:
        return torch.nn.utils.get_total_norm(plain).item() if plain else 0.0
    part = world.sum(norm([local(x) for x in split]).to(world.device)).item()
    return math.sqrt(part + norm(plain).item())


def whole_state(
    module: nn.Module, *, trained_only: bool = False, also: Collection[str] = (), keeps: bool = True
) -> dict[str, Tensor]:
    """The module's full `state_dict` on the CPU; tied tensors stay tied. Collective.

    `trained_only`: without frozen parameters, `also` excepted. `keeps` False: this process only takes part, and gets an empty dict.
    """
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    copies: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        if trained_only and name in frozen and name not in also:
            continue
        key = id(parameters.get(name, value))
        if key not in copies:
            full = whole(value)
            part = full if keeps else full[:0] if full.dim() else full
            copies[key] = part.cpu() if is_sharded(value) else part.detach().to("cpu", copy=True)
        if keeps:
            state[name] = copies[key]
    return state


def load_whole_state(sharded: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy a full `state_dict` into `sharded`, that of a sharded module. Raises ModelError if their names differ."""
    if odd := sorted(set(sharded) ^ set(state)):
        raise ModelError(f"The weights do not fit the model: {odd[0]} is in one of them only.")
    for name, target in sharded.items():
        copy_into(target, state[name])
