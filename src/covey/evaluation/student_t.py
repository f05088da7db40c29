"""Student's t-distribution, for means of few numbers: the few functions needed, without a dependency on scipy."""

import math

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
