"""`covey tune`: many short runs that differ in a few options, the hopeless ones ended early, and the best one's options."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.cli import output, train
from covey.cli.adapter import refuse_bad_adapter
from covey.cli.flags import Flag, typed
from covey.cli.verb import PLACES, Args
from covey.errors import ConfigError
from covey.experiments import child, series
from covey.experiments.attempt import Attempt
from covey.experiments.search import Dimension, dimensions
from covey.experiments.several import Steps
from covey.experiments.shared_trials import reason_against, train_trials
from covey.experiments.study import (
    Search,
    Tuning,
    best_of,
    importances,
    in_a_process,
    in_words,
    num_ended,
    open_study,
    rank,
    row_of,
)
from covey.files.places import next_folder
from covey.process.counting import tell

_FLAGS = (
    Flag(name="search", help="What to try: name=low:high, name=low:high:log, or name=a,b,c; may be repeated.", type=list[str], group="search"),
    Flag(name="trials", help="Runs in all, those that were ended early included.", type=int, default=20, least=1, group="search"),
    Flag(name="n_jobs", help="Trials that train together on one base, a step of each in turn.", type=int, default=1, least=1, group="search"),
    Flag(name="metric", help="What to judge by: a metric of evaluations.", default="eval_reward", group="search"),
    Flag(name="minimize", help="The smaller the metric, the better.", type=bool, group="search"),
    Flag(name="pruner", help="What ends a run early: median (worse than half of those before it), halving, or none.", default="median", group="search"),
    Flag(name="keep_all", help="Keep the weights of every trial, not of the best one alone.", type=bool, group="search"),
)  # fmt: skip
_CLI_FLAGS = frozenset(flag.name for flag in _FLAGS)
_LEFT_OUT = series.NEVER - {"output_dir", "json", "config"}
BEST = "best.yaml"


def flags() -> tuple[Flag, ...]:
    """Those of `covey train` that make sense for many runs, and the search's own."""
    return (*_FLAGS, *(flag for flag in train.flags() if flag.name not in _LEFT_OUT))


def run(args: Args) -> int:
    """Search until `--trials` trials have ended; the same command continues an interrupted search."""
    tuning = tuning_of(args)
    from covey.runs.lock import FolderLock
    from covey.runs.signals import StopRequest

    with FolderLock(tuning.folder), StopRequest() as stop:
        study = open_study(tuning)  # writes into it
        code = _search(tuning, study, stop)
    if stop.requested:
        output.say(f"Stopped; go on with: {series.again(sys.argv, tuning.folder)}")
        return stop.exit_code
    _report(tuning, study, args)
    return code


def tuning_of(args: Args) -> Tuning:
    """The search that the flags describe, checked: every end of every range makes a run. Its folder is claimed."""
    train.refuse_missing(args)
    if not args.get("eval_dataset"):
        raise ConfigError("covey tune judges by held-out prompts: give --eval-dataset.")
    child.refuse_launcher("covey tune")
    if args.get("pruner", "median") not in ("median", "halving", "none"):
        raise ConfigError("--pruner is median, halving or none.")
    jobs = args.get("n_jobs", 1)
    search = dimensions(args.get("search") or (), {flag.name: flag.kind for flag in train.flags()})
    searched = {dimension.name for dimension in search}
    options = {name: value for name, value in args.items() if name not in _CLI_FLAGS | series.NEVER | searched}
    if "eval_strategy" not in options and "eval_steps" not in options:
        options |= {"eval_strategy": "steps", "eval_steps": 0.125}
    apart = reason_against(options, searched, _check_ends(options, search))
    if apart and jobs > 1:
        raise ConfigError(f"--n-jobs {jobs} trains adapters on one base: {apart}. Leave --n-jobs out.")
    folder = Path(args.get("output_dir") or next_folder("tune")).expanduser()
    start = {
        dimension.name: args[dimension.name]
        for dimension in search
        if dimension.name in args and dimension.holds(args[dimension.name])
    }
    judged = {"metric": args.get("metric", "eval_reward"), "minimize": bool(args.get("minimize"))}
    series.claim(folder, {**options, **judged, "search": list(args["search"])}, "a search")
    return Tuning(
        folder=folder,
        options=options,
        search=tuple(search),
        metric=judged["metric"],
        is_smaller_better=judged["minimize"],
        pruner=args.get("pruner", "median"),
        trials=args.get("trials", 20),
        keeps_all=bool(args.get("keep_all")),
        seed=args.get("seed", 0),
        jobs=jobs,
        apart=apart,
        start=start,
    )


