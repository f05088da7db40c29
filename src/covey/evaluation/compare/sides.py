"""Grouping of runs into sides (seeds of the same way to train), and the differences between sides."""

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import ConfigError
from covey.evaluation.compare.run_data import Run, flat
from covey.names import as_written

_SEEDS = frozenset({"seed", "data_seed"})
_BOOKKEEPING = frozenset(
    {
        *("output_dir", "run_name", "logging_dir", "report_to", "project", "disable_tqdm", "resume_from_checkpoint"),
        *("rollout_log_steps", "logging_first_step", "logging_nan_inf_filter", "logging_steps", "logging_strategy"),
        *("log_level", "log_level_replica", "log_on_each_node", "log_completions", "log_completions_hub_repo"),
        *("log_unique_prompts", "num_completions_to_print", "save_steps", "save_strategy", "save_total_limit"),
        *("save_only_model", "save_on_each_node", "checkpoint_when_needed", "eval_steps", "eval_strategy"),
        *("eval_on_start", "eval_delay", "do_eval", "do_train", "do_predict", "push_to_hub", "hub_model_id"),
        *("hub_revision", "hub_strategy", "hub_token", "hub_always_push", "hub_private_repo", "local_rank"),
        *("include_num_input_tokens_seen", "skip_memory_metrics", "restore_callback_states_from_checkpoint"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    }
)
"""Options of output, logging and evaluation, which do not affect training."""
_DECIDES = ("config", "model", "algorithm", "rewards", "sources", "dataset")
_AROUND = ("versions", "hardware", "git")
_PLACES = re.compile(r"\.(line|file)$|^hardware\.(host|memory_gb)$|^git\.(untracked|is_diff_cut|branch)|^git\.diff$")
_TRAILING = re.compile(r"[-_. ]*(?:seed|s)?[-_. ]*\d*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Side:
    """Runs that differ in nothing but the seed."""

    letter: str
    name: str
    """Common part of the folders' names; may be empty."""
    runs: Sequence[Run]

    @property
    def title(self) -> str:
        """Example: `B (slow)`."""
        return f"{self.letter} ({self.name})" if self.name else self.letter


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A recorded value in which the sides differ."""

    area: str
    """config, model, algorithm, rewards, sources (files of the user's own), dataset, versions, hardware or git."""
    name: str
    values: Sequence[str]
    """One text a side; `a / b` where its runs differ among themselves."""
    diff: str = ""
    """For source text: unified diff from the first side to the second that differs."""


def grouped(runs: Sequence[Run]) -> list[Side]:
    """Sides in the order of their first run: runs are seeds of one side when all that decides what they learn is equal.

    Where only versions differ (of packages, or of the code at its git commit), these tell the sides apart.
    """
    by_key = _by_key(runs, _DECIDES)
    if len(by_key) == 1:
        by_key = _by_key(runs, (*_DECIDES, "versions"))
    return as_sides(list(by_key.values()))


def as_sides(groups: Sequence[Sequence[Run]]) -> list[Side]:
    """Sides with letters and names. Raises ConfigError for a run that is named twice, or more sides than letters."""
    seen: set[object] = set()
    for run in (run for group in groups for run in group):
        if run.path.resolve() in seen:
            raise ConfigError(f"{run.path} is named twice; a run cannot be compared with itself.")
        seen.add(run.path.resolve())
    if len(groups) > 26:
        raise ConfigError(f"{len(groups)} sides are more than can be compared at once; 26 is the most.")
    names = _names(groups)
    return [
        Side(letter=chr(65 + i), name=name, runs=list(group))
        for i, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def differences(sides: Sequence[Side]) -> list[Difference]:
    """All recorded differences between the sides, the most decisive first. Seeds and bookkeeping are left out."""
    differing: list[Difference] = []
    for area in (*_DECIDES, *_AROUND):
        leaves = [[_leaves(run, area) for run in side.runs] for side in sides]
        names = dict.fromkeys(name for side in leaves for run in side for name in run)
        for name in names:
            texts = [[_text(run[name]) if name in run else "-" for run in side] for side in leaves]
            if len({tuple(sorted(set(side))) for side in texts}) > 1:
                differing.append(_difference(area, name, texts))
    return differing


def repeats(side: Side) -> list[int]:
    """Seeds that more than one run of the side has: such runs repeat each other."""
    seeds = [run.seed for run in side.runs if run.seed is not None]
    return sorted({seed for seed in seeds if seeds.count(seed) > 1})


def _difference(area: str, name: str, texts: Sequence[Sequence[str]]) -> Difference:
    shown = [" / ".join(dict.fromkeys(side)) for side in texts]
    if not name.endswith("source"):
        return Difference(area=area, name=name, values=[_short(text) for text in shown])
    first, other = texts[0][0], next(text[0] for text in texts if text[0] != texts[0][0])
    before, after = ([] if text == "-" else text.splitlines() for text in (first, other))
    lines = difflib.unified_diff(before, after, "before", "after", lineterm="", n=2)
    counts = [f"{len(text[0].splitlines())} lines" if text[0] != "-" else "-" for text in texts]
    return Difference(area=area, name=name, values=counts, diff="\n".join(list(lines)[2:]))


def _by_key(runs: Sequence[Run], areas: Sequence[str]) -> dict[str, list[Run]]:
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(key_of(run, areas), []).append(run)
    return by_key


def key_of(run: Run, areas: Sequence[str] = (*_DECIDES, "versions")) -> str:
    """Grouping key: these parts of `run.json` as text, without the seed."""
    return json.dumps([sorted((name, _text(value)) for name, value in _leaves(run, area).items()) for area in areas])


def _leaves(run: Run, area: str) -> dict[str, Any]:
    """Leaves of one part of `run.json` that affect training, by dotted name."""
    value = run.manifest.get(area)
    files = run.manifest.get("sources") or {}
    if area == "config":
        value = {name: item for name, item in run.config.items() if name not in _SEEDS | _BOOKKEEPING}
    if area == "sources":
        value = {
            Path(path).name: {"source": file.get("text"), "sha256": file.get("sha256")} for path, file in files.items()
        }
    leaves = dict(flat(value)) if value else {}
    for name, item in list(leaves.items()):
        part, _, last = name.rpartition(".")
        is_shown_whole = last == "file" and item in files
        if is_shown_whole:
            leaves.pop(f"{part}.source", None)
        if is_shown_whole or (last == "source" and item is not None):
            leaves.pop(f"{part}.sha256", None)
    return {
        name: as_written(item) if isinstance(item, str) and not name.endswith("source") else item
        for name, item in leaves.items()
        if not _PLACES.search(f"{area}.{name}")
    }


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1 and 1.0 are the same option
    return value if isinstance(value, str) else json.dumps(value)


def _short(text: str, most: int = 90) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A name for each side: of the runs, or, where these are `seed-0`, `seed-1` on every side, of the folders around them."""
    around = [[run.path.resolve().parent.name for run in group] for group in groups]
    common = [_common_name([run.name for run in group]) for group in groups]
    mixed = [
        name or (folders[0] if len(set(folders)) == 1 else "") for name, folders in zip(common, around, strict=True)
    ]
    for names in (mixed, [_common_name(folders) for folders in around]):
        if all(names) and len(set(names)) == len(names):
            return names
    return [group[0].name for group in groups]


def _common_name(names: Sequence[str]) -> str:
    """Common prefix of the names, without a trailing number or `seed`."""
    if len(names) == 1:
        return names[0]
    return _TRAILING.sub("", os.path.commonprefix(names)).strip("-_. ")  # noqa: RUF071 - names, not paths
