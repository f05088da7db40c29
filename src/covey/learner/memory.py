"""About how much memory a run needs, from the model's shape alone: nothing is loaded, nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn


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

    @staticmethod
    def of(config: Any) -> Shape:
        """From a transformers configuration; the model is built without storage."""
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM  # its methods carry no types
        with torch.device("meta"):
            model = auto.from_config(config)
        text = config.get_text_config()
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
        )

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of a LoRA adapter of this rank on every linear layer but the output head."""
        return sum(rank * (inside + outside) for inside, outside in self.linears)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by what they hold."""

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    cache: int
    """Keys and values while completions are drawn; activations and logits are gone then."""

    @property
    def peak(self) -> int:
        """The larger of learning and sampling, on top of what stays."""
        stays = self.weights + self.reference + self.optimizer
        return stays + max(self.gradients + self.activations + self.logits, self.cache)

    def in_words(self) -> str:
        """A few lines for a person."""
        lines = [f"{item.name:<12}{in_gib(getattr(self, item.name)):>12}" for item in fields(self)]
        return "\n".join([*lines, f"{'peak':<12}{in_gib(self.peak):>12}  (estimate; expect a third more or less)"])


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
    logits_chunk: int,
    is_checkpointed: bool,
    has_reference: bool,
    adapter_rank: int | None,
    prompts: int,
    group: int,
) -> Memory:
    """Bytes of a run on one device.

    `rows` completions of `completion_tokens` are a micro-batch, bounded by `max_tokens`; `prompts` times `group` are
    drawn at a time, the prompt stored once a group. A layer keeps about 10 hidden and 4 intermediate values of a token
    for its backward (Korthikanti et al. 2022, table 2, without dropout and attention matrices); under checkpointing
    each layer keeps its input, and one layer at a time keeps the rest.
    """
    trained = shape.num_parameters if adapter_rank is None else shape.adapter_parameters(adapter_rank)
    adapter = 0 if adapter_rank is None else trained
    tokens = rows * (prompt_tokens + completion_tokens)
    tokens = tokens if max_tokens is None else min(tokens, max_tokens)
    layer = (10 * shape.hidden + 2 * shape.key_value_width + 4 * shape.intermediate) * compute_bytes
    kept = shape.num_layers * shape.hidden * compute_bytes + layer if is_checkpointed else shape.num_layers * layer
    cached = prompts * (prompt_tokens + group * completion_tokens)
    return Memory(
        weights=shape.num_parameters * weight_bytes + adapter * 4,
        reference=shape.num_parameters * weight_bytes if has_reference and adapter_rank is None else 0,
        gradients=trained * (4 if adapter else weight_bytes),
        optimizer=int(trained * _state_bytes(optimizer, 4 if adapter else weight_bytes)),
        activations=tokens * kept,
        logits=3 * min(logits_chunk, tokens) * shape.vocabulary * 4,  # logits, probabilities and their gradient
        cache=cached * shape.num_layers * 2 * shape.key_value_width * compute_bytes,
    )


def _state_bytes(optimizer: str, weight_bytes: int) -> float:
    """Bytes of optimizer state for a parameter: Adam's two moments in the parameter's own type, unless its name says less."""
    if optimizer.startswith(("sgd", "adafactor")):
        return 0.0
    moments = 1 if optimizer.startswith(("lion", "paged_lion", "rmsprop", "adagrad")) else 2
    size = 1.0 if "8bit" in optimizer else 0.5 if "4bit" in optimizer else float(weight_bytes)
    return moments * size


def in_gib(count: float) -> str:
    """Bytes in a unit that reads well."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.1f} KiB"
