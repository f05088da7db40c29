"""Watching a run while it goes."""

from covey.monitor.completions import completions_shower
from covey.monitor.monitor import Monitor
from covey.monitor.progress import Progress
from covey.monitor.setup import alert_shower, build_monitor

__all__ = ["Monitor", "Progress", "alert_shower", "build_monitor", "completions_shower"]
