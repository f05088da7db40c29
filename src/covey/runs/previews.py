"""`rollouts/images/`, `audios/` and `videos/`: media of recorded prompts, small, each once, named by their content."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from covey.errors import RunFolderError
from covey.runs.storage import read_plain, refuse_link, temporary_sibling

if TYPE_CHECKING:  # the dashboard reads previews, and starts without torch
    from covey.types import Group

MOST_FILES = 4096
"""Files of each folder of one run; later ones are not written."""
_MOST_BYTES = 8 << 20
_NAME = re.compile(r"[0-9a-f]{24}\.(png|jpg|wav|gif)")
_KINDS = {
    ".png": ("images", b"\x89PNG\r\n\x1a\n", "image/png"),
    ".jpg": ("images", b"\xff\xd8\xff", "image/jpeg"),
    ".wav": ("audios", b"RIFF", "audio/wav"),
    ".gif": ("videos", b"GIF8", "image/gif"),
}
"""Suffix to folder, first bytes and media type."""
FOLDERS = ("images", "audios", "videos")


def folder_of(name: str) -> str:
    """Folder of a preview's file, which is the column of rollouts that names it too."""
    return _KINDS[name[-4:]][0]


def write(rollouts: Path, groups: Sequence[Group]) -> None:
    """Write the previews of these groups' prompts that are not there yet. OSError when the disk refuses."""
    content = {
        name: preview
        for media in (done.media or group.prompt.media for group in groups for done in group.completions)
        if media is not None
        for name, preview in zip(media.names, media.previews, strict=True)
    }
    for folder in FOLDERS:
        named = {name: preview for name, preview in content.items() if folder_of(name) == folder}
        if named:
            _write(rollouts / folder, named)


def _write(folder: Path, content: dict[str, bytes]) -> None:
    refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    there = {entry.name for entry in folder.iterdir()}
    for name, preview in content.items():
        if name in there or len(there) >= MOST_FILES or len(preview) > _MOST_BYTES:
            continue
        temporary = temporary_sibling(folder / name)
        temporary.write_bytes(preview)
        os.replace(temporary, folder / name)
        there.add(name)


def read(rollouts: Path, name: str) -> tuple[bytes, str]:
    """Content and media type of a preview. RunFolderError for another name, one that is not there, or a file of another kind."""
    if not _NAME.fullmatch(name):
        raise RunFolderError(f"{name[:80]!r} is no name of a recorded image, sound or video.")
    folder, begin, kind = _KINDS[name[-4:]]
    try:
        content = read_plain(rollouts / folder / name, _MOST_BYTES, depth=3)
    except OSError as error:
        raise RunFolderError(f"{folder}/{name} cannot be read ({error.strerror or error}).") from error
    if not content.startswith(begin):
        raise RunFolderError(f"{folder}/{name} is damaged.")
    return content, kind
