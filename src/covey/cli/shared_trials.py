"""Trials of `covey tune` in this process, on one base in memory: where only options of adapters are searched."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from covey.cli import train
from covey.cli.child import Ended
from covey.cli.fields import other_flags
from covey.cli.flags import typed
from covey.cli.together import OF_THE_BASE, OF_THE_DATA, OF_THE_PROCESS
from covey.errors import ConfigError, CoveyError
from covey.runs.signals import StopRequest


def reason_against(options: Mapping[str, Any], searched: Iterable[str], config: Any) -> str | None:
    """Reason why trials with these options cannot share a base, in a few words; None if they can."""
    from covey.training.together import refuse_unshareable

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


class SharedTrials:
    """One base, and the rows, for all trials of a search."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from covey.models import SharedBase

        self._options, self._base = options, SharedBase(options["model"])
        self._types = {**{flag.name: flag.type for flag in (*other_flags(), *train.flags())}, **train.config_types()}
        rows = train.load_prompts(options["dataset"], options, limit=options.get("max_prompts"), live=True)
        self._load = functools.partial(train.load_rows, dataset=rows)

    def train(
        self, params: Mapping[str, Any], place: Path, log: Path, stop: StopRequest, is_over: Callable[[], bool]
    ) -> Ended:
        """One trial to its end, as `covey train` alone would make it; what it prints goes to `log`.

        A signal, or `is_over` returning True after a step, ends it with a checkpoint.
        """
        from covey.runs import rng
        from covey.training.taking_turns import Member

        given = {**self._options, **typed(params, self._types), "output_dir": str(place), "resume": "auto"}
        member = Member(place.name, train.member(given, self._base, self._load))
        before, mine = rng.snapshot(), StopRequest()
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(log.open("a", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(file))
            stack.enter_context(contextlib.redirect_stderr(file))
            stack.enter_context(stop.for_all())
            stack.enter_context(mine)
            stack.enter_context(mine.for_all())
            stack.callback(member.turns.close)
            while not member.has_ended:
                member.turn()
                if not member.has_ended and member.drawing is None and is_over():
                    mine.adopt([["SIGTERM"]])
            if member.error is not None:
                traceback.print_exception(member.error, file=file)
        rng.restore(before)
        if member.error is not None:
            return Ended(code=member.error.exit_code if isinstance(member.error, CoveyError) else 1)
        outcome = member.result
        assert outcome is not None  # it has ended without an error
        if outcome.stopped_by:
            return Ended(code=outcome.exit_code)
        return Ended(code=0, result={"metrics": dict(outcome.metrics)})
