"""Fault injection: kills, signals, full disks, failing rewards and bad numbers in a tiny real run, and the steps lost."""

from covey.doctor.faults.bench import Bench
from covey.doctor.faults.kinds import FAULTS, Outcome
from covey.doctor.faults.soak import Tally, soak

__all__ = ["FAULTS", "Bench", "Outcome", "Tally", "soak"]
