"""Averages of the weights of one run while it trains: exponential moving averages, and soups of its own steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.process.sharding import shard_like


class WeightAverage:
    """Average of a model's trained weights, a float32 copy, sharded as they are.

    `decay`: exponential moving average, `avg <- d avg + (1 - d) w` after each step, with `d = min(decay, (1 + n) / (10 + n))` at the
    n-th, so that the start is soon forgotten (TensorFlow's `num_updates`). `every` instead: the mean of the weights after every
    so many steps, each counting the same (a model soup of one run; stochastic weight averaging, Izmailov et al. 2018). Frozen
    weights are not copied.
    """

    def __init__(self, model: torch.nn.Module, decay: float | None = None, every: int | None = None) -> None:
        if (decay is None) == (every is None):
            raise ValueError("WeightAverage takes decay or every, one of the two.")
        self.model, self.decay, self.every = model, decay, every
        self.restart()

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, w) for name, w in self.model.named_parameters() if w.requires_grad)

    @property
    def is_empty(self) -> bool:
        """True if nothing was averaged yet: a soup before its first step."""
        return self.count == 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After an optimizer step."""
        if self.every is not None and step % self.every:
            return
        self.count += 1
        warming = (1 + self.count) / (10 + self.count)
        share = 1 / self.count if self.decay is None else 1 - min(self.decay, warming)
        for name, weight in self._trained():
            if name not in self.average:  # it was frozen before
                self.average[name] = weight.detach().float().clone()
            self.average[name].lerp_(weight.detach().float(), share)

    @torch.no_grad()
    def put(self) -> None:
        """Make the average the model's weights."""
        for name, weight in self._trained():
            if not self.is_empty and name in self.average:
                weight.copy_(self.average[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that swaps in the averaged weights; the model's own are restored afterwards, bit for bit."""
        originals = {name: weight.detach().clone() for name, weight in self._trained()}
        self.put()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._trained():
                    weight.copy_(originals[name])

    def restart(self) -> None:
        """Restart the average from the model's current weights."""
        self.count = 0
        """Weights that are in the average, the first ones not counted."""
        self.average = {name: w.detach().float().clone() for name, w in self._trained()}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "average": dict(self.average), "is_soup": self.every is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError for an average of another model."""
        self.count = int(state["count"])
        for name, weight in self._trained():
            self.average[name] = shard_like(state["average"][name], weight).to(weight.device).clone()
