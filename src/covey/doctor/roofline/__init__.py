"""Roofline plan of a run: memory, seconds of a step, and cheaper set-ups, for GPUs that are not here."""
