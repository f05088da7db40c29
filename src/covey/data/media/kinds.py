"""Modalities other than text: their columns, the parts of messages that place them, and the arguments of a processor that reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A modality, as rows, chat templates and processors of transformers name it."""

    name: str
    """Type of its parts in a message, and the column of a single item; `<name>_token` is a processor's placeholder."""
    noun: str
    """The item in sentences; its plural has an s."""
    columns: tuple[str, str]
    """Column of a single item, column of a list."""
    argument: str
    """Argument of the processor's call."""
    parts: tuple[str, ...]
    """Attributes of a processor that prepare it."""
    sources: tuple[str, ...]
    """Keys of a part that may hold the item itself."""

    def is_read_by(self, processor: Any) -> bool:
        """True if the processor has a part for this modality."""
        return any(getattr(processor, part, None) is not None for part in self.parts)

    def place(self, processor: Any) -> str | None:
        """Text that stands for an item before it is expanded; None where the processor names none."""
        name = f"{self.name}_token"
        return getattr(processor, name, None) or getattr(processor.tokenizer, name, None)

    def expanded(self, processor: Any) -> str | None:
        """Text that stands for a piece of an item after its expansion; for most processors the same as `place`."""
        return getattr(processor.tokenizer, f"{self.name}_token", None) or self.place(processor)


IMAGE = Kind("image", "image", ("image", "images"), "images", ("image_processor",), ("image", "path", "url", "base64"))
_SOUND_SOURCES = ("audio", "path", "url", "audio_url", "base64")
SOUND = Kind("audio", "sound", ("audio", "audios"), "audio", ("feature_extractor", "audio_processor"), _SOUND_SOURCES)
VIDEO = Kind("video", "video", ("video", "videos"), "videos", ("video_processor",), ("video", "path", "url", "base64"))
KINDS = (IMAGE, SOUND, VIDEO)
MEDIA_COLUMNS = tuple(column for kind in KINDS for column in kind.columns)


def has_media(row: Mapping[str, Any]) -> bool:
    """True if the row has an image, a sound or a video: in a column, or as a part of a chat message."""
    return bool(row_kinds(row))


def row_kinds(row: Mapping[str, Any]) -> list[Kind]:
    """The modalities of a row other than text."""
    prompt = row.get("prompt")
    types = set() if isinstance(prompt, str) else {part.get("type") for part in parts_of(prompt or ())}
    return [kind for kind in KINDS if kind.name in types or any(holds(row.get(column)) for column in kind.columns)]


def holds(value: Any) -> bool:
    """False for a column that is null or an empty list."""
    return value is not None and not (isinstance(value, list | tuple) and not value)


def parts_of(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Parts of all messages whose content is a list."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    lists = [content for content in contents if isinstance(content, Sequence) and not isinstance(content, str)]
    return [part for content in lists for part in content if isinstance(part, Mapping)]
