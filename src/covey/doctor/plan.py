"""Checks of the plan: batch arithmetic, memory, disk, time, and the learning rate against published values."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from covey.config import GRPOConfig
from covey.config.batches import Arithmetic
from covey.data import vocabulary_size
from covey.doctor.finding import Finding, attempt, failed, passed, warned
from covey.doctor.trial import Trial
from covey.learner.worst_case import Longest, try_longest
from covey.models import context_limit, rope_factors, take_factors
from covey.process.device import free_on, held_by_this_process
from covey.process.world import World
from covey.training.build_algorithm import build_algorithm
from covey.training.build_learner import RunInputs, build_learner
from covey.training.loading import load_for_training


def batches(counts: Arithmetic, num_prompts: int | None) -> Iterator[Finding]:
    """Prompts and completions of a step. Sizes that do not divide are refused when the options are read."""
    facts = {
        "prompts": counts.prompts_per_generation,
        "completions_a_step": counts.completions_per_step,
        "steps": counts.total_steps,
    }
    sentence = f"{_prompts(counts.prompts_per_generation)} x {counts.num_generations} completions a generation batch, {counts.completions_per_step} "
    yield passed("batches", sentence + f"completions a step, {counts.total_steps:,} steps", **facts)
    if num_prompts is not None and num_prompts < counts.prompts_per_generation:
        sentence = f"a generation batch takes {counts.prompts_per_generation} prompts, and the data set has {num_prompts}: each is drawn several times a batch."
        yield warned("batches", sentence, "give more prompts, or lower --gradient-accumulation-steps")
    if counts.prompts_per_generation < 4:
        sentence = f"a step learns from {_prompts(counts.prompts_per_generation)}, so its direction is mostly chance."
        yield warned("batches", sentence, "raise --gradient-accumulation-steps; it costs time, not memory")
    if counts.epochs is not None and counts.epochs > 50:
        sentence = f"{counts.epochs:.0f} passes over the same prompts: the run will learn them by heart."
        yield warned("batches", sentence, "give more prompts, or fewer --max-steps")


def _prompts(count: int) -> str:
    return f"{count} prompt" if count == 1 else f"{count} prompts"


def memory(predicted: int, available: int, where: str) -> Finding:
    """FAIL when the predicted peak is more than there is, WARN from 85% of it."""
    facts = {"predicted": predicted, "available": available}
    sentence = f"{predicted / 2**30:.2f} GiB predicted at the peak, {available / 2**30:.1f} GiB {where}"
    fix = (
        "lower --per-device-train-batch-size (more --gradient-accumulation-steps instead) or --max-completion-length, use "
        "--gradient-checkpointing, or train an adapter, --lora-r 16"
    )
    if predicted > available:
        return failed("memory", sentence + ".", fix, **facts)
    return (
        warned("memory", sentence + ".", fix, **facts)
        if predicted > 0.85 * available
        else passed("memory", sentence, **facts)
    )


def longest_batch(tried: Longest) -> Finding:
    """WARN when the longest micro-batch had to be made smaller."""
    what = f"{tried.rows} completions of {tried.completion_tokens} tokens behind prompts of {tried.prompt_tokens}"
    facts = {"longest_rows": tried.rows, "longest_seconds": tried.seconds}
    if tried.events:
        fix = "it will train, slower; lower --per-device-train-batch-size or --max-completion-length to begin there"
        return warned("memory", f"the longest micro-batch, {what}, does not fit: {tried.events[-1].said}", fix, **facts)
    return passed("memory", f"the longest micro-batch, {what}, fits: tried in {tried.seconds:.2g} s", **facts)


def available_memory(device: torch.device, loaded: Any = None) -> tuple[int, str]:
    """Bytes that a run has on the device, and in words where: free memory, and the memory that this process holds until it ends.

    `loaded`: the model that was loaded for looking at, which on a CPU is counted by its weights.
    """
    if device.type != "cpu":
        return free_on(device) + held_by_this_process(device), "free on the accelerator"
    info = psutil.Process().memory_info()
    private = info.rss - getattr(info, "shared", 0)  # pages of files, which safetensors maps, count as free already
    weights = 0 if loaded is None else sum(x.numel() * x.element_size() for x in loaded.parameters())
    return free_on(device) + min(weights, private), "free in memory"


def disk(folder: Path, model: Any, args: Any) -> Finding:
    """Disk space for checkpoints: weights, and two moments of the trained weights, each."""
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    trained = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    size = (weights if trained == weights else trained) + (0 if args.save_only_model else 2 * trained)
    count = 0 if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no" else args.save_total_limit or 3
    free = shutil.disk_usage(next(path for path in (folder, *folder.resolve().parents) if path.exists())).free
    facts = {"checkpoint": size, "free": free}
    sentence = f"a checkpoint takes about {size / 2**30:.2g} GiB, {free / 2**30:.1f} GiB are free"
    fix = "free some space, choose another --output-dir, or set --save-total-limit 1"
    if count and size > free:
        return failed("disk", sentence + ".", fix, **facts)
    return warned("disk", sentence + ".", fix, **facts) if count * size > free else passed("disk", sentence, **facts)


def expected_time(trial: Trial, counts: Arithmetic) -> Finding:
    """Seconds a step and hours of the run, from the trial by the number of completions; larger batches are quicker an answer."""
    rolled = counts.completions_per_generation / trial.num_completions / counts.optimizer_steps_per_generation
    learnt = counts.completions_per_step / trial.num_completions
    step = (trial.seconds["rollout"] + trial.seconds["reward"]) * rolled + trial.seconds["learn"] * learnt
    total = step * counts.total_steps
    parts = ", ".join(
        f"{name} {100 * spent / sum(trial.seconds.values()):.0f}%" for name, spent in trial.seconds.items()
    )
    sentence = f"about {step:.3g} s a step, {in_words(total)} for {counts.total_steps:,} steps ({parts}), measured on {trial.num_completions} completions"
    return passed(
        "time",
        sentence,
        seconds_a_step=step,
        seconds=total,
        **{f"trial_{name}": value for name, value in trial.seconds.items()},
    )


def in_words(seconds: float) -> str:
    """A duration for a person.

    >>> in_words(90), in_words(5400), in_words(260000)
    ('90 s', '1.5 hours', '3.0 days')
    """
    for size, name in ((86400.0, "days"), (3600.0, "hours")):
        if seconds >= 1.5 * size or (name == "hours" and seconds >= size):
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 60:.0f} minutes" if seconds > 120 else f"{seconds:.0f} s"


def learning_rate(args: Any, remarks: Sequence[str], *, is_adapter: bool, is_small: bool = False) -> Iterator[Finding]:
    """Remarks on options far from published values, each with its source."""
    for remark in remarks:
        yield warned("options", remark, "keep it only if you know that it suits your model")
    if not any(remark.startswith("learning_rate") for remark in remarks):
        kind = "an adapter" if is_adapter else "all weights"
        shown = f"learning_rate={args.learning_rate:g} for {kind}"
        verdict = (
            "no experience is on record for a model as small as this" if is_small else "within what is known to work"
        )
        yield passed("options", f"{shown}: {verdict}", rate=args.learning_rate)


def try_without_data(model: str, args: GRPOConfig, peft_config: Any, prompt_tokens: int) -> Finding:
    """Load the model and take the longest micro-batch forward and backward; FAIL where one completion does not fit."""
    outcome, wrong = attempt("memory", lambda: _try_longest(model, args, peft_config, prompt_tokens))
    return longest_batch(outcome) if outcome is not None else wrong or failed("memory", "not tried.")


def _try_longest(model: str, args: GRPOConfig, peft_config: Any, prompt_tokens: int) -> Longest:
    loaded = load_for_training(model, args, args.device, peft_config=peft_config)
    limit = context_limit(loaded.model)
    if limit is not None and prompt_tokens + args.max_completion_length > limit and rope_factors(loaded.model):
        take_factors(loaded.model, "long")
        limit = context_limit(loaded.model)
    algorithm, nothing = build_algorithm(args), cast(Any, None)  # one forward pass needs no rewards and no data
    inputs = RunInputs(
        args, loaded.model, loaded.tokenizer, loaded.eos_ids, algorithm, nothing, nothing, World.of(args)
    )
    learner = build_learner(inputs, 1, (None, None), is_off_policy=False)
    return try_longest(
        learner,
        algorithm.resolve(algorithm.initial_controllers()),
        prompt_tokens=prompt_tokens if limit is None else min(prompt_tokens, limit - args.max_completion_length),
        group=args.num_generations,
        vocabulary=vocabulary_size(loaded.model),
    )
