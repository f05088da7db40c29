"""Watching a run while it goes: detectors, alerts, trackers, progress, the dashboard."""

from typing import TYPE_CHECKING

from covey.names import lazy

if TYPE_CHECKING:
    from covey.monitor.completions import completions_shower
    from covey.monitor.monitor import Monitor
    from covey.monitor.progress import Progress
    from covey.monitor.setup import alert_shower, build_monitor
    from covey.monitor.slices import refuse_unknown_columns

__all__ = ["Monitor", "Progress", "alert_shower", "build_monitor", "completions_shower", "refuse_unknown_columns"]
_WHERE = {
    "completions": "completions_shower",
    "monitor": "Monitor",
    "progress": "Progress",
    "setup": "alert_shower build_monitor",
    "slices": "refuse_unknown_columns",
}
__getattr__ = lazy(__name__, _WHERE)
