"""Videos of rows: frames as lists, arrays, or decoded by torchcodec within bounds, and small copies for people."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from covey.data.media.files import content_of, readable
from covey.data.media.images import open_image, pillow
from covey.data.media.kinds import VIDEO
from covey.errors import DataError

_MOST_FRAMES = 768
_MOST_PIXELS = 1_000_000_000
"""Pixels of all frames of a file, which take 3 bytes each."""
_PREVIEW_FRAMES, _PREVIEW_SIDE = 32, 256


def open_video(value: Any, where: str) -> list[Any]:
    """RGB frames of Pillow from a list of images, an array [frames, height, width, 3] of bytes, or a file of video.

    A file: its path, its bytes, `datasets`' dict of the two, or a decoder of torchcodec. Raises DataError for anything else, for a file
    that is broken or too long, and for frames of different sizes.
    """
    value = content_of(value, VIDEO, where)
    if isinstance(value, bytes):
        value = _decoder(value, where)
    if hasattr(value, "get_frames_in_range"):  # VideoDecoder of torchcodec, by datasets too
        value = _decoded(value, where)
    if isinstance(value, np.ndarray) and value.ndim == 4 and value.dtype == np.uint8 and value.shape[-1] == 3:
        value = [pillow().fromarray(frame) for frame in value]
    if not isinstance(value, Sequence):
        raise DataError(f"{where} is a {type(value).__name__}; give its frames, a list of images, or a file's path.")
    _expect_count(len(value), where)
    frames = [open_image(frame, f"{where}, frame {i}") for i, frame in enumerate(value)]
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        raise DataError(
            f"{where} has frames of {len(sizes)} sizes, such as {sizes[0]} and {sizes[1]}; give all frames one size."
        )
    return frames


def _expect_count(count: int, where: str) -> None:
    if not 1 <= count <= _MOST_FRAMES:
        raise DataError(f"{where} has {count} frames; give 1 to {_MOST_FRAMES}.")


def _decoder(content: bytes, where: str) -> Any:
    """A decoder of the file. DataError without torchcodec, and for bytes that are no video."""
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, OSError, RuntimeError) as error:  # the latter without ffmpeg, or with another torch
        raise DataError(
            f"{where} is a file of video, which torchcodec reads: install torchcodec and ffmpeg, or give its frames, a list of images."
        ) from error
    with readable("a video", where):
        return VideoDecoder(content)


def _decoded(decoder: Any, where: str) -> np.ndarray:
    """[frames, height, width, 3] bytes; nothing is decoded of a file that is too long."""
    with readable("a video", where):  # frames are decoded here
        count, size = len(decoder), decoder.metadata
        _expect_count(count, where)
        if count * size.height * size.width > _MOST_PIXELS:
            raise DataError(f"{where} has {count} frames of {size.width} x {size.height} pixels; make it smaller.")
        frames: np.ndarray = decoder[:].cpu().numpy()
    frames = frames if frames.shape[-1] == 3 else frames.transpose(0, 2, 3, 1)
    if frames.dtype != np.uint8:
        raise DataError(f"{where} is decoded to {frames.dtype}; make a decoder of bytes, torch.uint8.")
    return np.ascontiguousarray(frames)


def preview_video(frames: Sequence[Any]) -> bytes:
    """At most 32 frames, of at most 256 pixels a side, as a GIF that repeats."""
    step = -(-len(frames) // _PREVIEW_FRAMES)
    small = [frame.copy() for frame in frames[::step]]
    for frame in small:
        frame.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
    file = io.BytesIO()
    small[0].save(file, "GIF", save_all=True, append_images=small[1:], duration=250, loop=0)
    return file.getvalue()
