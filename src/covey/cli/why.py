"""`covey why RUN --step N`: a recorded step made again with one thing changed at a time; which change removes the trouble."""

from __future__ import annotations

from pathlib import Path

from covey.cli import output, trust
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Given, Verb
from covey.errors import ConfigError


def run(given: Given) -> None:
    """Diagnose a step and show the ranking."""
    if not given.get("run") or given.get("step") is None:
        raise ConfigError("covey why needs a run and a step: covey why runs/train-1 --step 120.")
    from covey.doctor.why.causes import diagnose, is_named
    from covey.doctor.why.recorded import load
    from covey.runs import manifest

    folder = Path(given["run"]).expanduser()
    described = manifest.read(folder / manifest.NAME) or {}
    trust.confirm(folder, described.get("config") or {}, described, given, "covey why")
    recorded = load(folder, given["step"])
    found = diagnose(recorded)
    if given.get("json"):
        output.result_json({
            "step": recorded.step,
            "troubles": [{"said": said, "value": value, "limit": limit} for said, value, limit in found.troubles],
            "changes": [{"kind": one.change.kind, "said": one.change.said, "removes": one.share, "interval": [one.low, one.high], "named": is_named(one), "troubles": [place + 1 for place in one.removes]} for one in found.remedies],
            "grad_norm": {"replayed": found.replayed[0], "recorded": found.replayed[1]},
            "left_out": found.left_out,
        })  # fmt: skip
        return
    was = "" if found.replayed[1] is None else f" (recorded: {found.replayed[1]:.4g})"
    output.result(f"step {recorded.step} made again: gradient norm {found.replayed[0]:.4g}{was}")
    if not found.replayed[0]:
        output.result(
            "the step has no gradient: the completions of each group got equal rewards, so no weight moves and no change can help; "
            "easier or harder prompts, more completions a prompt or dynamic_sampling give groups that differ."
        )
        return
    if not found.troubles:
        output.result(
            "nothing is wrong with this step by what is measured here: how far it moves the policy, how stale its completions"
        )
        output.result(
            "are, its gradient beside those before, its groups and slices beside each other, and what it does to each reward."
        )
        return
    has_one = len(found.troubles) == 1
    for place, (said, value, limit) in enumerate(found.troubles, 1):
        name = "trouble" if has_one else f"trouble {place}"
        output.result(output.row("WARN", name, f"{said}: {value:.3g}, at most {limit:.3g} is usual"))
    for one in found.remedies:
        mark, which = ("OK  ", _which(one.removes)) if is_named(one) else ("-   ", "")
        output.result(
            f"{mark}{one.change.said} removes {100 * one.share:.0f}% of {'it' if has_one else 'all'} "
            f"(95%: {100 * one.low:.0f} to {100 * one.high:.0f}){'' if has_one else which}"
        )
    for place in range(len(found.troubles)):
        if not any(place in one.removes for one in found.remedies):
            output.result("no single change removes it" if has_one else f"no single change removes trouble {place + 1}")
    for said in found.left_out:
        output.say(f"not tried: {said}")


def _which(places: tuple[int, ...]) -> str:
    """`: trouble 1`, `: troubles 1 and 2`."""
    return f": trouble{'s' if len(places) > 1 else ''} {' and '.join(str(place + 1) for place in places)}"


verb = Verb(
    name="why",
    usage="RUN --step N [options]",
    sentence="Makes a recorded step again with one thing changed at a time, and says which change removes the trouble.",
    examples=("covey why runs/train-1 --step 120",),
    positional=("run",),
    run=run,
    flags=lambda: (
        Flag(name="run", help="Folder of a run, with the checkpoint before the step and the step's rollouts.", group="what"),
        Flag(name="step", help="The step to make again, from 1 on.", type=int, group="what"),
        Flag(name="trust_source", help="Run code that the run's options name though it may not be yours, without asking.", type=bool, default=False),
        JSON,
    ),
)  # fmt: skip
