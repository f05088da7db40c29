"""A local web page that shows runs while they train: curves, alerts, completions, and differences between runs."""

from covey.monitor.view.app import make_app
from covey.monitor.view.reading import Library

__all__ = ["Library", "make_app"]
