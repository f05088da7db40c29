"""`run.json`: configuration, versions and sources of a run, so that its result can be explained, compared and repeated."""

import datetime
import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from covey.runs import provenance
from covey.runs.masking import mask, mask_command
from covey.runs.storage import open_plain, read_bounded, write_atomically

NAME = "run.json"
MOVED_TO = "moved_to"
"""Key of `run.json`: where the folder was moved to in the middle of its run, with all that it held until then."""
FORMAT = "covey-run"
SCHEMA = 1
_MOST_BYTES = 16 << 20
_DEEPEST = 60
"""Mappings and lists in each other; a run writes about ten."""
_COMPARED = ("config", "model", "algorithm", "rewards", "reward_weights", "versions", "dataset", "hardware")


def describe(
    *,
    config: Mapping[str, Any],
    algorithm: Any,
    rewards: Sequence[Any],
    reward_weights: Sequence[Any] = (),
    dataset: Any,
    folder: Path,
    model: Any = None,
) -> dict[str, Any]:
    """Manifest of a run as JSON, secrets masked: resolved config, algorithm and rewards with the source text
    and sha256 of every part of the user's own, versions, git, hardware, seeds, data set."""
    parts = [algorithm, list(rewards)]
    run_json: dict[str, Any] = mask(
        {
            "format": FORMAT,
            "schema": SCHEMA,
            "id": uuid.uuid4().hex,
            "name": folder.resolve().name,
            "created": now(),
            "command": mask_command(sys.argv),
            "working_folder": os.getcwd(),
            "config": to_json(config),
            "model": provenance.model_facts(model),
            "algorithm": provenance.component(algorithm),
            "rewards": provenance.component(list(rewards)),
            "reward_weights": provenance.component(list(reward_weights)),
            "sources": provenance.user_files(parts),
            "versions": provenance.package_versions(),
            "git": provenance.git_facts(Path.cwd()),
            "hardware": provenance.hardware(),
            "seeds": {name: config[name] for name in ("seed", "data_seed") if name in config},
            "dataset": provenance.dataset_facts(dataset),
        }
    )
    return run_json


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Differences between two manifests in fields that affect the numbers: `{"config.learning_rate": [1e-6, 1e-5]}`."""
    before, after = compared(old), compared(new)
    names = sorted(set(before) | set(after))
    return {name: [before.get(name), after.get(name)] for name in names if before.get(name) != after.get(name)}


def compared(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that affect the numbers, by dotted name."""
    return _flat({name: manifest.get(name) for name in _COMPARED})


def name_of(part: Any) -> Any:
    """The name of an algorithm or a reward as `run.json` describes it; what is no description as it is."""
    if not isinstance(part, Mapping):
        return part
    fields = part.get("fields")
    inner = fields.get("name") if isinstance(fields, Mapping) else None
    return part.get("name") or inner or part.get("type")


def write(path: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the file at once. OSError when the disk refuses."""
    write_atomically(path, json.dumps(to_json(manifest), indent=1, allow_nan=False).encode())


def read(path: Path) -> dict[str, Any] | None:
    """The manifest; None when there is none or it cannot be read as one."""
    try:
        return load(path)
    except (OSError, ValueError):
        return None


def load(path: Path) -> dict[str, Any]:
    """The manifest. FileNotFoundError when there is none, OSError or ValueError when it cannot be read as one."""
    with open(open_plain(path), "rb") as file:
        return load_opened(file)


def load_opened(file: BinaryIO) -> dict[str, Any]:
    """The manifest in an open file. OSError or ValueError when it cannot be read as one."""
    try:
        manifest = json.loads(read_bounded(file, _MOST_BYTES))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"it is not of the format {FORMAT}")
    level: list[Any] = [manifest]
    for _ in range(_DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
    if level:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    return manifest


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def to_json(value: Any) -> Any:
    """A value as JSON can hold it: NaN and infinities as text, other types as their `repr`."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return to_json(value.item())
    return str(value) if isinstance(value, os.PathLike) else repr(value)[:1000]


def number_or_json(value: Any) -> Any:
    """`to_json`, but a float as it is, NaN among them, so that a column of numbers stays one."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    return value if isinstance(value, float) else to_json(value)


def now() -> str:
    """The time, ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {where: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{where}.{key}" if where else str(key))
    return flat
