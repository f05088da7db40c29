"""Detectors for the completions' text: too long, too short, truncated, repetitive, badly formatted, in another language than the prompt."""

import math
from collections.abc import Iterator
from statistics import fmean

from covey.monitor.detectors.blame import blamed
from covey.monitor.history import History, has_risen, may_have_risen, noise, shift, since_start
from covey.types import Alert


def length_explosion(seen: History, *, times: float = 3.0, window: int = 10) -> Alert | None:
    """`length_explosion`: completions grow by `times`, or by half as much while the reward does not rise with them."""
    moved = since_start(seen["completions/mean_length"], window)
    limit = times if may_have_risen(seen) else max(1.0, times / 2)
    if moved is None or moved.after < limit * moved.before or moved.z < 4:
        return None
    sentence = f"completions have grown from {moved.before:.0f} to {moved.after:.0f} tokens"
    return seen.alert(
        "length_explosion", "warning", sentence,
        (
            "see whether length itself pays: compare completions/mean_length_right and _wrong",
            "take a length penalty (soft_overlong, or the reward length), or loss_type='dr_grpo', which does not favour long wrong answers",
        ),
        length_start=moved.before, length_now=moved.after, z=moved.z, **_by_verdict(seen),
    )  # fmt: skip


def length_collapse(seen: History, *, share: float = 0.5, window: int = 10) -> Alert | None:
    """`length_collapse`: completions shrink to a fraction while the reward does not rise, or to almost nothing."""
    moved = since_start(seen["completions/mean_length"], window)
    limit = share / 3 if may_have_risen(seen) else share
    if moved is None or moved.after > limit * moved.before or moved.z > -4:
        return None
    sentence = f"completions have shrunk from {moved.before:.0f} to {moved.after:.1f} tokens"
    return seen.alert(
        "length_collapse", "warning", sentence,
        (
            "test the reward on an empty and on a very short answer: it may pay for them",
            "lower the weight of a length penalty",
        ),
        length_start=moved.before, length_now=moved.after, z=moved.z, **_by_verdict(seen),
    )  # fmt: skip


def truncation(seen: History, *, share: float = 0.3, window: int = 5, z: float = 3.0) -> Alert | None:
    """`truncation`: many completions are cut at `max_completion_length`.

    For information alone where few were cut at the start and the reward has risen while they came to be: it pays for them.
    """
    series = seen["completions/clipped_ratio"]
    cut, begun = series.last(window), series.start(window)
    if len(cut) < window or fmean(cut) < share:
        return None
    is_paid = fmean(begun) < share / 2 and has_risen(seen, z=z)
    sentence = f"{fmean(cut):.0%} of completions are cut at the length limit, before they could end"
    return seen.alert(
        "truncation", "info" if is_paid else "warning", sentence,
        (
            *(["the reward has risen all the same: pay for an end, or for fewer tokens (soft_overlong)"] if is_paid else []),
            "raise max_completion_length, or mask_truncated_completions=True to leave them out of the loss",
            "if they repeat themselves, the model does not know how to end: check the chat template and EOS token",
        ),
        clipped_ratio=fmean(cut), **seen.means("completions/repetition", "completions/mean_length"),
    )  # fmt: skip


def repeated_text(
    seen: History, *, share: float = 0.3, gain: float = 0.15, window: int = 10, z: float = 4.0
) -> Alert | None:
    """`repeated_text`: completions say the same 4 tokens again and again, more than they did at the start."""
    repeated = seen["completions/repetition"]
    if repeated.count < window:
        return None
    now = fmean(repeated.last(window))
    begun = fmean(repeated.start(window)) if repeated.count >= 2 * window else 0.0
    if now < share or now < begun + gain:
        return None
    if begun and shift(repeated.start(window), repeated.last(window)).z < z:
        return None
    sentence = f"{now:.0%} of a completion's 4-grams occurred in it before ({begun:.0%} at the start)"
    advice = (
        "add a repetition penalty to the reward (repetition)",
        "lower learning_rate; long repeated endings are a sign of a policy that has left its language",
    )
    return seen.alert(
        "repeated_text", "warning", *blamed(seen, sentence, advice),
        repetition_start=begun, repetition_now=now, **seen.means("completions/clipped_ratio"),
    )  # fmt: skip


