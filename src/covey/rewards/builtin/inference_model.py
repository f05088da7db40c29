"""A model that only reads: loaded from a folder or a hub id with its own tokenizer, run in batches of like length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from covey.data.rendering import chat_ids, spells_control
from covey.errors import ModelError, RewardError, TooLongError, message_of
from covey.models import quiet_bars
from covey.rewards.adaptive_batches import AdaptiveBatches
from covey.rewards.builtin.text import clean

Kind = Literal["encoder", "classifier", "token classifier", "causal"]

_CLASSES = {
    "encoder": "AutoModel",
    "classifier": "AutoModelForSequenceClassification",
    "token classifier": "AutoModelForTokenClassification",
    "causal": "AutoModelForCausalLM",
}


@dataclass(frozen=True, eq=False)
class Frozen:
    """Model and tokenizer in evaluation mode; padded on the right, longest texts last."""

    model: Any
    tokenizer: Any
    name: str
    batch_size: int = 16
    is_placed: bool = False
    """True if the user chose its device, so that `to` leaves it there."""

    @staticmethod
    def of(
        kind: Kind,
        model: Any,
        tokenizer: Any = None,
        *,
        device: Any = None,
        dtype: str = "float32",
        batch_size: int = 16,
    ) -> Frozen:
        """Load `model`, or take it as it is. Raises ModelError when it, its head or its tokenizer is not there."""
        if batch_size < 1:
            raise ModelError(f"batch_size={batch_size} lets no text through; use at least 1.")
        loaded = _load(kind, str(model), dtype) if isinstance(model, str | Path) else model
        name = str(getattr(loaded.config, "_name_or_path", "") or type(loaded).__name__).rstrip("/").split("/")[-1]
        tokenizer = _load_tokenizer(model, name) if tokenizer is None else tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if kind == "classifier":  # decoders read the score at the last token that is no padding
            loaded.config.pad_token_id = tokenizer.pad_token_id
        loaded = loaded.eval().requires_grad_(False)
        if device is not None:
            loaded.to(device)
        return Frozen(loaded, tokenizer, name, batch_size, device is not None)

    @cached_property
    def portions(self) -> AdaptiveBatches:
        """Batches of texts, sized to the memory."""
        return AdaptiveBatches(self.name, self.batch_size)

    def to(self, device: Any) -> None:
        """Move it, unless its device was chosen or it is spread over several."""
        if not self.is_placed and getattr(self.model, "hf_device_map", None) is None:
            self.model.to(device)

    def ids(
        self, text: str, pair: str | None = None, *, special: bool = True, reads_control: bool = False
    ) -> list[int]:
        """Token ids of a text, or of two in the tokenizer's own form for pairs.

        Control tokens that the text spells out stay text, unless `reads_control`, for a prompt that a template rendered before.
        """
        is_control = not reads_control and spells_control(self.tokenizer, text, pair or "")
        how = {"split_special_tokens": True} if is_control else {}
        texts = clean(text), None if pair is None else clean(pair)
        return list(self.tokenizer(*texts, add_special_tokens=special, **how)["input_ids"])

    def check_length(self, ids: Sequence[int], what: str) -> None:
        """Raise TooLongError for more tokens than the model reads: nothing is cut off in silence."""
        limit = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        if len(ids) > limit:
            raise TooLongError(f"{what} has {len(ids)} tokens, the model {self.name!r} reads {limit}")

    @torch.no_grad()
    def run(self, rows: Sequence[Sequence[int]], read: Callable[[Any, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """Outputs of `read(output, ids [B, L], mask [B, L])`, [B, ...], row by row in the order of `rows`."""
        outputs: list[Tensor] = [torch.empty(0)] * len(rows)
        device = next(self.model.parameters()).device

        def forward(held: list[int]) -> Tensor:
            ids, mask = (x.to(device) for x in self.padded([rows[i] for i in held]))
            return read(self.model(input_ids=ids, attention_mask=mask), ids, mask).float().cpu()

        for held, values in self.portions.run([len(row) for row in rows], forward):
            for i, value in zip(held, values, strict=True):
                outputs[i] = value
        return outputs

    def padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """[B, L] ids padded on the right, and their mask."""
        return right_padded(rows, int(self.tokenizer.pad_token_id))


def right_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """[B, L] ids padded on the right with `pad`, and their mask."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)  # [B, L]
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return ids, mask


def is_float(dtype: str) -> bool:
    """True if torch has a floating-point dtype of this name."""
    value = getattr(torch, dtype, None)
    return isinstance(value, torch.dtype) and value.is_floating_point


def _load(kind: Kind, source: str, dtype: str) -> Any:
    import transformers

    if not is_float(dtype):
        raise ModelError(f"dtype={dtype!r} is no type of numbers; use float32, bfloat16 or float16.")
    try:
        with quiet_bars():
            model, info = getattr(transformers, _CLASSES[kind]).from_pretrained(
                source, dtype=getattr(torch, dtype), output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"The model {source!r} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if missing:
        raise ModelError(f"{source!r} is no {kind} as needed here: it has no weights for {missing[0]}.")
    return model


def _load_tokenizer(source: Any, name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        if not isinstance(source, str | Path):
            raise OSError("the model was given as an object")
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        reason = message_of(error)
        raise ModelError(f"No tokenizer for the model {name!r} ({reason}); pass tokenizer=.") from error


def conversation_ids(tokenizer: Any, name: str, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
    """[L] ids of a conversation in a reward model's own chat template, which alone writes control tokens.

    Raises RewardError without a template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise RewardError(
            f"The prompts are chat messages, but the tokenizer of the reward model {name!r} has no chat template; set one, "
            "or pass a tokenizer that has in reward_processing_classes."
        )
    cleaned = [{k: clean(v) if isinstance(v, str) else v for k, v in message.items()} for message in messages]
    return chat_ids(tokenizer, cleaned, **how)
