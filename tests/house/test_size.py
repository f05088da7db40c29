"""Budgets of size: a commit that needs more room changes the number here, and says why."""

LINES = 101_737
