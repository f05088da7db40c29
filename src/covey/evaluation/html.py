"""Self-contained HTML pages of comparisons, reports, figures and data checks, without scripts; and their tables."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from covey.process.terminal import safe

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; } .soft { opacity: .75; }
.lead { font-size: 1.1rem; font-weight: 600; border-left: 4px solid #0072b2; padding-left: .8rem; } .lead.mend { border-color: #d55e00; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top; }
tbody tr > * { border-top: 1px solid var(--line); } td { overflow-wrap: anywhere; min-width: 4rem; } summary { cursor: pointer; padding: .2rem 0; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } td.code { font: .92em monospace; white-space: nowrap; } .long { min-width: 16rem; }
pre { background: var(--soft); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 6px; margin: .3rem 0; max-height: 24rem; overflow-y: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; } figure { margin: 0; } svg { width: 100%; height: auto; }
.alert { border-left: 4px solid #d9730d; padding: .1rem .8rem; margin: .5rem 0; } .alert.error { border-color: #c23b4b; } .alert.info { border-color: #7f8a96; }
@media print { details { display: block; } pre { max-height: none; } }
"""


def page_of(title: str, body: str) -> str:
    """The whole page around a body whose texts are escaped."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def text(value: object) -> str:
    """Escaped, without characters that a terminal or a reader would be misled by."""
    return escape(safe(str(value)))


def table(
    rows: Iterable[Sequence[object]], header: Sequence[object] = (), styles: Mapping[int, str] | None = None
) -> str:
    """A table whose first column names the row. `styles`: class of a column's cells: `number`, `code` or `long`."""
    styles = styles or {}

    def line(cells: Sequence[object], scope: str) -> str:
        parts = []
        for at, cell in enumerate(cells):
            tag, role = ("th", f' scope="{scope}"') if scope == "col" or at == 0 else ("td", "")
            look = f' class="{styles[at]}"' if at in styles else ""
            parts.append(f"<{tag}{role}{look}>{text(cell)}</{tag}>")
        return "".join(parts)

    head = f"<thead><tr>{line(header, 'col')}</tr></thead>" if header else ""
    body = "".join(f"<tr>{line(row, 'row')}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
