"""Picture of several figures: returned by `run.plot()`, shown in a notebook, written by `covey plot`; PNG and PDF by matplotlib."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.evaluation.compare.curves import Curve
from covey.evaluation.compare.run_data import read_runs
from covey.evaluation.compare.svg import COLOURS
from covey.evaluation.figures.draw import as_svg, sheet_of
from covey.evaluation.figures.gather import Confusion, Figure, Shares, figures_of
from covey.evaluation.html import page_of
from covey.files.places import expect_path
from covey.process.terminal import safe
from covey.runs.storage import storage_errors, write_text

KINDS = (".svg", ".html", ".png", ".pdf")
_MATPLOTLIB = (".png", ".pdf")


@dataclass(frozen=True)
class Picture:
    """Figures of runs. A notebook shows it; `save` writes it."""

    titles: Sequence[str]
    """Names of the sides: runs that differ in the seed alone are one."""
    figures: Sequence[Figure]

    def save(self, path: str | Path) -> Path:
        """Write SVG, HTML, PNG or PDF, by the name's ending; the last two need matplotlib.

        Raises ConfigError for another ending or without matplotlib, StorageError when it cannot be written.
        """
        path = Path(path).expanduser()
        check_name(path)
        if path.suffix.lower() not in _MATPLOTLIB:
            return write_text(path, self.as_html() if path.suffix.lower() == ".html" else self.as_svg())
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            save(self.figures, self.titles, path)
        return path

    def as_svg(self) -> str:
        """One SVG of all figures."""
        return sheet_of(self.figures, self.titles)

    def as_html(self) -> str:
        """A self-contained HTML page."""
        name = " and ".join(self.titles[:4])
        return page_of(name, f"<h1>{escape(name)}</h1>{self._repr_html_()}")

    def _repr_html_(self) -> str:
        """For notebooks."""
        style = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem"
        drawn = "".join(f'<figure style="margin:0">{as_svg(figure, self.titles)}</figure>' for figure in self.figures)
        return f'<div style="{style}">{drawn}</div>'

    def __repr__(self) -> str:
        return f"Picture({', '.join(figure.title for figure in self.figures)})"


def check_name(path: Path) -> None:
    """Raise ConfigError for a file name whose ending is no kind of picture."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"{path} has no ending that says what to write; use one of {', '.join(KINDS)}.")


def plot(folders: str | Path | Sequence[str | Path], metrics: Sequence[str] = (), *, each: bool = False) -> Picture:
    """Figures of one or several runs, or folders of runs; `each` draws seeds apart.

    Raises RunFolderError for what is no run, ConfigError for a metric that no run has.
    """
    named = list(folders) if isinstance(folders, Iterable) and not isinstance(folders, str) else [folders]
    if not named:
        raise ConfigError("There is no run to draw; give run folders: covey plot runs/a.")
    runs = [run for folder in named for run in read_runs(str(expect_path("folders", folder)))]
    return Picture(*figures_of(runs, metrics, is_each=each))


_INCHES = (6.4, 3.4)
_DOTS = 130
_LINES = ("-", "--", ":", "-.")


def save(figures: Sequence[Figure], titles: Sequence[str], path: Path) -> None:
    """Write all figures, two in a row. Raises ConfigError where matplotlib is not installed, OSError when the disk refuses."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Sheet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path.suffix} needs {error.name}; pip install 'covey[plot]', or write .svg or .html, which need nothing."
        ) from error
    columns = min(2, len(figures))
    rows = math.ceil(len(figures) / columns)
    sheet = Sheet(figsize=(columns * _INCHES[0], rows * _INCHES[1]), dpi=_DOTS, layout="constrained")
    FigureCanvasAgg(sheet)
    places = sheet.subplots(rows, columns, squeeze=False).flatten()
    for figure, axes in zip(figures, places, strict=False):
        axes.set_title(_plain(figure.title), fontsize=10, loc="left")
        _DRAWS[type(figure)](axes, figure, titles)
    for axes in places[len(figures) :]:
        axes.set_axis_off()
    sheet.savefig(path)


def _curve(axes: Any, figure: Curve, titles: Sequence[str]) -> None:
    for i, line in enumerate(figure.lines):
        colour, scale = COLOURS[i % len(COLOURS)], figure.scale
        scaled = [[scale * value for value in values] for values in (line.middle, line.low, line.high)]
        marker = "o" if len(line.steps) <= 12 else None
        how = {"color": colour, "label": _plain(titles[i]), "marker": marker, "markersize": 3}
        axes.plot(line.steps, scaled[0], _LINES[i // len(COLOURS) % 4], **how)
        axes.fill_between(line.steps, scaled[1], scaled[2], color=colour, alpha=0.15, linewidth=0)
        for run in line.runs if len(line.runs) > 1 else ():
            axes.plot(
                [step for step, _ in run], [scale * value for _, value in run], color=colour, alpha=0.3, linewidth=0.8
            )
    axes.set_xlabel("step", fontsize=8)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _shares(axes: Any, figure: Shares, titles: Sequence[str]) -> None:
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(figure.parts))]
    axes.stackplot(
        figure.steps, *figure.parts.values(), labels=[_plain(name) for name in figure.parts], colors=colours, alpha=0.75
    )
    axes.set_xlabel("step", fontsize=8)
    axes.legend(fontsize=8, loc="upper left")


def _confusion(axes: Any, figure: Confusion, titles: Sequence[str]) -> None:
    total = max(1, sum(map(sum, figure.counts)))
    shares = [[count / total for count in row] for row in figure.counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(figure.counts):
        for x, count in enumerate(row):
            share = shares[y][x]
            axes.text(
                x, y, f"{share:.0%} ({count:,})", ha="center", va="center", color="white" if share > 0.5 else "black"
            )
    for ticks, label, name in (
        (axes.set_xticks, axes.set_xlabel, figure.columns),
        (axes.set_yticks, axes.set_ylabel, figure.rows),
    ):
        ticks([0, 1], ["wrong", "right"])
        label(_plain(name), fontsize=8)


def _plain(text: str) -> str:
    """A text in which no character begins a formula."""
    return safe(text, keep_lines=False).replace("$", r"\$")


_DRAWS: Any = {Curve: _curve, Shares: _shares, Confusion: _confusion}
