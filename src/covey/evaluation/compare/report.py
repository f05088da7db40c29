"""A whole comparison: sides, their differences, results, curves, the verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from covey.errors import ConfigError
from covey.evaluation.compare.curves import Curve, curves_of
from covey.evaluation.compare.effects import Effect
from covey.evaluation.compare.results import Result, choose_score, result_of, shared_sets
from covey.evaluation.compare.run_data import Run
from covey.evaluation.compare.sides import Difference, Side, as_sides, differences, grouped, repeats


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


def sentences(sides: Sequence[Side], result: Result) -> list[str]:
    """One sentence for B, C, ... against A."""
    return [_sentence(sides[0], side, result, effect) for side, effect in zip(sides[1:], result.effects, strict=True)]


def _sentence(a: Side, b: Side, result: Result, effect: Effect) -> str:
    value, unit, scale = effect.value, result.unit, result.scale
    if effect.basis == "nothing" or math.isnan(value):
        return (
            f"Nothing can be told of {b.title} and {a.title}: there is one run a side and no score of single questions."
        )
    if not effect.is_real:
        low, high = scale * effect.low, scale * effect.high
        span = f"95% {_format(low, scale)} to {_format(high, scale)}"
        if math.isinf(low):
            span = "with seeds too few and too equal for an interval"
        return (
            f"No difference can be told: {b.title} is {_format(scale * value, scale, sign=True)} {unit} from {a.title}, "
            f"{span}, {_counts(effect)}{_power(effect, scale, unit)}."
        )
    word = "better" if value > 0 else "worse"
    low, high = sorted((abs(scale * effect.low), abs(scale * effect.high)))
    return (
        f"{b.title} is {word} than {a.title} by {_format(abs(scale * value), scale)} {unit}, 95% {_format(low, scale)} to "
        f"{_format(high, scale)}, {_counts(effect)}."
    )


def _counts(effect: Effect) -> str:
    a, b = effect.seeds
    seeds = (
        f"{a} seeds" if a == b > 1 else "1 seed each, so of these two runs alone" if a == b else f"{a} and {b} seeds"
    )
    questions = f", {effect.questions} questions" if effect.questions else ""
    return f"p = {effect.p_value:.2g}, {seeds}{questions}"


def _power(effect: Effect, scale: float, unit: str) -> str:
    if not math.isfinite(effect.detectable) or effect.detectable == 0:
        return ""
    return f"; a true difference of {_format(scale * effect.detectable, scale)} {unit} would be found 4 times in 5"


def _format(value: float, scale: float, *, sign: bool = False) -> str:
    """A number with the decimals that suit it: one for points, three digits that count for rewards."""
    form = ".1f" if scale == 100.0 else ".3g"
    return format(value + 0.0, f"{'+' if sign else ''}{form}")


def cautions(sides: Sequence[Side], differences: Sequence[Difference], results: Sequence[Result]) -> list[str]:
    """Reasons to believe the verdict less, or of something else than one thinks; the gravest first."""
    return [*_of_seeds(sides), *_of_what_differs(sides, differences), *_of_runs(sides), *_of_results(sides, results)]


def _of_seeds(sides: Sequence[Side]) -> list[str]:
    notes = []
    if any(len(side.runs) == 1 for side in sides):
        alone = ", ".join(side.title for side in sides if len(side.runs) == 1)
        notes.append(
            f"one seed alone: {alone}. The interval then holds for new questions put to these very models; another seed may "
            f"say the opposite. Run each side with 3 seeds or more to tell ways to train apart."
        )
    for side in sides:
        if again := repeats(side):
            notes.append(
                f"{side.title} has several runs of seed {', '.join(map(str, again))}; they count as if drawn anew."
            )
    return notes


def _of_what_differs(sides: Sequence[Side], differences: Sequence[Difference]) -> list[str]:
    notes = []
    for i, side in enumerate(sides[1:], start=1):
        apart = [
            difference for difference in differences if difference.values[i] != difference.values[0] or difference.diff
        ]
        chosen = [difference.name for difference in apart if difference.area in ("config", "model", "dataset")]
        if len(chosen) > 1:
            listed = ", ".join(chosen[:6]) + (", ..." if len(chosen) > 6 else "")
            notes.append(
                f"{side.title} differs from {sides[0].title} in {len(chosen)} things at once ({listed}); the verdict is about "
                f"all of them together."
            )
        if not apart:
            notes.append(f"nothing that was recorded differs between {sides[0].title} and {side.title}.")
    versions = [difference.name for difference in differences if difference.area == "versions"]
    if versions and len(versions) < len(differences):
        notes.append(f"versions differ too ({', '.join(versions)}).")
    if any(difference.area == "rewards" for difference in differences):
        notes.append("the rewards differ; scores of the same name may mean different things.")
    if files := [difference.name.removesuffix(".source") for difference in differences if difference.area == "sources"]:
        notes.append(
            f"code of your own differs ({', '.join(files)}); if rewards are in it, their scores may not be the same."
        )
    return notes


def _of_runs(sides: Sequence[Side]) -> list[str]:
    notes = []
    runs = [run for side in sides for run in side.runs]
    for run in runs:
        state = run.manifest.get("state")
        if state != "finished":
            notes.append(f"{run.path} is not finished ({state} at step {run.manifest.get('step')}).")
        changed = [
            name
            for attempt in run.manifest.get("attempts") or ()
            for name in attempt.get("changed") or ()
            if not name.startswith("hardware.")
        ]
        if changed:
            notes.append(f"{run.path} went on with something changed: {', '.join(dict.fromkeys(changed[:6]))}.")
    return notes


def _of_results(sides: Sequence[Side], results: Sequence[Result]) -> list[str]:
    notes = []
    for result in results:
        steps = sorted({step for side in result.steps for step in side})
        if len(steps) > 1:
            notes.append(
                f"the last evaluations on {result.set_name} are of different steps: {', '.join(map(str, steps))}."
            )
        shared = max((effect.questions for effect in result.effects), default=0)
        if shared and shared < max(result.num_questions):
            notes.append(
                f"only {shared} of {max(result.num_questions)} questions of {result.set_name} are in every run; the rest is left out."
            )
        if not all(result.num_questions):
            notes.append(f"not every run kept its answers on {result.set_name}; only the means of runs are compared.")
    return notes
