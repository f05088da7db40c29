"""Memory of a run by what holds it, and the tokens of a forward pass at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import psutil
import torch

from covey.learner.live_memory import LiveBytes
from covey.learner.policy import Policy
from covey.models import decoder_of, unwrapped
from covey.process.memory import free_memory


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by what they hold."""

    weights: int
    reference: int
    """A second copy of what is trained."""
    critic: int
    """The weights of the critic."""
    gradients: int
    optimizer: int
    activations: int
    """All else at the peak of an update: what layers keep for the backward, and a chunk of logits with its gradient."""
    allocator: int
    """Freed blocks that a CPU's C library keeps, and code and buffers of its libraries. Measured, not derived."""
    sampler: int
    """The copy of float32 weights that is sampled with in 16 bits."""
    cache: int
    """Keys and values while completions are drawn; gradients and activations are gone then."""

    @property
    def peak(self) -> int:
        """The larger of learning and sampling, on top of what stays."""
        stays = self.weights + self.reference + self.critic + self.optimizer + self.allocator + self.sampler
        return stays + max(self.gradients + self.activations, self.cache)

    def in_words(self) -> str:
        """A few lines for a person."""
        lines = [f"{item.name:<12}{in_gib(getattr(self, item.name)):>12}" for item in fields(self)]
        return "\n".join(
            [*lines, f"{'peak':<12}{in_gib(self.peak):>12}  (beside what Python and torch take themselves)"]
        )


def in_gib(count: float) -> str:
    """Bytes in a unit that reads well."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB"


def cache_bytes(config: Any, tokens: int, value_bytes: int) -> int:
    """Keys and values of so many tokens, by formula: the sampler decodes on memory that fake tensors do not have.

    `config` is a transformers configuration; `value_bytes` is the size of one number.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = (getattr(text, "num_key_value_heads", None) or heads) * width
    return tokens * text.num_hidden_layers * 2 * keys * value_bytes


_LIBRARIES = 36 * 2**20
"""Measured with 10 and with 60 million parameters: sampling leaves 36 to 45 MiB beside the weights and any copy of them."""


def allocator_bytes(activations: int, code: int, *, is_checkpointed: bool, is_adapted: bool) -> int:
    """Bytes that a CPU's libraries keep beside tensors, by formula: fake tensors meet no allocator (measured with glibc on Linux).

    Freed blocks stay in the heap, by a share of the activations; where these are recomputed, large blocks go back at once. PEFT
    puts small tensors between large ones, which then stay. `code` is what oneDNN keeps for the products of a step.
    """
    share = 1.0 if is_adapted else 0.0 if is_checkpointed else 0.25
    return _LIBRARIES + int(share * activations) + code


CPU_TOKENS = 4096
"""Tokens of one forward pass on a CPU at most: for one group, whose prompt would otherwise be computed more than once."""
CPU_ENOUGH = 2048
"""Tokens that groups are joined up to: beyond, a CPU gets no faster (2048, 3072 and 4096 took the same time at 10 and 60
million parameters, and 1024 up to a third more)."""


def starting_tokens(
    asked: int | str | None, policy: Policy, *, on_cpu: bool, bytes_each: Callable[[], float] | None = None
) -> int | None:
    """Tokens of one forward pass at the start; running out of memory halves them.

    "auto" sets no bound on an accelerator, which says when memory is short. A CPU does not (the system kills), so there
    it is as much as half of the free memory holds, and no more than `CPU_TOKENS`. `bytes_each` measures the bytes of a token
    otherwise than on this policy.
    """
    if asked != "auto":
        return None if asked is None else int(asked)
    if not on_cpu:
        return None
    free = free_memory() or psutil.virtual_memory().available
    return max(256, min(CPU_TOKENS, int(0.5 * free / (bytes_each() if bytes_each else bytes_a_token(policy)))))


def enough_tokens(asked: int | str | None, *, on_cpu: bool) -> int | None:
    """Tokens of one forward pass beyond which "auto" joins no more groups; None for no such bound."""
    return CPU_ENOUGH if asked == "auto" and on_cpu else None


_TRIED = (32, 32, 96)
"""Tokens of the rows that are computed; the first loads what is loaded on first use."""


def bytes_a_token(policy: Policy, *, is_warm: bool = False) -> float:
    """Bytes that a forward and backward pass of the decoder holds for one token more, measured on short rows.

    Gradients and the state of the random generator stay as they are. `is_warm`: nothing is loaded on first use any more, so
    that two passes tell.
    """
    decoder = decoder_of(policy.model)
    embedding = unwrapped(policy.model).get_input_embeddings()
    peaks = []
    for count in _TRIED[1:] if is_warm else _TRIED:
        ids = (torch.arange(count) % embedding.num_embeddings)[None].to(policy.device)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), LiveBytes() as live, policy.autocast():
            start = embedding(ids).detach().requires_grad_()  # of the weights no gradient is computed
            found = decoder(inputs_embeds=start, use_cache=False)[0].float().sum()
            torch.autograd.grad(found, start)
        peaks.append(live.peak)
    return max(1.0, (peaks[-1] - peaks[-2]) / (_TRIED[-1] - _TRIED[-2]))
