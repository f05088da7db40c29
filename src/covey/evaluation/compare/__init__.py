"""Comparison of two ways to train, several seeds each: their differences, learning curves, and which is better."""
