"""Rows from completions, those that can have a gradient, and micro-batches from rows. Neither affects the gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from covey.algorithms import Algorithm
from covey.algorithms.composing import is_apart
from covey.models.modalities import Placed, placed_rows
from covey.process.device import onto
from covey.types import Completion, Group, Prompt


@dataclass(frozen=True, eq=False)
class Row:
    """One completion in the learner, with its prompt."""

    prompt: Prompt
    completion: Completion
    group: int
    """Index of its prompt in the step."""
    advantage: Tensor
    """[] or [T_i]"""
    counts: Tensor
    """[T_i] bool, tokens that enter the loss: written by the model, and not of a masked truncated completion."""
    returns: Tensor | None = None
    observed: Tensor | None = None
    """[T_i] bool, tokens with which a tool or an environment answered; None: none."""
    index: int = 0
    """Index of the completion in the step."""
    hint: str | None = None
    """Feedback added to the teacher's prompt."""
    is_scored: bool = True
    """False if no reward scored it; a branch has the score of its episode."""

    @cached_property
    def placed(self) -> Prompt:
        """The tokens among which media are placed: the prompt, or the whole row where the completion has some of its own."""
        return self.prompt if self.completion.media is None else self.completion.behind(self.prompt)

    @property
    def sharing(self) -> tuple[int, int]:
        """Equal for rows that share the computation of their prompt: those of a group whose media are all in it."""
        return self.group, 0 if self.completion.media is None else id(self.completion)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + self.completion.num_tokens

    @property
    def num_computed(self) -> int:
        """Tokens of the completion computed after a shared prompt: all but the last, which predicts nothing."""
        return max(0, self.completion.num_tokens - 1)


def rows_of(
    groups: Sequence[Group],
    *,
    mask_truncated: bool = False,
    hints: Callable[[Group], Sequence[str | None]] | None = None,
    places: Sequence[int] = (),
) -> list[Row]:
    """Rows of all completions, groups in order. Groups need advantages.

    `mask_truncated` takes completions that hit the length limit out of the loss (their rewards still count in the
    group's baseline, and the rows in the sequence count). `hints` gives the teacher's feedback on each completion. `places` are the
    tokens that stand for images or sounds: no text that could be foretold.
    """
    rows: list[Row] = []
    for index, group in enumerate(groups):
        if group.advantages is None:
            raise ValueError("rows_of needs groups with advantages; call the algorithm's advantage first.")
        feedback = None if hints is None else hints(group)
        for g, completion in enumerate(group.completions):
            counts, observed = completion.written, None if completion.mask is None else completion.observed
            if observed is not None and completion.media is not None:
                observed = observed & ~torch.isin(completion.token_ids, torch.tensor(places, dtype=torch.int64))
            if mask_truncated and completion.is_truncated:
                counts, observed = torch.zeros_like(counts), None
            advantage = group.advantages[g]
            is_branch = completion.episode is not None and completion.episode.is_branch
            returns = None if group.returns is None else group.returns[g][: completion.num_tokens]
            rows.append(
                Row(
                    prompt=group.prompt,
                    completion=completion,
                    group=index,
                    advantage=advantage if advantage.ndim == 0 else advantage[: completion.num_tokens],
                    counts=counts,
                    returns=returns,
                    observed=observed,
                    index=len(rows),
                    hint=None if feedback is None else feedback[g],
                    is_scored=is_branch or group.totals is None or not bool(group.totals[g].isnan()),
                )
            )
    return rows


def unscored_row(prompt: Prompt, completion: Completion, group: int = 0, index: int = 0) -> Row:
    """A row without advantage."""
    return Row(prompt, completion, group, torch.zeros(()), completion.written, index=index)


def regrouped(groups: Sequence[Group], completions: Sequence[Completion]) -> list[Group]:
    """The groups with their completions replaced, in order."""
    remaining = iter(completions)
    return [replace(group, completions=tuple(next(remaining) for _ in group.completions)) for group in groups]


def filler() -> Row:
    """A row of two tokens with zero loss, for a pass that only matches the collectives of other processes."""
    drawn = Completion(token_ids=torch.tensor([1, 2]), text="", finish="stop")
    return unscored_row(Prompt(uid="pace", token_ids=(1, 2)), drawn)


def microbatches(
    rows: Sequence[Row],
    *,
    max_rows: int,
    max_tokens: int | None = None,
    enough_tokens: int | None = None,
    shares_prompts: bool = False,
) -> list[list[Row]]:
    """Micro-batches of at most `max_rows` rows and, if given, `max_tokens` tokens as `tokens_in` counts (one row always fits).

    Beyond `enough_tokens` a batch takes only further completions of its first group. Rows of one prompt share a
    batch, rows of similar length stand together, and the largest batch comes first, so that a step that does not fit in memory
    fails at once. Groups are kept whole if that takes no more batches, so that no shared prompt is computed twice.
    """
    members: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        members.setdefault(row.sharing, []).append(row)
    longest = {index: max(row.num_tokens for row in group) for index, group in members.items()}
    whole = {index: tokens_in(group, shares_prompts) for index, group in members.items()}
    ordered = sorted(
        rows, key=lambda row: (-longest[row.sharing], row.group, row.completion.media is not None, -row.num_tokens)
    )

    def fits(first: Row, count: int, tokens: int) -> bool:
        has_room = enough_tokens is None or tokens <= max(enough_tokens, whole[first.sharing])
        return count <= max_rows and has_room and (max_tokens is None or tokens <= max_tokens)

    batches: list[list[Row]] = []
    tokens = widest = 0
    for row in ordered:
        batch = batches[-1] if batches else []
        is_behind = bool(batch) and batch[-1].sharing == row.sharing  # rows of one group stand together
        if shares_prompts:
            grown = tokens + row.num_computed + (0 if is_behind else len(row.prompt.token_ids))
        else:
            grown = (len(batch) + 1) * max(widest, row.num_tokens)
        if batch and fits(batch[0], len(batch) + 1, grown):
            batch.append(row)
            tokens, widest = grown, max(widest, row.num_tokens)
        else:
            batches.append([row])
            tokens, widest = tokens_in([row], shares_prompts), row.num_tokens
    for count in range(1, len(batches) + 1) if shares_prompts else ():
        whole_groups = _of_whole_groups(members, whole, count, fits)
        if whole_groups is not None:
            return whole_groups
    return batches


