"""Failures of rewards: counted, told once, and the end of a run where nothing else helps."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covey.data.together import questions
from covey.errors import ConfigError, RewardError
from covey.raised import with_place
from covey.rewards.calling.deadline import DeadlineError
from covey.rewards.calling.outcome import Outcome
from covey.rewards.contract import Batch, Total
from covey.types import Group, Mean, Metric, RunningTotal, Sum, merge_metrics

logger = logging.getLogger(__name__)


def with_scores(groups: Sequence[Group], scores: Tensor, outcomes: Sequence[Outcome], weights: Tensor) -> list[Group]:
    """The groups with their rows of the scores [N, R] as `rewards`, and as `measured` where the sampler failed, or a reward whose weight is not 0.

    A completion whose sampler failed has no measured score. NaN in `rewards`, not scored, is that one, and one whose reward failed
    on it and not on all that it is compared with: a sum without that reward is no worse result. Compared are the groups of one
    question, in several languages, and groups of one completion, such as greedy answers, with each other. Where a reward failed on
    all of these, the other rewards compare.
    """
    no_answer = torch.tensor([drawn.finish == "error" for group in groups for drawn in group.completions])
    failed = torch.zeros_like(scores, dtype=torch.bool)
    for r, (outcome, weight) in enumerate(zip(outcomes, weights.tolist(), strict=True)):
        for failure in outcome.failures if weight else ():
            failed[failure.start : failure.stop, r] = scores[failure.start : failure.stop, r].isnan()
    lost = failed.any(-1) | no_answer
    sizes = [group.size for group in groups]
    if not lost.any():
        return [replace(group, rewards=place) for group, place in zip(groups, scores.split(sizes), strict=True)]
    alone = torch.zeros_like(no_answer)
    rows = torch.arange(len(scores)).split(sizes)
    units = questions(groups) if any(size > 1 for size in sizes) else [range(len(groups))]
    for unit in units:
        compared = torch.cat([rows[place] for place in unit])
        alone[compared] = (failed[compared] & ~failed[compared].all(0)).any(-1)
    measured = scores.masked_fill(no_answer[:, None], torch.nan)
    rewards = measured.masked_fill(alone[:, None], torch.nan)
    where_lost = lambda x, place: x[place] if lost[place].any() else None
    return [
        replace(group, rewards=rewards[at], measured=where_lost(measured, at), lost=where_lost(lost, at))
        for group, at in zip(groups, rows, strict=True)
    ]


class Failures:
    """Failed calls of each reward; RewardError after `limit` in a row, or with `on_error="raise"` at the first one."""

    def __init__(self, names: Sequence[str], limit: int, on_error: str) -> None:
        if on_error not in ("record", "raise"):
            raise ConfigError(f"on_reward_error is {on_error!r}; use 'record' or 'raise'.")
        if limit < 1:
            raise ConfigError(f"reward_error_limit is {limit}; use at least 1.")
        self.names, self.limit, self.on_error = names, limit, on_error
        self.in_a_row = dict.fromkeys(names, 0)
        self.metrics: dict[str, Metric] = {}
        self._totals: dict[str, Metric] = {}
        self.proven: set[str] = set()
        """Rewards that have answered at least once."""
        self._lost: dict[str, RewardError] = {}
        self._is_begun = False
        self._has_warned = False

    def load(self, in_a_row: Mapping[str, int]) -> None:
        """Restore the counts of rewards that are still there."""
        self.in_a_row |= {name: count for name, count in in_a_row.items() if name in self.in_a_row}

    def account(self, outcome: Outcome, batch: Batch) -> None:
        """Update error counts and metrics; raise where the run must stop."""
        name, failures = outcome.name, outcome.failures
        broken = [failure.error for failure in failures if isinstance(failure.error, RewardError)]
        if broken and name not in self.proven:
            if repr(name) in str(broken[0]):
                raise broken[0]
            raise RewardError(f"reward {name!r}: {broken[0]}", broken[0].events) from broken[0]
        if failures and self.on_error == "raise":
            error = failures[0].error
            raise RewardError(
                f"reward {name!r} raised {with_place(error)} while completions were scored (on_reward_error is 'raise')."
            ) from error
        metrics: dict[str, Metric] = {f"rewards/{name}/seconds": Mean(outcome.seconds, 1)}
        if failures:
            metrics[f"rewards/{name}/errors"] = Sum(outcome.num_failed)
            late = sum(f.stop - f.start for f in failures if isinstance(f.error, TimeoutError))
            metrics |= {f"rewards/{name}/timeouts": Sum(late)} if late else {}
        if outcome.num_cached:
            metrics[f"rewards/{name}/cached"] = Mean(outcome.num_cached, len(outcome.scores))
        logged = [{key: Mean(value, 1)} for key, value in outcome.metrics if not isinstance(value, Total)]
        counted = [(key, value) for key, value in outcome.metrics if isinstance(value, Total)]
        totals = [{key: RunningTotal({value.place: float(value)})} for key, value in counted]
        self._totals = merge_metrics([self._totals, *totals])  # all of the run's: a process that counted may have ended
        self.metrics = merge_metrics([self.metrics, metrics, *logged]) | self._totals
        self.in_a_row[name] = self.in_a_row[name] + 1 if outcome.is_lost else 0
        if not outcome.is_lost:
            self.proven.add(name)
        elif not self._is_begun:
            self._lost[name] = _failed_from_the_start(outcome, batch)
        if self.in_a_row[name] >= self.limit:
            error = failures[-1].error
            raise RewardError(
                f"reward {name!r} failed {self.in_a_row[name]} calls in a row, the last with {with_place(error)}; "
                "fix the function and resume, or raise the limit of failures."
            ) from error

    def check_first(self, agree: Callable[[bool], bool] = bool) -> None:
        """After the first batch: RewardError where a reward failed on every completion, on every process.

        `agree`: true where it is true on any process; all of them call this after the same batch.
        """
        if self._is_begun:
            return
        self._is_begun = True
        for name in self.names:
            has_answered = agree(name in self.proven)
            if agree(name in self._lost) and not has_answered:
                raise self._lost.get(name) or RewardError(f"reward {name!r} failed on every completion.")

    def warn_of_unscored(self, outcomes: Sequence[Outcome], batch: Batch) -> None:
        """Say once that there are completions that every reward abstained from or failed on."""
        unscored = torch.stack([outcome.scores for outcome in outcomes]).isnan().all(0).nonzero().flatten().tolist()
        if not unscored or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%d of %d completions got no score from any reward and do not count, the first of them an answer to %r; "
            "`rewards/unscored` in the metrics counts them from now on.",
            len(unscored),
            len(batch),
            str(batch.prompts[unscored[0]])[:200],
        )


def _failed_from_the_start(outcome: Outcome, batch: Batch) -> RewardError:
    is_late = isinstance(outcome.failures[-1].error, DeadlineError)
    fix = (
        "raise reward_timeout_seconds, or make the function faster,"
        if is_late
        else "fix the function, or what it asks,"
    )
    error = RewardError(
        f"reward {outcome.name!r} failed on every completion of the first batch, with "
        f"{with_place(outcome.failures[-1].error)}; {fix} and start again.",
        events=[event for _, event in outcome.events(batch)],
    )
    error.__cause__ = outcome.failures[-1].error
    return error