def format_loss(seen: History, *, drop: float = 0.2, window: int = 10) -> Alert | None:
    """`format_loss`: fewer completions have the asked-for form than at the start or lately."""
    formed = seen["format_rate"]
    if formed.count < 2 * window:
        return None
    recent = formed.last(4 * window)
    parts = (formed.start(window), recent[: len(recent) // 2])
    moved = max((shift(part, formed.last(window)) for part in parts), key=lambda candidate: candidate.before)
    if moved.change > -drop or moved.z > -4:
        return None
    sentence = f"{moved.after:.0%} of completions have the asked-for form, {moved.before:.0%} before"
    return seen.alert(
        "format_loss", "warning", sentence,
        (
            "give the form a reward of its own, or raise its weight",
            "lower learning_rate; set beta above 0 to stay closer to the start",
        ),
        format_before=moved.before, format_now=moved.after, z=moved.z,
    )  # fmt: skip


def _by_verdict(seen: History) -> dict[str, float]:
    return seen.means("completions/mean_length_right", "completions/mean_length_wrong", "reward")


def language_collapse(seen: History, *, z: float = 5.0, matters: float = 0.05, window: int = 10) -> Alert | None:
    """`language_collapse`: of some language's prompts, the share answered in it has fallen by more than chance allows.

    The first `window` steps against the last. The standard error is the larger of two: that of a share of so many answers
    (Agresti and Coull's, which is above 0 at shares of 0 and 1), and that of the steps' own scatter, since answers of one
    prompt are alike. A fall counts beyond `z` of them, and from `matters` on.
    """
    fallen = sorted(_fallen(seen, z, matters, window), key=lambda entry: entry[2] - entry[1])
    if not fallen:
        return None
    names = ", ".join(f"{code} ({before:.0%} to {after:.0%})" for code, before, after in fallen)
    reward = seen["reward"]
    holds = reward.count >= 2 * window and sum(reward.last(window)) >= sum(reward.start(window))
    but = ", while the reward has not fallen: it does not see this" if holds else ""
    return seen.alert(
        "language_collapse", "warning", f"answers leave the language of their prompts: {names}{but}",
        (
            "pay for the language: add the reward language (reads the column language), or raise its weight; 0.1 to 0.5 of the task's is usual",
            "advantage_slices='language' keeps one language's rewards from setting the scale of another's",
            "early is cheap: go back to a checkpoint from before the fall, alert_actions={'language_collapse': 'roll_back'} does so",
        ),
        parts=[code for code, _, _ in fallen],
        **{f"same_language_{code}": [before, after] for code, before, after in fallen},
    )  # fmt: skip


def _fallen(seen: History, z: float, matters: float, window: int) -> Iterator[tuple[str, float, float]]:
    """Code, share at the start, and now."""
    for name, shares in seen.named("languages/", "/same").items():
        code = name.split("/")[1]
        counts = seen[f"languages/{code}/count"]
        if shares.count < 2 * window:
            continue
        before, size_before = _pooled(shares.start(window), counts.start(window))
        after, size_after = _pooled(shares.last(window), counts.last(window))
        chance = math.sqrt(_variance(before, size_before) + _variance(after, size_after))
        scatter = noise(shares.start(window), shares.last(window)) * math.sqrt(2 / window)
        if before - after > max(z * max(chance, scatter), matters):
            yield code, before, after


def _pooled(shares: list[float], counts: list[float]) -> tuple[float, float]:
    """The share over some steps, and of how many answers."""
    size = sum(counts)
    return sum(share * count for share, count in zip(shares, counts, strict=True)) / max(size, 1.0), size


def _variance(share: float, size: float) -> float:
    adjusted = (share * size + 2) / (size + 4)
    return adjusted * (1 - adjusted) / (size + 4)
