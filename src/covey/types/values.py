"""The values that flow from a prompt to a gradient: frozen, so that no stage can reach back into an earlier one.

Letters, here and everywhere: **P** prompts a step, **G** completions a prompt, **N = P * G**, **T** longest
completion, **L** prompt length, **R** reward functions, **V** vocabulary, **W** processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from covey.types.episodes import EpisodeNotes, ToolCall
from covey.types.media import Media
from covey.types.reports import Event

Message = Mapping[str, Any]
"""One chat message: `{"role": "user", "content": "What is 2 + 2?"}`."""

Finish = Literal["stop", "length", "error", "turns", "seconds"]
"""Why a completion ended."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Prompt of one group of completions.

    Example: `Prompt(uid="0:17", text="2 + 2 =", token_ids=(17, 5, 17, 9), columns={"answer": "4"})`.
    """

    uid: str
    """Identity of this draw from the data: `epoch:row`. Two rows with the same text are two prompts."""
    token_ids: tuple[int, ...]
    """[L], the model's input; the text is never encoded a second time."""
    text: str | None = None
    """The prompt as written, for a plain prompt."""
    messages: tuple[Message, ...] | None = None
    """The prompt as chat messages, for a conversational one."""
    media: Media | None = None
    """Its images, sounds and videos, for a model that reads them. None: text alone."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the data set's row; rewards receive them by name."""
    before: Prompt | None = None
    """The row's own prompt, where an environment's `reset` has changed it. None: this is it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that it shows, where its environment has some that the run's other prompts do not show."""

    @property
    def raw(self) -> str | list[Message]:
        """The prompt as a reward function sees it: text, or a list of messages."""
        return list(self.messages) if self.messages is not None else (self.text or "")


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One completion, in token ids, with the data recorded when it was sampled. All tensors are on the CPU.

    Example: `Completion(token_ids=tensor([20, 2]), text="4", finish="stop", logprobs=tensor([-0.2, -0.01]))`.
    """

    token_ids: Tensor
    """[T_i] int64, the end-of-sequence token included when one was drawn."""
    text: str
    finish: Finish
    """`stop`: it ended with an end-of-text token. `length`: it was cut at the limit of tokens. `turns`, `seconds`: its episode was over after
    so many tool calls, or so much time. `error`: the sampler failed."""
    logprobs: Tensor | None = None
    """[T_i] float32, as drawn: after temperature, penalties and truncation of the distribution (`sampler_logp`)."""
    mask: Tensor | None = None
    """[T_i] bool, False where the model did not write the token (tool results). None: it wrote all of them."""
    observations: Tensor | None = None
    """[T_i] bool, True where an environment answered the model. None: behind its first token, all that it did not write."""
    old_logp: Tensor | None = None
    """[T_i] float32, the learner's own log-probability at the time of the rollout. None: not measured."""
    ref_logp: Tensor | None = None
    """[T_i] float32, the reference model's. None: nothing asked for it."""
    values: Tensor | None = None
    """[T_i] float32, the critic's estimates. None: no critic."""
    squared_score: Tensor | None = None
    """[T_i] float32, squared norm of the gradient of each token's log-probability by the logits. None: nothing asked for it."""
    experts: Tensor | None = None
    """[T_i, L, k] uint8 or int16, experts by layer where each token was predicted. None: not recorded."""
    prompt_experts: Tensor | None = None
    """[prompt's tokens - 1, L, k], those where the prompt was read, which completions of a group share."""
    version: int = 0
    """The optimizer step whose weights wrote it; those that began it, where the weights changed on the way."""
    versions: tuple[tuple[int, int], ...] = ()
    """Spans: `(t, step)` for each change of weights during sampling: token `t` and later ones were sampled with the weights of `step`.
    Empty: `version` wrote all of it."""
    source: str = "policy"
    """Name of the model that generated it: the policy, or a member of an ensemble."""
    weight: Tensor | None = None
    """[T_i] float32, factor on its objective, where another model wrote it (`MemberWeight`). None: 1."""
    messages: tuple[Message, ...] | None = None
    """Turns of an episode: the assistant's messages, with `tool_calls`, and the tools' answers. None: a single turn."""
    tool_calls: tuple[ToolCall, ...] = ()
    episode: EpisodeNotes | None = None
    """Turns with their rewards and states, the whole conversation, other paths of an agent's calls. None: nothing is known of them."""
    media: Media | None = None
    """Images, sounds and videos of prompt and completion, where the completion has some of its own. None: the prompt's are all."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of this completion that rewards receive as further columns; dropped once it is scored."""

    def behind(self, prompt: Prompt) -> Prompt:
        """The prompt with this completion's tokens and media behind it."""
        ids = (*prompt.token_ids, *self.token_ids.tolist())
        return replace(prompt, token_ids=ids, media=prompt.media if self.media is None else self.media)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())

    @property
    def is_truncated(self) -> bool:
        return self.finish == "length"

    @property
    def token_versions(self) -> Tensor:
        """[T_i] int64, the optimizer step whose weights wrote each token."""
        of_each = torch.full((self.num_tokens,), self.version, dtype=torch.int64)
        for start, version in self.versions:
            of_each[start:] = version
        return of_each

    @property
    def written(self) -> Tensor:
        """[T_i] bool, True where the model wrote the token."""
        return torch.ones(self.num_tokens, dtype=torch.bool) if self.mask is None else self.mask

    @property
    def observed(self) -> Tensor:
        """[T_i] bool, True where a tool or an environment answered the model."""
        return ~self.written & (self.written.cumsum(-1) > 0) if self.observations is None else self.observations


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """A prompt and everything that belongs to its completions. Filters drop groups, never entries of one of several lists.

    Example: `Group(prompt=p, completions=(a, b), rewards=tensor([[1.0], [nan]]))`: `b` was not scored.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Tensor | None = None
    """[G, R] float32, NaN where a function did not score. None: not scored yet."""
    advantages: Tensor | None = None
    """[G] or [G, T] float32. None: not computed yet."""
    totals: Tensor | None = None
    """[G] float32, the weighted sum of the rewards that advantages were made of, NaN: not scored. None: not computed yet."""
    returns: Tensor | None = None
    """[G, T] float32, targets of the critic, NaN of a completion that nobody scored. None: no critic."""
    measured: Tensor | None = None
    """[G, R] float32, rewards as measured, of completions that left the group too, where the sampler or a reward failed on one. None: neither did."""
    lost: Tensor | None = None
    """[G] bool, completions on which the sampler or a reward failed. None: neither did on any."""
    greedy_rewards: Tensor | None = None
    """[R] float32, rewards of the greedy answer, for estimators that use it as baseline (ReMax)."""
    events: tuple[Event, ...] = ()
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns that rewards added with `log_extra`, G values each."""

    @property
    def size(self) -> int:
        return len(self.completions)

    @property
    def recorded(self) -> Tensor | None:
        """[G, R] float32, rewards as measured, which files and logs of each reward show; None: not scored yet."""
        return self.rewards if self.measured is None else self.measured

    def mean_advantage(self, index: int) -> float:
        """The advantage of a completion, its mean where it differs by token; NaN without tokens or advantages."""
        row = torch.tensor(math.nan) if self.advantages is None else self.advantages[index].double()
        return float(row if row.ndim == 0 else row[: self.completions[index].num_tokens].mean())

    def take(self, indices: Sequence[int]) -> Group:
        """The same prompt with only these completions, in this order; everything that belongs to them comes along."""
        keep = torch.as_tensor(list(indices), dtype=torch.long)
        names = ("rewards", "measured", "lost", "advantages", "totals", "returns")
        rows: dict[str, Any] = {name: x[keep] for name in names if (x := getattr(self, name)) is not None}
        extras = {name: [values[i] for i in indices] for name, values in self.extras.items()}
        return replace(self, completions=tuple(self.completions[i] for i in indices), extras=extras, **rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Input of an advantage estimator: the rewards of P groups of G completions.

    Groups of unequal size are padded with NaN rewards and empty masks.
    """

    per_function: Tensor
    """[P, G, R], NaN: not scored by that function."""
    weights: Tensor
    """[R]"""
    mask: Tensor
    """[P, G, T] bool, tokens that the model wrote."""
    observed: Tensor | None = None
    """[P, G, T] bool, tokens with which tools and environments answered. None: all that the model did not write."""
    values: Tensor | None = None
    """[P, G, T], the critic's estimates."""
    squared_score: Tensor | None = None
    """[P, G, T], squared norm of the gradient of each token's log-probability by the logits."""
    kl: Tensor | None = None
    """[P, G, T], already weighted penalty to subtract from the reward of each token. None: the KL is not in the reward."""
    greedy: Tensor | None = None
    """[P], weighted reward of each prompt's greedy answer; NaN where no function scored it."""
    per_token: Tensor | None = None
    """[P, G, T], per-token rewards, besides the functions' rewards. None: there are none."""
    slices: tuple[str, ...] | None = None
    """[P], which slice each prompt is in, such as its language. None: nothing asked for slices."""
    episodes: tuple[tuple[EpisodeNotes | None, ...], ...] | None = None
    """P lists of G: turns of each completion. None: no completion has any."""

    @cached_property
    def total(self) -> Tensor:
        """[P, G], weighted sum over functions, NaN counting 0; NaN only where no function scored."""
        return weighted_total(self.per_function, self.weights)

    @cached_property
    def lengths(self) -> Tensor:
        """[P, G] int64, tokens that the model wrote."""
        return self.mask.sum(-1)

    @staticmethod
    def of(
        groups: Sequence[Group],
        weights: Tensor | None = None,
        kl: Tensor | None = None,
        slice_column: str | None = None,
    ) -> Scores:
        """Stack scored groups. `weights` [R] defaults to ones; `slice_column`: the column whose values are `slices`.

        Raises ValueError when a group has no rewards yet, or when there are no groups.
        """
        if not groups:
            raise ValueError("Scores.of needs at least one group; every group of this step was filtered out.")
        if any(group.rewards is None for group in groups):
            raise ValueError("Scores.of needs scored groups; pass them through the scorer first.")
        rewards = [group.rewards for group in groups if group.rewards is not None]
        size, functions = max(group.size for group in groups), rewards[0].shape[-1]
        per_function = rewards[0].new_full((len(groups), size, functions), math.nan)  # [P, G, R]
        for p, reward in enumerate(rewards):
            per_function[p, : reward.shape[0]] = reward
        weights = torch.ones(functions) if weights is None else weights
        drawn = [completion for group in groups for completion in group.completions]
        measured = [name for name in ("values", "squared_score") if all(getattr(c, name) is not None for c in drawn)]
        greedy = [group.greedy_rewards for group in groups if group.greedy_rewards is not None]  # P of [R], or fewer
        episodes = tuple(tuple(completion.episode for completion in group.completions) for group in groups)
        is_apart = any(completion.observations is not None for completion in drawn)
        return Scores(
            per_function=per_function,
            weights=weights,
            mask=stack_tokens(groups, lambda completion: completion.written),
            observed=stack_tokens(groups, lambda completion: completion.observed) if is_apart else None,
            **{name: stack_tokens(groups, attrgetter(name)) for name in measured},
            kl=kl,
            greedy=weighted_total(torch.stack(greedy), weights) if len(greedy) == len(groups) else None,
            slices=None if slice_column is None else tuple(str(g.prompt.columns.get(slice_column)) for g in groups),
            episodes=episodes if any(completion.episode is not None for completion in drawn) else None,
        )


def weighted_total(rewards: Tensor, weights: Tensor) -> Tensor:
    """[...] from rewards [..., R] and weights [R]: the weighted sum, NaN counting 0; NaN only where no function scored."""
    total = (rewards.nan_to_num(0.0) * weights).sum(-1)
    return total.masked_fill(rewards.isnan().all(-1), math.nan)


def of_policy(groups: Sequence[Group]) -> list[Group]:
    """Groups with the policy's completions only, without those of ensemble members; completions of a data set count as the policy's."""
    places = lambda group: [i for i, answer in enumerate(group.completions) if answer.source in ("policy", "data")]
    return [group if len(at := places(group)) == group.size else group.take(at) for group in groups]


def stack_tokens(groups: Sequence[Group], pick: Callable[[Completion], Tensor | None]) -> Tensor:
    """[P, G, T] of one per-token quantity of every completion, zero (False) beyond its end."""
    rows = [[pick(completion) for completion in group.completions] for group in groups]
    present = [row for group_rows in rows for row in group_rows if row is not None]
    size = max(len(group_rows) for group_rows in rows)
    longest = max((row.shape[0] for row in present), default=0)
    dtype = present[0].dtype if present else torch.float32
    out = torch.zeros(len(groups), size, longest, dtype=dtype)
    for p, group_rows in enumerate(rows):
        for g, row in enumerate(group_rows):
            if row is not None:
                out[p, g, : row.shape[0]] = row
    return out
