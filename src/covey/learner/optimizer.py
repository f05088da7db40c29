"""The optimizer, its learning-rate schedule, and a check that its state fits in memory."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from covey.errors import ConfigError, MemoryLimitError, ModelError
from covey.learner.shard_optimizer import is_bitsandbytes, on_shards, select_overrides, widen_embeddings
from covey.models import first_line
from covey.process.lean import imported
from covey.process.memory import is_out_of_memory, release
from covey.process.sharding import are_split, is_sharded, local

_STATES = {torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.Adagrad: 1, torch.optim.RMSprop: 1}
"""State tensors per parameter, by optimizer class; the check skips others."""


def make_optimizer(args: Any, model: nn.Module, extra: Sequence[nn.Module] = ()) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names, over the trainable parameters of `model` and of `extra` modules (a critic).

    Weight decay leaves out biases and norms, as in transformers.
    """
    get_parameter_names = imported("transformers.trainer_pt_utils").get_parameter_names

    norms = [nn.LayerNorm]
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("The model has no trainable parameters; unfreeze some, or pass peft_config=.")
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    for module in (model, *extra):
        decayed = set(get_parameter_names(module, norms, patterns))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (with_decay if name in decayed else without).append(parameter)
    groups = [{"params": with_decay, "weight_decay": args.weight_decay}, {"params": without, "weight_decay": 0.0}]
    make, kwargs = imported("transformers.trainer").Trainer.get_optimizer_cls_and_kwargs(args, model)
    if "params" in kwargs or "model" in kwargs or "optimizer_dict" in kwargs:
        raise ConfigError(
            f"optim={args.optim} builds its own parameter groups, which Covey cannot checkpoint; use adamw_torch."
        )
    if is_bitsandbytes(make) and are_split(model):
        make = on_shards(make)
    try:
        optimizer: torch.optim.Optimizer = make([group for group in groups if group["params"]], **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim={str(getattr(args.optim, 'value', args.optim))!r} cannot be made with these options: {first_line(error)}"
        ) from error
    if is_bitsandbytes(make):
        select_overrides(optimizer, model, *extra)
        widen_embeddings(optimizer, model, *extra)
    return optimizer


