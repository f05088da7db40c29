"""`--columns answer=solution`: columns of a data set under the names that rewards expect; the data set of an evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import ConfigError


def column_map(pairs: Sequence[str] | None) -> dict[str, str]:
    """New name to old, from `new=old` words; empty for none.

    >>> column_map(["answer=solution"])
    {'answer': 'solution'}
    """
    renames: dict[str, str] = {}
    for pair in pairs or ():
        new, separator, old = pair.partition("=")
        if not separator or not new or not old:
            raise ConfigError(f"--columns {pair}: write new=old, such as --columns answer=solution.")
        if new in renames:
            raise ConfigError(f"--columns names {new!r} twice, as {renames[new]} and as {old}; keep one.")
        renames[new] = old
    return renames


def rows_file(named: str | None) -> Path:
    """The file that `--output` names for rows; ConfigError where it is none of the two kinds."""
    if not named:
        raise ConfigError("--output is missing: name a file that ends in .jsonl or .parquet.")
    if Path(named).suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--output {named} must be a file that ends in .jsonl or .parquet.")
    return Path(named).expanduser()


def evaluated_dataset(options: Mapping[str, Any]) -> Any:
    """The data set that `covey eval`'s options name."""
    from covey.data import load

    return load(
        options["dataset"],
        prompt_column=options["prompt_column"],
        columns=column_map(options["columns"]),
        system_prompt=options["system_prompt"],
        limit=options["max_prompts"],
    )
