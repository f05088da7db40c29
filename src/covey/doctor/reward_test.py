"""The reward test on a few rows: a reward must pay the data's own right answers, and not garbage."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from covey.doctor.finding import Finding, failed, passed, warned
from covey.doctor.reward_audit.examination import examine
from covey.doctor.reward_audit.probes import GOLD_COLUMNS, rows_of
from covey.doctor.reward_audit.verdicts import judge
from covey.errors import RewardError
from covey.rewards import JudgeReward, PairwiseJudgeReward
from covey.rewards.contract import RewardSpec

AREA = "rewards"
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
