"""Lists of groups, single groups, and the distribution of rewards over the steps."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from covey.errors import RunFolderError
from covey.monitor.view.groups import GroupIndex, read_columns, select
from covey.monitor.view.records import cut, shown
from covey.monitor.view.search import prompts_of, search
from covey.monitor.view.token_text import pieces, tokenizer_file
from covey.runs.previews import FOLDERS

_PLAIN = (
    "step", "group", "size", "reward", "lowest", "highest", "spread", "advantage", "length", "truncated",
    "change",
)  # fmt: skip
_SECONDS = (0.06, 0.25)
"""Seconds that a request searches: briefly for a first answer, longer where the reader has one and waits for the rest."""
_MOST_COMPLETIONS = 1024
_MOST_MEDIA = 64
_LONGEST_TEXT = 400_000
_HEAD = (
    "completion", "finish", "num_tokens", "reward", "advantage", "version", "source", "completion_index",
    "branch_of",
)  # fmt: skip


def rows(
    index: GroupIndex, filters: Mapping[str, Any], *, sort: str, text: str, start: int, most: int
) -> dict[str, Any]:
    """At most `most` groups from place `start` of the order on, and `next`, where to go on (null: that was all).

    With a text to look for, a request does a bounded piece of work: few or no rows and a `next` mean that there is more to look at.
    """
    table = index.table()
    order = select(table, filters, sort)
    if text:
        hits = search(index, table, order, text, start=start, most=most, seconds=_SECONDS[start > 0])
        places, after = hits.places, hits.at
    else:
        places = order[start : start + most].tolist()
        after = start + len(places)
    texts = prompts_of(index, table, places)
    return {
        "rows": [
            {name: table[place][name].item() for name in _PLAIN} | {"uid": str(table[place]["uid"])} | beginning
            for place, beginning in zip(places, texts, strict=True)
        ],
        "next": after if after < len(order) else None,
        "matching": len(order),
        "groups": len(table),
        "completions": int(table["size"].sum()),
        "files_left": index.pending,
    }


def group_of(run: Path, index: GroupIndex, step: int, group: int) -> dict[str, Any]:
    """The prompt and every completion of a group, with per-token columns. RunFolderError when it is not there."""
    path = index.path_of(step)
    try:
        table = read_columns(path)
        table = table.filter(pc.equal(table["group"], group))
        whole = table.slice(0, _MOST_COMPLETIONS).to_pylist()
        rows = [_sound(row) for row in whole]
        columns, messages = (json.loads((rows and whole[0].get(name)) or "null") for name in ("columns", "messages"))
        media = [_media(row, messages) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, pa.ArrowException) as error:
        raise RunFolderError(f"The rollouts of step {step} cannot be read ({error}).") from error
    if not rows:
        raise RunFolderError(f"Step {step} has no group {group}.")
    tokenizer = tokenizer_file(run)
    first = rows[0]
    return {
        "step": step,
        "group": group,
        "prompt": first.get("prompt"),
        "prompt_uid": first.get("prompt_uid"),
        "columns": {name: shown(value) for name, value in columns.items()} if isinstance(columns, dict) else {},
        "media": media[0][0],
        "completions": [
            _completion(row, tokenizer) | {"media": shown} for row, (_, shown) in zip(rows, media, strict=True)
        ],
        "left_out": table.num_rows - len(rows),
        "has_tokenizer": tokenizer is not None,
        **_elsewhere(index, step, group),
    }


def _media(row: Mapping[str, Any], messages: Any) -> tuple[list[str], list[str]]:
    """Names of the prompt's media, as many as its messages have parts of each kind, and of those that tools answered with."""
    contents = [message.get("content") for message in messages or () if isinstance(message, Mapping)]
    kinds = [p.get("type") for parts in contents if isinstance(parts, list) for p in parts if isinstance(p, dict)]
    prompt, answers = list[str](), list[str]()
    for folder in FOLDERS:
        names = [name for name in json.loads(row.get(folder) or "[]") if isinstance(name, str)]
        count = len(names) if messages is None else kinds.count(folder.removesuffix("s"))
        prompt, answers = prompt + names[:count], answers + names[count:]
    return prompt[:_MOST_MEDIA], answers[:_MOST_MEDIA]


