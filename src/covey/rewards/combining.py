"""Combination of several rewards into one: weights by step, normalization, clipping, and each reward's share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from covey.errors import ConfigError
from covey.types import Event, Group, Mean, Metric, Spread

Normalization = Literal["none", "group", "batch", "running"]

_EPSILON = 1e-4
LARGEST = 1e18
"""Largest weight and weighted sum: the square of a larger one, used by a standard deviation, overflows float32."""
_SHAPES = ("linear", "cosine", "step")
_EVENTS_IN_FULL = 5


@dataclass(frozen=True)
class Schedule:
    """A weight that moves from `first` to `last` over `steps` optimizer steps and stays there. `Schedule("linear", 1, 0, 200)`.

    `linear` and `cosine` move gradually; `step` jumps at `steps`.
    """

    shape: str
    first: float
    last: float
    steps: int

    def __call__(self, step: int) -> float:
        done = min(max(step / self.steps, 0.0), 1.0)
        if self.shape == "step":
            done = math.floor(done)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.first + (self.last - self.first) * done


Weight = Callable[[int], float]
"""The weight at an optimizer step."""


WeightOption: TypeAlias = float | str | Callable[[int], float]
"""A weight as it is set: a number, a schedule such as `"linear:1:0:200"`, or a function of the step."""


def weight_of(spec: WeightOption) -> Weight:
    """A number, `"linear:1:0:200"` (from 1 to 0 over 200 steps; also cosine and step), or a function of the step."""
    if callable(spec):
        return functools.partial(_weight_at, spec)
    what, shapes = f"reward_weights: {spec!r}", ", ".join(_SHAPES)
    advice = f"reward_weights has {spec!r}; give a number, or a schedule as 'linear:1:0:200' (from 1 to 0 over 200 steps; {shapes})."
    if not isinstance(spec, str) or ":" not in spec:
        value = _finite(spec, what, advice)
        return lambda step: value
    try:
        shape, first, last, steps = spec.split(":")
        if shape not in _SHAPES or int(steps) < 1:
            raise ValueError
    except ValueError as error:
        raise ConfigError(advice) from error
    return Schedule(shape, _finite(first, what, advice), _finite(last, what, advice), int(steps))


def is_moving(weight: Weight) -> bool:
    """True for a schedule and for a function of the step."""
    return isinstance(weight, Schedule | functools.partial)


def advice_on_weights(options: Sequence[Any] | None, best_metric: str | None) -> list[str]:
    """A remark where `metric_for_best_model` compares sums of rewards by weights that move."""
    moves = any(is_moving(weight_of(option)) for option in options or ())
    remark = "metric_for_best_model=reward compares sums whose weights differ, as reward_weights move; take the mean of one reward."
    return [remark] if moves and best_metric in ("reward", "eval_reward") else []


def _weight_at(function: Callable[[int], Any], step: int) -> float:
    """The weight that a function of the user's gives at a step."""
    try:
        value = function(step)
    except Exception as error:
        raise ConfigError(
            f"reward_weights: {function!r} raised {type(error).__name__} at step {step}: {error}."
        ) from error
    what = f"reward_weights: {function!r}"
    return _finite(value, f"{what} at step {step}", f"{what} gave {value!r} at step {step}; a weight is a number.")


def _finite(value: Any, what: str, advice: str) -> float:
    """The weight as a number. Raises ConfigError: with `advice` for no number, naming `what` is beyond the bounds."""
    try:
        number = float(value) + 0.0  # no negative zero: it would show as "-0"
    except OverflowError:
        number = math.inf
    except (ValueError, TypeError) as error:
        raise ConfigError(advice) from error
    if not abs(number) <= LARGEST:
        raise ConfigError(f"{what} is {number:g}; a weight is a number between -{LARGEST:g} and {LARGEST:g}.")
    return number


def within_float32(
    scores: Tensor, weights: Tensor, names: Sequence[str], batch: Any
) -> tuple[Tensor, list[tuple[int, Event]]]:
    """The scores [N, R], all NaN where their weighted sum is beyond `LARGEST`, and an event with its row for each of these.

    `batch`: the completions, as `covey.rewards.contract.Batch`.
    """
    totals = (scores.nan_to_num(0.0).double() * weights.double()).sum(-1)
    bad = (totals.abs() > LARGEST).nonzero().flatten().tolist()
    events = []
    for row in bad[:_EVENTS_IN_FULL]:
        sentence = f"A completion is not scored: the weighted sum of its rewards is {float(totals[row]):g}, beyond {LARGEST:g}."
        details: dict[str, Any] = {
            "rewards": dict(zip(names, scores[row].tolist(), strict=True)),
            "weights": weights.tolist(),
        }
        details |= {"completions": len(bad), "completion": str(batch.completions[row])[:2000]}
        events.append((row, Event(kind="reward_error", said=sentence, details=details)))
    if bad:
        scores = scores.clone()
        scores[bad] = math.nan
    return scores, events


