"""Detectors for a teacher by token: one that pulls against the reward, that fell with the policy, or that takes the reward along."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from covey.monitor.history import History
from covey.types import Alert


@dataclass(frozen=True)
class TeacherWorse:
    """`teacher_worse`: within groups the teacher likes completions that earned less, beyond noise: it pulls against the reward."""

    below: float = -0.1
    window: int = 20

    def __call__(self, seen: History) -> Alert | None:
        agreement = [value for value in seen["teacher/agreement"].last(self.window) if value == value]
        if len(agreement) < self.window:
            return None
        mean, error = fmean(agreement), stdev(agreement) / math.sqrt(len(agreement))
        if mean >= self.below or mean + 2.0 * error >= 0.0:
            return None
        sentence = f"the teacher ranks completions of a group against the reward: agreement {mean:.2f} of -1 to 1 over {self.window} steps"
        remedies = (
            "score the teacher alone: its accuracy, and the policy's with the feedback in its prompt",
            "another template or column of feedback, or a better teacher",
            "lower its weight, or leave it out",
        )
        return seen.alert("teacher_worse", "warning", sentence, remedies, agreement=mean, error=error)


@dataclass(frozen=True)
class TeacherCollapse:
    """`teacher_collapse`: a teacher and the policy agree on almost everything, both are nearly sure, and the reward has not risen."""

    share: float = 0.1
    """Of the gap and of the entropy at the start."""
    window: int = 10

    def __call__(self, seen: History) -> Alert | None:
        gap, entropy, reward = seen["teacher/gap"], seen["entropy"], seen["reward"]
        if min(gap.count, entropy.count, reward.count) < 2 * self.window:
            return None
        wide, near = fmean(map(abs, gap.start(self.window))), fmean(map(abs, gap.last(self.window)))
        begun, now = fmean(entropy.start(self.window)), fmean(entropy.last(self.window))
        earned = fmean(reward.last(self.window)) - fmean(reward.start(self.window))
        noise = stdev(reward.start(self.window)) / math.sqrt(self.window)
        if near >= self.share * wide or now >= self.share * begun or earned > 2.0 * noise:
            return None
        sentence = (
            f"teacher and policy have become sure of the same: their gap fell from {wide:.3g} to {near:.3g} nats a token and the "
            f"entropy from {begun:.3g} to {now:.3g}, without more reward"
        )
        remedies = (
            "teacher_model_kind='base', or a lower teacher_update_rate, so that the teacher does not follow",
            "a reward beside it, and an entropy bonus (entropy_coef)",
        )
        return seen.alert(
            "teacher_collapse", "warning", sentence, remedies, gap_start=wide, gap_now=near, entropy_now=now
        )


@dataclass(frozen=True)
class TeacherLeak:
    """`teacher_leak`: while the policy comes nearer to its teacher, the reward falls from its best, beyond noise.

    So it does where an informed teacher writes as only one who has the answer can, without the steps that lead to it.
    """

    nearer: float = 0.7
    fall: float = 0.2
    window: int = 10

    def __call__(self, seen: History) -> Alert | None:
        gap, reward, length = seen["teacher/gap"], seen["reward"], seen["completions/mean_length"]
        if min(gap.count, reward.count) < 3 * self.window:
            return None
        wide, near = fmean(map(abs, gap.start(self.window))), fmean(map(abs, gap.last(self.window)))
        early, late = reward.start(self.window), reward.last(self.window)
        before, now = fmean(early), fmean(late)
        error = math.hypot(stdev(early), stdev(late)) / math.sqrt(self.window)
        if near > self.nearer * wide or before - now < max(self.fall * abs(before), 4.0 * error):
            return None
        lengths = (fmean(length.start(self.window)), fmean(length.last(self.window))) if length.count else (0.0, 0.0)
        sentence = (
            f"the policy came nearer to its teacher ({wide:.3g} to {near:.3g} nats a token) and lost reward ({before:.3g} to {now:.3g}): "
            "it may take over how one writes who has the answer"
        )
        remedies = (
            "read completions at tokens with a large teacher gap (covey view, covey why)",
            "a template that asks for the steps, or feedback without the final answer",
            "rlsd, whose sign is the reward's, in place of a divergence",
        )
        return seen.alert(
            "teacher_leak", "warning", sentence, remedies,
            gap_start=wide, gap_now=near, reward_start=before, reward_now=now, length_start=lengths[0], length_now=lengths[1],
        )  # fmt: skip
