"""Files of rows: their bytes by path or `data:` address, and paths relative to the data set's file."""

import base64
import binascii
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as compute

from covey.data.media.kinds import KINDS, MEDIA_COLUMNS, Kind
from covey.errors import DataError
from covey.files.bounded import read_bytes

_MOST_BYTES = 64 << 20
"""Most bytes of one file."""
_BATCH = 1000


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


@contextmanager
def readable(noun: str, where: str) -> Iterator[None]:
    """Context in which any exception is a DataError: readers of formats raise anything on a damaged file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where} cannot be read as {noun} ({reason_of(error)}); mend or remove it.") from error


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
        return read_bytes(text, _MOST_BYTES, DataError, advice=f"the most for one {kind.noun}; make it smaller")
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def expect_files(dataset: Any, num_rows: int, where: Callable[[int], str]) -> None:
    """Raise DataError for the first path in a media column that leads to no file, a folder, or a file of no or too many bytes.

    Files are not read, so their content may still be damaged. `where`: name of a row in the sentence. Rows that a function makes
    (`Dataset.set_transform`) are not looked at: it may open what the column names.
    """
    present = set() if dataset.format["type"] == "custom" else set(dataset.column_names or ())
    for kind, column in ((each, name) for each in KINDS for name in each.columns if name in present):
        table = dataset.select_columns([column]).with_format("arrow")
        for start in range(0, num_rows, _BATCH):
            values = table[start : min(start + _BATCH, num_rows)][column]
            for row, path in _paths(values):
                if path is not None and not path.startswith("data:") and _is_unfit(path):
                    content_of(path, kind, f"{where(start + row)}: its {kind.noun}")


def _paths(values: Any) -> Iterator[tuple[int, str | None]]:
    """Row and path of each item of a chunked array; None where its bytes are in the table, or datasets opens an address (`zip://...`)."""
    rows = pyarrow.array(range(len(values)))
    while pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type):
        rows, values = rows.take(compute.list_parent_indices(values)), compute.list_flatten(values)
    is_feature = pyarrow.types.is_struct(values.type) and {"bytes", "path"} <= {field.name for field in values.type}
    if is_feature:
        in_table = compute.is_valid(compute.struct_field(values, "bytes"))
        values = compute.if_else(in_table, None, compute.struct_field(values, "path"))
    if not (pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type)):
        return iter(())
    paths = (None if is_feature and "://" in (path or "") else path for path in values.to_pylist())
    return zip(rows.to_pylist(), paths, strict=True)


def _is_unfit(path: str) -> bool:
    try:
        status = os.stat(os.path.expanduser(path))  # a Path takes ten times as long
    except (OSError, ValueError):
        return True
    is_short = stat.S_ISREG(status.st_mode) and not 0 < status.st_size <= _MOST_BYTES
    return is_short or stat.S_ISDIR(status.st_mode)


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
