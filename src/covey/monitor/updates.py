"""Relative update of the weights by an optimizer step, by depth."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.process.sharding import local, whole
from covey.types import Max, Metric

_SAMPLE = 16_384
"""Sampled weights of one matrix: enough to estimate the norm within a few percent, in negligible time."""
_BLOCKS = 4
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


class UpdateMeter:
    """Call `before` and `after` around an optimizer step, then `take`.

    `update/<part>` is `|dW| / |W|` of the embeddings, of up to four blocks of layers, of the rest, and of `all`. For LoRA dW is
    the change of the product, `scale (dB A' + B dA)`, and W the frozen matrix under it, so that the numbers mean the same
    with and without an adapter. `update/changed`: trained weights that are another number than before (bfloat16 weights
    round small updates away). Of a model that is split over processes each process measures its own part.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._before: dict[str, Tensor] = {}
        self._sampled: Tensor | None = None
        self._sizes: dict[str, float] = {}
        self._metrics: dict[str, Metric] = {}
        self._blocks: tuple[str, ...] | None = None
        self._modules: list[tuple[str, Any]] | None = None

    @torch.no_grad()
    def before(self) -> None:
        """Remember some of the weights."""
        plain, inside = self._trained()
        self._before = {name: whole(parameter.detach()).clone() for name, parameter in inside}
        self._sampled = _samples([parameter for _, parameter in plain])

    @torch.no_grad()
    def after(self) -> None:
        if self._sampled is None:
            return
        before, sampled, self._before, self._sampled = self._before, self._sampled, {}, None
        moved: dict[str, float] = {}
        size: dict[str, float] = {}
        plain, inside = self._trained()
        now = _samples([parameter for _, parameter in plain])
        lengths = [_sample_size(parameter) for _, parameter in plain]
        sums = lambda x: [part.square().sum() for part in x.split(lengths)]
        squares = torch.stack([*sums(now - sampled), *sums(now)]).tolist() if plain else []  # one wait for the device
        differing = [(now != sampled).sum(), *((whole(p.detach()) != before[name]).sum() for name, p in inside)]
        changed = sum(_read(differing))
        total = now.numel() + sum(parameter.numel() for _, parameter in inside)
        for i, (name, parameter) in enumerate(plain):
            scale = local(parameter).numel() / max(lengths[i], 1)
            self._add(moved, size, name, squares[i] * scale, squares[len(plain) + i] * scale)
        names = {id(parameter): name for name, parameter in inside}
        trained = [(name, m) for name, m in self._adapted() if all(id(p) in names for p in _weights(m))]
        changes = _read([_product_change(module, before, names) for _, module in trained])
        for (name, module), change in zip(trained, changes, strict=True):
            scale = float(next(iter(module.scaling.values())))
            self._add(moved, size, name, max(0.0, change) * scale**2, self._frozen(name, module))
        ratio = lambda part: math.sqrt(moved[part] / size[part]) if size[part] else math.nan
        self._metrics = {f"update/{part}": Max(ratio(part)) for part in moved}
        self._metrics["update/changed"] = Max(changed / max(total, 1))

    def take(self) -> dict[str, Metric]:
        """Update metrics of the last step, once; empty when it was left out."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _trained(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """Named parameters that are trained directly, and those that are LoRA factors."""
        parts = [part for _, module in self._adapted() for part in (module.lora_A, module.lora_B)]
        factors = {id(p) for part in parts for layer in part.values() for p in layer.parameters()}
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return [(n, p) for n, p in trained if id(p) not in factors], [(n, p) for n, p in trained if id(p) in factors]

    def _adapted(self) -> list[tuple[str, Any]]:
        """Layers with an adapter, cached: a run does not change its trainable parameters."""
        if self._modules is None:
            self._modules = [(f"{name}.weight", m) for name, m in self.model.named_modules() if _is_lora(m)]
        return self._modules

    def _frozen(self, name: str, module: Any) -> float:
        """Squared norm of the matrix under an adapter, which never changes."""
        if name not in self._sizes:
            weight = module.get_base_layer().weight
            sampled = _sample(weight)
            square = sampled.float().square().sum().item()
            self._sizes[name] = square * weight.numel() / max(sampled.numel(), 1)  # rows of others are alike
        return self._sizes[name]

    def _add(self, moved: dict[str, float], size: dict[str, float], name: str, change: float, whole: float) -> None:
        for part in (self._part(name), "all"):
            moved[part] = moved.get(part, 0.0) + change
            size[part] = size.get(part, 0.0) + whole

    def _part(self, name: str) -> str:
        match = _LAYER.search(name)
        if match is None:
            return "embeddings" if "emb" in name or "wte" in name or "wpe" in name else "rest"
        return self._blocks_of_layers()[int(match[1])]

    def _blocks_of_layers(self) -> tuple[str, ...]:
        """[layers], the name of the block that each layer is in, such as `layers_00_06`."""
        if self._blocks is None:
            depth = 1 + max(
                int(match[1]) for name, _ in self.model.named_parameters() if (match := _LAYER.search(name))
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
    if not (isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2):
        return False
    a, b = _weights(module)
    shape = sorted((b.shape[0], a.shape[1]))  # of BD-LoRA, whose factors stand in blocks, another
    return a.shape[0] == b.shape[1] and shape == sorted(weight.shape)


def _weights(module: Any) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] of the adapter."""
    (key,) = module.lora_A
    return module.lora_A[key].weight, module.lora_B[key].weight


def _product_change(module: Any, before: dict[str, Tensor], names: dict[int, str]) -> Tensor:
    """Squared norm of the change of `B A`, by Gram matrices of the rank's size: `|X Y|^2 = tr(X'X Y Y')`."""
    a, b = _weights(module)
    a_now, b_now = whole(a), whole(b)
    old_a, old_b = before[names[id(a)]].float(), before[names[id(b)]].float()
    left = torch.cat([b_now.float() - old_b, old_b], dim=1)  # [out, 2 r]
    right = torch.cat([a_now.float(), a_now.float() - old_a], dim=0)  # [2 r, in]
    return ((left.T @ left) * (right @ right.T)).sum()


def _read(numbers: Sequence[Tensor]) -> list[Any]:
    """Values of tensors of one number each, with one wait for the device."""
    device = next((number.device for number in numbers if number.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([number.to(device) for number in numbers]).tolist() if numbers else []


def _sample(parameter: Tensor) -> Tensor:
    flat = local(parameter).detach().reshape(-1)
    return flat[:: _stride(flat.numel())]


def _samples(parameters: Sequence[Tensor]) -> Tensor:
    """[S] float32, the sampled weights of all, one after the other, in memory of their own."""
    if not parameters:
        return torch.zeros(0)
    device = parameters[0].device
    return torch.cat([_sample(parameter).to(device, torch.float32) for parameter in parameters])


def _sample_size(parameter: Tensor) -> int:
    """Number of weights that `_sample` takes."""
    count = local(parameter).numel()
    return -(-count // _stride(count)) if count else 0


def _stride(count: int) -> int:
    return -(-count // _SAMPLE) | 1
