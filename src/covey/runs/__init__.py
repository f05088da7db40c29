"""One training run on disk: checkpoints, metrics, rollouts, its manifest, and signals that ask it to stop."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.runs.folder import RunFolder
    from covey.runs.signals import StopRequest

__all__ = ["RunFolder", "StopRequest"]
_WHERE = {"RunFolder": "covey.runs.folder", "StopRequest": "covey.runs.signals"}


def __getattr__(name: str) -> Any:
    """Lazy import of public names, so that a reader of metrics does not wait for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'covey.runs' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
