"""Forward passes of the native engine through transformers' own modules, and a check of their logits against the model's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from covey.errors import Unsupported
from covey.kernels import (
    DecodeKernels,
    IndexCache,
    Routers,
    SamplerLinear,
    StepKernels,
    attention_windows,
    cache_keyword,
    choosing_few,
    find_indexers,
    find_routers,
    has_states,
    in_place_steps,
    sampling,
    state_steps,
)
from covey.models import accepts, computing, context_limit, decoder_of, evaluating, float32_stream, unwrapped
from covey.models.modalities import embed
from covey.rollout.attention import NAME, Batch, causal, register
from covey.rollout.batches import AnswerBatch, DecodeBatch, PrefillBatch
from covey.rollout.kv_cache import KVCache, LayerShape
from covey.rollout.row_states import StatePlaces, find_states
from covey.rollout.sampler import decoding_threads
from covey.rollout.softmax_attention import ScoreRule
from covey.rollout.supported import expect_supported
from covey.types import Prompt

UNLIMITED = 2**31
"""Context length of a model without one in its config."""


class Forward(Protocol):
    """Forward passes of the engine: prefill of whole prompts, then decoding of one token a row."""

    layers: tuple[LayerShape, ...]
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    states: StatePlaces | None
    """States other than keys and values that the model hands from token to token."""
    routers: Routers | None
    """Routers whose choices every pass records; None: it records none."""
    is_indexed: bool
    """True if layers read keys of the KV cache themselves: an indexer's, which it keeps too, or all."""
    text_only: str | None
    """Reason why it computes no prompts with media, whatever the model; None if it can."""

    def refresh(self) -> bool:
        """Read the live weights after an update. False when the model's structure changed, so that a new Forward is needed."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of the weights that `refresh` copies; the others are read in place."""

    def capture_key(self) -> Hashable:
        """All that a captured step keeps of this forward pass: addresses of weights and tables, adapters, hooks."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of prefill and decode: no gradients, and evaluation mode where modules are called."""

    def reserve(self, positions: int) -> None:
        """Build position tables up to `positions` now, so that no step has to check their size."""

    def prefill(self, ids: Tensor, positions: Tensor, batch: PrefillBatch | AnswerBatch) -> None:
        """Prefill `ids` [A, L]; the batch stores their keys and values."""

    def decode(self, ids: Tensor, positions: Tensor, batch: DecodeBatch) -> Tensor:
        """[R, V] logits after one more token `ids` [R] a row."""


