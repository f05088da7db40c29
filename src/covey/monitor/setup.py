"""The monitor of a run, as its options say."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from covey.monitor.detectors import standard
from covey.monitor.detectors.custom import custom_detectors
from covey.monitor.monitor import Monitor
from covey.monitor.policy_drift import Anchor
from covey.monitor.progress import Progress
from covey.monitor.slices import Slices
from covey.monitor.updates import UpdateMeter
from covey.monitor.watch import Watch, lines_of
from covey.monitor.webhook import Webhook
from covey.types import Alert

logger = logging.getLogger(__name__)


def build_monitor(
    args: Any,
    reward_names: Sequence[str],
    learner: Any,
    outlets: Sequence[Callable[[Alert], object]],
    meter: UpdateMeter | None,
) -> Monitor:
    """Everything watched of a `Learner`, whose updates `meter` measures. `outlets`: further receivers of alerts in the main process, in addition to the
    options' webhook; none on others."""
    audits, custom = audit_metrics(args, reward_names), custom_detectors(args.alert_detectors or ())
    hooks = (
        [Webhook(args.alert_webhook, run=str(args.run_name or args.output_dir))]
        if args.alert_webhook and outlets
        else []
    )
    return Monitor(
        reward_names=tuple(reward_names),
        watch=Watch([*standard(audits, paid_weights(args, reward_names)), *custom]),
        meter=meter,
        anchor=Anchor(learner.annotate),
        slices=Slices(args.metrics_by or ()),
        actions=dict(args.alert_actions or {}),
        outlets=[*outlets, *hooks],
        closing=[hook.close for hook in hooks],
    )


def audit_metrics(args: Any, reward_names: Sequence[str]) -> tuple[str, ...]:
    """Metrics that are not trained on: the means of rewards of weight 0, the reward of evaluations, and those that are named."""
    weights = _weights(args, reward_names)
    unpaid = [name for name, weight in zip(reward_names, weights, strict=True) if weight == 0]
    return (*(f"rewards/{name}/mean" for name in unpaid), "eval_reward", *(args.audit_metrics or ()))


def _weights(args: Any, reward_names: Sequence[str]) -> list[Any]:
    """`reward_weights`, and 1 for the rewards behind them, which environments and agents give themselves."""
    weights = list(args.reward_weights or ())
    return [*weights, *([1.0] * (len(reward_names) - len(weights)))]


def paid_weights(args: Any, reward_names: Sequence[str]) -> dict[str, float]:
    """Weights above 0 that stay as they are, by the reward's name; a schedule or a function may mean to lower a reward."""
    paid: dict[str, float] = {}
    for name, value in zip(reward_names, _weights(args, reward_names), strict=True):
        try:
            weight = math.nan if callable(value) else float(value)
        except (TypeError, ValueError):  # a schedule
            continue
        if weight > 0:
            paid[name] = weight
    return paid


def alert_shower(display: Progress, is_shown: bool) -> Callable[[Alert], None]:
    """Outlet that shows alerts: as lines above the live progress line, or in the log where there is none."""

    def tell(alert: Alert) -> None:
        for line in lines_of(alert):
            if is_shown:
                display.show(line)
            else:
                logger.warning("%s", line)

    return tell
