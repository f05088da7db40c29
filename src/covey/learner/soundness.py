"""Checks for NaN, infinities and huge values in updated weights and in the contents of a checkpoint."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.adapters import has_adapter
from covey.errors import NumericsError, SpoiledError
from covey.process.sharding import local
from covey.process.world import World

_LARGEST = 1e18
"""Smallest magnitude that is refused: its square nears the maximum of float32 (3.4e38), so the next norm would overflow."""
_NEVER_NEGATIVE = ("exp_avg_sq", "square_avg", "absmax", "acc_delta", "sum")
"""Name prefixes of optimizer state that must not be negative: second moments and scales. `sum` is Adagrad's."""
_RATES = ("lr", "initial_lr", "weight_decay", "momentum", "betas", "eps")
_MEASURED = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
_WAY_OUT = "look for a callback, hook or optimizer that writes to it, and lower learning_rate if there is none."


@torch.no_grad()
def are_sound(tensors: Iterable[Tensor]) -> bool:
    """True if all values are finite and below 1e18; one fused reduction and one synchronization.

    Tensors of other types than float16, bfloat16, float32 and float64 are not checked.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in map(local, tensors):  # each process checks its own shard
        if value.dtype in _MEASURED and value.numel() and not value.is_meta:
            by_kind.setdefault((value.device, value.dtype), []).append(value.detach())
    for (_, dtype), values in by_kind.items():
        if not abs(_size(values, dtype)) < _LARGEST and any(fault_of(value) for value in values):
            return False
    return True


def _size(values: list[Tensor], dtype: torch.dtype) -> float:
    """Upper bound of the magnitudes: NaN, infinite or at least 1e18 if a value is; false positives are possible."""
    if dtype == torch.float16:  # a norm in float16 overflows at 65504, and widening is slow
        return float(torch.stack([value.sum(dtype=torch.float32) for value in values]).sum())
    return float(torch.stack(list(torch._foreach_norm(values))).sum())


def fault_of(value: Tensor) -> str | None:
    """Fault of a tensor: `NaN`, `infinity` or the value that is too large; None for a sound tensor."""
    value = local(value)
    if value.dtype not in _MEASURED or not value.numel() or value.is_meta:
        return None
    largest = float(value.detach().abs().max())
    if math.isnan(largest):
        return "NaN"
    return "infinity" if math.isinf(largest) else f"{largest:.3g}" if largest >= _LARGEST else None


def weight_fault(named: Mapping[str, Tensor]) -> str | None:
    """Message `the weight <name> holds NaN` for the first unsound tensor, or None."""
    if are_sound(named.values()):
        return None
    faults = ((name, fault_of(value)) for name, value in named.items())
    return next(f"the weight {name} holds {fault}" for name, fault in faults if fault)


def state_fault(tree: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first fault of a checkpoint's tree: optimizer, loss scale, reference, critic, controllers; None if all are sound.

    `names`: names of the optimizer's parameters, in its order. Negative second moments and learning rates are faults too.
    """
    held = list(_held(tree, names))
    roots = [value for name, value in held if isinstance(value, Tensor) and _is_never_negative(name) and value.numel()]
    numbers = [value for _, value in held if isinstance(value, float)]
    has_roots = all(float(value.min()) >= 0 for value in roots if value.dtype in _MEASURED)
    if has_roots and all(map(math.isfinite, numbers)) and are_sound(v for _, v in held if isinstance(v, Tensor)):
        return rate_fault(tree.get("optimizer", {}).get("param_groups", ()))
    for name, value in held:
        fault = fault_of(value) if isinstance(value, Tensor) else None if math.isfinite(value) else f"{value}"
        if fault is None and _is_never_negative(name) and isinstance(value, Tensor) and float(value.min()) < 0:
            fault = "values below 0"
        if fault is not None:
            return f"{name} holds {fault}"
    return None


def _is_never_negative(name: str) -> bool:
    return name.split(" of ")[0].removeprefix("the optimizer's ").startswith(_NEVER_NEGATIVE)


def _held(tree: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Descriptions and values of the tensors and numbers in the tree."""
    for place, state in tree.get("optimizer", {}).get("state", {}).items():
        parameter = names[place] if isinstance(place, int) and place < len(names) else str(place)
        for name, value in _leaves(state, ""):
            yield f"the optimizer's {name} of {parameter}", value
    for part in ("scaler", "reference", "teacher", "critic", "average"):
        for name, value in _leaves(tree.get(part, {}), ""):
            yield f"the {part}'s {name}", value
    for name, value in _leaves(tree.get("state", {}).get("controllers", {}), ""):
        yield f"the coefficient {name}", value


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{i}")
    elif isinstance(tree, Tensor):
        yield name, local(tree)
    elif isinstance(tree, float):
        yield name, tree


def rate_fault(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Message such as `the learning rate is nan` for the first parameter group with a non-finite or negative number, or None."""
    for group in groups:
        for name in _RATES:
            entry = group.get(name)
            for value in entry if isinstance(entry, list | tuple) else [entry]:
                number = float(value) if isinstance(value, int | float | Tensor) else 0.0
                if not math.isfinite(number) or number < 0:
                    label = "learning rate" if name == "lr" else name
                    return f"the optimizer's {label} is {number:g}"
    return None


def expect_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Raise NumericsError, before any weight changes, for a non-finite or negative number in the optimizer's parameter groups."""
    if fault := rate_fault(optimizer.param_groups):
        raise NumericsError(
            f"step {step}: {fault}, so the update was not made; look at the callback or the schedule (lr_scheduler_type) that "
            "sets it, and resume from the last checkpoint."
        )


def expect_sound(fault: str | None, when: str, *, anywhere: bool) -> None:
    """Raise SpoiledError if any process found a fault (`anywhere`); `fault` is this process's own, or None."""
    if anywhere:
        raise SpoiledError(f"{when}: {fault or 'the weights of another process are not finite'}; {_WAY_OUT}")


def expect_sound_training(
    model: torch.nn.Module, critic: Sequence[Tensor], world: World, when: str, *, whole: bool = False
) -> None:
    """Raise SpoiledError on every process unless the trained weights of model and critic are finite on all of them.

    `whole`: check frozen weights and saved buffers too.
    """
    weights = saved_weights(model) if whole else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_sound = are_sound([*trained, *critic, *weights.values()])
    fault = None
    if not is_sound:
        named = dict(model.named_parameters()) | {f"{i} of the critic": value for i, value in enumerate(critic)}
        fault = weight_fault({**named, **weights})
    expect_sound(fault, when, anywhere=world.any(not is_sound))


def saved_weights(model: Any) -> dict[str, Tensor]:
    """Tensors of the model in a checkpoint: every weight and buffer, or the adapter's alone."""
    if has_adapter(model):
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(model, adapter_name=model.active_adapter))
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in its order; the critic's are numbered."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [by_id.get(id(parameter), f"the critic's weight {i}") for i, parameter in enumerate(every)]
