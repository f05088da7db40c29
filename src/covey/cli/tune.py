"""`covey tune`: many short runs that differ in a few options, the hopeless ones ended early, and the best one's options."""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.cli import child, importance, output, series, train
from covey.cli.adapter import refuse_bad_adapter
from covey.cli.attempt import Attempt, Watch, number_of
from covey.cli.fields import other_flags
from covey.cli.flags import Flag
from covey.cli.rerun import NEVER
from covey.cli.search import Dimension, dimensions
from covey.cli.shared_trials import SharedTrials, reason_against
from covey.cli.verb import Given, Verb
from covey.errors import ConfigError
from covey.process.counting import tell

_FLAGS = (
    Flag(name="search", help="What to try: name=low:high, name=low:high:log, or name=a,b,c; several may be given.", type=list[str], group="search"),
    Flag(name="trials", help="Runs in all, those that were ended early included.", type=int, default=20, group="search"),
    Flag(name="n_jobs", help="Trials that train together on one base, their completions drawn in one batch.", type=int, default=1, group="search"),
    Flag(name="metric", help="What to judge by: a metric of evaluations.", default="eval_reward", group="search"),
    Flag(name="minimize", help="The smaller the metric, the better.", type=bool, group="search"),
    Flag(name="pruner", help="What ends a run early: median (worse than half of those before it), halving, or none.", default="median", group="search"),
    Flag(name="keep_all", help="Keep the weights of every trial, not of the best one alone.", type=bool, group="search"),
)  # fmt: skip
_OWN = frozenset(flag.name for flag in _FLAGS)
_LEFT_OUT = NEVER - {"output_dir", "json", "config"}
JOURNAL = "study.journal"
BEST = "best.yaml"
_FAILURES_IN_A_ROW = 3


def flags() -> tuple[Flag, ...]:
    """Those of `covey train` that make sense for many runs, and the search's own."""
    return (*_FLAGS, *(flag for flag in train.flags() if flag.name not in _LEFT_OUT))


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings of a search."""

    folder: Path
    options: Mapping[str, Any]
    """Options of every trial."""
    search: tuple[Dimension, ...]
    metric: str
    is_smaller_better: bool
    pruner: str
    trials: int
    keeps_all: bool
    seed: int
    jobs: int = 1
    """Trials that train at a time."""
    apart: str | None = None
    """Reason why each trial is a process that loads its own model; None: trials share one base in this process."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """The user's own values of searched options; the first trial takes them."""

    def place(self, number: int) -> Path:
        return self.folder / f"trial-{number:03d}"


def run(given: Given) -> int:
    """Search until so many trials have ended; the same command continues an interrupted search."""
    tuning = tuning_of(given)
    from covey.runs.lock import FolderLock
    from covey.runs.signals import StopRequest

    study = open_study(tuning)
    lock = FolderLock(tuning.folder)
    lock.take()
    try:
        with StopRequest() as stop:
            code = _search(tuning, study, stop)
    finally:
        lock.release()
    if stop.requested:
        output.say(f"Stopped; go on with: {series.again(sys.argv, tuning.folder)}")
        return stop.exit_code
    _report(tuning, study, given)
    return code


def tuning_of(given: Given) -> Tuning:
    """The search that the flags describe, checked: every end of every range makes a run. Its folder is claimed."""
    train.refuse_missing(given)
    if not given.get("eval_dataset"):
        raise ConfigError("covey tune judges by held-out prompts: give --eval-dataset.")
    child.refuse_launcher("covey tune")
    if given.get("trials", 1) < 1 or given.get("pruner", "median") not in ("median", "halving", "none"):
        raise ConfigError("--trials is a number from 1 on, and --pruner is median, halving or none.")
    if (jobs := given.get("n_jobs", 1)) < 1:
        raise ConfigError(f"--n-jobs {jobs} must be 1 or more, the number of trials that train together.")
    search = dimensions(given.get("search") or (), train.flags())
    searched = {one.name for one in search}
    options = {name: value for name, value in given.items() if name not in _OWN | NEVER | searched}
    if "eval_strategy" not in options and "eval_steps" not in options:
        options |= {"eval_strategy": "steps", "eval_steps": 0.125}
    apart = reason_against(options, searched, _check_ends(options, search))
    if apart and jobs > 1:
        raise ConfigError(f"--n-jobs {jobs} trains adapters on one base: {apart}. Leave --n-jobs out.")
    folder = Path(given.get("output_dir") or next_folder()).expanduser()
    start = {one.name: given[one.name] for one in search if one.name in given and one.holds(given[one.name])}
    judged = {"metric": given.get("metric", "eval_reward"), "minimize": bool(given.get("minimize"))}
    series.claim(folder, {**options, **judged, "search": list(given["search"])}, "a search")
    return Tuning(
        folder=folder,
        options=options,
        search=tuple(search),
        metric=judged["metric"],
        is_smaller_better=judged["minimize"],
        pruner=given.get("pruner", "median"),
        trials=given.get("trials", 20),
        keeps_all=bool(given.get("keep_all")),
        seed=given.get("seed", 0),
        jobs=jobs,
        apart=apart,
        start=start,
    )


