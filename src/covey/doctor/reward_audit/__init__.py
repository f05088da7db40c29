"""Audit of a reward: probes with known answers, and a report."""
