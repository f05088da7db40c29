"""Trial of the longest possible micro-batch before a run, so that running out of memory shows at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from covey.algorithms import Algorithm
from covey.learner.learner import Learner
from covey.learner.packing import rows_of
from covey.learner.token_batches import totals_of
from covey.types import Completion, Event, Group, Prompt


@dataclass(frozen=True, kw_only=True)
class Longest:
    """Result of trying the longest micro-batch."""

    rows: int
    """Completions of the micro-batch, each of the maximum length."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    """Seconds of the passes before the update, and of the forward and backward pass that fitted."""
    events: tuple[Event, ...]
    """Out-of-memory events during the trial; the learner keeps the size that fits."""


def try_longest(learner: Learner, algorithm: Algorithm, *, prompt_tokens: int, group: int, vocabulary: int) -> Longest:
    """One micro-batch of the longest completions behind prompts of `prompt_tokens`, forward and backward; no weight changes.

    Raises MemoryLimitError when a single completion does not fit.
    """
    make = lambda count: groups_of(count, prompt_tokens, learner.max_completion_length, group, vocabulary)
    started = time.perf_counter()
    first = learner.micro_batcher.batches(rows_of(make(learner.micro_batcher.limits.max_rows)))[0]
    groups = learner.annotate(make(len(first)), algorithm)
    events = rehearse(learner, groups, algorithm)
    return Longest(
        rows=len(first),
        prompt_tokens=prompt_tokens,
        completion_tokens=learner.max_completion_length,
        seconds=time.perf_counter() - started,
        events=events,
    )


def rehearse(learner: Learner, groups: Sequence[Group], algorithm: Algorithm) -> tuple[Event, ...]:
    """Forward and backward of a step's largest micro-batch, without an update. Returns the out-of-memory events."""
    rows = learner.rows(groups)
    totals = totals_of(rows, learner.max_completion_length)
    learner.policy.model.train(not learner.disable_dropout or learner.policy.is_checkpointing)
    algorithm = learner.prepared(algorithm, (rows,), totals)
    work = lambda: learner.accumulate(learner.micro_batcher.batches(rows)[0], algorithm, totals)
    try:
        learner.micro_batcher.attempt(work, learner.forget)
    finally:
        learner.forget()
    return learner.micro_batcher.limits.take_events()


def groups_of(count: int, prompt_tokens: int, completion_tokens: int, size: int, vocabulary: int) -> list[Group]:
    """`count` completions of random tokens in groups of `size`, with advantages, so that all have a gradient."""
    draw = torch.Generator().manual_seed(0)
    drawn = lambda length: torch.randint(vocabulary, (length,), generator=draw)
    answer = lambda: Completion(token_ids=drawn(completion_tokens), text="", finish="length")
    groups: list[Group] = []
    for start in range(0, count, size):
        answers: Sequence[Completion] = [answer() for _ in range(min(size, count - start))]
        prompt = Prompt(uid=f"longest:{start}", token_ids=tuple(drawn(max(1, prompt_tokens)).tolist()))
        returns = torch.zeros(len(answers), completion_tokens)  # for a critic
        groups.append(
            Group(prompt=prompt, completions=tuple(answers), advantages=torch.ones(len(answers)), returns=returns)
        )
    return groups
