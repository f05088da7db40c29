"""The HTML page of figures and reports, and its tables."""

from covey.evaluation import html
from covey.evaluation.html import text

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } .soft { opacity: .75; } .lead { font-size: 1.1rem; font-weight: 600; border-left: 4px solid #0072b2; padding-left: .8rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top; }
tbody tr > * { border-top: 1px solid var(--line); } td { overflow-wrap: anywhere; } .number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--soft); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 6px; margin: .3rem 0; max-height: 24rem; overflow-y: auto; }
figure { margin: 0; } svg { width: 100%; height: auto; } summary { cursor: pointer; }
.alert { border-left: 4px solid #d9730d; padding: .1rem .8rem; margin: .5rem 0; } .alert.error { border-color: #c23b4b; } .alert.info { border-color: #7f8a96; }
@media print { details { display: block; } pre { max-height: none; } }
"""


def page_of(title: str, body: str) -> str:
    """The whole page around a body whose texts are escaped."""
    return html.page_of(title, _STYLE, body)


def table(rows: list[tuple[object, ...]], header: tuple[str, ...] = ()) -> str:
    """A table whose first column names the row."""
    head = f"<thead><tr>{''.join(f'<th scope=col>{text(cell)}</th>' for cell in header)}</tr></thead>" if header else ""
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