def _of_whole_groups(
    members: Mapping[tuple[int, int], list[Row]],
    whole: Mapping[tuple[int, int], int],
    count: int,
    fits: Callable[[Row, int, int], bool],
) -> list[list[Row]] | None:
    """`count` batches of nearly equal size with every group whole; None if greedy filling fails."""
    batches: list[list[Row]] = [[] for _ in range(count)]
    tokens = [0] * count
    for group in sorted(members, key=lambda group: -whole[group]):
        place = tokens.index(min(tokens))
        batches[place] += members[group]
        tokens[place] += whole[group]
        if not fits(batches[place][0], len(batches[place]), tokens[place]):
            return None
    return [batches[place] for place in sorted(range(count), key=lambda place: -tokens[place])]


def tokens_in(rows: Sequence[Row], shares_prompts: bool) -> int:
    """Tokens of a forward pass over `rows`: each prompt once where it is shared, else padded to the longest row."""
    if not shares_prompts:
        return len(rows) * max(row.num_tokens for row in rows)
    prompts = {row.sharing: len(row.prompt.token_ids) for row in rows}
    return sum(prompts.values()) + sum(row.num_computed for row in rows)


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """`[prompt | completion | padding]`, one row a completion."""

    input_ids: Tensor
    """[N, S]"""
    attention_mask: Tensor
    """[N, S]"""
    source: Tensor
    """[M], flat index into [N * S] of the position that predicts each completion token."""
    target: Tensor
    """[M], the completion tokens, row by row."""
    place: Tensor
    """[M], flat index into [N, T] of each completion token."""
    shape: tuple[int, int]
    """(N, T)"""
    placed: tuple[Placed, ...] = ()
    """The prompts with media, each once."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """By row: flat indices of the prompt's first token and of the completion's, and the completion's tokens that are computed."""
    prompts: tuple[Prompt, ...] = ()
    """[N] prompts, if one of them has media; else empty."""

    def spread(self, values: Tensor) -> Tensor:
        """[M] values of the completion tokens -> [N, T], 0 beyond each end. Differentiable."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.place,), values).view(self.shape)


def pick_rows(values: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [M] of `values` [..., D], its leading dimensions flattened -> [M, D].

    A row that stands in `index` several times sums its gradients in their order, on a CPU and on CUDA: on a CPU the backward of
    indexing adds by atomics across threads from 32,768 elements on, on CUDA that of `index_select` does.
    """
    flat = values.flatten(0, -2)
    return flat.index_select(0, index) if flat.device.type == "cpu" else flat[index]


def pad_rows(rows: Sequence[Row], pad_id: int, device: torch.device) -> PaddedRows:
    """Rows padded on the right: positions count from 0, and the causal mask alone hides the padding from every real token."""
    width = max(row.num_tokens for row in rows)
    longest = max(row.completion.num_tokens for row in rows)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.long)
    source, target, place = [], [], []
    for i, row in enumerate(rows):
        start, count = len(row.prompt.token_ids), row.completion.num_tokens
        input_ids[i, :start] = torch.tensor(row.prompt.token_ids, dtype=torch.long)
        input_ids[i, start : start + count] = row.completion.token_ids
        attention_mask[i, : start + count] = 1
        steps = torch.arange(count)
        source.append(i * width + start - 1 + steps)
        target.append(row.completion.token_ids)
        place.append(i * longest + steps)
    return PaddedRows(
        input_ids=onto(device, input_ids),
        attention_mask=onto(device, attention_mask),
        source=onto(device, torch.cat(source)),
        target=onto(device, torch.cat(target)),
        place=onto(device, torch.cat(place)),
        shape=(len(rows), longest),
        placed=placed_rows(rows, width),
        spans=tuple(
            (i * width, i * width + len(row.prompt.token_ids), row.completion.num_tokens) for i, row in enumerate(rows)
        ),
        prompts=tuple(row.placed for row in rows) if any(row.placed.media for row in rows) else (),
    )


def can_have_gradient(row: Row, algorithm: Algorithm) -> bool:
    """True if a completion can have a gradient. Terms that scale with the advantage have none where it is zero."""
    acts_alone = any(not is_apart(part) for part in algorithm.regularizers) or algorithm.critic is not None
    acts_alone = acts_alone or (algorithm.kl is not None and algorithm.kl.where == "loss")
    if acts_alone or not getattr(algorithm.objective, "scales_with_advantage", False):
        return True
    return bool((row.advantage != 0).any())
