"""Advantages of scored groups, and metrics of a rollout."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covey.algorithms import Algorithm, NormalizeThenSum
from covey.algorithms.baselines import normalized_rewards
from covey.data import Outcome
from covey.data.together import joined, questions
from covey.rewards import Scorer, advantage_shares, has_signal, mean_score, reward_metrics
from covey.rollout import sampler_metrics
from covey.training.parts import Parts
from covey.types import Group, Max, Mean, Metric, Min, Scores, of_policy, stack_tokens


def with_advantages(
    groups: Sequence[Group], algorithm: Algorithm, weights: Tensor, scaled: Sequence[Group] | None = None
) -> list[Group]:
    """The groups with `advantages` [G] or [G, T], `totals` [G] (and the critic's `returns`), computed over the whole rollout.

    `scaled`: the same groups with the rewards for the advantages, if these differ from the recorded ones.
    """
    return judged_groups(groups, algorithm, weights, scaled)[0]


def judged_groups(
    groups: Sequence[Group], algorithm: Algorithm, weights: Tensor, scaled: Sequence[Group] | None = None
) -> tuple[list[Group], Mapping[str, float]]:
    """The groups as of `with_advantages`, and the state of the advantage's memory after them; empty where it has none."""
    column = getattr(algorithm.advantage, "column", None)
    units = questions(groups)  # each group alone, except for one question in several languages
    judging = [joined([(scaled or groups)[place] for place in places]) for places in units]
    recorded = judging if scaled is None else [joined([groups[place] for place in places]) for places in units]
    scores = Scores.of(judging, weights, kl=reward_kl(recorded, algorithm), slice_column=column)
    judged, returns = algorithm.judge(scores)  # [P, G] or [P, G, T], and [P, G, T] or None
    out = list(groups)
    for p, places in enumerate(units):
        start = 0
        for place in places:
            group = groups[place]
            rows = slice(start, start + group.size)
            group_returns = None if returns is None else returns[p, rows]
            out[place] = replace(group, advantages=judged[p, rows], totals=scores.total[p, rows], returns=group_returns)
            start += group.size
    return out, algorithm.remembered(scores)


def reward_kl(groups: Sequence[Group], algorithm: Algorithm) -> Tensor | None:
    """KL penalty [P, G, T] of an algorithm with the KL in the reward; None for others."""
    if algorithm.kl is None or algorithm.kl.where != "reward":
        return None
    old = stack_tokens(groups, lambda completion: completion.old_logp)
    ref = stack_tokens(groups, lambda completion: completion.ref_logp)
    mask = stack_tokens(groups, lambda completion: completion.written)
    return algorithm.kl.penalty(old, ref) * mask


def completion_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Lengths of completions in generated tokens, under TRL's names. Terminated: ended by itself, not by the length limit."""
    drawn = [c for group in groups for c in group.completions if c.finish != "error"]  # a lost one has no length
    lengths = torch.tensor([float(c.written.sum()) for c in drawn])
    truncated = torch.tensor([c.is_truncated for c in drawn], dtype=torch.bool)
    bounds = lambda x: (x.min().item(), x.max().item()) if x.numel() else (math.nan, math.nan)
    (shortest, longest), (least, most) = bounds(lengths), bounds(lengths[~truncated])
    return {
        "completions/mean_length": Mean.of(lengths),
        "completions/min_length": Min(shortest),
        "completions/max_length": Max(longest),
        "completions/clipped_ratio": Mean.of(truncated),
        "completions/mean_terminated_length": Mean.of(lengths, ~truncated),
        "completions/min_terminated_length": Min(least),
        "completions/max_terminated_length": Max(most),
    }


def outcomes(groups: Sequence[Group], scorer: Scorer, algorithm: Algorithm) -> dict[str, Outcome]:
    """Outcome of each prompt by uid, for a curriculum; completions of the policy only."""
    pairs = zip(judged := of_policy(groups), without_signal(judged, scorer, algorithm), strict=True)
    outcome = lambda each, dull: Outcome(mean_score(each, scorer.weights), not dull, not dull or each.measured is None)
    return {group.prompt.uid: outcome(group, dull) for group, dull in pairs}


def without_signal(groups: Sequence[Group], scorer: Scorer, algorithm: Algorithm) -> list[bool]:
    """True for groups whose weighted sums do not differ, of the rewards as advantages see them."""
    scaled = scorer.combiner(groups, learn=False)
    if isinstance(algorithm.advantage, NormalizeThenSum):
        summed = [replace(group, rewards=normalized_rewards(group.rewards, scorer.weights)) for group in scaled]
        return [not has_signal(group, [1.0], rounding=1e-6) for group in summed]
    return [not has_signal(group, scorer.weights, getattr(algorithm.advantage, "clip", None)) for group in scaled]


def with_signal_first(groups: Sequence[Group], scorer: Scorer, algorithm: Algorithm) -> list[Group]:
    """Groups with differing rewards before the others, each in their order: DAPO's dynamic sampling.

    Yu et al. 2025, section 3.2, <https://arxiv.org/abs/2503.14476>.
    """
    pairs = zip(without_signal(groups, scorer, algorithm), groups, strict=True)
    return [group for _, group in sorted(pairs, key=lambda pair: pair[0])]


def rollout_metrics(
    parts: Parts, drawn: Sequence[Group], groups: Sequence[Group], scaled: Sequence[Group]
) -> dict[str, Metric]:
    """Metrics of a rollout: `drawn` before dynamic sampling, `groups` for the learner, `scaled` with the rewards of the advantages."""
    scorer, trained = parts.scorer, of_policy(groups)
    scales, clip = scorer.observe(drawn), getattr(parts.algorithm.advantage, "clip", None)
    metrics = {
        **reward_metrics(of_policy(drawn), scorer.names, scorer.weights, scales, clip),
        "groups/drawn": Mean(len(drawn), 1),
        **advantage_shares(scaled, scorer.names, scorer.weights),
        **parts.world.merge({**scorer.take_metrics(), **sampler_metrics(parts.sampler)}),
        **completion_metrics(trained),
        **parts.session.monitor.measure(trained, scorer.weights, scales),
        **parts.stages.rollout_metrics(),
    }
    if parts.has_rewards:
        return metrics
    return {name: value for name, value in metrics.items() if name.startswith(("completions/", "policy/"))}
