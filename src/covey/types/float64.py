"""float64 where the device has it."""

import torch
from torch import Tensor

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64."""


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def precise(x: Tensor) -> Tensor:
    """`x` in `widest_float` of its device."""
    return x.to(widest_float(x.device))
