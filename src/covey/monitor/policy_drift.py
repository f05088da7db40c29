"""KL of the policy from its start, on a few completions of the first rollout: no second model is kept."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from covey.algorithms import Needs
from covey.types import Completion, Group, Mean, Metric, Prompt

MOST = 16
"""Completions that are kept."""
EVERY = 20
"""Steps from one look to the next: a forward pass of sixteen completions is then 0.5% of the time of the demo's steps."""
Annotate = Callable[[Sequence[Group], Any], list[Group]]


class Anchor:
    """`kl_start`: mean of `r - 1 - log r` with `r = p_now / p_start`, over the tokens of completions that the start policy wrote.

    In nats a token; an estimate of KL(start || now) that is never negative (k3, Schulman 2020). The completions are the first
    rollout's, on which the first step trains: its effect on them is counted, and weighs little later in a run. `annotate`
    is `Learner.annotate`, a collective: every rank must call. The completions are part of a checkpoint.
    """

    def __init__(self, annotate: Annotate | None = None) -> None:
        self.annotate = annotate
        self.groups: list[Group] = []
        """With `old_logp` [T] as the start policy gives it."""

    def begin(self, groups: Sequence[Group]) -> None:
        """Keep some of the first rollout, before any update; later calls change nothing."""
        if self.annotate is None or self.groups:
            return
        each = max(1, MOST // max(1, len(groups)))
        chosen = [_bare(group, each) for group in groups[:MOST]]
        self.groups = self._measured([group for group in chosen if group.completions])

    def __call__(self, step: int) -> dict[str, Metric]:
        """At every twentieth step, and the first."""
        if not self.groups or (step != 1 and step % EVERY):
            return {}
        pairs = [
            (before.old_logp, now.old_logp, before.written)
            for old, new in zip(self.groups, self._measured(self.groups), strict=True)
            for before, now in zip(old.completions, new.completions, strict=True)
        ]
        moved = torch.cat(
            [(now - before)[written] for before, now, written in pairs if before is not None and now is not None]
        )  # [tokens], log r
        return {"kl_start": Mean.of(moved.expm1() - moved)}

    def state_dict(self) -> dict[str, Any]:
        return {"groups": list(self.groups)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.groups = list(state["groups"])

    def _measured(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with log-probabilities of the current policy."""
        assert self.annotate is not None
        needs = Needs(old_logp=True)
        return self.annotate(groups, SimpleNamespace(needs=needs)) if groups else []


def _bare(group: Group, most: int) -> Group:
    """The first `most` completions of which the model wrote tokens, as ids and their mask alone."""
    drawn = [completion for completion in group.completions if bool(completion.written.any())][:most]
    prompt = Prompt(uid=group.prompt.uid, token_ids=group.prompt.token_ids, media=group.prompt.media)
    bare = lambda done: Completion(token_ids=done.token_ids, text="", finish="stop", mask=done.mask, media=done.media)
    return Group(prompt=prompt, completions=tuple(map(bare, drawn)))
