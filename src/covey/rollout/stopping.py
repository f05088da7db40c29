"""End of a completion: EOS ids, stop strings, the context's limit, and the finished `Completion`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import ModelError, NumericsError
from covey.types import Completion, Finish


def eos_ids_of(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """EOS ids of the generation config and of the tokenizer; () where neither has one."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [named] if isinstance(named, int) else list(named or [])
    eos = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys([*ids, *([] if eos is None else [eos])]))


@dataclass(frozen=True, eq=False)
class StopStrings:
    """Stop strings, and a table of the tokens that can complete one, so that only these are decoded."""

    stop: tuple[str, ...]
    tokenizer: Any
    enders: Tensor
    """[V] bool, tokens whose text contains the last character of a stop string."""

    @staticmethod
    def of(stop: Sequence[str], tokenizer: Any, vocab_size: int, device: torch.device | None = None) -> StopStrings:
        """Stop strings with their table. All tokens may complete a last character beyond ASCII, which several spell, or a space, which
        decoders strip from one token alone or put between two."""
        last = {text[-1] for text in stop}
        if not stop:
            enders = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        elif any(character == " " or ord(character) > 127 for character in last):
            enders = torch.ones(vocab_size, dtype=torch.bool)
        else:
            texts = _texts_of(tokenizer, min(len(tokenizer), vocab_size))
            flags = [any(character in text for character in last) for text in texts]
            enders = torch.tensor(flags + [False] * (vocab_size - len(flags)))
        return StopStrings(tuple(stop), tokenizer, enders.to(device))

    def completed(self, tokens: Tensor, written: Callable[[int], Tensor]) -> Tensor:
        """[R] bool, rows whose last `tokens` [R] complete a stop string; `written(row)` [T] are all of the row."""
        is_end = self.enders[tokens]
        for row in is_end.nonzero().squeeze(-1).tolist():
            is_end[row] = self.is_reached(written(row).tolist())
        return is_end

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """True if the last of these tokens completes a stop string."""
        longest = max(len(text.encode()) for text in self.stop)
        tail = list(token_ids[-longest - 1 :])  # a token is at least one byte
        with_last, without = self.tokenizer.decode(tail), self.tokenizer.decode(tail[:-1])
        return any(with_last.count(text) > without.count(text) for text in self.stop)


@functools.lru_cache(maxsize=2)
def _texts_of(tokenizer: Any, count: int) -> tuple[str, ...]:
    """Text of each of the first `count` tokens, decoded once and cached for all sets of stop strings."""
    return tuple(tokenizer.decode([token]) for token in range(count))


def check_finite(logprobs: Tensor) -> None:
    """Raise NumericsError when a log-probability of finished completions is not finite."""
    if not bool(torch.isfinite(logprobs).all()):
        raise NumericsError(
            "The model gave logits that are not finite while sampling, so its weights or its precision are broken; "
            "go back to an earlier checkpoint, lower the learning rate, or sample in float32."
        )


def completion(
    token_ids: Tensor,
    logprobs: Tensor | None,
    finish: Finish,
    *,
    tokenizer: Any,
    version: int,
    versions: Sequence[tuple[int, int]] = (),
    mask: Tensor | None = None,
    **recorded: Any,
) -> Completion:
    """A finished completion, its text without special tokens; `recorded`: further fields. Empty spans of `versions` are dropped."""
    text = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
    spans = tuple((start, step) for start, step in versions if start < len(token_ids))
    fields: dict[str, Any] = {"logprobs": logprobs, "version": version, "versions": spans, "mask": mask, **recorded}
    return Completion(token_ids=token_ids, text=text, finish=finish, **fields)


def checked_eos_ids(eos_ids: Sequence[int] | None, model: Any, tokenizer: Any) -> tuple[int, ...]:
    """`eos_ids`, or those of model and tokenizer. Raises ModelError for an id outside the vocabulary."""
    ids = eos_ids_of(model, tokenizer) if eos_ids is None else tuple(eos_ids)
    size = model.config.get_text_config().vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise ModelError(
                f"end-of-sequence id {token} is not in the model's vocabulary of {size}; give one that is."
            )
    return ids
