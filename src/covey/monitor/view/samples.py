"""Single completions of a few recorded steps, spread evenly over the run: lengths, rewards, numbers by token position.

A run of a million completions has thousands of files; a picture needs some dozens. How many were read of how many is part of every answer.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from covey.monitor.view.groups import GroupIndex, floats_of, read_columns

_CACHED = 256
_SECONDS = 0.1
"""Seconds that one request reads; the page asks again for the rest."""
_SCALARS = ("num_tokens", "finish", "reward", "advantage")
_TOKENS = ("logprobs", "old_logp", "token/entropy", "mask")
_MOST_TOKENS = 200_000
"""Tokens of one file that are counted: those of its first completions."""
MOST_REWARDS = 24

POSITIONS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
                      3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536])  # fmt: skip
"""Left edges of the bins of token positions, from 0; two bins per doubling."""
RATIO_EDGES = np.concatenate([[-np.inf], np.linspace(-0.5, 0.5, 42), [np.inf]])
"""Edges of the log-ratio of learner to sampler, in nats; the outer bins are open."""
ENTROPY_EDGES = np.concatenate([[-np.inf], np.linspace(0.0, 4.0, 41), [np.inf]])
"""Nats."""


@dataclass(frozen=True)
class Sample:
    """One recorded step, n completions and K rewards."""

    lengths: np.ndarray
    """[n]"""
    is_cut: np.ndarray
    """[n]"""
    rewards: dict[str, np.ndarray]
    """[n] by name, NaN: not scored; `reward` is the weighted total."""
    advantages: np.ndarray
    """[n]"""
    by_position: dict[str, tuple[np.ndarray, np.ndarray]]
    """Sums and counts by bin of positions, of `entropy` and `ratio` (the absolute log-ratio)."""
    histograms: dict[str, np.ndarray]
    """Counts by `RATIO_EDGES` and `ENTROPY_EDGES`."""


class Samples:
    """Reads steps when a page needs them and keeps the last few. Safe to use from several threads."""

    def __init__(self, index: GroupIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[int, bool], tuple[Any, Sample | None]] = OrderedDict()

    def read(
        self, most: int, low: float | None, high: float | None, *, has_tokens: bool = False
    ) -> tuple[dict[int, Sample], dict[str, int]]:
        """Samples by step, and how many steps were read (`read`), are chosen but not read yet (`left`), and are there (`of`)."""
        steps = [
            step for step in self._index.steps() if (low is None or step >= low) and (high is None or step <= high)
        ]
        chosen = spread(steps, most)
        deadline, samples, left = time.monotonic() + _SECONDS, {}, 0
        for step in from_the_ends(chosen):
            is_cached, sample = self._look(step, has_tokens)
            if not is_cached and time.monotonic() > deadline:
                left += 1
                continue
            sample = sample if is_cached else self._load(step, has_tokens)
            if sample is not None:
                samples[step] = sample
        return dict(sorted(samples.items())), {
            "read": len(samples),
            "left": left,
            "of": len(steps),
            "pending": self._index.pending,
        }

    def _look(self, step: int, has_tokens: bool) -> tuple[bool, Sample | None]:
        with self._lock:
            cached = self._cache.get((step, has_tokens))
            if cached is None or cached[0] != self._index.mark_of(step):
                return False, None
            self._cache.move_to_end((step, has_tokens))
            return True, cached[1]

    def _load(self, step: int, has_tokens: bool) -> Sample | None:
        mark = self._index.mark_of(step)
        try:
            sample = sample_of(self._index, step, has_tokens=has_tokens)
        except Exception as error:  # noqa: BLE001 -- a damaged file does not hide the others
            self._index.refuse(step, mark, error)
            sample = None
        with self._lock:
            self._cache[step, has_tokens] = (mark, sample)
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return sample


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, the first and the last among them.

    >>> spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(steps) <= most:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[place] for place in dict.fromkeys(places.tolist())]


def from_the_ends(steps: Sequence[int]) -> list[int]:
    """The same steps, coarse first: an answer that stops early has some of every part of the run.

    >>> from_the_ends([1, 2, 3, 4, 5])
    [1, 5, 3, 2, 4]
    """
    order, stride = [0, len(steps) - 1], 1 << max(0, len(steps) - 1).bit_length()
    while stride > 1:
        stride //= 2
        order += range(stride, len(steps), stride)
    return [steps[place] for place in dict.fromkeys(order) if 0 <= place < len(steps)]


def sample_of(index: GroupIndex, step: int, *, has_tokens: bool) -> Sample:
    """The completions of one file. OSError, ValueError, KeyError or Arrow's errors for a file that is none."""
    path = index.path_of(step)
    rewards = index.reward_columns(step)[:MOST_REWARDS]
    table = read_columns(path, [*_SCALARS, *rewards, *(_TOKENS if has_tokens else ())])
    tokens = _tokens(table) if has_tokens else ({}, {})
    return Sample(
        lengths=floats_of(table, "num_tokens"),
        is_cut=np.asarray(pc.equal(table["finish"], "length").fill_null(False).to_numpy()),
        rewards={name.removeprefix("reward/") if name != "reward" else "reward (total)": floats_of(table, name)
                 for name in (*rewards, *(("reward",) if len(rewards) != 1 else ())) if name in table.column_names},
        advantages=floats_of(table, "advantage"),
        by_position=tokens[0],
        histograms=tokens[1],
    )  # fmt: skip


def _tokens(table: pa.Table) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, np.ndarray]]:
    lists = {name: _flat(table, name) for name in _TOKENS if name in table.column_names}
    by_position, histograms = {}, {}
    mask = lists.get("mask")
    sampled, learned, entropy = lists.get("logprobs"), lists.get("old_logp"), lists.get("token/entropy")
    measures: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    if sampled and learned and len(sampled[0]) == len(learned[0]):
        measures["ratio"] = (learned[0] - sampled[0], learned[1], RATIO_EDGES)
    if entropy:
        measures["entropy"] = (*entropy, ENTROPY_EDGES)
    for name, (values, places, edges) in measures.items():
        keep = np.isfinite(values)
        if mask and len(mask[0]) == len(values):
            keep &= mask[0] > 0  # tokens of a tool's output were not sampled by the policy
        values, bins = values[keep], np.searchsorted(POSITIONS, places[keep], side="right") - 1
        sums = np.bincount(bins, np.abs(values), minlength=len(POSITIONS))
        by_position[name] = (sums, np.bincount(bins, minlength=len(POSITIONS)))
        histograms[name] = np.histogram(values, edges)[0]
    return by_position, histograms


def _flat(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """All values of a column of lists, and the place of each in its list; lists that are null are left out."""
    column = table[name].combine_chunks()
    lengths = np.asarray(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    starts = np.cumsum(lengths) - lengths
    values = np.asarray(column.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False))
    rows = int(np.searchsorted(np.cumsum(lengths), _MOST_TOKENS)) + 1
    end = int(lengths[:rows].sum())
    places = np.arange(end) - np.repeat(starts[:rows], lengths[:rows])
    return values[:end], places
