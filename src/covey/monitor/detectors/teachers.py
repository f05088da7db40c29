"""Detectors of other models: teachers that are no better or are copied, members of an ensemble that dominate or are idle."""

import math
from statistics import fmean, stdev

from covey.monitor.history import History, together
from covey.types import Alert


def _members(seen: History) -> list[str]:
    names = seen.named("ensemble/", "/asked")
    return [name.removeprefix("ensemble/").removesuffix("/asked") for name in names]


def member_dominates(seen: History, *, share: float = 0.9, window: int = 30) -> Alert | None:
    """`member_dominates`: nearly all that is pushed up is a member's, or nearly every answer of a baseline beats the policy's."""
    alerts = []
    for name in _members(seen):
        kind = "share" if seen[f"ensemble/{name}/share"].count else "win_rate"  # a baseline pushes nothing up
        values = seen[f"ensemble/{name}/{kind}"].last(window)
        if len(values) < window or fmean(values) < share:
            continue
        what = "wrote {:.0%} of what is pushed up" if kind == "share" else "beats {:.0%} of the policy's answers"
        sentence = f"ensemble member {name} {what.format(fmean(values))}: the policy imitates it or stands still"
        alerts.append(seen.alert(
            "member_dominates", "warning", sentence,
            (
                "lower its samples, or raise num_generations",
                "easier prompts, of which the policy solves some by itself",
                "where imitation is what you want, train on the member's answers first, and without it afterwards",
            ),
            parts=name, member=name, **{kind: fmean(values)},
        ))  # fmt: skip
    return together(alerts)


def member_idle(seen: History, *, share: float = 0.02, window: int = 20) -> Alert | None:
    """`member_idle`: next to none of a member's completions carry a gradient, or change the baseline."""
    alerts = []
    for name in _members(seen):
        used = seen[f"ensemble/{name}/used"].last(window)
        if len(used) < window or fmean(used) > share:
            continue
        lost = seen[f"ensemble/{name}/lost"].last(window)
        reward = seen[f"ensemble/{name}/reward"].last(window)
        sentence = f"ensemble member {name} teaches nothing: {fmean(used):.0%} of its completions are used"
        alerts.append(seen.alert(
            "member_idle", "warning", sentence,
            (
                "lost near 1: its text does not come back equal in the policy's tokens, is too long, or its endpoint fails",
                "a sibling far from the policy is filtered: raise MemberWeight(drift=...), or make it a rescuer or a baseline",
                "a rescuer that is never right, or a baseline as good as the policy, only costs time: leave it out",
            ),
            parts=name, member=name, used=fmean(used), lost=fmean(lost) if lost else 0.0, reward=fmean(reward) if reward else 0.0,
        ))  # fmt: skip
    return together(alerts)


def teacher_worse(seen: History, *, below: float = -0.1, window: int = 20) -> Alert | None:
    """`teacher_worse`: within groups the teacher likes completions that earned less, beyond noise: it pulls against the reward."""
    agreement = [value for value in seen["teacher/agreement"].last(window) if value == value]
    if len(agreement) < window:
        return None
    mean, error = fmean(agreement), stdev(agreement) / math.sqrt(len(agreement))
    if mean >= below or mean + 2.0 * error >= 0.0:
        return None
    sentence = f"the teacher ranks completions of a group against the reward: agreement {mean:.2f} of -1 to 1 over {window} steps"
    remedies = (
        "score the teacher alone: its accuracy, and the policy's with the feedback in its prompt",
        "another template or column of feedback, or a better teacher",
        "lower its weight, or leave it out",
    )
    return seen.alert("teacher_worse", "warning", sentence, remedies, agreement=mean, error=error)


def teacher_collapse(seen: History, *, share: float = 0.1, window: int = 10) -> Alert | None:
    """`teacher_collapse`: a teacher and the policy agree on almost everything, both are nearly sure, and the reward has not risen.

    `share`: of the gap and of the entropy at the start.
    """
    gap, entropy, reward = seen["teacher/gap"], seen["entropy"], seen["reward"]
    if min(gap.count, entropy.count, reward.count) < 2 * window:
        return None
    wide, near = fmean(map(abs, gap.start(window))), fmean(map(abs, gap.last(window)))
    begun, now = fmean(entropy.start(window)), fmean(entropy.last(window))
    earned = fmean(reward.last(window)) - fmean(reward.start(window))
    noise = stdev(reward.start(window)) / math.sqrt(window)
    if near >= share * wide or now >= share * begun or earned > 2.0 * noise:
        return None
    sentence = (
        f"teacher and policy have become sure of the same: their gap fell from {wide:.3g} to {near:.3g} nats a token and the "
        f"entropy from {begun:.3g} to {now:.3g}, without more reward"
    )
    remedies = (
        "teacher_model_kind='base', or a lower teacher_update_rate, so that the teacher does not follow",
        "a reward beside it, and an entropy bonus (entropy_coef)",
    )
    return seen.alert("teacher_collapse", "warning", sentence, remedies, gap_start=wide, gap_now=near, entropy_now=now)


def teacher_leak(seen: History, *, nearer: float = 0.7, fall: float = 0.2, window: int = 10) -> Alert | None:
    """`teacher_leak`: while the policy comes nearer to its teacher, the reward falls from its best, beyond noise.

    So it does where an informed teacher writes as only one who has the answer can, without the steps that lead to it.
    """
    gap, reward, length = seen["teacher/gap"], seen["reward"], seen["completions/mean_length"]
    if min(gap.count, reward.count) < 3 * window:
        return None
    wide, near = fmean(map(abs, gap.start(window))), fmean(map(abs, gap.last(window)))
    early, late = reward.start(window), reward.last(window)
    before, now = fmean(early), fmean(late)
    error = math.hypot(stdev(early), stdev(late)) / math.sqrt(window)
    if near > nearer * wide or before - now < max(fall * abs(before), 4.0 * error):
        return None
    lengths = (fmean(length.start(window)), fmean(length.last(window))) if length.count else (0.0, 0.0)
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
