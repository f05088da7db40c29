"""`covey merge A B ...`: whole models merged, with fixed weights or weights chosen on prompts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import spelled
from covey.cli.verb import Args
from covey.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from covey.evaluation.assessment import Assessment
    from covey.merging import Recipe

OPTIONS = (
    "base", "method", "weights", "density", "scale", "normalize", "rank", "choose", "reward", "prompt_column", "columns",
    "max_prompts", "max_tokens", "seed", "dtype",
)  # fmt: skip
"""Flags that act on some merges only."""


def refuse_idle(args: Args, acting: Sequence[str], what: str) -> None:
    """Raise ConfigError for a flag that is set and would not act on `what`."""
    for name in OPTIONS:
        if args.get(name) is not None and name not in acting:
            raise ConfigError(f"{spelled(name)} does not act on {what}; leave it out.")


def merge(folders: Sequence[Path], out: Path, args: Args, dtype: Any) -> None:
    """Merge, or choose among merges and write the best; `dtype` None: as stored."""
    from covey.cli.checkpoints import model_folder
    from covey.merging import Recipe, merge_models
    from covey.models import resolve_source

    if args.get("rank") is not None:
        raise ConfigError("--rank is for adapters; these are whole models, so leave it out.")
    base = Path(resolve_source(model_folder(args["base"]))) if args.get("base") else None
    if base is not None and not base.is_dir():
        raise ConfigError(f"--base {args['base']} is no folder here; download it first, then give its folder.")
    method = args.get("method") or "linear"
    refuse_idle(args, ("method", "weights", "dtype", *_acting(method, args)), f"a merge by {method}")
    chosen = {name: args[name] for name in ("density", "scale", "normalize", "seed") if args.get(name) is not None}
    recipe = Recipe(method=method, weights=tuple(args.get("weights") or ()), **chosen)
    how: dict[str, Any] = {"base": base, "dtype": dtype, "report": output.say}
    report: dict[str, Any] = {}
    if args.get("choose"):
        if args.get("weights"):
            raise ConfigError("--choose finds the weights, and --weights gives them; leave one out.")
        recipe, report = _choose(folders, recipe, args, how)
    if out.exists():
        out.rmdir()
    done = merge_models(folders, out, recipe, **how)
    weights = ", ".join(f"{weight:g}" for weight in done.weights)
    facts = {"out": str(out), "method": done.method, "weights": list(done.weights), **report}
    output.answer(args, facts, f"{len(folders)} models merged by {done.method} (weights {weights}): {out}")


def _acting(method: str, args: Args) -> Iterator[str]:
    """Flags that act on a merge by this method."""
    from covey.merging import METHODS

    if method not in METHODS:
        raise ConfigError(
            f"method {method!r} is not known.{did_you_mean(method, METHODS)} It is one of {', '.join(METHODS)}."
        )
    yield "choose"
    if args.get("choose"):
        yield from ("reward", "prompt_column", "columns", "max_prompts", "max_tokens")
    if METHODS[method].needs_base:
        yield from ("base", "scale")
    if method not in ("slerp", "task_arithmetic"):
        yield "normalize"
    if method.startswith(("ties", "dare")):
        yield "density"
    if method.startswith("dare"):
        yield "seed"


def candidates(recipe: Recipe, count: int, *, is_dense: bool = False) -> Iterator[Recipe]:
    """Merges to try: shares of each model from equal to mostly one, and densities where the method has one (`is_dense`: its own)."""
    if recipe.method == "slerp":
        yield from (replace(recipe, weights=(share,)) for share in (0.25, 0.5, 0.75))
        return
    scores = [(1.0,) * count]
    scores += [tuple(3.0 if i == k else 1.0 for i in range(count)) for k in range(count)] if count > 1 else []
    has_densities = recipe.method.startswith(("ties", "dare")) and not is_dense
    densities = (0.3, 0.6, 0.9) if has_densities else (recipe.density,)
    for weights in scores:
        total = sum(weights) if recipe.method == "linear" else 1.0
        for density in densities:
            yield replace(recipe, weights=tuple(round(weight / total, 6) for weight in weights), density=density)


def _choose(folders: Sequence[Path], recipe: Recipe, args: Args, how: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """The best of the candidates on half of the prompts, if on the other half it is not worse than the best of the models.

    Raises ConfigError where it is, beyond the 95% interval of the paired difference.
    """
    from covey.evaluation.assessment import compare
    from covey.merging import merge_models

    if not args.get("reward"):
        raise ConfigError("--choose needs --reward, by which answers are compared.")
    parents = [_assess(folder, args) for folder in folders]
    half = len(parents[0].greedy) // 2
    if half < 10:
        raise ConfigError(
            f"--choose has {len(parents[0].greedy)} prompts; give at least 20, half to choose and half to check."
        )
    best_parent = max(range(len(parents)), key=lambda i: _mean(parents[i], 0, half))
    tried: list[tuple[float, Recipe, Assessment]] = []
    quietly = {**how, "report": lambda text: None}  # only the merge that is written reports
    with tempfile.TemporaryDirectory() as place:
        for i, candidate in enumerate(candidates(recipe, len(folders), is_dense=args.get("density") is not None)):
            folder = Path(place) / str(i)
            done = merge_models(folders, folder, candidate, **quietly)
            assessment = _assess(folder, args, called=_words(done))
            tried.append((_mean(assessment, 0, half), done, assessment))
            output.say(f"{_words(done)}: {tried[-1][0]:.3f}")
            shutil.rmtree(folder)
    value, best, assessment = max(tried, key=lambda attempt: attempt[0])
    difference = compare(parents[best_parent].part(half, None), assessment.part(half, None))["reward"]
    verdict = difference.in_words("reward", 1.0)
    output.say(
        f"best: {_words(best)}, {value:.3f} on the first half; on the other half, against {folders[best_parent]}: {verdict}"
    )
    if difference.high < 0:
        raise ConfigError(
            f"The best merge found is worse than {folders[best_parent]} alone ({verdict}), so nothing was written; keep that model, "
            "or try another --method."
        )
    return best, {"chosen": _words(best), "against": str(folders[best_parent]), "difference": difference.value}


def _words(recipe: Recipe) -> str:
    weights = ", ".join(f"{weight:g}" for weight in recipe.weights)
    dense = f", density {recipe.density:g}" if recipe.method.startswith(("ties", "dare")) else ""
    return f"{recipe.method} {weights}{dense}"


def _mean(assessment: Assessment, start: int, stop: int) -> float:
    rewards = [reward for reward in assessment.greedy[start:stop] if reward == reward]
    return sum(rewards) / len(rewards) if rewards else float("-inf")


def _assess(folder: Path, args: Args, *, called: str | None = None) -> Assessment:
    from covey.cli.eval import assess_model, defaults

    settings = {name: args.get(name) for name in ("reward", "prompt_column", "columns", "max_prompts", "max_tokens")}
    options = {**defaults(), **{name: value for name, value in settings.items() if value is not None}}
    return assess_model(str(folder), {**options, "dataset": args["choose"]}, called=called)
