"""A prompt with media as the language model inside a larger model reads it: embeddings and positions.

Most of these models compute images or sounds to vectors, put them among the embeddings of the text, and leave the rest to a
language model that knows nothing of them. Its input embeddings are captured here, once a prompt, so that all completions share them
and the language model runs as for plain text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covey.models.modalities.inputs import media_inputs
from covey.models.passes import accepts, decoder_of, encoder_of, evaluating, unwrapped
from covey.types import Prompt

_ARGUMENTS = (
    "inputs_embeds", "position_ids", "attention_mask", "cache", "past_key_values", "use_cache", "return_dict",
    "input_ids",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Embedded:
    """Inputs of the language model for one prompt of L tokens."""

    embeds: Tensor
    """[L, D], with gradient where it is enabled."""
    positions: Tensor
    """[L], or [3, L] of a model with mrope."""

    @property
    def next_position(self) -> int:
        """Position of the first token behind the prompt; below L where media take fewer positions than tokens."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True, eq=False)
class Placed:
    """A prompt with media inside a batch of rows [B, S], by flat indices into [B * S]."""

    prompt: Prompt
    starts: tuple[int, ...]
    """Start of each copy of the prompt."""
    follows: tuple[tuple[int, int], ...]
    """(begin, count) of tokens that follow a copy."""


def placed_rows(rows: Sequence[Any], width: int) -> tuple[Placed, ...]:
    """Prompts with media among the learner's rows, padded to `width`, those that are shared once."""
    members: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        if row.placed.media is not None:
            members.setdefault(row.sharing, []).append(i)
    placed = []
    for indices in members.values():
        prompt = rows[indices[0]].placed
        length = len(prompt.token_ids)
        starts = tuple(i * width for i in indices)
        placed.append(Placed(prompt, starts, tuple((start + length, width - length) for start in starts)))
    return tuple(placed)


class _CaughtError(Exception):
    """Carries the arguments of the language model out of the forward around it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("caught")
        self.arguments = arguments


def _caught(model: nn.Module, prompt: Prompt) -> dict[str, Any]:
    """Arguments that the model gives to its language model for this prompt."""

    def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        raise _CaughtError(kwargs)

    base = encoder_of(model)
    hook = decoder_of(model).register_forward_pre_hook(catch, with_kwargs=True)
    try:
        base(**whole_inputs(model, prompt))
    except _CaughtError as caught:
        return caught.arguments
    finally:
        hook.remove()
        forget_positions(model)
    raise RuntimeError(f"{type(unwrapped(model)).__name__} does not call its language model")


@contextmanager
def watched_positions(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context manager that records the position ids [axes, B, S] which the model passes to its language model."""
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"])

    hook = decoder_of(model).register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()
        forget_positions(model)


def whole_inputs(model: nn.Module, prompt: Prompt, more: Sequence[int] = ()) -> dict[str, Any]:
    """Arguments of the whole model's forward for the prompt with its media, and `more` ids behind it. No mask for text alone.

    Afterwards `forget_positions`.
    """
    device = next(unwrapped(model).parameters()).device
    ids = torch.tensor([[*prompt.token_ids, *more]], device=device)
    plain = {"input_ids": ids} | ({"use_cache": False} if accepts(model, "use_cache") else {})
    if prompt.media is None:
        return plain
    mask = torch.ones_like(ids)  # without it Qwen2.5-Omni would number media like text
    return {**plain, "attention_mask": mask, **media_inputs(model, [prompt], ids.shape[1], [0])}


def forget_positions(model: nn.Module) -> None:
    """Drop the offsets of the last media, which some models keep and would count for the next text."""
    base = encoder_of(model)
    if getattr(base, "rope_deltas", None) is not None:
        base.rope_deltas = None


def embed(model: nn.Module, prompt: Prompt) -> Embedded:
    """The prompt's embeddings and positions by the model itself: its media computed, among its text. Differentiable."""
    arguments = _caught(model, prompt)
    embeds, positions = arguments["inputs_embeds"][0], arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(embeds.shape[0], device=embeds.device)
    elif positions.ndim == 3:  # [3, 1, L], or [4, 1, L] with plain positions for the mask in front
        positions = positions[-3:, 0]
    else:
        positions = positions[0]
    return Embedded(embeds, positions)


@torch.no_grad()
def reason_against(model: nn.Module, prompt: Prompt) -> str | None:
    """Reason why embeddings and positions are not all that the language model needs of this prompt; None if they are.

    Found by its arguments, and by comparing its hidden states with the whole model's.
    """
    assert prompt.media is not None
    with evaluating(model):
        arguments = _caught(model, prompt)
        more = sorted(
            name for name, value in arguments.items() if name not in _ARGUMENTS and isinstance(value, Tensor | list)
        )
        if more:
            return f"its language model gets {', '.join(more)} beside the embeddings"
        if any(
            bool((kinds == 1).any()) for name, kinds in prompt.media.token_types.items() if name == "token_type_ids"
        ):
            return "tokens of an image attend to each other in both directions"
        read = embed(model, prompt)
        theirs = encoder_of(model)(**whole_inputs(model, prompt)).last_hidden_state[0]
        forget_positions(model)
        positions = read.positions[..., None, :]
        mine = decoder_of(model)(inputs_embeds=read.embeds[None], position_ids=positions, use_cache=False)
        gap = (mine.last_hidden_state[0] - theirs).norm() / theirs.norm().clamp(min=1e-6)
        slack = 1e-3 if theirs.dtype == torch.float32 and not torch.is_autocast_enabled(theirs.device.type) else 5e-2
    return None if float(gap) <= slack else f"its hidden states would differ by {float(gap):.1g}"


def placed_inputs(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None,
    placed: Sequence[Placed],
    *,
    rank: int = 0,
    size: int = 1,
) -> dict[str, Tensor]:
    """`inputs_embeds` [B, S, D] and `position_ids` for the language model, each prompt with media computed once.

    `input_ids` [B, S]; `position_ids` [B, S] of the rows as if all were text, from 0 in each row if None. Positions are
    [3, B, S] where a prompt's are [3, L]. With `size`, the S tokens are `rank`, `rank + size`, ... of those that `placed` counts.
    """
    shape = input_ids.shape
    embeds = unwrapped(model).get_input_embeddings()(input_ids).flatten(0, 1)  # [B * S, D]
    if position_ids is None:
        position_ids = torch.arange(shape[1], device=input_ids.device).expand(shape)
    reads = [embed(model, entry.prompt) for entry in placed]
    axes = max(read.positions.ndim for read in reads)
    positions = position_ids.flatten().expand(3, -1).clone() if axes == 2 else position_ids.flatten().clone()
    index, values = [], []
    for entry, read in zip(placed, reads, strict=True):
        for start in entry.starts:
            first = (rank - start) % size  # of its tokens that are here
            begin = (start + first) // size
            mine, numbers = read.embeds[first::size], read.positions[..., first::size]
            index.append(begin + torch.arange(len(mine), device=input_ids.device))
            values.append(mine.to(embeds.dtype))
            positions[..., begin : begin + len(mine)] = numbers
        for start, count in entry.follows:
            first = (rank - start) % size
            begin = (start + first) // size
            numbers = read.next_position + torch.arange(count, device=input_ids.device)[first::size]
            positions[..., begin : begin + len(numbers)] = numbers
    embeds = embeds.index_put((torch.cat(index),), torch.cat(values))
    return {"inputs_embeds": embeds.view(*shape, -1), "position_ids": positions.view(*positions.shape[:-1], *shape)}
