"""Alerts by rule, the actions that may follow one, the check of the options that name them, and advice. Light to import."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from covey.errors import ConfigError, did_you_mean
from covey.names import rule_of

ALERT_RULES = (
    "data_drift", "dead_groups", "detector_failed", "diversity_loss", "entropy_collapse", "entropy_explosion", "forgetting", "format_loss",
    "gradient_spike", "kl_runaway", "language_collapse", "large_updates", "length_collapse", "length_explosion", "member_dominates", "member_idle", "non_finite", "repeated_text", "reward_collapse",
    "reward_conflict", "reward_drift", "reward_errors", "reward_hacking", "reward_plateau", "reward_swings", "router_drift", "sampler_mismatch", "slow_convergence", "teacher_collapse", "teacher_leak", "teacher_worse", "throughput_drop",
    "tiny_updates", "tool_collapse", "truncation", "update_spike",
)  # fmt: skip
"""Rules that the detectors of `covey.monitor` can report."""

ALERT_ACTIONS = ("log", "off", "lower_learning_rate", "roll_back", "stop")
"""Actions that can follow an alert."""


def refuse_bad_alerts(config: Any) -> None:
    """Raise for an alert that nothing can report, an action that is none, and an address that cannot be posted to."""
    allowed = (*ALERT_RULES, *map(rule_of, config.alert_detectors or ()), "info", "warning", "error", "all")
    actions = config.alert_actions or {}
    if not isinstance(actions, Mapping):
        raise ConfigError(f'alert_actions={actions!r} is not a mapping; write it as {{"all": "stop"}}.')
    for rule, action in actions.items():
        if rule not in allowed:
            hint = did_you_mean(rule, allowed) or f" Alerts are {', '.join(ALERT_RULES)}."
            raise ConfigError(f"alert_actions names {rule!r}, which is no alert.{hint}")
        if action not in ALERT_ACTIONS:
            hint = did_you_mean(str(action), ALERT_ACTIONS) or f" It is one of {', '.join(ALERT_ACTIONS)}."
            raise ConfigError(f"alert_actions gives {rule} the action {action!r}, which is not known.{hint}")
        saves = getattr(config.save_strategy, "value", config.save_strategy) != "no" and not config.save_only_model
        if action == "roll_back" and not saves:
            raise ConfigError(
                f"alert_actions lets {rule} roll back, but no checkpoint to go back to is saved: set save_strategy='steps' and "
                "leave save_only_model out."
            )
    if config.alert_webhook is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", config.alert_webhook):
        raise ConfigError("alert_webhook is not an address of the form https://host/path; give one that takes a POST.")


def late_checkpoint(config: Any, total_steps: int) -> str | None:
    """Advice for a run that may roll back, and saves no checkpoint before its last step."""
    options = [name for name in ("on_bad_numbers", "on_spike") if getattr(config, name) == "roll_back"]
    if "roll_back" in (config.alert_actions or {}).values():
        options.insert(0, "alert_actions")
    first = config.save_steps if config.save_steps >= 1 else math.ceil(config.save_steps * total_steps)
    if not options or getattr(config.save_strategy, "value", config.save_strategy) != "steps" or first < total_steps:
        return None
    return (
        f"{' and '.join(options)} can roll back, but save_steps={config.save_steps:g} saves no checkpoint before the last of "
        f"{total_steps} steps, so the run would end instead; set save_steps below the step of the first fault to expect."
    )
