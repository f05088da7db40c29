"""Inputs that must be equal on every process of a run, as text that is compared before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import xxhash

from covey.algorithms import Algorithm
from covey.config import GRPOConfig
from covey.config.options import HONOURED
from covey.rewards.contract import RewardSpec

_SECRET = ("hub_token", "alert_webhook")
_OWN = frozenset(
    ("output_dir", "run_name", "disable_tqdm", "report_to", "log_level", "log_level_replica", "use_cpu", *_SECRET)
)
"""Options that may differ: the main process's value is used, or they affect only a process's output."""
_ROWS = 16


def comparable_options(args: GRPOConfig) -> dict[str, str]:
    """Options that affect training, as text, without objects and functions, which have no stable text."""
    known = {item.name for item in fields(args)}  # an older transformers lacks the newest of its options
    found = {name: getattr(args, name) for name in sorted((HONOURED - _OWN) & known)}
    return {name: str(getattr(value, "value", value)) for name, value in found.items() if _is_plain(value)}


def comparable_inputs(dataset: Any, model: Any, algorithm: Algorithm, rewards: Sequence[RewardSpec]) -> dict[str, str]:
    """All inputs of a trainer but its options."""
    return comparable_parts(algorithm, rewards) | comparable_data(dataset, model)


def comparable_data(dataset: Any, model: Any) -> dict[str, str]:
    """Number of rows of the data set, a digest of some of its prompts, and the model's name; for a stream the name only."""
    found = {"as model": str(model)} if isinstance(model, str) else {}
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return found
    count = len(dataset)
    found["rows of train_dataset"] = str(count)
    places = sorted({i * count // _ROWS for i in range(_ROWS)}) if count else []
    rows = [dataset[place] for place in places]
    prompts = [row.get("prompt") if isinstance(row, dict) else None for row in rows]
    return {**found, "as digest of prompts of train_dataset": xxhash.xxh3_64_hexdigest(repr(prompts).encode())}


def comparable_parts(algorithm: Algorithm, rewards: Sequence[RewardSpec]) -> dict[str, str]:
    """The algorithm's parts with their parameters, and the names of the rewards."""
    parts = {f"as the algorithm's {one.name}": _text(getattr(algorithm, one.name)) for one in fields(algorithm)}
    return {**parts, "as rewards": ", ".join(one.name for one in rewards)}


def _text(part: Any) -> str:
    """The same text on every process: a dataclass with its fields, and of functions and other objects the name alone."""
    if is_dataclass(part) and not isinstance(part, type):
        inside = ", ".join(f"{one.name}={_text(getattr(part, one.name))}" for one in fields(part))
        return f"{type(part).__name__}({inside})"
    if isinstance(part, (list, tuple)):
        return f"[{', '.join(map(_text, part))}]"
    return str(part) if _is_plain(part) else getattr(part, "__qualname__", type(part).__name__)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    value = getattr(value, "value", value)
    return value is None or isinstance(value, (str, int, float, bool))
