"""Input of detectors: the first and the latest values of each metric, with a few statistics."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from operator import mul
from statistics import fmean
from typing import Any, Literal

from covey.types import Alert

FIRST = 20
RECENT = 200
_TIMES = ("seconds/", "tokens_per_second/", "memory/", "weights/")


@dataclass(eq=False)
class Series:
    """The finite values of one metric: the first twenty for good, and the latest two hundred."""

    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    count: int = 0

    def add(self, value: float) -> None:
        if len(self.first) < FIRST:
            self.first.append(value)
        self.recent.append(value)
        self.count += 1

    def last(self, n: int) -> list[float]:
        """The latest `n` values, or as many as there are."""
        values = list(islice(reversed(self.recent), n))
        values.reverse()
        return values

    def start(self, n: int) -> list[float]:
        return self.first[:n]


@dataclass(eq=False)
class History:
    """Series by the metric's name. `history["kl"]` is empty for a metric that never came."""

    step: int = 0
    series: dict[str, Series] = field(default_factory=dict)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append the finite values of this step."""
        self.step = step
        for name, value in values.items():
            if math.isfinite(value):
                self.series.setdefault(name, Series()).add(value)

    def __getitem__(self, name: str) -> Series:
        return self.series.get(name) or Series()

    def named(self, prefix: str = "", suffix: str = "") -> dict[str, Series]:
        return {n: s for n, s in self.series.items() if n.startswith(prefix) and n.endswith(suffix)}

    def means(self, *names: str) -> dict[str, Any]:
        """Mean of the latest ten values of each of these metrics that there is."""
        return {name: fmean(self[name].last(10)) for name in names if self[name].count}

    def alert(
        self,
        rule: str,
        severity: Literal["info", "warning", "error"],
        said: str,
        try_this: Any,
        parts: Any = (),
        **evidence: Any,
    ) -> Alert:
        """An alert at the current step; numbers of the evidence are rounded to four digits that count. `try_this` and `parts` as of `Alert`."""
        shown = {name: _round(value) for name, value in evidence.items()}
        return Alert(
            rule=rule, severity=severity, said=said, step=self.step, evidence=shown, try_this=try_this, parts=parts
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything but times: they say nothing of the machine that a run is resumed on."""
        saved = {name: series for name, series in self.series.items() if not name.startswith(_TIMES)}
        series = {name: [list(s.first), list(s.recent), s.count] for name, s in saved.items()}
        return {"step": self.step, "series": series}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self.series = {
            name: Series(list(first), deque(recent, maxlen=RECENT), int(count))
            for name, (first, recent, count) in state["series"].items()
        }


def together(alerts: Sequence[Alert]) -> Alert | None:
    """One alert of a rule's alerts, each about other parts of the run: all messages, remedies and parts, evidence as `part: name`. None without any."""
    if len(alerts) < 2:
        return alerts[0] if alerts else None
    return replace(
        alerts[0],
        said="; ".join(alert.said for alert in alerts),
        evidence={f"{', '.join(alert.parts)}: {n}": value for alert in alerts for n, value in alert.evidence.items()},
        try_this=tuple(dict.fromkeys(advice for alert in alerts for advice in alert.try_this)),
        parts=tuple(part for alert in alerts for part in alert.parts),
    )


@dataclass(frozen=True)
class Shift:
    """Change from one part of a series to another."""

    before: float
    after: float
    z: float
    """The change in standard errors, estimated from differences of neighbours, so that a slow trend is not taken for noise.

    As few values give no sure standard error, it is the normal deviate that is as rare as Student's t of so many: 4 is exceeded by
    chance once in 30,000 looks, however many or few completions a step has.
    """

    @property
    def change(self) -> float:
        return self.after - self.before


def shift(before: Sequence[float], after: Sequence[float]) -> Shift:
    """Difference of the means of `after` and `before`; neither may be empty."""
    low, high = fmean(before), fmean(after)
    error = noise(before, after) * math.sqrt(1 / len(before) + 1 / len(after))
    change = high - low
    if error == 0:
        return Shift(low, high, 0.0 if change == 0 else math.copysign(math.inf, change))
    return Shift(low, high, normal_deviate(change / error, (len(before) + len(after) - 2) / 1.5))


def normal_deviate(t: float, freedom: float) -> float:
    """Normal deviate with the tail probability of Student's t, to within a percent: Wallace 1959.

    A variance from m differences of neighbours is as sure as one of 2m/3 degrees of freedom (von Neumann 1941).
    """
    size = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(size, t)


def noise(*parts: Sequence[float]) -> float:
    """Standard deviation of a value around its trend: half the mean squared difference of neighbours (von Neumann 1941), rooted."""
    squares = [(step := b - a) * step for part in parts for a, b in pairwise(part)]
    return math.sqrt(fmean(squares) / 2) if squares else 0.0


def logs(values: Sequence[float]) -> list[float]:
    """Natural logarithms, of metrics that vary by factors; of values not above 1e-12, that of 1e-12."""
    return [math.log(max(value, 1e-12)) for value in values]


def rise(values: Sequence[float]) -> tuple[float, float]:
    """Rise of the least-squares line over the values (three or more), and its standard error."""
    n, middle = len(values), (len(values) - 1) / 2
    squares = n * (n * n - 1) / 12  # of i - middle, for i from 0 to n - 1
    slope = (sum(map(mul, range(n), values)) - middle * sum(values)) / squares
    return slope * (n - 1), noise(values) * (n - 1) / math.sqrt(squares)


def since_start(series: Series, n: int = 10) -> Shift | None:
    """Change from the first `n` values to the latest `n`; None before there are twice as many."""
    return shift(series.start(n), series.last(n)) if series.count >= 2 * n else None


def has_risen(history: History, name: str = "reward", n: int = 10, z: float = 2.5) -> bool:
    """True if a metric is above its start, or in the second half of its stored values above the first half, beyond noise."""
    series = history[name]
    begun = since_start(series, n)
    if begun is None:
        return False
    recent = series.last(4 * n)
    half = len(recent) // 2
    return begun.z > z or shift(recent[:half], recent[half:]).z > z


def may_have_risen(history: History, matters: float = 0.15, z: float = 2.0) -> bool:
    """True unless the steps show that the reward has not risen by `matters` times the deviation between completions.

    The latest forty steps against the first twenty. A rise that noise can hide, as with few completions a step, may be there.
    """
    reward = history["reward"]
    begun, now = reward.first[: reward.count // 2], reward.last(40)
    if len(begun) < 5:
        return False
    now = now[-(reward.count - len(begun)) :]
    change = fmean(now) - fmean(begun)
    error = noise(begun, now) * math.sqrt(1 / len(begun) + 1 / len(now))
    spread = fmean(history["reward_std"].first or [abs(fmean(begun))])
    return change + z * error > matters * spread


def _round(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    if isinstance(value, (list, tuple)):
        return [_round(item) for item in value]
    return value
