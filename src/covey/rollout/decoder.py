"""Forward passes of Llama-like decoders without their modules: the same arithmetic in a quarter of the calls.

In the model's own precision the live weights are read; another precision reads a copy of the linear layers, written again in the
same memory by every `load`. The residual stream has the learner's type: float32 under its autocast, where it widens the stream too.
Elsewhere a model of 16-bit weights rounds norms and rotary embeddings as its modules do. On a CPU, C++ kernels keep all of that in float32.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covey.errors import Unsupported
from covey.kernels import DecodeKernels, DecodeStep, DecodeWeights, InPlaceLinear, Routers, SamplerLinear, TritonDecode
from covey.models import unwrapped, widens_stream
from covey.rollout.batches import AnswerBatch, DecodeBatch, PrefillBatch, token_indices
from covey.rollout.forward import ModulesForward, addresses_of
from covey.rollout.kv_cache import KVCache, LayerShape
from covey.rollout.row_states import StatePlaces
from covey.rollout.sampler import decoding_threads
from covey.rollout.softmax_attention import ScoreRule
from covey.rollout.static_kv_cache import StaticKVCache

Attend = Callable[[int, Tensor], "Tensor | None"]
"""(layer, normed [M, hidden]) -> [M, Hq, D], or None in the last layer of a prefill, which needs only keys and values."""
Kernels = DecodeKernels | type[TritonDecode] | None
"""Kernels of norms and gates: C++, Triton's, or None for PyTorch's operations."""

_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Hooks that transformers and PEFT put on embeddings for gradient checkpointing; they only call `requires_grad_`."""

