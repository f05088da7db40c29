"""float64 where the device has it, and comparisons of what was float32."""

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
