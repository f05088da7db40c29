"""Is it learning, and is it learning the right thing? Plateau, slow convergence, hacking, rewards that fail."""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from covey.monitor.detectors.blame import blamed
from covey.monitor.history import History, Series, Shift, noise, rise, shift, since_start, together
from covey.types import Alert

_MANY = 20
"""Values of a metric from which on a standard error is as good as known."""


def reward_plateau(seen: History, *, window: int = 60, solved: float = 0.8) -> Alert | None:
    """`reward_plateau`: the reward rose once, and the latest `window` steps show no trend, with room left to learn.

    `solved`: share of groups all right above which there is nothing left to learn.
    """
    reward = seen["reward"]
    if reward.count < 2 * window or _is_solved(seen, solved):
        return None
    recent, half = reward.last(window), window // 2
    late, begun = shift(recent[:half], recent[half:]), shift(reward.start(10), recent)
    if begun.z < 3 or abs(late.z) > 2 or late.change > 0.1 * begun.change:
        return None
    sentence = f"the reward has stood at {late.after:.3g} for {window} steps, after rising from {begun.before:.3g}"
    return seen.alert(
        "reward_plateau", "info", sentence, _what_holds_it(seen),
        reward_start=begun.before, reward_now=late.after, change=late.change, z=late.z, **_signal(seen),
    )  # fmt: skip


def slow_convergence(
    seen: History, *, window: int = 60, matters: float = 0.15, z: float = 4.0, solved: float = 0.8
) -> Alert | None:
    """`slow_convergence`: after `window` steps the reward has not risen by an amount that matters, and noise does not hide that.

    The amount is `matters` times the standard deviation between completions. No alert while steps are so noisy that the fitted
    line may well rise so far: `z` standard errors, since one run is looked at hundreds of times.
    """
    reward = seen["reward"]
    if reward.count < window or _is_solved(seen, solved):
        return None
    spread = fmean(seen["reward_std"].start(10) or [abs(fmean(reward.start(10)))])
    begun = shift(reward.start(10), reward.last(20))
    if begun.change > matters * spread:
        return None
    rose, error = rise(reward.last(reward.count))
    if rose + z * error > matters * spread:
        return None
    sentence = (
        f"{reward.count} steps have not raised the reward ({begun.before:.3g} at the start, {begun.after:.3g} now)"
    )
    return seen.alert(
        "slow_convergence", "warning", sentence, _what_holds_it(seen),
        reward_start=begun.before, reward_now=begun.after, rise=rose, error=error, **_signal(seen),
    )  # fmt: skip


def reward_collapse(seen: History, *, lost: float = 0.3, window: int = 10, z: float = 5.0) -> Alert | None:
    """`reward_collapse`: the reward has lost `lost` of the best that it had been for `window` steps."""
    reward = seen["reward"]
    if reward.count < 2 * window:
        return None
    *earlier, now = _blocks(reward.last(reward.count), window)
    best = max((reward.start(window), *earlier), key=fmean)
    change = fmean(now) - fmean(best)
    if change > -lost * abs(fmean(best)) or change == 0:
        return None
    error = noise(reward.last(reward.count)) * math.sqrt(2 / window)  # of all: the best block is by chance
    if change > -z * error:
        return None
    sentence = f"the reward fell from {fmean(best):.3g} to {fmean(now):.3g}"
    advice = (
        "go back to an earlier checkpoint with a lower learning_rate: alert_actions={'reward_collapse': 'roll_back'} does both",
        "read the latest completions: their common pattern shows what went wrong",
        "if the prompts have become harder on purpose, all is well",
    )
    return seen.alert(
        "reward_collapse", "error", *blamed(seen, sentence, advice),
        reward_best=fmean(best), reward_now=fmean(now), noise=error, **_signal(seen),
    )  # fmt: skip


