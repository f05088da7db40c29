"""A local web page that shows runs while they train: curves, alerts, completions, and differences between runs."""

from typing import TYPE_CHECKING

from covey.names import lazy

if TYPE_CHECKING:
    from covey.monitor.view.app import make_app
    from covey.monitor.view.reading import Library

__all__ = ["Library", "make_app"]
__getattr__ = lazy(__name__, {"app": "make_app", "reading": "Library"})  # the extra `view` is needed by the page alone
