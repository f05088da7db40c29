"""What happens around the policy: a machine that slows down, data that changes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from covey.monitor.history import History, shift
from covey.types import Alert


@dataclass(frozen=True)
class ThroughputDrop:
    """`throughput_drop`: tokens a second are down to a fraction of what they were, for `window` steps."""

    share: float = 0.5
    window: int = 10

    def __call__(self, seen: History) -> Alert | None:
        speed = seen["tokens_per_second/step"]
        recent, earlier = speed.last(self.window), speed.last(RECALL)[: -self.window]
        if len(earlier) < 2 * self.window:
            return None
        usual = median(earlier)
        if max(recent) > (self.share + 0.15) * usual or median(recent) > self.share * usual:
            return None
        slow = {
            phase: round(fmean(seen[f"seconds/{phase}"].last(5)), 4)
            for phase in ("rollout", "reward", "learn")
            if seen[f"seconds/{phase}"].count
        }
        said = f"{median(recent):,.0f} tokens a second, {usual:,.0f} before"
        return seen.alert(
            "throughput_drop", "warning", said,
            (
                "see which phase takes the time, under seconds/ in metrics.jsonl",
                "look for other processes on the machine, a hot or throttled device, a slow judge, memory that swaps",
            ),
            tokens_per_second=median(recent), before=usual, seconds=slow,
        )  # fmt: skip


@dataclass(frozen=True)
class DataDrift:
    """`data_drift`: the prompts are made of other tokens, or are longer or shorter, than those of the first steps."""

    z: float = 6.0
    times: float = 1.5
    window: int = 10

    def __call__(self, seen: History) -> Alert | None:
        drift, length = seen["prompts/drift"], seen["prompts/mean_length"]
        if drift.count < 2 * self.window:
            return None
        moved = shift(drift.start(self.window), drift.last(self.window))
        longer = shift(length.start(self.window), length.last(self.window))
        is_other = moved.z > self.z and moved.after > self.times * moved.before
        is_longer = abs(longer.z) > self.z and not 1 / self.times < longer.after / longer.before < self.times
        if not is_other and not is_longer:
            return None
        said = (
            f"prompts are not like those of the start: their tokens differ by {moved.after:.2g} nats ({moved.before:.2g} between "
            f"steps at the start), their length is {longer.after:.0f} tokens ({longer.before:.0f})"
        )
        return seen.alert(
            "data_drift", "info", said,
            (
                "expected with a curriculum or a mixture that changes; otherwise shuffle_dataset=True",
                "read a change of reward with care: the prompts may have changed, not the policy",
            ),
            drift=[moved.before, moved.after], length=[longer.before, longer.after],
        )  # fmt: skip


RECALL = 110
"""Steps that a speed is compared over."""
