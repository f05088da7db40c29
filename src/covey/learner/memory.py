"""About how much memory a run needs, from the model's shape alone: nothing is loaded, nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import psutil
import torch
from torch import nn

from covey.compiled import why_not
from covey.compiled.linear import is_for_this_processor
from covey.fused_layers import would_fuse
from covey.learner.fused_head import chunk_for
from covey.learner.packing import limit_of
from covey.memory import free_memory
from covey.products import KEPT, fits, is_mkls, is_onednn_faster, repeating


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a causal language model decides its memory."""

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    key_value_width: int
    """Key heads times their size: what one layer keeps of a token, twice (keys and values)."""
    linears: tuple[tuple[int, int], ...]
    """(in, out) of every linear layer but the output head: where adapters sit."""
    is_tied: bool = True
    """Whether head and embedding are one parameter."""
    is_fused: bool = False
    """Whether a CPU like this one's computes what stands between the products by kernels (`covey.fused_layers`)."""
    is_paired: bool = False
    """Whether it multiplies bfloat16 in pairs by kernels (`covey.compiled.linear`)."""

    @staticmethod
    def of(config: Any) -> Shape:
        """From a transformers configuration; the model is built without storage."""
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM  # its methods carry no types
        with torch.device("meta"):
            return Shape.of_model(auto.from_config(config))

    @staticmethod
    def of_model(model: Any) -> Shape:
        """From a model, loaded or without storage."""
        text = model.config.get_text_config()
        heads = text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        head = model.get_output_embeddings()
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        return Shape(
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            num_layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocabulary=text.vocab_size,
            key_value_width=size * (getattr(text, "num_key_value_heads", None) or heads),
            linears=tuple((m.in_features, m.out_features) for m in linears),
            is_tied=head is not None and head.weight is model.get_input_embeddings().weight,
            is_fused=would_fuse(model),
            is_paired=why_not() is None and is_for_this_processor(),
        )

    def elsewhere(self) -> Shape:
        """On another device than a CPU."""
        return replace(self, is_fused=False, is_paired=False)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of a LoRA adapter of this rank on every linear layer but the output head."""
        return sum(rank * (inside + outside) for inside, outside in self.linears)

    def left_to_onednn(self, sizes: Iterable[tuple[int, int]], compute_bytes: int) -> set[tuple[int, int]]:
        """Which of these (in, out) are not multiplied in pairs: it keeps code for each count of rows, torch a cast weight."""
        return {size for size in sizes if not (self.is_paired and compute_bytes == 2 and fits(*size))}

    def product_sizes(self, compute_bytes: int, adapter_rank: int | None = None) -> int:
        """Sizes of oneDNN's products that a forward and backward pass meets in the linear layers, for one count of rows.

        Each pair of widths forward, for the gradient of its input, and, where it is trained, for that of its weight.
        """
        own = set(self.linears)
        left = self.left_to_onednn(own, compute_bytes)
        if adapter_rank is None:
            return 3 * len(left)
        adapters = {size for inside, outside in own for size in ((inside, adapter_rank), (adapter_rank, outside))}
        return 2 * len(left) + 3 * len(self.left_to_onednn(adapters, compute_bytes))

    def layer_bytes(self, compute_bytes: int, adapter_rank: int | None = None) -> int:
        """What one token leaves behind in one layer for the backward (counted by torch's saved-tensor hooks on Qwen2).

        A gated layer in float32 keeps 8 hidden, 2 key-value and 4 intermediate values, fused 6, 2 and 2. With products in 16
        bits the residual stream, and unfused the norms, stay in float32. Behind an adapter the norms are frozen and, unfused,
        keep one value less each; every linear layer keeps `adapter_rank` more, and fused a gated one its product.
        """
        width, keys, inner = self.hidden, self.key_value_width, self.intermediate
        rank = (adapter_rank or 0) * len(self.linears) // self.num_layers
        is_adapted, is_narrow = adapter_rank is not None, compute_bytes < 4
        if self.is_fused:
            by_width, by_inner = (16, 6 if is_adapted else 4) if is_narrow else (24, 12 if is_adapted else 8)
        else:
            by_width, by_inner = (24 if is_adapted else 30, 8) if is_narrow else (24 if is_adapted else 32, 16)
        return by_width * width + 2 * compute_bytes * keys + by_inner * inner + compute_bytes * rank

    def cache_bytes(self, compute_bytes: int) -> int:
        """What the keys and values of one token take."""
        return self.num_layers * 2 * self.key_value_width * compute_bytes

    def activation_bytes(self, compute_bytes: int, is_checkpointed: bool, adapter_rank: int | None = None) -> int:
        """What one token leaves behind. With checkpointing each layer keeps its input, and one layer at a time the rest."""
        layer = self.layer_bytes(compute_bytes, adapter_rank)
        ends = 4 * 4 * self.hidden  # embedding and last norm
        return ends + (self.num_layers * self.hidden * 4 + layer if is_checkpointed else self.num_layers * layer)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by what they hold."""

    weights: int
    reference: int
    critic: int
    """The weights of a critic with a model of its own."""
    gradients: int
    optimizer: int
    activations: int
    logits: int
    """Of a chunk, what the head makes of them, and the gradients of head and embedding before they are summed."""
    heap: int
    """What a CPU's C library keeps between tensors that come and go; none where large blocks go back to the system at once."""
    sampler: int
    """The copy of the weights that a CPU samples with in 16 bits, and what a 16-bit product of float32 weights needs."""
    libraries: int
    """On a CPU: what oneDNN keeps for every size of product that it meets, and what small blocks keep of the heap."""
    cache: int
    """Keys and values while completions are drawn; activations and logits are gone then."""

    @property
    def peak(self) -> int:
        """The larger of learning and sampling, on top of what stays."""
        stays = self.weights + self.reference + self.critic + self.optimizer + self.sampler + self.libraries
        return stays + max(self.gradients + self.activations + self.logits + self.heap, self.cache)

    def in_words(self) -> str:
        """A few lines for a person."""
        lines = [f"{item.name:<12}{in_gib(getattr(self, item.name)):>12}" for item in fields(self)]
        return "\n".join(
            [*lines, f"{'peak':<12}{in_gib(self.peak):>12}  (beside what Python and torch take themselves)"]
        )


def estimate(
    shape: Shape,
    *,
    weight_bytes: int,
    compute_bytes: int,
    optimizer: str,
    rows: int,
    prompt_tokens: int,
    completion_tokens: int,
    max_tokens: int | None,
    enough_tokens: int | None = None,
    logits_chunk: int | None,
    is_checkpointed: bool,
    has_reference: bool,
    adapter_rank: int | None,
    prompts: int,
    group: int,
    has_critic_model: bool = False,
    samples_in_copy: bool = False,
    is_on_heap: bool = False,
) -> Memory:
    """Bytes of a run on one device.

    `rows` completions of `completion_tokens` are a micro-batch, a group's prompt counted once, bounded by `max_tokens` and
    `enough_tokens` (see `microbatches`); `prompts` times `group` are drawn at a time, the prompt stored once a group.
    `samples_in_copy`: a CPU that samples in bfloat16 keeps a copy of the weights for it. `is_on_heap`: a CPU, whose activations
    leave holes.
    """
    shape = shape if is_on_heap else shape.elsewhere()
    trained = shape.num_parameters if adapter_rank is None else shape.adapter_parameters(adapter_rank)
    of_critic = shape.num_parameters if has_critic_model else 0
    kept = _product_bytes(shape, compute_bytes, adapter_rank) if is_on_heap else 0
    pads = is_on_heap and (kept > 0 if compute_bytes == 2 else not is_mkls(torch.float32))
    tokens = _most_tokens(rows, group, prompt_tokens, completion_tokens, max_tokens, enough_tokens, pads)
    own_bytes, is_cast = weight_bytes if adapter_rank is None else 4, compute_bytes < weight_bytes
    chunk = min(chunk_for(shape.vocabulary, logits_chunk), tokens)
    updated = trained * own_bytes + of_critic * weight_bytes
    drawn = prompts * group * completion_tokens
    activations = tokens * shape.activation_bytes(compute_bytes, is_checkpointed, adapter_rank)
    keeps_holes = is_on_heap and not is_checkpointed
    at_head, at_end = _head_bytes(shape, chunk, compute_bytes, is_cast, adapter_rank is None)
    if is_checkpointed:  # a layer that is computed again and the head's logits never exist together
        waiting = at_end // 2 if shape.is_tied else 0
        at_head = max(at_head - tokens * shape.layer_bytes(compute_bytes, adapter_rank), waiting)
    return Memory(
        weights=shape.num_parameters * weight_bytes + (0 if adapter_rank is None else trained * 4),
        reference=shape.num_parameters * weight_bytes if has_reference and adapter_rank is None else 0,
        critic=of_critic * weight_bytes,
        gradients=updated,
        optimizer=int(updated * _state_bytes(optimizer, own_bytes) / own_bytes),
        activations=activations,
        logits=max(at_head, at_end - (0 if keeps_holes else activations)),
        heap=int(_holes(adapter_rank) * activations) if keeps_holes else 0,
        sampler=_cast_bytes(shape, compute_bytes) * is_cast + 2 * shape.num_parameters * samples_in_copy,
        libraries=kept + (_LIBRARIES if is_on_heap else 0),
        cache=(prompts * prompt_tokens + drawn) * shape.cache_bytes(2 if samples_in_copy else compute_bytes),
    )


def _most_tokens(
    rows: int, group: int, prompt: int, completion: int, max_tokens: int | None, enough_tokens: int | None, pads: bool
) -> int:
    """Of the micro-batch that `rows` completions of `completion` tokens begin with, in groups of `group` behind prompts of `prompt`.

    With what `pads` it to a length that returns. Batches of whole groups are mostly smaller; shorter completions fill them.
    """
    groups, whole = -(-rows // group), prompt + min(group, rows) * completion
    every = rows * completion + groups * prompt
    limit = limit_of(whole, max_tokens, enough_tokens)
    tokens = every if limit is None else min(every, max(limit, prompt + completion))
    return repeating(tokens) if pads else tokens


def _holes(adapter_rank: int | None) -> float:
    """Share of the activations that holes of the heap take beside them (measured by benchmarks/memory.py with glibc on Linux).

    PEFT's modules put small tensors between large ones.
    """
    return 0.25 if adapter_rank is None else 0.4


def _cast_bytes(shape: Shape, compute_bytes: int) -> int:
    """What autocast keeps of the weights in 16 bits while a forward pass lasts."""
    left = shape.left_to_onednn(shape.linears, compute_bytes)
    return 2 * sum(inside * outside for inside, outside in shape.linears if (inside, outside) in left)


def _product_bytes(shape: Shape, compute_bytes: int, adapter_rank: int | None) -> int:
    """What oneDNN keeps of a CPU's products, where they are its: those in 16 bits, and in float32 where it is the faster one."""
    if compute_bytes != 2 and not is_onednn_faster():
        return 0
    return shape.product_sizes(compute_bytes, adapter_rank) * _ROW_COUNTS * KEPT


def _head_bytes(shape: Shape, chunk: int, compute_bytes: int, is_cast: bool, is_trained: bool) -> tuple[int, int]:
    """Bytes beside the activations while the head's backward runs, and at the end of the backward, before gradients are summed.

    The head holds a chunk's logits, probabilities and their gradient. Products in 16
    bits also hold a copy of its weight and one product of its size; in pairs two copies, and the turned gradient. The gradient of a tied head waits for the embedding's, which is whole too, until the very end.
    """
    values = shape.vocabulary * shape.hidden
    chunks, gradient = 3 * 4 * chunk * shape.vocabulary, 4 * values if is_trained else 0
    copies = (4 if is_trained else 2) * values if is_cast else 0
    if not shape.left_to_onednn([(shape.hidden, shape.vocabulary)], compute_bytes):
        copies = 4 * values + (2 * chunk * shape.vocabulary if is_trained else 0)
    return chunks + gradient + copies, gradient * (2 if shape.is_tied else 1)


_LIBRARIES = 36 * 2**20
"""Measured with 10 and with 60 million parameters: sampling leaves 36 to 45 MiB beside the weights and any copy of them."""

_ROW_COUNTS = 6
"""Counts of rows that a run meets whose completions are all of full length (2 to 6 in 100 steps of the benchmark's prompts).
Where lengths vary there are up to eight between each power of two and its double, in smaller micro-batches."""

CPU_TOKENS = 4096
"""Tokens of one forward pass on a CPU at most: for one group, whose prompt would otherwise be computed more than once."""
CPU_ENOUGH = 2048
"""Tokens that groups are joined up to: beyond, a CPU gets no faster (2048, 3072 and 4096 took the same time at 10 and 60
million parameters, and 1024 up to a third more)."""


def starting_tokens(
    asked: int | str | None, shape: Shape, *, on_cpu: bool, compute_bytes: int, is_checkpointed: bool
) -> int | None:
    """Tokens of one forward pass at the start; running out of memory halves them.

    "auto" sets no bound on an accelerator, which says when memory is short. A CPU does not (the system kills), so there
    it is as much as half of the free memory holds, and no more than `CPU_TOKENS`.
    """
    if asked != "auto":
        return None if asked is None else int(asked)
    if not on_cpu:
        return None
    free = free_memory() or psutil.virtual_memory().available
    return max(256, min(CPU_TOKENS, int(0.5 * free / shape.activation_bytes(compute_bytes, is_checkpointed))))


def enough_tokens(asked: int | str | None, *, on_cpu: bool) -> int | None:
    """Tokens of one forward pass beyond which "auto" joins no more groups; None for no such bound."""
    return CPU_ENOUGH if asked == "auto" and on_cpu else None


def _state_bytes(optimizer: str, weight_bytes: int) -> float:
    """Bytes of optimizer state for a parameter: Adam's two moments in the parameter's own type, unless its name says less."""
    if optimizer.startswith(("sgd", "adafactor")):
        return 0.0
    name = optimizer.removeprefix("paged_")
    moments = 1 if name.startswith(("lion", "rmsprop", "adagrad")) else 3 if name.startswith("ademamix") else 2
    is_bnb = name.endswith(("_32bit", "_bnb", "ademamix"))  # bitsandbytes: float32 whatever the weights are
    size = 1.0 if "8bit" in name else 0.5 if "4bit" in name else 4.0 if is_bnb else float(weight_bytes)
    return moments * size


def in_gib(count: float) -> str:
    """Bytes in a unit that reads well."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB"
