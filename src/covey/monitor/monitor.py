"""Monitor of a run: metrics of texts and updates, alerts, actions after alerts, and resource use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from covey.monitor.measures import text_metrics
from covey.monitor.policy_drift import Anchor
from covey.monitor.sample_drift import PromptDrift, SampleDrift
from covey.monitor.slices import Slices, language_metrics
from covey.monitor.updates import UpdateMeter
from covey.monitor.watch import Watch
from covey.process.device import PeakBytes
from covey.rewards.scales import Scale
from covey.types import Alert, Group, Max, Metric, StepReport, Sum

Action = Literal["log", "off", "lower_learning_rate", "roll_back", "stop"]
_STATEFUL = ("watch", "drift", "samples", "slices", "anchor")


@dataclass(eq=False)
class Monitor:
    """Every process has one and shows it the same numbers; only the main one's has outlets."""

    reward_names: Sequence[str] = ()
    watch: Watch = field(default_factory=Watch)
    drift: PromptDrift = field(default_factory=PromptDrift)
    samples: SampleDrift = field(default_factory=SampleDrift)
    slices: Slices = field(default_factory=lambda: Slices(()))
    anchor: Anchor = field(default_factory=Anchor)
    meter: UpdateMeter | None = None
    actions: Mapping[str, Action] = field(default_factory=dict)
    """Action after an alert, by rule; "log" where there is none."""
    outlets: Sequence[Callable[[Alert], object]] = ()
    """Receivers of each alert: the run folder, the screen, a webhook."""

    closing: Sequence[Callable[[], object]] = ()
    """Callbacks at the end of a run."""

    def close(self) -> None:
        """After the last alert: give the outlets a moment to finish."""
        for close in self.closing:
            close()

    def measure(
        self, groups: Sequence[Group], weights: Tensor, scales: Sequence[Scale | None] | None = None
    ) -> dict[str, Metric]:
        """Metrics of a rollout that was scored with `weights` and `scales` [R]: diversity, repetition, lengths, form, drift of the prompts."""
        if not groups:
            return {}
        return {
            **token_metrics(groups),
            **memory_metrics("rollout"),
            **text_metrics(groups, self.reward_names, weights, scales),
            **self.drift(groups),
            **self.samples(groups, weights),
            **self.slices(groups, weights, scales),
            **language_metrics(groups),
        }

    def with_update(self, report: StepReport) -> StepReport:
        """The report with metrics of the step's update of weights and policy, and the memory in use after it."""
        if self.meter is None:
            return report
        return report.merged({**self.meter.take(), **self.anchor(report.step), **memory_metrics("learn")})

    def look(self, report: StepReport) -> list[Alert]:
        """New alerts after a step, already sent to every outlet."""
        return [alert for alert in self.watch(report) if self.tell(alert)]

    def tell(self, alert: Alert) -> bool:
        """Send an alert to every outlet, unless its action is "off". True if it was sent."""
        is_on = self.action_for(alert) != "off"
        for tell in self.outlets if is_on else ():
            tell(alert)
        return is_on

    def action_for(self, alert: Alert) -> Action:
        """Configured action: by the rule's name, by its severity, or for all."""
        for name in (alert.rule, alert.severity, "all"):
            if name in self.actions:
                return self.actions[name]
        return "log"

    @property
    def lowers_learning_rate(self) -> bool:
        """True if any alert may lower the learning rate: ranks must then agree on it at every step."""
        return "lower_learning_rate" in self.actions.values()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in _STATEFUL}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in (name for name in _STATEFUL if name in state):
            getattr(self, name).load_state_dict(state[name])


_PHASE = PeakBytes()
"""Peak of a phase, of whichever run of this process."""


def token_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """`tokens/prompts`, each group's prompt once, as prefill does, and `tokens/completions`, the generated tokens."""
    return {
        "tokens/prompts": Sum(float(sum(len(group.prompt.token_ids) for group in groups))),
        "tokens/completions": Sum(float(sum(c.num_tokens for group in groups for c in group.completions))),
    }


def memory_metrics(phase: str) -> dict[str, Metric]:
    """At the end of a phase, in GB of 10^9 bytes: `memory/<phase>_gb`, what this process holds, and on a GPU
    `memory/<phase>_device_peak_gb`, the most that tensors held since the phase before.
    """
    metrics: dict[str, Metric] = {f"memory/{phase}_gb": Max(psutil.Process().memory_info().rss / 1e9)}
    if torch.cuda.is_available():
        metrics[f"memory/{phase}_device_peak_gb"] = Max(_PHASE.restart() / 1e9)
    return metrics
