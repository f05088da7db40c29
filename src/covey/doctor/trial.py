"""Trial step: a few prompts sampled, scored and trained on by the run's own parts, timed; nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from covey.algorithms.greedy import with_greedy_rewards
from covey.learner import Learner
from covey.rollout import Sampler, choose_sampler
from covey.training.build import build_prompts
from covey.training.build_learner import RunInputs, build_learner
from covey.training.build_sampler import sampler_options, sampling_params
from covey.training.credit import with_advantages
from covey.types import Group, Prompt, StepReport


@dataclass(frozen=True, kw_only=True)
class Trial:
    """P scored groups of G completions with their advantages, and the seconds of each phase."""

    groups: tuple[Group, ...]
    again: tuple[Group, ...]
    """The same completions, scored a second time."""
    report: StepReport
    """Report of the trial update."""
    seconds: dict[str, float]
    """By phase: rollout, reward, learn."""

    @property
    def num_completions(self) -> int:
        return sum(group.size for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Parts of a trial: the run's sampler, scorer and learner."""

    inputs: RunInputs
    sampler: Sampler
    learner: Learner

    @staticmethod
    def of(inputs: RunInputs, total_steps: int) -> Bench:
        return Bench(
            inputs=inputs,
            sampler=choose_sampler(
                inputs.model,
                inputs.tokenizer,
                eos_ids=inputs.eos_ids,
                **sampler_options(inputs.args, inputs.world, inputs.server),
            ),
            learner=build_learner(inputs, total_steps, (None, None), is_off_policy=False),
        )

    def prompts(self, count: int) -> list[Prompt]:
        """The first prompts that the run will draw."""
        return build_prompts(self.inputs, self.inputs.train_dataset, shuffle=self.inputs.args.shuffle_dataset).take(
            count
        )


def attempt_step(bench: Bench, count: int) -> Trial:
    """Answer `count` prompts, score the answers twice, and take one update on a model that is thrown away afterwards."""
    inputs, seconds = bench.inputs, dict[str, float]()
    args, algorithm = inputs.args, inputs.algorithm.resolve(inputs.algorithm.initial_controllers())
    prompts = bench.prompts(count)
    bench.sampler.load(inputs.model, version=0)
    groups = timed(seconds, "rollout", partial(answers, bench, prompts, args.num_generations))
    scored = timed(seconds, "reward", partial(inputs.scorer.score, groups))
    again = inputs.scorer.score(groups)
    judged = bench.learner.annotate(scored, algorithm)
    if algorithm.needs.greedy:
        judged = with_greedy_rewards(judged, inputs.scorer.score(answers(bench, prompts, 1, temperature=0.0)))
    judged = with_advantages(judged, algorithm, inputs.scorer.weights, inputs.scorer.combiner(judged))
    report = timed(seconds, "learn", partial(bench.learner.step, judged, algorithm, 1))
    return Trial(groups=tuple(judged), again=tuple(again), report=report, seconds=seconds)


def answers(bench: Bench, prompts: Sequence[Prompt], each: int, **changes: Any) -> list[Group]:
    """`each` completions of every prompt, in the order of the prompts, drawn as training would."""
    args = bench.inputs.args
    sampling = replace(sampling_params(args), seed=args.seed * 1_000_003 % 2**31, **changes)
    place = {prompt.uid: i for i, prompt in enumerate(prompts)}
    return sorted(bench.sampler.sample(prompts, each, sampling), key=lambda group: place[group.prompt.uid])


def timed(seconds: dict[str, float], phase: str, work: Any) -> Any:
    """Result of `work`; its seconds are stored under `phase`."""
    started = time.perf_counter()
    result = work()
    seconds[phase] = time.perf_counter() - started
    return result
