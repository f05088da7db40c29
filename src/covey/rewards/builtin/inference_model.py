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
from covey.data.tokenizer import expect_words
from covey.errors import ModelError, RewardError, TooLongError, message_of
from covey.files.places import refuse_missing
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

    @cached_property
    def portions(self) -> AdaptiveBatches:
        """Batches of texts, sized to the memory."""
        return AdaptiveBatches(self.name, self.batch_size)

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    @property
    def limit(self) -> float:
        """Most tokens that it reads."""
        return getattr(self.model.config, "max_position_embeddings", None) or math.inf

    def to(self, device: Any) -> Frozen:
        """Move it, unless its device was chosen or it is spread over several."""
        if not self.is_placed and getattr(self.model, "hf_device_map", None) is None:
            self.model.to(device)
        return self

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
        if len(ids) > self.limit:
            raise TooLongError(f"{what} has {len(ids)} tokens, the model {self.name!r} reads {self.limit}")

    @torch.no_grad()
    def run(self, rows: Sequence[Sequence[int]], read: Callable[[Any, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """Outputs of `read(output, ids [B, L], mask [B, L])`, [B, ...], row by row in the order of `rows`."""
        outputs: list[Tensor] = [torch.empty(0)] * len(rows)

        def forward(held: list[int]) -> Tensor:
            ids, mask = self.padded([rows[i] for i in held])
            return read(self.model(input_ids=ids, attention_mask=mask), ids, mask).float().cpu()

        for held, values in self.portions.run([len(row) for row in rows], forward):
            for i, value in zip(held, values, strict=True):
                outputs[i] = value
        return outputs

    def padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """[B, L] ids padded on the right, and their mask, on the model's device."""
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), int(self.tokenizer.pad_token_id))  # [B, L]
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        return ids.to(self.device), mask.to(self.device)


def load_frozen(
    kind: Kind, model: Any, tokenizer: Any = None, *, device: Any = None, dtype: str = "float32", batch_size: int = 16
) -> Frozen:
    """Load `model`, or take it as it is. Raises ModelError when it, its head or its tokenizer is not there."""
    if batch_size < 1:
        raise ModelError(f"batch_size={batch_size} lets no text through; use at least 1.")
    is_named = isinstance(model, str | Path)
    loaded = _load(kind, str(model), dtype) if is_named else model
    name = str(getattr(loaded.config, "_name_or_path", "") or type(loaded).__name__).rstrip("/").split("/")[-1]
    if tokenizer is None:
        where = str(model) if is_named else "", "the model was given as an object"
        tokenizer = read_tokenizer(*where, f"model {name!r}", "tokenizer=")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if kind == "classifier":  # decoders read the score at the last token that is no padding
        loaded.config.pad_token_id = tokenizer.pad_token_id
    loaded = loaded.eval().requires_grad_(False)
    if device is not None:
        loaded.to(device)
    return Frozen(loaded, tokenizer, name, batch_size, device is not None)


def is_float(dtype: str) -> bool:
    """True if torch has a floating-point dtype of this name."""
    value = getattr(torch, dtype, None)
    return isinstance(value, torch.dtype) and value.is_floating_point


def _load(kind: Kind, source: str, dtype: str) -> Any:
    if not is_float(dtype):
        raise ModelError(f"dtype={dtype!r} is no type of numbers; use float32, bfloat16 or float16.")
    model, missing = load_model(_CLASSES[kind], source, "model", dtype=getattr(torch, dtype))
    missing = [name for name in missing if "pooler" not in name]
    if missing:
        raise ModelError(f"{source!r} is no {kind} as needed here: it has no weights for {missing[0]}.")
    return model


def load_model(auto: str, source: str, noun: str, **options: Any) -> tuple[Any, list[str]]:
    """A model by transformers' class `auto`, and the names of weights that its files lack. Raises ModelError."""
    import transformers

    refuse_missing(source, noun)
    try:
        with quiet_bars():
            model, info = getattr(transformers, auto).from_pretrained(source, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"The {noun} {source!r} cannot be loaded: {message_of(error)}") from error
    return model, sorted(info["missing_keys"])


def read_tokenizer(where: str, absent: str, owner: str, option: str, **place: Any) -> Any:
    """Tokenizer of the folder or hub id `where`; `absent`: why there is none. Raises ModelError, which names `option` to pass it in."""
    from transformers import AutoTokenizer

    try:
        if not where:
            raise OSError(absent)
        expect_words(tokenizer := AutoTokenizer.from_pretrained(where, **place))
        return tokenizer
    except (OSError, ValueError) as error:
        raise ModelError(f"No tokenizer for the {owner} ({message_of(error)}); pass {option}.") from error


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
