"""Alerts on the contribution of ensemble members: nearly all of the positive advantages, or none."""

from dataclasses import dataclass
from statistics import fmean

from covey.monitor.history import History, together
from covey.types import Alert


def _members(seen: History) -> list[str]:
    names = seen.named("ensemble/", "/asked")
    return [name.removeprefix("ensemble/").removesuffix("/asked") for name in names]


@dataclass(frozen=True)
class MemberDominates:
    """`member_dominates`: nearly all that is pushed up is a member's, or nearly every answer of a baseline beats the policy's."""

    share: float = 0.9
    window: int = 30

    def __call__(self, seen: History) -> Alert | None:
        alerts = []
        for name in _members(seen):
            share = seen[f"ensemble/{name}/share"]
            kind = "share" if share.count else "win_rate"  # a baseline pushes nothing up
            values = seen[f"ensemble/{name}/{kind}"].last(self.window)
            if len(values) < self.window or fmean(values) < self.share:
                continue
            what = "wrote {:.0%} of what is pushed up" if kind == "share" else "beats {:.0%} of the policy's answers"
            sentence = f"ensemble member {name} {what.format(fmean(values))}: the policy imitates it or stands still"
            alert = seen.alert(
                "member_dominates", "warning", sentence,
                (
                    "lower its samples, or raise num_generations",
                    "easier prompts, of which the policy solves some by itself",
                    "where imitation is what you want, train on the member's answers first, and without it afterwards",
                ),
                parts=name, member=name, **{kind: fmean(values)},
            )  # fmt: skip
            alerts.append(alert)
        return together(alerts)


@dataclass(frozen=True)
class MemberIdle:
    """`member_idle`: next to none of a member's completions carry a gradient, or change the baseline."""

    share: float = 0.02
    window: int = 20

    def __call__(self, seen: History) -> Alert | None:
        alerts = []
        for name in _members(seen):
            used = seen[f"ensemble/{name}/used"].last(self.window)
            if len(used) < self.window or fmean(used) > self.share:
                continue
            lost = seen[f"ensemble/{name}/lost"].last(self.window)
            reward = seen[f"ensemble/{name}/reward"].last(self.window)
            sentence = f"ensemble member {name} teaches nothing: {fmean(used):.0%} of its completions are used"
            alert = seen.alert(
                "member_idle", "warning", sentence,
                (
                    "lost near 1: its text does not come back equal in the policy's tokens, is too long, or its endpoint fails",
                    "a sibling far from the policy is filtered: raise MemberWeight(drift=...), or make it a rescuer or a baseline",
                    "a rescuer that is never right, or a baseline as good as the policy, only costs time: leave it out",
                ),
                parts=name, member=name, used=fmean(used), lost=fmean(lost) if lost else 0.0, reward=fmean(reward) if reward else 0.0,
            )  # fmt: skip
            alerts.append(alert)
        return together(alerts)
