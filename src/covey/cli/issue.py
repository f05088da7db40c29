"""`covey env --issue [RUN]`: the facts that an issue needs, as Markdown to paste; values of secrets are not shown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.cli.early import default_of
from covey.config.options import is_changed
from covey.errors import RunFolderError
from covey.files.bounded import read_json
from covey.process.terminal import safe

_LAST = 3
"""Steps and alerts of a run that are shown."""
_MOST = 300
"""Characters of a value."""


def issue(facts: Mapping[str, Any], run: str | None) -> str:
    """Markdown: versions and devices, and for a run its options, last steps and alerts. Raises RunFolderError for no run."""
    machine = {name: value for name, value in facts.items() if name not in ("packages", "environment")}
    rows = [f"{name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in machine.items()]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    rows += [f"packages: {packages}", *(f"{name}={value}" for name, value in facts["environment"].items())]
    sections = [_section("Machine", rows)]
    if run is not None:
        sections += _of_run(Path(run))
    return "\n\n".join(sections)


def _of_run(folder: Path) -> list[str]:
    manifest = folder / "run.json"
    if not manifest.is_file():
        raise RunFolderError(f"{folder} holds no run.json; give the folder of a run, such as runs/train-1.")
    run = read_json(manifest, RunFolderError)
    values = run.get("config") or {}
    options = {name: value for name, value in values.items() if is_changed(value, default_of(name))}
    parts = {name: run.get(name) for name in ("command", "state", "step", "versions")}
    parts |= {
        name: (run.get(name) or {}).get("name") for name in ("model", "algorithm") if isinstance(run.get(name), dict)
    }
    sections = [
        _section("Run", [f"{name}: {value}" for name, value in parts.items() if value is not None]),
        _section("Options that differ from the defaults", [f"{name}: {value}" for name, value in options.items()]),
    ]
    for what, file in (("steps", "metrics"), ("alerts", "alerts"), ("events", "events")):
        if lines := _tail(folder / f"{file}.jsonl"):
            sections.append(_section(f"Last {what}", lines))
    return sections


def _tail(file: Path) -> list[str]:
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 200_000))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
    return [_short(line) for line in lines[-_LAST:]]


def _short(line: str) -> str:
    try:
        values = json.loads(line)
    except ValueError:
        return line[:_MOST]
    rounded = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(f"{name} {str(value)[:_MOST]}" for name, value in rounded.items() if value is not None)


def _section(title: str, rows: list[str]) -> str:
    body = "\n".join(safe(row[: 4 * _MOST]).replace("```", "'''") for row in rows) or "none"
    return f"**{title}**\n\n```text\n{body}\n```"
