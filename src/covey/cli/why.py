"""`covey why RUN --step N`: a recorded step made again with one thing changed at a time; which change removes the trouble."""

from dataclasses import asdict
from pathlib import Path

from covey.cli import output, trust
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.runs.upkeep import expect_folder


def run(args: Args) -> None:
    """Diagnose a step and show the ranking."""
    folder = Path(args["run"]).expanduser()
    expect_folder(folder)
    from covey.doctor.why.causes import diagnose, is_named
    from covey.doctor.why.recorded import load
    from covey.runs import manifest

    described = manifest.read(folder / manifest.NAME) or {}
    trust.confirm(folder, described.get("config") or {}, described, args, "covey why")
    recorded = load(folder, args["step"])
    diagnosis = diagnose(recorded)
    if args.get("json"):
        output.result_json({
            "step": recorded.step,
            "troubles": [{"said": trouble, "value": value, "limit": limit} for trouble, value, limit in diagnosis.troubles],
            "changes": [{"kind": remedy.change.kind, "said": remedy.change.said, "removes": remedy.share, "interval": [remedy.low, remedy.high], "named": is_named(remedy), "troubles": [place + 1 for place in remedy.removes]} for remedy in diagnosis.remedies],
            "grad_norm": {"replayed": diagnosis.replayed[0], "recorded": diagnosis.replayed[1]},
            "left_out": diagnosis.left_out,
            "teacher": None if recorded.teacher is None else asdict(recorded.teacher),
        })  # fmt: skip
        return
    was = "" if diagnosis.replayed[1] is None else f" (recorded: {diagnosis.replayed[1]:.4g})"
    output.result(f"step {recorded.step} made again: gradient norm {diagnosis.replayed[0]:.4g}{was}")
    for line in () if recorded.teacher is None else recorded.teacher.lines():
        output.result(line)
    if not diagnosis.replayed[0]:
        output.result(
            "the step has no gradient: the completions of each group got equal rewards, so no weight moves and no change can help; "
            "easier or harder prompts, more completions a prompt or dynamic_sampling give groups that differ."
        )
        return
    if not diagnosis.troubles:
        output.result(
            "nothing is wrong with this step by what is measured here: how far it moves the policy, how stale its completions"
        )
        output.result(
            "are, its gradient beside those before, its groups and slices beside each other, and what it does to each reward."
        )
        return
    has_one = len(diagnosis.troubles) == 1
    for place, (trouble, value, limit) in enumerate(diagnosis.troubles, 1):
        name = "trouble" if has_one else f"trouble {place}"
        output.row("WARN", name, f"{trouble}: {value:.3g}, at most {limit:.3g} is usual")
    for remedy in diagnosis.remedies:
        mark, which = ("OK  ", _which(remedy.removes)) if is_named(remedy) else ("-   ", "")
        output.result(
            f"{mark}{remedy.change.said} removes {100 * remedy.share:.0f}% of {'it' if has_one else 'all'} "
            f"(95%: {100 * remedy.low:.0f} to {100 * remedy.high:.0f}){'' if has_one else which}"
        )
    for place in range(len(diagnosis.troubles)):
        if not any(place in remedy.removes for remedy in diagnosis.remedies):
            output.result("no single change removes it" if has_one else f"no single change removes trouble {place + 1}")
    for change in diagnosis.left_out:
        output.say(f"not tried: {change}")


def _which(places: tuple[int, ...]) -> str:
    """`: trouble 1`, `: troubles 1 and 2`."""
    return f": trouble{'s' if len(places) > 1 else ''} {' and '.join(str(place + 1) for place in places)}"


verb = Verb(
    name="why",
    usage="RUN --step N [options]",
    sentence="Repeats a recorded step with one thing changed at a time, and says which change removes the trouble.",
    examples=("covey why runs/train-1 --step 120",),
    positional=("run",),
    needs=dict.fromkeys(("run", "step"), "a run and a step: covey why runs/train-1 --step 120."),
    run=run,
    flags=lambda: (
        Flag(name="run", help="Folder of a run, with the checkpoint before the step and the step's rollouts.", group="what"),
        Flag(name="step", help="Step to repeat, counted from 1.", type=int, group="what"),
        Flag(name="trust_source", help="Run code that the run's options name, even if it may not be yours, without asking.", type=bool, default=False),
        JSON,
    ),
)  # fmt: skip
