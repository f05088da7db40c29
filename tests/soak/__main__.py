"""`make soak`, or `PYTHONPATH=tests python -m soak --minutes 10`: every known fault against tiny real runs, and the steps lost."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.errors import did_you_mean
from soak import FAULTS, Bench, Outcome, Tally, soak


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if a run did not survive a fault."""
    options = parsed(words)
    if options.list:
        for name, inject in FAULTS.items():
            print(f"{name:<26} {about(inject)}")
        return 0
    folder = Path(options.folder or tempfile.mkdtemp(prefix="covey-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, options.seed)
    try:
        tell(f"An undisturbed run takes {bench.undisturbed(1)[1]:.1f} s. Each fault now meets one like it.")
        names = options.only or list(FAULTS)
        tallies = soak(bench, names, minutes=options.minutes, count=options.count, tell=tell_outcome)
    finally:
        bench.close()
    show(tallies, folder, as_json=options.json)
    return int(any(tally.survived < len(tally.outcomes) for tally in tallies))


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no fault after so long")
    parser.add_argument("--count", type=int, default=1000, help="inject each fault at most so often")
    parser.add_argument("--only", action="append", metavar="FAULT", help="this fault alone, by name; may be repeated")
    parser.add_argument("--list", action="store_true", help="show the faults and stop")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--folder", help="where the runs go; those that did not survive stay there")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args(words)
    for name in options.only or ():
        if name not in FAULTS:
            parser.error(f"there is no fault {name!r}.{did_you_mean(name, FAULTS)} --list shows them.")
    if not options.minutes > 0 or options.count < 1:
        parser.error(f"--minutes {options.minutes:g} --count {options.count} injects nothing; both must be above 0.")
    return options


def about(inject: Any) -> str:
    return str(inject.__doc__ or "A reward that fails in some steps.").splitlines()[0]


def tell(text: str) -> None:
    print(text, file=sys.stderr)


def tell_outcome(fault: str, outcome: Outcome) -> None:
    if not outcome.came_late:
        tell(f"{fault}: " + (f"survived, {outcome.lost} steps lost" if outcome.survived else f"LOST: {outcome.said}"))


def show(tallies: list[Tally], folder: Path, *, as_json: bool) -> None:
    rows = [tally.to_json() for tally in tallies]
    missed = [row["fault"] for row in rows if not row["injected"]]
    if missed:
        tell(f"Not injected in this time: {', '.join(missed)}; give more --minutes.")
    if as_json:
        print(json.dumps({"faults": rows, "folder": str(folder)}))
        return
    print("| fault | injected | survived | steps lost (mean) | (most) | seconds each |\n|---|---|---|---|---|---|")
    for row in rows:
        each = row["seconds"] / max(1, row["injected"])
        lost = f"{row['lost_mean']:g} | {row['lost_most']}" if row["injected"] else "- | -"
        print(f"| {row['fault']} | {row['injected']} | {row['survived']} | {lost} | {each:.1f} |")
    for row in rows:
        for wrong in row["wrong"]:
            print(f"{row['fault']}: {wrong}; its run is in {folder}")


if __name__ == "__main__":
    sys.exit(main())