def _check_ends(options: Mapping[str, Any], search: list[Dimension]) -> Any:
    """The configuration of a trial. Raises ConfigError where a value at the end of a range does not fit the other options."""
    from covey.config import GRPOConfig

    middle = {one.name: one.ends[0] for one in search}
    for one in search:
        for value in one.ends:
            trial = {**options, **middle, one.name: value}
            wanted = train.config_options(trial)
            try:
                refuse_bad_adapter(trial)
                config = GRPOConfig(**wanted)
            except ConfigError as error:
                raise ConfigError(f"--search {one.name}, at {value}: {error}") from error
    return config


def open_study(tuning: Tuning) -> Any:
    """Optuna's study in the folder: a new one, or the one that was interrupted."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise ConfigError("covey tune needs the optuna package: pip install 'covey[tune]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = JournalFileBackend(str(tuning.folder / JOURNAL))
    pruners: dict[str, Any] = {
        "median": optuna.pruners.MedianPruner(n_startup_trials=4),
        "halving": optuna.pruners.SuccessiveHalvingPruner(),
        "none": optuna.pruners.NopPruner(),
    }
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(
        storage=storage,
        study_name="covey",
        direction="minimize" if tuning.is_smaller_better else "maximize",
        pruner=pruners[tuning.pruner],
        load_if_exists=True,
    )
    # the seed moves on with the study, or a resumed search would draw the first values again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # constant_liar: trials that still run count as bad ones, so that those beside them differ
        study.sampler = optuna.samplers.TPESampler(seed=tuning.seed + len(study.trials), constant_liar=tuning.jobs > 1)
    if not study.trials and tuning.start:
        study.enqueue_trial(dict(tuning.start))
    return study


def _search(tuning: Tuning, study: Any, stop: Any) -> int:
    """Trials until there are enough. Returns 0, or the exit code of the last of several failures in a row."""
    output.say(
        f"each trial is a process with a model of its own: {tuning.apart}"
        if tuning.apart
        else "trials share one base, in this process: only options of the adapter are searched"
    )
    search = _Search(tuning, study, stop)
    tell("trials", _ended(study), tuning.trials)
    if tuning.apart:
        while (attempt := search.following()) is not None:
            search.settle(attempt, _in_a_process(tuning, attempt, stop))
    else:
        for attempt, ended in SharedTrials(tuning.options).train(search.following, tuning.jobs, stop):
            search.settle(attempt, ended)
    return search.code


class _Search:
    """Trials asked of the study, and told to it."""

    def __init__(self, tuning: Tuning, study: Any, stop: Any) -> None:
        self._tuning, self._study, self._stop = tuning, study, stop
        self._running: set[int] = set()
        """Numbers of trials that train now."""
        self._failed: list[int] = []
        """Exit codes of the last trials, all of which failed."""

    @property
    def code(self) -> int:
        """Exit code that ends the search; 0: it goes on."""
        return self._failed[-1] if len(self._failed) >= _FAILURES_IN_A_ROW else 0

    def following(self) -> Attempt | None:
        """A trial that begins now, or goes on; None where there are enough."""
        tuning, study = self._tuning, self._study
        if self._stop.requested or self.code or _ended(study) + len(self._running) >= tuning.trials:
            return None
        trial = _next_trial(tuning, study, self._running)
        place = tuning.place(trial.number)
        shown = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in trial.params.items()
        )
        output.say(f"trial {trial.number} of {tuning.trials}: {shown}")
        series.make_way(place)
        self._running.add(trial.number)
        return Attempt(trial=trial, place=place, watch=Watch(place, tuning.metric, trial))

    def settle(self, attempt: Attempt, ended: child.Ended) -> None:
        """Tell the study how a trial ended; one that was stopped with the search goes on another time."""
        self._running.discard(attempt.number)
        if self._stop.requested:
            return
        tuning, study, watch = self._tuning, self._study, attempt.watch
        value = number_of(ended.result.get("metrics", {}).get(tuning.metric))
        has_failed = False
        if watch.has_given_up and not ended.result:
            study.tell(attempt.trial, state=_state("PRUNED"))
            said = f"ended early at {watch.last:.4g}"
        elif ended.code or not math.isfinite(value):
            has_failed = True
            study.tell(attempt.trial, state=_state("FAIL"))
            said = f"failed with exit code {ended.code}, see {attempt.log}"
        else:
            study.tell(attempt.trial, value)
            said = f"{value:.4g}"
        seconds = time.perf_counter() - attempt.started
        output.say(f"  trial {attempt.number}: {tuning.metric} {said} ({seconds:.0f} s)")
        self._failed = [*self._failed, ended.code or 1] if has_failed else []
        if self.code:
            output.say(f"{len(self._failed)} trials failed in a row; the last one's log is {attempt.log}")
        if not tuning.keeps_all:
            _forget_weights(tuning, study)
        tell("trials", _ended(study), tuning.trials)


def _in_a_process(tuning: Tuning, attempt: Attempt, stop: Any) -> child.Ended:
    with child.options_file(_yaml(tuning, attempt.params)) as file:
        words = ["--config", file, "--output-dir", str(attempt.place), "--resume", "auto"]
        return child.train(words, attempt.log, stop, is_quiet=True, is_over=attempt.watch.is_hopeless)


def _ended(study: Any) -> int:
    return sum(trial.state.is_finished() for trial in study.trials)


def _next_trial(tuning: Tuning, study: Any, running: Collection[int] = ()) -> Any:
    """A trial that was interrupted, or a new one."""
    import optuna

    for frozen in study.trials:
        if frozen.state == optuna.trial.TrialState.RUNNING and frozen.number not in running:
            output.say(f"trial {frozen.number} goes on where it was interrupted")
            return optuna.trial.Trial(study, frozen._trial_id)
    return study.ask({one.name: one.distribution() for one in tuning.search})


def _state(name: str) -> Any:
    import optuna

    return optuna.trial.TrialState[name]


def _yaml(tuning: Tuning, params: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump({**tuning.options, **params}, sort_keys=False, allow_unicode=True))


def _forget_weights(tuning: Tuning, study: Any) -> None:
    """Remove models and checkpoints of all trials that ended and are not the best; their metrics stay."""
    best = _best(study)
    for trial in study.trials:
        if trial.state.is_finished() and (best is None or trial.number != best.number):
            for path in [tuning.place(trial.number) / "model", *tuning.place(trial.number).glob("checkpoint-*")]:
                shutil.rmtree(path, ignore_errors=True)


def _best(study: Any) -> Any:
    """The best of the trials that ran to their end, or None."""
    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    return study.best_trial if done else None


def _report(tuning: Tuning, study: Any, given: Given) -> None:
    best = _best(study)
    if best is not None:
        import yaml

        from covey.runs.masking import mask

        text = yaml.safe_dump(mask({**tuning.options, **best.params}), sort_keys=False, allow_unicode=True)
        (tuning.folder / BEST).write_text(text)
    rows = [row_of(trial) for trial in study.trials]
    shares = importance.importances(study)
    if given.get("json"):
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
    names = [one.name for one in tuning.search]
    output.result(f"{'trial':<7}{tuning.metric:>14}  {'state':<9}" + "".join(f"{name:>24}" for name in names))
    order = sorted(rows, key=lambda row: _rank(row, tuning.is_smaller_better))
    for row in order:
        values = "".join(f"{_short(row['params'].get(name)):>24}" for name in names)
        output.result(f"{row['trial']:<7}{_short(row['value']):>14}  {row['state']:<9}{values}")
    if best is None:
        output.result(f"no trial ran to its end; see the logs in {tuning.folder}")
        return
    output.result(f"best: trial {best.number}, {tuning.metric} {best.value:.4g}: {tuning.folder / BEST}")
    for line in importance.in_words(shares, sum(row["state"] == "complete" for row in rows)):
        output.result(line)
    output.say("The best of many looks better than it is. Try it with fresh seeds, beside your old options:")
    output.say(f"  covey train {tuning.folder / BEST} --seeds 5 --seed 100")


def row_of(trial: Any) -> dict[str, Any]:
    """A trial as plain values; of one that was ended early the last evaluation."""
    last = trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None
    value = trial.value if trial.value is not None else last
    return {"trial": trial.number, "state": trial.state.name.lower(), "value": value, "params": dict(trial.params)}


def _rank(row: Mapping[str, Any], is_smaller_better: bool) -> tuple[bool, float]:
    value = row["value"]
    return row["state"] != "complete", math.inf if value is None else value * (1 if is_smaller_better else -1)


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def next_folder() -> str:
    """The next free `runs/tune-N`."""
    taken = [int(found[1]) for path in Path("runs").glob("tune-*") if (found := re.fullmatch(r"tune-(\d+)", path.name))]
    return f"runs/tune-{max(taken, default=0) + 1}"


verb = Verb(
    name="tune",
    usage="[CONFIG.yaml | demo] --search NAME=LOW:HIGH[:log] ... [options of covey train]",
    sentence="Try options in many runs, judge them by held-out prompts, end the hopeless early, and keep the best.",
    examples=(
        "covey tune run.yaml --search learning_rate=1e-6:1e-4:log beta=0,0.001,0.01 --trials 30",
        "covey tune demo --eval-dataset demo:test --search learning_rate=1e-4:3e-3:log --max-steps 40",
    ),
    flags=flags,
    quiet_flags=other_flags,
    types=train.config_types,
    hints=train.HINTS,
    positional=("config",),
    presets=train.PRESETS,
    run=run,
)
