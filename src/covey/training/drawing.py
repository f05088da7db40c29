"""Drawing of scored groups: prompts through a sampler and the rewards, on each process's share."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from covey.errors import RewardError
from covey.process.interruption import Interruption
from covey.process.world import World
from covey.rewards import Scorer, Scoring
from covey.rollout import Sampler, SamplingParams
from covey.rollout.central import CentralSampler
from covey.types import Group, Position, Prompt, Stage


@dataclass(frozen=True)
class RolloutSampling:
    """Sampling parameters by the number of the rollout: reproducible on any machine, with a new seed for each rollout."""

    params: SamplingParams
    seed: int

    def __call__(self, rollout: int) -> SamplingParams:
        return replace(self.params, seed=(self.seed * 1_000_003 + rollout) % 2**31)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Scored groups of prompts."""

    sampler: Sampler
    scorer: Scorer
    world: World
    interruption: Interruption

    def __call__(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seconds: dict[str, float] | None = None
    ) -> list[Group]:
        """Scored groups of this process's share of the prompts, in their order."""
        seconds, share = {} if seconds is None else seconds, self.world.share(prompts)
        if isinstance(self.sampler, CentralSampler) and self.sampler.scores_on_main:
            with timed(seconds, "rollout"), self.interruption.together():
                scored = self.sampler.sample_for_all(share, n, sampling, self._scored)
            self.scorer.check_first(self.world.any)
            return scored
        scoring = self.scorer.begin()  # streaming rewards score a group while others are decoded
        groups = []
        with timed(seconds, "rollout"), self.interruption.together():
            for group in self.sampler.sample(share, n, sampling):
                scoring.add(group)
                groups.append(group)
        place = {prompt.uid: i for i, prompt in enumerate(share)}
        with timed(seconds, "reward"):
            ordered = sorted(groups, key=lambda group: place[group.prompt.uid])
            return self._together(lambda: _finished(scoring, ordered))

    def _scored(self, groups: Sequence[Group]) -> list[Group]:
        """Scored groups, on this process alone."""
        scoring = self.scorer.begin()
        for group in groups:
            scoring.add(group)
        return _finished(scoring, groups)

    def greedy(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Group]:
        """Scored greedy answers to the prompts, one each, of all processes."""
        return self.world.interleave(self(prompts, 1, replace(sampling, temperature=0.0)))

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """Scored groups of completions that were drawn elsewhere. Every process must call it."""
        return self._together(lambda: self._scored(groups))

    def _together(self, score: Callable[[], list[Group]]) -> list[Group]:
        """Scored groups. A reward error that ends the run on one process ends it on all, so that none hangs."""
        failed: RewardError | None = None
        scored: list[Group] = []
        try:
            scored = score()
        except RewardError as error:
            failed = error
        if self.world.any(failed is not None):
            raise failed or RewardError("a reward failed on another process; its message is in that process's log.")
        self.scorer.check_first(self.world.any)
        return scored


def _finished(scoring: Scoring, groups: Sequence[Group]) -> list[Group]:
    return [without_columns(group) for group in scoring.finish(groups)]


def without_columns(group: Group) -> Group:
    """The group without the completions' columns, which only rewards need, such as environments, which cannot be pickled."""
    if not any(completion.columns for completion in group.completions):
        return group
    return replace(group, completions=tuple(replace(completion, columns={}) for completion in group.completions))


def through(
    stages: Sequence[Stage], groups: Sequence[Group], position: Position, seconds: dict[str, float]
) -> list[Group]:
    """The groups after every stage, in order."""
    out = list(groups)
    for stage in stages:
        with timed(seconds, stage.phase):
            out = stage(out, position)
    return out


def split(groups: Sequence[Group], parts: int, seed: int) -> list[list[Group]]:
    """The completions of a rollout in `parts` equal batches, with groups kept whole if the sizes allow it."""
    if parts == 1:
        return [list(groups)]
    order = random.Random(seed).sample(range(len(groups)), len(groups))
    if len(groups) % parts == 0:
        size = len(groups) // parts
        return [[groups[i] for i in order[p * size : (p + 1) * size]] for p in range(parts)]
    places = [(i, g) for i in order for g in range(groups[i].size)]
    size = -(-len(places) // parts)
    batches = []
    for start in range(0, len(places), size):
        members: dict[int, list[int]] = {}
        for i, g in places[start : start + size]:
            members.setdefault(i, []).append(g)
        batches.append([groups[i].take(indices) for i, indices in members.items()])
    return batches


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Context whose seconds are added to those of `phase`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started
