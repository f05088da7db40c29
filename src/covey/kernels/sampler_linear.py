"""Linear layers of the sampler: the live weights, or a 16-bit copy in the fastest layout for this machine."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.errors import Unsupported
from covey.kernels.half_weights import share_copy
from covey.kernels.linear_products import add_adapter
from covey.kernels.matmul import PLAIN


class SamplerLinear(ABC):
    """A linear layer [.., K] -> [.., N] for inference."""

    @staticmethod
    def make(*linears: Any, dtype: torch.dtype | None = None, into: SamplerLinear | None = None) -> SamplerLinear:
        """These layers concatenated along outputs: their live weights, or a copy in `dtype` with active LoRA adapters merged.

        The copy is written into the memory of `into`, an earlier copy, where it fits; oneDNN's layout is always made anew.
        Raises Unsupported for other kinds of layers.
        """
        if dtype is None:
            return AdaptedLinear.of(*linears, into=into)
        weights, biases = _parts_of(linears)
        if dtype == torch.bfloat16 and has_bfloat16(weights[0].device):
            return OneDnnLinear.from_parts(weights, biases)
        before = into.parts[0] if isinstance(into, InPlaceLinear) and into.is_copy else (None, None)
        bias = None if biases is None else stacked(biases, dtype, before[1])
        weight = stacked(weights, dtype, before[0])
        _share(linears, weight, bias)
        return InPlaceLinear(((weight, bias),), is_copy=True)

    @staticmethod
    def in_float32(linear: nn.Module, into: SamplerLinear | None = None) -> SamplerLinear:
        """This layer with active LoRA adapters merged, for float32 inputs; a copy unless it is a plain float32 layer.

        `into` as in `make`. Raises Unsupported for other kinds of layers.
        """
        is_live = type(linear) is nn.Linear and all(x.dtype == torch.float32 for x in linear.parameters())
        return SamplerLinear.make(linear, dtype=None if is_live else torch.float32, into=into)

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights and biases, live or copied."""

    @property
    def scales(self) -> tuple[float, ...]:
        """Factors of adapters that are computed in addition; a captured step keeps them."""
        return ()

    @abstractmethod
    def outputs(self, x: Tensor) -> Sequence[Tensor]:
        """Outputs [.., N] of the concatenated layers, one by one, or one of them all."""

    def __call__(self, x: Tensor) -> Tensor:
        out = self.outputs(x)
        return out[0] if len(out) == 1 else torch.cat(tuple(out), -1)

    def split(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        """The output split into those of the concatenated layers, by their widths."""
        out = self.outputs(x)
        parts: Sequence[Tensor] = out if len(out) > 1 else out[0].split(widths, -1)
        return parts

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the output."""
        return F.silu(self(x), inplace=True)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The output multiplied by `factor`, which may be overwritten."""
        return factor.mul_(self(x))

    def gated(self, up: SamplerLinear, x: Tensor) -> Tensor:
        """`silu(self(x)) * up(x)`."""
        return up.times(x, self.silu(x))


@dataclass(frozen=True, eq=False)
class InPlaceLinear(SamplerLinear):
    """Plain linear layers with the trainer's own parameters, or one copy; the outputs of several are concatenated."""

    parts: tuple[tuple[Tensor, Tensor | None], ...]
    is_copy: bool = False
    """True if the memory belongs to this layer; the trainer's own must never be written."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(tensor for part in self.parts for tensor in part)

    @staticmethod
    def of(*linears: Any) -> InPlaceLinear:
        """The layers, concatenated along outputs. Raises Unsupported for anything but plain linear layers."""
        for linear in linears:
            if type(linear) is not nn.Linear:
                raise Unsupported(f"layers of kind {type(linear).__name__} are not plain linear layers")
        return InPlaceLinear(tuple(effective(linear) for linear in linears))

    @property
    def in_features(self) -> int:
        """Inputs, K."""
        return self.parts[0][0].shape[1]

    @property
    def out_features(self) -> int:
        """Outputs of all parts."""
        return sum(len(weight) for weight, _ in self.parts)

    @property
    def is_plain(self) -> bool:
        """True if all weights and biases are the trainer's own, contiguous float32 CPU tensors."""
        tensors = [tensor for tensor in self.tensors if tensor is not None]
        return not self.is_copy and all(
            x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() and type(x) in PLAIN for x in tensors
        )

    def outputs(self, x: Tensor) -> list[Tensor]:
        return [F.linear(x, weight, bias) for weight, bias in self.parts]

    def split_by(self, outputs: int) -> tuple[InPlaceLinear, InPlaceLinear]:
        """Its first outputs and the others, as layers in the same memory; of one part."""
        ((weight, bias),) = self.parts
        first = weight[:outputs], None if bias is None else bias[:outputs]
        other = weight[outputs:], None if bias is None else bias[outputs:]
        return InPlaceLinear((first,), self.is_copy), InPlaceLinear((other,), self.is_copy)


@dataclass(frozen=True, eq=False)
class AdaptedLinear(SamplerLinear):
    """Live weights and the products of active LoRA adapters, added inside of them; nothing is merged.

    So the sampler computes what the learner computes. A merged copy in 16 bits would round small adapters away.
    """

    base: InPlaceLinear
    a: Tensor
    """[R, K]: A of all adapters of all parts, one below the other, a copy in the type of the weights."""
    adapters: tuple[tuple[tuple[slice, Tensor, float], ...], ...]
    """Of each part's adapters: rows of `a`, B [N, r] in the type of the weights, and scale."""

    @staticmethod
    def of(*linears: Any, into: SamplerLinear | None = None) -> SamplerLinear:
        """These layers, concatenated along outputs, those without an active adapter as they are.

        `into` as in `make`. Raises Unsupported for anything but plain LoRA on plain layers.
        """
        base = InPlaceLinear.of(*(linear.base_layer if hasattr(linear, "lora_A") else linear for linear in linears))
        dtype = base.parts[0][0].dtype
        before = into if isinstance(into, AdaptedLinear) else None
        copies = iter(() if before is None else [b for part in before.adapters for _, b, _ in part])
        rows: list[Tensor] = []
        adapters = []
        for linear in linears:
            part = []
            for name in active_adapters(linear):
                if not isinstance(linear.lora_A[name], nn.Linear):  # AdaLoRA's is a parameter
                    raise Unsupported(f"adapters of kind {type(linear).__name__} are no plain product")
                a, b = linear.lora_A[name].weight.detach(), linear.lora_B[name].weight.detach()
                first = sum(map(len, rows))
                rows.append(a)
                part.append(
                    (slice(first, first + len(a)), stacked([b], dtype, next(copies, None)), linear.scaling[name])
                )
            adapters.append(tuple(part))
        if not rows:
            return base
        return AdaptedLinear(base, stacked(rows, dtype, None if before is None else before.a), tuple(adapters))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.base.tensors, self.a, *(b for part in self.adapters for _, b, _ in part))

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(scale for part in self.adapters for _, _, scale in part)

    def outputs(self, x: Tensor) -> list[Tensor]:
        out = self.base.outputs(x)
        inner = x.flatten(0, -2) @ self.a.t()
        for y, adapters in zip(out, self.adapters, strict=True):
            for rows, b, scale in adapters:
                add_adapter(y.flatten(0, -2), inner[:, rows], b, scale)
        return out


