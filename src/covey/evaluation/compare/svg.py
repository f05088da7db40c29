"""A learning curve as self-contained SVG, for light and dark pages."""

import math
from collections.abc import Sequence
from html import escape

from covey.evaluation.compare.curves import Curve, Line
from covey.process.terminal import safe

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 34
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers tell apart."""
DASHES = ("none", "7 3", "2 3", "9 3 2 3")
STYLE = (
    ".covey text{font:12px system-ui,sans-serif;fill:currentColor}.covey .grid{stroke:#8885;stroke-width:1}"
    ".covey .title{font-weight:600}svg:root{color:#333}@media(prefers-color-scheme:dark){svg:root{color:#ddd}}"
)
"""Within a page, a style in an SVG holds for all of it: so only for `.covey`, in the colour that the page's text has there."""


def svg_of(curve: Curve, titles: Sequence[str]) -> str:
    """The curve with a line and a band a side; `titles` name the sides."""
    titles = [safe(title, keep_lines=False) for title in titles]
    frame = Frame(*_spans(curve))
    parts = [grid(frame)]
    for i, line in enumerate(curve.lines):
        parts.append(
            _draw(line, curve.scale, frame, COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % 4], titles[i])
        )
    legend, x = [], float(LEFT)
    for i, title in enumerate(titles):
        colour = COLOURS[i % len(COLOURS)]
        shown = title if len(title) <= 24 else f"{title[:23]}…"
        legend.append(
            f'<line x1="{x:.0f}" y1="26" x2="{x + 16:.0f}" y2="26" stroke="{colour}" stroke-width="3"/>'
            f'<text x="{x + 20:.0f}" y="30">{escape(shown)}</text>'
        )
        x += 34 + 6.6 * len(shown)
    return picture(curve.title, f"{''.join(legend)}{''.join(parts)}", label=f"{curve.title} by step")


def picture(title: str, inside: str, *, label: str) -> str:
    """A drawing below its title; `label` is read aloud."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="covey" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{text(label)}"><style>{STYLE}</style>'
        f'<text class="title" x="{LEFT}" y="14">{text(title)}</text>{inside}</svg>'
    )


def text(value: str) -> str:
    """One line of text in a drawing."""
    return escape(safe(value, keep_lines=False))


class Frame:
    """From values to places in the picture."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x_span, self.y_span = x, y

    def x(self, value: float) -> float:
        low, high = self.x_span
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_span
        inside = min(max(value, low), high)
        return HEIGHT - BOTTOM - (inside - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _spans(curve: Curve) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ranges of the axes: all values of the runs, bands of single runs (over questions), and at most as much again for bands over seeds:
    those of few seeds are wide, and are cut."""
    steps = [step for line in curve.lines for step in line.steps] or [0.0]
    values = [curve.scale * value for line in curve.lines for run in line.runs for _, value in run] or [0.0]
    single = [line for line in curve.lines if len(line.runs) == 1]
    values += [curve.scale * value for line in single for value in (*line.low, *line.high)]
    low, high = min(values), max(values)
    room = (high - low) or abs(high) or 1.0
    edges = [curve.scale * value for line in curve.lines for value in (*line.low, *line.high)] or [low]
    low, high = max(min([low, *edges]), low - room / 2), min(max([high, *edges]), high + room / 2)
    if low == high:
        low, high = low - room / 2, high + room / 2
    first, last = min(steps), max(steps)
    return (first, last if last > first else first + 1), (low, high)


def _draw(line: Line, scale: float, frame: Frame, colour: str, dash: str, title: str) -> str:
    middle = [(step, value * scale) for step, value in zip(line.steps, line.middle, strict=True)]
    upper = [(step, value * scale) for step, value in zip(line.steps, line.high, strict=True)]
    lower = [(step, value * scale) for step, value in zip(line.steps, line.low, strict=True)]
    parts = []
    if len(middle) == 1 and upper[0] > lower[0]:  # one evaluation: a band has no width there, a bar is seen
        ends = _places([lower[0], upper[0]], frame)
        parts.append(f'<polyline points="{ends}" stroke="{colour}" stroke-width="6" stroke-opacity="0.3"/>')
    has_band = any(high > low for low, high in zip(line.low, line.high, strict=True))
    if len(line.runs) > 1 or has_band:
        around = _places([*upper, *reversed(lower)], frame)
        parts.append(f'<polygon points="{around}" fill="{colour}" fill-opacity="0.15"/>')
        for run in line.runs if len(line.runs) > 1 else ():
            thin = _places([(step, value * scale) for step, value in run], frame)
            parts.append(f'<polyline points="{thin}" fill="none" stroke="{colour}" stroke-opacity="0.35"/>')
    parts.append(
        f'<polyline points="{_places(middle, frame)}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"/>'
    )
    if len(middle) <= 40:
        parts += [
            f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(title)}, step {step:g}: {value:.4g}</title></circle>"
            for step, value in middle
        ]
    return "".join(parts)


def _places(points: Sequence[tuple[float, float]], frame: Frame) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def grid(frame: Frame) -> str:
    parts = []
    for value in ticks(*frame.y_span):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(*frame.x_span):
        parts.append(f'<text x="{frame.x(value):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>')
    return "".join(parts)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between `low` and `high`, at most `most`.

    >>> ticks(0.0, 40.0)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]