def reward_hacking(seen: History, *, audits: tuple[str, ...], z: float = 3.0, fall: float = 0.05) -> Alert | None:
    """`reward_hacking`: the training reward rises, and an audit metric that is not trained on falls.

    Both changes must be beyond noise, since the start or within the latest values. An evaluation gives fewer values, so the
    latest third is compared with the first third of six or more, and must have fallen further.

    `audits`: names of metrics that are not trained on: rewards of weight 0, or of an evaluation. `fall`: share of itself that an
    audit metric must have lost.
    """
    alerts = []
    for name in audits:
        audit = _longest_shift(seen[name])
        reward = _longest_shift(seen[_trained_reward(name, seen)])
        if audit is None or reward is None or audit.z > -z * _doubt(seen[name]) or reward.z < z:
            continue
        if audit.change > -fall * abs(audit.before):
            continue
        sentence = (
            f"the reward rose from {reward.before:.3g} to {reward.after:.3g} while {name}, which is not trained on, fell "
            f"from {audit.before:.3g} to {audit.after:.3g}: the policy may be exploiting the reward"
        )
        alerts.append(seen.alert(
            "reward_hacking", "error", sentence,
            (
                "read the completions of the highest reward in rollouts/",
                "close the loophole in the reward function, or give the audit metric a weight",
                "go back to a checkpoint from before the fall; set beta above 0 to stay closer to the start",
            ),
            parts=name, audit_metric=name, audit=[audit.before, audit.after], reward=[reward.before, reward.after],
            z=[reward.z, audit.z],
        ))  # fmt: skip
    return together(alerts)


def reward_errors(seen: History, *, window: int = 5, share: float = 0.05) -> Alert | None:
    """`reward_errors`: rewards raise, hang, or leave completions without a score."""
    unscored = seen["rewards/unscored"].last(window)
    batch = median(seen["completions/count"].last(window) or [1.0])
    failing = {}
    for name, series in seen.named("rewards/", "/errors").items():
        rate = fmean(series.last(window)) / max(batch, 1.0)
        if rate > share and series.count >= window:
            failing[name.split("/")[1]] = rate
    lost = fmean(unscored) if len(unscored) == window else 0.0
    if not failing and lost <= share:
        return None
    which = ", ".join(f"{name} fails on {rate:.0%}" for name, rate in failing.items())
    sentence = which or f"{lost:.0%} of completions were scored by no reward"
    return seen.alert(
        "reward_errors", "error" if lost > 0.5 else "warning", f"rewards do not score: {sentence}",
        (
            "events.jsonl has each failure with its traceback and the completion",
            "raise reward_timeout_seconds if it is slow rather than wrong",
        ),
        parts=failing,
        unscored=lost, errors={name: round(rate, 4) for name, rate in failing.items()},
    )  # fmt: skip


def _trained_reward(audit: str, seen: History) -> str:
    """Name of the reward that the audit is compared with: the same evaluation's, where there is one, else the training reward."""
    is_evaluation = audit.startswith("eval_")
    return "eval_reward" if is_evaluation and audit != "eval_reward" and seen["eval_reward"].count else "reward"


def _longest_shift(series: Series) -> Shift | None:
    """From the start to now for a metric of every step, from the first to the last third for one with few values."""
    if series.count >= _MANY:
        return since_start(series)
    third = series.count // 3
    if third < 2:
        return None
    values = series.last(series.count)
    change = fmean(values[-third:]) - fmean(values[:third])
    error = noise(values) * math.sqrt(2 / third)
    z = change / error if error else math.copysign(math.inf, change) if change else 0.0
    return Shift(fmean(values[:third]), fmean(values[-third:]), z)


def _doubt(series: Series) -> float:
    """Factor on a threshold in standard errors where these are themselves estimated from few values, as Student's t has it."""
    return 1.0 if series.count >= _MANY else 1.0 + 5.0 / max(series.count - 1, 1)


def _blocks(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """The values in blocks of `size`, the latest last and whole; a remainder at the beginning is dropped."""
    return [values[i : i + size] for i in range(len(values) % size, len(values), size)]


def _is_solved(seen: History, share: float) -> bool:
    passed = seen["groups/all_pass"].last(10)
    return bool(passed) and fmean(passed) > share


def _signal(seen: History) -> dict[str, Any]:
    """Metrics that explain why a reward does not rise."""
    return seen.means(
        "frac_reward_zero_std", "groups/all_pass", "groups/all_fail", "update/all", "grad_norm", "learning_rate"
    )


def _what_holds_it(seen: History) -> list[str]:
    """Remedies chosen by the other metrics, the likeliest first."""
    signal = _signal(seen)
    advice = []
    if signal.get("groups/all_fail", 0) > 0.5:
        advice.append(
            "most groups have no right answer: take easier prompts, more num_generations, or a reward with partial credit"
        )
    if signal.get("groups/all_pass", 0) > 0.5:
        advice.append("most groups are all right: take harder prompts")
    if signal.get("update/all", 1) < 1e-5:
        advice.append("steps are tiny: raise learning_rate (LoRA wants ten to a hundred times that of full training)")
    advice.append("try twice or half the learning_rate, and more prompts a step for less noise")
    return advice
