"""Groups whose completions go on from different prompts, as one: their prompt is what all begin with, and the rest is read, not written."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from covey.types import Completion, Group


def common_prefix(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens that all rows begin with."""
    least, most = min(rows), max(rows)
    same = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))
    return least[:same]


def after(rest: Sequence[int], completion: Completion) -> Completion:
    """The completion behind tokens that the model read, which have no gradient; so of its branches."""
    if not rest:
        return completion
    before, notes = torch.zeros(len(rest), dtype=torch.bool), completion.episode
    if notes is not None and notes.branches:
        notes = replace(notes, branches=tuple(after(rest, branch) for branch in notes.branches))
    drawn = completion.logprobs
    return replace(
        completion,
        token_ids=torch.cat([torch.tensor(rest, dtype=torch.int64), completion.token_ids]),
        mask=torch.cat([before, completion.written]),
        observations=torch.cat([before, completion.observed]),
        logprobs=None if drawn is None else torch.cat([torch.zeros(len(rest)), drawn]),
        versions=tuple((len(rest) + t, version) for t, version in completion.versions),
        episode=notes,
    )


def with_shared_prompt(groups: Sequence[Group]) -> list[Group]:
    """The groups, of one row each, with the tokens that all of their prompts begin with as prompt."""
    shared = common_prefix([group.prompt.token_ids for group in groups])
    out = []
    for group in groups:
        rest = group.prompt.token_ids[len(shared) :]
        moved = tuple(after(rest, completion) for completion in group.completions)
        out.append(replace(group, prompt=replace(group.prompt, token_ids=shared), completions=moved) if rest else group)
    return out
