"""One answer out of several: the best by reward, the most frequent, or the most frequent weighed by reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from covey.errors import ConfigError, did_you_mean
from covey.rewards.builtin.answers import final_answer, number

Vote = Literal["majority", "weighted", "best"]
VOTES: tuple[str, ...] = get_args(Vote)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one member answered."""

    text: str
    source: str
    """The member's name."""
    reward: float = math.nan
    """NaN: not scored."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of an ensemble."""

    text: str
    source: str
    """The member that wrote it."""
    support: float
    """majority: share of the votes; weighted: share of the reward; best: its reward."""
    candidates: tuple[Candidate, ...]
    """All answers, members in order."""


def answer_key(text: str) -> str:
    """What two answers must share to count as the same: the marked or last number, or else the whole text, without case.

    >>> answer_key("3 + 4 = 7 #### 7") == answer_key("It is 7.0"), answer_key(" Yes ")
    (True, 'yes')
    """
    found = final_answer(text)
    value = None if found is None else number(found)
    return " ".join((text if found is None else found).split()).casefold() if value is None else str(value)


def expect_vote(vote: str, has_rewards: bool) -> None:
    """Raise ConfigError for a vote that does not exist, or that needs rewards and has none."""
    if vote not in VOTES:
        raise ConfigError(f"vote {vote!r} is none of {', '.join(VOTES)}.{did_you_mean(vote, VOTES)}")
    if vote != "majority" and not has_rewards:
        raise ConfigError(
            f"the vote {vote!r} needs rewards to judge the answers by, such as a reward model or a judge; 'majority' needs none."
        )


def chosen(candidates: Sequence[Candidate], vote: Vote, key: Callable[[str], str] = answer_key) -> Answer:
    """The answer of a vote; of equals the one that came first. Answers that were not scored count 0.

    `best`: the highest reward. `majority`: the key with the most answers (self-consistency, Wang et al. 2022). `weighted`: the
    key with the highest sum of rewards (best-of-N weighted, Li et al. 2022); the answer shown is its best one.
    """
    if not candidates:
        raise ConfigError("no member of the ensemble answered; look at its endpoints.")
    rewards = [0.0 if math.isnan(one.reward) else one.reward for one in candidates]
    if vote == "best":
        top = max(range(len(candidates)), key=lambda i: rewards[i])
        return _answer(candidates, top, rewards[top])
    keys = [key(one.text) for one in candidates]
    votes = rewards if vote == "weighted" else [1.0] * len(keys)
    sums: dict[str, float] = {}
    for name, value in zip(keys, votes, strict=True):
        sums[name] = sums.get(name, 0.0) + value
    winner = max(sums, key=lambda name: sums[name])
    among = [i for i, name in enumerate(keys) if name == winner]
    top = max(among, key=lambda i: rewards[i])
    whole = sum(abs(value) for value in votes)
    return _answer(candidates, top, sums[winner] / whole if whole else 0.0)


def _answer(candidates: Sequence[Candidate], i: int, support: float) -> Answer:
    return Answer(text=candidates[i].text, source=candidates[i].source, support=support, candidates=tuple(candidates))
