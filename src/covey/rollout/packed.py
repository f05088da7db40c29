"""Forward passes on a CPU in bfloat16: weights copied once a version into the layout that the processor multiplies fastest.

The trainer keeps its float32 weights; this copy costs half their memory and is made again by every `load`. Sums of the
residual stream, norms, rotations and softmax stay in float32. Adapters are added into the copy, never into live weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.rollout.cache import Decode, LayerShape, Prefill
from covey.rollout.forward import ModulesForward
from covey.rollout.mode import unwrapped
from covey.rollout.sampler import Unsupported

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders of one shape: norm, rotary attention, norm, gated SiLU; what the loop below computes."""


def has_bfloat16(device: torch.device) -> bool:
    """Whether this is a CPU that multiplies bfloat16 in hardware."""
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True, eq=False)
class Packed:
    """A linear layer in oneDNN's own layout: [.., K] bfloat16 -> [.., N] bfloat16."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(*linears: Any) -> Packed:
        """These layers side by side: their outputs are concatenated."""
        parts = [effective(linear) for linear in linears]
        weight = torch.cat([weight for weight, _ in parts]).to(torch.bfloat16)
        biases = [bias for _, bias in parts]
        bias = torch.cat(cast("list[Tensor]", biases)).to(torch.bfloat16) if biases[0] is not None else None
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight, None), bias)

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], "")
        return out

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The layer's output multiplied by `factor`, in one pass."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")
        return out


def effective(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [N, K] and bias of a linear layer with its active LoRA adapters added. Raises Unsupported for other kinds."""
    if type(linear) is nn.Linear:
        return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if not hasattr(linear, "get_delta_weight") or type(linear.get_base_layer()) is not nn.Linear:
        raise Unsupported(f"layers of kind {type(linear).__name__} cannot be packed")
    weight, bias = effective(linear.get_base_layer())
    if linear.disable_adapters or linear.merged:
        return weight, bias
    for adapter in linear.active_adapters:
        if adapter not in linear.lora_A:
            continue
        if adapter in getattr(linear, "lora_variant", {}) or getattr(linear.lora_B[adapter], "bias", None) is not None:
            raise Unsupported("variants of LoRA (DoRA, biases) cannot be packed")
        weight = weight + linear.get_delta_weight(adapter).detach()
    return weight, bias


@dataclass(frozen=True, eq=False)
class _Layer:
    before: Tensor
    qkv: Packed
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Packed
    after: Tensor
    gate: Packed
    up: Packed
    down: Packed