def _check_ends(options: Mapping[str, Any], search: list[Dimension]) -> Any:
    """The configuration of a trial. Raises ConfigError where a value at the end of a range does not fit the other options."""
    from covey.config import GRPOConfig

    middle = {dimension.name: dimension.ends[0] for dimension in search}
    for dimension in search:
        for value in dimension.ends:
            trial = {**options, **middle, dimension.name: value}
            overrides = train.config_options(trial)
            try:
                refuse_bad_adapter(trial)
                config = GRPOConfig(**overrides)
            except ConfigError as error:
                raise ConfigError(f"--search {dimension.name}, at {value}: {error}") from error
    return config


def _search(tuning: Tuning, study: Any, stop: Any) -> int:
    """Trials until there are enough. Returns 0, or the exit code of the last of several failures in a row."""
    output.say(
        f"each trial is a process with a model of its own: {tuning.apart}"
        if tuning.apart
        else "trials share one base, in this process: only options of the adapter are searched"
    )
    search = Search(tuning, study, stop, output.say)
    tell("trials", num_ended(study), tuning.trials)
    if tuning.apart:
        while (attempt := search.following()) is not None:
            search.settle(attempt, in_a_process(tuning, attempt, stop))
    else:
        for attempt, ended in train_trials(steps_on_one_base(tuning.options), search.following, tuning.jobs, stop):
            search.settle(attempt, ended)
    return search.code


def steps_on_one_base(options: Mapping[str, Any]) -> Callable[[Attempt], Steps]:
    """Maker of the run of a trial, on a base and rows that all trials share."""
    from covey.models import SharedBase

    base = SharedBase(options["model"])
    types = train.flag_types()
    rows = train.load_prompts(options["dataset"], options, limit=options.get("max_prompts"), live=True)

    def steps(attempt: Attempt) -> Steps:
        args = {**options, **typed(attempt.params, types)}
        return train.member({**args, "output_dir": str(attempt.place), "resume": "auto"}, base, rows)

    return steps


def _report(tuning: Tuning, study: Any, args: Args) -> None:
    best = best_of(study)
    if best is not None:
        import yaml

        from covey.runs.masking import mask

        text = yaml.safe_dump(mask({**tuning.options, **best.params}), sort_keys=False, allow_unicode=True)
        (tuning.folder / BEST).write_text(text)
    rows = [row_of(trial) for trial in study.trials]
    shares = importances(study)
    if args.get("json"):
        output.result_json(
            {
                "run": str(tuning.folder),
                "metric": tuning.metric,
                "best": best and row_of(best),
                "importance": shares,
                "trials": rows,
            }
        )
        return
    names = [dimension.name for dimension in tuning.search]
    output.result(f"{'trial':<7}{tuning.metric:>14}  {'state':<9}" + "".join(f"{name:>24}" for name in names))
    order = sorted(rows, key=lambda row: rank(row, tuning.is_smaller_better))
    for row in order:
        values = "".join(f"{_short(row['params'].get(name)):>24}" for name in names)
        output.result(f"{row['trial']:<7}{_short(row['value']):>14}  {row['state']:<9}{values}")
    if best is None:
        output.result(f"no trial ran to its end; see the logs in {tuning.folder}")
        return
    output.result(f"best: trial {best.number}, {tuning.metric} {best.value:.4g}: {tuning.folder / BEST}")
    for line in in_words(shares, sum(row["state"] == "complete" for row in rows)):
        output.result(line)
    output.say("The best of many looks better than it is. Try it with fresh seeds, beside your old options:")
    output.say(f"  covey train {tuning.folder / BEST} --seeds 5 --seed 100")


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


verb = replace(
    train.verb,
    name="tune",
    usage="[CONFIG.yaml | demo] --search NAME=LOW:HIGH[:log] ... [options of covey train]",
    sentence="Try options in many runs, judge them by held-out prompts, end the hopeless early, and keep the best.",
    examples=(
        "covey tune run.yaml --search learning_rate=1e-6:1e-4:log beta=0,0.001,0.01 --trials 30",
        "covey tune demo --eval-dataset demo:test --search learning_rate=1e-4:3e-3:log --max-steps 40",
    ),
    flags=flags,
    places=PLACES,
    run=run,
)
