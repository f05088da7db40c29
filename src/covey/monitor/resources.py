"""Resource use of a step: tokens by kind, and memory."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from covey.process.device import PeakBytes
from covey.types import Group, Max, Metric, Sum

_PHASE = PeakBytes()
"""Peak of a phase, of whichever run of this process."""


def token_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """`tokens/prompts`, each group's prompt once, as prefill does, and `tokens/completions`, the generated tokens."""
    return {
        "tokens/prompts": Sum(float(sum(len(group.prompt.token_ids) for group in groups))),
        "tokens/completions": Sum(float(sum(c.num_tokens for group in groups for c in group.completions))),
    }


def memory_metrics(phase: str) -> dict[str, Metric]:
    """At the end of a phase, in GB of 10^9 bytes: `memory/<phase>_gb`, what this process holds, and on a GPU
    `memory/<phase>_device_peak_gb`, the most that tensors held since the phase before.
    """
    metrics: dict[str, Metric] = {f"memory/{phase}_gb": Max(psutil.Process().memory_info().rss / 1e9)}
    if torch.cuda.is_available():
        metrics[f"memory/{phase}_device_peak_gb"] = Max(_PHASE.restart() / 1e9)
    return metrics
