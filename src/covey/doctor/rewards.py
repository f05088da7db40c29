"""Checks of rewards on real completions (failures, spread of scores, repeatability) and by the reward test on a few rows."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.doctor.finding import Finding, failed, passed, warned
from covey.doctor.reward_audit.examination import examine
from covey.doctor.reward_audit.probes import GOLD_COLUMNS, rows_of
from covey.doctor.reward_audit.verdicts import judge
from covey.doctor.trial import Trial
from covey.errors import RewardError
from covey.rewards import JudgeReward, PairwiseJudgeReward
from covey.rewards.contract import RewardSpec

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


_ROWS = 8
_SECONDS = 10.0
"""Time budget of one reward, estimated from its seconds for one answer of the model."""
_A_ROW = 60
"""Completions that are tried on a row, about."""
_LEARNS_WRONG = ("errors", "escape", "gold", "garbage")
_PATIENCE = ("towers of powers",)  # meant to keep a verifier busy until its limit, 20 s


def tested(
    specs: Sequence[RewardSpec], rows: Sequence[Mapping[str, Any]], seconds_an_answer: float
) -> Iterator[Finding]:
    """Findings of `covey reward test` on the first rows, for each reward with weight. Slow or paid rewards are left out."""
    gold = next((name for name in GOLD_COLUMNS if rows and name in rows[0]), None)
    count = min(_ROWS, len(rows), int(_SECONDS / (_A_ROW * max(seconds_an_answer, 1e-9))))
    for spec in (spec for spec in specs if spec.weight != 0):
        fix = f"try it yourself: covey reward test --reward {spec.name}"
        if count < 2 or isinstance(spec.call, JudgeReward | PairwiseJudgeReward):
            why = "asks a model for every answer" if count >= 2 else "takes too long for it, or there are too few rows"
            yield passed(AREA, f"{spec.name} was not put to the reward test: it {why}; covey reward test does it")
            continue
        yield from _verdicts(spec, [dict(row) for row in rows[:count]], gold, fix)


def _verdicts(spec: RewardSpec, rows: list[dict[str, Any]], gold: str | None, fix: str) -> Iterator[Finding]:
    try:
        with _quiet():
            verdicts = judge(examine(spec, rows_of(rows, gold), timeout_seconds=_SECONDS, without=_PATIENCE))
    except RewardError as error:
        yield failed(AREA, f"reward test of {spec.name}: {error}", fix)
        return
    already_reported = [("FAIL", "constant"), ("FAIL", "nondeterministic")]  # of the model's own answers, by the trial
    wrong = [
        verdict
        for verdict in verdicts
        if verdict.level != "NOTE" and (verdict.level, verdict.check) not in already_reported
    ]
    for verdict in wrong:
        make = failed if verdict.level == "FAIL" and verdict.check in _LEARNS_WRONG else warned
        yield make(AREA, f"reward test of {spec.name}, {verdict.check}: {verdict.said}.", fix, reward=spec.name, check=verdict.check)  # fmt: skip
    if not wrong:
        against = "right, wrong and worthless answers" if gold else "worthless answers"
        yield passed(AREA, f"{spec.name} passes the reward test: {against} of {len(rows)} rows", reward=spec.name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that silences warnings of unscored completions: the test reports them itself."""
    logger = logging.getLogger("covey.rewards.scorer")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
