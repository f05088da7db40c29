"""Watching a run while it goes."""

from covey.monitor.completions import completions_shower
from covey.monitor.monitor import Monitor
from covey.monitor.progress import Progress
from covey.monitor.setup import alert_shower, build_monitor
from covey.monitor.slices import refuse_unknown_columns

__all__ = [
    "Monitor",
    "Progress",
    "alert_shower",
    "build_monitor",
    "completions_shower",
    "refuse_unknown_columns",
]
