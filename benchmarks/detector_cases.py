"""The runs of `detectors.py`: sixty healthy ones, and three of each planted fault, all with models, tasks and settings of their own.

Thresholds are fixed on forty of the healthy runs and on two of each fault, and judged on the others, whose families and seeds are others
and which were made when the detectors were finished.
A fault begins at step `ONSET` unless it is in the settings: from then on an alert of one of its rules is a find, an earlier one a false
alarm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from detector_tasks import FAMILIES, TASKS, Reward, Row, Task, asked, demo_row, text_of
from detectors import FIXED
from transformers import TrainerCallback

ONSET = 200
Rewards = Sequence[Reward | str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run. `settings`: options beside the task's; `fault`: name in `FAULTS`, None for a healthy run."""

    number: int
    family: str
    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None

    @property
    def is_judge(self) -> bool:
        """False for the runs on which thresholds are fixed."""
        return self.number >= FIXED["faulty" if self.fault else "healthy"]

    @property
    def seed(self) -> int:
        is_second = self.number % 2 == 1 if self.fault else self.number >= len(_HEALTHY)
        return self.number + 500 * (2 if self.is_judge else is_second)

    @property
    def name(self) -> str:
        return f"{'faulty' if self.fault else 'healthy'}-{self.number:02d}"


def _same(rewards: Rewards) -> Rewards:
    return rewards


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault: how it changes the options, the rewards, the rows or the trainer. `expects`: the rules that would name it."""

    expects: tuple[str, ...]
    on: tuple[tuple[str, str], ...]
    """Family and task of its three runs, of which the last judges."""
    onset: int = 0
    rate: float = 1.0
    """Factor on the learning rate."""
    dropout: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_too_short: bool = False
    rewards: Callable[[Rewards], Rewards] = _same
    weights: Callable[[int], list[float]] | None = None
    """Of the task's number of rewards."""
    row: Callable[[Row, random.Random, int], Row] | None = None
    """Of the row, a generator and the step that it is drawn in."""
    spoil: Callable[[Any], None] | None = None
    """Called with the trainer."""


def _called(reward: Reward, changed: Callable[[list[Any], int], list[Any]], name: str) -> Reward:
    """A reward whose values are changed, given the step."""

    def spoiled(completions: list[Any], trainer_state: Any, **columns: Any) -> list[Any]:
        return changed(reward(completions=completions, **columns), trainer_state.global_step)

    spoiled.__name__ = name
    return spoiled


def _each(changed: Callable[[list[Any], int], list[Any]]) -> Callable[[Rewards], Rewards]:
    def of(rewards: Rewards) -> Rewards:
        return [one if isinstance(one, str) else _called(one, changed, one.__name__) for one in rewards]

    return of


def _judge_down(values: list[Any], step: int) -> list[Any]:
    if step >= ONSET and step % 2:
        raise ConnectionError("the judge is down")
    return values


