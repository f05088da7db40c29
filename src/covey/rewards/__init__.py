"""Scores out of text: TRL's reward functions and reward models, called so that none of them can lose a run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.rewards.contract import RewardSpec, check
    from covey.rewards.metrics import reward_metrics
    from covey.rewards.scoring import Scorer

_WHERE = {
    "RewardSpec": "contract",
    "Scorer": "scoring",
    "check": "contract",
    "reward_metrics": "metrics",
}
__all__ = ["RewardSpec", "Scorer", "check", "reward_metrics"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
