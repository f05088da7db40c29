"""Faults on purpose: kills, signals, full disks, failing rewards and bad numbers against a tiny real run, and what it lost."""

from covey.faults.bench import Bench
from covey.faults.kinds import FAULTS, Outcome
from covey.faults.soak import Tally, soak

__all__ = ["FAULTS", "Bench", "Outcome", "Tally", "soak"]
