"""Help by groups: common options first, the rest behind `--help-all`."""

import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress

from covey.cli.flags import Flag

_SHOWN_TYPES = {"int": "N", "float": "X", "bool": "", "str": "TEXT"}


def verbs_help(verbs: Mapping[str, str], version: str) -> str:
    """The page of `covey --help`."""
    lines = [f"covey {version}: post-train language models with GRPO and its family.", "", "usage: covey VERB ...", ""]
    width = max(map(len, verbs), default=0) + 2
    for name, sentence in verbs.items():
        lines += _wrap(sentence, f"  {name:<{width}}")
    lines += ["", *_wrap("covey VERB --help shows the options of a verb; --debug adds tracebacks to errors.")]
    return "\n".join(lines)


def flags_help(usage: str, sentence: str, examples: Iterable[str], flags: Iterable[Flag], *, is_all: bool) -> str:
    """The page of `covey VERB --help`, or of `--help-all`."""
    flags = list(flags)
    shown = [flag for flag in flags if flag.is_common or is_all]
    lines = [*_wrap(usage, "usage: "), "", *_wrap(sentence)]
    lines += [f"  $ {example}" for example in examples]
    groups = dict.fromkeys(flag.group for flag in shown)
    for group in groups:
        lines += ["", f"{group}:"]
        for flag in shown:
            if flag.group == group:
                lines += _entry(flag)
    hidden = len(flags) - len(shown)
    if hidden:
        lines += [
            "",
            *_wrap(f"{hidden} more options: --help-all. In a YAML file (--config) names have underscores."),
        ]
    return "\n".join(lines)


def _width() -> int:
    """Columns of the terminal, which stderr knows where stdout is a pipe (`| less`); 110 where there is none."""
    columns = shutil.get_terminal_size((0, 24)).columns
    with suppress(OSError):
        columns = columns or os.get_terminal_size(2).columns
    return min(columns or 110, 120)


def _wrap(text: str, start: str = "") -> list[str]:
    """`start` and the text, in the width of the terminal; further lines begin below the text, and lines of its own stay lines."""
    width, indent = max(_width(), 50), " " * len(start)
    parts = [
        textwrap.wrap(
            line, width, initial_indent=indent if place else start, subsequent_indent=indent, break_on_hyphens=False
        )
        for place, line in enumerate(text.splitlines())
    ]
    return [line for part in parts for line in part or [""]]


def _entry(flag: Flag) -> list[str]:
    head = f"  {flag.spelled} {_placeholder(flag)}".rstrip()
    default = "" if flag.default in (None, "None", "", False, "False") else f" [{flag.default}]"
    body = textwrap.wrap(flag.help + default, max(_width() - 36, 30), break_on_hyphens=False) or [""]
    if len(head) < 36:
        return [f"{head:<36}{body[0]}", *(" " * 36 + line for line in body[1:])]
    return [head, *(" " * 36 + line for line in body)]


def _placeholder(flag: Flag) -> str:
    first = flag.kind.split("|")[0].strip()
    if first == "None" and "|" in flag.kind:
        first = flag.kind.split("|")[1].strip()
    if flag.is_list:
        return "VALUE ..."
    if first.startswith("dict"):
        return "JSON"
    if flag.is_switch and str(flag.default) == "True":
        return "[true|false]"
    return _SHOWN_TYPES.get(first, "VALUE")
