"""Merging methods: K tensors of one shape, and the base's where the method needs one, to one tensor of that shape.

All compute in float32 (float64 where they are given it) and return that type.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from covey.errors import ConfigError, did_you_mean

_PARALLEL = 0.9995
"""Cosine above which two tensors count as parallel, where SLERP is linear interpolation (as in mergekit)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to merge K models. Raises ConfigError for a method, a number of models or a value that does not fit."""

    method: str = "linear"
    weights: tuple[float, ...] = ()
    """[K]; empty: equal. SLERP takes one, the share of the second model."""
    density: float = 0.5
    """TIES and DARE: share of each task vector's entries that is kept."""
    scale: float = 1.0
    """Factor on the merged task vector (lambda)."""
    normalize: bool = True
    """Divide by the sum of the weights; task arithmetic never does."""
    seed: int = 0
    """DARE: seed of the entries that are dropped."""

    def check(self, count: int, has_base: bool) -> Recipe:
        """The recipe with one weight for each of `count` models."""
        if self.method not in METHODS:
            raise ConfigError(
                f"method {self.method!r} is not known.{did_you_mean(self.method, METHODS)} It is one of {', '.join(METHODS)}."
            )
        method = METHODS[self.method]
        if count < 2 and not (count == 1 and method.needs_base):
            raise ConfigError(f"{self.method} merges several models, and one was given.")
        if self.method == "slerp" and count != 2:
            raise ConfigError(f"slerp lies between two models, and {count} were given; use linear for more.")
        if method.needs_base and not has_base:
            raise ConfigError(f"{self.method} adds differences from a common base model; give --base.")
        if not 0 < self.density <= 1:
            raise ConfigError(f"density {self.density} is no share; give a number above 0 and at most 1.")
        default = (0.5,) if self.method == "slerp" else (1.0,) * count
        weights = tuple(self.weights) or default
        if not all(map(math.isfinite, (*weights, self.scale))):
            raise ConfigError(
                f"the weights {', '.join(map(str, weights))} and the scale {self.scale} must be finite numbers."
            )
        is_divided = (self.method in ("linear", "dare_linear") and self.normalize) or len(default) < len(weights)
        if is_divided and is_zero(sum(weights), weights):
            raise ConfigError(
                "the weights add up to 0, so they cannot be normalized; change them, or use --normalize false."
            )
        if self.method == "slerp" and len(weights) == 2:
            weights = (weights[1] / sum(weights),)
        if len(weights) != len(default):
            raise ConfigError(f"{len(weights)} weights were given for {count} models; give one for each.")
        return Recipe(**{**vars(self), "weights": weights})

    def __call__(self, tensors: Sequence[Tensor], base: Tensor | None, name: str = "") -> Tensor:
        """The merged tensor. `name` seeds DARE's dropout, so that a tensor's result does not depend on the others."""
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        work = [tensor.to(dtype) for tensor in tensors]
        held = None if base is None else base.to(work[0].dtype)
        return METHODS[self.method].call(self, work, held, name)


@dataclass(frozen=True)
class Method:
    """A merging method and its requirements."""

    call: Callable[[Recipe, Sequence[Tensor], Tensor | None, str], Tensor]
    needs_base: bool
    sentence: str


def linear(recipe: Recipe, tensors: Sequence[Tensor], base: Tensor | None, name: str) -> Tensor:
    """Weighted mean: model soups (Wortsman et al. 2022, <https://arxiv.org/abs/2203.05482>)."""
    merged = _weighted(recipe.weights, tensors)
    return merged / sum(recipe.weights) if recipe.normalize else merged


def slerp(recipe: Recipe, tensors: Sequence[Tensor], base: Tensor | None, name: str) -> Tensor:
    """Spherical interpolation between two tensors, taken as vectors (Shoemake 1985)."""
    first, second, share = tensors[0], tensors[1], recipe.weights[0]
    norms = first.norm() * second.norm()
    cosine = torch.clamp((first * second).sum() / norms, -1, 1) if norms > 0 else torch.ones(())
    if cosine.abs() > _PARALLEL:
        return torch.lerp(first, second, share)
    angle = torch.acos(cosine)
    return (torch.sin((1 - share) * angle) * first + torch.sin(share * angle) * second) / torch.sin(angle)


