"""JSON and CSV files as data sets whose values are those of the file: a text stays that text, a number that number."""

import csv
import io
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import datasets
import fsspec
import pyarrow
from datasets.features.features import register_feature

from covey.data.media.kinds import MEDIA_COLUMNS
from covey.errors import DataError
from covey.files.bounded import LONGEST_LINE

_SCANNED = 64 << 20
"""Bytes of a streamed file that are looked at before its first row is read."""
_INTEGERS = range(-(2**63), 2**63)
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


@dataclass
class AsWritten:
    """Feature of a column whose values differ in type: stored as JSON text, decoded to the value when a row is read."""

    pa_type: ClassVar[Any] = pyarrow.string()
    _type: str = field(default="AsWritten", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def encode_example(self, value: Any) -> str | None:
        return None if value is None else json.dumps(value)

    def decode_example(self, value: str | None, token_per_repo_id: Any = None) -> Any:
        return None if value is None else json.loads(value)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # it is marked as experimental
    register_feature(AsWritten, "AsWritten")

Rows = Iterator[Mapping[str, Any]]


def json_rows(file: Path) -> Rows:
    """Rows of a JSON file: an object a line, a list of objects, such a list in an object, or a list a column.

    Raises DataError with the number of the line.
    """
    if file.with_suffix("").suffix == ".json" or file.suffix == ".json":
        try:
            with _open(file) as content:
                whole = json.loads(content.read().decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # else there are several objects, each on a line of its own
                raise DataError(f"{file} is not JSON ({error}).") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8."
            ) from error
        except RecursionError as error:
            raise DataError(f"{file} is nested too deeply.") from error
        else:
            yield from _rows_in(whole, file)
            return
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _row_of(line, f"{file}, line {number}")


def _rows_in(whole: Any, file: Path) -> Rows:
    """Rows of one JSON value: a list of them, an object around the only such list, or an object of columns."""
    if isinstance(whole, Mapping):
        tables = {name: value for name, value in whole.items() if _is_table(value)}
        if len(tables) > 1 and len(tables) == len(whole):
            raise DataError(
                f"{file} holds several lists of rows ({', '.join(tables)}); keep each in a file of its own."
            )
        columns = _columns_in(whole)
        whole = next(iter(tables.values())) if len(tables) == 1 and "prompt" not in whole else columns or [dict(whole)]
    if not isinstance(whole, list):
        raise DataError(
            f'{file} holds a {type(whole).__name__} where a list of objects such as {{"prompt": ...}} belongs.'
        )
    for number, row in enumerate(whole):
        if not isinstance(row, Mapping):
            raise DataError(f'{file}, row {number} (counting from 0): a {type(row).__name__} where an object such as {{"prompt": ...}} belongs.')  # fmt: skip
        yield row


def _is_table(value: Any) -> bool:
    """True for a list of objects that are rows, not messages of a chat."""
    is_list = isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)
    return is_list and not any({"role", "from"} & set(row) for row in value)


