"""The groups of training with the completions of an ensemble's members in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import MemberWeight, Needs
from covey.ensembles.member import Role
from covey.ensembles.metrics import Tally
from covey.ensembles.writers import Writer, for_each_path
from covey.errors import DataError
from covey.rewards.metrics import totals_of
from covey.rollout import Sampler, SamplingParams, close_sampler
from covey.rollout.joining import with_shared_prompt
from covey.rollout.prompts import PromptLike
from covey.types import Completion, Event, Group, Prompt, reaches

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
            stamped = lambda path, version=version: replace(path, version=version)
            yield _joined(group, [_changed(theirs, stamped) for theirs in more.get(group.prompt.uid, ())])

    def close(self) -> None:
        """Close what the policy's sampler and the members have open."""
        for part in (self.sampler, *self.writers):
            close_sampler(part)

    def rescues(self, groups: Sequence[Group], rewards: Tensor, params: SamplingParams) -> list[Group]:
        """Groups of the rescuers' answers to the prompts of those scored `groups` in which the policy failed throughout.

        `rewards` [R]: the weight of each. A group without a scored completion of the policy has not failed.
        """
        rescuers = [writer for writer in self.writers if writer.role == "rescue"]
        failed = [group for group in groups if has_failed(group, rewards, self.threshold)] if rescuers else []
        more = self._written([group.prompt for group in failed], rescuers, params)
        versions = {group.prompt.uid: group.completions[0].version for group in failed}
        out = []
        for group in failed:
            version = versions[group.prompt.uid]
            blank = lambda path, version=version: replace(path, version=version, logprobs=unknown(path))
            answers = [_changed(theirs, blank) for theirs in more[group.prompt.uid]]
            out.append(_joined(replace(group, completions=(), rewards=None, events=(), extras={}), answers))
        return [answer for answer in out if answer.size or answer.events]

    def joined(self, group: Group, answers: Group, rewards: Tensor) -> Group:
        """The failed group with those of the scored rescuers' `answers` that are right, and with all of their events."""
        group = replace(group, events=(*group.events, *answers.events))
        if group.rewards is None or answers.rewards is None:
            return group
        right = [i for i, total in enumerate(totals_of(answers, rewards).tolist()) if reaches(total, self.threshold)]
        if not right:
            return group
        group, right_answers = with_shared_prompt([group, answers.take(right)])
        assert group.rewards is not None and right_answers.rewards is not None  # they keep theirs  # noqa: PT018
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
            measured=None if group.measured is None else torch.cat([group.measured, right_answers.rewards]),
            lost=None if group.lost is None else torch.nn.functional.pad(group.lost, (0, right_answers.size)),
            extras=extras,
        )

    def _written(
        self, prompts: Sequence[Prompt], writers: Sequence[Writer], params: SamplingParams
    ) -> dict[str, list[Group]]:
        """Groups of these members by prompt. Of a member that is split, every process must ask, also without prompts."""
        out: dict[str, list[Group]] = {prompt.uid: [] for prompt in prompts}
        for writer in writers:
            written = writer.write(prompts, of_member(params, self.writers.index(writer)))
            self.tally.add(writer.name, writer.samples, written)
            for group in written:
                out[group.prompt.uid].append(group)
        return out


def _changed(group: Group, change: Callable[[Completion], Completion]) -> Group:
    return replace(group, completions=tuple(for_each_path(completion, change) for completion in group.completions))


def _joined(group: Group, more: Sequence[Group]) -> Group:
    """The group with the completions and events of `more`, which members wrote to the same row.

    Raises DataError where an environment showed a member another task. An agent may show other words; what it begins with otherwise
    than the policy's is left out, with an event.
    """
    first, prompt = group.prompt.token_ids[:1], group.prompt
    for theirs in more:
        is_task = prompt.before is not None or theirs.prompt.before is not None
        if is_task and theirs.prompt.token_ids != prompt.token_ids:
            raise DataError(
                f"reset() of the environment of prompt {prompt.uid} showed a member of the ensemble something else than the policy, so their "
                "rewards do not compare; draw the task from a column of the row, or from the argument `seed`."
            )
    written = [theirs for theirs in more if theirs.size]
    like = [theirs for theirs in written if theirs.prompt.token_ids[:1] == first]
    same, *others = with_shared_prompt([group, *like])
    completions = [*same.completions, *(completion for theirs in others for completion in theirs.completions)]
    events = [event for theirs in more for event in theirs.events]
    for theirs in (theirs for theirs in written if theirs not in like):
        sentence = f"Ensemble member {theirs.completions[0].source}: its episodes on prompt {prompt.uid} are lost: they begin with another "
        sentence += "token than the policy's."
        events.append(Event(kind="agent_failed", said=sentence, details={"episodes": theirs.size}))
    return replace(same, completions=tuple(completions), events=(*group.events, *events))


def of_member(params: SamplingParams, member: int) -> SamplingParams:
    """The sampling options of a member: a seeded stream of random numbers is another one for each."""
    return replace(params, seed=None if params.seed is None else (params.seed + 7_368_787 * (member + 1)) % 2**31)


def unknown(completion: Completion) -> Tensor:
    """[T_i] of NaN: nothing is compared with the sampler of a completion that another model wrote."""
    return torch.full((completion.num_tokens,), torch.nan)


def has_failed(group: Group, weights: Tensor, threshold: float) -> bool:
    """True if the policy's completions were scored and none is right."""
    policy_rows = [i for i, completion in enumerate(group.completions) if completion.source == "policy"]
    policy_totals = totals_of(group, weights)[policy_rows]
    policy_totals = policy_totals[~policy_totals.isnan()]
    return bool(policy_totals.numel()) and not any(reaches(total, threshold) for total in policy_totals.tolist())