class Combiner:
    """Normalizes the rewards of a rollout, each separately, before weights and advantages see them.

    `normalization`: `(r - mean) / (deviation + 1e-4)` over the group, over the rollout's batch, or over all rollouts so far
    (`running`, which a checkpoint keeps); a reward that is the same everywhere becomes 0. `clip`: the bounds of each reward
    after that. NaN (not scored) stays NaN. The rewards that are logged and stored stay as the functions gave them.
    """

    def __init__(
        self, normalization: Normalization = "none", clip: Sequence[float] | None = None, num_rewards: int = 1
    ) -> None:
        if normalization not in ("none", "group", "batch", "running"):
            raise ConfigError(
                f"reward_normalization={normalization!r} is not known; use none, group, batch or running."
            )
        if clip is not None and (len(clip) != 2 or not clip[0] < clip[1]):
            raise ConfigError(
                f"reward_clip={clip!r} is no range; give the lowest and the highest value, such as [-5, 5]."
            )
        self.normalization, self.clip = normalization, clip
        self.running = [Spread(0.0, 0.0, 0.0)] * num_rewards
        """Of each reward, over all rollouts so far."""

    @property
    def changes(self) -> bool:
        """True if any reward is normalized or clipped."""
        return self.normalization != "none" or self.clip is not None

    def __call__(self, groups: Sequence[Group], *, learn: bool = True) -> list[Group]:
        """The groups with rewards on the common scale, for advantages. `learn=False` leaves running statistics as they are."""
        if not self.changes or not groups:
            return list(groups)
        scores = torch.cat([group.rewards for group in groups if group.rewards is not None])  # [N, R]
        if self.normalization == "running" and (learn or not self.running[0].count):
            seen = [running + Spread.of(scores[:, r]) for r, running in enumerate(self.running)]
            used, self.running = seen, seen if learn else self.running
        else:
            used = self.running
        out, start = [], 0
        for group in groups:
            rows = scores[start : start + group.size]
            out.append(replace(group, rewards=self._scaled(rows, scores, used)))
            start += group.size
        return out

    def _scaled(self, rows: Tensor, batch: Tensor, used: Sequence[Spread]) -> Tensor:
        if self.normalization == "running":
            means = rows.new_tensor([running.mean for running in used])
            deviations = [running.value if running.count > 1 else 0.0 for running in used]
            rows = _divide(rows - means, rows.new_tensor(deviations))
        elif self.normalization != "none":
            mean, deviation = _moments(rows if self.normalization == "group" else batch)
            rows = _divide(rows - mean, deviation)
        return rows if self.clip is None else rows.clamp(*self.clip)

    def state_dict(self) -> dict[str, Any]:
        return {"running": [[state.count, state.mean, state.squares] for state in self.running]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = [Spread(*numbers) for numbers in state["running"]]
        if len(saved) == len(self.running):
            self.running = saved


def _moments(scores: Tensor) -> tuple[Tensor, Tensor]:
    """[R] means and standard deviations (Bessel) of scores [N, R], NaN left out; a tied reward has deviation 0."""
    count = (~scores.isnan()).sum(0)
    mean = scores.nanmean(0)
    spread = ((scores - mean).square().nansum(0) / (count - 1).clamp(min=1)).sqrt()
    low = scores.nan_to_num(math.inf).min(0).values
    high = scores.nan_to_num(-math.inf).max(0).values
    return mean, torch.where(high - low <= 1e-8, torch.zeros_like(spread), spread)


def _divide(apart: Tensor, deviation: Tensor) -> Tensor:
    scaled = apart / (deviation + _EPSILON)
    return torch.where((deviation == 0) & ~apart.isnan(), torch.zeros_like(scaled), scaled)


def advantage_shares(groups: Sequence[Group], names: Sequence[str], weights: Tensor) -> dict[str, Metric]:
    """`rewards/<name>/advantage_share`: this reward's share of the spread of scores within groups; shares add to 1.

    The covariance of `w_r r` with the weighted sum over the variance of that sum, within groups (an unscored reward counting 0,
    as in the sum). Below 0: it pulls against the others. Takes the rewards as advantages see them; NaN where all groups tie.
    """
    shares = torch.zeros(len(names), dtype=torch.float64)
    whole = 0.0
    for group in groups:
        if group.rewards is None:
            continue
        scored = group.rewards[~group.rewards.isnan().all(-1)].nan_to_num(0.0).double() * weights.double()  # [<= G, R]
        if len(scored) < 2:
            continue
        apart = scored - scored.mean(0)
        total = apart.sum(-1)
        if float(total.max() - total.min()) <= 1e-8:
            continue
        shares += (apart * total.unsqueeze(-1)).sum(0)
        whole += float(total.square().sum())
    return {
        f"rewards/{name}/advantage_share": Mean(float(share), whole) for name, share in zip(names, shares, strict=True)
    }
