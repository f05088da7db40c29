"""A comparison as one self-contained HTML file, without scripts."""

from __future__ import annotations

from covey.evaluation.compare.report import Comparison
from covey.evaluation.compare.svg import svg_of
from covey.evaluation.compare.tables import Table, tables_of
from covey.evaluation.html import page_of, text

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


def as_html(comparison: Comparison) -> str:
    """The whole page; every text in it is escaped."""
    titles = [side.title for side in comparison.sides]
    verdicts = "".join(f'<p class="verdict">{text(verdict)}</p>' for verdict in comparison.verdicts)
    cautions = "".join(f"<li>{text(caution)}</li>" for caution in comparison.cautions)
    tables = "".join(_table(comparison, table) for table in tables_of(comparison))
    curves = "".join(f"<figure>{svg_of(curve, titles)}</figure>" for curve in comparison.curves)
    body = f"""<h1>Comparison</h1>
{verdicts}
<ul>{cautions}</ul>
<h2>Learning curves</h2>
<p>Thin lines: runs. Thick: their mean. Band: its 95% interval over three seeds or more; of two, from one to the other.</p>
<div class="curves">{curves}</div>
{tables}"""
    return page_of(" and ".join(titles[:4]), _STYLE, body)


def _table(comparison: Comparison, table: Table) -> str:
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in table.header)
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>' + "".join(f"<td>{text(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in table.rows
    )
    diffs = ""
    if table.title == "what differs":
        diffs = "".join(
            f"<details><summary>{text(difference.name)}</summary><pre>{text(difference.diff)}</pre></details>"
            for difference in comparison.differences
            if difference.diff
        )
    return (
        f'<h2>{text(table.title.capitalize())}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{diffs}"
    )
