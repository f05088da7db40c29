"""Preference pairs from a run's rollouts: of each group the best completion against the worst."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from covey.data.rendering import content_text
from covey.errors import ConfigError, RunFolderError, did_you_mean
from covey.runs import rollouts
from covey.runs.upkeep import expect_folder

_COLUMNS = "reward|(step|group|prompt|messages|conversation|completion|finish)$"
"""Pattern of the columns that are read: lists with an entry a token take most of a file's time."""


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Selection of the groups that give a pair."""

    min_margin: float = 0.0
    """The best must lead by more than 0, and by at least this."""
    reward: str | None = None
    """Name of the reward to compare by; None: the total."""
    first_step: int = 0
    last_step: int | None = None
    max_per_prompt: int | None = None
    """Most pairs of one prompt, widest margins first."""
    finished_only: bool = False
    """Leave out completions that were cut at the length limit."""


@dataclass(frozen=True)
class Pairs:
    """Rows with TRL's columns for DPO, and how many groups gave none."""

    rows: Sequence[Mapping[str, Any]]
    num_groups: int
    num_level: int
    """Groups whose completions are not far enough apart."""
    num_repeated: int
    """Pairs that were there already, or beyond `max_per_prompt`."""


def preference_pairs(run: Path, options: PairOptions) -> Pairs:
    """The pairs of a run folder, in the order of its steps; the same pair is given once.

    A row has `prompt`, `chosen` and `rejected` (texts, or messages for a conversation), `score_chosen`, `score_rejected` and `step`.
    Raises RunFolderError where there are no rollouts, ConfigError for an unknown reward.
    """
    expect_folder(run)
    folder = run / "rollouts"
    written = rollouts.steps(folder)
    if not written:
        raise RunFolderError(
            f"{run} has no rollouts; give the folder of a run, such as runs/train-1, trained with --rollout-log-steps."
        )
    in_range = [s for s in written if s >= options.first_step and s <= (options.last_step or s)]
    if not in_range:
        raise RunFolderError(
            f"{run} has no rollouts of these steps; --steps must meet one from {written[0]} to {written[-1]}."
        )
    made, num_groups, num_level = list[dict[str, Any]](), 0, 0
    for rows in rollouts.read_each(folder, in_range, _COLUMNS):
        for members in rollouts.by_group(rows):
            num_groups += 1
            pair = _pair(members, options)
            num_level += pair is None
            made += [] if pair is None else [pair]
    unique = _once(made, options.max_per_prompt)
    return Pairs(unique, num_groups, num_level, len(made) - len(unique))


def _pair(members: Sequence[Mapping[str, Any]], options: PairOptions) -> dict[str, Any] | None:
    column = "reward" if options.reward is None else f"reward/{options.reward}"
    if column not in members[0]:
        names = [name.removeprefix("reward/") for name in members[0] if name.startswith("reward/")]
        raise ConfigError(
            f"The run has no reward {options.reward!r}; it has {', '.join(names)}.{did_you_mean(str(options.reward), names)}"
        )
    scored = [row for row in members if row[column] is not None]
    if options.finished_only:
        scored = [row for row in scored if row["finish"] != "length"]
    if len(scored) < 2:
        return None
    best = max(scored, key=lambda row: row[column])  # the first of equals, so that the choice is repeatable
    worst = min(scored, key=lambda row: row[column])
    margin = best[column] - worst[column]
    prompt, chosen, rejected = _texts(best, worst)
    if not margin > 0 or margin < options.min_margin or chosen == rejected or not prompt:
        return None
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "score_chosen": best[column],
        "score_rejected": worst[column],
        "step": best["step"],
    }


def _texts(best: Mapping[str, Any], worst: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt and both completions: texts, or messages, of episodes those of all turns.

    The prompt of episodes is what both show before the model's first turn, since an agent may begin with messages of its own.
    """
    prompt = json.loads(best["messages"]) if best.get("messages") else []
    parts = [_parted(row, prompt) for row in (best, worst)]
    if not prompt and None in parts:
        return best["prompt"], best["completion"], worst["completion"]
    begin = next((part[0] for part in parts if part is not None), prompt)
    answers = [[{"role": "assistant", "content": row["completion"]}] for row in (best, worst)]
    (first, chosen), (second, rejected) = (part or (begin, answer) for part, answer in zip(parts, answers, strict=True))
    size = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
    return first[:size], [*first[size:], *chosen], [*second[size:], *rejected]


def _parted(row: Mapping[str, Any], prompt: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]] | None:
    """The messages of an episode before the model's first turn, and those from it on. None without a turn, as of an agent that asked no model.

    An endpoint's form of the prompt's messages may differ in more than their texts.
    """
    chat, size = json.loads(row.get("conversation") or "[]"), len(prompt)
    texts = lambda messages: [(message["role"], content_text(message.get("content"))) for message in messages]
    starts = (start for start in range(len(chat) - size + 1) if texts(chat[start : start + size]) == texts(prompt))
    begin = next(starts, -size) + size
    turn = next((place for place in range(begin, len(chat)) if chat[place]["role"] == "assistant"), None)
    return None if turn is None else (chat[:turn], chat[turn:])


def _once(pairs: Sequence[dict[str, Any]], max_per_prompt: int | None) -> list[dict[str, Any]]:
    """Without repetitions, and of each prompt those of the widest margin, in their order."""
    key = lambda pair, *names: json.dumps([pair[name] for name in names], sort_keys=True)
    first = {key(pair, "prompt", "chosen", "rejected"): pair for pair in reversed(pairs)}
    unique = [pair for pair in pairs if first[key(pair, "prompt", "chosen", "rejected")] is pair]
    if max_per_prompt is None:
        return unique
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for pair in unique:
        by_prompt.setdefault(key(pair, "prompt"), []).append(pair)
    widest = {
        id(pair)
        for several in by_prompt.values()
        for pair in sorted(several, key=lambda item: item["score_rejected"] - item["score_chosen"])[:max_per_prompt]
    }
    return [pair for pair in unique if id(pair) in widest]
