"""The option tables of from-trl.md, written from the declarations in `covey/config`: `make pages`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from covey.config import options

PAGE = Path(__file__).parent / "from-trl.md"


def table(heads: tuple[str, str], rows: Mapping[str, str]) -> str:
    """A Markdown table of options by name."""
    lines = [f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {said} |" for name, said in sorted(rows.items()))])


def with_tables(page: str) -> str:
    """The page with each table between its two marks written anew."""
    tables = {
        "refused": table(("option", "instead"), options.REFUSED),
        "without effect": table(("option", "why"), options.INERT),
        "renamed": table(("name", "instead"), options.RENAMED),
    }
    for name, rows in tables.items():
        mark = f"<!-- {name}: written by option_tables.py -->"
        page, count = re.subn(
            f"{re.escape(mark)}\n.*?<!-- end -->",
            lambda _, mark=mark, rows=rows: f"{mark}\n\n{rows}\n\n<!-- end -->",
            page,
            flags=re.DOTALL,
        )
        assert count == 1, f"{PAGE.name} needs one place for {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