def _sound(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with texts of bounded length; a list by token holds numbers, or is left out."""
    bounded = {name: cut(value, _LONGEST_TEXT) if isinstance(value, str) else value for name, value in row.items()}
    plain = {name: value if isinstance(value, list | str) else shown(value) for name, value in bounded.items()}
    is_number = lambda value: value is None or isinstance(value, bool | int | float)
    return {name: value for name, value in plain.items() if not isinstance(value, list) or all(map(is_number, value))}


def _completion(row: Mapping[str, Any], tokenizer: Path | None) -> dict[str, Any]:
    ids = row.get("token_ids") or []
    lists = {name: value for name, value in row.items() if isinstance(value, list) and name != "token_ids"}
    return {
        **{name: row.get(name) for name in _HEAD},
        "rewards": {name.removeprefix("reward/"): row[name] for name in row if name.startswith("reward/")},
        "extras": {name.removeprefix("extra/"): row[name] for name in row if name.startswith("extra/")},
        "conversation": conversation_of(row.get("conversation")),
        "pieces": _pieces(tokenizer, ids),
        "token_ids": ids,
        "per_token": _per_token(lists),
    }


def _pieces(tokenizer: Path | None, ids: Sequence[int]) -> list[str] | None:
    if tokenizer is None:
        return None
    try:
        return pieces(tokenizer, ids)
    except RunFolderError:  # the text is shown as a whole
        return None


def _per_token(lists: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Per-token columns of the file, and differences derived from them."""
    columns = {name.removeprefix("token/"): value for name, value in lists.items()}
    sampled, learned, reference = (columns.get(name) for name in ("logprobs", "old_logp", "ref_logp"))
    if sampled and learned and len(sampled) == len(learned):
        gap = np.array(learned, float) - np.array(sampled, float)
        columns["learner - sampler"] = gap.tolist()
    now = learned or sampled
    if now and reference and len(now) == len(reference):
        gaps = np.array(reference, float) - np.array(now, float)
        columns["kl"] = (np.exp(gaps) - gaps - 1).tolist()
    return columns


def _elsewhere(index: GroupIndex, step: int, group: int) -> dict[str, Any]:
    """`elsewhere`, groups of the same prompt, at most the 100 newest, and `visits`, how many there are."""
    table = index.table()
    here = np.flatnonzero((table["step"] == step) & (table["group"] == group))
    same = np.flatnonzero(table["uid"] == table["uid"][here[0]]) if len(here) else here
    rows = [{name: table[name][place].item() for name in ("step", "group", "reward")} for place in same[-100:]]
    return {"elsewhere": rows, "visits": len(same)}


def spread_of(index: GroupIndex, points: int) -> dict[str, Any]:
    """By bucket of steps: the 0, 10, 25, 50, 75, 90 and 100% quantiles of the groups' mean rewards, and the shares of groups
    whose completions all have one reward, apart by whether it is the highest of the run, and of groups that carry signal."""
    table = index.table()
    table = table[np.isfinite(table["reward"])]
    if not len(table):
        return {"steps": [], "quantiles": [], "signal": [], "all_best": [], "all_same": []}
    last = int(table["step"][-1])
    width = max(1, -(-(last + 1) // points))
    starts = np.flatnonzero(np.diff(table["step"] // width, prepend=-1))
    best = table["highest"].max()
    parts = np.split(table, starts[1:])
    flat = [part["spread"] <= 1e-9 for part in parts]
    high = [part["lowest"] >= best for part in parts]
    return {
        "steps": [int(part["step"][0]) for part in parts],
        "quantiles": [np.quantile(part["reward"], (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)).tolist() for part in parts],
        "signal": [float((~is_flat).mean()) for is_flat in flat],
        "all_best": [float((is_flat & is_high).mean()) for is_flat, is_high in zip(flat, high, strict=True)],
        "all_same": [float((is_flat & ~is_high).mean()) for is_flat, is_high in zip(flat, high, strict=True)],
    }


_MOST_MESSAGES = 200
_LONGEST = 20_000


def conversation_of(text: Any) -> list[dict[str, Any]] | None:
    """Messages as `role`, `content`, and of calls `name` and `arguments`, bounded; None where the row holds no conversation."""
    if not isinstance(text, str):
        return None
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(messages, list):
        return None
    read = [_message(message) for message in messages[:_MOST_MESSAGES] if isinstance(message, Mapping)]
    left = len(messages) - _MOST_MESSAGES
    return [*read, _message({"content": f"{left:,} more messages are not shown."})] if left > 0 else read


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return {
        "role": _text(message.get("role")),
        "name": _text(message.get("name")),
        "content": _text(message.get("content")),
        "calls": [
            {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))}
            for function in functions[:_MOST_MESSAGES]
            if isinstance(function, Mapping)
        ],
    }


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return cut(text, _LONGEST)
