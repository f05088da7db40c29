"""options.md and the option tables of from-trl.md, written from the declarations in `covey/config`: `make pages`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from covey.config import options
from covey.config.fields import Options

FROM_TRL = Path(__file__).parent / "from-trl.md"
EVERY_OPTION = Path(__file__).parent / "options.md"

HEAD = """# Options

Every option of `GRPOConfig` that acts, by group, as `covey train --help-all` shows them: in Python `GRPOConfig(name=value)`, on the command line
`--name value` with dashes, in YAML `name: value`. Names and defaults are TRL 1.16's where TRL has the option. Options that are refused or change
no result are in [from-trl.md](from-trl.md#refused). An empty default is unset, or that of transformers' TrainingArguments. This page is written by `make pages`.
"""


def every_option() -> str:
    """The page of all options that act."""
    defaults = {one.name: str(one.default) for one in fields(Options)}
    parts = [HEAD]
    for group, names in options.GROUPS.items():
        rows = [f"## {group[0].upper()}{group[1:]}\n", "| option | default | |", "|---|---|---|"]
        for name in names:
            declared, default = options.DECLARED[name], defaults.get(name, "")
            shown = "" if default in ("", "None") else f"`{default}`"
            values = f" `{'`, `'.join(declared.words)}`." if declared.words else ""
            values = f" {declared.range[0].upper()}{declared.range[1:]}." if declared.range else values
            rows.append(f"| `{name}` | {shown} | {declared.help}{values} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def table(heads: tuple[str, str], rows: Mapping[str, str]) -> str:
    """A Markdown table of options by name."""
    lines = [f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {said} |" for name, said in sorted(rows.items()))])


def with_tables(page: str) -> str:
    """from-trl.md with each table between its two marks written anew."""
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
        assert count == 1, f"{FROM_TRL.name} needs one place for {name}"
    return page


if __name__ == "__main__":
    FROM_TRL.write_text(with_tables(FROM_TRL.read_text()))
    EVERY_OPTION.write_text(every_option())
