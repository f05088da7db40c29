"""A comparison in words and tables: for the terminal, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from covey.evaluation.compare.report import Comparison
from covey.evaluation.compare.tables import Table, tables_of
from covey.process.terminal import safe

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~$!&])")
_WIDEST = 44


def as_text(comparison: Comparison) -> str:
    """For a terminal: tables with aligned columns, source that differs, cautions, and the verdict last."""
    parts = [_align(table) for table in tables_of(comparison)]
    parts += [
        f"{difference.area}: {difference.name}\n{_indent(difference.diff)}"
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
    for table in tables_of(comparison):
        parts += [f"## {escape_markdown(table.title.capitalize())}", _pipes(table)]
        if table.title == "what differs":
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
    rows = [[cell if i == len(row) - 1 else _cut(cell) for i, cell in enumerate(row)] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([table.title, *lines])


def _cut(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _pipes(table: Table) -> str:
    rows = [[escape_markdown(cell) for cell in row] for row in table.rows]
    lines = [[escape_markdown(cell) for cell in table.header], ["---"] * len(table.header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fence(name: str, diff: str) -> str:
    """A diff in a fence longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`+", diff)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{escape_markdown(name)}\n\n{fence}diff\n{safe(diff)}\n{fence}"
