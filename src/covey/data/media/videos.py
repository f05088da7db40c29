"""Videos of rows: lists of frames, which are images of one size, and small moving copies for people."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from covey.data.media.images import open_image, pillow
from covey.errors import DataError

_MOST_FRAMES = 768
_PREVIEW_FRAMES, _PREVIEW_SIDE = 32, 256


def open_video(value: Any, where: str) -> list[Any]:
    """RGB frames of Pillow from a list of images, or from an array [frames, height, width, 3] of bytes.

    Raises DataError for anything else, such as a file of video, and for frames of different sizes.
    """
    if isinstance(value, np.ndarray) and value.ndim == 4 and value.dtype == np.uint8 and value.shape[-1] == 3:
        value = [pillow().fromarray(frame) for frame in value]
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise DataError(f"{where} is a {type(value).__name__}; give its frames, a list of images.")
    if not 1 <= len(value) <= _MOST_FRAMES:
        raise DataError(f"{where} has {len(value)} frames; give 1 to {_MOST_FRAMES}.")
    frames = [open_image(frame, f"{where}, frame {i}") for i, frame in enumerate(value)]
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        raise DataError(
            f"{where} has frames of {len(sizes)} sizes, such as {sizes[0]} and {sizes[1]}; give all frames one size."
        )
    return frames


def preview_video(frames: Sequence[Any]) -> bytes:
    """At most 32 frames, of at most 256 pixels a side, as a GIF that repeats."""
    step = -(-len(frames) // _PREVIEW_FRAMES)
    small = [frame.copy() for frame in frames[::step]]
    for frame in small:
        frame.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
    file = io.BytesIO()
    small[0].save(file, "GIF", save_all=True, append_images=small[1:], duration=250, loop=0)
    return file.getvalue()
