"""A data set of prompts from a name: found, renamed, shortened, checked."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import datasets
import numpy
import pyarrow

from covey.data.checks import check_dataset, row_of
from covey.data.layouts import with_prompts
from covey.data.live.dataset import PREFIX, LiveDataset, follow
from covey.data.media import with_paths
from covey.data.mixing import first_rows, mix, terms
from covey.data.rendering import as_written
from covey.data.sources import AnyDataset, opened, shown
from covey.data.tables import column_set, mapped
from covey.errors import DataError, did_you_mean
from covey.files.places import refuse_scheme

_BATCH = 1000
_SPLIT = re.compile(r"^(?P<source>.+?):(?P<split>[A-Za-z_][\w.\-]*(\[[^\]]*\])?)$")


def load(
    source: str | Path | Sequence[str | Path],
    *,
    split: str | None = None,
    prompt_column: str = "prompt",
    columns: Mapping[str, str] | None = None,
    system_prompt: str | None = None,
    limit: int | None = None,
    streaming: bool = False,
    config_name: str | None = None,
    live: bool = False,
) -> AnyDataset:
    """The prompts of `source`, with a column `prompt` and all others, which rewards receive.

    `source` is a JSONL, JSON, CSV, TSV or Parquet file, a list or glob of them, a folder of them, a folder that
    `Dataset.save_to_disk` wrote, a hub id, or `demo`; `:split` may follow (`org/name:test`, `data/:train[:100]`). Without a
    split, `train` is taken, or the only one. With `live`, `follow:PLACE` is a live source, a
    `covey.data.live.LiveDataset`. `0.7*a.jsonl + 0.3*b.jsonl` mixes sets, see `covey.data.mix`. `columns` renames, new name to old; `prompt_column` is what becomes `prompt`.
    With `system_prompt`, text prompts become chat messages after it. `limit` keeps the first rows, of a mixture those of each set in its share.

    Raises DataError, in one sentence that names the input and the fix, for whatever is not there or cannot be used.
    """
    renames = {**(columns or {}), **({} if prompt_column == "prompt" else {"prompt": prompt_column})}
    is_live = isinstance(source, str) and source.startswith(PREFIX)
    if is_live and not live:
        raise DataError(
            f"{source} is a live source, which has no end: it can be trained on, and nothing else; give a file."
        )
    weights = None if is_live else terms(source)
    if weights is None:
        dataset = _load_checked(source, split, renames, streaming, config_name)
    else:
        sets = {name: _load_checked(name, split, renames, streaming, config_name, is_mixed=True) for name in weights}
        dataset = mix(sets if limit is None else first_rows(sets, weights, limit), weights)
    if limit is not None:
        dataset = _first(dataset, limit)
    return dataset if system_prompt is None else _with_system(dataset, system_prompt, shown(source))


def _load_checked(
    source: Any,
    split: str | None,
    renames: Mapping[str, str],
    streaming: bool,
    config_name: str | None,
    is_mixed: bool = False,
) -> AnyDataset:
    """One source with its columns renamed; in a mixture a set that has the new name already keeps its own."""
    if isinstance(source, str) and source.startswith(PREFIX):
        return cast(AnyDataset, _follow(source, split, renames, is_mixed))
    if isinstance(source, str):
        refuse_scheme(source)
    source, split = parted(source, split)
    name = shown(source)
    dataset = opened(source, split, streaming, config_name)
    dataset, before = with_prompts(dataset, name, renames), dataset.column_names or []
    have = dataset.column_names or []
    if renames.get("prompt") in before and renames["prompt"] not in have:  # it became the prompt
        renames = {new: old for new, old in renames.items() if new != "prompt"}
    applied = {new: old for new, old in renames.items() if not (is_mixed and new in have and old not in have)}
    return with_paths(check_dataset(rename_columns(dataset, applied, name), name), source)


def _follow(source: str, split: str | None, renames: Mapping[str, str], is_mixed: bool) -> LiveDataset:
    """A live source with its columns renamed."""
    if is_mixed or split is not None:
        raise DataError(f"{source} is a live source: it has no splits and cannot be mixed; give it alone.")
    dataset = follow(source)
    changes = {old: new for new, old in renames.items() if new != old}
    renamed: LiveDataset = check_dataset(dataset.rename_columns(changes) if changes else dataset, source)
    return renamed


def parted(source: Any, split: str | None) -> tuple[Any, str | None]:
    """`path:split` in two. A source that exists as it is written has no split in it."""
    if not isinstance(source, str) or Path(source).exists():
        return source, split
    match = _SPLIT.match(source)
    if match is None or (len(match["source"]) == 1 and Path(source).drive):
        return source, split
    if split is not None and split != match["split"]:
        raise DataError(
            f"The data set {source!r} names the split {match['split']!r}, and split={split!r} another; keep one."
        )
    return match["source"], match["split"]


def rename_columns(dataset: AnyDataset, columns: Mapping[str, str], name: str) -> AnyDataset:
    """The data set with its columns renamed, new name to old. Raises DataError for one that is not there, or a name that is taken."""
    have = dataset.column_names
    renames = {new: old for new, old in columns.items() if new != old}
    for new, old in renames.items():
        if have is not None and old not in have:
            raise DataError(f"{name} has no column {old!r}; it has {', '.join(have)}.{did_you_mean(old, have)}")
        if have is not None and new in have and new not in renames.values():
            raise DataError(
                f"{name} has a column {new!r} already, so {old!r} cannot take that name; rename it first with columns=."
            )
    return dataset.rename_columns({old: new for new, old in renames.items()}) if renames else dataset


def _first(dataset: AnyDataset, limit: int) -> AnyDataset:
    if limit < 1:
        raise DataError(f"limit is {limit}; keep at least one row.")
    if isinstance(dataset, LiveDataset):
        raise DataError("A live source has no first rows to keep; leave max_prompts (limit) out and set max_steps.")
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.take(limit)
    return dataset.select(range(min(limit, len(dataset))))


def _with_system(dataset: AnyDataset, system_prompt: str, name: str) -> AnyDataset:
    """Every prompt as messages after the system prompt. A row that has one of its own is refused."""

    def add(row: dict[str, Any], index: int) -> dict[str, Any]:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if messages and messages[0]["role"] == "system":
            raise DataError(
                f"{row_of(index, name)} has a system message of its own; drop it there, or leave system_prompt out."
            )
        return {"prompt": [{"role": "system", "content": system_prompt}, *messages]}

    if isinstance(dataset, LiveDataset):
        return dataset.map(
            lambda row: {**row, **add(dict(row), 0)} if isinstance(row.get("prompt"), str | list) else row
        )
    if isinstance(dataset, datasets.IterableDataset):
        features = dataset.features
        return mapped(dataset, lambda row, index: add(as_written(row, features), index), ["prompt"], with_indices=True)
    if getattr(dataset.features["prompt"], "dtype", None) in ("string", "large_string"):
        batches = dataset.select_columns("prompt").with_format("arrow").iter(_BATCH)
        texts = (batch["prompt"].cast(pyarrow.string()).combine_chunks() for batch in batches)
        chunks = [_after_system(each, system_prompt) for each in texts]
        added = datasets.Dataset(pyarrow.table({"prompt": pyarrow.chunked_array(chunks)}))
    else:
        rows = (as_written({"prompt": prompt}, dataset.features) for prompt in dataset["prompt"][:])
        added = column_set({"prompt": [add(row, index)["prompt"] for index, row in enumerate(rows)]})
    return datasets.concatenate_datasets([dataset.remove_columns("prompt"), added], axis=1)


def _after_system(texts: Any, system_prompt: str) -> Any:
    """[N] conversations of two messages, of [N] texts, in Arrow: a million take a second, and a minute as Python's objects."""
    places = numpy.arange(2 * len(texts))
    contents = pyarrow.concat_arrays([pyarrow.array([system_prompt]), texts])
    columns = pyarrow.array(["system", "user"]).take(places % 2), contents.take(places % 2 * (places // 2 + 1))
    messages = pyarrow.StructArray.from_arrays(columns, ["role", "content"])
    return pyarrow.ListArray.from_arrays(numpy.arange(0, len(places) + 1, 2, dtype=numpy.int32), messages)
