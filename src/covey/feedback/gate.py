"""The gate before a promotion: a paired comparison of candidate and served version on the fixed set."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from covey.evaluation.intervals import Z95


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The difference candidate minus served in mean reward on the fixed set, with its 95% interval."""

    difference: float
    low: float
    high: float
    prompts: int
    """Number of prompts that both answered and a reward scored."""
    served: float
    candidate: float
    """Mean rewards."""
    tolerance: float

    @property
    def passes(self) -> bool:
        """True if the lower bound is above `-tolerance`."""
        return self.low > -self.tolerance

    @property
    def sentence(self) -> str:
        """Example: `reward 0.420 -> 0.465 on 300 prompts, difference +0.045 (95% +0.012 to +0.077), tolerance 0.02`."""
        return (
            f"reward {self.served:.3f} -> {self.candidate:.3f} on {self.prompts} prompts, difference {self.difference:+.3f} "
            f"(95% {self.low:+.3f} to {self.high:+.3f}), tolerance {self.tolerance:g}"
        )

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "passes": self.passes}


def judged(served: Sequence[float], candidate: Sequence[float], tolerance: float) -> Verdict:
    """Verdict on the rewards [P] of the same prompts by both; NaN: not scored, left out of both.

    Agresti and Min's interval for paired proportions (2005, "Simple improved confidence intervals for comparing matched
    proportions"): two pairs are added, half a pair to each of the four outcomes, gains and losses of the size of the rewards'
    range, 0 included. Without them a small set on which nothing changed would prove that nothing can. The variance is at least
    what right-or-wrong answers have where exactly the tolerance is lost, as in a score test: a set that by luck shows few of
    the losses also shows little of their variance. Raises ValueError on unequal lengths.
    """
    pairs = [(a, b) for a, b in zip(served, candidate, strict=True) if not (math.isnan(a) or math.isnan(b))]
    if not pairs:
        empty = {"difference": math.nan, "low": -math.inf, "high": math.inf, "served": math.nan, "candidate": math.nan}
        return Verdict(**empty, prompts=0, tolerance=tolerance)
    a, b = np.asarray(pairs, dtype=np.float64).T
    reach = float(max(a.max(), b.max(), 0.0) - min(a.min(), b.min(), 0.0)) or 1.0
    gaps, size = b - a, len(pairs) + 2
    center = float(gaps.sum()) / size
    variance = max((float((gaps**2).sum()) + reach**2) / size - center**2, tolerance * (reach - tolerance))
    spread = Z95 * math.sqrt(variance / size)
    return Verdict(
        difference=float(gaps.mean()),
        low=center - spread,
        high=center + spread,
        prompts=len(pairs),
        served=float(a.mean()),
        candidate=float(b.mean()),
        tolerance=tolerance,
    )


def smallest_set(tolerance: float) -> int:
    """Prompts from which on a candidate that changes no answer passes, for rewards between 0 and 1.

    >>> smallest_set(0.02)
    187
    """
    return max(1, math.floor(max(Z95 / tolerance, Z95**2 * (1 - tolerance) / tolerance) - 2) + 1)
