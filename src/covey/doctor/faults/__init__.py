"""Faults on purpose: kills, signals, full disks, failing rewards and bad numbers against a tiny real run, and what it lost."""

from covey.doctor.faults.bench import Bench
from covey.doctor.faults.kinds import FAULTS, Outcome
from covey.doctor.faults.soak import Tally, soak

__all__ = ["FAULTS", "Bench", "Outcome", "Tally", "soak"]
