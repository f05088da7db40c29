"""Images of rows: opened by Pillow within bounds, and small copies for people."""

import io
import warnings
from typing import Any

from covey.data.media.files import content_of, readable, reason_of
from covey.data.media.kinds import IMAGE
from covey.data.rendering import say_once
from covey.errors import DataError

_MOST_PIXELS = 64_000_000
_PREVIEW_SIDE = 512


def open_image(value: Any, where: str) -> Any:
    """An RGB image of Pillow from one, a file's path, its bytes, or `datasets`' dict of the two.

    A file is turned upright as it says; an image that was made from one, such as a part of it, is taken as it is. DataError for
    anything else, and for pixels of more than 8 bits a channel, which Pillow cuts at 255.
    """
    image_class = pillow()
    value = content_of(value, IMAGE, where)
    if isinstance(value, image_class.Image):
        return _rgb(value, where)
    if not isinstance(value, bytes):
        raise DataError(f"{where} is a {type(value).__name__}; give an image of Pillow, a path, or the file's bytes.")
    with warnings.catch_warnings(), readable("an image", where):
        warnings.simplefilter("error", image_class.DecompressionBombWarning)
        return _rgb(image_class.open(io.BytesIO(value)), where)


def _rgb(image: Any, where: str) -> Any:
    if image.width * image.height > _MOST_PIXELS:
        raise DataError(f"{where} has {image.width} x {image.height} pixels; make it smaller than 64 million.")
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{where} has pixels of Pillow's mode {image.mode}; scale them to 8 bits a channel first.")
    with readable("an image", where):  # pixels are decoded here
        image.load()
        return _upright(image).convert("RGB")


def _upright(image: Any) -> Any:
    from PIL.ImageFile import ImageFile
    from PIL.ImageOps import exif_transpose

    if not isinstance(image, ImageFile):
        return image  # Pillow keeps what the file said for images that were turned since
    try:
        return exif_transpose(image)
    except Exception as error:  # noqa: BLE001 - Pillow raises anything on damaged EXIF data
        say_once(f"EXIF data of images cannot be read ({reason_of(error)}); they are taken as they are.")
        return image


def preview_image(image: Any) -> bytes:
    """The image as a file of at most 512 pixels a side: PNG of a small one, else JPEG."""
    small = image.copy()
    small.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
    file = io.BytesIO()
    if small.width * small.height <= 128 * 128:
        small.save(file, "PNG")
    else:
        small.save(file, "JPEG", quality=85)
    return file.getvalue()


def png(image: Any) -> bytes:
    """The image as a file, without loss."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def pillow() -> Any:
    """Pillow's `Image`. DataError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Images need Pillow: pip install 'covey[vision]'.") from error
    return Image
