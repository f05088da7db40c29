"""`covey compare`: differences of runs, learning curves, and which way to train is better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, JSON, Args, Verb
from covey.errors import ConfigError
from covey.runs.storage import write_text

if TYPE_CHECKING:
    from covey.evaluation.compare.report import Comparison

_FLAGS = (
    Flag(name="runs", help="Run folders, or folders of runs. A,B groups runs into one side by hand.", type="list[str]", group="what"),
    Flag(name="each", help="Take every run separately, also those that differ only in the seed.", type=bool, group="what"),
    Flag(name="set", help="Held-out set to compare on; all that every run was evaluated on when left out.", group="what"),
    Flag(name="score", help="Reward function to compare by; the weighted total when left out.", group="what"),
    Flag(name="threshold", help="Count an answer as right from this reward on; its reward itself when left out.", type=float, group="what"),
    Flag(name="step", help="Compare at this step's evaluation; each run's last one when left out.", type=int, group="what"),
    JSON,
    Flag(name="markdown", help="Write a report to this Markdown file, with its pictures in a folder next to it.", group="output"),
    Flag(name="html", help="Write a report to this HTML file, which needs no other file.", group="output"),
    CONFIG,
)  # fmt: skip


def run(options: Args) -> None:
    """Compare, print a table or JSON, write reports."""
    from covey.evaluation.compare.report import compare
    from covey.evaluation.compare.tables import as_text

    groups, is_grouped = _groups(options["runs"])
    if is_grouped and options["each"]:
        raise ConfigError("--each takes every run by itself, A,B groups them; give one of the two.")
    comparison = compare(
        groups,
        is_each=bool(options["each"]),
        is_grouped=is_grouped,
        set_name=options["set"],
        column=options["score"],
        threshold=options["threshold"],
        step=options["step"],
    )
    if options["markdown"]:
        _write_markdown(comparison, Path(options["markdown"]))
    if options["html"]:
        from covey.evaluation.compare.tables import as_html

        output.say(f"wrote {write_text(Path(options['html']), as_html(comparison))}")
    if options["json"]:
        output.result_json(comparison.to_json())
    else:
        output.result(as_text(comparison))


def _groups(words: Sequence[str]) -> tuple[list[list[Any]], bool]:
    """(runs by argument, True if a comma made sides of the arguments)."""
    from covey.evaluation.compare.run_data import read_runs

    by_word = [[word] if Path(word).expanduser().exists() else word.split(",") for word in words]
    groups = [[run for part in parts for run in read_runs(part)] for parts in by_word]
    return groups, any(len(parts) > 1 for parts in by_word)


def _write_markdown(comparison: Comparison, path: Path) -> None:
    from covey.evaluation.compare.svg import svg_of
    from covey.evaluation.compare.tables import as_markdown

    titles = [side.title for side in comparison.sides]
    pictures = []
    for i, curve in enumerate(comparison.curves, start=1):
        name = f"{path.stem}-curves/{i}.svg"
        drawn = svg_of(curve, titles) + "\n"
        output.say(f"wrote {write_text(path.parent / name, drawn)}")
        pictures.append((curve.title, name))
    output.say(f"wrote {write_text(path, as_markdown(comparison, pictures))}")


verb = Verb(
    name="compare",
    usage="RUNS... [options]",
    sentence="Differences of runs, their learning curves, and which is better, with a paired test over questions and seeds.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("runs",),
    needs={"runs": "runs: covey compare runs/a runs/b."},
    examples=(
        "covey compare runs/base-0 runs/fast-0",
        "covey compare runs/base-* runs/fast-* --html report.html",
        "covey compare runs/a0,runs/a1 runs/b0,runs/b1 --json",
    ),
)