def _columns_in(whole: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Rows of an object that holds a list a column, or, as pandas writes it, an object by row number a column."""
    values = [list(value.values()) if isinstance(value, Mapping) else value for value in whole.values()]
    are_numbered = all(
        not isinstance(value, Mapping) or all(key.isdigit() for key in value) for value in whole.values()
    )
    are_lists = bool(values) and all(
        isinstance(value, list) and value and len(value) == len(values[0]) for value in values
    )
    if not (are_lists and are_numbered) or any(
        isinstance(cell, Mapping) and {"role", "from"} & set(cell) for cell in values[0]
    ):
        return None
    return [dict(zip(whole, row, strict=True)) for row in zip(*values, strict=True)]


def _row_of(line: bytes, where: str) -> Mapping[str, Any]:
    """The object of a line. Raises DataError, which begins with `where`, for anything else."""
    try:
        row = json.loads(line.decode("utf-8").rstrip())
        fault = f'a {type(row).__name__} where an object such as {{"prompt": ...}} was wanted'
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
    except ValueError as error:
        fault = f"not JSON ({str(error).replace('line 1 ', '')})"
    except RecursionError:
        fault = "nested too deeply"
    else:
        if isinstance(row, dict):
            return row
    hint = "; a file that holds one list of rows is named .json" if line.lstrip().startswith(b"[") else ""
    raise DataError(f"{where}: {fault}{hint}.")


def csv_rows(file: Path) -> Rows:
    """Rows of a CSV or TSV file, every cell as its text, an empty one as None. The header tells the delimiter; a BOM is dropped."""
    csv.field_size_limit(LONGEST_LINE)
    with _open(file) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as text:
        try:
            header = text.readline()
            is_tabs = ".tsv" in file.suffixes
            delimiter = "\t" if is_tabs or ("," not in header and "\t" in header) else ","
            delimiter = ";" if "," not in header and ";" in header and not is_tabs else delimiter
            text.seek(0)
            lines = csv.reader(text, delimiter=delimiter, strict=True)
            names = [name or f"Unnamed: {place}" for place, name in enumerate(next(lines, []))]
            if len(set(names)) < len(names):
                raise DataError(f"{file} names a column twice in its header: {', '.join(names)}.")
            for cells in lines:
                if len(cells) > len(names):
                    raise DataError(
                        f"{file}, line {lines.line_num} has {len(cells)} cells, and the header {len(names)}."
                    )
                if cells:
                    yield dict.fromkeys(names) | {name: cell or None for name, cell in zip(names, cells, strict=False)}
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 ({error.reason}); save the file as UTF-8.") from error
        except csv.Error as error:
            raise DataError(f"{file}, line {lines.line_num} cannot be read as CSV: {error}.") from error


def _open(file: Path) -> Any:
    """The file's bytes, unpacked as its suffix says. DataError for a packed file whose package is missing, which would be read as it is."""
    if file.suffix.lower() == ".zst" and "zstd" not in fsspec.available_compressions():
        raise DataError(f"{file} needs the package zstandard to be unpacked: pip install zstandard.")
    return fsspec.open(str(file), "rb", compression="infer").open()


# -- types of columns ----------------------------------------------------------------------------------------------------------


def kind_of(value: Any, null: str | None = "mixed") -> Any:
    """Type of a JSON value that can be compared: a word, None of null, a tuple of a list, a dict of an object.

    `null`: of a null in an object. A struct could not tell it from a field that is not there, so such objects are kept as written.
    """
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "date" if _DATE.match(value) else "string"
    if isinstance(value, int):
        return "int64" if value in _INTEGERS else "mixed"
    if isinstance(value, float):
        return "float64"
    if isinstance(value, list):
        return (reduce(joined, (kind_of(item, null) for item in value), None),)
    if isinstance(value, Mapping):
        return {name: null if item is None else kind_of(item, null) for name, item in value.items()}
    return None


def joined(kind: Any, other: Any) -> Any:
    """Type of a column with values of both types: "mixed" where they differ."""
    if kind is None or other is None or kind == other:
        return other if kind is None else kind
    if {"string", "date"} == {kind, other} if isinstance(kind, str) and isinstance(other, str) else False:
        return "date"
    if isinstance(kind, tuple) and isinstance(other, tuple):
        return (joined(kind[0], other[0]),)
    if isinstance(kind, dict) and isinstance(other, dict) and kind.keys() == other.keys():
        return {name: joined(kind[name], other[name]) for name in kind}
    return "mixed"


def is_certain(kind: Any) -> bool:
    """True if readers that infer types read values of this type as they are."""
    if isinstance(kind, dict):
        return bool(kind) and all(map(is_certain, kind.values()))
    return is_certain(kind[0]) if isinstance(kind, tuple) else kind not in ("mixed", "date")


def scan(
    files: Sequence[Path],
    rows_of: Callable[[Path], Rows],
    kind: Callable[[Any], Any],
    join: Callable[[Any, Any], Any],
    *,
    is_whole: bool,
) -> dict[str, Any]:
    """Type of every column of the files; unless `is_whole`, of the first rows, as many as fill `_SCANNED` bytes a file."""
    kinds: dict[str, Any] = {}
    for file in files:
        read = 0
        for row in rows_of(file):
            for name, value in row.items():
                kinds[name] = join(kinds.get(name), kind(value))
            read += 0 if is_whole else len(str(row))
            if read > _SCANNED:
                break
    if not kinds:
        raise DataError(f"{files[0]} has no rows.")
    return kinds


def kind_of_cell(text: str | None) -> str | None:
    """Type of a CSV cell: a number where the text is exactly how that number is written, else text; None of an empty one."""
    if text is None or not _NUMBER.fullmatch(text):
        return None if text is None else "string"
    if text.lstrip("-").isdigit():
        return "int64" if str(int(text)) == text and int(text) in _INTEGERS else "string"
    return "float64" if repr(float(text)) == text else "string"


def joined_cells(kind: str | None, other: str | None) -> str | None:
    """Type of a CSV column with cells of both types: text if any is, "mixed" of integers and other numbers."""
    if "string" in (kind, other):
        return "string"
    kinds: str | None = joined(kind, other)
    return kinds


def _value(cell: str | None, kind: str) -> Any:
    """A cell of a column: its text if the column is text, else its number."""
    cell_kind = kind_of_cell(cell)
    if cell is None or "string" in (kind, cell_kind):
        return cell
    return int(cell) if cell_kind == "int64" else float(cell)


def as_dataset(files: Sequence[Path], reader: str, kinds: Mapping[str, Any], streaming: bool) -> Any:
    """Rows of the files as a data set whose columns are stored by their type, those of no one type as they are written."""
    features = {name: AsWritten() if streaming and kind != "string" else _feature(kind) for name, kind in kinds.items()}
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    columns = tuple((name, kind if isinstance(kind, str) else "mixed") for name, kind in kinds.items())
    arguments = {"stamps": stamps, "reader": reader, "columns": columns}
    if streaming:
        return datasets.IterableDataset.from_generator(
            _generate_rows, datasets.Features(features), gen_kwargs=arguments
        )
    cache = str(datasets.config.HF_DATASETS_CACHE)
    return datasets.Dataset.from_generator(_generate_rows, datasets.Features(features), cache, gen_kwargs=arguments)


def column_set(columns: Mapping[str, Sequence[Any]]) -> Any:
    """A data set of these columns, held in memory, its values as they are."""
    features = {name: _feature(reduce(joined, map(kind_of, values), None)) for name, values in columns.items()}
    return datasets.Dataset.from_dict(dict(columns), datasets.Features(features))


def mapped(stream: Any, change: Any, names: Collection[str], drops: Sequence[str] = (), **options: Any) -> Any:
    """The stream with `change` of its rows, in which the columns `names` are as written; others keep their type, but for `drops`.

    A stream that is mapped without types would no longer tell nulls that were written from those that Arrow filled in.
    """
    features = stream.features
    if features is not None:
        types = {name: feature for name, feature in features.items() if name not in drops}
        features = datasets.Features(types | {name: AsWritten() for name in names})
    return stream.map(change, remove_columns=list(drops), features=features, **options)


def with_structs(dataset: Any) -> Any:
    """The data set with its columns of objects as structs, those too that are kept as written for their nulls alone."""
    names, made = dataset.column_names, dataset
    for name in [name for name, feature in dataset.features.items() if isinstance(feature, AsWritten)]:
        values = dataset[name][:]
        kinds = (kind_of(value, None) for value in values)
        if not isinstance(feature := _feature(reduce(joined, kinds, None)), AsWritten):
            made = made.remove_columns(name).add_column(name, values, feature=feature)
    return made.select_columns(names)


def _feature(kind: Any) -> Any:
    if kind in ("string", "date", None):
        return datasets.Value("string")
    if isinstance(kind, str) or not is_certain(kind):
        return datasets.Value(kind) if kind in ("bool", "int64", "float64") else AsWritten()
    if isinstance(kind, tuple):
        return datasets.List(_feature(kind[0]))
    return {name: _feature(inner) for name, inner in kind.items()}


def _generate_rows(stamps: Any, reader: str, columns: Any) -> Rows:
    names = {name for name, _ in columns}
    for name, *_ in stamps:
        for row in json_rows(Path(name)) if reader == "json" else csv_rows(Path(name)):
            if reader == "csv":
                row = {column: _value(row.get(column), kind) for column, kind in columns}
            elif late := {column for column, value in row.items() if value is not None} - names:
                raise DataError(
                    f"{name}: column {min(late)!r} is not in the first rows, by which a stream is read; leave streaming out."
                )
            yield {column: row.get(column) for column, _ in columns}


def read_json(files: Sequence[Path], streaming: bool) -> Any:
    """The rows of JSON files where types must not be inferred; None where `datasets` reads every value as it is written."""
    kinds = scan(files, json_rows, kind_of, joined, is_whole=not streaming)
    is_inferred = all(".json" not in file.suffixes for file in files) and all(map(is_certain, kinds.values()))
    if is_inferred and not streaming:  # of a stream `datasets` infers columns and types from the first block alone
        return None
    if streaming:  # rows that were not scanned may hold anything
        kinds = {name: kind if name in MEDIA_COLUMNS else "mixed" for name, kind in kinds.items()}
    return as_dataset(files, "json", kinds, streaming)


def read_csv(files: Sequence[Path], streaming: bool) -> Any:
    """The rows of CSV files: numbers where the text of every cell is how that number is written, else the text."""
    kinds = scan(files, csv_rows, kind_of_cell, joined_cells, is_whole=not streaming)
    return as_dataset(files, "csv", {name: kind or "string" for name, kind in kinds.items()}, streaming)
