"""Trials of `covey tune` in this process, on one base in memory: where only options of adapters are searched."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from covey.errors import ConfigError, CoveyError
from covey.experiments.attempt import Attempt
from covey.experiments.child import Ended
from covey.experiments.several import OF_THE_BASE, OF_THE_DATA, OF_THE_PROCESS, Outcome, Steps
from covey.runs.signals import StopRequest


def reason_against(options: Mapping[str, Any], searched: Iterable[str], config: Any) -> str | None:
    """Reason why trials with these options cannot share a base, in a few words; None if they can."""
    from covey.experiments.together import refuse_unshareable

    searched = set(searched)
    if options.get("lora_r") is None and "lora_r" not in searched:
        return "without --lora-r a trial changes the base"
    if others := sorted(searched & (OF_THE_BASE | OF_THE_DATA | OF_THE_PROCESS)):
        return f"--search {others[0]} changes more than the adapter"
    if options.get("streaming"):
        return "--streaming reads the rows anew"
    try:
        refuse_unshareable([config])
    except ConfigError as error:
        return str(error)
    return None


def train_trials(
    steps_of: Callable[[Attempt], Steps], following: Callable[[], Attempt | None], jobs: int, stop: StopRequest
) -> Iterator[tuple[Attempt, Ended]]:
    """Trials, `jobs` at a time with a step of each in turn, as `covey train` alone would make each; yields each as it ends.

    `steps_of` makes the run of a trial. `following` gives the next trial where one has ended, or None. A trial prints into its log. A
    signal, or `watch.is_hopeless()` returning True after a step, ends a trial with a checkpoint.
    """
    from covey.experiments.interleaving import Member, Rounds

    open_trials: dict[Any, _Trial] = {}
    with stop.for_all(), contextlib.ExitStack() as stack, Rounds[Outcome]() as rounds:
        while True:
            while len(rounds.running) < jobs and (attempt := following()) is not None:
                trial = stack.enter_context(_Trial(attempt))
                member = Member(attempt.place.name, steps_of(attempt), trial.turning)
                rounds.running.append(member)
                open_trials[member] = trial
            if not rounds.running:
                return
            for member in rounds.next():
                if member.has_ended:
                    trial = open_trials.pop(member)
                    yield trial.attempt, trial.ended(member)
                elif open_trials[member].attempt.watch.is_hopeless():
                    open_trials[member].stop.adopt([["SIGTERM"]])


class _Trial:
    """A trial's log, and its own request to stop, which follows that of the process."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.stop = attempt, StopRequest()
        self._file = attempt.log.open("a", encoding="utf-8")

    def __enter__(self) -> _Trial:
        self.stop.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop.__exit__(*error)
        self._file.close()

    @contextlib.contextmanager
    def turning(self) -> Iterator[None]:
        """Context of its steps."""
        with contextlib.redirect_stdout(self._file), contextlib.redirect_stderr(self._file), self.stop.for_all():
            yield

    def ended(self, member: Any) -> Ended:
        """Its end; the log is closed."""
        with self._file:
            if (error := member.error) is not None:
                traceback.print_exception(error, file=self._file)
                return Ended(code=error.exit_code if isinstance(error, CoveyError) else 1)
        if member.result.stopped_by:
            return Ended(code=member.result.exit_code)
        return Ended(code=0, result={"metrics": dict(member.result.metrics)})
