"""A search over options: Optuna's study in a folder, its trials, and how each ended."""

import math
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import needed
from covey.experiments import child, series
from covey.experiments.attempt import Attempt, Watch, number_of
from covey.experiments.search import Dimension
from covey.process.counting import tell

JOURNAL = "study.journal"
_FAILURES_IN_A_ROW = 3


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


def open_study(tuning: Tuning) -> Any:
    """Optuna's study in the folder: a new one, or the one that was interrupted."""
    with needed("covey tune needs the optuna package", "tune"):
        import optuna
        from optuna.storages.journal import JournalFileBackend
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
        # constant_liar: trials that still run count as bad ones, so that concurrent trials differ
        study.sampler = optuna.samplers.TPESampler(seed=tuning.seed + len(study.trials), constant_liar=tuning.jobs > 1)
    if not study.trials and tuning.start:
        study.enqueue_trial(dict(tuning.start))
    return study


class Search:
    """Trials asked of the study, and told to it."""

    def __init__(self, tuning: Tuning, study: Any, stop: Any, say: Callable[[str], None]) -> None:
        self._tuning, self._study, self._stop, self._say = tuning, study, stop, say
        self._running: set[int] = set()
        """Numbers of trials that train now."""
        self._failed: list[int] = []
        """Exit codes of the last trials, all of which failed."""

    @property
    def code(self) -> int:
        """Exit code that ends the search; 0: it goes on."""
        return self._failed[-1] if len(self._failed) >= _FAILURES_IN_A_ROW else 0

    def following(self) -> Attempt | None:
        """The next trial, new or interrupted; None where there are enough."""
        tuning, study = self._tuning, self._study
        if self._stop.requested or self.code or num_ended(study) + len(self._running) >= tuning.trials:
            return None
        trial = next_trial(tuning, study, self._say, self._running)
        place = tuning.place(trial.number)
        shown = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in trial.params.items()
        )
        self._say(f"trial {trial.number} of {tuning.trials}: {shown}")
        series.make_way(place)
        self._running.add(trial.number)
        return Attempt(trial=trial, place=place, watch=Watch(place, tuning.metric, trial))

    def settle(self, attempt: Attempt, ended: child.Ended) -> None:
        """Tell the study how a trial ended; one that was stopped with the search is continued later."""
        self._running.discard(attempt.number)
        if self._stop.requested:
            return
        tuning, study, watch = self._tuning, self._study, attempt.watch
        value = number_of(ended.result.get("metrics", {}).get(tuning.metric))
        has_failed = False
        if watch.is_pruned and not ended.result:
            study.tell(attempt.trial, state=state_of("PRUNED"))
            outcome = f"ended early at {watch.last:.4g}"
        elif ended.code or not math.isfinite(value):
            has_failed = True
            study.tell(attempt.trial, state=state_of("FAIL"))
            evaluated = ", ".join(sorted(name for name in ended.result.get("metrics", {}) if name.startswith("eval_")))
            outcome = f"failed with exit code {ended.code}, see {attempt.log}"
            if not ended.code and ended.result:
                outcome = f"is no number at the end of the run; its evaluations have {evaluated or 'no metric'}"
        else:
            study.tell(attempt.trial, value)
            outcome = f"{value:.4g}"
        seconds = time.perf_counter() - attempt.started
        self._say(f"  trial {attempt.number}: {tuning.metric} {outcome} ({seconds:.0f} s)")
        self._failed = [*self._failed, ended.code or 1] if has_failed else []
        if self.code:
            self._say(f"{len(self._failed)} trials failed in a row; the last one's log is {attempt.log}")
        if not tuning.keeps_all:
            forget_weights(tuning, study)
        tell("trials", num_ended(study), tuning.trials)


def in_a_process(tuning: Tuning, attempt: Attempt, stop: Any) -> child.Ended:
    import yaml

    text = yaml.safe_dump({**tuning.options, **attempt.params}, sort_keys=False, allow_unicode=True)
    with child.options_file(text) as file:
        words = ["--config", file, "--output-dir", str(attempt.place), "--resume", "auto"]
        return child.train(words, attempt.log, stop, is_quiet=True, is_over=attempt.watch.is_hopeless)


def num_ended(study: Any) -> int:
    return sum(trial.state.is_finished() for trial in study.trials)


def next_trial(tuning: Tuning, study: Any, say: Callable[[str], None], running: Collection[int] = ()) -> Any:
    """A trial that was interrupted, or a new one."""
    import optuna

    for frozen in study.trials:
        if frozen.state == optuna.trial.TrialState.RUNNING and frozen.number not in running:
            say(f"trial {frozen.number} goes on where it was interrupted")
            return optuna.trial.Trial(study, frozen._trial_id)
    return study.ask({dimension.name: dimension.distribution() for dimension in tuning.search})


def state_of(name: str) -> Any:
    """Optuna's state of a trial: PRUNED, FAIL or COMPLETE."""
    import optuna

    return optuna.trial.TrialState[name]


def forget_weights(tuning: Tuning, study: Any) -> None:
    """Remove models and checkpoints of all trials that ended and are not the best; their metrics stay."""
    best = best_of(study)
    for trial in study.trials:
        if trial.state.is_finished() and (best is None or trial.number != best.number):
            for path in [tuning.place(trial.number) / "model", *tuning.place(trial.number).glob("checkpoint-*")]:
                shutil.rmtree(path, ignore_errors=True)


def best_of(study: Any) -> Any:
    """The best of the trials that ran to their end, or None."""
    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    return study.best_trial if done else None


def row_of(trial: Any) -> dict[str, Any]:
    """A trial as plain values; of one that was ended early the last evaluation."""
    last = trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None
    value = trial.value if trial.value is not None else last
    return {"trial": trial.number, "state": trial.state.name.lower(), "value": value, "params": dict(trial.params)}


def rank(row: Mapping[str, Any], is_smaller_better: bool) -> tuple[bool, float]:
    value = row["value"]
    return row["state"] != "complete", math.inf if value is None else value * (1 if is_smaller_better else -1)


FEWEST = 8
"""Completed trials below which nothing is said."""
PLENTY = 30
"""Completed trials from which the shares are more than a hint."""
_BEST = 1 / 3
"""Share of the trials that counts as good. Optuna's tenth is one trial of a short search, whose values are chance."""


def importances(study: Any) -> dict[str, float]:
    """Shares that sum to 1 by option, the largest first; empty with one option or fewer than `FEWEST` completed trials.

    PED-ANOVA (Watanabe et al. 2023) as in Optuna: how far the distribution of each option in the best third of the trials is from
    that in all trials. Pruned and failed trials are left out.
    """
    import optuna

    done = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    searched = {name for trial in done for name in trial.params}
    if len(done) < FEWEST or len(searched) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BEST)
        importance = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in importance.items()}


def in_words(shares: dict[str, float], trials: int) -> list[str]:
    """Lines for the table of a search."""
    if not shares:
        return []
    listed = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    hint = "" if trials >= PLENTY else f"; a hint, from {trials} completed trials"
    return [f"importance: {listed}{hint}"]
