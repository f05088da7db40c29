"""Figures as SVG, which every browser and editor draws, without a drawing library."""

import math
import re
from collections.abc import Sequence

from covey.evaluation.compare.curves import Curve
from covey.evaluation.compare.svg import COLOURS, HEIGHT, LEFT, WIDTH, Frame, grid, picture, svg_of, text
from covey.evaluation.figures.gather import Confusion, Figure, Shares

_GAP = 16
_CELL = (150, 66)


def as_svg(figure: Figure, titles: Sequence[str]) -> str:
    """One figure."""
    if isinstance(figure, Curve):
        return svg_of(figure, titles)
    return _shares(figure) if isinstance(figure, Shares) else _confusion(figure)


def sheet_of(figures: Sequence[Figure], titles: Sequence[str]) -> str:
    """All figures in one SVG, two in a row, on paper of their own, so that they are read on any page."""
    columns = min(2, len(figures))
    rows = math.ceil(len(figures) / columns)
    width, height = columns * (WIDTH + _GAP) + _GAP, rows * (HEIGHT + _GAP) + _GAP
    parts = []
    for i, figure in enumerate(figures):
        x, y = _GAP + i % columns * (WIDTH + _GAP), _GAP + i // columns * (HEIGHT + _GAP)
        place = f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(re.sub(r'^<svg xmlns="[^"]*" ', place, as_svg(figure, titles)))
    style = ".paper{fill:#fff}@media(prefers-color-scheme:dark){.paper{fill:#12171d}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{style}</style><rect class="paper" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _shares(figure: Shares) -> str:
    steps = list(figure.steps)
    last = steps[-1] if steps[-1] > steps[0] else steps[0] + 1
    frame = Frame((steps[0], last), (0.0, max(1.0, *(map(sum, zip(*figure.parts.values(), strict=True))))))
    below, parts, legend, x = [0.0] * len(steps), [], [], float(LEFT)
    for i, (name, values) in enumerate(figure.parts.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        edge = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        if len(steps) == 1:
            edge = [(steps[0], above[0]), (last, above[0]), (last, below[0]), (steps[0], below[0])]
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in edge)
        parts.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.75"/>')
        shown = text(name[:24])
        legend.append(
            f'<rect x="{x:.0f}" y="20" width="12" height="12" fill="{colour}"/><text x="{x + 16:.0f}" y="30">{shown}</text>'
        )
        x += 32 + 6.6 * min(24, len(name))
        below = above
    return picture(figure.title, f"{''.join(legend)}{''.join(parts)}{grid(frame)}", label=figure.title)


def _confusion(figure: Confusion) -> str:
    """Four cells, the more answers the darker; a share and a count in each."""
    total = max(1, sum(map(sum, figure.counts)))
    left, top = LEFT + 110, 92
    parts = [f'<text x="{left + _CELL[0]}" y="{top - 26}" text-anchor="middle">{text(figure.columns[:40])}</text>',
             f'<text x="{LEFT}" y="{top + _CELL[1] + 4}">{text(figure.rows[:24])}</text>']  # fmt: skip
    for at, word in enumerate(("wrong", "right")):
        parts.append(f'<text x="{left + (at + 0.5) * _CELL[0]}" y="{top - 8}" text-anchor="middle">{word}</text>')
        parts.append(f'<text x="{left - 8}" y="{top + (at + 0.5) * _CELL[1] + 4}" text-anchor="end">{word}</text>')
        for other, count in enumerate(figure.counts[at]):
            x, y, share = left + other * _CELL[0], top + at * _CELL[1], count / total
            colour = COLOURS[0] if at == other else COLOURS[1]
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL[0] - 3}" height="{_CELL[1] - 3}" rx="4" fill="{colour}" fill-opacity="{0.08 + 0.5 * share:.2f}"/>'
            )
            parts.append(
                f'<text x="{x + _CELL[0] / 2}" y="{y + _CELL[1] / 2 + 4}" text-anchor="middle">{share:.0%} ({count:,})</text>'
            )
    label = f"{figure.agreement:.0%} the same, of {total:,}"
    parts.append(f'<text x="{left}" y="{top + 2 * _CELL[1] + 22}">{label}</text>')
    return picture(figure.title, "".join(parts), label=figure.title)
