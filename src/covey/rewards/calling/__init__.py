"""Calling of reward functions: deadlines, worker processes, caches, outcomes."""
