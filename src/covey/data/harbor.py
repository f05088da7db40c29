"""Tasks in Harbor's format (Terminal-Bench 2, SWE tasks and the like) as rows: `harbor:tasks/` as a data set. The library is not needed."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from covey.data.media.kinds import MEDIA_COLUMNS
from covey.data.rendering import ROW_COLUMNS
from covey.errors import ConfigError, DataError, first_line
from covey.files.hub import bounded_hub
from covey.files.places import looks_local, nearest_sibling

COLUMNS = (*ROW_COLUMNS, *MEDIA_COLUMNS, "task", "task_dir", "task_index")
"""Names that no column of the metadata has: an `image` there is a container's."""
_CANARY = re.compile(r"(?:(?:<!--.*canary.*-->|#.*canary.*)\s*\n)+\s*", re.IGNORECASE)
"""Lines at the top of an instruction that mark it as data of a benchmark; Harbor hides them from agents too."""


def task_folders(source: str) -> list[Path]:
    """Folders with a `task.toml`, by name: the folder itself, those in it, or those in its `tasks/`; of a data set on the hub too.

    Raises DataError for a folder that is not there or has no tasks.
    """
    root = Path(source).expanduser()
    if not root.is_dir():
        if looks_local(source):
            raise DataError(f"The folder of tasks {source!r} does not exist.{nearest_sibling(root)}")
        root = _downloaded(source)
    places = (
        (root / "task.toml", *(root / "tasks").glob("*/task.toml")),
        (root / "task.toml", *root.glob("*/task.toml")),
    )
    folders = next(filter(None, ([path.parent for path in many if path.is_file()] for many in places)), [])
    if not folders:
        raise DataError(
            f"{source!r} has no tasks; each is a folder in it, or in its tasks/, with task.toml, instruction.md, environment/ and tests/."
        )
    return sorted(folders, key=lambda folder: folder.name)


def rows(source: str, include_metadata: bool = True, places: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """A row for each task: `prompt`, the instruction as it is, `task`, its name, `task_dir`, `task_index`, and its `[metadata]`.

    `task_dir` is relative where `source` is. A value of the metadata that is no text, number or list is JSON; so is every value of
    a name under which tasks have values of several types. `places`: those tasks alone. Raises DataError for a broken task.
    """
    folders = task_folders(source)
    if wrong := [place for place in places or () if not -len(folders) <= place < len(folders)]:
        raise ConfigError(f"indices={wrong[0]} is no place in the {len(folders)} tasks of {source!r}.")
    order = range(len(folders)) if places is None else [range(len(folders))[place] for place in places]
    configs = [config_of(folders[place]) for place in order]
    metadata = [config.get("metadata", {}) if include_metadata else {} for config in configs]
    names = dict.fromkeys(name for each in metadata for name in each if name not in COLUMNS)
    columns = {name: _column([each.get(name) for each in metadata]) for name in names}
    return [
        {
            "prompt": [{"role": "user", "content": instruction_of(folders[place])}],
            "task": folders[place].name,
            "task_dir": str(folders[place]),
            "task_index": place,
            **{name: values[i] for name, values in columns.items()},
        }
        for i, place in enumerate(order)
    ]


def instruction_of(folder: Path) -> str:
    """The text of `instruction.md`, without the canary at its top. Raises DataError where it is missing or empty."""
    try:
        text = _CANARY.sub("", (folder / "instruction.md").read_text(encoding="utf-8"), count=1)
    except (OSError, UnicodeError) as error:
        raise DataError(f"The task {folder} has no instruction.md that can be read ({first_line(error)}).") from error
    if not text.strip():
        raise DataError(f"{folder / 'instruction.md'} is empty; it is what the model is asked to do.")
    return text


def config_of(folder: Path) -> dict[str, Any]:
    """The content of `task.toml`. Raises DataError for one that is broken, and for tasks that one conversation cannot hold."""
    try:
        import tomllib
    except ImportError as error:
        raise ConfigError("Harbor's tasks need Python 3.12 or newer, as its library does.") from error
    try:
        config: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'task.toml'} cannot be read: {first_line(error)}") from error
    environment = config.get("environment", {})
    for name, has_it in (("[[steps]]", config.get("steps")), ("mcp_servers", environment.get("mcp_servers"))):
        if has_it:
            raise DataError(f"The task {folder} has {name}, which cannot be trained on yet; leave the task out.")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise DataError(
            f"The task {folder} needs {environment['os']}; only Linux has the tool bash. Leave the task out."
        )
    return config


def _column(values: list[Any]) -> list[Any]:
    is_plain = lambda value: (
        isinstance(value, str | int | float)
        or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    )
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) < 2 and all(value is None or is_plain(value) for value in values):
        return values
    return [None if value is None else json.dumps(value, default=str) for value in values]


@cache
def _downloaded(source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with bounded_hub(source):
            return Path(snapshot_download(source, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise DataError(
            f"{source!r} is no folder of tasks, and no data set of the hub that can be had: {first_line(error)}"
        ) from error
