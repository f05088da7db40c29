"""The training loop, what it is built of, and what it writes."""
