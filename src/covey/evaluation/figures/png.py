"""Figures as PNG (or PDF), drawn by matplotlib, which is imported here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.evaluation.compare.curves import Curve
from covey.evaluation.compare.svg import COLOURS
from covey.evaluation.figures.gather import Confusion, Figure, Shares
from covey.process.terminal import safe

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
        axes.plot(
            line.steps,
            scaled[0],
            _LINES[i // len(COLOURS) % 4],
            color=colour,
            label=_plain(titles[i]),
            marker=marker,
            markersize=3,
        )
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
