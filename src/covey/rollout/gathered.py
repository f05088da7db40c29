"""Sampling from a model sharded over processes: its weights are gathered once a rollout, not once a token, and freed after it."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from covey.process.sharding import Shards
from covey.rollout.prompts import PromptLike
from covey.rollout.sampler import Sampler, SamplingParams, close_sampler, sampler_metrics, update_metrics
from covey.types import Group, Metric, merge_metrics


class GatheredSampler:
    """A sampler over the full weights of a sharded model, gathered for each call of `sample` and freed after it."""

    def __init__(self, shards: Shards, make: Callable[[Any], Sampler]) -> None:
        """`make(model)` returns the inner sampler. It is called with gathered weights, which are freed afterwards."""
        self.shards, self.version = shards, 0
        self.measured: dict[str, Metric] = {}
        self.sampler = make(shards.whole)
        shards.free()

    @property
    def check_stop(self) -> Callable[[], None]:
        """Callback between tokens; its exception ends the sampling."""
        return self.sampler.check_stop

    def load(self, policy: Any, version: int) -> None:
        """Sample with the weights of the next `sample` on; completions carry `version`."""
        self.version = version

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt. Collective: a process without prompts must call it too."""
        started = time.perf_counter()
        with self.shards.gathered() as model:
            self.sampler.load(model, self.version)
            gathered = sum(weight.nbytes for weight in model.parameters())
            update = update_metrics(time.perf_counter() - started, gathered)
            self.measured = merge_metrics([self.measured, update])
            yield from self.sampler.sample(prompts, n, params)

    def take_metrics(self) -> dict[str, Metric]:
        """Metrics since the last call: those of the inner sampler, and the gathers as updates of its weights."""
        measured, self.measured = self.measured, {}
        return {**sampler_metrics(self.sampler), **measured}

    def close(self) -> None:
        """Close the inner sampler, where it has something open, such as an agent's endpoint."""
        close_sampler(self.sampler)