@dataclass(frozen=True, eq=False)
class OneDnnLinear(SamplerLinear):
    """A bfloat16 copy in oneDNN's own layout, bfloat16 in and out."""

    weight: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias

    @staticmethod
    def from_parts(weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> OneDnnLinear:
        """Of several [N, K] and [N], concatenated along outputs."""
        half = None if biases is None else stacked(biases, torch.bfloat16)
        return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(stacked(weights, torch.bfloat16), None), half)

    def outputs(self, x: Tensor) -> tuple[Tensor]:
        return (torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], ""),)

    def silu(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return out

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")
        return out


def _share(linears: Sequence[Any], weight: Tensor, bias: Tensor | None) -> None:
    """Let the learner read and write a copy on a GPU, layer by layer; not one with adapters merged, which is another matrix."""
    if weight.device.type != "cuda" or any(type(linear) is not nn.Linear for linear in linears):
        return
    sizes = [linear.out_features for linear in linears]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    for linear, part, bias_part in zip(linears, weight.split(sizes), biases, strict=True):
        share_copy(linear, part, bias_part)


def has_bfloat16(device: torch.device) -> bool:
    """True on an x86 CPU that multiplies bfloat16 in hardware, under a torch that has oneDNN."""
    if (
        device.type != "cpu"
        or platform.machine() not in ("x86_64", "AMD64")
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _parts_of(linears: Sequence[Any]) -> tuple[list[Tensor], list[Tensor] | None]:
    """Weights [N, K], and biases if there are any, of these layers with active LoRA adapters merged."""
    parts = [effective(linear) for linear in linears]
    biases = None if parts[0][1] is None else [cast(Tensor, bias) for _, bias in parts]
    return [weight for weight, _ in parts], biases


def stacked(parts: Sequence[Tensor], dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """Copy of the parts, concatenated, in `dtype`: in the memory of `into` if that has the shape, dtype and device."""
    sizes = [len(part) for part in parts]
    shape = (sum(sizes), *parts[0].shape[1:])
    kind = into is not None and (tuple(into.shape), into.dtype, into.device)
    out = into if kind == (shape, dtype, parts[0].device) else parts[0].new_empty(shape, dtype=dtype)
    assert out is not None  # for mypy: only an existing tensor has that kind
    for part, place in zip(parts, out.split(sizes), strict=True):
        place.copy_(part)
    return out


def effective(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [N, K] and bias of a linear layer with its active LoRA adapters merged; live weights are never changed.

    Raises Unsupported for other kinds of layers.
    """
    if type(linear) is nn.Linear:
        return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if not hasattr(linear, "get_delta_weight") or type(linear.get_base_layer()) is not nn.Linear:
        raise Unsupported(f"layers of kind {type(linear).__name__} cannot be packed")
    weight, bias = effective(linear.get_base_layer())
    return with_adapters(weight, linear), bias


def with_adapters(weight: Tensor, layer: Any) -> Tensor:
    """A weight with the active LoRA adapters of its layer merged. Raises Unsupported for variants that are no plain product."""
    for adapter in active_adapters(layer):
        weight = weight + layer.get_delta_weight(adapter).detach()
    return weight


def active_adapters(linear: Any) -> list[str]:
    """LoRA adapters that act on a linear layer. Raises Unsupported for variants that are no plain product."""
    if not hasattr(linear, "lora_A") or linear.disable_adapters or linear.merged:
        return []
    names = [name for name in linear.active_adapters if name in linear.lora_A]
    for name in names:
        if name in getattr(linear, "lora_variant", {}) or getattr(linear.lora_B[name], "bias", None) is not None:
            raise Unsupported("variants of LoRA (DoRA, biases) cannot be packed")
    return names
