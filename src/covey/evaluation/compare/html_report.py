"""A comparison as one HTML file that needs nothing beside it, runs no script and fetches nothing."""

from __future__ import annotations

from html import escape

from covey.evaluation.compare.report import Comparison
from covey.evaluation.compare.svg import svg_of
from covey.evaluation.compare.tables import Table, tables_of
from covey.process.terminal import safe

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.verdict { font-size: 1.1rem; font-weight: 600; border-left: 4px solid #0072b2; padding-left: .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top; }
tr + tr > *, tbody tr > * { border-top: 1px solid var(--line); } td { overflow-wrap: anywhere; min-width: 4rem; }
pre { background: var(--soft); padding: .6rem; overflow-x: auto; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; } svg { width: 100%; height: auto; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_html(found: Comparison) -> str:
    """The whole page; every text in it is escaped."""
    titles = [side.title for side in found.sides]
    verdicts = "".join(f'<p class="verdict">{_text(verdict)}</p>' for verdict in found.verdicts)
    cautions = "".join(f"<li>{_text(caution)}</li>" for caution in found.cautions)
    tables = "".join(_table(found, table) for table in tables_of(found))
    curves = "".join(f"<figure>{svg_of(curve, titles)}</figure>" for curve in found.curves)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(" and ".join(titles[:4]))}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Comparison</h1>
{verdicts}
<ul>{cautions}</ul>
<h2>Learning curves</h2>
<p>Thin lines: runs. Thick: their mean. Band: its 95% interval over three seeds or more; of two, from one to the other.</p>
<div class="curves">{curves}</div>
{tables}
</body>
</html>
"""


def _table(found: Comparison, table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.header)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in table.rows
    )
    diffs = ""
    if table.title == "what differs":
        diffs = "".join(
            f"<details><summary>{_text(one.name)}</summary><pre>{_text(one.diff)}</pre></details>"
            for one in found.differences
            if one.diff
        )
    return (
        f'<h2>{_text(table.title.capitalize())}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{diffs}"
    )


def _text(text: str) -> str:
    return escape(safe(text))
