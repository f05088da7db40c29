"""`traces/step-000011.jsonl`: the calls of an agent's episodes before that step, one episode a line; `.rank-1` on other processes."""

import re
from collections.abc import Iterable
from pathlib import Path

from covey.runs import step_files
from covey.runs.storage import refuse_link

FOLDER = "traces"
FILES = re.compile(r"step-(\d+)(\.rank-\d+)?\.jsonl")


def append(folder: Path, step: int, lines: Iterable[str], rank: int = 0) -> Path:
    """Add lines to the file of this step, and return its path. OSError when the disk refuses."""
    refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}{f'.rank-{rank}' if rank else ''}.jsonl"
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def thin(folder: Path, limit: int) -> None:
    """Keep the files of `limit` steps: the first, and the newest."""
    written = step_files.files(folder, FILES)
    steps = sorted({step for step, _ in written})
    gone = set(steps[1 : len(steps) - limit + 1]) if len(steps) > limit else set()
    for step, path in written:
        if step in gone:
            path.unlink(missing_ok=True)
