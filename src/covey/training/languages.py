"""`group_languages`: options checked, and columns of the training set."""

from __future__ import annotations

from typing import Any

from covey.data.together import columns_of, refuse_missing_languages
from covey.errors import ConfigError
from covey.monitor import refuse_unknown_columns


def check_columns(args: Any, dataset: Any, agents: Any, scorer: Any) -> None:
    """Raise CoveyError if the training set lacks a column needed by a reward, a slice or `group_languages`."""
    if dataset is None:
        return
    columns = dataset.column_names
    refuse_unknown_columns(args, columns)
    if args.group_languages and columns is not None:
        refuse_missing_languages(columns, args.group_languages)
        columns = columns_of(columns, args.group_languages)
    scorer.check(agents.columns(columns))


def languages_of(args: Any, algorithm: Any) -> tuple[str, ...]:
    """The languages that share a group, () for none. Raises ConfigError for incompatible options."""
    languages = tuple(args.group_languages or ())
    if not languages:
        return ()
    count = len(languages)
    if count < 2 or len(set(languages)) < count:
        raise ConfigError(f"group_languages={list(languages)} must name at least two languages, each once.")
    if args.num_generations % count:
        near = max(count, args.num_generations // count * count)
        raise ConfigError(
            f"num_generations={args.num_generations} completions do not share out among {count} languages; take {near} or {near + count}."
        )
    for name, is_given in (
        ("dynamic_sampling", args.dynamic_sampling),
        ("advantage_slices", args.advantage_slices),
        ("an algorithm that needs a greedy answer", algorithm.needs.greedy),
    ):
        if is_given:
            raise ConfigError(
                f"group_languages judges a question over its languages, which {name} does not; leave one out."
            )
    return languages
