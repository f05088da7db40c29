"""The policy: a causal language model with log-probabilities and entropies of completion tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from covey.errors import ConfigError
from covey.kernels import AttentionHeads, HalfWeights, Window
from covey.learner import context_parallel, shared_prompt
from covey.learner.expert_choices import Balance, Routing, balanced, balanced_padded
from covey.learner.logprobs import Head, score_tokens
from covey.learner.measured import Measured
from covey.learner.out_of_memory import offloaded
from covey.learner.packing import PaddedRows, Row, pad_rows, pick_rows
from covey.learner.shared_prompt import SharedRows, share_rows
from covey.learner.shared_states import StateLayer
from covey.learner.signals import Signal
from covey.learner.trials import embeds_or_warns, find_head, shares_or_warns, splits_or_warns
from covey.models import decoder_of, encoder_of, float32_stream, reads_media, unwrapped
from covey.models.modalities import banned_ids, media_inputs, placed_inputs
from covey.process.context import ContextGroup
from covey.process.sharding import Shards, compute_device, depending
from covey.process.world import autocast
from covey.types import Prompt

T = TypeVar("T")


class Teaching(Protocol):
    """Other models evaluated at the policy's positions: `rows`, packed as `packed`."""

    def at(self, packed: PaddedRows | SharedRows, rows: Sequence[Row]) -> Signal: ...


class OtherModel(Teaching, Protocol):
    """A model that shares prompts where the policy does."""

    @property
    def policy(self) -> Policy: ...


