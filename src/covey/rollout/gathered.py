"""Sampling with the weights of a model that is split over processes: gathered once a rollout, never once a token, and freed after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from covey.process.sharding import Shards
from covey.rollout.prompts import PromptLike
from covey.rollout.sampler import Sampler, SamplingParams
from covey.types import Group


class GatheredSampler:
    """Another sampler over the whole copy of a split model, whose weights are in memory while completions are drawn only."""

    def __init__(self, shards: Shards, make: Callable[[Any], Sampler]) -> None:
        """`make(model)` gives the sampler; it sees the weights, which are freed afterwards."""
        self.shards, self.version = shards, 0
        self.sampler = make(shards.whole)
        shards.free()

    @property
    def check_stop(self) -> Callable[[], None]:
        """Called between tokens; what it raises ends the sampling."""
        return self.sampler.check_stop

    def load(self, policy: Any, version: int) -> None:
        """Sample with the weights of the next `sample` on; completions carry `version`."""
        self.version = version

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt. Every process must begin it, also one without prompts."""
        with self.shards.gathered() as model:
            self.sampler.load(model, self.version)
            yield from self.sampler.sample(prompts, n, params)
