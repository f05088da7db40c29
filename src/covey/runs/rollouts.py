"""`rollouts/step-000010.parquet`: completions of a step, one a row, for pandas, DuckDB and the dashboard.

Columns: `step`, `prompt_uid`, `group` and `completion_index` (places), `prompt`, `messages` (JSON, of chats), `conversation` (JSON, of episodes of several turns) and `branch_of` (the completion
whose advantage it has), `completion`, `finish`, `version`, `source`,
`num_tokens`, `reward` (the weighted sum that advantages were made of, after normalization and clipping; with
`multi_objective_aggregation="normalize_then_sum"` they are made of each reward's own advantages, and this is the weighted sum
of the rewards), `reward/<function>` as it gave it (null: not scored), `advantage`, the data set's columns as JSON,
`images`, `audios`, `videos` (JSON: names of files in the folders of these names, of prompts with media), `extra/<name>`, and lists with one entry a token: `prompt_ids` (of the prompt), `token_ids`, and those that are known of `logprobs`, `old_logp`, `ref_logp`,
`values`, `mask`, `advantages`, `token/<name>` (of what the learner computed: `token/entropy`, in nats, and `token/teacher_gap`, a teacher's log-probability minus the policy's).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from covey.errors import RunFolderError
from covey.runs.evaluations import total_of
from covey.runs.manifest import number_or_json, to_json
from covey.runs.previews import FOLDERS, folder_of
from covey.runs.step_files import path_of as path_of
from covey.runs.step_files import steps as steps
from covey.runs.step_files import truncate_to as truncate_to
from covey.runs.step_files import write_table

if TYPE_CHECKING:
    from torch import Tensor

    from covey.types import Completion, Group, Prompt, TokenNumbers

Row = TypeVar("Row", bound=Mapping[str, Any])
_PER_TOKEN = ("logprobs", "old_logp", "ref_logp", "values", "mask", "observations")


def write(folder: Path, step: int, groups: Sequence[Group], reward_names: Sequence[str], **options: Any) -> Path:
    """Write the file of this step, whole or not at all, and return its path. `options` as in `table_of`. OSError when the disk refuses."""
    return write_table(path_of(folder, step), table_of(step, groups, reward_names, **options))


def table_of(
    step: int,
    groups: Sequence[Group],
    reward_names: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    per_token: TokenNumbers | None = None,
) -> pa.Table:
    """The rows that `write` writes.

    `weights` [R] of the total of groups that have no `totals`, ones by default. `per_token` adds columns: for each name, the
    numbers [T] of each completion of each group.
    """
    members = [(p, g, group, done) for p, group in enumerate(groups) for g, done in enumerate(group.completions)]
    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * len(members), pa.int64()),
        "prompt_uid": _texts(group.prompt.uid for _, _, group, _ in members),
        "group": pa.array([p for p, _, _, _ in members], pa.int32()),
        "completion_index": pa.array([g for _, g, _, _ in members], pa.int32()),
        "prompt": _texts(plain_prompt(group.prompt) for _, _, group, _ in members),
        **_messages(groups),
        "completion": _texts(done.text for _, _, _, done in members),
        "finish": _texts(done.finish for _, _, _, done in members),
        "version": pa.array([done.version for _, _, _, done in members], pa.int64()),
        **_episodes(groups),
        "source": _texts(done.source for _, _, _, done in members),
        "num_tokens": pa.array([done.num_tokens for _, _, _, done in members], pa.int32()),
        **_rewards(groups, reward_names, weights),
        **_advantages(groups),
        "columns": _texts(json.dumps(to_json(_without_media(group.prompt))) for _, _, group, _ in members),
        **_media(groups),
        **_extras(groups),
        "prompt_ids": pa.array([list(group.prompt.token_ids) for _, _, group, _ in members], pa.list_(pa.int64())),
        "token_ids": pa.array([done.token_ids.numpy() for _, _, _, done in members], pa.list_(pa.int64())),
        **_token_columns([done for _, _, _, done in members]),
    }
    for name, tensors in (per_token or {}).items():
        rows = [None if row is None else row[: done.num_tokens] for tensor, group in zip(tensors, groups, strict=True)
                for row, done in zip(tensor, group.completions, strict=True)]  # fmt: skip
        columns[f"token/{name}"] = _lists(rows)
    return pa.table(columns)


def is_due(step: int, every: int) -> bool:
    """True if the rollouts of a step are written: the first, and every `every`-th; 0 writes none."""
    return every > 0 and (step == 1 or step % every == 0)


def read(path: Path, columns: str = "") -> list[dict[str, Any]]:
    """The rows of one file, in order, with the columns that match this pattern from the start. RunFolderError for a missing or damaged file."""
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if re.match(columns, name)]
            rows: list[dict[str, Any]] = file.read(columns=names).to_pylist()
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are ValueErrors
        raise RunFolderError(f"{path} cannot be read as rollouts ({error}); the other steps still can.") from error
    return rows


def read_each(folder: Path, steps: Sequence[int], columns: str = "") -> Iterator[list[dict[str, Any]]]:
    """`read` of each step, in this order; of those that the run has removed meanwhile (`thin`, a resume) none."""
    for step in steps:
        try:
            yield read(path_of(folder, step), columns)
        except RunFolderError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise


def by_group(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each group of one file, in order."""
    members: dict[int, list[Row]] = {}
    for row in rows:
        members.setdefault(row["group"], []).append(row)
    return list(members.values())


