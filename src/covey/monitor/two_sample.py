"""Two-sample tests: are these numbers, or these texts, drawn from the same distribution as those?"""

import math

import numpy as np
from numpy.typing import NDArray

_PERMUTATIONS, _MORE = 300, 10_000
"""Permutations of a look, and of one whose p is below `_SMALL`: the tail of a gamma fitted to 300 is too uncertain there."""
_SMALL = 1e-3

Floats = NDArray[np.float64]


def kolmogorov_smirnov(before: Floats, after: Floats) -> float:
    """p of the two-sided Kolmogorov-Smirnov test by its limit distribution, `2 sum (-1)^(k-1) exp(-2 k^2 D^2 nm / (n + m))`.

    Ties make it larger, never smaller. Smirnov 1948.
    """
    scaled = _gap(before, after, both=True) * math.sqrt(_size(before, after))
    if scaled < 0.2:
        return 1.0
    tail = sum((-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101))
    return float(min(1.0, max(0.0, 2 * tail)))


def has_fallen(before: Floats, after: Floats) -> float:
    """p of the one-sided test: small when `after` lies lower. `exp(-2 D^2 nm / (n + m))`."""
    gap = _gap(before, after, both=False)
    return min(1.0, math.exp(-2 * gap * gap * _size(before, after)))


def _gap(before: Floats, after: Floats, *, both: bool) -> float:
    """Largest distance of the distribution functions; one-sided, of `after`'s above that of `before`."""
    points = np.concatenate([before, after])
    share = lambda x: np.searchsorted(np.sort(x), points, side="right") / len(x)
    gaps = share(after) - share(before)
    return float(np.abs(gaps).max() if both else max(0.0, gaps.max()))


def _size(before: Floats, after: Floats) -> float:
    return len(before) * len(after) / (len(before) + len(after))


def maximum_mean_discrepancy(before: Floats, after: Floats, *, seed: int = 0) -> float:
    """p of the kernel two-sample test (Gretton et al. 2012, JMLR 13) on rows of features [n, F] and [m, F].

    Kernel: the product of rows of length 1. The null distribution is a gamma with the mean, deviation and skewness of 300
    permutations (as that of Székely and Rizzo's statistics is approximated, Josse et al. 2008), so that p below 1/300 means something; of
    10,000 where it is below 0.001.
    """
    rows = np.concatenate([before, after])
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    kernel = rows @ rows.T
    signs = np.concatenate([np.full(len(before), 1 / len(before)), np.full(len(after), -1 / len(after))])
    p = _tail(kernel, signs, _PERMUTATIONS, seed)
    return p if p >= _SMALL else _tail(kernel, signs, _MORE, seed)


def _tail(kernel: Floats, signs: Floats, permutations: int, seed: int) -> float:
    """p of the statistic under the gamma that is fitted to its value over random permutations of `signs`."""
    draw = np.random.default_rng(seed)
    shuffled = np.stack([draw.permutation(signs) for _ in range(permutations)])
    null = np.einsum("pi,pi->p", shuffled @ kernel, shuffled)
    observed = float(signs @ kernel @ signs)
    deviation = float(null.std())
    if deviation < 1e-12 * max(1.0, abs(float(null.mean()))):
        return 1.0
    z = (observed - float(null.mean())) / deviation
    skew = max(float((((null - null.mean()) / deviation) ** 3).mean()), 0.05)
    shape = 4 / skew**2
    return gamma_tail(shape, shape + z * math.sqrt(shape)) if z > -math.sqrt(shape) else 1.0


def gamma_tail(shape: float, x: float) -> float:
    """Q(shape, x), the share of a gamma distribution of scale 1 above x: by series below the mean, by continued fraction above.

    >>> round(gamma_tail(1.0, 2.0), 6)  # exp(-2)
    0.135335
    """
    if x <= 0:
        return 1.0
    front = math.exp(-x + shape * math.log(x) - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for k in range(1, 10_000):
            term *= x / (shape + k)
            total += term
            if term < total * 1e-12:
                break
        return min(1.0, max(0.0, 1 - total * front))
    tiny = 1e-300
    b, c = x + 1 - shape, 1 / tiny
    d = 1 / b
    h = d
    for k in range(1, 10_000):
        a = -k * (k - shape)
        b += 2
        d = 1 / (a * d + b or tiny)
        c = b + a / c or tiny
        h *= d * c
        if abs(d * c - 1) < 1e-12:
            break
    return min(1.0, max(0.0, front * h))
