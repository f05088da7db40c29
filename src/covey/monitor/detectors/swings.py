"""Rewards that go up and down, and rewards that are at odds with each other."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from covey.monitor.history import History, Series, rise, since_start, together
from covey.types import Alert


def reward_swings(seen: History, *, window: int = 20, times: float = 4.0, turns: int = 4) -> Alert | None:
    """`reward_swings`: the reward goes up and down again and again, by more than drawing other prompts explains.

    The mean of P groups has a standard error of at most `reward_std / sqrt(P)`, the bound where completions of a group agree.
    A turn counts where the reward comes back by `times` that, by a tenth of all that it went in this run, and by a twentieth of
    itself. So neither a steady rise nor a reward that rests at its highest value has turns.
    """
    reward = seen["reward"].last(window)
    spread, prompts = seen["reward_std"].last(window), seen["num_prompts"].last(window)
    if len(reward) < window or not spread or not prompts:
        return None
    allowed = math.sqrt(fmean(std * std for std in spread)) / math.sqrt(max(median(prompts), 1.0))
    if not allowed > 0:
        return None
    rewards = [*seen["reward"].first, *seen["reward"].recent]
    least = max(times * allowed, 0.1 * (max(rewards) - min(rewards)), 0.05 * abs(fmean(reward)))
    ends = turning_points(reward, least)
    if len(ends) < turns:
        return None
    swing = median(abs(b - a) for a, b in pairwise(ends))
    sentence = (
        f"the reward goes up and down: {len(ends)} turns in {window} steps, by {swing:.3g} each, where other prompts "
        f"explain about {2 * allowed:.2g}"
    )
    return seen.alert(
        "reward_swings", "warning", sentence,
        (
            "lower learning_rate: the policy itself changes from step to step",
            "look at the reward function: a judge or sandbox that is up and down does this too",
            "take more prompts a step (gradient_accumulation_steps)",
        ),
        swing=swing, turns=len(ends), explained_by_prompts=allowed, rewards=reward[-10:],
    )  # fmt: skip


def turning_points(values: Sequence[float], least: float) -> list[float]:
    """The highs and lows from which the values came back by `least` or more, in order; where they begin is none of them."""
    turns: list[float] = []
    low = high = values[0]
    way = 0  # up 1, down -1, not known yet 0
    for value in values:
        low, high = min(low, value), max(high, value)
        if way >= 0 and high - value >= least:
            turns += [high] if way else []
            way, low = -1, value
        elif way <= 0 and value - low >= least:
            turns += [low] if way else []
            way, high = 1, value
    return turns


def reward_conflict(
    seen: History,
    *,
    weights: Mapping[str, float],
    z: float = 4.0,
    window: int = 10,
    lost: float = 0.3,
    cost: float = 0.5,
) -> Alert | None:
    """`reward_conflict`: one reward falls while the weighted sum rises, so that the others are bought at its cost.

    Both must have changed since the start and have a trend over the steps, each beyond noise. The fall must matter: a reward
    above 0 lost 30% of itself, or any reward cost half of what the sum gained. A length penalty that grows a little as answers
    become right is thus no conflict.

    `weights`: of the rewards that count, by name: those of a weight above 0 that does not move.
    """
    gained = _change(seen["reward"], window, z, up=True)
    if gained is None or len(weights) < 2:
        return None
    alerts = []
    for name, weight in weights.items():
        fell = _change(seen[f"rewards/{name}/mean"], window, z, up=False)
        if fell is None:
            continue
        before, after = fell
        is_much = before > 0 and after < (1 - lost) * before
        if not is_much and weight * (before - after) <= cost * (gained[1] - gained[0]):
            continue
        sentence = (
            f"the reward {name} fell from {before:.3g} to {after:.3g} while the weighted sum rose from {gained[0]:.3g} to "
            f"{gained[1]:.3g}: the other rewards are bought at its cost"
        )
        alerts.append(seen.alert(
            "reward_conflict", "warning", sentence,
            (
                f"give {name} more weight, or the others less (reward_weights): rewards/<name>/advantage_share says which counts",
                "bring rewards to one scale (reward_normalization='group') or bound them (reward_clip)",
                "read the completions of the highest reward in rollouts/",
            ),
            parts=name, reward=name, reward_start=before, reward_now=after, sum_start=gained[0], sum_now=gained[1],
        ))  # fmt: skip
    return together(alerts)


def _change(series: Series, window: int, z: float, *, up: bool) -> tuple[float, float] | None:
    """Start and now of a metric that went this way beyond noise, from its start to now and as a trend; None otherwise."""
    moved, sign = since_start(series, window), 1.0 if up else -1.0
    if moved is None:
        return None
    rose, error = rise(series.last(series.count))
    return (moved.before, moved.after) if sign * moved.z > z and sign * rose > z * error else None