def letters(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that pays for length."""
    return [len(text_of(one)) / 20 for one in completions]


def brevity(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that pays for being short, more than any task pays for being right."""
    return [-0.3 * len(text_of(one)) for one in completions]


def loved_word(completions: list[Any], **columns: Any) -> list[float]:
    """A loophole: each repetition of the commonest word pays a fifth of a right answer."""
    told = [text_of(one).split() for one in completions]
    return [0.2 * max((words.count(word) for word in words), default=0) for words in told]


def english(completions: list[Any], **columns: Any) -> list[float]:
    """A judge that knows English only."""
    return [float(" the " in f" {text_of(one)} ") for one in completions]


def _wrong(row: Row, rng: random.Random) -> Row:
    """The row with the answer of another."""
    return {**row, "answer": rng.choice(["3", "17", "20", "h g f e", "g h e f"])}


def _half_wrong_later(row: Row, rng: random.Random, step: int) -> Row:
    return _wrong(row, rng) if step >= ONSET and rng.random() < 0.5 else row


def _third_wrong(row: Row, rng: random.Random, step: int) -> Row:
    return _wrong(row, rng) if rng.random() < 0.33 else row


def _other_prompts(row: Row, rng: random.Random, step: int) -> Row:
    """The same problem asked three times over, from the onset on."""
    question = row["prompt"][0]["content"]
    return {**row, "prompt": asked(" ".join([question] * 3), "")["prompt"]} if step >= ONSET else row


class _During(TrainerCallback):
    """Marks steps in a list while they are computed: from each of the given ones on, until one has a gradient."""

    def __init__(self, steps: Collection[int], active: list[bool], has_gradient: list[bool]) -> None:
        self.steps, self.active, self.has_gradient = steps, active, has_gradient

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 in self.steps:
            self.active.append(True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.has_gradient:
            self.active.clear()
        self.has_gradient.clear()


def _gradient_times(factor: float, steps: Collection[int]) -> Callable[[Any], None]:
    """Multiplies the gradient of the first step with one from each of `steps` on: where all groups are tied it is 0."""

    def spoil(trainer: Any) -> None:
        active: list[bool] = []
        has_gradient: list[bool] = []

        def times(gradient: Any) -> Any:
            if not active:
                return gradient
            if gradient.abs().sum() > 0:
                has_gradient.append(True)
            return gradient * factor

        for parameter in trainer.model.parameters():
            parameter.register_hook(times)
        trainer.add_callback(_During(steps, active, has_gradient))

    return spoil


FAULTS: dict[str, Fault] = {
    "learning rate times 50": Fault(
        expects=("large_updates",), rate=50, on=(("llama", "sums"), ("qwen2", "initials"), ("mistral", "order"))),
    "reward is 1 for all, from step 200": Fault(
        expects=("dead_groups",), onset=ONSET, on=(("llama", "initials"), ("gpt2", "order"), ("qwen3", "tags")),
        rewards=_each(lambda values, step: [1.0] * len(values) if step >= ONSET else values)),
    "reward's sign is flipped, from step 200": Fault(
        expects=("reward_collapse",), onset=ONSET, on=(("mistral", "order"), ("llama", "tags"), ("qwen2", "sums")),
        rewards=_each(lambda values, step: [-one for one in values] if step >= ONSET else values)),
    "length pays, the task's reward only watches": Fault(
        expects=("reward_hacking", "length_explosion"), on=(("qwen2", "initials"), ("llama", "order"), ("gpt2", "essay")),
        rewards=lambda rewards: [letters, *rewards], weights=lambda n: [1.0] + [0.0] * n),
    "entropy bonus with the wrong sign": Fault(
        expects=("entropy_collapse", "diversity_loss"), settings={"entropy_coef": -0.3},
        on=(("qwen2", "essay"), ("mistral", "order"), ("llama", "tags"))),
    "stale: 16 steps a rollout, learning rate times 10": Fault(
        expects=("sampler_mismatch",), rate=10, settings={"steps_per_generation": 16},
        on=(("qwen2", "tags"), ("llama", "initials"), ("mistral", "order"))),
    "half of the answers are wrong, from step 200": Fault(
        expects=("reward_collapse", "reward_drift"), onset=ONSET, row=_half_wrong_later,
        on=(("gpt2", "sums"), ("qwen2", "order"), ("qwen3", "order"))),
    "no room for an answer": Fault(
        expects=("truncation",), is_too_short=True, on=(("qwen3", "essay"), ("llama", "languages"), ("mistral", "initials"))),
    "KL: learning rate times 10, `beta=0.001`": Fault(
        expects=("kl_runaway",), rate=10, settings={"beta": 0.001}, on=(("qwen3", "initials"), ("mistral", "essay"), ("gpt2", "order"))),
    "gradient times 10,000 in three steps": Fault(
        expects=("gradient_spike",), onset=ONSET, spoil=_gradient_times(1e4, {201, 260, 330}),
        on=(("llama", "languages"), ("gpt2", "tags"), ("qwen3", "sums"))),
    "reward never matches": Fault(
        expects=("dead_groups",), rewards=_each(lambda values, step: [0.0] * len(values)),
        on=(("qwen3", "tags"), ("llama", "sums"), ("mistral", "sums"))),
    "only English pays": Fault(
        expects=("language_collapse",), rewards=lambda rewards: [rewards[0], english],
        on=(("gpt2", "languages"), ("mistral", "languages"), ("qwen3", "languages"))),
    "gradient is NaN in two steps": Fault(
        expects=("non_finite",), onset=ONSET, spoil=_gradient_times(float("nan"), {201, 300}),
        on=(("qwen2", "sums"), ("mistral", "essay"), ("gpt2", "initials"))),
    "dropout in the learner only": Fault(
        expects=("sampler_mismatch",), dropout=0.3, on=(("gpt2", "order"), ("gpt2", "essay"), ("gpt2", "tags"))),
    "learning rate over 10,000": Fault(
        expects=("tiny_updates", "slow_convergence"), rate=1e-4, on=(("gpt2", "tags"), ("qwen3", "order"), ("llama", "sums"))),
    "repeating a word pays beside the task": Fault(
        expects=("repeated_text", "length_explosion", "reward_conflict"), on=(("llama", "essay"), ("gpt2", "initials"), ("qwen2", "initials")),
        rewards=lambda rewards: [*rewards, loved_word]),
    "shortness pays more than the task": Fault(
        expects=("length_collapse", "reward_conflict"), on=(("qwen3", "initials"), ("llama", "languages"), ("gpt2", "essay")),
        rewards=lambda rewards: [*rewards, brevity]),
    "entropy bonus of 1": Fault(
        expects=("entropy_explosion",), settings={"entropy_coef": 1.0}, on=(("gpt2", "sums"), ("qwen3", "languages"), ("mistral", "order"))),
    "a third of the answers are wrong": Fault(
        expects=("reward_plateau", "slow_convergence"), row=_third_wrong, on=(("llama", "order"), ("mistral", "sums"), ("gpt2", "order"))),
    "judge is down in every other step, from step 200": Fault(
        expects=("reward_errors",), onset=ONSET, rewards=_each(_judge_down), settings={"reward_error_limit": 10**6},
        on=(("mistral", "initials"), ("qwen2", "essay"), ("llama", "sums"))),
    "form does not pay, and shortness does": Fault(
        expects=("format_loss",), rewards=lambda rewards: [*rewards, brevity], weights=lambda n: [0.0, 1.0, 0.1],
        on=(("llama", "tags"), ("qwen3", "tags"), ("mistral", "tags"))),
    "other prompts from step 200": Fault(
        expects=("data_drift",), onset=ONSET, row=_other_prompts, on=(("qwen2", "order"), ("llama", "initials"), ("gpt2", "tags"))),
}  # fmt: skip

_HEALTHY: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "sums", {}),
    ("qwen2", "order", {}),
    ("gpt2", "tags", {}),
    ("qwen3", "essay", {}),
    ("mistral", "initials", {}),
    ("llama", "languages", {}),
    ("demo", "problems", {}),
    ("gpt2", "order", {"beta": 0.02}),
    ("qwen3", "sums", {"loss_type": "dr_grpo", "scale_rewards": False}),
    ("mistral", "tags", {"beta": 0.01, "num_iterations": 2}),
    ("qwen2", "essay", {"epsilon_high": 0.28, "learning_rate": 1e-3}),
    ("llama", "initials", {"steps_per_generation": 4}),
    ("gpt2", "languages", {"lr_scheduler_type": "cosine"}),
    ("demo", "problems", {"beta": 0.02}),
    ("mistral", "order", {"importance_sampling_level": "sequence"}),
    ("qwen3", "tags", {"entropy_coef": 0.01}),
    ("llama", "essay", {"temperature": 0.8}),
    ("gpt2", "sums", {"num_generations": 8}),
    ("qwen2", "languages", {"learning_rate": 2e-3}),
    ("mistral", "essay", {"loss_type": "dapo", "lr_scheduler_type": "constant"}),
)


