"""A plan before paying: memory, seconds of a step, and what would make it cheaper, on GPUs that are not here."""
