"""Checks of a run before it starts: machine, model, data, rewards, plan, and a small trial step."""

from typing import TYPE_CHECKING

from covey.names import lazy

if TYPE_CHECKING:
    from covey.doctor.examination import AREAS, Case, examine
    from covey.doctor.finding import Finding, Status

__all__ = ["AREAS", "Case", "Finding", "Status", "examine"]
__getattr__ = lazy(__name__, {"examination": "AREAS Case examine", "finding": "Finding Status"})
