"""A causal language model behind one question: how likely is each completion token, and how open was the choice?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from covey.learner.logprobs import Head, score_tokens
from covey.learner.packing import PaddedRows, Row, pad_rows
from covey.world import autocast

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Measured:
    """What one forward pass says of N completions."""

    logp: Tensor
    """[N, T]"""
    entropy: Tensor
    """[N, T], zeros unless asked for."""
    hidden: Tensor
    """[M, D], the hidden states that predicted the completion tokens, for value heads."""
    rows: PaddedRows
    auxiliary_loss: Tensor | None = None
    """The router's load-balancing loss of a mixture-of-experts model."""


@dataclass(eq=False)
class Policy:
    """`model` (PEFT included) as the learner and the reference use it."""

    model: Any
    pad_id: int
    temperature: float = 1.0
    """Log-probabilities are those of the tempered distribution that completions are drawn from."""
    compute_dtype: torch.dtype | None = None
    logits_chunk: int = 1024
    auxiliary_coefficient: float = 0.0
    _head: Head | None = field(default=None, init=False)
    _is_split: bool | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.device, self.compute_dtype)

    def parameters(self) -> list[nn.Parameter]:
        """The trainable ones, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def measure(self, rows: Sequence[Row], *, entropy: bool = False) -> Measured:
        """Forward `rows` once. Gradients flow when they are enabled."""
        padded = pad_rows(rows, self.pad_id, self.device)
        with self.autocast():
            hidden, auxiliary = self._hidden(padded)
            if self._splits():
                picked = hidden.flatten(0, 1)[padded.source]  # [M, D]
                logp, entropies = score_tokens(
                    picked,
                    padded.target,
                    self._head_of(),
                    temperature=self.temperature,
                    entropy=entropy,
                    chunk=self.logits_chunk,
                )
            else:
                picked = hidden.flatten(0, 1)[padded.source]  # [M, V], logits already
                as_they_are = Head(project=lambda logits: logits)
                logp, entropies = score_tokens(
                    picked,
                    padded.target,
                    as_they_are,
                    temperature=self.temperature,
                    entropy=entropy,
                    chunk=self.logits_chunk,
                )
        return Measured(
            logp=padded.spread(logp),
            entropy=padded.spread(entropies),
            hidden=picked,
            rows=padded,
            auxiliary_loss=auxiliary,
        )

    def _hidden(self, padded: PaddedRows) -> tuple[Tensor, Tensor | None]:
        """[N, S, D] hidden states, or [N, S, V] logits for a model that cannot be split at its head."""
        extra: dict[str, Any] = {"use_cache": False}
        if self.auxiliary_coefficient:
            # padding would be routed too and would change the balance that the loss measures
            extra |= {"attention_mask": padded.attention_mask, "output_router_logits": True}
            output = self.model(input_ids=padded.input_ids, output_hidden_states=self._splits(), **extra)
            return (output.hidden_states[-1] if self._splits() else output.logits), output.aux_loss
        if self._splits():
            return _decoder(self.model)(input_ids=padded.input_ids, **extra).last_hidden_state, None
        return self.model(input_ids=padded.input_ids, **extra).logits, None

    def _head_of(self) -> Head:
        if self._head is None:
            self._head = find_head(self.model)
        assert self._head is not None
        return self._head

    def _splits(self) -> bool:
        """Whether decoder and head, called apart, give the model's own logits: tried once, on four tokens."""
        if self._is_split is None:
            self._is_split = _splits_exactly(self.model, self.device)
            if not self._is_split:
                name = type(self.model).__name__
                logger.warning(
                    "%s cannot be split into decoder and head exactly; whole logits are built at once, which takes more memory.",
                    name,
                )
        return self._is_split


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _decoder(model: Any) -> Any:
    return _inner(model).get_decoder()


def find_head(model: Any) -> Head:
    """The head of a transformers causal LM, with the scaling its configuration names."""
    inner = _inner(model)
    config = inner.config.get_text_config()
    multiply = getattr(config, "logit_scale", None) or 1.0
    multiply = multiply / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        project=inner.get_output_embeddings(),
        multiply=float(multiply),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


@torch.no_grad()
def _splits_exactly(model: Any, device: torch.device) -> bool:
    if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
        return False  # virtual tokens are added outside the decoder
    inner = _inner(model)
    if inner.get_output_embeddings() is None or not hasattr(inner, "get_decoder"):
        return False
    vocabulary = inner.get_input_embeddings().num_embeddings
    ids = (torch.arange(4, device=device) * 7919 % vocabulary)[None]
    was_training = model.training
    model.eval()
    try:
        whole = model(input_ids=ids, use_cache=False).logits.float()
        hidden = _decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
        apart = find_head(model).logits(hidden[0])
    finally:
        model.train(was_training)
    slack = 1e-4 if hidden.dtype == torch.float32 else 5e-2  # soft-capping rounds differently in bf16
    return apart.shape == whole[0].shape and torch.allclose(apart, whole[0], atol=slack, rtol=slack)