WRITTEN_OUT = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Model classes with one layer structure: norm, rotary attention, norm, gated SiLU MLP."""

PACKED = 64
"""Token count of a prefill is padded to a multiple of this: oneDNN takes 3 ms to build a kernel for each new number of rows."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """Weights of a decoder layer, in the order of its forward pass."""

    before: Tensor
    qkv: SamplerLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: SamplerLinear
    after: Tensor
    gate: SamplerLinear
    up: SamplerLinear
    gate_up: SamplerLinear | None
    """Both in one product, of which `gate` and `up` are the halves; None for live weights, which lie apart."""
    down: SamplerLinear

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        return self.before, self.after, self.query_norm, self.key_norm

    @property
    def products(self) -> tuple[SamplerLinear, ...]:
        return self.qkv, self.out, self.gate, self.up, self.down

    def gated(self, x: Tensor, kernels: Kernels) -> Tensor:
        """[M, I], the gated hidden layer of the MLP."""
        if kernels is not TritonDecode:
            return self.gate.gated(self.up, x)
        return TritonDecode.gated(
            *((self.gate(x), self.up(x)) if self.gate_up is None else self.gate_up(x).chunk(2, -1))
        )


class DecoderForward:
    """Forward pass of the decoders in `WRITTEN_OUT`, in the model's own precision or on a 16-bit copy."""

    states: StatePlaces | None = None
    routers: Routers | None = None
    is_indexed = False
    text_only: str | None = "its decoder is written out for text"

    def __init__(self, model: nn.Module, dtype: torch.dtype, float32_head: bool = False) -> None:
        """Raises Unsupported, with the reason, for a model outside the family."""
        self.float32_head = float32_head and dtype != torch.float32
        self.model = unwrapped(model)
        config = self.model.config
        name = type(self.model).__name__
        if name not in WRITTEN_OUT or config.hidden_act != "silu":
            raise Unsupported(f"{name} is not one of the decoders that are written out")
        if getattr(self.model.model.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
            raise Unsupported(f"the rotary frequencies of this {name} depend on the length of the text")
        probe = ModulesForward(model)  # raises Unsupported where the engine cannot run the model
        self.layers: tuple[LayerShape, ...] = probe.layers
        self.device, self.dtype = probe.device, dtype
        self.copied = dtype if dtype != probe.dtype else None
        self.vocab_size = int(config.vocab_size)
        self.eps = float(config.rms_norm_eps)
        attention = self.model.model.layers[0].self_attn
        self.scale = float(attention.scaling)
        self.stream = torch.float32 if widens_stream(self.model) else probe.dtype
        """Type of the residual stream."""
        self.width = self.layers[0].width
        self.key_heads = self.layers[0].heads
        self.query_heads = self.key_heads * int(attention.num_key_value_groups)
        self.rotation = torch.zeros(2, 0, self.width)
        self.blocks: list[_Layer] = []
        self.head: SamplerLinear | None = None
        self._norms: dict[nn.Module, Tensor] = {}
        self._take()

    def refresh(self) -> bool:
        """Read the current weights. False when the type of a layer has changed."""
        try:
            self._take()
        except Unsupported:
            return False
        return True

    @property
    def copied_bytes(self) -> int:
        """Bytes of the packed copy; 0 where the live weights are read."""
        if self.copied is None:
            return 0
        tensors = (tensor for product in self._products for tensor in product.tensors)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)

    @property
    def _products(self) -> list[SamplerLinear]:
        every = [*(product for block in self.blocks for product in block.products), self.head]
        return [product for product in every if product is not None]

    def _take(self) -> None:
        decoder = self.model.model
        if any(is_hooked(module) for module in self.model.modules()):
            raise Unsupported("a module has forward hooks, which only the modules' own forward calls")
        if type(decoder.embed_tokens) is not nn.Embedding:
            raise Unsupported(f"an embedding of kind {type(decoder.embed_tokens).__name__} cannot be packed")
        self.weights: DecodeWeights | None = None
        before = self.blocks if len(self.blocks) == len(decoder.layers) else [None] * len(decoder.layers)
        with torch.no_grad():
            self.embedding = decoder.embed_tokens.weight.detach()  # the live one, read row by row
            self.blocks = [self._pack(layer, old) for layer, old in zip(decoder.layers, before, strict=True)]
            self.norm = self._norm(decoder.norm)
            if self.float32_head:
                self.head = SamplerLinear.in_float32(self.model.lm_head, self.head)
                return
            self.head = SamplerLinear.make(self.model.lm_head, dtype=self.copied, into=self.head)
        self.weights = DecodeWeights.of(self.blocks, self.norm, self.head)

    def _pack(self, layer: Any, old: _Layer | None) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norm_of = lambda name: self._norm(getattr(attention, name)) if hasattr(attention, name) else None

        def linear(name: str, *linears: Any) -> SamplerLinear:
            into = None if old is None else getattr(old, name)
            return SamplerLinear.make(*linears, dtype=self.copied, into=into)

        in_library_layout = self.device.type == "cpu" and self.copied == torch.bfloat16  # which has no halves
        both = halves = None
        if self.copied is not None and not in_library_layout:
            both = linear("gate_up", mlp.gate_proj, mlp.up_proj)
            assert isinstance(both, InPlaceLinear)
            halves = both.split_by(len(mlp.gate_proj.weight))
        return _Layer(
            before=self._norm(layer.input_layernorm),
            qkv=linear("qkv", attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=norm_of("q_norm"),
            key_norm=norm_of("k_norm"),
            out=linear("out", attention.o_proj),
            after=self._norm(layer.post_attention_layernorm),
            gate=halves[0] if halves else linear("gate", mlp.gate_proj),
            up=halves[1] if halves else linear("up", mlp.up_proj),
            gate_up=both,
            down=linear("down", mlp.down_proj),
        )

    def _norm(self, module: Any) -> Tensor:
        """The module's weight in float32: the live one, or a copy in the same memory each time."""
        weight: Tensor = module.weight.detach()
        if weight.dtype == torch.float32:
            return weight
        cached = self._norms.get(module)
        if cached is None or (cached.shape, cached.device) != (weight.shape, weight.device):
            cached = self._norms[module] = torch.empty_like(weight, dtype=torch.float32)
        return cached.copy_(weight)

    def capture_key(self) -> Hashable:
        linears = (tensor for product in self._products for tensor in product.tensors)
        norms = (norm for block in self.blocks for norm in block.norms)
        scales = tuple(scale for product in self._products for scale in product.scales)
        return addresses_of((self.embedding, self.rotation, self.norm, *norms, *linears)), scales

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # no module is called, so their training modes do not matter
        with torch.no_grad(), decoding_threads(self.model):
            yield

    def reserve(self, positions: int) -> None:
        if positions <= self.rotation.shape[1]:
            return
        every = torch.arange(max(positions, 2 * self.rotation.shape[1], 512), device=self.device)
        cos, sin = self.model.model.rotary_emb(self.embedding.float(), every[None])
        sin = torch.cat((-sin[..., : self.width // 2], sin[..., self.width // 2 :]), -1)
        self.rotation = torch.cat((cos, sin)).float()

    def prefill(self, ids: Tensor, positions: Tensor, batch: PrefillBatch | AnswerBatch) -> None:
        """Compute the batch's tokens concatenated, without padding; attention alone may pad them."""
        real = token_indices(batch.lengths, ids.shape[1])
        # padded with token 0, whose result is not read
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
        if isinstance(cache, StaticKVCache) and cache.attention == "triton":
            return self._logits(self._run(ids, self._by_triton(cache, positions), TritonDecode))
        if cache.kernels and self.weights and not cache.is_windowed:
            step = self._step(cache, positions)
            return cache.kernels.decode(step, self.weights, cache.cache_tables, self.embedding[ids].float())
        in_kernels = cache.kernels and not cache.is_windowed
        attend = self._by_kernels(cache, positions) if in_kernels else self._by_operations(cache, positions)
        return self._logits(self._run(ids, attend, cache.kernels))

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None  # `_take` made it
        return self.head(hidden.float() if self.float32_head else hidden)

    def _by_triton(self, cache: StaticKVCache, positions: Tensor) -> Attend:
        """Attention by Triton's kernels, two or three a layer: one stands between two matrix products elsewhere."""
        (cosines, sines), rounds = self.rotation, self.stream != torch.float32

        def attend(layer: int, h: Tensor) -> Tensor:
            block = self.blocks[layer]
            norms = block.query_norm, block.key_norm
            rotation = TritonDecode.rotation(cosines, sines, positions, norms, epsilon=self.eps, rounds=rounds)
            return cache.attend_in_kernels(layer, *self._projected(block, h), ScoreRule(self.scale), rotation)

        return attend

    def _by_operations(self, cache: KVCache, positions: Tensor) -> Attend:
        cos, sin = self._rotation_at(positions)

        def attend(layer: int, h: Tensor) -> Tensor:
            query, key, value = self._rotated(self.blocks[layer], h, cos, sin)
            return cache.attend_decode(layer, query, key, value, ScoreRule(self.scale))

        return attend

    def _by_kernels(self, cache: KVCache, positions: Tensor) -> Attend:
        """Attention by one kernel call a layer: norms of the heads, rotation, cache write and attention."""
        kernels = cache.kernels
        assert kernels is not None
        step = self._step(cache, positions)

        def attend(layer: int, h: Tensor) -> Tensor:
            block = self.blocks[layer]
            query, key, value = self._projected(block, h)
            suffix, prompts = cache.suffix[layer], cache.prefix[layer]
            return kernels.attend(step, query, key, value, suffix, prompts, block.query_norm, block.key_norm)

        return attend

    def _step(self, cache: KVCache, positions: Tensor) -> DecodeStep:
        """Arguments of the kernels for this step, rotary tables included."""
        step = cache.step(self.key_heads, self.query_heads // self.key_heads, self.width, self.scale)
        step.held = positions.contiguous()
        step.places, step.epsilon = step.held.data_ptr(), self.eps
        step.cosines, step.sines = self.rotation[0].data_ptr(), self.rotation[1].data_ptr()
        return step

    def _run(self, ids: Tensor, attend: Attend, kernels: Kernels) -> Tensor:
        """Normed hidden states [M, hidden] of M tokens; meaningless where `attend` returned None in the last layer."""
        adds_in_float32 = isinstance(kernels, DecodeKernels)
        x = self.embedding[ids].to(torch.float32 if adds_in_float32 else self.stream)
        update: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            h = self._added_and_normed(x, update, block.before, kernels)
            attended = attend(layer, h)
            if attended is None:
                return h
            update = block.out(attended.reshape(len(x), -1))
            h = self._added_and_normed(x, update, block.after, kernels)
            update = block.down(block.gated(h, kernels))
        return self._added_and_normed(x, update, self.norm, kernels)

    def _added_and_normed(self, x: Tensor, update: Tensor | None, weight: Tensor, kernels: Kernels) -> Tensor:
        """RMS norm of `x + update`; `x` is updated in place."""
        if isinstance(kernels, DecodeKernels):
            return kernels.add_norm(x, update, weight, self.eps)
        if kernels is not None:
            return kernels.add_norm(x, update, weight, self.eps, self.dtype)
        if update is not None:
            x += update
        return self._normed(x, weight).to(self.dtype)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension; 16-bit numbers are rounded before the weight is applied, as in the modules."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.rms_norm(x.float(), weight.shape, None, self.eps).to(x.dtype) * weight

    def _projected(self, block: _Layer, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[M, Hq, D], [M, Hkv, D], [M, Hkv, D]."""
        parts = block.qkv.split(h, [heads * self.width for heads in (self.query_heads, self.key_heads, self.key_heads)])
        query, key, value = (x.unflatten(-1, (-1, self.width)) for x in parts)
        return query, key, value

    def _rotated(self, block: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [M, Hq, D], rotated keys [M, Hkv, D] and values [M, Hkv, D]."""
        heads = block.qkv(h).view(len(h), -1, self.width)
        turned = heads[:, : self.query_heads + self.key_heads]
        if block.query_norm is not None and block.key_norm is not None:
            query, key = turned[:, : self.query_heads], turned[:, self.query_heads :]
            turned = torch.cat((self._normed(query, block.query_norm), self._normed(key, block.key_norm)), 1)
        turned = turned.to(self.stream)
        other = turned.roll(self.width // 2, -1)
        cos, sin = cos.to(self.stream), sin.to(self.stream)
        turned = turned.mul_(cos)  # in place: the projection has no other reader
        if self.stream == torch.float32:
            turned = turned.addcmul_(other, sin).to(self.dtype)
        else:
            turned = turned.add_(other.mul_(sin)).to(self.dtype)  # each product is rounded
        return turned[:, : self.query_heads], turned[:, self.query_heads :], heads[:, -self.key_heads :]

    def _rotation_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [M, 1, D] of `rotate_half`, from a table by position."""
        cos, sin = self.rotation[:, positions][:, :, None]
        return cos, sin


def is_hooked(module: nn.Module) -> bool:
    """True if a hook other than those of gradient checkpointing may read or change the module's input or output."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__name__", None) not in _GRADIENT_HOOKS for hook in hooks)
