"""Feature columns of prompts: for filters, curricula, rewards and metrics by slice."""

from covey.data.features.columns import FEATURES, add_features, readability

__all__ = ["FEATURES", "add_features", "readability"]
