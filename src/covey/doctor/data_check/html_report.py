"""The findings as one self-contained HTML file, without scripts."""

from covey.doctor.data_check.summary import Entry, Summary
from covey.evaluation.html import page_of, text

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --mend: #d55e00; --look: #0072b2; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.verdict { font-size: 1.1rem; font-weight: 600; border-left: 4px solid var(--look); padding-left: .8rem; }
.verdict.mend { border-color: var(--mend); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem .8rem .25rem 0; vertical-align: top; }
tbody tr > * { border-top: 1px solid var(--line); } td { overflow-wrap: break-word; } td.n, th.n { text-align: right; white-space: nowrap; } code { white-space: nowrap; }
summary { cursor: pointer; padding: .3rem 0; } details { border-top: 1px solid var(--line); }
code { font-size: .92em; } td.t { overflow-wrap: anywhere; min-width: 16rem; }
"""


def as_html(summary: Summary) -> str:
    """The whole page; every text in it is escaped."""
    verdict = (
        "Nothing must be mended."
        if summary.is_ok
        else f"covey data clean would leave out {summary.to_drop:,} of {summary.num_rows:,} rows and mend {summary.to_change:,}."
    )
    notes = "".join(f"<li>{text(note)}</li>" for note in summary.notes)
    details = "".join(_details(entry) for entry in summary.entries)
    body = f"""<h1>{text(summary.source)}: {summary.num_rows:,} rows</h1>
<p class="verdict{"" if summary.is_ok else " mend"}">{text(verdict)}</p>
<ul>{notes}</ul>
<h2>Findings</h2>
{_overview(summary)}
<h2>Examples</h2>
{details or "<p>None.</p>"}
<h2>Lengths</h2>
{_lengths(summary)}
<h2>Languages</h2>
{_languages(summary)}"""
    return page_of(f"{summary.source}: its faults", _STYLE, body)


def _overview(summary: Summary) -> str:
    body = "".join(
        f"<tr><td>{text(entry.kind.title)}</td><td><code>{entry.kind.name}</code></td>"
        f'<td class="n">{entry.count:,}</td><td class="n">{100 * entry.count / summary.num_rows:.2f}%</td>'
        f"<td>{'mend' if entry.kind.must_be_mended else 'look'}</td>"
        f'<td class="t">{text(entry.kind.fix)}</td></tr>'
        for entry in summary.entries
    )
    head = '<tr><th>what</th><th>kind</th><th class="n">rows</th><th class="n">share</th><th>then</th><th>fix</th></tr>'
    return _table(head, body) if body else "<p>Nothing found.</p>"


def _details(entry: Entry) -> str:
    examples = "".join(
        f'<tr><td class="n">{example.row}</td><td class="t">{text(example.why)}</td><td class="t">{text(example.begins)}</td></tr>'
        for example in entry.examples
    )
    rows = ", ".join(str(row) for row in entry.rows)
    more = entry.count - len(entry.rows)
    rest = f" and {more:,} more (--json lists all)" if more > 0 else ""
    return (
        f"<details><summary>{text(entry.kind.title)}: {entry.count:,}</summary>"
        + _table('<tr><th class="n">row</th><th>why</th><th>it begins</th></tr>', examples)
        + f"<p>Rows, counting from 0: {rows}{rest}.</p></details>"
    )


def _lengths(summary: Summary) -> str:
    named = [(name, values) for name, values in summary.lengths.items() if values]
    body = "".join(
        f"<tr><td>{text(name)}</td>" + "".join(f'<td class="n">{value:,.0f}</td>' for value in values.values()) + "</tr>"
        for name, values in named
    )  # fmt: skip
    head = '<tr><th>of a prompt</th><th class="n">least</th><th class="n">5%</th><th class="n">median</th><th class="n">95%</th><th class="n">most</th></tr>'
    return _table(head, body)


def _languages(summary: Summary) -> str:
    body = "".join(f'<tr><td>{text(name)}</td><td class="n">{count:,}</td></tr>' for name, count in summary.languages.items())  # fmt: skip
    return _table('<tr><th>seems to be</th><th class="n">rows</th></tr>', body)


def _table(head: str, body: str) -> str:
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
