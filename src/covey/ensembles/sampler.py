"""The groups of training with the completions of an ensemble's members in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import MemberWeight, Needs
from covey.ensembles.member import Role
from covey.ensembles.metrics import Tally
from covey.ensembles.writers import Writer
from covey.rollout import Sampler, SamplingParams
from covey.rollout.prompts import PromptLike
from covey.types import Completion, Group, Prompt

MEASURES = Needs(old_logp=True)
"""Measurements that a sibling's completion needs before it has a weight."""


@dataclass(eq=False)
class EnsembleSampler:
    """A sampler whose groups hold `n` completions of the policy and those of every sibling and baseline."""

    sampler: Sampler
    """The policy's."""
    writers: Sequence[Writer]
    threshold: float
    """An answer is right from this weighted reward on."""
    weight: MemberWeight
    tally: Tally = field(default_factory=Tally)

    @property
    def check_stop(self) -> Callable[[], None]:
        """Called between tokens; an exception ends the sampling."""
        return self.sampler.check_stop

    @property
    def roles(self) -> Mapping[str, Role]:
        """Each member's role, by its name."""
        return {writer.name: writer.role for writer in self.writers}

    def load(self, policy: Any, version: int) -> None:
        """From now on the policy samples with these weights; the members stay as they are."""
        self.sampler.load(policy, version)

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group for each prompt, as the policy finishes it: its `n` completions first, then the members'."""
        encoded = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
        more = self._written(encoded, [w for w in self.writers if w.role != "rescue"], params)
        for group in self.sampler.sample(prompts, n, params):
            version = group.completions[0].version
            joining = [replace(completion, version=version) for completion in more.get(group.prompt.uid, ())]
            yield replace(group, completions=(*group.completions, *joining))

    def rescues(self, groups: Sequence[Group], rewards: Tensor, params: SamplingParams) -> list[Group]:
        """Groups of the rescuers' answers to the prompts of those scored `groups` in which the policy failed throughout.

        `rewards` [R]: the weight of each. A group without a scored completion of the policy has not failed.
        """
        rescuers = [writer for writer in self.writers if writer.role == "rescue"]
        failed = [group for group in groups if has_failed(group, rewards, self.threshold)] if rescuers else []
        more = self._written([group.prompt for group in failed], rescuers, params)
        versions = {group.prompt.uid: group.completions[0].version for group in failed}
        return [
            Group(
                prompt=group.prompt,
                completions=tuple(
                    replace(completion, version=versions[group.prompt.uid], logprobs=unknown(completion))
                    for completion in more[group.prompt.uid]
                ),
            )
            for group in failed
            if more.get(group.prompt.uid)
        ]

    def joined(self, group: Group, answers: Group, rewards: Tensor) -> Group:
        """The failed group with those of the scored rescuers' `answers` that are right."""
        right = [i for i, total in enumerate(totals(answers, rewards).tolist()) if total >= self.threshold]
        if not right or group.rewards is None or answers.rewards is None:
            return group
        right_answers = answers.take(right)
        assert right_answers.rewards is not None
        extras = {
            name: [
                *group.extras.get(name, [None] * group.size),
                *right_answers.extras.get(name, [None] * right_answers.size),
            ]
            for name in {**group.extras, **right_answers.extras}
        }
        return replace(
            group,
            completions=(*group.completions, *right_answers.completions),
            rewards=torch.cat([group.rewards, right_answers.rewards]),
            events=(*group.events, *answers.events),
            extras=extras,
        )

    def _written(
        self, prompts: Sequence[Prompt], writers: Sequence[Writer], params: SamplingParams
    ) -> dict[str, list[Completion]]:
        """Completions of these members by prompt. Of a member that is split, every process must ask, also without prompts."""
        out: dict[str, list[Completion]] = {prompt.uid: [] for prompt in prompts}
        for writer in writers:
            member_params = replace(
                params, seed=None if params.seed is None else seed_of(params.seed, self.writers.index(writer))
            )
            written = writer.write(prompts, member_params)
            self.tally.add(writer.name, written)
            for prompt, row in zip(prompts, written, strict=True):
                out[prompt.uid] += [completion for completion in row if completion is not None]
        return out


def seed_of(seed: int, member: int) -> int:
    """Another stream of random numbers for each member."""
    return (seed + 7_368_787 * (member + 1)) % 2**31


def unknown(completion: Completion) -> Tensor:
    """[T_i] of NaN: nothing is compared with the sampler of a completion that another model wrote."""
    return torch.full((completion.num_tokens,), torch.nan)


def totals(group: Group, weights: Tensor) -> Tensor:
    """[G], weighted sums of a scored group's rewards, NaN: not scored."""
    assert group.rewards is not None
    scored = ~group.rewards.isnan()
    return (group.rewards.nan_to_num(0.0) * weights).sum(-1).masked_fill(~scored.any(-1), torch.nan)


def has_failed(group: Group, weights: Tensor, threshold: float) -> bool:
    """True if the policy's completions were scored and none is right."""
    policy_rows = [i for i, completion in enumerate(group.completions) if completion.source == "policy"]
    policy_totals = totals(group, weights)[policy_rows]
    policy_totals = policy_totals[~policy_totals.isnan()]
    return bool(policy_totals.numel()) and not bool((policy_totals >= threshold).any())
