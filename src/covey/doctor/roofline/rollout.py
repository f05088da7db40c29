"""Seconds of a rollout by the roofline: each token's step reads the weights and the keys and values once, and launches kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from covey.doctor.roofline.gpus import Gpu

_POINTS = 64
"""Places of a completion at which a step is timed."""
REPLAYED = 1.3e-6
"""Seconds between two kernels of a replayed CUDA graph, during which nothing is read: on an H100 (Hazy Research, "Look Ma, No
Bubbles!", May 2025)."""
LAUNCHED = 5e-6
"""Seconds of the host for a kernel outside of a graph: 4 to 6 us (susun-blog.com, "From Launch Overhead to CUDA Graph", CUDA 13.0). The
device goes on meanwhile, so a step takes this or its own time, whichever is longer."""
KERNELS_OF_A_LAYER = {"qwen3": 45}
"""Kernels that the native engine runs in a layer of a decode step, four of them Triton's attention; a test counts them."""
KERNELS_OF_A_PLAIN_LAYER = 32
"""Of Llama, Qwen2 and Mistral, and taken for all others."""
KERNELS_OF_A_STEP = 65
"""Beside the layers: the embedding, the last norm, the head, the draw, and the tables of rows."""
VLLM_KERNELS_OF_A_LAYER = 7
""""Around a hundred separate kernels" in a step of Llama 3.2 1B, which has 16 layers (the same page)."""


def kernels_of(model_type: str, layers: int, *, is_vllm: bool) -> int:
    """Number of kernels of a decode step."""
    if is_vllm:
        return VLLM_KERNELS_OF_A_LAYER * layers
    return KERNELS_OF_A_LAYER.get(model_type, KERNELS_OF_A_PLAIN_LAYER) * layers + KERNELS_OF_A_STEP


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
    kernels: int
    """Kernels of a token's step."""
    is_replayed: bool = True
    """True: a step is one CUDA graph."""

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
        seconds = max(read / self.gpu.reads, computed / self.gpu.flops(self.item_bytes)) / self.gpus
        return seconds + self.kernels * REPLAYED if self.is_replayed else max(seconds, self.kernels * LAUNCHED)


def rate_of(mean: float, longest: int) -> float:
    """The rate of the exponential distribution that, cut at `longest`, has this mean; 0 where all are `longest`."""
    if mean >= longest:
        return 0.0
    low, high = 1e-9 / longest, 1 / mean
    for _ in range(80):
        rate = (low + high) / 2
        low, high = (rate, high) if -math.expm1(-rate * longest) / rate > mean else (low, rate)
    return (low + high) / 2
