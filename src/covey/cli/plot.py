"""`covey plot`: curves, reward shares and verdicts of runs as a picture."""

from pathlib import Path

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import Args, Verb

_FLAGS = (
    Flag(name="runs", help="Run folders, or folders of runs; runs that differ only in the seed are one line with a band.", type="list[str]", group="what"),
    Flag(name="metrics", help="Metrics to draw, as metrics.jsonl names them; the usual figures when left out.", type="list[str]", group="what"),
    Flag(name="each", help="Draw every run separately, also those that differ only in the seed.", type=bool, default=False, group="what"),
    Flag(name="output", short="o", help="File to write: .svg, .html, .png or .pdf (the last two need matplotlib).", default="plot.svg", group="output"),
)  # fmt: skip


def run(args: Args) -> None:
    """Draw and write."""
    from covey.evaluation.figures.picture import check_name, plot

    path = Path(args["output"])
    check_name(path)
    picture = plot(args["runs"], args["metrics"] or (), each=args["each"])
    output.say(f"wrote {picture.save(path)}: {len(picture.figures)} figures of {', '.join(picture.titles)}")


verb = Verb(
    name="plot",
    usage="RUNS... [-o FILE] [options]",
    sentence="Curves with bands over seeds, reward shares and verdicts of runs, as a picture or a page.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("runs",),
    needs={"runs": "runs: covey plot runs/a runs/b -o curves.svg."},
    examples=(
        "covey plot runs/a -o curves.svg",
        "covey plot runs/base-* runs/fast-* -o comparison.html",
        "covey plot runs/a --metrics reward kl -o figure.png",
    ),
)
