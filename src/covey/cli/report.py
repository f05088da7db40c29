"""`covey report`: a run as one page to share."""

from pathlib import Path

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import Args, Verb
from covey.errors import ConfigError

_FLAGS = (
    Flag(name="run", help="Run folder.", group="what"),
    Flag(name="output", short="o", help="HTML file to write; RUN-report.html here when left out.", group="output"),
)


def run(args: Args) -> None:
    """Write the page."""
    from covey.evaluation.figures.report import write_report

    folder = Path(args["run"])
    path = Path(args["output"] or f"{folder.resolve().name}-report.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path} is no HTML file; a report is HTML: -o report.html.")
    output.say(f"wrote {write_report(folder, path)}")


verb = Verb(
    name="report",
    usage="RUN [-o FILE]",
    sentence="One self-contained page of a run: configuration, curves, evaluation with intervals, alerts, samples, model card.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("run",),
    needs={"run": "a run: covey report runs/a -o report.html."},
    examples=("covey report runs/a -o report.html",),
)
