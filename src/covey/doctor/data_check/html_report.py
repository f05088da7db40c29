"""The findings as one self-contained HTML file, without scripts."""

from covey.doctor.data_check.summary import Entry, Summary
from covey.evaluation.html import page_of, table, text


def as_html(summary: Summary) -> str:
    """The whole page; every text in it is escaped."""
    verdict = (
        "Nothing must be mended."
        if summary.is_ok
        else f"covey data clean would leave out {summary.to_drop:,} of {summary.num_rows:,} rows and mend {summary.to_change:,}."
    )
    notes = "".join(f"<li>{text(note)}</li>" for note in summary.notes)
    details = "".join(_details(entry) for entry in summary.entries)
    languages = [(name, f"{count:,}") for name, count in summary.languages.items()]
    body = f"""<h1>{text(summary.source)}: {summary.num_rows:,} rows</h1>
<p class="lead{"" if summary.is_ok else " mend"}">{text(verdict)}</p>
<ul>{notes}</ul>
<h2>Findings</h2>
{_overview(summary)}
<h2>Examples</h2>
{details or "<p>None.</p>"}
<h2>Lengths</h2>
{_lengths(summary)}
<h2>Languages</h2>
{table(languages, ("seems to be", "rows"), {1: "number"})}"""
    return page_of(f"{summary.source}: its faults", body)


def _overview(summary: Summary) -> str:
    rows = [
        (entry.kind.title, entry.kind.name, f"{entry.count:,}", f"{100 * entry.count / summary.num_rows:.2f}%",
         "mend" if entry.kind.must_be_mended else "look", entry.kind.fix)
        for entry in summary.entries
    ]  # fmt: skip
    styles = {1: "code", 2: "number", 3: "number", 5: "long"}
    return table(rows, ("what", "kind", "rows", "share", "then", "fix"), styles) if rows else "<p>Nothing found.</p>"


def _details(entry: Entry) -> str:
    examples = [(example.row, example.why, example.begins) for example in entry.examples]
    rows = ", ".join(str(row) for row in entry.rows)
    more = entry.count - len(entry.rows)
    rest = f" and {more:,} more (--json lists all)" if more > 0 else ""
    return (
        f"<details><summary>{text(entry.kind.title)}: {entry.count:,}</summary>"
        + table(examples, ("row", "why", "it begins"), {0: "number", 1: "long", 2: "long"})
        + f"<p>Rows, counting from 0: {rows}{rest}.</p></details>"
    )


def _lengths(summary: Summary) -> str:
    named = [(name, values) for name, values in summary.lengths.items() if values]
    rows = [(name, *(f"{value:,.0f}" for value in values.values())) for name, values in named]
    return table(rows, ("of a prompt", "least", "5%", "median", "95%", "most"), dict.fromkeys(range(1, 6), "number"))