class PackedForward:
    """The decoders of `FAMILY`, written out: the same arithmetic in a quarter of the calls."""

    def __init__(self, model: Any) -> None:
        """Raises Unsupported, with the reason, for a model outside the family."""
        self.model = unwrapped(model)
        config = self.model.config
        name = type(self.model).__name__
        if name not in FAMILY or config.hidden_act != "silu":
            raise Unsupported(f"{name} is not one of the decoders that are written out")
        probe = ModulesForward(model)  # refuses what no engine runs
        self.layers: tuple[LayerShape, ...] = probe.layers
        self.device, self.dtype = probe.device, torch.bfloat16
        if not has_bfloat16(self.device):
            raise Unsupported("this processor does not multiply bfloat16 in hardware")
        self.vocab_size = int(config.vocab_size)
        self.eps = float(config.rms_norm_eps)
        attention = self.model.model.layers[0].self_attn
        self.scale = float(attention.scaling)
        self.width = self.layers[0].width
        self.key_heads = self.layers[0].heads
        self.query_heads = self.key_heads * int(attention.num_key_value_groups)
        self.rotation = torch.zeros(2, 0, self.width)
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights as they are now."""
        decoder = self.model.model
        if type(decoder.embed_tokens) is not nn.Embedding:
            raise Unsupported(f"an embedding of kind {type(decoder.embed_tokens).__name__} cannot be packed")
        with torch.no_grad():
            self.embedding = decoder.embed_tokens.weight.detach()  # the live one, read row by row
            self.blocks = [self._pack(layer) for layer in decoder.layers]
            self.norm = decoder.norm.weight.detach().float()
            self.head = Packed.of(self.model.lm_head)

    def _pack(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norm_of = lambda name: getattr(attention, name).weight.detach().float() if hasattr(attention, name) else None
        return _Layer(
            before=layer.input_layernorm.weight.detach().float(),
            qkv=Packed.of(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=norm_of("q_norm"),
            key_norm=norm_of("k_norm"),
            out=Packed.of(attention.o_proj),
            after=layer.post_attention_layernorm.weight.detach().float(),
            gate=Packed.of(mlp.gate_proj),
            up=Packed.of(mlp.up_proj),
            down=Packed.of(mlp.down_proj),
        )

    def prefill(self, ids: Tensor, positions: Tensor, batch: Prefill) -> None:
        prompts, length = ids.shape

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            split = [x.view(prompts, length, -1, self.width).transpose(1, 2) for x in (query, key, value)]
            return batch.attend(layer, *split, self.scale, None).reshape(prompts * length, -1, self.width)

        self._run(ids.reshape(-1), positions.reshape(-1), attend)

    def decode(self, ids: Tensor, positions: Tensor, batch: Decode) -> Tensor:
        attend = lambda layer, q, k, v: batch.cache.attend_decode(layer, q, k, v, self.scale, None)
        return self.head(self._normed(self._run(ids, positions, attend), self.norm))

    def _run(self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """[M, hidden] float32 after the last layer, for M tokens."""
        x = self.embedding[ids].float()
        cos, sin = self._rotation_at(positions)
        for i, block in enumerate(self.blocks):
            query, key, value = self._heads(block, self._normed(x, block.before), cos, sin)
            x += block.out(attend(i, query, key, value).reshape(len(x), -1))
            h = self._normed(x, block.after)
            x += block.down(block.up.times(h, block.gate(h, "swish")))
        return x

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps).to(self.dtype)

    def _heads(self, block: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[M, Hq, D], [M, Hkv, D], [M, Hkv, D]: rotated queries and keys, and values."""
        heads = block.qkv(h).view(len(h), -1, self.width)
        turned = heads[:, : self.query_heads + self.key_heads].float()
        if block.query_norm is not None and block.key_norm is not None:
            query, key = turned[:, : self.query_heads], turned[:, self.query_heads :]
            size = (self.width,)
            query, key = (
                F.rms_norm(query, size, block.query_norm, self.eps),
                F.rms_norm(key, size, block.key_norm, self.eps),
            )
            turned = torch.cat((query, key), 1)
        turned = (turned * cos).addcmul_(turned.roll(self.width // 2, -1), sin).to(self.dtype)
        return turned[:, : self.query_heads], turned[:, self.query_heads :], heads[:, -self.key_heads :]

    def _rotation_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[M, 1, D] cosines, and sines with the sign that a rotation by halves wants, from a table by position."""
        needed = int(positions.max()) + 1
        if needed > self.rotation.shape[1]:
            every = torch.arange(max(needed, 2 * self.rotation.shape[1], 512), device=self.device)
            cos, sin = self.model.model.rotary_emb(self.embedding.float(), every[None])
            sin = torch.cat((-sin[..., : self.width // 2], sin[..., self.width // 2 :]), -1)
            self.rotation = torch.cat((cos, sin)).float()
        cos, sin = self.rotation[:, positions][:, :, None]
        return cos, sin


class CopyForward(ModulesForward):
    """Any other architecture in bfloat16: a second model of half the memory, filled again by every `load`."""

    def __init__(self, model: Any) -> None:
        self.live = unwrapped(model)
        ModulesForward(self.live)  # refuses before a copy is made
        super().__init__(copy.deepcopy(self.live).requires_grad_(False).to(torch.bfloat16).eval())

    def refresh(self) -> None:
        live = {**dict(self.live.named_parameters()), **dict(self.live.named_buffers())}
        mine = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with torch.no_grad():
            for name, value in live.items():
                mine[name].copy_(value)