@dataclass(eq=False)
class Policy:
    """A causal LM (PEFT included) as the learner and the reference use it."""

    model: nn.Module
    pad_id: int
    temperature: float = 1.0
    """Temperature of the log-probabilities, that of sampling."""
    compute_dtype: torch.dtype | None = None
    logits_chunk: int | None = None
    """Tokens per chunk of logits; None chooses by device and vocabulary."""
    auxiliary_coefficient: float = 0.0
    offloads: bool = False
    """Offload saved activations to host memory between forward and backward."""
    shared_attention: str = "auto"
    """Kernel for the attention of shared prompts: auto (FlexAttention on CUDA where it works), flex, sdpa."""
    float32_head: bool = False
    """Compute the output layer in float32, independent of the other layers' precision."""
    replays_experts: bool = False
    """Take the sampler's experts, where completions have them (routing replay)."""
    packs_always: bool = False
    """Pack rows without padding even if no two share a prompt."""
    half: HalfWeights | None = None
    """A 16-bit copy of float32 weights, made once a step."""
    shards: Shards | None = None
    """FSDP shards of the model; every process must then run the same number of forward passes."""
    context: ContextGroup | None = None
    """Processes that compute each row together; those of one group must run the same passes."""
    embeds_media: bool | None = None
    """True if the language model takes prompts with media as embeddings alone; None: the first of these is tried."""
    _head: Head | None = field(default=None, init=False)
    _is_split: bool | None = field(default=None, init=False)
    _is_shared: bool | None = field(default=None, init=False)
    kernel: str = field(default="own", init=False)
    """Attention kernel of packed rows."""
    windows: dict[int, Window | None] = field(default_factory=dict, init=False)
    """Attention window of each layer, for packed rows."""
    state_layers: list[StateLayer] = field(default_factory=list, init=False)
    """Layers with a state, for packed rows."""
    routing: Routing = field(default_factory=Routing, init=False)
    heads: set[AttentionHeads] = field(default_factory=set, init=False)
    """Shapes of the attention layers, once prompts are shared."""

    @property
    def device(self) -> torch.device:
        return compute_device(next(self.model.parameters()))

    @property
    def is_checkpointing(self) -> bool:
        """True if activations are recomputed in the backward pass."""
        inner = unwrapped(self.model)
        name = "is_activation_checkpointing"  # "gradient" before transformers 5.23
        return bool(getattr(inner, name if hasattr(type(inner), name) else "is_gradient_checkpointing", False))

    def output_layer(self) -> nn.Module:
        """The layer that turns hidden states into logits."""
        layer = unwrapped(self.model).get_output_embeddings()
        assert isinstance(layer, nn.Module)
        return layer

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context of every forward pass of the model: its precision and its kernels."""
        with float32_stream(self.model), autocast(self.device, self.compute_dtype):
            yield

    @property
    def is_collective(self) -> bool:
        """True if a pass is one of several processes, which all must make together."""
        return self.shards is not None or self.context is not None

    def weights_of_a_step(self) -> AbstractContextManager[None]:
        """Context of passes between which no weight changes: weights are cast once, at its beginning."""
        return nullcontext() if self.half is None else self.half.fresh()

    def sharded(self, shard: Callable[[nn.Module], Shards]) -> Policy:
        """The policy with its model sharded in place, after a trial forward pass on every process."""
        self.routing.find(self)
        split = replace(self, shards=shard(self.model))
        split.routing = self.routing
        return split.tried()

    def tried(self) -> Policy:
        """This policy; of a sharded model after its trial passes, which every process makes together."""
        if self.shards is not None:
            self._splits()
            self.shares_texts()
            self.embeds_media = bool(self.embeds_media)  # only processes with media would make that trial
        return self

    def within(self, work: Callable[[], T]) -> T:
        """Result of `work()`, with sharded weights gathered."""
        if self.shards is not None:
            return self.shards.run(work)
        with nullcontext() if self.context is None else self.context.passes():
            return work()

    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def measure(
        self,
        rows: Sequence[Row],
        *,
        entropy: bool = False,
        against: OtherModel | None = None,
        teacher: Teaching | None = None,
    ) -> Measured:
        """Forward `rows` once. Gradients flow when they are enabled. Rows of one group share their prompt's computation.

        With `against` or `teacher`, the distance to that model's distributions is computed too.
        """
        has_siblings = self.packs_always or len({row.sharing for row in rows}) < len(rows)
        seen = next((row.placed for row in rows if row.placed.media is not None), None)
        computing = (self,) if against is None else (self, against.policy)
        for policy in computing:
            policy._splits()  # its trial is made here, where no router is watched
        if seen is not None:
            context_parallel.expect_media(self, seen)
        packed: PaddedRows | SharedRows
        if has_siblings and all(p.shares_texts() and (seen is None or p.embeds(seen)) for p in computing):
            packed = share_rows(rows, self.device, self.kernel, is_whole=self.auxiliary_coefficient != 0)
            packed = packed if self.context is None else context_parallel.split(packed, self.context)
        else:
            packed = pad_rows(rows, self.pad_id, self.device)
        # before the policy's own pass, whose attention may be recomputed in the backward
        signals = [None if other is None else other.at(packed, rows) for other in (against, teacher)]
        with self.routing.watching(self, packed, rows):
            measured = self.measure_packed(packed, entropy, *signals)
        return replace(measured, routing=self.routing.metrics(packed))

    def measure_packed(
        self,
        rows: PaddedRows | SharedRows,
        entropy: bool,
        against: Signal | None = None,
        teacher: Signal | None = None,
    ) -> Measured:
        """`measure` of rows that are packed."""
        picked, logp, entropies, balance, (against, teacher) = self.within(
            lambda: self._scored(rows, entropy, (against, teacher))
        )
        if not torch.is_grad_enabled():  # otherwise the backward may still recompute activations
            self.release()
        return Measured(
            logp=rows.spread(logp),
            entropy=rows.spread(entropies),
            hidden=picked,
            rows=rows,
            balance=balance,
            distance=None if against is None else against.spread(rows)["teacher_distance"],
            **({} if teacher is None else teacher.spread(rows)),
        )

    def _scored(
        self, rows: PaddedRows | SharedRows, entropy: bool, signals: Sequence[Signal | None]
    ) -> tuple[Tensor, Tensor, Tensor, Balance | None, list[Signal | None]]:
        """Hidden states [M, D]; log-probabilities and entropies [M]; the experts' loads; distances to other models."""
        with self.autocast():
            with offloaded(pins=True) if self.offloads else nullcontext():
                hidden, balance = self.hidden(rows)
            if self.shards is not None and reads_media(self.model):
                hidden = depending(hidden, self.parameters())
            picked = pick_rows(hidden, rows.source)  # [M, D], or [M, V] if decoder and head cannot be separated
            head, scale, chunk = self.head(), self.temperature, self.logits_chunk
            logp, entropies = score_tokens(picked, rows.target, head, temperature=scale, entropy=entropy, chunk=chunk)
            measured = [x and x.measured(picked, head, rows.target, temperature=scale, chunk=chunk) for x in signals]
        return picked, logp, entropies, balance, measured

    def hidden(self, rows: PaddedRows | SharedRows) -> tuple[Tensor, Balance | None]:
        """[N, S, D] hidden states, or [N, S, V] logits if decoder and head cannot be called separately."""
        if isinstance(rows, SharedRows):
            rows = replace(rows, windows=self.windows)
            inputs = shared_prompt.forward_kwargs(rows, self.model)
            shared_prompt.switch(unwrapped(self.model))
            for layer in self.state_layers:
                layer.switch()
            if self.auxiliary_coefficient:
                return balanced(self.model, rows, inputs)
            return decoder_of(self.model)(use_cache=False, **inputs).last_hidden_state, None
        self.release(routers=False)
        inputs, decoder = self._inputs(rows)
        if self.auxiliary_coefficient:
            return balanced_padded(self.model, rows, inputs, splits=self._splits())
        if self._splits():
            return decoder(use_cache=False, **inputs).last_hidden_state, None
        return self.model(use_cache=False, **inputs).logits, None

    def _inputs(self, rows: PaddedRows) -> tuple[dict[str, Any], nn.Module]:
        """Model inputs for padded rows, and the submodule that computes hidden states from them."""
        if not rows.placed:
            return {"input_ids": rows.input_ids}, decoder_of(self.model)
        if self.embeds(rows.placed[0].prompt):
            return placed_inputs(self.model, rows.input_ids, None, rows.placed), decoder_of(self.model)
        width = rows.input_ids.shape[1]
        media = media_inputs(self.model, rows.prompts, width, [0] * len(rows.prompts))
        inputs = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, **media}
        return inputs, encoder_of(self.model)

    def embeds(self, prompt: Prompt) -> bool:
        """True if the language model takes prompts with media as embeddings alone; tried once, on this prompt."""
        if self.embeds_media is None:
            self.embeds_media = embeds_or_warns(self.model, prompt)
        return self.embeds_media

    def release(self, *, routers: bool = True) -> None:
        """Leave attention, layers with a state, and the routers as the model was loaded; the next pass switches them again."""
        shared_prompt.release(unwrapped(self.model))
        for layer in self.state_layers:
            layer.release()
        if routers:
            self.routing.release()

    def expect_float32_head(self) -> None:
        """Raise ConfigError if the output layer cannot be called separately, hence not in float32."""
        if not self._splits():
            raise ConfigError(
                f"cast_lm_head_to_fp32=True, but the output layer of {type(unwrapped(self.model)).__name__} cannot be called apart; "
                "load the model in float32 instead."
            )

    def shares_prompts(self) -> bool:
        """True if the completions of a group share the computation of their prompt."""
        return self.embeds_media is not False and self.shares_texts()

    def shares_texts(self) -> bool:
        """True if prompts can be shared, by the configuration and by a trial on two short completions, made once."""
        if self._is_shared is None:
            self._is_shared = shares_or_warns(self, splits=self._splits())
        return self._is_shared

    def head(self) -> Head:
        """The head; without a projection for a model that returns logits only."""
        if not self._splits():
            return Head(project=lambda logits: logits, banned=banned_ids(self.model))
        if self._head is None:
            self._head = replace(find_head(self.model), in_float32=self.float32_head)
        return self._head

    def _splits(self) -> bool:
        """True if decoder and head, called separately, give the model's own logits on four tokens; tried once."""
        if self._is_split is None:
            self._is_split = self.within(lambda: splits_or_warns(self.model, self.device, self.compute_dtype))
        return self._is_split
