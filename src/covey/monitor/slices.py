"""Metrics sliced by the values of a data set's columns (language, task, level), each with its interval; consistency of the language."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.data.features.language import LANGUAGES, language
from covey.errors import ConfigError, did_you_mean
from covey.rewards.metrics import complete_totals
from covey.rewards.scales import Scale, seen_scales, verdicts
from covey.types import Bound, Group, Mean, Metric, Sum

LANGUAGE = "language"
"""The column that names each prompt's language."""
_NAMES = {
    **{"english": "en", "german": "de", "french": "fr", "spanish": "es", "italian": "it", "portuguese": "pt"},
    **{"dutch": "nl", "chinese": "zh", "japanese": "ja", "korean": "ko", "russian": "ru", "greek": "el"},
    **{"arabic": "ar", "hebrew": "he", "hindi": "hi", "thai": "th"},
}


def code_of(value: Any) -> str | None:
    """The ISO 639-1 code of a language that can be identified from text, None for another or none.

    >>> code_of("German"), code_of("zh-CN"), code_of("Klingon")
    ('de', 'zh', None)
    """
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    code = _NAMES.get(text) or text.replace("_", "-").partition("-")[0]
    return code if code in LANGUAGES else None


def is_same(text: str, code: str) -> bool | None:
    """True if a text is in the language of this code; None where that is unclear (too short, numbers only)."""
    identified = language(text)
    return None if identified is None else identified == code


def language_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """`languages/<code>/same`, the share of answers in the prompt's language, and `/count`, the answers whose language was identified.

    Of prompts whose column `language` is known; nothing without it.
    """
    metrics: dict[str, Metric] = {}
    for group in groups:
        code = code_of(group.prompt.columns.get(LANGUAGE))
        if code is None:
            continue
        identified = [same for completion in group.completions if (same := is_same(completion.text, code)) is not None]
        if not identified:
            continue
        mean, count = Mean(float(sum(identified)), float(len(identified))), Sum(float(len(identified)))
        before, counted = metrics.get(f"languages/{code}/same"), metrics.get(f"languages/{code}/count")
        metrics[f"languages/{code}/same"] = before + mean if isinstance(before, Mean) else mean
        metrics[f"languages/{code}/count"] = counted + count if isinstance(counted, Sum) else count
    return metrics


MAX_VALUES = 20
"""Values of a column that get metrics of their own; the others share one."""
OTHER = "other"
_SHARES = ("truncated", "accuracy", "same_language")

Sums = dict[str, list[tuple[float, float]]]
"""By metric: sum and count of the measured values of each group's completions."""


def refuse_unknown_columns(args: Any, dataset_columns: Collection[str] | None) -> None:
    """Raise ConfigError for a column of `metrics_by` or `advantage_slices` that the data set lacks. `dataset_columns` None: unknown."""
    sliced = [args.advantage_slices] if args.advantage_slices else []
    made = {LANGUAGE} if args.group_languages else set()
    for option, columns in (("metrics_by", args.metrics_by or ()), ("advantage_slices", sliced)):
        for column in columns if dataset_columns is not None else ():
            if column not in dataset_columns and column not in made:  # type: ignore[operator]
                has = f"the data set has {', '.join(dataset_columns)}."  # type: ignore[arg-type]
                raise ConfigError(
                    f"{option} names the column {column!r}, but {has}{did_you_mean(column, dataset_columns or ())}"
                )


class Slices:
    """Remembers which values have a name, the first twenty of each column in the order in which they were met."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._values: dict[str, list[str]] = {column: [] for column in columns}

    def __call__(
        self, groups: Sequence[Group], weights: Tensor, scales: Sequence[Scale | None] | None = None
    ) -> dict[str, Metric]:
        """`<metric>/<column>=<value>` with `/low` and `/high`, its 95% interval; `other` once there are too many values.

        `reward`: the mean weighted reward. `length`: tokens that the model wrote. `truncated`: share cut at the limit.
        `accuracy`: share right of those right or wrong, by rewards whose scale is known. `same_language`: share of answers in
        the prompt's language, of those long enough to tell, where the rows have a column `language`.
        """
        if not self.columns or not groups:
            return {}
        reward_scales = seen_scales(groups, len(weights)) if scales is None else scales
        by_slice: dict[str, Sums] = {}
        for group in groups:
            measured = _measure(group, weights, reward_scales)
            for column in self.columns:
                if column not in group.prompt.columns:
                    continue  # an evaluation's rows may lack it
                value = f"{column}={self._value(column, group.prompt.columns.get(column))}"
                sums = by_slice.setdefault(value, {})
                for name, pair in measured.items():
                    sums.setdefault(name, []).append(pair)
        metrics: dict[str, Metric] = {}
        for value, sums in by_slice.items():
            for name, parts in sums.items():
                low, high = Bound.both(parts, is_share=name in _SHARES)
                mean = Mean(sum(s for s, _ in parts), sum(n for _, n in parts))
                metrics |= {f"{name}/{value}": mean, f"{name}/{value}/low": low, f"{name}/{value}/high": high}
        return metrics

    def _value(self, column: str, value: Any) -> str:
        text, values = str(value)[:40], self._values[column]
        if text in values:
            return text
        if len(values) >= MAX_VALUES:
            return OTHER
        values.append(text)
        return text

    def state_dict(self) -> dict[str, Any]:
        return {column: list(values) for column, values in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values |= {column: list(values) for column, values in state.items() if column in self._values}


def _measure(group: Group, weights: Tensor, scales: Sequence[Scale | None]) -> dict[str, tuple[float, float]]:
    """Sum and count of each metric over one group's completions."""
    total = complete_totals(group, weights)  # [G]
    scored = ~total.isnan()
    sums = {
        "reward": (float(total.nan_to_num(0.0).sum()), float(scored.sum())),
        "length": (float(sum(int(completion.written.sum()) for completion in group.completions)), float(group.size)),
        "truncated": (float(sum(completion.is_truncated for completion in group.completions)), float(group.size)),
    }
    judged = None if group.rewards is None else verdicts(group.rewards, weights, scales)
    if judged is not None:
        right, wrong = judged
        sums["accuracy"] = (float(right.sum()), float(torch.logical_or(right, wrong).sum()))
    code = code_of(group.prompt.columns.get(LANGUAGE))
    if code is not None:
        identified = [same for completion in group.completions if (same := is_same(completion.text, code)) is not None]
        sums["same_language"] = (float(sum(identified)), float(len(identified)))
    return sums
