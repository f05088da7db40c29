"""Evaluation results, question by question, so that two runs can be compared on the same questions.

`evaluations.jsonl` holds the metrics, one line an evaluation; `evaluations/<set>/step-000010.parquet` one row an answer:
`question` (a digest of the prompt as written and of its media, the same in every run), `uid`, `completion_index`, `reward` (weighted total, null:
not scored), `reward/<function>`, `num_tokens`, `finish`. Texts are in the training rollouts; here they would fill the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.errors import RunFolderError
from covey.runs import step_files
from covey.runs.manifest import to_json
from covey.runs.metrics import JsonLines, line_of
from covey.runs.storage import refuse_link

if TYPE_CHECKING:  # readers should not wait for torch
    from covey.types import Group

FOLDER = "evaluations"
LOG = "evaluations.jsonl"


def rows_of(groups: Sequence[Group], names: Sequence[str], weights: Sequence[float]) -> list[dict[str, Any]]:
    """One row an answer, in the order of the groups."""
    rows = []
    for group in groups:
        raw, media = group.prompt.raw, group.prompt.media
        question = digest(raw if media is None else {"prompt": raw, **media.digests})
        rewards = [] if group.recorded is None else group.recorded.double().tolist()
        for index, completion in enumerate(group.completions):
            scored = dict(zip(names, rewards[index], strict=True)) if rewards else dict.fromkeys(names, math.nan)
            is_lost = group.lost is not None and bool(group.lost[index])  # its sum would lack a reward that failed
            rows.append(
                {
                    "question": question,
                    "uid": group.prompt.uid,
                    "completion_index": index,
                    "reward": None if is_lost else total_of(list(scored.values()), weights),
                    **{f"reward/{name}": None if math.isnan(value) else value for name, value in scored.items()},
                    "num_tokens": completion.num_tokens,
                    "finish": completion.finish,
                }
            )
    return rows


def write(folder: Path, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the answers of one evaluation, whole or not at all, and return the path. OSError when the disk refuses."""
    import pyarrow as pa

    refuse_link(folder)
    return step_files.write_table(path_of(folder, name, step), pa.Table.from_pylist([dict(row) for row in rows]))


def path_of(folder: Path, name: str, step: int) -> Path:
    """The file of the set `name` at a step; `folder` is the run's `evaluations`."""
    return step_files.path_of(folder / name.replace("/", "_"), step)


def record(run: Path, step: int, name: str, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
    """Add an evaluation to a run that has ended: its line, and every answer's rewards."""
    line = {"step": step, "time": round(time.time(), 3), "set": name, **metrics}
    write(run / FOLDER, step, name, rows)
    JsonLines(run / LOG)  # removes a line that was torn
    with (run / LOG).open("ab") as log:
        log.write(line_of(line))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of one file. RunFolderError for one that is missing or damaged."""
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are ValueErrors
        raise RunFolderError(f"{path} cannot be read as an evaluation ({error}).") from error
    return rows


def steps(folder: Path, name: str = "eval") -> list[int]:
    """Steps at which the set `name` was evaluated, in order; `folder` is the run's `evaluations`."""
    return step_files.steps(folder / name)


def sets(folder: Path) -> list[str]:
    """Names of the sets that were evaluated, `eval` for a single one."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def by_question(rows: Sequence[Mapping[str, Any]], column: str = "reward") -> dict[str, float]:
    """Mean over a question's answers by question; NaN where none was scored. The second row of a text is `<digest>#2`."""
    texts: dict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        texts[row["question"]][row["uid"]] = None
    place = {
        (question, uid): question if i == 0 else f"{question}#{i + 1}"
        for question, uids in texts.items()
        for i, uid in enumerate(uids)
    }
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        score = row.get(column)
        values[place[row["question"], row["uid"]]] += [] if score is None else [float(score)]
    return {key: sum(scores) / len(scores) if scores else math.nan for key, scores in values.items()}


def truncate_to(folder: Path, step: int) -> None:
    """Remove the files of later steps, which a resumed run will write again."""
    for name in sets(folder):
        step_files.truncate_to(folder / name, step)


def digest(prompt: Any) -> str:
    """16 hexadecimal digits that are the same for the same text, messages, or object of them."""
    text = prompt if isinstance(prompt, str) else json.dumps(to_json(prompt), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def total_of(rewards: Sequence[float], weights: Sequence[float]) -> float | None:
    """Weighted sum over the functions that scored; None where none did."""
    scored = [weight * reward for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return sum(scored) if scored else None
