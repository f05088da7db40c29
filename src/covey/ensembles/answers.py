"""One answer out of several: the best by reward, the most frequent, or the most frequent weighed by reward."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from covey.errors import ConfigError, did_you_mean
from covey.rewards.builtin.answers import final_answer, number
from covey.types import Group

Vote = Literal["majority", "weighted", "best"]
"""Rule that chooses one answer of many: the commonest, the heaviest by rewards, or the single best."""
VOTES: tuple[str, ...] = get_args(Vote)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Answer of one member."""

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
    """Key of an answer, equal for two that count as the same: the marked or last number, or else the whole text, without case.

    >>> answer_key("3 + 4 = 7 #### 7") == answer_key("It is 7.0"), answer_key(" Yes ")
    (True, 'yes')
    """
    answer = final_answer(text)
    value = None if answer is None else number(answer)
    return " ".join((text if answer is None else answer).split()).casefold() if value is None else str(value)


def expect_vote(vote: str, has_rewards: bool) -> None:
    """Raise ConfigError for a vote that does not exist, or that needs rewards and has none."""
    if vote not in VOTES:
        raise ConfigError(f"vote {vote!r} is none of {', '.join(VOTES)}.{did_you_mean(vote, VOTES)}")
    if vote != "majority" and not has_rewards:
        raise ConfigError(
            f"the vote {vote!r} needs rewards to judge the answers by, such as a reward model or a judge; 'majority' needs none."
        )


def choose(candidates: Sequence[Candidate], vote: Vote, key: Callable[[str], str] = answer_key) -> tuple[int, float]:
    """Place and support of a vote's winner; of equals the one that came first. An answer that was not scored loses to any other.

    `best`: the highest reward. `majority`: the key with the most answers (self-consistency, Wang et al. 2022). `weighted`: the
    key with the highest sum of rewards (weighted best-of-N, Li et al. 2022). Where a reward is below 0, the sums are of what each
    is above the lowest: a reward model's are known up to a constant only, and an answer must not lose by being given twice. Where
    no sum is above 0 it is `majority`. Of a key's answers, the one with the highest reward.
    """
    if not candidates:
        raise ConfigError("no member of the ensemble answered a prompt; look at its endpoints.")
    rewards = [-math.inf if math.isnan(candidate.reward) else candidate.reward for candidate in candidates]
    places = range(len(candidates))
    if vote == "best":
        top = max(places, key=lambda i: rewards[i])
        return top, candidates[top].reward
    keys = [key(candidate.text) for candidate in candidates]
    votes = _above_zero(rewards) if vote == "weighted" else []
    if not any(votes):
        votes = [1.0] * len(keys)
    sums: dict[str, float] = {}
    for name, value in zip(keys, votes, strict=True):
        sums[name] = sums.get(name, 0.0) + value
    winner = max(sums, key=lambda name: sums[name])
    top = max((i for i in places if keys[i] == winner), key=lambda i: rewards[i])
    return top, sums[winner] / sum(votes)


def _above_zero(rewards: Sequence[float]) -> list[float]:
    """Rewards as votes: counted from the lowest where that is below 0; 0 for those that are not known."""
    scored = [reward for reward in rewards if reward != -math.inf]
    lowest = min(scored, default=0.0)
    return [0.0 if reward == -math.inf else reward - min(lowest, 0.0) for reward in rewards]


def chosen(candidates: Sequence[Candidate], vote: Vote, key: Callable[[str], str] = answer_key) -> Answer:
    """The answer that `choose` names."""
    top, support = choose(candidates, vote, key)
    return Answer(
        text=candidates[top].text, source=candidates[top].source, support=support, candidates=tuple(candidates)
    )


def candidates_of(group: Group, rewards: Sequence[float]) -> list[Candidate]:
    """A group's completions with the rewards that a vote goes by."""
    return [
        Candidate(text=completion.text, source=completion.source, reward=reward)
        for completion, reward in zip(group.completions, rewards, strict=True)
    ]
