"""The common decoders written out: the same arithmetic as their modules in a quarter of the calls.

In float32 with the live weights; in bfloat16 on a CPU with packed copies that every `load` makes again, where sums of
the residual stream, norms, rotations and softmax stay in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.rollout.cache import Decode, LayerShape, Prefill
from covey.rollout.forward import ModulesForward
from covey.rollout.linear import Linear, Live, Packed
from covey.rollout.mode import unwrapped
from covey.rollout.sampler import Unsupported

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders of one shape: norm, rotary attention, norm, gated SiLU; what the loop below computes."""


@dataclass(frozen=True, eq=False)
class _Layer:
    before: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    after: Tensor
    gate: Linear
    up: Linear
    down: Linear


class DecoderForward:
    """The decoders of `FAMILY`, in the model's own precision or in a packed bfloat16 copy."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Raises Unsupported, with the reason, for a model outside the family."""
        self.model = unwrapped(model)
        config = self.model.config
        name = type(self.model).__name__
        if name not in FAMILY or config.hidden_act != "silu":
            raise Unsupported(f"{name} is not one of the decoders that are written out")
        probe = ModulesForward(model)  # refuses what no engine runs
        self.layers: tuple[LayerShape, ...] = probe.layers
        self.device, self.dtype = probe.device, dtype
        self.linear: type[Live] | type[Packed] = Live if dtype == probe.dtype else Packed
        self.vocab_size = int(config.vocab_size)
        self.eps = float(config.rms_norm_eps)
        attention = self.model.model.layers[0].self_attn
        self.scale = float(attention.scaling)
        self.width = self.layers[0].width
        self.key_heads = self.layers[0].heads
        self.query_heads = self.key_heads * int(attention.num_key_value_groups)
        self.rotation = torch.zeros(2, 0, self.width)
        self.is_reserved = False
        self._take()

    def refresh(self) -> bool:
        """Take the weights as they are now. False when a layer has become something else."""
        try:
            self._take()
        except Unsupported:
            return False
        return True

    def _take(self) -> None:
        decoder = self.model.model
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.model.modules()):
            raise Unsupported("a module has forward hooks, which only the modules' own forward calls")
        if type(decoder.embed_tokens) is not nn.Embedding:
            raise Unsupported(f"an embedding of kind {type(decoder.embed_tokens).__name__} cannot be packed")
        with torch.no_grad():
            self.embedding = decoder.embed_tokens.weight.detach()  # the live one, read row by row
            self.blocks = [self._pack(layer) for layer in decoder.layers]
            self.norm = decoder.norm.weight.detach().float()
            self.head = self.linear.of(self.model.lm_head)

    def _pack(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norm_of = lambda name: getattr(attention, name).weight.detach().float() if hasattr(attention, name) else None
        return _Layer(
            before=layer.input_layernorm.weight.detach().float(),
            qkv=self.linear.of(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=norm_of("q_norm"),
            key_norm=norm_of("k_norm"),
            out=self.linear.of(attention.o_proj),
            after=layer.post_attention_layernorm.weight.detach().float(),
            gate=self.linear.of(mlp.gate_proj),
            up=self.linear.of(mlp.up_proj),
            down=self.linear.of(mlp.down_proj),
        )

    def reserve(self, positions: int) -> None:
        if getattr(self.model.model.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
            return  # its frequencies hang on how long the text is
        self._rotate_up_to(positions)
        self.is_reserved = True

    def prefill(self, ids: Tensor, positions: Tensor, batch: Prefill) -> None:
        prompts, length = ids.shape

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.view(prompts, length, -1, self.width).transpose(1, 2) for x in (query, key, value))
            return batch.attend(layer, q, k, v, self.scale, None).reshape(prompts * length, -1, self.width)

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
            x += block.down(block.up.times(h, block.gate.silu(h)))
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
        if not self.is_reserved:
            self._rotate_up_to(int(positions.max()) + 1)
        cos, sin = self.rotation[:, positions][:, :, None]
        return cos, sin

    def _rotate_up_to(self, positions: int) -> None:
        if positions <= self.rotation.shape[1]:
            return
        every = torch.arange(max(positions, 2 * self.rotation.shape[1], 512), device=self.device)
        cos, sin = self.model.model.rotary_emb(self.embedding.float(), every[None])
        sin = torch.cat((-sin[..., : self.width // 2], sin[..., self.width // 2 :]), -1)
        self.rotation = torch.cat((cos, sin)).float()


class CopyForward(ModulesForward):
    """Any other architecture in bfloat16: a second model of half the memory, filled again by every `load`."""

    def __init__(self, model: Any) -> None:
        self.live = unwrapped(model)
        ModulesForward(self.live)  # refuses before a copy is made
        super().__init__(copy.deepcopy(self.live).requires_grad_(False).to(torch.bfloat16).eval())

    def refresh(self) -> bool:
        live = {**dict(self.live.named_parameters()), **dict(self.live.named_buffers())}
        mine = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if live.keys() != mine.keys():
            return False
        with torch.no_grad():
            for name, value in live.items():
                mine[name].copy_(value)
        return True
