"""Fusing weights: whole models and adapters of one base, merged without loading a model; averages of a run while it trains."""

from covey.models.merging.adapters import merge_adapters
from covey.models.merging.average import WeightAverage
from covey.models.merging.methods import METHODS, Recipe
from covey.models.merging.models import merge_models

__all__ = ["METHODS", "Recipe", "WeightAverage", "merge_adapters", "merge_models"]
