"""Keyword arguments of a vision-language model's forward for the images of several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.errors import DataError
from covey.models import accepts, encoder_of, unwrapped
from covey.types import Prompt

_PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


def banned_ids(model: Any) -> tuple[int, ...]:
    """Ids that stand for images, videos or sound, which no completion may hold; () for a model of text.

    A sampled one would claim an image that is not there when the learner reads the completion.
    """
    config = unwrapped(model).config
    text = config.get_text_config()
    if text is config:
        return ()
    ids = {getattr(config, name, None) for name in _PLACEHOLDERS}
    return tuple(sorted(token_id for token_id in ids if isinstance(token_id, int) and 0 <= token_id < text.vocab_size))


def refuse_images(prompts: Sequence[Prompt], who: str) -> None:
    """Raise DataError for a prompt with images where `who` takes text alone."""
    for prompt in prompts:
        if prompt.images is not None:
            raise DataError(f"prompt {prompt.uid} has images, which {who} does not take.")


def refuse_loose_places(prompts: Sequence[Prompt], banned: Sequence[int]) -> None:
    """Raise DataError for a prompt of ids that hold image tokens without images: expanded ids that lost theirs."""
    for prompt in prompts:
        if prompt.images is None and banned and not set(banned).isdisjoint(prompt.token_ids):
            raise DataError(
                f"prompt {prompt.uid} holds image tokens but no images; give the prompt as the data set has it, its images beside it."
            )


def computes_positions(model: Any) -> bool:
    """True for a model that derives position ids from the grids of images (mrope)."""
    return hasattr(encoder_of(model), "get_rope_index")


def image_inputs(model: Any, prompts: Sequence[Prompt], width: int, starts: Sequence[int]) -> dict[str, Tensor]:
    """Images of the N `prompts`, one a row of ids [N, width] that it begins at `starts`, on the model's device.

    Tensors of images are joined along their first dimension (images, or patches of all images) and padded with zeros in the
    others; token types are [N, width], zeros beyond the prompts.
    """
    inner = unwrapped(model)
    parameter = next(inner.parameters())
    images = [prompt.images for prompt in prompts if prompt.images is not None]
    if not images:
        return {}
    out: dict[str, Tensor] = {}
    for name in images[0].tensors:
        out[name] = _join([item.tensors[name] for item in images])
    for name in _token_types(model, prompts):
        kinds = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            if prompt.images is not None:
                kinds[row, start : start + len(prompt.token_ids)] = _kinds(model, prompt, name)
        out[name] = kinds
    moved = lambda x: x.to(parameter.device, parameter.dtype if x.is_floating_point() else None)
    return {name: moved(value) for name, value in out.items()}


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Along dimension 0, each padded with zeros to the largest in every other dimension."""
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].ndim)]
    pads = lambda part: [n for d in reversed(range(1, part.ndim)) for n in (0, sizes[d - 1] - part.shape[d])]
    return torch.cat([torch.nn.functional.pad(part, pads(part)) for part in parts])


def _token_types(model: Any, prompts: Sequence[Prompt]) -> list[str]:
    names = {name for prompt in prompts if prompt.images is not None for name in prompt.images.token_types}
    return sorted(name for name in names | {"mm_token_type_ids"} if accepts(model, name))


def _kinds(model: Any, prompt: Prompt, name: str) -> Tensor:
    """[L] of one prompt; where the processor did not say, 1 at the tokens of images."""
    assert prompt.images is not None
    kinds = prompt.images.token_types.get(name)
    if kinds is not None:
        return kinds
    config = unwrapped(model).config
    place = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    return torch.tensor([token == place for token in prompt.token_ids], dtype=torch.long)
