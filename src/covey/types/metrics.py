"""Metrics that know how they merge: sums and counts add, and a division comes last. Never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.types.float64 import precise


@dataclass(frozen=True)
class Mean:
    """A metric that merges exactly: sums and counts add, and the division comes last."""

    sum: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        return self.sum / self.count if self.count else math.nan

    @staticmethod
    def of(x: Tensor, mask: Tensor | None = None) -> Mean:
        """Mean of `x` where `mask` is true."""
        x = precise(x.detach())
        if mask is None:
            return Mean(float(x.sum()), float(x.numel()))
        return Mean(float(torch.where(mask, x, torch.zeros_like(x)).sum()), float(mask.sum()))


@dataclass(frozen=True)
class Sum:
    """A metric whose parts add."""

    value: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """A metric whose largest part wins; NaN parts are left out."""

    value: float

    def __add__(self, other: Max) -> Max:
        return other if math.isnan(self.value) or other.value > self.value else self


@dataclass(frozen=True)
class Min:
    """A metric whose smallest part wins; NaN parts are left out."""

    value: float

    def __add__(self, other: Min) -> Min:
        return other if math.isnan(self.value) or other.value < self.value else self


@dataclass(frozen=True)
class Last:
    """A metric of which only the latest value counts (a learning rate)."""

    value: float

    def __add__(self, other: Last) -> Last:
        return other


@dataclass(frozen=True)
class Spread:
    """A standard deviation that merges exactly (Chan et al. 1979): count, mean and sum of squared distances from it."""

    count: float
    mean: float
    squares: float

    def __add__(self, other: Spread) -> Spread:
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        return Spread(count, mean, self.squares + other.squares + apart * apart * self.count * other.count / count)

    @property
    def value(self) -> float:
        """With Bessel's correction; NaN for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.nan

    @staticmethod
    def of(x: Tensor) -> Spread:
        """Spread of the entries of `x` that are not NaN."""
        x = precise(x.detach())
        x = x[~x.isnan()]
        if not x.numel():
            return Spread(0.0, 0.0, 0.0)
        return Spread(float(x.numel()), float(x.mean()), float((x - x.mean()).square().sum()))


@dataclass(frozen=True)
class EffectiveSize:
    """Share of samples that importance weights `w` leave, in (0, 1]: `(sum w)^2 / (n sum w^2)`. Kong 1992."""

    sum: float
    squares: float
    count: float

    def __add__(self, other: EffectiveSize) -> EffectiveSize:
        return EffectiveSize(self.sum + other.sum, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        return self.sum * self.sum / (self.count * self.squares) if self.count and self.squares else math.nan

    @staticmethod
    def of(weights: Tensor) -> EffectiveSize:
        """Of weights in any shape."""
        w = precise(weights.detach())
        return EffectiveSize(float(w.sum()), float(w.square().sum()), float(w.numel()))


Metric = Mean | Spread | Sum | Max | Min | Last | EffectiveSize


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Add metrics of the same name. Example: `[{"kl": Mean(1, 2)}, {"kl": Mean(3, 2)}]` gives `{"kl": Mean(4, 4)}`."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged
