"""Confidence intervals for accuracies and means, pass@k, and tests of the difference between two models."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval, from `count` independent prompts."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Difference:
    """Difference of B from A on the same prompts, with its interval."""

    value: float
    """mean(B) - mean(A)"""
    low: float
    high: float
    p_value: float
    """Probability of a difference at least this large if both were equally good."""
    count: int

    @property
    def is_real(self) -> bool:
        """True if the difference is significant at the 5% level."""
        return self.p_value < 0.05

    def in_words(self, unit: str = "points", scale: float = 100.0) -> str:
        """Example: `+27.0 points (95% 20.8 to 33.1, p = 3e-13, 300 prompts)`."""
        if not self.is_real:
            return f"no difference can be told ({scale * self.value:+.1f} {unit}, p = {self.p_value:.2g}, {self.count} prompts)"
        low, high = scale * self.low, scale * self.high
        return f"{scale * self.value:+.1f} {unit} (95% {low:.1f} to {high:.1f}, p = {self.p_value:.1g}, {self.count} prompts)"


def finite_mean(values: Iterable[float]) -> float:
    """Mean of the values that are not NaN; NaN without any."""
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan


def proportion(successes: int, count: int) -> Estimate:
    """Share of successes with Wilson's score interval (Wilson 1927), which stays inside [0, 1].

    >>> e = proportion(35, 100)
    >>> round(e.low, 3), round(e.high, 3)
    (0.264, 0.447)
    """
    if count == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    share = successes / count
    return Estimate(share, *wilson(share, count), count)


def _finite(values: Sequence[float]) -> np.ndarray:
    return np.asarray([value for value in values if not math.isnan(value)], dtype=np.float64)


def mean(values: Sequence[float]) -> Estimate:
    """Mean with its normal-theory interval; NaN values are left out."""
    x = _finite(values)
    if x.size == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    spread = Z95 * float(x.std(ddof=1)) / math.sqrt(x.size) if x.size > 1 else math.inf
    return Estimate(float(x.mean()), float(x.mean()) - spread, float(x.mean()) + spread, int(x.size))


def bounded_mean(values: Sequence[float]) -> Estimate:
    """Mean of values that cannot leave [0, 1], with an interval that cannot either; NaN values are left out.

    Wilson's score interval with the binomial variance exchanged for the one that was measured: the number of values is
    scaled by `p (1 - p) / s^2`, as for a sample with a design effect (Korn and Graubard 1998), at least 1: values within
    bounds vary no more than their own 0s and 1s would. Where all values are equal nothing was measured, and the binomial
    variance stands. It is right at the bounds, where the normal interval is empty or beyond them.

    >>> e = bounded_mean([1.0] * 20)
    >>> round(e.low, 3), e.high
    (0.839, 1.0)
    """
    x = _finite(values)
    if x.size == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    share = min(1.0, max(0.0, float(x.mean())))
    variance = float(x.var(ddof=1)) if x.size > 1 else 0.0
    effect = share * (1 - share) / variance if variance > 0 else 1.0
    return Estimate(float(x.mean()), *wilson(share, x.size * max(1.0, effect)), int(x.size))


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` trials, which need not be a whole number."""
    z2 = Z95 * Z95
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = Z95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(0.0, center - spread), min(1.0, center + spread)


