"""Images, sounds and videos of rows: columns and parts of messages, files, and their way through a processor."""

from covey.data.media.files import expect_files, undecoded, with_paths
from covey.data.media.images import open_image, png
from covey.data.media.kinds import KINDS, MEDIA_COLUMNS, SOUND, Kind, has_media, parts_of, row_kinds
from covey.data.media.places import MEDIA_PARTS, items_of, refuse_openai_parts, with_items
from covey.data.media.prompts import as_returned, media_digest, media_prompt, row_media, sound_reader
from covey.data.media.sounds import open_sound
from covey.data.media.videos import open_video

__all__ = [
    "KINDS", "MEDIA_COLUMNS", "MEDIA_PARTS", "SOUND", "Kind", "as_returned", "expect_files", "has_media", "items_of",
    "media_digest", "media_prompt", "open_image", "open_sound", "open_video", "parts_of", "png", "refuse_openai_parts",
    "row_kinds", "row_media", "sound_reader", "undecoded", "with_items", "with_paths",
]  # fmt: skip
