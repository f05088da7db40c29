"""Completions of several turns over a sampler of single ones: where a completion ends by itself, an environment replies and it goes on.

The continuation is a prompt of its own, in token ids: the completion so far and the reply. Nothing is rendered or tokenized again, and a
server's prefix cache spares it the computation. The native engine does the same within its decode steps.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import DataError
from covey.rollout.environments import Answer, Environment, Turn, replies
from covey.rollout.generate import GenerateSampler
from covey.rollout.prompts import PromptLike
from covey.rollout.sampler import Sampler, SamplingParams
from covey.rollout.sampling import fresh_seed
from covey.rollout.thinking import ThinkingBudget
from covey.types import Completion, Finish, Group, Media, Prompt


@dataclass(eq=False)
class _Writing:
    """One completion on its way."""

    place: tuple[int, int]
    """(prompt, completion)"""
    prompt: Prompt
    limit: int
    """Most tokens of the completion, replies included."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Tensor] | None = field(default_factory=list)
    """None: the sampler has none."""
    mask: list[bool] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(token, version) of each turn."""
    turns: int = 0
    finish: Finish | None = None
    media: Media | None = None
    """Images, sounds and videos of prompt and replies, where a reply has any."""
    experts: list[Tensor] = field(default_factory=list)
    """Experts of each turn, those of the reply before it included; empty: not recorded."""
    prompt_experts: Tensor | None = None
    is_checked: bool = False
    """True if the thoughts of the turn were closed within their budget."""

    @property
    def left(self) -> int:
        return self.limit - len(self.ids)

    def add(self, turn: Completion, count: int | None = None) -> None:
        """Add a turn of the model, cut at the limit; or its first `count` tokens, behind which it goes on."""
        cut = turn.token_ids[: self.left if count is None else count].tolist()
        if not self.spans or self.spans[-1][1] != turn.version:
            self.spans.append((len(self.ids), turn.version))
        if turn.logprobs is None or self.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs.append(turn.logprobs[: len(cut)])
        if turn.experts is not None and turn.prompt_experts is not None:
            if self.prompt_experts is None:
                self.prompt_experts = turn.prompt_experts
            recorded = len(self.prompt_experts) + sum(map(len, self.experts))
            self.experts += [turn.prompt_experts[recorded:], turn.experts[: len(cut)]]
        self.turns += 1
        self.ids += cut
        self.mask += [True] * len(cut)
        if count is not None:
            return
        if turn.finish != "stop" or len(cut) < turn.num_tokens:
            self.finish = "length" if len(cut) < turn.num_tokens else turn.finish
        elif not self.left:
            self.finish = "stop"

    def answer(self, reply: Answer | None, banned: Collection[int] = ()) -> None:
        """A reply, cut at the limit; None: the completion is over. `banned`: ids that stand for media."""
        if reply is None:
            self.finish = "stop"
            return
        self.is_checked = False
        answer = reply.cut(self.left, banned)
        cut = list(answer.token_ids)
        if answer.media is not None:
            read = len(self.prompt.token_ids) + len(self.ids)
            self.media = answer.media.behind(self.media or self.prompt.media, read)
        self.ids += cut
        self.mask += [False] * len(cut)
        if self.logprobs is not None:
            self.logprobs.append(torch.zeros(len(cut)))
        if not self.left or len(cut) < len(reply.token_ids):
            self.finish = "length"

    def continuation(self) -> Prompt:
        """The prompt with its images and sounds, and what was written, as the prompt of the next turn."""
        i, g = self.place
        ids = (*self.prompt.token_ids, *self.ids)
        return Prompt(
            uid=f"{self.prompt.uid}/{i}.{g}.{self.turns}", token_ids=ids, media=self.media or self.prompt.media
        )

    def completion(self, tokenizer: Any) -> Completion:
        ids = torch.tensor(self.ids, dtype=torch.int64)
        first, *later = self.spans
        return Completion(
            token_ids=ids,
            text=tokenizer.decode(ids, skip_special_tokens=True),
            finish=self.finish or "stop",
            logprobs=None if self.logprobs is None else torch.cat(self.logprobs).float(),
            mask=torch.tensor(self.mask, dtype=torch.bool),
            version=first[1],
            versions=tuple(later),
            experts=torch.cat(self.experts) if self.experts else None,
            prompt_experts=self.prompt_experts,
            media=self.media,
        )


class TurnSampler:
    """A sampler whose completions an environment may answer, over `sampler`, which writes each turn by itself."""

    def __init__(
        self,
        sampler: Sampler,
        environment: Environment,
        tokenizer: Any,
        context: int | None,
        banned: Collection[int] = (),
    ) -> None:
        """`context`: most tokens of prompt and completion together; None: no limit. `banned`: ids that no reply holds."""
        self.sampler, self.environment, self.tokenizer, self.context = sampler, environment, tokenizer, context
        self.banned = banned
        self.budget = environment if isinstance(environment, ThinkingBudget) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def load(self, policy: nn.Module, version: int) -> None:
        """From now on sample with these weights; completions carry `version`."""
        self.sampler.load(policy, version)

    def sample(self, prompts: Sequence[PromptLike], n: int, params: SamplingParams) -> Iterator[Group]:
        """One group of `n` completions for each prompt, as they finish. Raises DataError for a prompt without token ids."""
        if not all(isinstance(prompt, Prompt) for prompt in prompts):
            raise DataError("a TurnSampler takes Prompts; encode text or messages with covey.data first.")
        params = replace(params, seed=fresh_seed(params))
        return self._groups([prompt for prompt in prompts if isinstance(prompt, Prompt)], n, params)

    def _groups(self, prompts: list[Prompt], n: int, params: SamplingParams) -> Iterator[Group]:
        limits = [min(params.max_tokens, (self.context or 2**62) - len(prompt.token_ids)) for prompt in prompts]
        rows = [[_Writing((i, g), prompt, limits[i]) for g in range(n)] for i, prompt in enumerate(prompts)]
        limited = params if self.budget is None else self._limited([group_rows[0] for group_rows in rows], params)
        drawn = self.sampler.sample(prompts, n, limited)
        turns: dict[str, list[list[_Writing]]] = {}
        for prompt, group_rows in zip(prompts, rows, strict=True):
            turns.setdefault(prompt.uid, []).append(group_rows)
        go_on: Callable[..., Iterator[Group]] = getattr(self.sampler, "go_on", self.sampler.sample)
        while True:
            for group in drawn:
                ended = turns[group.prompt.uid].pop(0)
                self._advance(ended, group.completions, limited.max_tokens)
                i = ended[0].place[0]
                if all(row.finish is not None for row in rows[i]):
                    done = [row.completion(self.tokenizer) for row in rows[i]]
                    yield Group(
                        prompt=prompts[i],
                        completions=tuple(done if self.budget is None else map(self.budget.marked, done)),
                    )
            running = [row for group_rows in rows for row in group_rows if row.finish is None]
            if not running:
                return
            further = [row.continuation() for row in running]
            turns = {prompt.uid: [[row]] for prompt, row in zip(further, running, strict=True)}
            limited = self._limited(running, params)
            drawn = go_on(further, 1, limited)

    def _limited(self, rows: Sequence[_Writing], params: SamplingParams) -> SamplingParams:
        """Parameters of one more turn of these rows: none is asked for more tokens than its room, or than the budget of its thoughts.

        Stop strings, and options of transformers' generate such as min_new_tokens, act on a turn that is written in one piece.
        """
        budget = None if params.stop or isinstance(self.sampler, GenerateSampler) else self.budget
        of_thoughts = lambda row: row.left if budget is None or row.is_checked else budget.tokens
        return replace(params, max_tokens=max([1, *(min(row.left, of_thoughts(row)) for row in rows)]))

    def _advance(self, rows: Sequence[_Writing], turns: Sequence[Completion], most: int) -> None:
        """Add these turns, of at most `most` tokens, and the environment's replies."""
        is_over = [self._add(row, turn, most) for row, turn in zip(rows, turns, strict=True)]
        self._answer([row for row, ends in zip(rows, is_over, strict=True) if ends and row.finish is None])

    def _add(self, row: _Writing, turn: Completion, most: int) -> bool:
        """Add a turn. False where it goes on: its thoughts were closed, or it was asked for fewer tokens than it has room for."""
        goes_on = turn.finish == "length" and most <= turn.num_tokens < row.left
        budget, count = self.budget, turn.num_tokens - (turn.finish == "stop")
        if budget is not None and not row.is_checked and budget.tokens <= count and budget.tokens < row.left:
            if budget.is_thinking([*row.prompt.token_ids, *row.ids], turn.token_ids[: budget.tokens].tolist()):
                row.add(turn, budget.tokens)
                row.answer(Answer(budget.closing), self.banned)
                return False
            row.is_checked = True
        row.add(turn, turn.num_tokens if goes_on else None)
        return not goes_on

    def _answer(self, rows: Sequence[_Writing]) -> None:
        turns = [Turn.of(row.prompt, row.place[1], row.ids, row.mask, self.tokenizer) for row in rows]
        answers = replies(self.environment, turns, self.tokenizer, self.banned) if turns else []
        for row, reply in zip(rows, answers, strict=True):
            row.answer(reply, self.banned)
