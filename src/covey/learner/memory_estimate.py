"""Memory estimate of a run by category, and the initial token limit of a micro-batch."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import psutil
import torch

from covey.data import vocabulary_size
from covey.errors import MemoryLimitError
from covey.learner.live_memory import LiveBytes
from covey.learner.out_of_memory import BatchLimits
from covey.learner.policy import Policy
from covey.learner.shard_optimizer import embeddings_of
from covey.models import decoder_of, unwrapped
from covey.process.device import free_on
from covey.process.memory import free_memory
from covey.process.world import World


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device by category."""

    weights: int
    reference: int
    """Reference model: a second copy of the trained weights."""
    critic: int
    """The weights of the critic."""
    gradients: int
    optimizer: int
    activations: int
    """Everything else at the peak of an update: activations saved for the backward, and a chunk of logits with its gradient."""
    allocator: int
    """Freed blocks kept by the C library on a CPU, and code and buffers of its libraries. Measured, not derived."""
    sampler: int
    """The sampler's 16-bit copy of float32 weights."""
    cache: int
    """KV cache during sampling, when gradients and activations are freed."""

    @property
    def peak(self) -> int:
        """Peak bytes: the larger of learning and sampling, on top of the permanent categories."""
        stays = self.weights + self.reference + self.critic + self.optimizer + self.allocator + self.sampler
        return stays + max(self.gradients + self.activations, self.cache)

    def in_words(self) -> str:
        """The estimate as a few lines of text."""
        lines = [f"{item.name:<12}{in_gib(getattr(self, item.name)):>12}" for item in fields(self)]
        return "\n".join(
            [*lines, f"{'peak':<12}{in_gib(self.peak):>12}  (beside what Python and torch take themselves)"]
        )


