"""`completions/completions_00010.parquet`: completions of a logged step in the columns that TRL writes with `log_completions`.

Columns: `step`, `prompt` and `completion` (text, or messages as role and text), one for each reward by its name, one for each
name of `log_extra`, and `advantage`. `rollouts/` has more of them, with tokens.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from covey.runs.manifest import number_or_json, to_json
from covey.runs.step_files import write_table
from covey.types import Group

FOLDER = "completions"
FILES = re.compile(r"completions_(\d+)\.parquet")


def write(folder: Path, step: int, groups: Sequence[Group], reward_names: Sequence[str]) -> None:
    """Write the file of this step, whole or not at all. OSError when the disk refuses."""
    write_table(folder / f"completions_{step:05d}.parquet", table_of(step, groups, reward_names), "snappy")


def table_of(step: int, groups: Sequence[Group], reward_names: Sequence[str]) -> pa.Table:
    """One row a completion."""
    members = [(group, g) for group in groups for g in range(group.size)]
    extras = sorted({name for group in groups for name in group.extras})
    columns: dict[str, Any] = {
        "step": [step] * len(members),
        "prompt": _one_kind([_plain(group.prompt.raw) for group, _ in members]),
        "completion": _one_kind([_answer(group, g) for group, g in members]),
    }
    for r, name in enumerate(reward_names):
        columns[name] = [None if group.recorded is None else _number(group.recorded[g][r]) for group, g in members]
    for name in extras:
        columns[name] = _alike(
            [number_or_json(group.extras[name][g]) if name in group.extras else None for group, g in members]
        )
    columns["advantage"] = [_number(group.mean_advantage(g)) for group, g in members]
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def _one_kind(texts: list[Any]) -> list[Any]:
    """Texts, or messages; JSON where a mixture of data has both, since a column has one type."""
    return texts if len({type(text) for text in texts}) <= 1 else [json.dumps(to_json(text)) for text in texts]


def _answer(group: Group, g: int) -> Any:
    done = group.completions[g]
    if group.prompt.messages is None:
        return done.text
    return _plain([{"role": "assistant", "content": done.text}] if done.messages is None else done.messages)


def _plain(prompt: str | Sequence[Mapping[str, Any]]) -> Any:
    """Text as it is; of messages the role and the text, other content as JSON."""
    if isinstance(prompt, str):
        return prompt
    text = lambda content: content if isinstance(content, str) else json.dumps(to_json(content))
    return [{"role": str(message.get("role")), "content": text(message.get("content", ""))} for message in prompt]


def _alike(values: list[Any]) -> list[Any]:
    """Numbers or texts as they are; values of several kinds as JSON, since a column has one type."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return values
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    return [None if value is None else json.dumps(to_json(value)) for value in values]


def _number(value: Any) -> float | None:
    """A float; None for NaN, where a reward does not apply."""
    return None if math.isnan(value) else float(value)
