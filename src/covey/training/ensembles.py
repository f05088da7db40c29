"""Ensembles in a run: member models, their completions in the policy's groups, and the resulting training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from covey.config import GRPOConfig
from covey.ensembles import Ensemble, EnsembleSampler, member_metrics
from covey.ensembles.loading import load_writers
from covey.ensembles.sampler import MEASURES, has_failed, unknown
from covey.ensembles.writers import Encoding
from covey.errors import ConfigError
from covey.rollout import SamplingParams
from covey.training.agents import Agents
from covey.training.parts import Parts
from covey.types import Completion, Group, Metric


def given_ensemble(ensemble: Any, agents: Agents, args: GRPOConfig) -> Ensemble | None:
    """The ensemble that a user gave to `GRPOTrainer`, or its members. Raises ConfigError for one without effect."""
    made = Ensemble.of(ensemble)
    if made is None:
        return None
    if agents.are_used:
        raise ConfigError(
            "ensemble= takes answers of one turn, so tools, environments and rollout_func cannot be given with it; leave one out."
        )
    if args.sharding is not None and args.world_size > 1:
        raise ConfigError(
            "ensemble= samples from a model that each process holds whole, and fsdp splits it; leave one of them out."
        )
    made.refuse_share(args.num_generations)
    return made


def with_ensemble(parts: Parts, ensemble: Ensemble | None, given: Any) -> Parts:
    """The parts of a run with the ensemble's members loaded; `given`: the run's `RunInputs`."""
    if ensemble is None:
        return parts
    if given.args.async_rollouts:
        raise ConfigError(
            "async_rollouts=True samples from the policy alone, so ensemble would not act; leave one out."
        )
    model = parts.learner.policy.model
    if any(member.model is model for member in ensemble.members):
        raise ConfigError("ensemble: one member is the policy itself; give a copy of it, or another model.")
    encoding = Encoding.of(model, given.tokenizer, given.eos_ids)
    writers = load_writers(
        ensemble.members,
        ensemble.names,
        parts.world.device,
        encoding,
        trust_remote_code=given.args.trust_remote_code,
        check_stop=parts.interruption,
    )
    sampler = EnsembleSampler(parts.sampler, writers, ensemble.threshold, ensemble.weight)
    return replace(parts, ensemble=sampler)


def own(groups: Sequence[Group]) -> list[Group]:
    """Groups with the policy's own completions only."""
    return [group if all(map(is_own, group.completions)) else group.take(_places(group)) for group in groups]


def is_own(completion: Completion) -> bool:
    """True unless an ensemble member generated it; completions of supervised fine-tuning count as own."""
    return completion.source in ("policy", "data")


def asked_again(parts: Parts, groups: Sequence[Group], sampling: SamplingParams) -> list[Group]:
    """Rescuers' answers to the prompts whose completions by the policy all failed."""
    if parts.ensemble is None:
        return []
    return parts.ensemble.rescues(groups, parts.scorer.weights, sampling)


def rescued(parts: Parts, groups: Sequence[Group], answers: Sequence[Group]) -> list[Group]:
    """Groups with the correct ones of the rescuers' scored answers added."""
    if parts.ensemble is None:
        return list(groups)
    by_prompt = {answer.prompt.uid: answer for answer in answers}
    weights = parts.scorer.weights
    return [
        parts.ensemble.joined(group, by_prompt[group.prompt.uid], weights)
        if group.prompt.uid in by_prompt and has_failed(group, weights, parts.ensemble.threshold)
        else group
        for group in groups
    ]


def taught(parts: Parts, groups: Sequence[Group]) -> tuple[list[Group], dict[str, Metric]]:
    """Groups with advantages for the learner (siblings importance-weighted, baselines removed), and metrics per member."""
    ensemble = parts.ensemble
    if ensemble is None:
        return list(groups), {}
    roles = ensemble.roles
    weighed = _weighed(parts, groups)
    counts = parts.world.merge(ensemble.tally.take())
    metrics = member_metrics(weighed, roles, counts, len(groups))
    kept = [
        group.take([i for i, one in enumerate(group.completions) if roles.get(one.source) != "baseline"])
        for group in weighed
    ]
    return kept, metrics


def _weighed(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """Groups with importance weights for siblings' completions, from the current policy's log-probabilities."""
    assert parts.ensemble is not None
    roles, weight = parts.ensemble.roles, parts.ensemble.weight
    is_sibling = lambda one: roles.get(one.source) == "sibling"
    places = [[i for i, one in enumerate(group.completions) if is_sibling(one)] for group in groups]
    asked = [group.take(at) for group, at in zip(groups, places, strict=True) if at]
    if not asked:
        return list(groups)
    measured = iter(parts.learner.measured(asked, MEASURES))
    out = []
    for group, at in zip(groups, places, strict=True):
        completions = list(group.completions)
        for i, scored in zip(at, next(measured).completions if at else (), strict=True):
            if group.advantages is None or scored.old_logp is None or scored.logprobs is None:
                raise ValueError(f"a sibling's completion of prompt {group.prompt.uid} has no log-probabilities.")
            advantage = torch.atleast_1d(group.advantages[i])[: scored.num_tokens][None]  # [1, 1] or [1, T]
            tensors = (scored.old_logp[None], scored.logprobs[None], scored.written[None], advantage)
            completions[i] = replace(completions[i], weight=weight(*tensors)[0], logprobs=unknown(scored))
        out.append(replace(group, completions=tuple(completions)))
    return out


def _places(group: Group) -> list[int]:
    return [i for i, one in enumerate(group.completions) if is_own(one)]
