"""Seconds of a rollout by the roofline: each token's step reads the weights and the keys and values once, and launches kernels."""

import math
from dataclasses import dataclass

from covey.doctor.roofline.gpus import Gpu

_POINTS = 64
"""Places of a completion at which a step is timed."""
A_KERNEL = 4.9e-6
"""Seconds of a kernel of a replayed CUDA graph on top of the bytes that it reads: the gap before it, its start, and numbers that
come from the cache. Fitted to three rollouts of Qwen2.5 0.5B on one H100 SXM, torch 2.11, 2026-11-26 (a test has them)."""
LAUNCHED = 40e-6
"""Seconds of the host for an operation outside of a graph: 79,291 launches of a learner's step took 3.9 s (the same H100). The
device goes on meanwhile, so a step takes this or its own time, whichever is longer."""
KERNELS_OF_A_LAYER = 9
"""Kernels that the native engine runs in a layer of a decode step of Llama, Qwen2, Qwen3 and Mistral: four products, two norms,
SiLU, and two of attention (`tests/rollout/test_decode_launches.py` counts them)."""
KERNELS_OF_MODULES = 21
"""Of a layer of other families, which transformers' modules compute: Gemma 3's; 14 to 24 without experts (`test_step_kernels.py`)."""
KERNELS_OF_A_STEP = 7
"""On top of the layers: the embedding, the last norm, the head, two of the draw, and two of the cache."""
PASSES_OF_LOGITS = 2
"""The head writes the logits of a step, and the draw reads them."""
VLLM_KERNELS_OF_A_LAYER = 7
""""Around a hundred separate kernels" in a step of Llama 3.2 1B, which has 16 layers (the same page)."""


def kernels_of(model_type: str, layers: int, *, is_vllm: bool) -> int:
    """Number of kernels of a decode step."""
    if is_vllm:
        return VLLM_KERNELS_OF_A_LAYER * layers
    is_written_out = model_type in ("llama", "qwen2", "qwen3", "mistral")
    return (KERNELS_OF_A_LAYER if is_written_out else KERNELS_OF_MODULES) * layers + KERNELS_OF_A_STEP


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
    logit_bytes: int = 0
    """Bytes of logits that a step moves for each completion."""
    is_replayed: bool = True
    """True: a step is one CUDA graph."""
    shares_prompts: bool = True
    """True: the keys of a prompt are read once for its group; False: by each completion."""

    def seconds(self, completions: int, group: int, prompt: int, mean: float, longest: int) -> float:
        """Seconds to sample `completions` in groups of `group`, after prompts of `prompt` tokens.

        Lengths are exponential, cut at `longest`, with this mean; all are `longest` where the mean is. So few are still running
        at the end, and their steps read the weights all the same.
        """
        slots = max(1, min(completions, int(self.room // max(1, self.key_bytes * (mean + prompt / group)))))
        waves = completions / slots
        rate = rate_of(mean, longest)
        width = longest / _POINTS
        steps = 0.0
        for point in range(_POINTS):
            at = (point + 0.5) * width
            steps += width * self._step(max(1.0, slots * math.exp(-rate * at)), prompt, at, group)
        full = mean * self._step(slots, prompt, mean / 2, group)  # a wave that is not the last is joined by the next
        prefill = 2 * self.parameters * prompt * (completions / group) / (self.gpus * self.gpu.flops(self.item_bytes))
        return steps + max(0.0, waves - 1) * full + prefill

    def rate(self, completions: int, prompt: int, mean: float) -> float:
        """Tokens a second at a constant number of running completions."""
        slots = max(1, min(completions, int(self.room // max(1, self.key_bytes * (mean + prompt)))))
        return slots / self._step(slots, prompt, mean / 2, 1)

    def _step(self, running: float, prompt: float, written: float, group: int) -> float:
        """Seconds of a decoding step of `running` completions that have `written` tokens each after the prompt of their group."""
        prompts = running / group if self.shares_prompts else running
        read = self.weights + self.key_bytes * (prompts * prompt + running * written) + self.logit_bytes * running
        computed = 2 * self.parameters * running
        seconds = max(read / self.gpu.reads, computed / self.gpu.flops(self.item_bytes)) / self.gpus
        seconds += self.kernels * A_KERNEL
        return seconds if self.is_replayed else max(seconds, self.kernels * LAUNCHED)


def rate_of(mean: float, longest: int) -> float:
    """The rate of the exponential distribution that, cut at `longest`, has this mean; 0 where all are `longest`."""
    if mean >= longest:
        return 0.0
    low, high = 1e-9 / longest, 1 / mean
    for _ in range(80):
        rate = (low + high) / 2
        low, high = (rate, high) if -math.expm1(-rate * longest) / rate > mean else (low, rate)
    return (low + high) / 2
