"""Prompts as samplers take them (text, chat messages, token ids or `Prompt`s), encoded once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from covey.data import chat_ids, expect_ids_below
from covey.errors import ConfigError, DataError
from covey.models.modalities import refuse_loose_places
from covey.types import Message, Prompt

PromptLike: TypeAlias = Prompt | str | Sequence[Message] | Sequence[int]
"""A prompt in any form: text, chat messages, or token ids."""


def as_prompts(
    prompts: Sequence[PromptLike], tokenizer: Any, context: int | None, vocabulary: int | None = None, n: int = 1
) -> list[Prompt]:
    """Prompts with their token ids. The uid of an input that is not yet a `Prompt` is its index in the sequence.

    Raises DataError for an empty prompt, for one that leaves no room in a context of `context` tokens, and for one with a
    token id that is not below `vocabulary`, the model's embeddings; ConfigError for groups of fewer than one completion.
    """
    if n < 1:
        raise ConfigError(f"n is {n}; a group needs at least 1 completion.")
    if isinstance(prompts, str):
        raise DataError("sample() takes a sequence of prompts; put the single one in a list.")
    encoded = [
        prompt if isinstance(prompt, Prompt) else _encoded(prompt, str(i), tokenizer)
        for i, prompt in enumerate(prompts)
    ]
    for prompt in encoded:
        if not prompt.token_ids:
            raise DataError(f"prompt {prompt.uid} has no tokens; a completion needs at least one to start from.")
        expect_ids_below(prompt.token_ids, vocabulary, f"prompt {prompt.uid}")
        if context is not None and len(prompt.token_ids) >= context:
            raise DataError(
                f"prompt {prompt.uid} has {len(prompt.token_ids)} tokens and the model's context {context}, which leaves "
                "no room for a completion; shorten it or leave it out."
            )
    return encoded


def _encoded(prompt: str | Sequence[Message] | Sequence[int], uid: str, tokenizer: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(uid=uid, text=prompt, token_ids=tuple(tokenizer(prompt)["input_ids"]))
    if isinstance(prompt, torch.Tensor):
        return Prompt(uid=uid, token_ids=tuple(prompt.tolist()))
    if all(isinstance(part, int) for part in prompt):
        return Prompt(uid=uid, token_ids=tuple(prompt))  # type: ignore[arg-type]
    if not all(isinstance(part, Mapping) for part in prompt):
        raise DataError(f"prompt {uid} is neither text, nor chat messages, nor token ids, but {type(prompt).__name__}.")
    messages: Any = tuple(prompt)
    ids = chat_ids(tokenizer, messages, add_generation_prompt=True)
    return Prompt(uid=uid, messages=messages, token_ids=tuple(ids))


def with_distinct_uids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, where a repeated one has a uid of its own: `uid`, `uid#1`, `uid#2`."""
    return [
        replace(prompt, uid=f"{prompt.uid}#{occurrence}") if occurrence else prompt
        for prompt, occurrence in zip(prompts, occurrences(prompts), strict=True)
    ]


def occurrences(prompts: Sequence[Prompt]) -> list[int]:
    """Number of earlier prompts with the same uid, for each prompt, so that a prompt given twice gets two different groups."""
    seen: dict[str, int] = {}
    out = []
    for prompt in prompts:
        out.append(seen.get(prompt.uid, 0))
        seen[prompt.uid] = out[-1] + 1
    return out


def expect_readable(prompts: Sequence[Prompt], banned: Sequence[int], expect_media: Callable[[Prompt], None]) -> None:
    """Raise DataError for loose placeholders of media, and for a prompt that ends with one; `expect_media` raises for other media."""
    refuse_loose_places(prompts, banned)
    seen = [prompt for prompt in prompts if prompt.media is not None]
    for prompt in seen:
        expect_media(prompt)
    for prompt in seen:
        if prompt.token_ids[-1] in banned:
            raise DataError(
                f"prompt {prompt.uid} ends with an image, a sound or a video; put the question, or a line break, behind it."
            )
