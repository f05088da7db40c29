"""The training loop, its parts, and its records on disk."""
