"""Sampling from a model sharded over processes: its weights are gathered once a rollout, not once a token, and freed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from covey.process.sharding import Shards
from covey.rollout.prompts import PromptLike
from covey.rollout.sampler import Sampler, SamplingParams
from covey.types import Group


class GatheredSampler:
    """A sampler over the full weights of a sharded model, gathered for each call of `sample` and freed after it."""

    def __init__(self, shards: Shards, make: Callable[[Any], Sampler]) -> None:
        """`make(model)` returns the inner sampler. It is called with gathered weights, which are freed afterwards."""
        self.shards, self.version = shards, 0
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
        with self.shards.gathered() as model:
            self.sampler.load(model, self.version)
            yield from self.sampler.sample(prompts, n, params)
