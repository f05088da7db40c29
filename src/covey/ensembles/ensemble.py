"""`Ensemble`: models that answer a prompt together, as members of a training group or at inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any

import torch

from covey.algorithms import MemberWeight
from covey.declared import Finite, Range, checked_dataclass
from covey.ensembles.answers import Answer, Vote, answer_key, candidates_of, chosen, expect_vote
from covey.ensembles.loading import load_writers
from covey.ensembles.member import Member, as_member
from covey.ensembles.sampler import of_member
from covey.ensembles.writers import Writer
from covey.errors import ConfigError
from covey.rewards import Scorer
from covey.rewards.metrics import totals_of
from covey.rollout import SamplingParams
from covey.types import Completion, Group, Message, Prompt


@checked_dataclass(frozen=True, eq=False)
class Ensemble:
    """Several models as one: `GRPOTrainer(..., ensemble=Ensemble([...]))`, and `Ensemble([...]).answer(prompt)`.

    `members`: `Member`s, or what one is made of: paths, hub ids, endpoints, loaded models, text such as
    `"runs/b,role=sibling,samples=2"`, mappings.
    """

    members: Sequence[Any]
    max_share: Annotated[float, Range(above=0, below=1)] = 0.5
    """Most of a training group that members may write together."""
    threshold: Finite = 0.5
    """Weighted reward from which `rescue` counts a completion as right."""
    weight: MemberWeight = field(default_factory=MemberWeight)
    """Importance weight of siblings."""

    def __post_init__(self) -> None:
        members = [self.members] if isinstance(self.members, (str, Mapping, Member)) else self.members
        if not isinstance(members, Sequence) or not members:
            raise ConfigError("ensemble has no members; give a list of models, such as ensemble=Ensemble(['runs/b']).")
        object.__setattr__(self, "members", tuple(as_member(member) for member in members))
        names = [member.name for member in self.members if member.name is not None]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"ensemble: two members have the name {twice!r}; give each its own.")

    @staticmethod
    def of(value: Any) -> Ensemble | None:
        """An ensemble from a user's argument: an ensemble, None, or its members."""
        return value if value is None or isinstance(value, Ensemble) else Ensemble(value)

    @property
    def names(self) -> list[str]:
        """The members' names, no two the same."""
        names: list[str] = []
        for member in self.members:
            name, count = member.short_name, 1
            while name in names:
                count += 1
                name = f"{member.short_name}-{count}"
            names.append(name)
        return names

    @property
    def samples(self) -> int:
        """Completions of all members for a prompt."""
        return sum(member.samples for member in self.members)

    def refuse_share(self, num_generations: int) -> None:
        """Raise ConfigError where members would write more than `max_share` of a group with `num_generations` of the policy."""
        whole = self.samples + num_generations
        if self.samples > self.max_share * whole:
            raise ConfigError(
                f"ensemble: its members write {self.samples} of {whole} completions of a group, more than max_share="
                f"{self.max_share:g} of it; raise num_generations, or lower the members' samples."
            )

    # -- at inference -------------------------------------------------------------------------------------------------

    def answer(
        self,
        prompt: str | Sequence[Message],
        vote: Vote | None = None,
        *,
        rewards: Any = None,
        key: Callable[[str], str] = answer_key,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        **columns: Any,
    ) -> Answer:
        """One answer out of those of all members.

        `vote`: `best` (highest reward), `majority` (most frequent), `weighted` (most frequent, each answer counting its reward);
        by default `best` with `rewards` and `majority` without. `rewards`: names, functions, reward models, a judge such as
        `"judge(url=..., model=...)"`, or a `Scorer`; they receive `columns`. `key`: function of an answer; answers with equal keys are the same
        vote. Members are loaded at the first call.
        """
        text = prompt if isinstance(prompt, str) else None
        messages = None if isinstance(prompt, str) else tuple(prompt)
        question = Prompt(uid="0", token_ids=(), text=text, messages=messages, columns=columns)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        vote = ("majority" if rewards is None else "best") if vote is None else vote
        return self.answers([question], vote, rewards=rewards, key=key, sampling=sampling)[0]

    def answers(
        self,
        prompts: Sequence[Prompt],
        vote: Vote = "majority",
        *,
        rewards: Any = None,
        key: Callable[[str], str] = answer_key,
        sampling: SamplingParams | None = None,
    ) -> list[Answer]:
        """The answers to several prompts; as `answer`."""
        expect_vote(vote, rewards is not None)
        groups = self.groups(prompts, sampling or SamplingParams(seed=0))
        scores = self.scores(groups, rewards)
        return [chosen(candidates_of(g, row), vote, key) for g, row in zip(groups, scores, strict=True)]

    def groups(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Group]:
        """Every member's completions of every prompt, members in order."""
        rows: list[list[Completion]] = [[] for _ in prompts]
        for i, writer in enumerate(self._writers):
            for row, written in zip(rows, writer.write(prompts, of_member(sampling, i)), strict=True):
                row += written.completions
        return [Group(prompt=prompt, completions=tuple(row)) for prompt, row in zip(prompts, rows, strict=True)]

    def scores(self, groups: Sequence[Group], rewards: Any) -> list[list[float]]:
        """Weighted reward of each completion; NaN where none scored it, or where `rewards` is None."""
        if rewards is None:
            return [[math.nan] * group.size for group in groups]
        is_scorer = isinstance(rewards, Scorer)
        with nullcontext(rewards) if is_scorer else closing(Scorer.of(rewards)) as scorer:
            return [totals_of(group, scorer.weights).tolist() for group in scorer.score(groups)]

    @cached_property
    def _writers(self) -> list[Writer]:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return load_writers(self.members, self.names, device)
