"""How much an optimizer step moves the weights, as a share of their size, by depth."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from covey.types import Max, Metric

_SAMPLE = 16_384
"""Weights of one matrix that are looked at; so many tell the norm of all to a few percent, and take no time."""
_BLOCKS = 4
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


class UpdateMeter:
    """Call `before` and `after` around an optimizer step, then `take`.

    `update/<part>` is `|dW| / |W|` of the embeddings, of up to four blocks of layers, of the rest, and of `all`. For LoRA dW is
    the change of the product, `scale (dB A' + B dA)`, and W the frozen matrix under it, so that the numbers mean the same
    with and without an adapter. `update/changed`: trained weights that are another number than before (bfloat16 weights
    round small updates away).
    """

    def __init__(self, model: Any, is_due: Callable[[], bool] = lambda: True) -> None:
        self.model, self.is_due = model, is_due
        self._before: dict[str, Tensor] = {}
        self._sizes: dict[str, float] = {}
        self._found: dict[str, Metric] = {}
        self._blocks: tuple[str, ...] | None = None

    @torch.no_grad()
    def before(self) -> None:
        """Remember some of the weights, when this step is one to measure."""
        self._before = {}
        if self.is_due():
            adapters = {id(p) for _, module in self._adapted() for p in _factors(module)}
            self._before = {
                name: parameter.detach().clone() if id(parameter) in adapters else _sample(parameter)
                for name, parameter in self._trained()
            }

    @torch.no_grad()
    def after(self) -> None:
        if not self._before:
            return
        before, self._before = self._before, {}
        moved: dict[str, float] = {}
        size: dict[str, float] = {}
        changed = total = 0
        inside = {id(p) for _, module in self._adapted() for p in _factors(module)}
        names = {id(parameter): name for name, parameter in self._trained()}
        for name, parameter in self._trained():
            if name not in before:
                continue
            now = parameter.detach() if id(parameter) in inside else _sample(parameter)
            changed += int((now != before[name]).sum())
            total += now.numel()
            if id(parameter) not in inside:
                scale = parameter.numel() / max(now.numel(), 1)
                self._add(moved, size, name, _square(now - before[name]) * scale, _square(now) * scale)
        for name, module in self._adapted():
            change = _product_change(module, before, names)
            if change is not None:
                self._add(moved, size, name, change, self._frozen(name, module))
        ratio = lambda part: math.sqrt(moved[part] / size[part]) if size[part] else math.nan
        self._found = {f"update/{part}": Max(ratio(part)) for part in moved}
        self._found["update/changed"] = Max(changed / max(total, 1))

    def take(self) -> dict[str, Metric]:
        """What the last measured step did; nothing when it was not measured."""
        found, self._found = self._found, {}
        return found

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.model.named_modules():
            if _is_lora(module):
                yield f"{name}.weight", module

    def _frozen(self, name: str, module: Any) -> float:
        """Squared norm of the matrix under an adapter, which never changes."""
        if name not in self._sizes:
            weight = module.get_base_layer().weight
            sampled = _sample(weight)
            self._sizes[name] = _square(sampled) * weight.numel() / max(sampled.numel(), 1)
        return self._sizes[name]

    def _add(self, moved: dict[str, float], size: dict[str, float], name: str, change: float, whole: float) -> None:
        for part in (self._part(name), "all"):
            moved[part] = moved.get(part, 0.0) + change
            size[part] = size.get(part, 0.0) + whole

    def _part(self, name: str) -> str:
        found = _LAYER.search(name)
        if found is None:
            return "embeddings" if "emb" in name or "wte" in name or "wpe" in name else "rest"
        return self._blocks_of_layers()[int(found[1])]

    def _blocks_of_layers(self) -> tuple[str, ...]:
        """[layers], the name of the block that each layer is in, such as `layers_00_06`."""
        if self._blocks is None:
            depth = 1 + max(
                int(found[1]) for name, _ in self.model.named_parameters() if (found := _LAYER.search(name))
            )
            size = -(-depth // _BLOCKS)
            start = [layer // size * size for layer in range(depth)]
            self._blocks = tuple(f"layers_{first:02d}_{min(first + size, depth) - 1:02d}" for first in start)
        return self._blocks


def _is_lora(module: Any) -> bool:
    """A linear layer with one plain LoRA adapter in use, over a matrix whose numbers can be read."""
    if not (hasattr(module, "lora_A") and hasattr(module, "get_base_layer") and len(module.lora_A) == 1):
        return False
    weight = getattr(module.get_base_layer(), "weight", None)
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2


def _factors(module: Any) -> list[Tensor]:
    return [p for part in (module.lora_A, module.lora_B) for layer in part.values() for p in layer.parameters()]


def _product_change(module: Any, before: dict[str, Tensor], names: dict[int, str]) -> float | None:
    """Squared norm of the change of `scale B A`, by Gram matrices of the rank's size: `|X Y|^2 = tr(X'X Y Y')`."""
    (key,) = module.lora_A
    a, b = module.lora_A[key].weight, module.lora_B[key].weight  # [r, in], [out, r]
    if id(a) not in names or id(b) not in names:
        return None
    old_a, old_b = before[names[id(a)]].float(), before[names[id(b)]].float()
    left = torch.cat([b.float() - old_b, old_b], dim=1)  # [out, 2 r]
    right = torch.cat([a.float(), a.float() - old_a], dim=0)  # [2 r, in]
    change = ((left.T @ left) * (right @ right.T)).sum().item()
    return max(0.0, change) * float(module.scaling[key]) ** 2


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    step = -(-flat.numel() // _SAMPLE)
    return flat[:: step | 1].clone()


def _square(x: Tensor) -> float:
    return x.float().square().sum().item()
