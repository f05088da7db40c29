"""Keyword arguments of a model's forward for the images, sounds and videos of several prompts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from covey.errors import DataError
from covey.models.passes import accepts, encoder_of, unwrapped
from covey.types import Prompt
from covey.types.media import together

_KINDS = ("image", "video", "audio")
_PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index"))
_BANNED = (*_PLACEHOLDERS, "audio_start_token_id")


def banned_ids(model: nn.Module) -> tuple[int, ...]:
    """Ids that stand for images, videos or sounds, which no completion may hold; () for a model of text.

    A sampled one would claim an item that is not there when the learner reads the completion. So would the beginning of a
    sound, which Qwen2.5-Omni counts.
    """
    config = unwrapped(model).config
    text = config.get_text_config()
    if text is config:
        return ()
    ids = {getattr(config, name, None) for name in _BANNED}
    return tuple(sorted(token_id for token_id in ids if isinstance(token_id, int) and 0 <= token_id < text.vocab_size))


def refuse_loose_places(prompts: Sequence[Prompt], banned: Sequence[int]) -> None:
    """Raise DataError for a prompt of ids that hold placeholders without media: expanded ids that lost theirs."""
    for prompt in prompts:
        if prompt.media is None and banned and not set(banned).isdisjoint(prompt.token_ids):
            raise DataError(
                f"prompt {prompt.uid} holds placeholders of images or sounds but none of these; give the prompt as the data set has "
                "it, its images and sounds beside it."
            )


def computes_positions(model: nn.Module) -> bool:
    """True for a model that derives position ids from the grids of images or videos (mrope)."""
    return hasattr(encoder_of(model), "get_rope_index")


def media_inputs(model: nn.Module, prompts: Sequence[Prompt], width: int, starts: Sequence[int]) -> dict[str, Tensor]:
    """Media of the N `prompts`, one a row of ids [N, width] that it begins at `starts`, on the model's device.

    Tensors of one name are joined along their first dimension (items, or patches of all items) and padded with zeros in the
    others; token types are [N, width], zeros beyond those of the prompts: text that was written since has none.
    """
    inner = unwrapped(model)
    parameter = next(inner.parameters())
    media = [prompt.media for prompt in prompts if prompt.media is not None]
    if not media:
        return {}
    out = dict(together(media))
    names = {"mm_token_type_ids", *(name for entry in media for name in entry.token_types)}
    for name in sorted(name for name in names if accepts(model, name)):
        kinds = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            if prompt.media is not None:
                seen = _kinds(model, prompt, name)
                kinds[row, start : start + len(seen)] = seen
        out[name] = kinds
    moved = lambda x: x.to(parameter.device, parameter.dtype if x.is_floating_point() else None)
    return {name: moved(value) for name, value in out.items()}


def _kinds(model: nn.Module, prompt: Prompt, name: str) -> Tensor:
    """[L] of one prompt; where the processor gave none, 1 at tokens of images, 2 of videos and 3 of sounds, as transformers counts."""
    assert prompt.media is not None
    kinds = prompt.media.token_types.get(name)
    if kinds is not None:
        return kinds
    config = unwrapped(model).config
    places = {
        getattr(config, f"{kind}_token_{end}", None): i + 1 for i, kind in enumerate(_KINDS) for end in ("index", "id")
    }
    return torch.tensor([places.get(token, 0) for token in prompt.token_ids], dtype=torch.long)
