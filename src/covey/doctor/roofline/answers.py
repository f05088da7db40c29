"""Answers that follow from a plan: batches that fit, and whether LoRA, more GPUs or asynchrony pays."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from covey.doctor.roofline.cluster import in_bfloat16
from covey.doctor.roofline.estimate import Estimate, Setup, estimate
from covey.errors import ConfigError
from covey.learner.memory_estimate import in_gib

PAYS = 1.1
"""Speed-up from which a change pays."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One change, with its predicted speed and memory."""

    change: str
    said: str
    pays: bool
    speed: float | None = None
    """Steps a second, by those of the plan; None: not comparable."""
    peak: int | None = None
    """Bytes on each device."""
    host: int = 0
    """Bytes in the host memory of each node."""


def rows_that_fit(plan: Estimate) -> int:
    """Completions of a micro-batch that fit on one device, on the line from the plan's largest one through half of it; 0: not even one.

    Small micro-batches tell little: their peak may be that of the update, which does not grow with them.
    """
    setup, rows, peak = plan.setup, plan.measurement.rows, plan.measurement.peak
    other = rows // 2 if rows > 1 else 2
    slope = (peak - setup.with_rows(other).measure().peak) / (rows - other)
    free = setup.gpu.memory - plan.held.learning
    if slope <= 0:
        return rows if free >= 0 else 0
    return max(0, int(rows + free // slope))


def answers(plan: Estimate, lora: Any) -> Iterator[Answer]:
    """Predictions for LoRA (`lora` is PEFT's configuration, None: not installed, or in use), FSDP, twice the GPUs, and asynchrony."""
    setup = plan.setup
    if lora is not None and setup.adapter is None:
        change = "LoRA of rank 16 on frozen weights in bfloat16 (--lora-r 16 --dtype bfloat16)"
        yield _answer_of(plan, estimate(replace(in_bfloat16(setup), adapter=lora)), change)
    elif setup.adapter is not None and plan.measurement.dtype == torch.float32 and setup.args.bf16:
        yield _answer_of(plan, estimate(in_bfloat16(setup)), "frozen weights in bfloat16 (--dtype bfloat16)")
    if setup.writers:
        return  # the rest changes who writes, which --cluster compares
    split = plan
    if not setup.is_split and setup.gpus > 1:
        measured = plan.measurement if plan.fits else None  # with room, for longer passes
        split = estimate(replace(setup, is_split=True), measured)
        yield _answer_of(plan, split, "a split model (--fsdp true)")
    if split.setup.is_split and not setup.offloads and not split.fits:
        change = "a split model with its shards in host memory (--fsdp 'full_shard offload')"
        on_host = estimate(replace(split.setup, offloads=True), split.measurement)
        yield replace(_answer_of(plan, on_host, change), host=on_host.host)
    doubled = _on(setup, 2 * setup.gpus)
    if doubled is not None:
        more = estimate(doubled, plan.measurement)
        yield _answer_of(plan, more, f"{doubled.gpus} GPUs instead of {setup.gpus}", must=1.6)
    yield asynchrony(plan)


def _answer_of(plan: Estimate, other: Estimate, change: str, must: float = PAYS) -> Answer:
    peak = other.held.peak
    if not other.fits_hosts:
        has = in_gib(other.setup.host_memory or 0)
        return Answer(change=change, said=f"does not fit a node that has {has} of host memory", pays=False, peak=peak)
    if not other.fits:
        return Answer(change=change, said=f"{in_gib(peak)} at the peak, which does not fit", pays=False, peak=peak)
    if not plan.fits:
        sentence = f"{other.seconds.step:.3g} s a step, {in_gib(peak)} at the peak; it would fit"
        return Answer(change=change, said=sentence, pays=True, peak=peak)
    speed = plan.seconds.step / other.seconds.step
    sentence = f"{other.seconds.step:.3g} s a step, {speed:.2f} times as fast, {in_gib(peak)} at the peak"
    return Answer(change=change, said=sentence, pays=speed >= must, speed=speed, peak=peak)


def _on(setup: Setup, gpus: int) -> Setup | None:
    """The same step on another number of GPUs; None where its completions do not divide among them."""
    args = copy.copy(setup.args)
    if args.gradient_accumulation_steps % 2 == 0:
        args.gradient_accumulation_steps //= 2
        args.steps_per_generation = None if args.steps_per_generation is None else args.steps_per_generation // 2
    elif args.per_device_train_batch_size % 2 == 0:
        args.per_device_train_batch_size //= 2
    else:
        return None
    return replace(setup, args=args, gpus=gpus)


def asynchrony(plan: Estimate) -> Answer:
    """Some GPUs write completions without pause, the others learn, against all of them doing one after the other.

    The gain is the end of each rollout, where few completions still run and their steps read all weights.
    """
    setup, change = plan.setup, "asynchronous rollouts on GPUs of their own (max_staleness 1)"
    count = setup.gpus
    if not plan.fits:
        return Answer(change=change, said="asked of a run that fits", pays=False)
    if count < 2:
        sentence = "needs a second GPU: on one, writing and learning take turns anyway"
        return Answer(change=change, said=sentence, pays=False)
    tokens = plan.completions * setup.mean
    best, at = float("inf"), 0
    for samplers in range(plan.decoding.gpus, count, plan.decoding.gpus):
        engines = samplers // plan.decoding.gpus
        rate = engines * plan.decoding.rate(-(-plan.completions // engines), setup.prompt_tokens, setup.mean)
        learning = (plan.seconds.scoring + plan.seconds.update) * count / (count - samplers)
        step = max(tokens / rate, learning)
        best, at = (step, samplers) if step < best else (best, at)
    if not at:
        raise ConfigError("One engine takes all GPUs; lower --vllm-tensor-parallel-size.")
    speed = plan.seconds.step / best
    sentence = f"{best:.3g} s a step, {speed:.2f} times as fast, with {at} of {count} GPUs writing"
    return Answer(change=change, said=sentence, pays=speed >= PAYS, speed=speed)