def in_gib(count: float) -> str:
    """Bytes as text, in GiB or a smaller unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB"


_KEYLESS = re.compile("linear|mamba|conv|recurrent|mlp|moe")
"""In the kinds of layers that keep no keys."""


def cache_bytes(config: Any, tokens: int, value_bytes: int) -> int:
    """KV cache of `tokens` tokens in bytes, by formula: the sampler cannot run on fake tensors. Layers with a state keep none.

    `config` is a transformers configuration; `value_bytes` is the element size.
    """
    return int(tokens * 2 * sum(keys * width for _, keys, width in attention_sizes(config)) * value_bytes)


def attention_sizes(config: Any) -> Iterator[tuple[int, int, int]]:
    """Heads of queries, heads of keys and width of a head of each layer that keeps keys; they may differ by layer, as in Gemma 4."""
    text = config.get_text_config()
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    for layer, kind in zip(layers, kinds, strict=False):
        if not _KEYLESS.search(kind):
            heads = getattr(layer, "num_attention_heads", 0)
            width = getattr(layer, "head_dim", None) or layer.hidden_size // max(heads, 1)
            yield heads, getattr(layer, "num_key_value_heads", None) or heads, width


_LIBRARIES = 36 * 2**20
"""Bytes left by sampling, without the weights and their copies; measured with 10 and 60 million parameters: 36 to 45 MiB."""


def allocator_bytes(activations: int, code: int, *, is_checkpointed: bool, is_adapted: bool) -> int:
    """Bytes that a CPU's libraries keep in addition to tensors, by formula: fake tensors use no allocator (measured with glibc on Linux).

    Freed blocks stay in the heap, a share of the activations: most with adapters, whose small tensors lie between large ones, none
    with recomputation alone, where large blocks are returned at once. `code` is oneDNN's compiled code for the matmuls of a step.
    """
    share = 0.25 if is_adapted else 0.0 if is_checkpointed else 0.2
    return _LIBRARIES + int(share * activations) + code


CPU_TOKENS = 4096
"""Most tokens of a micro-batch on a CPU, reached by a single group only, so that its prompt is computed once."""
CPU_ENOUGH = 2048
"""Tokens up to which groups are joined: beyond, a CPU gets no faster (2048, 3072 and 4096 took the same time at 10 and 60
million parameters, and 1024 up to a third more)."""
GPU_TOKENS = 2**17
"""Most tokens of a micro-batch on an accelerator, reached by a single group only."""
GPU_ENOUGH = 2**15
"""Tokens up to which groups are joined on an accelerator. One layer of a 0.5B model (15 million weights) then computes for 4.9 ms a pass,
recomputation and backward included (8 x 15e6 x 2**15 operations at 800 TFLOP/s), and its 258 launches take the host 1.8 ms."""
GPU_FEWEST = 1024
"""Tokens of a micro-batch on an accelerator that has less room by the estimate."""
_ADAM_BYTES = 8
"""Optimizer state of a trained parameter in bytes, float32 moments of Adam; other optimizers hold less."""


def starting_tokens(
    max_tokens: int | str | None,
    policy: Policy,
    *,
    on_cpu: bool,
    bytes_each: Callable[[], float] | None = None,
    room: Callable[[], float] | None = None,
    shards: float = 1,
    context: int = 1,
) -> int | None:
    """Initial token limit of a micro-batch; running out of memory halves it.

    "auto" takes the tokens that fit in half of the free memory. On a CPU, where the system kills a process that runs out, these are at
    most `CPU_TOKENS`. On an accelerator, memory of gradients and optimizer is set apart first, and the limit is a power of two up to
    `GPU_TOKENS`, so that a resumed run splits its steps alike. `bytes_each` and `room` give the bytes of a token and the free bytes
    of a device that is not here; `shards` is the number of devices that will share the
    model, infinite where gradients and optimizer state are elsewhere. `context`: devices that share out the tokens of each row.
    """
    if max_tokens != "auto":
        return None if max_tokens is None else int(max_tokens)
    if on_cpu:
        free = free_memory() or psutil.virtual_memory().available
        each = bytes_each() if bytes_each else bytes_a_token(policy, negligible=0.25 * free / CPU_TOKENS)
        return context * max(256, min(CPU_TOKENS, int(0.5 * free / each)))
    each = bytes_each() if bytes_each else bytes_a_token(policy)
    free_bytes = room() if room else free_on(policy.device) - update_bytes(policy) / shards
    fitting = max(GPU_FEWEST, min(GPU_TOKENS, int(0.5 * free_bytes / each)))
    return context << (fitting.bit_length() - 1)


def update_bytes(policy: Policy) -> int:
    """Bytes that a first update allocates: gradients and the state of Adam."""
    return sum(parameter.nbytes + _ADAM_BYTES * parameter.numel() for parameter in policy.parameters())


_STATES = {"adamw": 2, "adagrad": 1, "rmsprop": 1, "lion": 1, "sgd": 0}
"""State tensors per parameter, by the beginning of the optimizer's name."""


def offloaded_bytes(
    policy: Policy, optimizer: str, *, copies: int = 0, averages: int = 0, has_critic: bool = False, teachers: int = 0
) -> int:
    """Bytes of weights, of so many frozen copies of them, of gradients and of the state of the optimizer of that name.

    `averages`: how many of the copies are averages, which 16-bit weights are kept in float32 for too.
    `has_critic`: a separate critic, a copy of the decoder without adapters, is trained too. `teachers`: bytes of their weights.
    """
    named = decoder_of(unwrapped(policy.model)).named_parameters() if has_critic else ()
    critic = [p for name, p in named if ".lora_" not in name]
    trained: list[torch.Tensor] = [*policy.parameters(), *critic]
    gradients, numbers = sum(p.nbytes for p in trained), sum(p.numel() for p in trained)
    stored = gradients if "torch" in optimizer or optimizer in _STATES else 4 * numbers  # bitsandbytes: float32
    if "8bit" in optimizer:
        embeddings = embeddings_of(policy.model)
        stored = sum(p.numel() * (4 if id(p) in embeddings else 1) for p in trained)
    state = next((count for name, count in _STATES.items() if name in optimizer), 2)
    weights = sum(p.nbytes for p in policy.model.parameters())
    others = sum(p.nbytes for p in critic) + teachers
    others += averages * sum(4 * p.numel() for p in policy.model.parameters() if p.element_size() == 2)
    return int(weights * (1 + copies) + others + gradients + state * stored)


