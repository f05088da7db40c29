"""`covey faults`: inject every known fault into a tiny real run, and show the steps lost."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Given, Verb
from covey.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from covey.doctor.faults import Outcome, Tally

_FLAGS = (
    Flag(name="minutes", help="Start no fault after so long.", type=float, default=60.0, group="what"),
    Flag(name="count", help="Inject each fault at most so often.", type=int, default=1000, group="what"),
    Flag(name="only", help="These faults alone, by name; --list shows the names.", type=list[str], group="what"),
    Flag(name="list", help="Show the faults and stop.", type=bool, group="what"),
    Flag(name="seed", help="Seed of the random moments.", type=int, default=0, group="what"),
    Flag(name="folder", help="Where the runs go; those that did not survive stay there.", default="a temporary one", group="what"),
    JSON,
)  # fmt: skip


def run(given: Given) -> int:
    from covey.doctor.faults import FAULTS, Bench, soak

    if given.get("list") and given.get("json"):
        output.result_json({"faults": {name: _about(inject) for name, inject in FAULTS.items()}})
        return 0
    if given.get("list"):
        for name, inject in FAULTS.items():
            output.result(f"{name:<26} {_about(inject)}")
        return 0
    names = given.get("only") or list(FAULTS)
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"covey faults knows no fault {name!r}.{did_you_mean(name, FAULTS)} --list shows them.")
    minutes, count = given.get("minutes", 60.0), given.get("count", 1000)
    if not minutes > 0 or count < 1:
        raise ConfigError(f"--minutes {minutes:g} --count {count} injects nothing; both must be above 0.")
    folder = Path(given["folder"]) if "folder" in given else Path(tempfile.mkdtemp(prefix="covey-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, given.get("seed", 0))
    try:
        output.say(f"An undisturbed run takes {bench.undisturbed(1)[1]:.1f} s. Each fault now meets one like it.")
        tallies = soak(bench, names, minutes=minutes, count=count, tell=_tell)
    finally:
        bench.close()
    _show(tallies, folder, as_json=bool(given.get("json")))
    return int(any(tally.survived < len(tally.outcomes) for tally in tallies))


def _about(inject: Any) -> str:
    return str(inject.__doc__ or "A reward that fails in some steps.").splitlines()[0]


def _tell(fault: str, outcome: Outcome) -> None:
    if outcome.came_late:
        return
    output.say(f"{fault}: " + (f"survived, {outcome.lost} steps lost" if outcome.survived else f"LOST: {outcome.said}"))


def _show(tallies: list[Tally], folder: Path, *, as_json: bool) -> None:
    rows = [tally.to_json() for tally in tallies]
    missed = [row["fault"] for row in rows if not row["injected"]]
    if missed:
        output.say(f"Not injected in this time: {', '.join(missed)}; give more --minutes.")
    if as_json:
        output.result_json({"faults": rows, "folder": str(folder)})
        return
    output.result(
        "| fault | injected | survived | steps lost (mean) | (most) | seconds each |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        each = row["seconds"] / max(1, row["injected"])
        lost = f"{row['lost_mean']:g} | {row['lost_most']}" if row["injected"] else "- | -"
        output.result(f"| {row['fault']} | {row['injected']} | {row['survived']} | {lost} | {each:.1f} |")
    for row in rows:
        for said in row["wrong"]:
            output.result(f"{row['fault']}: {said}; its run is in {folder}")


verb = Verb(
    name="faults",
    usage="[--minutes N] [--count N]",
    sentence="Kill, starve and poison a tiny real run in every way that is known, and show what each cost.",
    flags=lambda: _FLAGS,
    run=run,
    examples=("covey faults --minutes 10", "covey faults --only 'kill -9' --count 50 --json"),
)
