"""A budget of tokens for thoughts: a turn that still thinks after so many is handed the mark that closes its thoughts, and goes on with its answer.

The mark is a reply inside of the turn: its tokens have `mask` False and no gradient. The name is vLLM's; the procedure that of Yang et al.
2025, "Qwen3 Technical Report", section "Thinking Mode Fusion", <https://arxiv.org/abs/2505.09388>.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from covey.data.thoughts import ThoughtMarks, thought_marks
from covey.errors import ConfigError
from covey.rollout.environments import Environment, Reply, Turn
from covey.types import Completion, Group, Mean, Metric, Position, of_policy

DEFAULT_MARKS = ThoughtMarks("<think>", "</think>", None)
"""Those of a tokenizer whose chat template has none: models learn them from `think_format`."""


def may_answer(environment: Environment | None) -> bool:
    """True if an environment may reply to turns that end by themselves, with media too; a budget of its own does not."""
    return (environment.environment if isinstance(environment, ThinkingBudget) else environment) is not None


@dataclass(frozen=True, eq=False)
class ThinkingBudget:
    """An environment that closes the thoughts of a turn after `tokens` tokens; `environment` answers turns that end by themselves."""

    tokens: int
    marks: ThoughtMarks
    tokenizer: Any
    environment: Environment | None = None

    @staticmethod
    def of(tokenizer: Any, tokens: int, environment: Environment | None = None) -> ThinkingBudget:
        """The budget in the marks of a tokenizer's chat template. Raises ConfigError for thoughts that stand in a channel."""
        marks = thought_marks(tokenizer) or DEFAULT_MARKS
        if not marks.closes.startswith(("</", "[/")):
            raise ConfigError(
                f"thinking_token_budget closes thoughts by a mark such as </think>, and this model's end with {marks.closes!r} and begin "
                "another message; leave it out, and lower max_completion_length."
            )
        return ThinkingBudget(tokens, marks, tokenizer, environment)

    def __call__(self, turns: Sequence[Turn]) -> Sequence[Reply]:
        return [None] * len(turns) if self.environment is None else self.environment(turns)

    @cached_property
    def closing(self) -> list[int]:
        """Token ids of the closing mark, with the line breaks around it."""
        ids: list[int] = self.tokenizer(f"\n{self.marks.closes}\n\n", add_special_tokens=False)["input_ids"]
        return ids

    def marked(self, done: Completion) -> Completion:
        """The completion, among whose `observations` the marks that closed its thoughts are not."""
        observed, ids = done.observed, done.token_ids.tolist()
        starts = observed & ~torch.nn.functional.pad(observed, (1, 0))[:-1]
        for t in starts.nonzero().flatten().tolist():
            if ids[t : t + len(self.closing)] == self.closing[: len(ids) - t]:
                observed[t : t + len(self.closing)] = False
        return replace(done, observations=observed)

    def is_thinking(self, before: Sequence[int], turn: Sequence[int]) -> bool:
        """True if thoughts are open after the tokens of a turn; the tokens `before` it may have opened them."""
        text: str = self.tokenizer.decode(list(turn), skip_special_tokens=False)
        opens = 0 if self.marks.are_open(self.tokenizer, before) else -1
        return max(opens, text.rfind(self.marks.opens)) > text.rfind(self.marks.closes)


class ClosedThoughts:
    """The stage that measures the share of the policy's completions whose thoughts their budget closed."""

    phase: Literal["rollout"] = "rollout"

    def __call__(self, groups: Sequence[Group], position: Position) -> list[Group]:
        drawn = [c for group in of_policy(groups) for c in group.completions if c.finish != "error"]
        marks = [
            ~c.written & ~c.observed & (c.written.cumsum(-1) > 0) for c in drawn
        ]  # neither the model's nor an answer
        self._share = Mean(float(sum(bool(mark.any()) for mark in marks)), len(drawn))
        return list(groups)

    def take_metrics(self) -> dict[str, Metric]:
        """The share of the last rollout."""
        return {"completions/closed_thoughts_ratio": self._share}