def mean_of_few(values: Sequence[float]) -> Estimate:
    """Mean with Student's interval, right for as few as two values (seeds, say); NaN values are left out.

    A single value has an infinite interval: it says nothing of the next one.

    >>> e = mean_of_few([1.0, 2.0, 3.0])
    >>> round(e.low, 2), round(e.high, 2)
    (-0.48, 4.48)
    """
    estimate, x = mean(values), _finite(values)
    if x.size < 2:
        return estimate
    spread = quantile(0.975, x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return replace(estimate, low=estimate.value - spread, high=estimate.value + spread)


def mean_of_seeds(values: Sequence[float]) -> Estimate:
    """`mean_of_few`; of up to five equal values with an infinite interval, since no spread was measured."""
    estimate = mean_of_few(values)
    is_flat = estimate.high - estimate.low <= 1e-12 * abs(estimate.value) and 2 ** (1 - estimate.count) >= 0.05
    return replace(estimate, low=-math.inf, high=math.inf) if is_flat else estimate


def mean_reward(values: Sequence[float]) -> Estimate:
    """Mean over prompts, the same wherever an evaluation is shown: of rewards within 0 and 1 `bounded_mean`, else `mean_of_seeds`."""
    is_share = all(0.0 <= value <= 1.0 for value in values if not math.isnan(value))
    return bounded_mean(values) if is_share else mean_of_seeds(values)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that at least one of `k` samples is right, unbiased: `1 - C(n-c, k) / C(n, k)` (Chen et al. 2021, eq. 1).

    Raises ValueError when `k` is larger than the number of samples.

    >>> round(pass_at_k(8, 2, 4), 4)
    0.7857
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt, there are {num_samples}.")
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def paired_difference(a: Sequence[float], b: Sequence[float], *, draws: int = 20_000, seed: int = 0) -> Difference:
    """Is B better than A on the same prompts? Interval from the paired differences, p by flipping their signs.

    With 0/1 scores the p-value is McNemar's exact test; otherwise a sign-flip permutation test of `draws` draws.
    Prompts that either did not score (NaN) are left out of both. Raises ValueError on unequal lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"a paired comparison needs the same prompts on both sides, there are {len(a)} and {len(b)}.")
    pairs = np.asarray([(x, y) for x, y in zip(a, b, strict=True) if not (math.isnan(x) or math.isnan(y))])
    if len(pairs) == 0:
        return Difference(math.nan, math.nan, math.nan, 1.0, 0)
    gaps = pairs[:, 1] - pairs[:, 0]
    spread = Z95 * float(gaps.std(ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    value = center = float(gaps.mean())
    is_binary = bool(np.isin(pairs, (0.0, 1.0)).all())
    p_value = _mcnemar(gaps) if is_binary else _sign_flips(gaps, draws, seed)
    most = 1.0 if is_binary else math.inf  # shares differ by at most 1
    if spread <= 1e-12 * float(np.abs(pairs).max()):  # equal gaps, up to their rounding
        center, spread = _adjusted_wald(gaps, 1.0 if is_binary else float(np.ptp(pairs)))
    return Difference(value, max(-most, center - spread), min(most, center + spread), p_value, len(gaps))


def _adjusted_wald(gaps: np.ndarray, reach: float) -> tuple[float, float]:
    """Center and half width of Bonett and Price's interval (2012) of a difference of paired shares, for pairs without any spread.

    A gain and a loss of `reach`, the range of all scores, are added, without which a few equal pairs would prove that no other can come.
    """
    more = np.asarray([*gaps, reach, -reach])
    return float(more.mean()), Z95 * float(more.std()) / math.sqrt(len(more))


def _mcnemar(gaps: np.ndarray) -> float:
    """Two-sided exact binomial test that gains and losses are equally likely."""
    gains, losses = int((gaps > 0).sum()), int((gaps < 0).sum())
    changed = gains + losses
    if changed == 0:
        return 1.0
    tail = sum(math.comb(changed, i) for i in range(min(gains, losses) + 1))
    return float(min(1.0, 2.0 * (tail / 2**changed)))


def _sign_flips(gaps: np.ndarray, draws: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    seen = abs(gaps.sum()) - 1e-12 * np.abs(gaps).sum()  # flips of the same size may add up to another last bit
    hits, size = 0, max(1, 4_000_000 // len(gaps))
    for start in range(0, draws, size):
        signs = rng.integers(0, 2, size=(min(size, draws - start), len(gaps))) * 2 - 1
        hits += int((np.abs(signs @ gaps) >= seen).sum())
    return (hits + 1) / (draws + 1)


_TINY = 1e-300


def two_sided(t: float, freedom: float) -> float:
    """Probability of a value at least as far from 0 as `t` (Student 1908), by the regularized incomplete beta function.

    >>> round(two_sided(2.776, 4), 3)
    0.05
    """
    if math.isnan(t) or freedom <= 0:
        return math.nan
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def quantile(p: float, freedom: float) -> float:
    """Quantile `p` of Student's t, for 0.5 <= p < 1; the normal quantile as `freedom` grows.

    >>> round(quantile(0.975, 4), 3)
    2.776
    """
    low, high = 0.0, 2.0
    tail = 2 * (1 - p)
    while two_sided(high, freedom) > tail:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction, which converges fast below the mean; above it by symmetry."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction (Abramowitz and Stegun 26.5.8)."""
    c, d = 1.0, 1 / _away_from_0(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_0(1 + term * d)
            c = _away_from_0(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value


def _away_from_0(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
