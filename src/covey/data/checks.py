"""Is this a data set of prompts? Asked before a model is loaded, answered in one sentence."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.compute as compute

from covey.data.live.dataset import LiveDataset
from covey.data.media import MEDIA_COLUMNS, undecoded
from covey.data.prompts import check_prompt
from covey.errors import DataError, DataTypeError, MissingKeyError, did_you_mean

_BATCH = 1000
_OPTIONS = "chat_template_kwargs"


def row_of(index: int | str, name: str) -> str:
    """Name of a row in error messages: `Row 3 (counting from 0) of train.jsonl`."""
    return f"Row {index} (counting from 0) of {name}"


def row_at(dataset: Any, index: int, name: str = "the data set") -> Mapping[str, Any]:
    """A row as Python values. Raises DataError for one that cannot be converted, such as undecodable bytes or two fields of one name."""
    try:
        row: Mapping[str, Any] = dataset[index]
    except (ValueError, KeyError, OverflowError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{row_of(index, name)} cannot be read ({type(error).__name__}: {error}).") from error
    return row


def first_prompts(dataset: Any, count: int, name: str) -> Iterator[tuple[Any, Any]]:
    """Prompts and options of the chat template in the first `count` rows, None without. DataError for a row without values, as in `row_at`."""
    is_plain = isinstance(dataset, datasets.Dataset) and dataset.format["type"] is None
    names = [column for column in ("prompt", _OPTIONS) if is_plain and column in dataset.column_names]
    shown = dataset.select_columns(names) if "prompt" in names else None
    for start in range(0, count, _BATCH):
        rows = range(start, min(start + _BATCH, count))
        pairs: Any = ((row.get("prompt"), row.get(_OPTIONS)) for row in (row_at(dataset, i, name) for i in rows))
        if shown is not None:  # a row at a time takes a hundred times as long
            with contextlib.suppress(ValueError, KeyError, OverflowError):
                columns = shown[rows.start : rows.stop]
                pairs = zip(columns["prompt"], columns.get(_OPTIONS) or repeat(None))  # noqa: B905
        yield from pairs


def check_dataset(dataset: Any, name: str = "train_dataset", *, prompt_only: bool = False) -> Any:
    """The data set, once it is known to hold prompts; `None` for `None`. `prompt_only` leaves out every other column.

    Raises DataError for the wrong type, no column `prompt`, no rows, or a row without a usable prompt (named by its number).
    Rows of a streamed data set are checked when they are drawn.
    """
    if dataset is None:
        return None
    _check_type(dataset, name)
    dataset = undecoded(dataset)
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        near = did_you_mean("prompt", columns) or _advice(columns)
        has = f"has no column 'prompt'; it has {', '.join(columns)}.{near}" if columns else "has no columns at all."
        raise MissingKeyError(f"{name} {has}")
    if isinstance(dataset, datasets.Dataset):
        _check_rows(dataset, name)
    if not prompt_only:
        return dataset
    return dataset.select_columns(["prompt", *(name for name in MEDIA_COLUMNS if name in (columns or ()))])


def _check_type(dataset: Any, name: str) -> None:
    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset | LiveDataset):
        return
    if isinstance(dataset, Mapping) and (
        not dataset or not all(isinstance(column, list) for column in dataset.values())
    ):
        splits = ", ".join(map(str, dataset))
        if not splits:
            raise DataTypeError(
                f"{name} is an empty {type(dataset).__name__}, without a split; pass a datasets.Dataset."
            )
        raise DataTypeError(
            f"{name} holds several splits ({splits}); pass one of them, such as dataset[{next(iter(dataset), '')!r}]."
        )
    kind = type(dataset).__name__
    raise DataTypeError(f"{name} is a {kind}, not a datasets.Dataset or IterableDataset; {_remedy(dataset, kind)}.")


def _remedy(dataset: Any, kind: str) -> str:
    if isinstance(dataset, str | Path):
        return f"load it with covey.data.load({str(dataset)!r})"
    maker = {"dict": "from_dict(columns)", "DataFrame": "from_pandas(frame)", "generator": "from_list(list(rows))"}
    return f"wrap it with datasets.Dataset.{maker.get(kind, 'from_list(rows)')}"


_QUESTIONS = ("question", "problem", "instruction", "query", "task", "input", "text", "source", "content")


def _advice(columns: Sequence[str]) -> str:
    """Sentence about the column that holds the prompts: its option, by a name that is one of questions."""
    near = next((column for word in _QUESTIONS for column in columns if column.lower() == word), None)
    near = near or next((column for word in _QUESTIONS for column in columns if word in column.lower()), "COLUMN")
    return f" Name the one that holds the question with prompt_column= (--prompt-column {near})."


def _check_rows(dataset: datasets.Dataset, name: str) -> None:
    if not len(dataset):
        raise DataError(f"{name} is empty: it has the columns {', '.join(dataset.column_names)} and no rows.")
    prompts = dataset.select_columns(["prompt"])
    if _are_texts(prompts):
        return
    for start in range(0, len(prompts), _BATCH):
        for index, prompt in enumerate(_values(prompts, start, name), start):
            check_prompt(prompt, row_of(index, name))


def _values(prompts: datasets.Dataset, start: int, name: str) -> list[Any]:
    """The prompts of up to 1,000 rows; a row whose bytes are no text is named."""
    try:
        return list(prompts[start : start + _BATCH]["prompt"])
    except UnicodeDecodeError as error:
        for index in range(start, min(start + _BATCH, len(prompts))):
            with contextlib.suppress(UnicodeDecodeError):
                prompts[index]
                continue
            raise DataError(f"{row_of(index, name)} is not UTF-8; save the file as UTF-8.") from error
        raise
    except ValueError as error:  # such as two fields of one name in a message
        raise DataError(f"{name} has prompts that cannot be read ({error}).") from error


def _are_texts(prompts: datasets.Dataset) -> bool:
    """True if the column is text without nulls and blanks, computed in Arrow without reading rows in Python."""
    feature = prompts.features["prompt"]
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        return False
    for batch in prompts.with_format("arrow").iter(100_000):
        texts = batch["prompt"]
        try:
            blank = compute.any(compute.equal(compute.utf8_length(compute.utf8_trim_whitespace(texts)), 0)).as_py()
        except pyarrow.ArrowInvalid:  # bytes that are no UTF-8
            return False
        if texts.null_count or blank:
            return False
    return True


def length_of(dataset: Any) -> int | None:
    """Rows of a data set; None of a stream."""
    return len(dataset) if hasattr(dataset, "__len__") else None
