"""Checks of a run before it starts: machine, model, data, rewards, plan, and a small trial step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.doctor.examination import AREAS, Case, examine
    from covey.doctor.finding import Finding, Status

_WHERE = {
    "AREAS": "examination",
    "Case": "examination",
    "Finding": "finding",
    "Status": "finding",
    "examine": "examination",
}
__all__ = ["AREAS", "Case", "Finding", "Status", "examine"]


def __getattr__(name: str) -> Any:
    """Public names on first use: the page and the data check must not wait for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
