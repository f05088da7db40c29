"""The manifest of a checkpoint: size and checksum of every file, so that a torn or corrupted one is found and named."""

import importlib.metadata
import json
import os
import platform
import re
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from covey.errors import CheckpointError
from covey.runs.storage import checksum, sync_folder, write_atomically

NAME = "manifest.json"
FORMAT = "covey-checkpoint"
SCHEMA = 1
_UNSET = "0" * 32
_DIGEST = re.compile(r'"xxh3_128_of_this_file": "([0-9a-f]{32})"')


def seal(folder: Path, step: int) -> None:
    """Flush every file under `folder` to the disk and write `manifest.json` last: names, sizes, xxh3-128, step, versions.

    The manifest holds its own checksum too (computed with zeros in its place). Raises OSError when the disk refuses.
    """
    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link; a checkpoint holds plain files only, so write a copy there.")
        if path.is_dir():
            sync_folder(path)
        elif path.name != NAME or path.parent != folder:
            name = path.relative_to(folder).as_posix()
            entries[name] = {"size": path.stat().st_size, "xxh3_128": checksum(path, flush=True)}
    manifest = {
        "format": FORMAT,
        "schema": SCHEMA,
        "step": step,
        "versions": versions(),
        "files": entries,
        "xxh3_128_of_this_file": _UNSET,
    }
    content = json.dumps(manifest, indent=1).encode()
    write_atomically(folder / NAME, content.replace(_UNSET.encode(), _digest(content).encode()))


def problems(folder: Path) -> list[str]:
    """Problems of a checkpoint, one sentence fragment a file; empty when every byte is as it was written.

    Files that the manifest does not name are ignored: callbacks may add some after the save.
    """
    try:
        manifest = read(folder)
    except CheckpointError as error:
        return [str(error)]
    faults = [wrong for name, entry in manifest["files"].items() if (wrong := problem(folder, name, entry))]
    named = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    if named and int(named[1]) != manifest["step"]:
        faults.append(f"{NAME} is of step {manifest['step']}, not {named[1]}")
    return faults


def is_complete(folder: Path) -> bool:
    """True if the manifest can be read and every file has the size that it names; no other bytes are read."""
    try:
        files = read(folder)["files"]
    except CheckpointError:
        return False
    paths = ((folder / name, entry["size"]) for name, entry in files.items())
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def read(folder: Path) -> dict[str, Any]:
    """The manifest, checked against its own checksum. CheckpointError when it is missing, damaged or of another kind."""
    try:
        if not stat.S_ISREG(os.lstat(folder / NAME).st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{NAME} is not a file")
        content = (folder / NAME).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{NAME} cannot be read ({error.strerror})") from error
    try:
        manifest = json.loads(content)
        digest = _DIGEST.search(content.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME} is damaged ({error})") from error
    if digest is None or digest[1] != _digest(content.replace(digest[1].encode(), _UNSET.encode())):
        raise CheckpointError(f"{NAME} is damaged (its own checksum differs)")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("schema") != SCHEMA:
        raise CheckpointError(f"{NAME} is not of the kind that this version of Covey reads (schema {SCHEMA})")
    if type(manifest.get("step")) is not int:
        raise CheckpointError(f"{NAME} is damaged (its step is no number)")
    if not isinstance(manifest.get("files"), dict) or not all(map(_is_entry, manifest["files"].values())):
        raise CheckpointError(f"{NAME} is damaged (its list of files is not one)")
    return manifest


def is_ours(folder: Path) -> bool:
    """True if Covey wrote this checkpoint, damaged or not."""
    return any((folder / name).exists() for name in (NAME, "covey_state.json", "covey_state.safetensors"))


@cache
def versions() -> dict[str, str]:
    """Versions of the packages that write and read checkpoints."""
    names = ("covey", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("xxh3_128"), str)


def problem(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    """Fault of one file of a checkpoint, given its entry of the manifest; None if it is as it was written."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        return f"{NAME} names {name!r}, which is outside the checkpoint"
    path = folder / name
    try:
        status = os.lstat(path)
        if any(part.is_symlink() for part in [path, *path.parents][: len(relative.parts)]):
            return f"{name} is a link"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a file"
        if status.st_size != entry["size"]:
            return f"{name} has {status.st_size} bytes instead of {entry['size']}"
        return None if checksum(path) == entry["xxh3_128"] else f"{name} has changed since it was written"
    except UnicodeEncodeError:
        return f"{NAME} names {name!r}, as no file can be called"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)
