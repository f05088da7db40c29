"""Seconds of a rollout by the roofline: each token's step reads the weights and the keys and values once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from covey.doctor.roofline.gpus import Gpu

_POINTS = 64
"""Places of a completion at which a step is timed."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A model as a sampler sees it, and the completions of one engine."""

    gpu: Gpu
    gpus: int
    """GPUs of one engine (tensor parallel)."""
    weights: int
    """Bytes that a token's step reads."""
    parameters: int
    key_bytes: int
    """Bytes of keys and values of one token."""
    room: int
    """Bytes for keys and values on all GPUs of the engine."""
    item_bytes: int
    """Bytes of one weight."""

    def seconds(self, completions: int, group: int, prompt: int, mean: float, longest: int) -> float:
        """Of `completions` in groups of `group` behind prompts of `prompt` tokens.

        Lengths are exponential, cut at `longest`, with this mean; all are `longest` where the mean is. So few are still running
        at the end, and their steps read the weights all the same. Keys of a prompt are held once a group, and read by each.
        """
        slots = max(1, min(completions, int(self.room // max(1, self.key_bytes * (mean + prompt / group)))))
        waves = completions / slots
        rate = rate_of(mean, longest)
        width = longest / _POINTS
        steps = 0.0
        for point in range(_POINTS):
            at = (point + 0.5) * width
            steps += width * self._step(max(1.0, slots * math.exp(-rate * at)), prompt + at)
        full = mean * self._step(slots, prompt + mean / 2)  # a wave that is not the last is joined by the next
        prefill = 2 * self.parameters * prompt * (completions / group) / (self.gpus * self.gpu.flops(self.item_bytes))
        return steps + max(0.0, waves - 1) * full + prefill

    def rate(self, completions: int, prompt: int, mean: float) -> float:
        """Tokens a second while so many are running without end."""
        slots = max(1, min(completions, int(self.room // max(1, self.key_bytes * (mean + prompt)))))
        return slots / self._step(slots, prompt + mean / 2)

    def _step(self, running: float, context: float) -> float:
        read = self.weights + running * context * self.key_bytes
        computed = 2 * self.parameters * running
        return max(read / self.gpu.reads, computed / self.gpu.flops(self.item_bytes)) / self.gpus


def rate_of(mean: float, longest: int) -> float:
    """The rate of the exponential distribution that, cut at `longest`, has this mean; 0 where all are `longest`."""
    if mean >= longest:
        return 0.0
    low, high = 1e-9 / longest, 1 / mean
    for _ in range(80):
        rate = (low + high) / 2
        low, high = (rate, high) if -math.expm1(-rate * longest) / rate > mean else (low, rate)
    return (low + high) / 2
