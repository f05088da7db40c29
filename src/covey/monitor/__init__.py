"""Watching a run while it goes."""

from covey.monitor.completions import completions_shower
from covey.monitor.progress import Progress

__all__ = ["Progress", "completions_shower"]
