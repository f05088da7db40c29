"""bitsandbytes optimizers on a sharded model, and resharding of optimizer state for another number of processes.

An 8-bit state consists of codes in the parameter's shape and one scale per block of 256 codes. Each process updates its own shard,
so blocks begin with the shard. In a checkpoint, codes are sharded like the parameter, and scales are a matrix with one row per process.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from covey.process.sharding import is_sharded, local, row_of_each, shard_as, shard_like, shard_size, shard_start, whole

_BLOCK = 256
"""Elements that share a scale."""
_STATES = {"state1": ("absmax1", "qmap1"), "state2": ("absmax2", "qmap2")}
"""State tensors of the parameter's shape, and the names of their scales and of their code table if they are 8-bit."""
_NESTED = "__bnb_optimizer_quant_state__"


def is_bitsandbytes(kind: type) -> bool:
    """True for a class of bitsandbytes' optimizers, or one made from it."""
    return any(base.__module__.startswith("bitsandbytes.") for base in kind.__mro__)


def embeddings_of(*modules: nn.Module) -> set[int]:
    """Ids of the embeddings' weights."""
    parts = (part for module in modules for part in module.modules())
    return {id(part.weight) for part in parts if isinstance(part, nn.Embedding)}


def select_overrides(optimizer: Any, *modules: nn.Module) -> None:
    """Take the overrides of these modules alone, out of those that bitsandbytes keeps for the process.

    It keeps them by a parameter's place, so that those of an earlier trainer's model would reach this optimizer.
    """
    shared, parts = optimizer.mng, {id(part) for module in modules for part in module.modules()}
    weights = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    manager = object.__new__(type(shared))
    manager.initialize()
    manager.uses_config_override = shared.uses_config_override
    manager.module_weight_config_triple = [
        entry for entry in shared.module_weight_config_triple if id(entry[0]) in parts
    ]
    manager.pid2config = {key: dict(config) for key, config in shared.pid2config.items() if key in weights}
    optimizer.mng = manager


def widen_embeddings(optimizer: Any, *modules: nn.Module) -> None:
    """Keep the state of embeddings in 32 bits where the rest is in 8, as transformers' trainer does.

    bitsandbytes' own override holds for the process and goes by a parameter's place, so it would reach other models' optimizers.
    """
    embeddings, config_of = embeddings_of(*modules), optimizer.get_config

    def get_config(gindex: int, pindex: int, group: Mapping[str, Any]) -> dict[str, Any]:
        config = config_of(gindex, pindex, group)
        return {**config, "optim_bits": 32} if id(group["params"][pindex]) in embeddings else config

    optimizer.get_config = get_config


@cache
def on_shards(kind: Any) -> Any:
    """Subclass of a bitsandbytes optimizer that updates the local shards of DTensor parameters."""

    class OnShards(kind):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: Mapping[str, Any]) -> dict[str, Any]:
            config = super().get_config(gindex, pindex, group)
            size = group["params"][pindex].numel()  # of the full parameter, equal on all processes
            is_small = size < config["min_8bit_size"]
            return {**config, "min_8bit_size": math.inf if is_small else 0}

        def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            self._on_shard(super().init_state, group, p, gindex, pindex)

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            if not local(p).numel():  # an empty shard: fewer rows than processes
                self.state[p]["step"] += 1
                return
            self._on_shard(super().update_step, group, p, gindex, pindex)

        def _on_shard(self, work: Callable[..., None], group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            if not is_sharded(p):
                work(group, p, gindex, pindex)
                return
            shard = local(p)
            assert p.grad is not None
            shard.grad = local(p.grad)
            self.state[shard] = self.state[p]
            try:
                work(group, shard, gindex, pindex)
            finally:
                del self.state[shard]

    return OnShards


def saved_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict` for a checkpoint, its shards as DTensors."""
    state = optimizer.state_dict()
    if not is_bitsandbytes(type(optimizer)):
        return state
    return {**state, "state": _each(optimizer, state, _to_save)}


def load_saved_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a `saved_state`, whole or of any number of processes, sharded as the parameters are now. Collective.

    An 8-bit block that lies within one saved block keeps its bits; others are quantized again.
    """
    as_now = _as_now if is_bitsandbytes(type(optimizer)) else _sharded
    optimizer.load_state_dict({**state, "state": _each(optimizer, state, as_now)})


def _each(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], change: Callable[[dict[str, Any], Tensor], Any]
) -> dict[Any, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {place: change(entry, parameters[place]) for place, entry in state["state"].items()}


def _sharded(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    return {name: shard_like(value, parameter) if isinstance(value, Tensor) else value for name, value in state.items()}


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without the inner dict in which bitsandbytes hides tensors from FSDP1."""
    return {**{name: value for name, value in state.items() if name != _NESTED}, **state.get(_NESTED, {})}


def _to_save(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    result = _flat(state)
    if not is_sharded(parameter):
        return result
    for name, (scales, _) in _STATES.items():
        if name in result:
            result[name] = shard_as(result[name], parameter)
        if scales in result:
            processes = parameter.device_mesh.size()  # type: ignore[attr-defined]
            result[scales] = row_of_each(result[scales], _blocks(shard_size(parameter, processes)), parameter)
    return result


def _as_now(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    result = _flat(state)
    for name, (scales, table) in _STATES.items():
        if name not in result or result[name].shape != parameter.shape:  # AdEMAMix's first state is two moments
            continue
        codes = local(shard_like(result[name], parameter))
        if scales in result:
            saved = whole(result[scales])
            saved = saved[None] if saved.dim() == 1 else saved
            of_each = shard_size(parameter, len(saved))
            flat, result[scales] = _reblocked(
                codes.flatten(), saved.to(codes.device), result[table].to(codes.device), of_each, shard_start(parameter)
            )
            codes = flat.view(codes.shape)
        result[name] = codes
    return result


def _blocks(elements: int) -> int:
    return math.ceil(elements / _BLOCK)


def _reblocked(codes: Tensor, scales: Tensor, table: Tensor, of_each: int, start: int) -> tuple[Tensor, Tensor]:
    """Codes [n] and scales [blocks] of blocks that begin at `start`, where element 0 of `codes` is in the whole tensor.

    `scales` [P, blocks]: of the blocks of P shards of `of_each` elements.
    """
    place = lambda element: element // of_each * scales.shape[1] + element % of_each // _BLOCK
    end = start + codes.numel()
    elements = start + torch.arange(_blocks(codes.numel()), device=codes.device)[:, None] * _BLOCK
    is_mixed = (place(elements) != place((elements + _BLOCK - 1).clamp(max=end - 1))).flatten()
    block_scales = scales.flatten()[place(elements).flatten()]
    if not is_mixed.any():
        return codes, block_scales
    filled = codes.new_zeros(len(block_scales), _BLOCK)
    filled.view(-1)[: codes.numel()] = codes
    elements = elements[is_mixed] + torch.arange(_BLOCK, device=codes.device)
    values = table[filled[is_mixed].long()] * scales.flatten()[place(elements.clamp(max=end - 1))]
    filled[is_mixed], block_scales[is_mixed] = _quantized(values.where(elements < end, 0.0), table)
    return filled.view(-1)[: codes.numel()].clone(), block_scales


def _quantized(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import quantize_blockwise

    codes, state = quantize_blockwise(values.contiguous(), code=table, blocksize=_BLOCK)
    return codes, state.absmax
