"""A sample of completions on the terminal, as `log_completions` asks: prompt, completion, rewards, advantage."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from covey.data.rendering import content_text
from covey.monitor.trackers import Trackers
from covey.process.terminal import safe
from covey.runs import RunFolder
from covey.runs.completions import table_of
from covey.types import Group


def completions_shower(
    args: Any, reward_names: Sequence[str], folder: RunFolder | None, trackers: Trackers
) -> Callable[[int, Sequence[Group]], None]:
    """Callback for each logged step and its groups: prints, writes and sends them as `log_completions` asks, or a no-op.

    `folder`: of the main process, None on the others. `trackers` get one row a completion, of each prompt one with `log_unique_prompts`.
    """
    if not args.log_completions or folder is None:
        return lambda step, groups: None
    limit, unique = args.num_completions_to_print, args.log_unique_prompts

    def show(step: int, groups: Sequence[Group]) -> None:
        show_completions(step, groups, reward_names=reward_names, limit=limit, unique_prompts=unique)
        folder.write_completions(step, groups, reward_names)
        if trackers.takes_tables:
            trackers.send_completions(step, completions_frame(step, groups, reward_names, unique_prompts=unique))

    return show


def completions_frame(step: int, groups: Sequence[Group], reward_names: Sequence[str], *, unique_prompts: bool) -> Any:
    """DataFrame of the step's completions in the columns of `completions/`, messages as lines of text.

    One completion of each prompt with `unique_prompts`.
    """
    frame = table_of(step, groups, reward_names).to_pandas()
    line = lambda message: f"{message['role']}: {message['content']}"
    for name in ("prompt", "completion"):
        frame[name] = [cell if isinstance(cell, str) else "\n".join(map(line, cell)) for cell in frame[name]]
    return frame[~frame["prompt"].duplicated()] if unique_prompts else frame


def show_completions(
    step: int,
    groups: Sequence[Group],
    *,
    reward_names: Sequence[str],
    limit: int | None = None,
    unique_prompts: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Print a table of the step's completions to stderr (or `stream`).

    At most `limit` rows, taken from all groups in turn; one completion of each prompt with `unique_prompts`. A reward
    that did not score is shown as "-". Text of the model is shown, never obeyed.
    """
    table = Table(title=f"completions of step {step}", show_lines=True)
    for heading in ("prompt", "completion", *reward_names, "advantage"):
        table.add_column(heading, overflow="fold")
    for row in rows(groups, len(reward_names), limit, unique_prompts):
        table.add_row(*(Text(cell) for cell in row))
    Console(file=stream or sys.stderr).print(table)


def rows(groups: Sequence[Group], num_rewards: int, limit: int | None, unique_prompts: bool) -> list[tuple[str, ...]]:
    """The cells of the table: one row a completion, the first of every group before the second of any."""
    by_group = [list(_rows_of(group, num_rewards)) for group in groups]
    if unique_prompts:
        first = {cells[0][0]: cells[0] for cells in reversed(by_group) if cells}
        by_group = [[cells] for cells in reversed(first.values())]
    in_turn = [cells for turn in zip_longest(*by_group) for cells in turn if cells is not None]
    return in_turn if limit is None else in_turn[:limit]


def _rows_of(group: Group, num_rewards: int) -> Iterator[tuple[str, ...]]:
    question = group.prompt.raw
    line = lambda message: f"{message['role']}: {content_text(message.get('content'))}"
    prompt = question if isinstance(question, str) else "\n".join(map(line, question))
    for g, completion in enumerate(group.completions):
        scored = [math.nan] * num_rewards if group.recorded is None else group.recorded[g].tolist()
        yield safe(prompt), safe(completion.text), *map(_number, scored), _number(group.mean_advantage(g))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
