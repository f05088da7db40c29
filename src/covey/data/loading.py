"""A data set of prompts from a name: found, renamed, shortened, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from covey.data.checks import check_dataset, row_of
from covey.data.sources import AnyDataset, opened, shown
from covey.errors import DataError, did_you_mean

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
) -> AnyDataset:
    """The prompts of `source`, with a column `prompt` and all others beside it for the rewards.

    `source` is a JSONL, JSON, CSV, TSV or Parquet file, a list or glob of them, a folder of them, a folder that
    `Dataset.save_to_disk` wrote, a hub id, or `demo`; `:split` may follow (`org/name:test`, `data/:train[:100]`). Without a
    split, `train` is taken, or the only one. `columns` renames, new name to old; `prompt_column` is what becomes `prompt`.
    With `system_prompt`, text prompts become chat messages after it. `limit` keeps the first rows.

    Raises DataError, in one sentence that names the input and the fix, for whatever is not there or cannot be used.
    """
    source, split = parted(source, split)
    name = shown(source)
    dataset = opened(source, split, streaming, config_name)
    dataset = _renamed(dataset, columns or {}, prompt_column, name)
    if limit is not None:
        dataset = _first(dataset, limit)
    dataset = check_dataset(dataset, name)
    return dataset if system_prompt is None else _with_system(dataset, system_prompt, name)


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


def _renamed(dataset: AnyDataset, columns: Mapping[str, str], prompt_column: str, name: str) -> AnyDataset:
    have = dataset.column_names
    renames = {new: old for new, old in columns.items() if new != old}
    if prompt_column != "prompt":
        renames["prompt"] = prompt_column
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

    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(add, with_indices=True)
    added = [add({"prompt": prompt}, index)["prompt"] for index, prompt in enumerate(dataset["prompt"])]
    return dataset.remove_columns("prompt").add_column("prompt", added)
