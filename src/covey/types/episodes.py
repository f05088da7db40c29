"""Calls of tools, and notes on an episode: its turns' states and rewards, the conversation, and what its completion shares with another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeNotes:
    """Notes on a completion of several turns. Turn k is the k-th run of tokens between answers of tools and environments."""

    states: tuple[str, ...] = ()
    """[K], key of what the model saw before each turn; equal keys are the same state (GiGPO's anchor states)."""
    rewards: tuple[float, ...] = ()
    """[K] or fewer, rewards of single turns, which the completion's total contains. Empty: only the whole is rewarded."""
    conversation: tuple[Mapping[str, Any], ...] = ()
    """All messages, those of the prompt included, as they went over the wire. Empty: the prompt's and the completion's own."""
    branches: tuple[Any, ...] = ()
    """Completions of the same agent's calls that did not go on to its end; they get this completion's advantage."""
    role: str | None = None
    """Role that the model played, such as a player of a game. None: the environment names none."""
    shares: int | None = None
    """Index in the group of the completion whose advantage this one gets, without a score of its own. None: it has its own."""
    is_scored: bool = True
    """False for one that shares the advantage of a completion that nobody scored."""

    @property
    def is_branch(self) -> bool:
        """True if this completion gets the advantage of another, which somebody scored."""
        return self.shares is not None and self.is_scored


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool and its answer."""

    name: str
    arguments: Any
    """Arguments as the model wrote them: a mapping, or text that is no JSON."""
    result: str
    """Text that the model read."""
    status: Literal["ok", "error", "timeout"] = "ok"
    seconds: float = 0.0
    parts: tuple[Mapping[str, Any], ...] = ()
    """The answer in parts, where it holds images (PNG files), sounds (arrays) or videos (lists of PNG files), with their digests."""
