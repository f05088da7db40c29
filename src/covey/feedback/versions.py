"""Adapter versions on disk, by number, with one small file that names the served one."""

import json
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from covey.errors import RunFolderError
from covey.runs.storage import read_plain, write_atomically

_MOST_VERSIONS = 5
"""Versions of a model that stay on the disk, besides the served one, its parent and the best."""
_LARGEST = 16 * 2**20


class Versions:
    """The versions of every model that learns. Version 0 is the original model; numbers are never reused.

    `state.json` changes by one rename, so a process that is killed leaves the served version as it was.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Raises RunFolderError for a folder made with another base model."""
        self.folder = folder
        self._lock = threading.Lock()
        self._path = folder / "state.json"
        self._state: dict[str, Any] = {"format": 1, "base": fingerprint, "models": {}}
        if self._path.exists():
            try:
                self._state = json.loads(read_plain(self._path, _LARGEST))
                base = self._state["base"]
            except (ValueError, KeyError) as error:
                raise RunFolderError(f"{self._path} cannot be read ({error}); give another --learn-folder.") from error
            if base != fingerprint:
                raise RunFolderError(
                    f"{folder} holds what was learnt with another model; give the model of then, or another --learn-folder."
                )
        shutil.rmtree(folder / "candidates", ignore_errors=True)  # of a process that did not live to judge them

    @property
    def models(self) -> list[str]:
        """Models that have an adapter."""
        return list(self._state["models"])

    def served(self, model: str) -> int:
        """Version that is served."""
        return int(self._of(model)["served"])

    def adapter(self, model: str, version: int) -> Path | None:
        """Folder of a version's adapter; None for version 0."""
        return None if version == 0 else self.folder / "versions" / quote(model, safe="") / f"{version:06d}"

    def best(self, model: str) -> int:
        """Version with the highest mean reward on the fixed set among those on the disk that were not withdrawn."""
        there = lambda entry: (folder := self.adapter(model, entry["version"])) is not None and folder.is_dir()
        usable = [entry for entry in self._of(model)["versions"] if not entry["withdrawn"] and there(entry)]
        means = {0: self._of(model)["base_reward"]} | {entry["version"]: entry["reward"] for entry in usable}
        best: int = max(
            means, key=lambda version: (-float("inf") if means[version] is None else means[version], version)
        )
        return best

    def promote(self, model: str, parent: int, candidate: Path, verdict: Mapping[str, Any]) -> int:
        """Make a candidate the served version. Returns its number."""
        with self._lock:
            state = self._of(model)
            version = max([0, *(entry["version"] for entry in state["versions"])], default=0) + 1
            target = self.adapter(model, version)
            assert target is not None
            shutil.rmtree(target, ignore_errors=True)  # of a process that ended before it was promoted
            target.parent.mkdir(parents=True, exist_ok=True)
            candidate.rename(target)
            entry = {"version": version, "parent": parent, "reward": verdict["candidate"], "created": time.time()}
            state["versions"].append({**entry, "withdrawn": False, "verdict": dict(verdict)})
            if state["base_reward"] is None and parent == 0:
                state["base_reward"] = verdict["served"]
            state["served"] = version
            self._write(model, state)
            self._prune(model)
        return version

    def roll_back(self, model: str) -> int:
        """Roll back to the version served before the present one, which is withdrawn. Returns its number.

        Raises LookupError where there is no earlier version, or it was pruned.
        """
        with self._lock:
            state = self._of(model)
            if state["served"] == 0:
                raise LookupError(f"{model} is served as it was given; there is nothing to roll back.")
            entry = next(entry for entry in state["versions"] if entry["version"] == state["served"])
            parent = self.adapter(model, entry["parent"])
            if parent is not None and not parent.is_dir():
                raise LookupError(f"version {entry['parent']} of {model} is not on the disk any more.")
            entry["withdrawn"] = True
            state["served"] = entry["parent"]
            self._write(model, state)
        return int(state["served"])

    def _of(self, model: str) -> dict[str, Any]:
        blank: dict[str, Any] = {"served": 0, "base_reward": None, "versions": []}
        copied: dict[str, Any] = json.loads(json.dumps(self._state["models"].get(model, blank)))
        return copied

    def _write(self, model: str, state: Mapping[str, Any]) -> None:
        whole = {**self._state, "models": {**self._state["models"], model: dict(state)}}
        write_atomically(self._path, json.dumps(whole, indent=1).encode())
        self._state = whole

    def _prune(self, model: str) -> None:
        state = self._of(model)
        numbers = [entry["version"] for entry in state["versions"]]
        parents = {entry["version"]: entry["parent"] for entry in state["versions"]}
        keep, line = {self.best(model), *numbers[-_MOST_VERSIONS:]}, state["served"]
        for _ in range(_MOST_VERSIONS):
            keep.add(line)
            line = parents.get(line, 0)
        for version in set(numbers) - keep:
            folder = self.adapter(model, version)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
