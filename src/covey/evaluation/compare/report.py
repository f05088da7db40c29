"""A whole comparison: sides, their differences, results, curves, the verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from covey.errors import ConfigError
from covey.evaluation.compare.curves import Curve, curves_of
from covey.evaluation.compare.results import Result, choose_score, result_of, shared_sets
from covey.evaluation.compare.run_data import Run
from covey.evaluation.compare.sides import Difference, Side, as_sides, differences, grouped
from covey.evaluation.compare.verdict import cautions, sentences


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of `compare`; its first entry in `results` is the main held-out set, which decides the verdict."""

    sides: Sequence[Side]
    differences: Sequence[Difference]
    results: Sequence[Result]
    curves: Sequence[Curve]
    verdicts: Sequence[str]
    """B against A, C against A, ..."""
    cautions: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values; curves as steps, means and bands."""
        return {
            "verdict": " ".join(self.verdicts),
            "verdicts": list(self.verdicts),
            "cautions": list(self.cautions),
            "sides": [
                {
                    "letter": side.letter,
                    "name": side.name,
                    "runs": [{"path": str(run.path), "seed": run.seed, "state": run.manifest.get("state")} for run in side.runs],
                }
                for side in self.sides
            ],
            "differences": [asdict(difference) for difference in self.differences],
            "results": [self._result(result) for result in self.results],
            "curves": [
                {
                    "name": curve.name,
                    "lines": [
                        {"steps": line.steps, "mean": line.middle, "low": line.low, "high": line.high}
                        for line in curve.lines
                    ],
                }
                for curve in self.curves
            ],
        }  # fmt: skip

    def _result(self, result: Result) -> dict[str, Any]:
        return {
            "set": result.set_name,
            "score": result.score.column,
            "threshold": result.score.threshold,
            "is_accuracy": result.is_share,
            "means": [
                {
                    "letter": side.letter,
                    "value": mean.value,
                    "low": mean.low,
                    "high": mean.high,
                    "runs": [run.mean for run in runs],
                    "steps": list(steps),
                }
                for side, mean, runs, steps in zip(self.sides, result.means, result.runs, result.steps, strict=True)
            ],
            "effects": [
                {"letter": side.letter, "against": "A", **asdict(effect), "is_real": effect.is_real}
                for side, effect in zip(self.sides[1:], result.effects, strict=True)
            ],
        }


def compare(
    groups: Sequence[Sequence[Run]],
    *,
    is_each: bool = False,
    is_grouped: bool = False,
    set_name: str | None = None,
    column: str | None = None,
    threshold: float | None = None,
    step: int | None = None,
) -> Comparison:
    """Compare runs. `groups` are the arguments of the user, each one run or several.

    Sides are found by what ran (`sides.grouped`), unless the user made them (`is_grouped`: each group is a side) or every
    run stands for itself (`is_each`). Raises ConfigError or RunFolderError in one sentence where there is nothing to compare.
    """
    runs = [run for group in groups for run in group]
    sides = as_sides([[run] for run in runs]) if is_each else as_sides(groups) if is_grouped else grouped(runs)
    if len(runs) < 2:
        raise ConfigError("a comparison needs two runs or more: covey compare runs/a runs/b.")
    if len(sides) < 2:
        raise ConfigError(
            f"the {len(runs)} runs differ in nothing but the seed, so they are one side; add runs of another way to train, "
            f"or compare them one by one with --each."
        )
    names = shared_sets(sides, set_name)
    results = [
        result_of(sides, name, choose_score(sides, name, column, threshold), step) for name in names
    ]  # fmt: skip
    differing = differences(sides)
    return Comparison(
        sides=sides,
        differences=differing,
        results=results,
        curves=curves_of(sides, results),
        verdicts=sentences(sides, results[0]),
        cautions=cautions(sides, differing, results),
    )
