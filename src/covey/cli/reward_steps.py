"""Scored steps under a process reward: area under the ROC curve with its interval, and calibration, in JSON and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.evaluation.calibration import Calibration
    from covey.rewards.builtin.process_reward import ProcessReward
    from covey.rewards.steps import ScoredSteps


def judged(reward: ProcessReward, rows: Sequence[ScoredSteps]) -> Calibration:
    """The model's probabilities of the steps against their labels; the steps of a row depend on each other."""
    from covey.evaluation.calibration import calibration
    from covey.rewards import steps

    probabilities = steps.judge(reward, rows)
    scores = [score for row in probabilities for score in row]
    labels = [label for row in rows for label in row.labels]
    return calibration(scores, labels, [i for i, row in enumerate(rows) for _ in row.labels])


def of_dataset(call: Any, name: str, columns: Mapping[str, str]) -> Calibration | None:
    """`judged` where `call` is a process reward and the data set has scored steps, else None."""
    from covey.data import load
    from covey.rewards import steps
    from covey.rewards.builtin.process_reward import ProcessReward

    if not isinstance(call, ProcessReward):
        return None
    dataset = load(name, columns=columns)
    has = set(dataset.column_names)
    if "labels" not in has or not has & set(steps.COLUMNS):
        return None
    return judged(call, [steps.scored_steps(row, f"row {i} of {name}") for i, row in enumerate(dataset)])


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Plain values."""
    auc = calibration.auc
    return {
        "auc": auc.value,
        "auc_interval": [auc.low, auc.high],
        "calibration_error": calibration.error,
        "brier": calibration.brier,
        "steps": calibration.count,
        "bins": [asdict(bucket) for bucket in calibration.bins],
    }


def in_words(calibration: Calibration) -> str:
    """One sentence."""
    auc = calibration.auc
    return (
        f"a right step scores above a wrong one in {auc.value:.0%} (AUC, 95% {auc.low:.0%} to {auc.high:.0%}) of pairs, over "
        f"{calibration.count} steps of {auc.count} completions; calibration error {calibration.error:.3f}, Brier score {calibration.brier:.3f}"
    )


def table(calibration: Calibration) -> list[str]:
    """Predicted and observed shares, a line for each bin."""
    lines = [f"{'predicted':>11}{'right':>9}{'steps':>8}"]
    return lines + [f"{bucket.predicted:>11.3f}{bucket.observed:>9.3f}{bucket.count:>8}" for bucket in calibration.bins]
