"""Several data sets as one, with the share of each: `mix({"math": a, "code": b}, weights={"math": 0.7, "code": 0.3})`."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import datasets

from covey.data.curriculum import NAME_COLUMN, WEIGHT_COLUMN
from covey.data.rendering import as_written
from covey.data.sources import AnyDataset
from covey.data.tables import AsWritten, mapped
from covey.errors import DataError, DataTypeError

_TERM = re.compile(r"\s*(?P<weight>\d*\.?\d+)\s*\*\s*(?P<source>\S.*?)\s*")

_NESTED = (Mapping, list, datasets.List, datasets.LargeList)
_PLUS = re.compile(r"\s+\+\s+|\+(?=\s*\d*\.?\d+\s*\*)")
"""Between two sets; without spaces only before a weight, since a name may hold a plus."""


def terms(source: Any) -> dict[str, float] | None:
    """`"0.7*a.jsonl + 0.3*b.jsonl"` as `{"a.jsonl": 0.7, "b.jsonl": 0.3}`; `None` for what is not written so."""
    if not isinstance(source, str):
        return None
    matches = [_TERM.fullmatch(part) for part in _PLUS.split(source)]
    if not all(matches):
        return None
    named = [(match["source"], float(match["weight"])) for match in matches if match]
    if len({name for name, _ in named}) < len(named):
        raise DataError(f"The mixture {source!r} names a data set twice; add its weights.")
    return dict(named)


def mix(sets: Mapping[str, AnyDataset], weights: Mapping[str, float] | None = None, *, seed: int = 42) -> AnyDataset:
    """All rows of `sets`, with a column `dataset` that names their set and `dataset_weight`, its share of the prompts drawn.

    `weights` are relative; without them a set's share is its size. A column that only some sets have is `None` for the others.
    Sets with a length are drawn in exactly these shares, each with epochs of its own. Streams are interleaved at random by
    `datasets.interleave_datasets`, until the longest has ended. Raises DataError for weights that fit no set, and for columns of
    one name and two types.
    """
    if not isinstance(sets, Mapping):
        raise DataTypeError(f"A mixture is a mapping from names to data sets, not of type {type(sets).__name__}.")
    if not sets:
        raise DataError("A mixture needs at least one data set.")
    streams = [name for name, dataset in sets.items() if not hasattr(dataset, "__len__")]
    if streams and len(streams) < len(sets):
        raise DataError(f"The mixture has streams ({', '.join(streams)}) and sets with a length; use one kind.")
    chosen = _check(weights, sets, bool(streams))
    try:
        if streams:
            total = sum(chosen.values())
            json_names = _json_names(sets.values())
            parts = [_named(dataset, name, json_names) for name, dataset in sets.items()]
            return datasets.interleave_datasets(
                parts,
                probabilities=[chosen[name] / total for name in sets],
                seed=seed,
                stopping_strategy="all_exhausted",
            )
        labelled = [_label(dataset, name, chosen[name]) for name, dataset in sets.items()]
        return datasets.concatenate_datasets(_as_json_where_one_is(labelled))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"The sets of the mixture do not fit together: {error}. Give columns of one name one type, or rename them."
        ) from error


def first_rows(sets: Mapping[str, AnyDataset], weights: Mapping[str, float], limit: int) -> dict[str, AnyDataset]:
    """The first rows of each set, `limit` in all, as its weight says; a set that is too small leaves its room to the others.

    Streams stay as they are: they are interleaved by their weights. Raises DataError for fewer rows than sets.
    """
    sizes = {name: len(dataset) for name, dataset in sets.items() if hasattr(dataset, "__len__")}
    if len(sizes) < len(sets):
        return dict(sets)
    _check(weights, sets, False)
    if limit < len(sets):
        raise DataError(f"limit is {limit}, and the mixture has {len(sets)} sets; keep at least one row of each.")
    counts = dict.fromkeys(sets, 1)
    for _ in range(min(limit, sum(sizes.values())) - len(sets)):
        open_sets = [name for name in sets if counts[name] < sizes[name]]
        counts[min(open_sets, key=lambda name: (counts[name] + 1) / weights[name])] += 1
    return {name: dataset.select(range(counts[name])) for name, dataset in sets.items()}


def _label(dataset: datasets.Dataset, name: str, weight: float) -> datasets.Dataset:
    table = dataset.remove_columns(
        [column for column in (NAME_COLUMN, WEIGHT_COLUMN) if column in dataset.column_names]
    )
    return table.add_column(NAME_COLUMN, [name] * len(table)).add_column(WEIGHT_COLUMN, [weight] * len(table))


def _as_json_where_one_is(sets: Sequence[datasets.Dataset]) -> list[datasets.Dataset]:
    """The sets, objects and lists of a column as JSON text in all where they are in one, without the nulls that Arrow filled in."""
    json_names, made = _json_names(sets), list(sets)
    for i, rows in enumerate(sets):
        nested = [name for name, feature in rows.features.items() if isinstance(feature, _NESTED)]
        for name in [name for name in nested if name in json_names]:
            values = [as_written({name: value}, rows.features)[name] for value in rows[name][:]]
            column = datasets.Dataset.from_dict({name: values}, datasets.Features({name: AsWritten()}))
            made[i] = datasets.concatenate_datasets([made[i].remove_columns(name), column], axis=1)
    return made


def _json_names(sets: Iterable[Any]) -> set[str]:
    """Columns that are JSON text in any set."""
    types = [rows.features or {} for rows in sets]
    return {name for features in types for name, feature in features.items() if isinstance(feature, AsWritten)}


def _named(stream: Any, name: str, json_names: Collection[str]) -> Any:
    """The stream with its name in each row, and with `json_names` as JSON text, without the nulls that Arrow filled in."""
    features = stream.features
    change = lambda row: {**as_written(row, features), NAME_COLUMN: name}
    return mapped(stream, change, [NAME_COLUMN, *(column for column in json_names if column in (features or {}))])


def _check(weights: Mapping[str, float] | None, sets: Mapping[str, Any], is_stream: bool) -> dict[str, float]:
    if weights is None:
        if is_stream:
            raise DataError("A mixture of streams needs weights, since their sizes are not known.")
        return {name: float(len(dataset)) for name, dataset in sets.items()}
    if set(weights) != set(sets):
        raise DataError(
            f"The weights name {sorted(weights)} and the mixture has {sorted(sets)}; give one weight for each set."
        )
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise DataError(f"The weight of {name} is {weight!r}; use a number above 0, or leave the set out.")
    return {name: float(weight) for name, weight in weights.items()}
