"""Watching a run while it goes."""

from covey.monitor.progress import Progress

__all__ = ["Progress"]
