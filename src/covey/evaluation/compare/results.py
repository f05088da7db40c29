"""Scores of the sides on held-out questions: the comparable ones, and their estimates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError, RunFolderError
from covey.evaluation.compare.effects import Effect, Scored, adjusted, effect_of, mean_of, shared_questions
from covey.evaluation.compare.run_data import MAIN_SET, Run
from covey.evaluation.compare.sides import Side
from covey.evaluation.intervals import Estimate, finite_mean
from covey.runs.evaluations import by_question

TOTAL = "reward"
"""The column of the weighted total."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of an answer: its reward, or 0 or 1 by a threshold."""

    column: str = TOTAL
    """`reward`, or `reward/<function>`."""
    threshold: float | None = None
    """An answer counts 1 from this reward on and 0 below; None: the reward itself."""

    def of(self, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], bool]:
        """(mean score by question, True if every answer scored 0 or 1)."""
        scored = [{**row, self.column: self._of(row.get(self.column))} for row in rows]
        values = {row[self.column] for row in scored} - {None}
        return by_question(scored, self.column), values <= {0.0, 1.0}

    def _of(self, value: float | None) -> float | None:
        if value is None or self.threshold is None:
            return value
        from covey.types import reaches  # loads torch, for which comparing does not wait

        return float(reaches(value, self.threshold))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Scores on one set, A first; effects are of B, C, ... against A, with Holm's p-values where there are several."""

    set_name: str
    score: Score
    is_share: bool
    """True if every answer scored 0 or 1, so that means are accuracies."""
    steps: Sequence[Sequence[int]]
    """The evaluation that counts, by side and run."""
    runs: Sequence[Sequence[Scored]]
    means: Sequence[Estimate]
    effects: Sequence[Effect]
    num_questions: Sequence[int]
    """Questions that were scored in every run of each side; 0 where only means are known."""

    @property
    def scale(self) -> float:
        """Factor from stored to displayed values."""
        return 100.0 if self.is_share else 1.0

    @property
    def unit(self) -> str:
        """Unit of differences."""
        return "points" if self.is_share else "reward"

    @property
    def title(self) -> str:
        """Title of the means: `accuracy on eval`."""
        what = "accuracy" if self.is_share else "reward"
        what += f" by {self.score.column.partition('/')[2]}" if self.score.column != TOTAL else ""
        at = f" (reward of {self.score.threshold:g} or more)" if self.score.threshold is not None else ""
        return f"{what} on {self.set_name}{at}"


def shared_sets(sides: Sequence[Side], set_name: str | None = None) -> list[str]:
    """Held-out sets that every run was evaluated on, the main one first. Raises RunFolderError or ConfigError where none is."""
    runs = [run for side in sides for run in side.runs]
    bare = [run for run in runs if not run.evaluated]
    if bare:
        raise RunFolderError(
            f"{bare[0].path} has no evaluation, so there is no held-out score to compare; train it with --eval-dataset, "
            f"or compare two models with covey eval A --compare-to B."
        )
    every = set.intersection(*(set(run.evaluated) for run in runs))
    if set_name is not None and set_name not in every:
        lacking = next(run for run in runs if set_name not in run.evaluated)
        raise ConfigError(
            f"{lacking.path} was not evaluated on a set {set_name!r}; it has {', '.join(sorted(lacking.evaluated))}."
        )
    if not every:
        listed = "; ".join(f"{run.path}: {', '.join(sorted(run.evaluated))}" for run in runs[:4])
        raise RunFolderError(f"no held-out set was evaluated in every run ({listed}).")
    if set_name is not None:
        return [set_name]
    return sorted(every, key=lambda name: (name != MAIN_SET, name))


