"""Verdict of a comparison, in a sentence a side, and its caveats."""

import math
from collections.abc import Sequence

from covey.evaluation.compare.effects import Effect
from covey.evaluation.compare.results import Result
from covey.evaluation.compare.sides import Difference, Side, repeats


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
