"""One training run on disk: checkpoints, metrics, rollouts, its manifest, and signals that ask it to stop."""

from typing import TYPE_CHECKING

from covey.names import lazy

if TYPE_CHECKING:
    from covey.runs.folder import RunFolder
    from covey.runs.signals import StopRequest

__all__ = ["RunFolder", "StopRequest"]
__getattr__ = lazy(__name__, {"folder": "RunFolder", "signals": "StopRequest"})