def thin(folder: Path, limit: int) -> None:
    """Remove every second file of the older half while there are more than `limit`, never the first.

    The newest are all there; the further back, the sparser. A run of any length keeps at most `limit` files.
    """
    while len(present := steps(folder)) > limit:
        for step in present[1 : max(3, len(present) // 2) : 2]:
            path_of(folder, step).unlink(missing_ok=True)


def plain_prompt(prompt: Prompt) -> str:
    """The prompt's text, or its messages as `role: content`, a line each."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n".join(f"{message.get('role')}: {_content(message.get('content'))}" for message in prompt.messages)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # parts of a message: text, and media that have none
        return " ".join(str(part.get("text", f"<{part.get('type')}>")) for part in content if isinstance(part, Mapping))
    return json.dumps(to_json(content))


def _without_media(prompt: Prompt) -> dict[str, Any]:
    """The columns of the prompt's row, but for media, which are files."""
    media = {name for folder in FOLDERS for name in (folder, folder.removesuffix("s"))}
    return {name: value for name, value in prompt.columns.items() if not (prompt.media and name in media)}


def _media(groups: Sequence[Group]) -> dict[str, pa.Array]:
    """`images`, `audios` and `videos`: names of each prompt's files in these folders as JSON, if a prompt has any."""
    shown = [done.media or group.prompt.media for group in groups for done in group.completions]
    names = [() if media is None else media.names for media in shown]
    return {
        folder: _texts(json.dumps([name for name in row if folder_of(name) == folder]) for row in names)
        for folder in FOLDERS
        if any(folder_of(name) == folder for row in names for name in row)
    }


def _rewards(groups: Sequence[Group], names: Sequence[str], weights: Sequence[float] | None) -> dict[str, pa.Array]:
    weights = [1.0] * len(names) if weights is None else weights
    listed = lambda group, scores: (
        [[math.nan] * len(names)] * group.size if scores is None else scores.double().tolist()
    )
    rows = [row for group in groups for row in listed(group, group.recorded)]
    recorded = [total for group in groups for total in (group.totals.tolist() if group.totals is not None else ())]
    is_recorded = len(recorded) == len(rows)
    compared = [row for group in groups for row in listed(group, group.rewards)]
    totals = [_or_null(total) for total in recorded] if is_recorded else [total_of(row, weights) for row in compared]
    columns = {"reward": pa.array(totals, pa.float64())}
    for r, name in enumerate(names):
        name = f"reward/{name}" if f"reward/{name}" not in columns else f"reward/{name}#{r}"
        columns[name] = pa.array([_or_null(row[r]) for row in rows], pa.float64())
    return columns


def _advantages(groups: Sequence[Group]) -> dict[str, pa.Array]:
    """`advantage`, one number a completion (its mean where it differs by token), and then `advantages` by token."""
    if any(group.advantages is None for group in groups):
        return {}
    means = [_or_null(group.mean_advantage(g)) for group in groups for g in range(group.size)]
    by_token = [
        (group.advantages, group) for group in groups if group.advantages is not None and group.advantages.ndim == 2
    ]
    rows = [
        row[: done.num_tokens] for each, group in by_token for row, done in zip(each, group.completions, strict=True)
    ]
    return {"advantage": pa.array(means, pa.float64()), **({"advantages": _lists(rows)} if rows else {})}


def _messages(groups: Sequence[Group]) -> dict[str, pa.Array]:
    """The prompt's chat messages as JSON, where a prompt is a conversation; else no column."""
    conversations = [group.prompt.messages for group in groups for _ in group.completions]
    if all(messages is None for messages in conversations):
        return {}
    return {
        "messages": _texts(
            None if messages is None else json.dumps(to_json(list(messages))) for messages in conversations
        )
    }


def _episodes(groups: Sequence[Group]) -> dict[str, pa.Array]:
    """`conversation`, all messages of an episode as JSON, and `branch_of`, the `completion_index` whose advantage a branch has."""
    members = [(group.prompt, done) for group in groups for done in group.completions]
    if all(done.messages is None and done.episode is None for _, done in members):
        return {}
    conversations = [_conversation(prompt, done) for prompt, done in members]
    shares = [None if done.episode is None else done.episode.shares for _, done in members]
    texts = _texts(
        None if conversation is None else json.dumps(to_json(conversation)) for conversation in conversations
    )
    return {"conversation": texts, "branch_of": pa.array(shares, pa.int32())}


def _conversation(prompt: Prompt, done: Completion) -> list[Any] | None:
    if done.episode is not None and done.episode.conversation:
        return list(done.episode.conversation)
    return None if done.messages is None else [*(prompt.messages or ()), *done.messages]


def _extras(groups: Sequence[Group]) -> dict[str, pa.Array]:
    names = sorted({name for group in groups for name in group.extras})
    columns = {}
    for name in names:
        values = [number_or_json(value) for group in groups for value in group.extras.get(name, [None] * group.size)]
        if all(value is None or isinstance(value, int | float) for value in values):
            columns[f"extra/{name}"] = pa.array([None if v is None else float(v) for v in values], pa.float64())
        else:
            texts = [
                value if value is None or isinstance(value, str) else json.dumps(to_json(value)) for value in values
            ]
            columns[f"extra/{name}"] = _texts(texts)
    return columns


def _token_columns(completions: Sequence[Completion]) -> dict[str, pa.Array]:
    """Per-token quantities that at least one completion has; null for those that have not."""
    columns = {}
    for name in _PER_TOKEN:
        rows = [getattr(completion, name) for completion in completions]
        if any(row is not None for row in rows):
            columns[name] = _lists(rows)
    return columns


def _lists(rows: Sequence[Tensor | None]) -> pa.Array:
    is_mask = any(row is not None and not row.is_floating_point() for row in rows)
    kind = pa.bool_() if is_mask else pa.float32()
    cast: Callable[[Tensor], Any] = (lambda row: row.bool()) if is_mask else (lambda row: row.float())
    return pa.array([None if row is None else cast(row).cpu().numpy() for row in rows], pa.list_(kind))


def _texts(values: Iterable[str | None]) -> pa.Array:
    """UTF-8; a lone surrogate, which has no UTF-8, is written as its escape."""
    return pa.array(
        [None if value is None else value.encode("utf-8", "backslashreplace").decode() for value in values], pa.string()
    )


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else value
