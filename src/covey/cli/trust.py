"""Code that a run folder names is run again only as it ran then, unless the user says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.verb import Given
from covey.errors import ConfigError
from covey.runs import provenance

CODE = ("reward", "algorithm", "alert_detectors")
"""Options that may name code, as `file.py:name` or `package.module:name`."""


def confirm(folder: Path, recorded: Mapping[str, Any], found: Mapping[str, Any], given: Given) -> None:
    """Before anything is imported for `--from-run`: ask once, at a terminal, where code is not that of the run.

    `recorded` are the run's options, `found` its run.json, `given` what the user gave: code that the user names is the user's own.
    Raises ConfigError where the answer is no, or where there is no terminal to ask on.
    """
    reasons = list(_reasons(folder, {k: v for k, v in recorded.items() if k not in given}, found))
    if not reasons:
        return
    said = "; ".join(reasons)
    if given.get("trust_source"):
        output.say(f"warning: {said}; it is run, and numbers may differ.")
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        output.say(f"{said}.")
        sys.stderr.write("Run this code? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ConfigError(f"--from-run {folder} was not started: {said}. Look at it; --trust-source runs it as it is now.")


def _reasons(folder: Path, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    names = [name for option in CODE for name in _listed(recorded.get(option)) if _names_code(name)]
    sources: Mapping[str, Mapping[str, str]] = found.get("sources") or {}
    known = {kept.get("sha256") for kept in sources.values()}
    files = [Path(name.rpartition(":")[0]).expanduser() for name in names]
    files = [path for path in dict.fromkeys(path.resolve() for path in files) if path.is_file()]
    for path in files:
        if path.is_relative_to(folder.resolve()):
            yield f"{path} lies in the run's own folder, so it may come from whoever made that"
        elif provenance.file_digest(path) not in known:
            yield f"{path} has changed since" if str(path) in sources else f"run.json does not hold the text of {path}"
    if names:  # those of installed modules, and files that others are defined in
        for place, kept in sources.items():
            path = Path(place)
            if path.is_file() and path.resolve() not in files and provenance.file_digest(path) != kept.get("sha256"):
                yield f"{path} has changed since"
    if recorded.get("trust_remote_code"):
        yield "its options run the code beside the model (trust_remote_code)"


def _listed(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value]) if item is not None]


def _names_code(name: str) -> bool:
    place, colon, rest = name.rpartition(":")
    return bool(place and colon and rest.isidentifier())
