"""What is wrong with a run before it is paid for: checks of machine, model, data, rewards and plan, and a small trial."""

from covey.doctor.examine import AREAS, Case, examine
from covey.doctor.finding import Finding, Status

__all__ = ["AREAS", "Case", "Finding", "Status", "examine"]
