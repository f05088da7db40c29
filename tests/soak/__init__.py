"""Fault injection: kills, signals, full disks, failing rewards and bad numbers in a tiny real run, and the steps lost."""

from soak.bench import Bench
from soak.kinds import FAULTS, Outcome
from soak.rounds import Tally, soak

__all__ = ["FAULTS", "Bench", "Outcome", "Tally", "soak"]
