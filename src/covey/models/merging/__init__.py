"""Whole models and adapters merged from their files; averages of the weights of a run. `covey.merging` is the public name."""
