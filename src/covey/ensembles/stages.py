"""Stages of an ensemble in training: correct answers of rescuers join failed groups, siblings get importance weights, baselines leave."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from covey.config.combinations import expect_together
from covey.ensembles.ensemble import Ensemble
from covey.ensembles.loading import load_writers
from covey.ensembles.metrics import member_metrics
from covey.ensembles.sampler import MEASURES, EnsembleSampler, has_failed, unknown
from covey.ensembles.writers import Encoding
from covey.errors import ConfigError
from covey.learner import Learner
from covey.process.world import World
from covey.rewards import Scorer
from covey.rollout import Sampler, SamplingParams
from covey.types import Completion, Group, Metric, Position, Stages


def checked_ensemble(ensemble: Any, num_generations: int, features: Sequence[str]) -> Ensemble | None:
    """The ensemble of a trainer's argument, an ensemble or its members. Raises ConfigError for one that could not act.

    `features`: the others of the run, such as tools.
    """
    made = Ensemble.of(ensemble)
    if made is None:
        return None
    expect_together("ensemble", *features)
    made.refuse_share(num_generations)
    return made


def load_ensemble(
    ensemble: Ensemble,
    sampler: Sampler,
    model: Any,
    tokenizer: Any,
    eos_ids: Sequence[int],
    device: torch.device,
    template: Mapping[str, Any],
    **options: Any,
) -> EnsembleSampler:
    """A sampler of the policy and the loaded members; `template`: options of the policy's; `options`: those of `load_writer`.

    Raises ConfigError where a member could not act.
    """
    if any(member.model is model for member in ensemble.members):
        raise ConfigError("ensemble: one member is the policy itself; give a copy of it, or another model.")
    writers = load_writers(
        ensemble.members, ensemble.names, device, Encoding.of(model, tokenizer, eos_ids, template), **options
    )
    return EnsembleSampler(sampler, writers, ensemble.threshold, ensemble.weight)


def ensemble_stages(
    sampler: EnsembleSampler,
    scorer: Scorer,
    learner: Learner,
    world: World,
    sampling_for: Callable[[int], SamplingParams],
    score: Callable[[Sequence[Group]], list[Group]],
) -> Stages:
    """Rescues after the rewards, members' weights after advantages. `score` gives groups their rewards, in every process together."""
    return Stages(
        after_rewards=(Rescue(sampler, scorer, sampling_for, score),),
        after_advantages=(MemberWeights(sampler, learner, world),),
    )


@dataclass(frozen=True, eq=False)
class Rescue:
    """Adds the correct answers of rescuers to the groups in which all completions of the policy failed."""

    sampler: EnsembleSampler
    scorer: Scorer
    sampling_for: Callable[[int], SamplingParams]
    score: Callable[[Sequence[Group]], list[Group]]
    phase: Literal["rollout"] = "rollout"

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        weights = self.scorer.weights
        answers = self.sampler.rescues(groups, weights, self.sampling_for(position.rollout))
        scored = self.score([answer for answer in answers if answer.size])
        by_prompt = {answer.prompt.uid: answer for answer in (*answers, *scored)}
        return [
            self.sampler.joined(group, by_prompt[group.prompt.uid], weights)
            if group.prompt.uid in by_prompt and has_failed(group, weights, self.sampler.threshold)
            else group
            for group in groups
        ]


@dataclass(eq=False)
class MemberWeights:
    """Gives completions of siblings importance weights, and removes those of baselines, which have moved the group's mean."""

    sampler: EnsembleSampler
    learner: Learner
    world: World
    phase: Literal["learn"] = "learn"
    _metrics: dict[str, Metric] = field(default_factory=dict)

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        roles = self.sampler.roles
        weighted = self._weighted(groups)
        counts = self.world.merge(self.sampler.tally.take())
        self._metrics = member_metrics(weighted, roles, counts, len(groups))
        is_trained = lambda completion: roles.get(completion.source) != "baseline"
        return [
            group.take([i for i, completion in enumerate(group.completions) if is_trained(completion)])
            for group in weighted
        ]

    def take_metrics(self) -> dict[str, Metric]:
        return self._metrics

    def _weighted(self, groups: Sequence[Group]) -> list[Group]:
        """Groups with importance weights of siblings' completions, from the current policy's log-probabilities."""
        is_sibling = lambda completion: self.sampler.roles.get(completion.source) == "sibling"
        places = [[i for i, completion in enumerate(group.completions) if is_sibling(completion)] for group in groups]
        unmeasured = [group.take(at) for group, at in zip(groups, places, strict=True) if at]
        if not unmeasured:
            return list(groups)
        measured = iter(self.learner.measured(unmeasured, MEASURES))
        out = []
        for group, at in zip(groups, places, strict=True):
            completions = list(group.completions)
            for i, scored in zip(at, next(measured).completions if at else (), strict=True):
                completions[i] = self._with_weight(group, i, completions[i], scored)
            out.append(replace(group, completions=tuple(completions)))
        return out

    def _with_weight(self, group: Group, place: int, completion: Completion, scored: Completion) -> Completion:
        if group.advantages is None or scored.old_logp is None or scored.logprobs is None:
            raise ValueError(f"a sibling's completion of prompt {group.prompt.uid} has no log-probabilities.")
        advantage = torch.atleast_1d(group.advantages[place])[: scored.num_tokens][None]  # [1, 1] or [1, T]
        tensors = (scored.old_logp[None], scored.logprobs[None], scored.written[None], advantage)
        return replace(completion, weight=self.sampler.weight(*tensors)[0], logprobs=unknown(scored))
