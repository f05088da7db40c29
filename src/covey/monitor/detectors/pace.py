"""Detectors for the run's surroundings: a machine that slows down, data that drifts."""

from statistics import fmean, median

from covey.monitor.history import History
from covey.types import Alert

RECALL = 110
"""Steps that a speed is compared over."""


def throughput_drop(seen: History, *, share: float = 0.5, window: int = 10) -> Alert | None:
    """`throughput_drop`: tokens a second have fallen to a fraction of the earlier rate, for `window` steps."""
    speed = seen["tokens_per_second/step"]
    recent, earlier = speed.last(window), speed.last(RECALL)[:-window]
    if len(earlier) < 2 * window:
        return None
    usual = median(earlier)
    if max(recent) > (share + 0.15) * usual or median(recent) > share * usual:
        return None
    slow = {
        phase: round(fmean(seen[f"seconds/{phase}"].last(5)), 4)
        for phase in ("rollout", "reward", "learn")
        if seen[f"seconds/{phase}"].count
    }
    sentence = f"{median(recent):,.0f} tokens a second, {usual:,.0f} before"
    return seen.alert(
        "throughput_drop", "warning", sentence,
        (
            "see which phase takes the time, under seconds/ in metrics.jsonl",
            "look for other processes on the machine, a hot or throttled device, a slow judge, memory that swaps",
        ),
        tokens_per_second=median(recent), before=usual, seconds=slow,
    )  # fmt: skip


def data_drift(seen: History, *, level: float = 0.001, window: int = 10) -> Alert | None:
    """`data_drift`: two-sample tests say that the prompts are not drawn as those of the first steps were (`SampleDrift`).

    `level`: chance of a false alarm in a run: the p-values are corrected for all tests and looks.
    """
    tests = {name: seen[f"prompts/drift_p/{name}"].last(1) for name in ("length", "text")}
    drifted = {name: last[0] for name, last in tests.items() if last and last[0] < level}
    if not drifted:
        return None
    length = seen["prompts/mean_length"]
    what = {"length": "their lengths", "text": "the tokens they are made of"}
    reasons = " and ".join(f"{what[name]} (p = {p:.1g})" for name, p in drifted.items())
    now, start = length.last(window), length.start(window)
    lengths = {"length": [fmean(start), fmean(now)]} if now else {}
    return seen.alert(
        "data_drift", "info", f"prompts are not like those of the start in {reasons}",
        (
            "expected with a curriculum, a mixture that changes or a live source; otherwise shuffle_dataset=True",
            "read a change of reward with care: the prompts may have changed, not the policy",
            "a fixed eval_dataset tells what is forgotten; curriculum='replay:0.25' keeps a live source's earlier prompts in training",
        ),
        **{f"p_{name}": p for name, p in drifted.items()}, **lengths,
    )  # fmt: skip


def reward_drift(seen: History, *, level: float = 0.01) -> Alert | None:
    """`reward_drift`: rewards of prompts are lower than in the block of steps before, by a one-sided test (`SampleDrift`)."""
    last = seen["rewards/drift_p"].last(1)
    if not last or last[0] >= level:
        return None
    prompts = min((p for name in ("length", "text") for p in seen[f"prompts/drift_p/{name}"].last(1)), default=1.0)
    why = "the prompts have changed too" if prompts < level else "the prompts are as before"
    return seen.alert(
        "reward_drift", "info", f"rewards have fallen from one block of steps to the next (p = {last[0]:.1g}); {why}",
        (
            "prompts that changed: compare an evaluation on a fixed set before you blame the policy",
            "prompts as before: the policy or the reward changed; see kl, entropy and the latest completions",
        ),
        p=last[0], p_prompts=prompts,
    )  # fmt: skip


def forgetting(seen: History, *, level: float = 0.01, matters: float = 0.02) -> Alert | None:
    """`forgetting`: a fixed evaluation set is answered worse than at its best earlier evaluation, by a paired test.

    The p-value is corrected for the number of earlier evaluations; a loss below `matters` is left alone.
    """
    losses = {}
    for name, series in seen.named("eval", "_forgetting").items():
        lost, p = series.last(1), seen[f"{name}/p"].last(1)
        if lost and p and p[0] < level and lost[0] >= matters:
            losses[name.removesuffix("_forgetting")] = (lost[0], p[0])
    if not losses:
        return None
    shown = ", ".join(f"{name} by {lost:.3g} (p = {p:.1g})" for name, (lost, p) in losses.items())
    return seen.alert(
        "forgetting", "warning", f"the mean reward on a fixed set fell from its best evaluation: {shown}",
        (
            "keep earlier prompts in training: curriculum='replay:0.25', a larger share where it is on, or a mixture with old data",
            "hold the policy closer to where it was: a higher beta, a lower learning rate",
            "load_best_model_at_end=True ends with the weights of the best evaluation",
        ),
        parts=losses,
        **{name: list(both) for name, both in losses.items()},
    )  # fmt: skip
