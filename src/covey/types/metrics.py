"""Metrics that know how they merge: sums and counts add, and a division comes last. Never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64."""
_ROUNDING = 1e-6


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def lowest_passing(threshold: float) -> float:
    """The least score that counts as `threshold`, up to the rounding of float32, in which rewards are kept: 0.9 is 0.89999998 there."""
    return threshold - _ROUNDING * abs(threshold)


def reaches(score: float, threshold: float) -> bool:
    """True from the threshold on, as `lowest_passing` has it."""
    return score >= lowest_passing(threshold)


def precise(x: Tensor) -> Tensor:
    """`x` in `widest_float` of its device."""
    return x.to(widest_float(x.device))


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
class RunningTotal:
    """A metric that grows over the run in several places: of each place the largest part, and their sum."""

    parts: Mapping[str, float]
    """Total so far by the place (a process) that counts it."""

    def __add__(self, other: RunningTotal) -> RunningTotal:
        both, places = (self.parts, other.parts), {**self.parts, **other.parts}
        return RunningTotal({place: max(part.get(place, -math.inf) for part in both) for place in places})

    @property
    def value(self) -> float:
        return math.fsum(self.parts.values())


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
        """Sample deviation (Bessel's correction); NaN for fewer than two values."""
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
        """Effective sample size of weights in any shape."""
        w = precise(weights.detach())
        return EffectiveSize(float(w.sum()), float(w.square().sum()), float(w.numel()))


@dataclass(frozen=True)
class Bound:
    """One end of a 95% confidence interval of a mean whose samples come in groups (prompts), and merges exactly.

    The standard error is that of a ratio of sums over groups, `sqrt(m / (m - 1) sum (s_g - mean n_g)^2) / N`, since completions of
    one prompt are alike (Cochran 1977, section 2.11; Miller 2024, <https://arxiv.org/abs/2411.00640>). A share (`is_share`)
    gets Wilson's interval (1927) at the sample size that this error stands for, which is right near 0 and 1 too.
    """

    is_upper: bool
    is_share: bool
    groups: float
    sum: float
    count: float
    squares: float
    """Sums over groups of s_g^2, s_g n_g and n_g^2: s_g is a group's sum, n_g its count."""
    products: float
    sizes: float

    def __add__(self, other: Bound) -> Bound:
        names = ("groups", "sum", "count", "squares", "products", "sizes")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def value(self) -> float:
        """NaN for fewer than two groups."""
        if self.groups < 2 or not self.count:
            return math.nan
        mean, sign = self.sum / self.count, 1.0 if self.is_upper else -1.0
        spread = max(0.0, self.squares - 2 * mean * self.products + mean * mean * self.sizes)
        error = math.sqrt(self.groups / (self.groups - 1) * spread) / self.count
        t = _t_quantile(self.groups - 1)
        if not self.is_share:
            return mean + sign * t * error
        variance = mean * (1 - mean)
        size = self.groups if variance <= 0 or error <= 0 else min(variance / error**2, self.count)
        middle = (mean + t * t / (2 * size)) / (1 + t * t / size)
        half = t / (1 + t * t / size) * math.sqrt(max(0.0, variance) / size + t * t / (4 * size * size))
        return min(1.0, max(0.0, middle + sign * half))

    @staticmethod
    def both(sums: Iterable[tuple[float, float]], *, is_share: bool) -> tuple[Bound, Bound]:
        """Lower and upper end, from the sum and the count of each group; groups without samples are left out."""
        counted = [(s, n) for s, n in sums if n]
        totals = (
            float(len(counted)),
            float(sum(s for s, _ in counted)),
            float(sum(n for _, n in counted)),
            float(sum(s * s for s, _ in counted)),
            float(sum(s * n for s, n in counted)),
            float(sum(n * n for _, n in counted)),
        )
        return Bound(False, is_share, *totals), Bound(True, is_share, *totals)


def _t_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t by its expansion around the normal one (Hill 1970); within 1% from 3 degrees on."""
    if freedom < 3:
        return 12.7062 if freedom < 2 else 4.3027
    z, d = 1.959964, freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / d + second / d**2 + third / d**3


Metric = Mean | Spread | Sum | RunningTotal | Max | Min | Last | EffectiveSize | Bound
"""A number of a step that knows how its parts of micro-batches and processes merge."""


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Add metrics of the same name. Example: `[{"kl": Mean(1, 2)}, {"kl": Mean(3, 2)}]` gives `{"kl": Mean(4, 4)}`."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged
