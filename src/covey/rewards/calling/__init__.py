"""Calling reward functions: deadlines, worker processes, caches, what came back."""