def task_arithmetic(recipe: Recipe, tensors: Sequence[Tensor], base: Tensor | None, name: str) -> Tensor:
    """Base plus weighted task vectors (Ilharco et al. 2023, <https://arxiv.org/abs/2212.04089>)."""
    assert base is not None
    return base + recipe.scale * _weighted(recipe.weights, [tensor - base for tensor in tensors])


def ties(recipe: Recipe, tensors: Sequence[Tensor], base: Tensor | None, name: str) -> Tensor:
    """Trimmed task vectors whose signs agree with the elected one (Yadav et al. 2023, <https://arxiv.org/abs/2306.01708>)."""
    assert base is not None
    return base + recipe.scale * _elect(recipe, [_largest(tensor - base, recipe.density) for tensor in tensors])


def dare_linear(recipe: Recipe, tensors: Sequence[Tensor], base: Tensor | None, name: str) -> Tensor:
    """Task vectors with entries dropped at random and the rest rescaled (Yu et al. 2024, <https://arxiv.org/abs/2311.03099>)."""
    assert base is not None
    deltas = _drop(recipe, tensors, base, name)
    merged = _weighted(recipe.weights, deltas)
    return base + recipe.scale * (merged / sum(recipe.weights) if recipe.normalize else merged)


def dare_ties(recipe: Recipe, tensors: Sequence[Tensor], base: Tensor | None, name: str) -> Tensor:
    """DARE's random drop with TIES' election of signs."""
    assert base is not None
    return base + recipe.scale * _elect(recipe, _drop(recipe, tensors, base, name))


def _weighted(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    return sum((w * tensor for w, tensor in zip(weights, tensors, strict=True)), torch.zeros_like(tensors[0]))


def _elect(recipe: Recipe, deltas: Sequence[Tensor]) -> Tensor:
    """Weighted mean, entry by entry, of the task vectors whose sign is that of their weighted sum."""
    weighted = torch.stack([weight * delta for weight, delta in zip(recipe.weights, deltas, strict=True)])
    elected = torch.where(weighted.sum(0) >= 0, 1.0, -1.0).to(weighted.dtype)
    agrees = weighted.sign() == elected
    merged = (weighted * agrees).sum(0)
    if not recipe.normalize:
        return merged
    shape = (-1, *[1] * (weighted.ndim - 1))
    total = (torch.tensor(recipe.weights, dtype=weighted.dtype).view(shape) * agrees).sum(0)
    return merged / torch.where(is_zero(total, recipe.weights), 1.0, total)


def is_zero(total: Any, weights: Sequence[float]) -> Any:
    """True where a sum of weights is 0, up to their rounding."""
    return abs(total) <= 1e-6 * max(map(abs, weights))


def _largest(delta: Tensor, density: float) -> Tensor:
    """The share `density` of entries with the largest magnitude, zero elsewhere."""
    if density >= 1 or not delta.numel():
        return delta
    largest = torch.topk(delta.abs().flatten(), max(1, int(density * delta.numel())), sorted=False).indices
    mask = torch.zeros(delta.numel(), dtype=delta.dtype)
    mask[largest] = 1
    return delta * mask.view_as(delta)


def _drop(recipe: Recipe, tensors: Sequence[Tensor], base: Tensor, name: str) -> list[Tensor]:
    out = []
    for k, tensor in enumerate(tensors):
        digest = hashlib.blake2b(f"{recipe.seed} {k} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        keep = torch.rand(base.shape, generator=generator) < recipe.density
        out.append((tensor - base) * keep / recipe.density)
    return out


METHODS = {
    "linear": Method(linear, False, "weighted mean (model soup)"),
    "slerp": Method(slerp, False, "spherical interpolation between two models"),
    "task_arithmetic": Method(task_arithmetic, True, "base plus weighted differences from it"),
    "ties": Method(ties, True, "largest differences, where their signs agree"),
    "dare_linear": Method(dare_linear, True, "differences dropped at random, weighted mean"),
    "dare_ties": Method(dare_ties, True, "differences dropped at random, where their signs agree"),
}
"""Ways of merging by name."""
