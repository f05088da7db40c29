"""Files of rows: their bytes by path or `data:` address, and paths relative to the data set's file."""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.data.media.kinds import MEDIA_COLUMNS, Kind
from covey.errors import DataError
from covey.files.bounded import read_bytes

_MOST_BYTES = 64 << 20
"""Most bytes of one file."""


def content_of(value: Any, kind: Kind, where: str) -> Any:
    """Bytes of a path, of a `data:` address or of `datasets`' dict of bytes and path; every other value as it is. DataError for no bytes."""
    if isinstance(value, Mapping) and not value.keys().isdisjoint(("bytes", "path")) and "array" not in value:
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    content = _read(str(value), kind, where) if isinstance(value, str | Path) else value
    if isinstance(content, bytes) and not content:
        raise DataError(f"{where} is a file of 0 bytes; mend or remove it.")
    return content


def reason_of(error: BaseException) -> str:
    """A library's message about bytes, in one line without the address of the object that held them."""
    return " ".join(re.sub(r"<[\w.]+ object at \w+>", "", str(error)).split()).replace(" :", ":")


def from_base64(text: str, where: str) -> bytes:
    """Bytes of a part's base64 text."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where} holds no base64 ({error}); mend it.") from error


def _read(text: str, kind: Kind, where: str) -> bytes:
    if text.startswith("data:"):
        return from_base64(text.partition(",")[2], f"{where} is a data: address that")
    if text.startswith(("http://", "https://")):
        raise DataError(f"{where} is the address {text[:80]!r}; {kind.noun}s are not downloaded, give a file's path.")
    try:
        return read_bytes(text, _MOST_BYTES, DataError)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def undecoded(dataset: Any) -> Any:
    """The data set with columns of `datasets.Audio` and `datasets.Video` as bytes and paths, which are smaller and can be pickled."""
    import datasets

    kinds = (datasets.Audio, datasets.Video)
    for name, feature in (getattr(dataset, "features", None) or {}).items():
        inner = getattr(feature, "feature", None)
        if isinstance(feature, kinds) and feature.decode:
            dataset = dataset.cast_column(name, type(feature)(decode=False))
        elif isinstance(inner, kinds) and inner.decode:
            dataset = dataset.cast_column(name, datasets.List(type(inner)(decode=False)))
    return dataset


def with_paths(dataset: Any, source: Any) -> Any:
    """The data set of a file or folder with the paths in its media columns relative to that folder, unless they are absolute."""
    place = Path(str(source)).expanduser()
    columns = [name for name in MEDIA_COLUMNS if name in (dataset.column_names or ())]
    if not columns or not isinstance(source, str | Path) or not place.exists():
        return dataset
    folder = place if place.is_dir() else place.parent

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(item) for item in value]
        is_path = isinstance(value, str) and not value.startswith(("data:", "http://", "https://"))
        return str(folder / value) if is_path else value

    for name in columns:
        if not _holds_text((dataset.features or {}).get(name)):
            continue
        if hasattr(dataset, "__len__"):
            dataset = dataset.remove_columns(name).add_column(name, [resolved(value) for value in dataset[name][:]])
        else:
            change = lambda row, name=name: {name: resolved(row[name])}
            dataset = dataset.map(change, features=dataset.features)
    return dataset


def _holds_text(feature: Any) -> bool:
    """True for a column of text, or of lists of text, nested to any depth."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return getattr(feature, "dtype", None) in ("string", "large_string")
