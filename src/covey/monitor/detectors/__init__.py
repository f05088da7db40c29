"""Detectors: pure functions that map a `History` to an alert, or None."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from covey.monitor.detectors import pace, policy, rewards, swings, teachers, text, updates
from covey.monitor.history import History
from covey.types import Alert

Detector = Callable[[History], Alert | None]


def standard(audits: Sequence[str] = (), weights: Mapping[str, float] | None = None) -> tuple[Detector, ...]:
    """One detector of each kind. `audits`: metrics that are not trained on, for `reward_hacking`; `weights`: of the rewards
    that are, by name, for `reward_conflict`.
    """
    return (
        partial(rewards.reward_hacking, audits=tuple(audits)), rewards.reward_collapse, updates.non_finite,
        policy.kl_runaway, policy.entropy_collapse, policy.entropy_explosion, policy.diversity_loss, policy.dead_groups,
        text.length_explosion, text.length_collapse, text.truncation, text.repeated_text, text.format_loss,
        updates.spike, partial(updates.spike, metric="update/all", rule="update_spike"),
        updates.large_updates, updates.tiny_updates, updates.sampler_mismatch, policy.router_drift,
        rewards.reward_errors, swings.reward_swings, partial(swings.reward_conflict, weights=weights or {}),
        rewards.slow_convergence, rewards.reward_plateau, pace.throughput_drop, pace.data_drift,
        teachers.member_dominates, teachers.member_idle, pace.reward_drift, pace.forgetting, text.language_collapse,
        policy.tool_collapse, teachers.teacher_worse, teachers.teacher_collapse, teachers.teacher_leak,
    )  # fmt: skip
