"""Evaluation of models, intervals, and comparison of runs."""
