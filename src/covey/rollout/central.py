"""Asynchronous rollouts of one or several learner processes: the main one has the workers, which write for all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.errors import CoveyError
from covey.models import context_limit, unwrapped
from covey.process.interruption import on_main
from covey.process.world import World
from covey.rollout.asynchronous import AsynchronousSampler, with_columns
from covey.rollout.prompts import PromptLike, as_prompts, with_distinct_uids
from covey.rollout.sampler import SamplingParams
from covey.types import Group, Metric, Prompt

Collect = Callable[[Any, int], Any]
"""`(policy, version)`, called by every process -> the model whose weights the main one publishes."""


class CentralSampler(AsynchronousSampler):
    """An `AsynchronousSampler` on the main process. The others keep the same orders without groups, and are handed theirs.

    `order`, `load` and `sample` are collective.
    """

    def __init__(self, *parts: Any, world: World, collect: Collect, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.world, self.collect = world, collect
        self.num_workers = self.num_workers if world.is_main else 0
        self.scores_on_main = self.keeps_columns and world.size > 1
        """True: completions hold objects of the main process, such as environments, so that it scores them for all."""

    def load(self, policy: Any, version: int) -> None:
        """Publish new weights, gathered from every process where the model is split."""
        collected = self.collect(policy, version)
        if self.world.is_main:
            super().load(collected, version)
        else:
            self.version = version

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """The groups of this process's prompts, once those of all processes have arrived at the main one."""
        if self.world.size == 1:
            yield from super().sample(prompts, n, params)
        else:
            yield from self.sample_for_all(prompts, n, params)

    def sample_for_all(
        self,
        prompts: Sequence[PromptLike],
        n: int,
        params: SamplingParams,
        finish: Callable[[Sequence[Group]], Sequence[Group]] = list,
    ) -> list[Group]:
        """This process's groups, in the order of its prompts, of those that the main process has finished for all."""
        share = as_prompts(prompts, self.tokenizer, context_limit(unwrapped(self.model)))
        plain = share if self.keeps_columns else [replace(prompt, columns={}) for prompt in share]
        ranked = self.world.interleave([(self.world.rank, prompt) for prompt in plain])
        everyone = with_distinct_uids([prompt for _, prompt in ranked])
        mine = [prompt.uid for (rank, _), prompt in zip(ranked, everyone, strict=True) if rank == self.world.rank]
        write = super().sample

        def whole() -> Sequence[Group]:
            by_uid = {group.prompt.uid: group for group in write(everyone, n, params)}
            return finish([by_uid[prompt.uid] for prompt in everyone])

        failed = CoveyError("the rollouts that run ahead failed on the main process; its log says why.")
        groups = self.world.broadcast(on_main(self.world, whole, failed))
        by_uid = {group.prompt.uid: group for group in groups or ()}
        return [with_columns(by_uid[uid], prompt) for uid, prompt in zip(mine, share, strict=True)]

    def take_metrics(self) -> dict[str, Metric]:
        """Those of the main process; the others measure nothing."""
        return super().take_metrics() if self.world.is_main else {}

    def load_state_dict(
        self, state: Mapping[str, Any], again: Callable[[Prompt], Prompt] = lambda prompt: prompt
    ) -> None:
        super().load_state_dict(state, again)
        if not self.world.is_main:
            for order in self.orders.values():
                order.groups = {}

    def _start_all(self) -> None:
        if self.world.is_main:
            super()._start_all()