def make_scheduler(args: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    """The learning-rate schedule that `args.lr_scheduler_type` names, over `total_steps` optimizer steps."""
    from transformers import get_scheduler

    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(total_steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError, ZeroDivisionError, LookupError, AttributeError) as error:
        schedule = f"lr_scheduler_type={str(getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type))!r}"
        raise ConfigError(
            f"{schedule} cannot be made with lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}: {first_line(error)}"
        ) from error


def expect_trained(optimizer: Any, scheduler: Any, model: nn.Module, extra: Sequence[nn.Module]) -> None:
    """Raise ConfigError unless a user's optimizer holds parameters that are trained, with all of `extra`'s, and the schedule is its own."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(parameter.requires_grad and id(parameter) in held for parameter in model.parameters()):
        raise ConfigError(
            "the optimizer that was passed holds no trained parameter of the model, so nothing would change. Make it for the very "
            "object that is passed as the model, once all that is trained has been added to it."
        )
    if any(id(parameter) not in held for module in extra for parameter in module.parameters()):
        raise ConfigError(
            "the optimizer that was passed does not hold the weights of the algorithm's critic; leave it out."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "the schedule that was passed is of another optimizer than the one that trains; pass both, made together."
        )


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Numbers and flags of each group of parameters, `lr` as it is before the schedule."""
    rates = ("params", "lr", "initial_lr")
    return [
        {name: value for name, value in group.items() if name not in rates and isinstance(value, float | int | tuple)}
        | {"lr": float(group.get("initial_lr", group["lr"]))}
        for group in optimizer.param_groups
    ]


def schedule_of(scheduler: LRScheduler) -> list[float]:
    """Factor of each group's learning rate at the current step; empty for a schedule that is no function of the step."""
    return [float(factor(scheduler.last_epoch)) for factor in getattr(scheduler, "lr_lambdas", ())]


def follow_options(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    saved: Mapping[str, Any],
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Change a restored optimizer and schedule where their options are no longer those that they were `saved` with.

    `saved` has `groups` (`options_of`) and `factors` (`schedule_of`); `options` are those of now. A learning rate that was lowered on the
    way stays lowered, by the same factor.
    """
    factors = schedule_of(scheduler)
    for place, (group, before, now) in enumerate(zip(optimizer.param_groups, saved["groups"], options, strict=True)):
        group |= {name: value for name, value in now.items() if name != "lr" and before.get(name, value) != value}
        rate = group.get("initial_lr", group["lr"])
        if before["lr"] != now["lr"]:
            scale = now["lr"] / before["lr"] if before["lr"] else 1.0
            rate = rate * scale if before["lr"] else now["lr"]
            group["lr"] *= scale
            if "initial_lr" in group:
                group["initial_lr"] = rate
                for rates in [part.base_lrs for part in _schedules_in(scheduler) if hasattr(part, "base_lrs")]:
                    rates[place] = rate
        if factors != saved["factors"] or not before["lr"]:
            group["lr"] = rate * (factors[place] if factors else 1.0)
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def lower_rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, factor: float) -> None:
    """Multiply the learning rate of every parameter group now, and of all later steps of the schedule."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr", "min_lr", "max_lr"):  # the last two of OneCycleLR
            if name in group:
                group[name] *= factor
    for part in _schedules_in(scheduler):
        # the last two of CyclicLR, ReduceLROnPlateau
        for name in {"base_lrs", "max_lrs", "min_lrs"} & vars(part).keys():
            setattr(part, name, [rate * factor for rate in getattr(part, name)])
        if hasattr(part, "eta_min"):  # the least rate of CosineAnnealingLR
            part.eta_min *= factor
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _schedules_in(scheduler: LRScheduler) -> Iterator[Any]:
    """A schedule and those that it is made of, as SequentialLR and ChainedScheduler."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _schedules_in(part)


def check_room(optimizer: torch.optim.Optimizer) -> None:
    """Allocate and free the memory of the first `optimizer.step()`; a no-op once the optimizer has state.

    If only the workspace of the foreach implementation does not fit, the optimizer runs parameter by parameter from
    now on, with the same result. Raises MemoryLimitError, before any weight has changed, if the state itself does not fit.
    """
    states = _STATES.get(type(optimizer))
    if states is None or optimizer.state:
        return
    state_bytes = sum(parameter.nbytes for parameter in _trained(optimizer)) * states
    if _fits(optimizer, states, with_space=True):
        return
    if _fits(optimizer, states, with_space=False):
        for group in optimizer.param_groups:
            group["foreach"] = group["fused"] = False
        return
    raise MemoryLimitError(
        f"The state of {type(optimizer).__name__} ({state_bytes / 2**20:,.0f} MiB) does not fit in memory; use an 8-bit optimizer "
        "(optim='adamw_bnb_8bit'), train an adapter (peft_config), or choose a smaller model."
    )


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


def _fits(optimizer: torch.optim.Optimizer, states: int, with_space: bool) -> bool:
    groups = optimizer.param_groups
    wants_space = with_space and not any(group.get("fused") or group.get("foreach") is False for group in groups)
    held: list[Tensor] = []
    try:
        for parameter in _trained(optimizer):
            held += [torch.empty_like(parameter) for _ in range(states + wants_space)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True  # without garbage collection, which takes longer than many steps
    held.clear()
    release()
    return False


def clip(parameters: Sequence[torch.nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients with total norm `norm` down to `limit`."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if norm <= limit or not gradients:  # a process may have none, and torch refuses an empty list
        return
    factor = torch.tensor(limit / (norm + 1e-6), dtype=torch.float64)  # a number would be rounded to 16 bits on a CPU
    torch._foreach_mul_(gradients, factor)  # a few launches, not one a tensor


class LossScaler(torch.amp.GradScaler):
    """torch's scale of the loss for float16, over parameters of which some are split: an overflow on one process counts on all.

    torch itself agrees on an overflow in DTensors, and takes no list of them with plain tensors, such as those of a critic's head.
    """

    def _unscale_grads_(self, optimizer: Any, *scale: Any) -> dict[torch.device, Tensor]:
        infinite: dict[torch.device, Tensor] = {}
        for is_split in (False, True):
            trained = [p for group in optimizer.param_groups for p in group["params"] if is_sharded(p) == is_split]
            part: Any = SimpleNamespace(param_groups=[{"params": trained}])
            for device, overflow in super()._unscale_grads_(part, *scale).items():
                infinite[device] = torch.maximum(infinite.get(device, overflow), overflow)
        return infinite
