"""Distributions of lengths, rewards and per-token values over a run, from samples: data of heat maps and histograms."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from covey.monitor.view.samples import ENTROPY_EDGES, POSITIONS, RATIO_EDGES, Sample

_BINS = 24


def lengths_of(samples: Mapping[int, Sample]) -> dict[str, Any]:
    """Lengths in tokens: counts by step and bin, of completions with positive and negative advantage, and the share cut off."""
    every = [sample.lengths for sample in samples.values()]
    edges = edges_of(np.concatenate([np.zeros(0), *every]), is_whole=True)
    side = lambda pick: np.histogram(
        np.concatenate([np.zeros(0), *(s.lengths[pick(s)] for s in samples.values())]), edges
    )[0]
    return {
        "steps": list(samples),
        "edges": edges.tolist(),
        "counts": [np.histogram(lengths, edges)[0].tolist() for lengths in every],
        "above": side(lambda s: s.advantages > 0).tolist(),
        "below": side(lambda s: s.advantages < 0).tolist(),
        "cut": [float(s.is_cut.mean()) if len(s.is_cut) else None for s in samples.values()],
        "mean": [_mean(s.lengths) for s in samples.values()],
        "mean_above": [_mean(s.lengths[s.advantages > 0]) for s in samples.values()],
        "mean_below": [_mean(s.lengths[s.advantages < 0]) for s in samples.values()],
    }


def correlations_of(samples: Mapping[int, Sample], score: str | None) -> dict[str, Any]:
    """Pearson's correlation of every two rewards and the length over completions, and how one score is spread over the steps.

    A correlation is null where one of the two does not vary, or fewer than three completions have both.
    """
    names = list(dict.fromkeys(name for sample in samples.values() for name in sample.rewards))
    columns = [_column(samples, name) for name in names]
    columns.append(np.concatenate([np.zeros(0), *(sample.lengths for sample in samples.values())]))
    table = [[_correlation(column, other) for other in columns] for column in columns]
    chosen = score if score in names else (names[-1] if names else None)
    by_step = [sample.rewards.get(chosen or "", np.zeros(0)) for sample in samples.values()]
    edges = edges_of(np.concatenate([np.zeros(0), *by_step]))
    return {
        "names": [*names, "length (tokens)"],
        "table": table,
        "completions": len(columns[-1]),
        "score": chosen,
        "steps": list(samples),
        "edges": edges.tolist(),
        "counts": [np.histogram(values[np.isfinite(values)], edges)[0].tolist() for values in by_step],
    }


def policy_of(samples: Mapping[int, Sample]) -> dict[str, Any]:
    """By step and bin of token positions the mean entropy and the mean absolute log-ratio of learner to sampler; their histograms."""
    result: dict[str, Any] = {"steps": list(samples), "positions": [], "by_position": {}, "histograms": {}}
    used = 0
    for name, edges in (("entropy", ENTROPY_EDGES), ("ratio", RATIO_EDGES)):
        with_it = [sample for sample in samples.values() if name in sample.by_position]
        if not with_it:
            continue
        counts = [sample.by_position[name][1] if name in sample.by_position else None for sample in samples.values()]
        used = max(
            used, *(int(np.flatnonzero(count)[-1]) + 1 for count in counts if count is not None and count.any()), 0
        )
        result["by_position"][name] = [_means(sample.by_position.get(name)) for sample in samples.values()]
        total = np.sum([sample.histograms[name] for sample in with_it], axis=0)
        result["histograms"][name] = {"edges": [None, *edges[1:-1].tolist(), None], "counts": total.tolist()}
    result["positions"] = POSITIONS[: used + 1].tolist()
    result["by_position"] = {name: [row and row[:used] for row in rows] for name, rows in result["by_position"].items()}
    return result


def _means(sums_and_counts: tuple[np.ndarray, np.ndarray] | None) -> list[float | None] | None:
    if sums_and_counts is None:
        return None
    return [float(total / count) if count else None for total, count in zip(*sums_and_counts, strict=True)]


def edges_of(values: np.ndarray, *, is_whole: bool = False) -> np.ndarray:
    """Edges of at most 24 bins of equal width over all finite values; bins of whole numbers hold as many each."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.zeros(0)
    low, high = float(finite.min()), float(finite.max())
    if is_whole:
        width = max(1, int(np.ceil((high + 1 - low) / _BINS)))
        return np.arange(low, high + 1 + width, width)
    if low == high:
        return np.array([low - 0.5, low + 0.5])
    return np.linspace(low, high, _BINS + 1)


def _column(samples: Mapping[int, Sample], name: str) -> np.ndarray:
    parts = [sample.rewards.get(name, np.full(len(sample.lengths), np.nan)) for sample in samples.values()]
    return np.concatenate([np.zeros(0), *parts])


def _correlation(column: np.ndarray, other: np.ndarray) -> float | None:
    keep = np.isfinite(column) & np.isfinite(other)
    if keep.sum() < 3:
        return None
    column, other = column[keep] - column[keep].mean(), other[keep] - other[keep].mean()
    size = np.sqrt((column**2).sum() * (other**2).sum())
    return float(np.clip((column * other).sum() / size, -1, 1)) if size > 1e-12 else None


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None
