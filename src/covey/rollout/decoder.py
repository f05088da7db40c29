"""The common decoders written out: the same arithmetic as their modules in a quarter of the calls.

In float32 with the live weights; in bfloat16 on a CPU with packed copies that every `load` makes again, where sums of
the residual stream, norms, rotations and softmax stay in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.errors import Unsupported
from covey.kernels import DecodeKernels, DecodeStep, DecodeWeights, SamplerLinear
from covey.rollout.forward import ModulesForward
from covey.rollout.kv_cache import DecodeBatch, KVCache, LayerShape, PrefillBatch
from covey.rollout.mode import unwrapped

Attend = Callable[[int, Tensor], "Tensor | None"]
"""(layer, normed [M, hidden]) -> [M, Hq, D], or None where nobody needs what comes after."""

_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""What transformers and PEFT hang on embeddings with gradient checkpointing: it changes no number, and asks for their gradient."""

WRITTEN_OUT = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders of one shape, norm, rotary attention, norm, gated SiLU, that are computed here without calling their modules."""

PACKED = 64
"""Tokens of prompts are computed in multiples of this many: a new number of rows costs oneDNN 3 ms."""


@dataclass(frozen=True, eq=False)
class _Layer:
    before: Tensor
    qkv: SamplerLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: SamplerLinear
    after: Tensor
    gate: SamplerLinear
    up: SamplerLinear
    down: SamplerLinear

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        return self.before, self.after, self.query_norm, self.key_norm

    @property
    def products(self) -> tuple[SamplerLinear, ...]:
        return self.qkv, self.out, self.gate, self.up, self.down


class DecoderForward:
    """The decoders of `WRITTEN_OUT`, in the model's own precision or in a packed bfloat16 copy."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Raises Unsupported, with the reason, for a model outside the family."""
        self.model = unwrapped(model)
        config = self.model.config
        name = type(self.model).__name__
        if name not in WRITTEN_OUT or config.hidden_act != "silu":
            raise Unsupported(f"{name} is not one of the decoders that are written out")
        probe = ModulesForward(model)  # refuses what no engine runs
        self.layers: tuple[LayerShape, ...] = probe.layers
        self.device, self.dtype = probe.device, dtype
        self.copies = dtype != probe.dtype
        self.vocab_size = int(config.vocab_size)
        self.eps = float(config.rms_norm_eps)
        attention = self.model.model.layers[0].self_attn
        self.scale = float(attention.scaling)
        self.width = self.layers[0].width
        self.key_heads = self.layers[0].heads
        self.query_heads = self.key_heads * int(attention.num_key_value_groups)
        self._heads_of_qkv = (self.query_heads, self.key_heads, self.key_heads)
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
        if any(_is_hooked(module) for module in self.model.modules()):
            raise Unsupported("a module has forward hooks, which only the modules' own forward calls")
        if type(decoder.embed_tokens) is not nn.Embedding:
            raise Unsupported(f"an embedding of kind {type(decoder.embed_tokens).__name__} cannot be packed")
        self.weights: DecodeWeights | None = None  # the old copy goes before the new one is whole
        with torch.no_grad():
            self.embedding = decoder.embed_tokens.weight.detach()  # the live one, read row by row
            self.blocks = [self._pack(layer) for layer in decoder.layers]
            self.norm = decoder.norm.weight.detach().float()
            self.head = SamplerLinear.make(self.model.lm_head, copies=self.copies)
        self.weights = DecodeWeights.of(self.blocks, self.norm, self.head)

    def _pack(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norm_of = lambda name: getattr(attention, name).weight.detach().float() if hasattr(attention, name) else None
        return _Layer(
            before=layer.input_layernorm.weight.detach().float(),
            qkv=SamplerLinear.make(attention.q_proj, attention.k_proj, attention.v_proj, copies=self.copies),
            query_norm=norm_of("q_norm"),
            key_norm=norm_of("k_norm"),
            out=SamplerLinear.make(attention.o_proj, copies=self.copies),
            after=layer.post_attention_layernorm.weight.detach().float(),
            gate=SamplerLinear.make(mlp.gate_proj, copies=self.copies),
            up=SamplerLinear.make(mlp.up_proj, copies=self.copies),
            down=SamplerLinear.make(mlp.down_proj, copies=self.copies),
        )

    def evaluating(self) -> AbstractContextManager[None]:
        return torch.no_grad()  # no module is called, so their modes, which take a walk over all of them, may stay

    def reserve(self, positions: int) -> None:
        if getattr(self.model.model.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
            return  # its frequencies hang on how long the text is
        self._rotate_up_to(positions)
        self.is_reserved = True

    def prefill(self, ids: Tensor, positions: Tensor, batch: PrefillBatch) -> None:
        """The prompts' own tokens are computed end to end; only attention may see padding."""
        real = batch.token_indices(ids.shape[1])
        # by the first token again, which nobody looks at
        real = F.pad(real, (0, -len(real) % PACKED)).to(ids.device)
        cos, sin = self._rotation_at(positions.reshape(-1)[real])

        def attend(layer: int, h: Tensor) -> Tensor | None:
            query, key, value = self._rotated(self.blocks[layer], h, cos, sin)
            if layer == len(self.blocks) - 1:
                batch.keep_end_to_end(layer, key, value)
                return None
            return batch.attend_end_to_end(layer, query, key, value, self.scale)

        self._run(ids.reshape(-1)[real], attend, batch.cache.kernels)

    def decode(self, ids: Tensor, positions: Tensor, batch: DecodeBatch) -> Tensor:
        cache = batch.cache
        if cache.kernels and self.weights:
            step = self._step(cache, positions)
            return cache.kernels.decode(step, self.weights, cache.cache_tables, self.embedding[ids].float())
        attend = self._by_kernels(cache, positions) if cache.kernels else self._by_operations(cache, positions)
        return self.head(self._run(ids, attend, cache.kernels))

    def _by_operations(self, cache: KVCache, positions: Tensor) -> Attend:
        cos, sin = self._rotation_at(positions)

        def attend(layer: int, h: Tensor) -> Tensor:
            query, key, value = self._rotated(self.blocks[layer], h, cos, sin)
            return cache.attend_decode(layer, query, key, value, self.scale, None)

        return attend

    def _by_kernels(self, cache: KVCache, positions: Tensor) -> Attend:
        """Norms of the heads, rotation, keeping and attending in one pass."""
        kernels = cache.kernels
        assert kernels is not None
        step = self._step(cache, positions)

        def attend(layer: int, h: Tensor) -> Tensor:
            block = self.blocks[layer]
            query, key, value = (x.unflatten(-1, (-1, self.width)) for x in self._projected(block, h))
            own, prompts = cache.suffix[layer], cache.prefix[layer]
            return kernels.attend(step, query, key, value, own, prompts, block.query_norm, block.key_norm)

        return attend

    def _step(self, cache: KVCache, positions: Tensor) -> DecodeStep:
        """This step with its rotations, for the kernels."""
        if not self.is_reserved:
            self._rotate_up_to(int(positions.max()) + 1)
        step = cache.step(self.key_heads, self.query_heads // self.key_heads, self.width, self.scale)
        step.held = positions.contiguous()
        step.places, step.epsilon = step.held.data_ptr(), self.eps
        step.cosines, step.sines = self.rotation[0].data_ptr(), self.rotation[1].data_ptr()
        return step

    def _run(self, ids: Tensor, attend: Attend, kernels: DecodeKernels | None) -> Tensor:
        """[M, hidden] normed, for the head, for M tokens. Nothing useful where `attend` gave up in the last layer."""
        x = self.embedding[ids].float()
        update: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            h = self._added_and_normed(x, update, block.before, kernels)
            attended = attend(layer, h)
            if attended is None:
                return h
            update = block.out(attended.reshape(len(x), -1))
            h = self._added_and_normed(x, update, block.after, kernels)
            update = block.down(block.gate.gated(block.up, h))
        return self._added_and_normed(x, update, self.norm, kernels)

    def _added_and_normed(
        self, x: Tensor, update: Tensor | None, weight: Tensor, kernels: DecodeKernels | None
    ) -> Tensor:
        """The norm of `x + update`, which `x` becomes."""
        if kernels is not None:
            return kernels.add_norm(x, update, weight, self.eps)
        if update is not None:
            x += update
        return F.rms_norm(x, weight.shape, weight, self.eps).to(self.dtype)

    def _projected(self, block: _Layer, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[M, Hq * D], [M, Hkv * D], [M, Hkv * D]."""
        query, key, value = block.qkv.apart(h, [heads * self.width for heads in self._heads_of_qkv])
        return query, key, value

    def _rotated(self, block: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        other = turned.roll(self.width // 2, -1)
        turned = turned.mul_(cos).addcmul_(other, sin).to(self.dtype)  # in place: nobody else has what was projected
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


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody sees, or may change, what goes in or comes out."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__name__", None) not in _GRADIENT_HOOKS for hook in hooks)


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
