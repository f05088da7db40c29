"""Covey."""
