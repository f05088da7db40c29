"""`rollouts/images/`: the images of recorded prompts, small, each once, named by their content."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from covey.errors import RunFolderError
from covey.runs.storage import read_plain, refuse_link, temporary_sibling

if TYPE_CHECKING:  # the dashboard reads pictures, and starts without torch
    from covey.types import Group

FOLDER = "images"
MOST_FILES = 4096
"""Images of one run; later ones are not written."""
_MOST_BYTES = 2 << 20
_NAME = re.compile(r"[0-9a-f]{24}\.(png|jpg)")
_KINDS = {".png": (b"\x89PNG\r\n\x1a\n", "image/png"), ".jpg": (b"\xff\xd8\xff", "image/jpeg")}


def write(rollouts: Path, groups: Sequence[Group]) -> None:
    """Write the images of these groups' prompts that are not there yet. OSError when the disk refuses."""
    held = [prompt.images for prompt in (group.prompt for group in groups) if prompt.images is not None]
    if not held:
        return
    folder = rollouts / FOLDER
    refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    there = {entry.name for entry in folder.iterdir()}
    for images in held:
        for name, content in zip(images.names, images.previews, strict=True):
            if name in there or len(there) >= MOST_FILES or len(content) > _MOST_BYTES:
                continue
            temporary = temporary_sibling(folder / name)
            temporary.write_bytes(content)
            os.replace(temporary, folder / name)
            there.add(name)


def read(rollouts: Path, name: str) -> tuple[bytes, str]:
    """Content and media type of an image. RunFolderError for another name, one that is not there, or a file of another kind."""
    if not _NAME.fullmatch(name):
        raise RunFolderError(f"{name[:80]!r} is no name of a recorded image.")
    begin, kind = _KINDS[name[-4:]]
    try:
        content = read_plain(rollouts / FOLDER / name, _MOST_BYTES, depth=3)
    except OSError as error:
        raise RunFolderError(f"The image {name} cannot be read ({error.strerror or error}).") from error
    if not content.startswith(begin):
        raise RunFolderError(f"The image {name} is damaged.")
    return content, kind
