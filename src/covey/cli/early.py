"""Checks of options before torch is imported, which takes seconds: their types, words and ranges."""

import ast
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from covey.cli.fields import all_fields, enum_values
from covey.config import checks, options, trackers
from covey.errors import ConfigError, did_you_mean

_NAMES: Mapping[str, Any] = {
    **{"Any": Any, "Literal": Literal, "ParallelismConfig": Any, "DebugOption": str},
    **dict.fromkeys(("IntervalStrategy", "SchedulerType", "OptimizerNames", "SaveStrategy", "HubStrategy"), str),
}
"""Names in the annotations of options; words stay text, GRPOConfig converts them."""
_ENUMS = {"lr_scheduler_type": ("trainer_utils", "SchedulerType"), "optim": ("training_args", "OptimizerNames")}


@cache
def option_types() -> Mapping[str, Any]:
    """Types of GRPOConfig's options, read from its source."""
    types = {field.name: eval(field.annotation, dict(_NAMES)) for field in all_fields()}
    return {**types, "reward_weights": list[float | str] | None}  # numbers or schedules


def refuse_early(overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError for what GRPOConfig would refuse in these options, except for checks that need the hardware."""
    defaults = {field.name: _literal(field.default) for field in all_fields()}
    draft = SimpleNamespace(**{**defaults, **overrides})
    changed = {name: value for name, value in overrides.items() if options.is_changed(value, defaults.get(name))}
    checks.refuse_unsupported(changed)
    for name, (module, enum) in _ENUMS.items():
        value, allowed = overrides.get(name), enum_values(module, enum)
        if value is not None and str(value) not in allowed:
            hint = did_you_mean(str(value), allowed) or f" It is one of {', '.join(allowed)}."
            raise ConfigError(f"{name}={value!r} is not known to transformers.{hint}")
    checks.refuse_bad_values(draft)
    trackers.refuse_absent_trackers(overrides.get("report_to"))
    checks.refuse_contradictions(draft, changed)


def default_of(name: str) -> Any:
    """The default of an option of GRPOConfig; None where it has no such option."""
    return next((_literal(field.default) for field in all_fields() if field.name == name), None)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text or None
