"""Evaluation on held-out prompts: the rewards of training, on completions drawn with a fixed seed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.algorithms import Algorithm
from covey.algorithms.greedy import with_greedy_rewards
from covey.data import PromptStream
from covey.learner import Learner
from covey.monitor.slices import Slices
from covey.process.world import World
from covey.rewards import Scorer, reward_metrics
from covey.rollout import Sampler, SamplingParams
from covey.training.credit import completion_metrics, with_advantages
from covey.types import Group, Metric, merge_metrics


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Samples `num_generations` completions for every prompt of a data set and scores them."""

    sampler: Sampler
    scorer: Scorer
    learner: Learner
    algorithm: Algorithm
    world: World
    sampling: SamplingParams
    num_generations: int
    batch_size: int
    """Completions decoded at a time in this process."""
    seed: int
    slices: Slices = field(default_factory=lambda: Slices(()))
    """Metrics by the values of a column."""

    def __call__(
        self,
        prompts: PromptStream,
        count: int,
        controllers: Mapping[str, float],
        prefix: str,
        keep: Callable[[Sequence[Group]], None] = lambda groups: None,
        after_batch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Metrics of the first `count` prompts by TRL's names, each with `prefix` (such as `eval`).

        The seed is fixed: two evaluations differ by the policy alone. Failed rewards are left out of the
        means, as in training; `<prefix>_loss` is the algorithm's loss on these completions. `keep` receives every scored
        group, in order; `after_batch` is called after each batch.
        """
        started = time.perf_counter()
        algorithm = self.algorithm.resolve(controllers)
        parts: list[dict[str, Metric]] = []
        per_turn = max(1, self.batch_size * self.world.size // self.num_generations)
        done = 0
        while done < count:
            batch = prompts.take(min(per_turn, count - done))
            done += len(batch)
            groups = self._scored(batch, self.num_generations, self.sampling)
            keep(groups)
            if algorithm.needs.greedy:
                groups = with_greedy_rewards(groups, self._scored(batch, 1, replace(self.sampling, temperature=0.0)))
            groups = self.learner.annotate(groups, algorithm)
            scaled = self.scorer.combiner(groups, learn=False)
            groups = with_advantages(groups, algorithm, self.scorer.weights, scaled)
            losses = self.learner.loss(groups, algorithm)
            scales = self.scorer.observe(groups)
            rewards = reward_metrics(groups, self.scorer.names, self.scorer.weights, scales)
            sliced = self.slices(groups, self.scorer.weights, scales)
            own = self.world.merge(self.scorer.take_metrics())
            parts.append({**losses, **rewards, **own, **completion_metrics(groups), **sliced})
            after_batch()
        self.learner.policy.release()  # callbacks and the user may use the model now
        return self._named(merge_metrics(parts), len(parts), count, time.perf_counter() - started, prefix)

    def _scored(self, prompts: Sequence[Any], n: int, sampling: SamplingParams) -> list[Group]:
        mine = self.world.share(prompts)
        groups = self.sampler.sample(mine, n, replace(sampling, seed=self.seed))  # scored while others are decoded
        scored = self.scorer.score(groups)
        self.scorer.check_first(self.world.any)
        return self.world.interleave(scored)

    def _named(
        self, metrics: Mapping[str, Metric], turns: int, count: int, seconds: float, prefix: str
    ) -> dict[str, float]:
        named = {}
        for name, metric in sorted(metrics.items()):
            value = metric.value / turns if name in ("loss", "value_loss") else metric.value
            if not math.isnan(value):
                named[f"{prefix}_{name}"] = float(value)
        named[f"{prefix}_runtime"] = round(seconds, 4)
        named[f"{prefix}_samples_per_second"] = round(count * self.num_generations / seconds, 3)
        named[f"{prefix}_steps_per_second"] = round(turns / seconds, 3)
        return named