class ModulesForward:
    """The model's own forward with the engine's attention: any architecture, adapters included, weights read in place."""

    text_only: str | None = None

    def __init__(self, model: nn.Module, float32_head: bool = False, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of keys and values, the weights' own by default.

        Raises Unsupported, with the reason, for a model that it cannot run exactly.
        """
        self.float32_head = float32_head
        self.head: SamplerLinear | None = None
        """The output layer in float32, at one address for steps that were captured."""
        self._expect(model)
        register()
        self.model = unwrapped(model)
        self.context = context_limit(self.model) or UNLIMITED
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, dtype or parameter.dtype
        self.extra = {"logits_to_keep": 1} if accepts(self.model, "logits_to_keep") else {}
        self.takes_positions = accepts(self.model, "position_ids")
        self.routers: Routers | None = None
        """Routers whose choices every pass records; None: it records none."""
        self.states: StatePlaces | None = None
        self.is_indexed = bool(find_indexers(self.model))
        self.keyword = str(cache_keyword(self.model))
        self.in_kernels: StepKernels | None = None
        """Norms and rotations that compute in Triton's kernels; None: all modules compute as they are."""
        with torch.no_grad():
            self.layers = self._layers()
        self.steps: list[Any] = [] if self.states is None else state_steps(self.model)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)

    def _expect(self, model: nn.Module) -> None:
        """Raise Unsupported for a model whose configuration or class rules this forward pass out."""
        expect_supported(model)

    def record_experts(self) -> None:
        """Record the experts of every pass from now on. Raises Unsupported, with the reason, for a model without routers to record."""
        with evaluating(self.model):
            self.routers = find_routers(self.model, self._trial)
        if self.routers is None:
            raise Unsupported(f"{type(self.model).__name__} has no experts to choose from")

    def _watching(self) -> AbstractContextManager[None]:
        """Context of a pass, in which the routers' choices are recorded if the sampler records experts."""
        return nullcontext() if self.routers is None else self.routers.watching()

    def _trial(self, ids: Tensor) -> Any:
        with sampling(), float32_stream(self.model):
            return self.model(input_ids=ids, use_cache=False)

    def take_kernels(self) -> None:
        """Compute recognised norms and rotations in Triton's kernels from now on."""
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        with self.evaluating():
            self.in_kernels = StepKernels(self.model, lambda: self._trial(ids).logits)

    def refresh(self) -> bool:
        if self.head is not None:  # alone a copy; within `evaluating` too, where weights change between tokens
            with torch.no_grad():
                SamplerLinear.in_float32(self.model.get_output_embeddings(), self.head)
        return True

    @property
    def copied_bytes(self) -> int:
        """0: the weights are read in place."""
        return 0

    def capture_key(self) -> Hashable:
        head = () if self.head is None else self.head.tensors
        return addresses_of(head), tuple(map(_state_of, self.model.modules()))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with evaluating(self.model), decoding_threads(self.model):
            if not self.float32_head:
                yield
                return
            with head_in_float32(self.model, self.head) as self.head:
                yield

    def reserve(self, positions: int) -> None:
        """Nothing to do: the modules compute their own position tables."""

    def prefill(self, ids: Tensor, positions: Tensor, batch: PrefillBatch | AnswerBatch) -> None:
        self._run(ids, positions, batch)

    def decode(self, ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = self._run(ids[:, None], positions[:, None], batch).logits[:, -1]
        return logits

    def prefill_media(self, prompt: Prompt, batch: PrefillBatch | AnswerBatch) -> int:
        """Prefill one prompt with media except its last token, or the batch's last tokens of it. Returns the position of that token."""
        read = embed(self.model, prompt)
        (length,), end = batch.lengths, len(prompt.token_ids) - 1
        place = slice(end - length, end)
        inputs = {"inputs_embeds": read.embeds[None, place], "position_ids": read.positions[..., None, place]}
        with sampling(), our_attention(self.model), self._watching(), self._caching(length, batch) as caches:
            decoder_of(self.model)(**inputs, **caches, covey_batch=batch)
        return read.next_position - 1

    def _run(self, ids: Tensor, positions: Tensor, batch: Any) -> Any:
        with self._caching(ids.shape[1], batch) as caches:
            return self._call(ids, positions, batch, **caches)

    @contextmanager
    def _caching(self, length: int, batch: Any) -> Iterator[dict[str, Any]]:
        """Inputs of a pass of `length` new tokens a row for layers that keep more than keys and values."""
        if self.states is None:
            yield {"use_cache": False, **self._index_inputs(length, batch)}
            return
        with batch.states() as cache, in_place_steps(self.steps):
            yield {"use_cache": True, self.states.keyword: cache}

    def _index_inputs(self, length: int, batch: Any) -> dict[str, Any]:
        """Inputs of a pass of `length` new tokens a row for layers with an indexer: their cache, and the keys to choose from."""
        if not self.is_indexed:
            return {}
        cache = IndexCache(batch.index_keys)
        return {self.keyword: cache, "attention_mask": batch.visible_keys(length)}

    def _call(self, ids: Tensor, positions: Tensor, batch: Batch, **inputs: Any) -> Any:
        if self.takes_positions:
            inputs["position_ids"] = positions
        with (
            sampling(),
            float32_stream(self.model),
            our_attention(self.model),
            self._watching(),
            nullcontext() if self.in_kernels is None else self.in_kernels.computing(),
        ):  # tried before attention is replaced
            return self.model(input_ids=ids, covey_batch=batch, **inputs, **self.extra)

    def _find_states(self, record: _Record) -> StatePlaces:
        def run(cache: Any, ids: Tensor) -> None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            self._call(ids, positions, record, use_cache=True, **{str(cache_keyword(self.model)): cache})

        return find_states(self.model, run)

    def _layers(self) -> tuple[LayerShape, ...]:
        """Shape and window of each attention layer, from a recording forward pass, and the model's states."""
        windows = attention_windows(self.model)
        record = _Record(self.device)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        with evaluating(self.model):
            if has_states(self.model):
                self.states = self._find_states(record)
            else:
                self._run(ids, torch.arange(2, device=self.device)[None], record)
        if not record.shapes and self.states is None:
            raise Unsupported(f"{type(self.model).__name__} does not attend through transformers' attention interface")
        count = 1 + max(record.shapes, default=-1)
        if (self.states is None and len(record.shapes) < count) or record.dtypes - {self.dtype}:
            raise Unsupported(f"{type(self.model).__name__} does not number its attention layers, or mixes precisions")
        width = max((shape.width for shape in record.shapes.values()), default=0)
        shapes = [record.shapes.get(i, LayerShape(0, width)) for i in range(count)]  # no heads: a layer with a state
        shapes = [replace(shape, window=windows.get(i)) for i, shape in enumerate(shapes)]
        shapes = [replace(shape, window=shape.window_within(self.context)) for shape in shapes]
        if self.is_indexed:
            shapes += [record.indexes.get(i, LayerShape(0, 1, is_index=True)) for i in range(count)]
        return tuple(shapes)


def addresses_of(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    """One number a tensor; one in a library's own layout has no address, and is made anew by each `load`."""
    return tuple(id(x) if x.is_mkldnn else x.data_ptr() for x in tensors if x is not None)


def _state_of(module: nn.Module) -> Hashable:
    """Addresses of a module's own tensors, its hooks, and for an adapter what PEFT can switch."""
    attributes = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values(), vars(module).get("forward"))
    switches = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    adapter = [repr(getattr(module, name, None)) for name in switches] if hasattr(module, "active_adapters") else []
    return (
        id(module),
        addresses_of(x for x in attributes if isinstance(x, Tensor)),
        tuple(map(id, hooks)),
        tuple(adapter),
    )


@contextmanager
def head_in_float32(model: nn.Module, into: SamplerLinear | None = None) -> Iterator[SamplerLinear]:
    """Context in which the output layer computes in float32, without gradient; as a layer, its copy in the memory of `into`.

    Raises Unsupported if it is not a linear layer.
    """
    layer = unwrapped(model).get_output_embeddings()
    with torch.no_grad():
        product = SamplerLinear.in_float32(layer, into)

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return product(hidden.float())

    with computing(layer, forward):
        yield product


@contextmanager
def our_attention(model: Any) -> Iterator[None]:
    """Context in which the model attends through `attention_forward`."""
    config = model.config.get_text_config()  # the text model's, never a vision tower's
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@dataclass(eq=False)
class _Record:
    """Batch that records the shapes of the layers."""

    device: torch.device
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    indexes: dict[int, LayerShape] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
        if layer in self.shapes:
            raise Unsupported("a layer attends more than once")
        self.shapes[layer] = LayerShape(heads=key.shape[1], width=key.shape[3])
        self.dtypes.add(key.dtype)
        return causal(query, key, value, rule)

    def index_keys(self, layer: int, keys: Tensor) -> Tensor:
        self.indexes[layer] = LayerShape(1, keys.shape[2], is_index=True)
        return keys

    def visible_keys(self, length: int) -> Tensor:
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=self.device).tril_()


