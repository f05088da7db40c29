"""Checks of rewards on real completions: failures, spread of scores, and repeatability."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.doctor.finding import Finding, failed, passed, warned
from covey.doctor.trial import Trial

AREA = "rewards"


def reward_findings(trial: Trial, names: Sequence[str], weights: Sequence[float]) -> Iterator[Finding]:
    """One finding a reward on its scores, and one on the total."""
    first, second = scores_of(trial.groups), scores_of(trial.again)  # [N, R]
    for index, name in enumerate(names):
        yield one_reward(name, first[:, index], second[:, index], weights[index])
        yield from errors_of(trial, name, first.shape[0])
    if not any(weights):
        yield failed(
            AREA, "every reward has weight 0, so nothing is learnt.", "give one of them a weight: --reward-weights"
        )
    yield cost(trial)


def scores_of(groups: Sequence[Any]) -> Tensor:
    """[N, R], NaN: not scored."""
    return torch.cat([group.rewards for group in groups])


def one_reward(name: str, scores: Tensor, again: Tensor, weight: float) -> Finding:
    """Scores of a reward for the sampled answers: none, one value, values that change from call to call, or a spread."""
    scored = scores[~scores.isnan()]
    if not scored.numel():
        return failed(
            AREA,
            f"{name} scored none of {scores.numel()} answers.",
            "try it on one answer by hand; None and errors do not count",
        )
    low, high, middle = scored.min().item(), scored.max().item(), scored.mean().item()
    facts = {"reward": name, "low": low, "high": high, "mean": middle, "scored": scored.numel()}
    if not torch.equal(scores.nan_to_num(-1e30), again.nan_to_num(-1e30)):
        sentence = (
            f"{name} gave the same answers other scores when it was called again: part of the training signal is noise."
        )
        return warned(
            AREA, sentence, "remove its sources of randomness (sampling, time, state kept between calls)", **facts
        )
    if low == high:
        sentence = f"{name} gave every one of {scored.numel()} answers {low:g}, so it tells none apart."
        if weight == 0:
            return passed(AREA, sentence + " It has weight 0.", **facts)
        fix = "see whether it finds the answer in the text (format, column, letter case), and whether the task is far too hard or easy"
        return warned(AREA, sentence, fix, **facts)
    if scored.numel() < scores.numel():
        sentence = f"{name} scored {scored.numel()} of {scores.numel()} answers; the others do not count for it."
        return warned(
            AREA, sentence, "return a number for every answer, 0 for a wrong one, unless it should abstain", **facts
        )
    return passed(
        AREA,
        f"{name} gives {low:g} to {high:g}, {middle:.3g} on average, on {scored.numel()} answers, twice the same",
        **facts,
    )


def errors_of(trial: Trial, name: str, count: int) -> Iterator[Finding]:
    """FAIL for a reward that raised, with its first error."""
    events = [event for group in trial.groups for event in group.events if event.details.get("reward", name) == name]
    hits = [event for event in events if event.kind.startswith("reward")]
    if hits:
        yield failed(
            AREA,
            f"{name} raised on {len(hits)} of {count} answers: {hits[0].said}",
            "make it return a number for any text",
            errors=len(hits),
        )


def cost(trial: Trial) -> Finding:
    """WARN when rewards take longer than all the rest together."""
    spent, all_together = trial.seconds["reward"], sum(trial.seconds.values())
    each = spent / max(1, trial.num_completions)
    facts = {"seconds_an_answer": each, "share": spent / all_together}
    sentence = f"rewards take {1000 * each:.3g} ms an answer, {100 * spent / all_together:.0f}% of a step"
    if spent > 0.5 * all_together and spent > 0.5:
        return warned(
            AREA, sentence + ".", "score answers at the same time: --reward-workers 4, or an async reward", **facts
        )
    return passed(AREA, sentence, **facts)
