"""A comparison as tables: for the terminal, as Markdown, and as one self-contained HTML file."""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from covey.evaluation.compare.report import Comparison
from covey.evaluation.compare.results import Result
from covey.evaluation.compare.svg import svg_of
from covey.evaluation.html import page_of, table, text
from covey.process.terminal import safe


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, a header above."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(comparison: Comparison) -> list[Table]:
    """Tables of sides, of differences (where there are any), and one a held-out set."""
    tables = [_sides(comparison)]
    if comparison.differences:
        rows = [[f"{difference.area}: {difference.name}", *difference.values] for difference in comparison.differences]
        letters = [side.letter for side in comparison.sides]
        tables.append(Table(title="what differs", header=["", *letters], rows=rows))
    return [*tables, *(_result(comparison, result) for result in comparison.results)]


def _sides(comparison: Comparison) -> Table:
    rows = []
    for side in comparison.sides:
        seeds = ", ".join("-" if run.seed is None else str(run.seed) for run in side.runs)
        folders = ", ".join(str(run.path) for run in side.runs)
        rows.append([side.title, str(len(side.runs)), seeds, folders])
    return Table(title="sides", header=["side", "runs", "seeds", "folders"], rows=rows)


def _result(comparison: Comparison, result: Result) -> Table:
    rows = []
    for i, side in enumerate(comparison.sides):
        effect = result.effects[i - 1] if i else None
        runs = "  ".join(_number(result, run.mean) for run in result.runs[i])
        mean = _interval(result, result.means[i].value, result.means[i].low, result.means[i].high)
        apart, p_value, verdict = "", "", ""
        if effect is not None:
            apart = _interval(result, effect.value, effect.low, effect.high, sign="+")
            p_value = f"{effect.p_value:.2g}"
            verdict = ("better" if effect.value > 0 else "worse") if effect.is_real else "cannot be told"
        rows.append([side.title, mean, runs, apart, p_value, verdict])
    against = f"against {comparison.sides[0].letter}"
    return Table(
        title=f"held-out {result.title}", header=["side", "mean (95%)", "by run", against, "p", "verdict"], rows=rows
    )


def _interval(result: Result, value: float, low: float, high: float, sign: str = "") -> str:
    shown = _number(result, value, sign)
    if math.isinf(low):
        return f"{shown} (not known)"
    return f"{shown} ({_number(result, low)} to {_number(result, high)})"


def _number(result: Result, value: float, sign: str = "") -> str:
    return format(result.scale * value + 0.0, f"{sign}.1f" if result.is_share else f"{sign}.3f")


_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~$!&])")
_WIDEST = 44


def as_text(comparison: Comparison) -> str:
    """For a terminal: tables with aligned columns, source that differs, cautions, and the verdict last."""
    parts = [_align(table) for table in tables_of(comparison)]
    parts += [
        f"{difference.area}: {difference.name}\n{textwrap.indent(difference.diff, '  ')}"
        for difference in comparison.differences
        if difference.diff
    ]
    parts += ["\n".join(f"note: {caution}" for caution in comparison.cautions)] if comparison.cautions else []
    return "\n\n".join([*parts, "\n".join(comparison.verdicts)])


def as_markdown(comparison: Comparison, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """Markdown with the verdict first. `pictures`: titles and paths of the curves, relative to the file."""
    parts = ["# Comparison", *(f"**{escape_markdown(verdict)}**" for verdict in comparison.verdicts)]
    parts += (
        ["\n".join(f"* {escape_markdown(caution)}" for caution in comparison.cautions)] if comparison.cautions else []
    )
    for shown in tables_of(comparison):
        parts += [f"## {escape_markdown(shown.title.capitalize())}", _pipes(shown)]
        if shown.title == "what differs":
            parts += [
                _fence(difference.name, difference.diff) for difference in comparison.differences if difference.diff
            ]
    if pictures:
        parts.append("## Learning curves")
        parts.append(
            "Thin lines: runs. Thick: their mean. Band: its 95% interval over three seeds or more; of two, from one to the other."
        )
        parts += [f"![{escape_markdown(title)}](<{path}>)" for title, path in pictures]
    return "\n\n".join(parts) + "\n"


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> escape_markdown("a|b <script>")
    'a\\\\|b \\\\<script\\\\>'
    """
    return _MARKDOWN.sub(r"\\\1", safe(text, keep_lines=False))


def _align(table: Table) -> str:
    rows = [[safe(cell, keep_lines=False) for cell in row] for row in [table.header, *table.rows]]
    cut = lambda cell: cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…"
    rows = [[*map(cut, row[:-1]), row[-1]] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([table.title, *lines])


def _pipes(table: Table) -> str:
    rows = [[escape_markdown(cell) for cell in row] for row in table.rows]
    lines = [[escape_markdown(cell) for cell in table.header], ["---"] * len(table.header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fence(name: str, diff: str) -> str:
    """A diff in a fence longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`+", diff)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{escape_markdown(name)}\n\n{fence}diff\n{safe(diff)}\n{fence}"


def as_html(comparison: Comparison) -> str:
    """The whole page; every text in it is escaped."""
    titles = [side.title for side in comparison.sides]
    verdicts = "".join(f'<p class="lead">{text(verdict)}</p>' for verdict in comparison.verdicts)
    cautions = "".join(f"<li>{text(caution)}</li>" for caution in comparison.cautions)
    tables = "".join(_section(comparison, shown) for shown in tables_of(comparison))
    curves = "".join(f"<figure>{svg_of(curve, titles)}</figure>" for curve in comparison.curves)
    body = f"""<h1>Comparison</h1>
{verdicts}
<ul>{cautions}</ul>
<h2>Learning curves</h2>
<p>Thin lines: runs. Thick: their mean. Band: its 95% interval over three seeds or more; of two, from one to the other.</p>
<div class="figures">{curves}</div>
{tables}"""
    return page_of(" and ".join(titles[:4]), body)


def _section(comparison: Comparison, shown: Table) -> str:
    diffs = "".join(
        f"<details><summary>{text(difference.name)}</summary><pre>{text(difference.diff)}</pre></details>"
        for difference in comparison.differences
        if difference.diff and shown.title == "what differs"
    )
    return f"<h2>{text(shown.title.capitalize())}</h2>{table(shown.rows, shown.header)}{diffs}"
