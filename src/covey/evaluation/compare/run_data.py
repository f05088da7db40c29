"""Data of a run folder: configuration, learning curves, and scores on held-out questions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from covey.errors import RunFolderError
from covey.runs import evaluations, manifest, metrics, status

MAIN_SET = "eval"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder, read when asked."""

    path: Path
    manifest: Mapping[str, Any]
    """`run.json`."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved options."""
        config = self.manifest.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def seed(self) -> int | None:
        """The seed of the run; None where `run.json` names none."""
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @cached_property
    def curve(self) -> Sequence[Mapping[str, Any]]:
        """`metrics.jsonl`: one row a step."""
        return [row for row in metrics.iterate(self.path / "metrics.jsonl") if isinstance(row.get("step"), int)]

    @cached_property
    def evaluated(self) -> Mapping[str, Mapping[int, Mapping[str, Any]]]:
        """`evaluations.jsonl`: metrics by set and step; of two evaluations at one step the later."""
        by_set: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row in metrics.iterate(self.path / evaluations.LOG):
            if isinstance(row.get("step"), int) and isinstance(row.get("set"), str):
                by_set.setdefault(row["set"], {})[row["step"]] = row
        return by_set

    def mean_at(self, name: str, step: int) -> float:
        """Mean reward of the set `name` at `step`, as the run logged it; NaN where it did not."""
        value = self.evaluated.get(name, {}).get(step, {}).get(f"{name}_reward")
        return float(value) if isinstance(value, int | float) else math.nan

    def answers(self, name: str, step: int) -> list[dict[str, Any]]:
        """One row an answer; empty where the run did not keep them. RunFolderError for a file that cannot be read."""
        path = evaluations.path_of(self.path / evaluations.FOLDER, name, step)
        if not path.is_file():
            return []
        try:
            return evaluations.read(path)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise RunFolderError(
                f"{path} cannot be read ({error}); remove it to compare by the logged means."
            ) from error


def read_runs(named: str) -> list[Run]:
    """The run in a folder, or every run in its subfolders. Raises RunFolderError, naming the folder, where there is none."""
    folder = Path(named).expanduser()
    if not folder.exists():
        raise RunFolderError(f"{named} does not exist; give folders that covey train wrote, such as runs/first.")
    if not folder.is_dir():
        raise RunFolderError(f"{named} is a file; give the folder of a run, which holds run.json.")
    if (folder / manifest.NAME).is_file():
        return [_read(folder)]
    inner = sorted(path.parent for path in folder.glob(f"*/{manifest.NAME}"))
    inner = [path for path in inner if not path.name.startswith(("previous-", "."))]
    if not inner:
        raise RunFolderError(f"{named} holds no run: there is no run.json in it, nor in its folders.{_near(folder)}")
    return [_read(path) for path in inner]


def _near(folder: Path) -> str:
    """A hint for a checkpoint or a model inside a run."""
    for parent in folder.resolve().parents[:2]:
        if (parent / manifest.NAME).is_file():
            return f" The run around it is {parent}."
    return ""


def _read(folder: Path) -> Run:
    run_json = manifest.read(folder / manifest.NAME)
    if run_json is None:
        raise RunFolderError(f"{folder / manifest.NAME} was not written by Covey, or is damaged; it is not compared.")
    return Run(path=folder, manifest={**run_json, "state": status.state_of(run_json, folder)})


def flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings and lists with its dotted path; an empty mapping or list is a leaf.

    >>> dict(flat({"a": {"b": [1, 2]}, "c": []}))
    {'a.b.0': 1, 'a.b.1': 2, 'c': []}
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from flat(item, f"{where}.{i}" if where else str(i))
    else:
        yield where, value