def expect_host_room(needed: int, world: World, held: int = 0) -> None:
    """Raise MemoryLimitError on every process unless the host memory of each machine has room for its processes.

    `needed`: bytes of all processes of the run. `held`: bytes that each process will free.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    free = free_memory()
    mine = max(0, needed * here // world.size - held * here)
    if world.any(free is not None and mine > free):
        raise MemoryLimitError(
            f"fsdp's offload keeps weights, gradients and the optimizer's state in host memory: {in_gib(mine)} for the {here} process(es) "
            f"of this machine, and {in_gib(free or 0)} are free; leave the offload out, use an 8-bit optimizer "
            "(optim='adamw_8bit'), or train an adapter (peft_config)."
        )


def starting_limits(option: int | str | None, batch: int, step: int, *, on_cpu: bool, **more: Any) -> BatchLimits:
    """Limits of the first micro-batches, from `max_tokens_per_microbatch` and the completions of a batch and of a step of this process.

    On an accelerator tokens alone limit a micro-batch, so the row limit is the whole step, unless tokens have no limit (None). With
    "auto", groups are joined up to a number of tokens that keeps the processor busy. `more`: other fields of `BatchLimits`.
    """
    rows = batch if on_cpu or option is None else max(batch, step)
    enough = (CPU_ENOUGH if on_cpu else GPU_ENOUGH) if option == "auto" else None
    return BatchLimits(rows, enough_tokens=enough, options=(option, batch), **more)


_TRIED = (32, 32, 96)
"""Tokens of the measured rows; the first is a warm-up for lazy initialization."""
_STEEPER = (_TRIED[1] + _TRIED[2]) / _TRIED[0]
"""Most that a token may add between the last two rows, by the mean of the first: bytes are a polynomial of degree 2 in the tokens,
without negative coefficients (a t^2 + b t + c adds a (t1 + t2) + b, and has a t0 + b + c / t0 a token)."""
_MOST_AT_A_TIME = 2  # bytes of both passes, by all that the forward allocates; measured: at most 1.1


def bytes_a_token(policy: Policy, *, is_warm: bool = False, negligible: float = 0.0) -> float:
    """Bytes of a decoder's forward and backward pass per additional token, measured on short rows.

    Gradients and the state of the random generator stay as they are. `is_warm`: the model has run before, so
    the warm-up pass is skipped. Where its forward shows that a token takes no more than `negligible` bytes, the result is this bound.
    """
    decoder = decoder_of(policy.model)
    embedding = unwrapped(policy.model).get_input_embeddings()
    peaks = list[int]()
    for count in _TRIED[1:] if is_warm else _TRIED:
        is_first = not is_warm and not peaks
        ids = (torch.arange(count) % vocabulary_size(policy.model))[None].to(policy.device)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), LiveBytes() as live, policy.autocast():
            start = embedding(ids).detach().requires_grad_()  # no gradient of the weights is computed
            with embedding.register_forward_hook(lambda *_, start=start: start):  # Gemma 4 needs the ids too
                total = decoder(input_ids=ids, use_cache=False)[0].float().sum()
            if is_first and _STEEPER * _MOST_AT_A_TIME * live.total / count <= negligible:
                return negligible
            torch.autograd.grad(total, start)
        peaks.append(live.peak)
        if is_first and _STEEPER * live.peak / count <= negligible:
            return negligible
    return float(max(1.0, (peaks[-1] - peaks[-2]) / (_TRIED[-1] - _TRIED[-2])))
