"""Batch arithmetic: prompts, completions, micro-batches and optimizer steps of a run, in numbers and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from covey.config.fields import Options
from covey.declared import Count, CountOrZero, checked
from covey.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The counts of a run, over all processes.

    Example: 4 completions a device, 2 micro-batches, 1 process, G = 8: 1 prompt x 8 completions a generation batch,
    8 completions an optimizer step, 1 optimizer step a generation batch.
    """

    num_generations: int
    """G, completions a prompt."""
    prompts_per_generation: int
    completions_per_generation: int
    """Completions drawn at a time."""
    completions_per_microbatch: int
    """On one device."""
    completions_per_step: int
    """Completions that one optimizer step learns from."""
    batches_per_generation: int
    """Parts of a generation batch that optimizer steps take in turn."""
    num_iterations: int
    """Uses of each part."""
    optimizer_steps_per_generation: int
    """`batches_per_generation * num_iterations`."""
    total_steps: int
    """Optimizer steps of the run."""
    epochs: float | None
    """Passes over the prompts in `total_steps`. None: the number of prompts is not known."""

    @property
    def total_completions(self) -> int:
        """Completions that the run draws."""
        return math.ceil(self.total_steps / self.optimizer_steps_per_generation) * self.completions_per_generation

    def in_words(self) -> str:
        """A few lines for a person."""
        words = [
            f"{_count(self.prompts_per_generation, 'prompt')} x {self.num_generations} completions = "
            f"{self.completions_per_generation} completions a generation batch",
            f"{self.completions_per_step} completions an optimizer step, in micro-batches of "
            f"{self.completions_per_microbatch} on each device",
            f"{_count(self.optimizer_steps_per_generation, 'optimizer step')} a generation batch"
            + (f", each completion used {self.num_iterations} times" if self.num_iterations > 1 else ""),
            f"{_count(self.total_steps, 'optimizer step')} in all"
            + (f", {self.epochs:.3g} passes over the prompts" if self.epochs is not None else "")
            + f", {self.total_completions:,} completions drawn",
        ]
        return "\n".join(words)


@checked
def batch_arithmetic(
    config: Options, world_size: Count | None = None, num_prompts: CountOrZero | None = None
) -> Arithmetic:
    """Batch arithmetic: prompts, completions and optimizer steps of a run, from a GRPOConfig.

    `world_size` None: the processes that run now. `num_prompts` None: a stream without end, which needs `max_steps`.
    A generation batch smaller than an optimizer step is drawn whole for the step (the policy is the same), unless its
    completions are used more than once. Raises ConfigError with the numbers and what to change where they do not fit together.
    """
    args: Any = config
    micro, completions = whole_groups(args, args.world_size if world_size is None else world_size)
    prompts = completions // args.num_generations
    batches = micro // args.gradient_accumulation_steps
    steps = batches * args.num_iterations
    if args.max_steps > 0:
        total = args.max_steps
    elif num_prompts is None:
        raise ConfigError("A data set without a length has no end: set max_steps.")
    else:
        total = max(1, math.ceil(round(args.num_train_epochs * num_prompts * steps / prompts, 6)))
    return Arithmetic(
        num_generations=args.num_generations,
        prompts_per_generation=prompts,
        completions_per_generation=completions,
        completions_per_microbatch=args.per_device_train_batch_size,
        completions_per_step=completions // batches,
        batches_per_generation=batches,
        num_iterations=args.num_iterations,
        optimizer_steps_per_generation=steps,
        total_steps=total,
        epochs=total / steps * prompts / num_prompts if num_prompts else None,
    )


def whole_groups(config: Any, world_size: int) -> tuple[int, int]:
    """Micro-batches and completions of a generation batch. Raises ConfigError unless they are whole groups, in whole optimizer steps."""
    per_device, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    micro = whole_steps(config.steps_per_generation, accumulation, config.num_iterations)
    completions = per_device * world_size * micro
    if completions % config.num_generations:
        raise ConfigError(_explain(per_device, world_size, micro, accumulation, config.num_generations))
    return micro, completions


def micro_batches(share: int, accumulation: int, steps: int | None, batch: int | None) -> int:
    """Micro-batches of a generation batch, from `steps_per_generation` or `generation_batch_size` (or neither).

    `share` is the completions of one micro-batch over all processes.
    """
    if batch is None:
        return accumulation if steps is None else steps
    if steps is not None and steps * share != batch:
        raise ConfigError(
            f"generation_batch_size={batch} and steps_per_generation={steps} say two things ({steps} x {share} "
            f"completions a micro-batch = {steps * share}): give one of them."
        )
    if batch % share:
        below, above = batch // share * share, (batch // share + 1) * share
        near = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"generation_batch_size={batch} must be a multiple of {share}, the completions of one micro-batch over all "
            f"processes (per_device_train_batch_size x processes). Try {near}."
        )
    return batch // share


def whole_steps(micro: int, accumulation: int, num_iterations: int) -> int:
    """Micro-batches drawn at a time, as a whole number of optimizer steps."""
    if micro < accumulation and num_iterations == 1:
        return accumulation
    if micro % accumulation:
        above = math.ceil(micro / accumulation) * accumulation
        raise ConfigError(
            f"A generation batch of {micro} micro-batches (steps_per_generation) is not a whole number of optimizer "
            f"steps of {accumulation} micro-batches (gradient_accumulation_steps). Try steps_per_generation={above}."
        )
    return micro


def _explain(per_device: int, world_size: int, micro: int, accumulation: int, group: int) -> str:
    share = per_device * world_size
    completions = share * micro
    processes, micros = _count(world_size, "process", "processes"), _count(micro, "micro-batch", "micro-batches")
    fitting = [g for g in range(2, completions + 1) if completions % g == 0]
    near = sorted(fitting, key=lambda g: (abs(g - group), -g))[:2]
    tries = []
    if near:
        tries.append("num_generations=" + " or ".join(str(g) for g in near))
    needed = micro
    while share * needed % group:
        needed += 1 if micro == accumulation else accumulation
    name = "gradient_accumulation_steps" if micro == accumulation else "steps_per_generation"
    tries.append(f"{name}={needed} ({share * needed // group} x {group} completions)")
    size = next(size for size in range(per_device, per_device + group + 1) if size * world_size * micro % group == 0)
    tries.append(f"per_device_train_batch_size={size}")
    return (
        f"{per_device} completions a device x {processes} x {micros} = {completions} completions a generation "
        f"batch, which is not a whole number of groups of num_generations={group}. Try {', or '.join(tries)}."
    )


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