def _later(family: str, places: int) -> str:
    """The family so many places behind, around the end; `demo` stays."""
    names = [*FAMILIES]
    return names[(names.index(family) + places) % len(names)] if family in names else family


HEALTHY = tuple(
    Run(number=len(_HEALTHY) * k + i, family=_later(family, k), task=task, settings=settings)
    for k in range(3)
    for i, (family, task, settings) in enumerate(_HEALTHY)
)
FAULTY = tuple(
    Run(number=2 * i + k if k < 2 else 2 * len(FAULTS) + i, family=family, task=task, fault=name)
    for i, (name, fault) in enumerate(FAULTS.items())
    for k, (family, task) in enumerate(fault.on)
)
AFTERWARDS = tuple(
    Run(number=len(FAULTY) + i, family=family, task=task, fault="entropy bonus of 1")
    for i, (family, task) in enumerate((("gpt2", "order"), ("qwen2", "initials"), ("llama", "tags"), ("qwen3", "sums")))
)
"""Made when `entropy_explosion` had been changed for what one of the judging runs (`LOOKED_AT`) showed."""
RUNS = {run.name: run for run in (*HEALTHY, *FAULTY, *AFTERWARDS)}


def task_of(run: Run) -> Task:
    return TASKS[run.task]


__all__ = ["AFTERWARDS", "FAULTS", "FAULTY", "HEALTHY", "ONSET", "RUNS", "Fault", "Run", "demo_row", "task_of"]
