"""Do answers leave the language of their prompts?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from covey.monitor.history import History, noise
from covey.types import Alert


@dataclass(frozen=True)
class LanguageCollapse:
    """`language_collapse`: of some language's prompts, the share answered in it has fallen by more than chance allows.

    The first `window` steps against the last. The standard error is the larger of two: that of a share of so many answers
    (Agresti and Coull's, which is above 0 at shares of 0 and 1), and that of the steps' own scatter, since answers of one
    prompt are alike. A fall counts beyond `z` of them, and from `matters` on.
    """

    z: float = 5.0
    matters: float = 0.05
    window: int = 10

    def __call__(self, seen: History) -> Alert | None:
        fallen = sorted(self._fallen(seen), key=lambda entry: entry[2] - entry[1])
        if not fallen:
            return None
        names = ", ".join(f"{code} ({before:.0%} to {after:.0%})" for code, before, after in fallen)
        reward = seen["reward"]
        holds = reward.count >= 2 * self.window and sum(reward.last(self.window)) >= sum(reward.start(self.window))
        but = ", while the reward has not fallen: it does not see this" if holds else ""
        return seen.alert(
            "language_collapse", "warning", f"answers leave the language of their prompts: {names}{but}",
            (
                "pay for the language: add the reward language (reads the column language), or raise its weight; 0.1 to 0.5 of the task's is usual",
                "advantage_slices='language' keeps one language's rewards from setting the scale of another's",
                "early is cheap: go back to a checkpoint from before the fall, alert_actions={'language_collapse': 'roll_back'} does so",
            ),
            **{f"same_language_{code}": [before, after] for code, before, after in fallen},
        )  # fmt: skip

    def _fallen(self, seen: History) -> Iterator[tuple[str, float, float]]:
        """Code, share at the start, and now."""
        for name, shares in seen.named("languages/", "/same").items():
            code = name.split("/")[1]
            counts = seen[f"languages/{code}/count"]
            if shares.count < 2 * self.window:
                continue
            before, size_before = self._pooled(shares.start(self.window), counts.start(self.window))
            after, size_after = self._pooled(shares.last(self.window), counts.last(self.window))
            chance = math.sqrt(_variance(before, size_before) + _variance(after, size_after))
            scatter = noise(shares.start(self.window), shares.last(self.window)) * math.sqrt(2 / self.window)
            if before - after > max(self.z * max(chance, scatter), self.matters):
                yield code, before, after

    def _pooled(self, shares: list[float], counts: list[float]) -> tuple[float, float]:
        """The share over some steps, and of how many answers."""
        size = sum(counts)
        return sum(share * count for share, count in zip(shares, counts, strict=True)) / max(size, 1.0), size


def _variance(share: float, size: float) -> float:
    adjusted = (share * size + 2) / (size + 4)
    return adjusted * (1 - adjusted) / (size + 4)