NewCache = Callable[[Forward, int], KVCache]
"""Factory of a KV cache from a forward pass and a context length."""


def plain_cache(forward: Forward, context: int, kernels: DecodeKernels | None = None) -> KVCache:
    return KVCache(forward.layers, forward.device, forward.dtype, context, kernels, forward.states)


def verify(
    forward: Forward, model: Any, tolerance: float | None = None, new_cache: NewCache = plain_cache, tokens: int = 6
) -> None:
    """Compare the engine's logits with the model's plain forward on random tokens.

    Two prompts of different lengths, the longer of `tokens` tokens, two rows each, three steps; the cache has columns for as many
    as the longer prompt. The measure is the median over the positions of
    `|a - b| / |b - mean(b)|`; a wrong forward pass gives about 1. Raises Unsupported when it is above `tolerance`,
    by default 1e-3 in float32 and 0.1 in less precise types.
    """
    if tolerance is None:
        tolerance = 1e-3 if forward.dtype == torch.float32 else 0.1
    error = float(logit_errors(forward, model, new_cache, tokens).median())
    if not error <= tolerance:
        raise Unsupported(
            f"the engine's logits differ from {type(unwrapped(model)).__name__}'s own by {error:.2g} of their spread"
        )


def logit_errors(forward: Forward, model: nn.Module, new_cache: NewCache = plain_cache, tokens: int = 6) -> Tensor:
    """[positions] the measure of `verify`; 0 for a model whose logits are not finite, which sampling says."""
    inner = unwrapped(model)
    limit = context_limit(inner) or UNLIMITED
    if limit < 4:
        raise Unsupported(f"a context of {limit} tokens is too short to check the engine in")
    generator = torch.Generator().manual_seed(0)
    lengths, steps = (min(tokens, limit - 3), min(3, limit - 3)), 3
    rows = [torch.randint(0, forward.vocab_size, (length + steps,), generator=generator) for length in lengths]
    with evaluating(inner), choosing_few(inner):
        mine = _engine_logits(forward, rows, lengths, new_cache(forward, limit))
        theirs = [inner(input_ids=row[None].to(forward.device)).logits[0, -steps:] for row in rows]
    errors = []
    for a, b in zip(mine, theirs, strict=True):
        b = b.float()
        if not bool(b.isfinite().all()):
            return torch.zeros(1)
        spread = (b - b.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
        errors.append((a.float() - b).norm(dim=-1) / spread)
    return torch.cat(errors)


def _engine_logits(forward: Forward, rows: Sequence[Tensor], lengths: Sequence[int], cache: KVCache) -> list[Tensor]:
    """[steps, V] logits of each sequence's last tokens, two rows a prompt, both checked by averaging."""
    forward.reserve(max(map(len, rows)))
    slots = cache.add_prompts(lengths)
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for p, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[p, :length] = row[:length]
    positions = torch.arange(max(lengths)).expand(len(rows), -1)
    forward.prefill(ids.to(forward.device), positions.to(forward.device), PrefillBatch(cache, slots))
    cache.add_rows(2 * len(rows))
    cache.begin_rows([0, 1, 0, 1])
    cache.set_row_owners([0, 1, 0, 1])
    cache.reserve(max(lengths))
    out = []
    for step in range(len(rows[0]) - lengths[0]):
        inputs = torch.zeros(2, cache.num_computed, dtype=torch.int64)  # padding rows too, as in every step
        inputs[0, :4] = torch.stack([row[length + step] for row, length in zip(rows, lengths, strict=True)] * 2)
        inputs[1, :4] = torch.tensor([length + step for length in lengths] * 2)
        cache.begin_step()
        tokens, at = inputs.to(forward.device)
        out.append(forward.decode(tokens, at, DecodeBatch(cache))[:4])
        cache.end_step()
    stacked = torch.stack(out, 1).float()  # [4, steps, V]
    return [(stacked[p] + stacked[p + 2]) / 2 for p in range(len(rows))]
