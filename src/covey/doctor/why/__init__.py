"""Diagnosis by counterfactual: a recorded step made again with one thing changed at a time."""