def result_of(sides: Sequence[Side], set_name: str, score: Score, step: int | None = None) -> Result:
    """Scores at `step`, or at each run's last evaluation. Raises RunFolderError where the runs share no question."""
    steps = [[_step(run, set_name, step) for run in side.runs] for side in sides]
    read = [
        [_score(run, set_name, at, score) for run, at in zip(side.runs, places, strict=True)]
        for side, places in zip(sides, steps, strict=True)
    ]
    runs = [[scored for scored, _ in side] for side in read]
    is_share = all(is_share for side in read for _, is_share in side)
    num_questions = [len(shared_questions(side)) for side in runs]
    shared = set(shared_questions([run for side in runs for run in side]))
    if all(num_questions) and not shared:
        raise RunFolderError(
            f"{sides[0].runs[0].path} and the others were evaluated on different questions of {set_name} (none is shared); "
            f"evaluate the models on one set with covey eval A --compare-to B."
        )
    runs = [[_only(run, shared) for run in side] for side in runs]
    effects = adjusted([effect_of(runs[0], other) for other in runs[1:]])
    means = [mean_of(side) for side in runs]
    return Result(
        set_name=set_name, score=score, is_share=is_share, steps=steps, runs=runs, means=means, effects=effects, num_questions=num_questions
    )  # fmt: skip


def choose_score(sides: Sequence[Side], set_name: str, column: str | None, threshold: float | None) -> Score:
    """The score that means the same in every run: the total, or else the one function that all have.

    Raises ConfigError for a column that a run does not have, and where only the user can choose.
    """
    runs = [run for side in sides for run in side.runs]
    columns = [_columns(run, set_name) for run in runs]
    shared = [name for name in columns[0] if all(name in other for other in columns)]
    if column is not None:
        qualified = column if column == TOTAL or column.startswith(f"{TOTAL}/") else f"{TOTAL}/{column}"
        if qualified not in shared:
            raise ConfigError(f"--score {column}: every run has {', '.join(shared) or 'no scores in common'}.")
        return Score(column=qualified, threshold=threshold)
    weights = {str(run.config.get("reward_weights")) for run in runs}
    if len(weights) == 1 and all(set(other) == set(columns[0]) for other in columns):
        return Score(threshold=threshold)
    alone = [name for name in shared if name != TOTAL]
    if len(alone) == 1:
        return Score(column=alone[0], threshold=threshold)
    raise ConfigError(
        "the runs weigh or combine different rewards, so their totals mean different things; "
        + (f"choose what all have with --score: {', '.join(alone)}." if alone else "they share no reward function.")
    )


def _columns(run: Run, set_name: str) -> list[str]:
    for step in sorted(run.evaluated[set_name], reverse=True):
        if rows := run.answers(set_name, step):
            return [name for name in rows[0] if name == TOTAL or name.startswith(f"{TOTAL}/")]
    return [TOTAL]


def _step(run: Run, set_name: str, step: int | None) -> int:
    steps = sorted(run.evaluated[set_name])
    if step is None:
        return steps[-1]
    if step not in steps:
        listed = ", ".join(map(str, steps[:12])) + (", ..." if len(steps) > 12 else "")
        raise ConfigError(f"{run.path} was not evaluated at step {step}; it was at {listed}.")
    return step


def _score(run: Run, set_name: str, step: int, score: Score) -> tuple[Scored, bool]:
    """(the run's scores, True if they are shares); the logged mean where the answers were not stored."""
    rows = run.answers(set_name, step)
    if not rows:
        return Scored(seed=run.seed, mean=logged_mean(run, set_name, step, score)), False
    questions, is_share = score.of(rows)
    return Scored(seed=run.seed, mean=finite_mean(questions.values()), questions=questions), is_share


def logged_mean(run: Run, set_name: str, step: int, score: Score) -> float:
    """The mean of the score as the run logged it; NaN where it would need single answers."""
    if score.threshold is not None:
        return math.nan
    if score.column == TOTAL:
        return run.mean_at(set_name, step)
    value = run.evaluated[set_name].get(step, {}).get(f"{set_name}_rewards/{score.column.partition('/')[2]}/mean")
    return float(value) if isinstance(value, int | float) else math.nan


def _only(run: Scored, shared: set[str]) -> Scored:
    """The run on the shared questions alone, in one order; as it is where nothing is shared."""
    if not shared or run.questions is None:
        return run
    questions = {key: value for key, value in run.questions.items() if key in shared}
    return Scored(seed=run.seed, mean=sum(questions.values()) / len(questions), questions=questions)
