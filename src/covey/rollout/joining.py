"""Groups whose completions go on from different prompts, as one: their prompt is what all begin with, and the rest is read, not written."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from covey.types import Completion, Group, Media, Prompt


def common_prefix(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens that all rows begin with."""
    least, most = min(rows), max(rows)
    same = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))
    return least[:same]


def shared_part(prompts: Sequence[Prompt], places: Collection[int] = ()) -> Prompt:
    """The first prompt as far as all begin with it, with its media where all have the same, and all of them in there; else no media.

    `places`: the tokens that stand for media. Without media the part ends before the first of them.
    """
    shared = common_prefix([prompt.token_ids for prompt in prompts])
    first, media = prompts[0], prompts[0].media
    if any(prompt.media is not None for prompt in prompts):
        digests = [None if prompt.media is None else prompt.media.digests for prompt in prompts]
        rest = [prompt.token_ids[len(shared) :] for prompt in prompts]
        is_inside = all(not ids or (places and set(places).isdisjoint(ids)) for ids in rest)
        if media is not None and is_inside and all(other == media.digests for other in digests):
            return replace(first, token_ids=shared, media=media.first(len(shared)))
        end = next((i for i, token in enumerate(shared) if token in places), len(shared) if places else 1)
        shared = shared[: max(end, 1)]
    return replace(first, token_ids=shared, media=None)


def after(rest: Sequence[int], completion: Completion, media: Media | None = None) -> Completion:
    """The completion behind tokens that the model read, which have no gradient, and `media` among them; so of its branches."""
    if not rest and media is None:
        return completion
    before, notes = torch.zeros(len(rest), dtype=torch.bool), completion.episode
    if notes is not None and notes.branches:
        notes = replace(notes, branches=tuple(after(rest, branch, media) for branch in notes.branches))
    drawn = completion.logprobs
    return replace(
        completion,
        token_ids=torch.cat([torch.tensor(rest, dtype=torch.int64), completion.token_ids]),
        mask=torch.cat([before, completion.written]),
        observations=torch.cat([before, completion.observed]),
        logprobs=None if drawn is None else torch.cat([torch.zeros(len(rest)), drawn]),
        versions=tuple((len(rest) + t, version) for t, version in completion.versions),
        media=completion.media or media,
        episode=notes,
    )


def behind(shared: Prompt, prompt: Prompt, completion: Completion) -> Completion:
    """A completion of `prompt` as that of the part which its group shares."""
    return after(prompt.token_ids[len(shared.token_ids) :], completion, None if shared.media else prompt.media)


def with_shared_prompt(groups: Sequence[Group]) -> list[Group]:
    """The groups, of one row each, with what all of their prompts begin with as prompt."""
    shared = shared_part([group.prompt for group in groups])
    out = []
    for group in groups:
        moved = tuple(behind(shared, group.prompt, completion) for completion in group.completions)
        prompt = replace(group.prompt, token_ids=shared.token_ids, media=shared.media)
        out.append(replace(group, prompt=prompt, completions=moved))
    return out
