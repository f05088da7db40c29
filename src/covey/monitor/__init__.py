"""Watching a run while it goes: detectors, alerts, trackers, progress, the dashboard."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.monitor.completions import completions_shower
    from covey.monitor.monitor import Monitor
    from covey.monitor.progress import Progress
    from covey.monitor.setup import alert_shower, build_monitor
    from covey.monitor.slices import refuse_unknown_columns

_WHERE = {
    "Monitor": "monitor",
    "Progress": "progress",
    "alert_shower": "setup",
    "build_monitor": "setup",
    "completions_shower": "completions",
    "refuse_unknown_columns": "slices",
}
__all__ = ["Monitor", "Progress", "alert_shower", "build_monitor", "completions_shower", "refuse_unknown_columns"]


def __getattr__(name: str) -> Any:
    """Public names on first use: the page and the data check must not wait for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
