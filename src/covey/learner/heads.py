"""The LM head of a model: how it is found, and a check that decoder and head, called separately, give the model's logits."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.data import vocabulary_size
from covey.errors import RAW_ERRORS, ModelError, first_line
from covey.learner.logprobs import Head
from covey.learner.packing import Row
from covey.models import decoder_of, unwrapped
from covey.models.modalities import banned_ids
from covey.process.memory import is_out_of_memory
from covey.process.world import autocast
from covey.types import Completion, Prompt

logger = logging.getLogger(__name__)


def short_row(model: Any, count: int) -> Row:
    """A test row of five prompt tokens and `count` completion tokens, with the same prompt for every count."""
    vocabulary = vocabulary_size(unwrapped(model))
    ids = (torch.arange(5 + count) * 7919 + 11 * count * (torch.arange(5 + count) >= 5)) % vocabulary
    return Row(
        prompt=Prompt(uid="try", token_ids=tuple(ids[:5].tolist())),
        completion=Completion(token_ids=ids[5:], text="", finish="stop"),
        group=0,
        advantage=torch.zeros(()),
        counts=torch.ones(count, dtype=torch.bool),
    )


def find_head(model: Any) -> Head:
    """The head of a transformers causal LM, with the scaling in its configuration."""
    inner = unwrapped(model)
    config = inner.config.get_text_config()
    multiply = getattr(config, "logit_scale", None) or 1.0
    multiply = multiply / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        project=inner.get_output_embeddings(),
        multiply=float(multiply),
        softcap=getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None),
        banned=banned_ids(model),
    )


def _hidden_of(decoder: Any, ids: Tensor) -> Tensor | None:
    """[1, T, D] hidden states; None where the module is no decoder of token ids."""
    try:
        hidden = getattr(decoder(input_ids=ids, use_cache=False), "last_hidden_state", None)
    except RAW_ERRORS as error:
        if is_out_of_memory(error):
            raise
        return None
    return hidden if isinstance(hidden, Tensor) else None


@torch.no_grad()
def splits_exactly(model: Any, device: torch.device) -> bool:
    """True if decoder and head, called separately, give the model's own logits on four tokens."""
    if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
        return False  # virtual tokens are added outside the decoder
    inner = unwrapped(model)
    if inner.get_output_embeddings() is None or not hasattr(inner, "get_decoder"):
        return False
    vocabulary = vocabulary_size(inner)
    ids = (torch.arange(4, device=device) * 7919 % vocabulary)[None]
    was_training = model.training
    model.eval()
    try:
        whole = model(input_ids=ids, use_cache=False).logits.float()
        hidden = _hidden_of(decoder_of(model), ids)
        if hidden is None:
            return False
        if hidden.shape[-1] != getattr(inner.get_output_embeddings(), "in_features", hidden.shape[-1]):
            return False  # a projection lies between them
        hidden = hidden.to(inner.get_output_embeddings().weight.dtype)  # some keep a wider stream
        apart = replace(find_head(model), banned=()).logits(hidden[0]).float()
    finally:
        model.train(was_training)
    slack = 5e-2 if hidden.dtype in (torch.bfloat16, torch.float16) else 1e-4  # soft-capping rounds differently in bf16
    return apart.shape == whole[0].shape and torch.allclose(apart, whole[0], atol=slack, rtol=slack)


def splits_or_warns(model: Any, device: torch.device, compute_dtype: torch.dtype | None) -> bool:
    """`splits_exactly`, with a warning where it is False. Raises ModelError for weights of types that do not compute together.

    Weights of several types are tried under autocast to `compute_dtype`, as the learner computes with them.
    """
    dtypes = sorted({str(weight.dtype) for weight in model.parameters() if weight.is_floating_point()})
    try:
        with autocast(device, compute_dtype if len(dtypes) > 1 else None):
            is_split = splits_exactly(model, device)
    except RuntimeError as error:
        if len(dtypes) < 2 or is_out_of_memory(error):
            raise
        mixed = f"The model has weights of {' and '.join(dtypes)}, which do not compute together"
        raise ModelError(f"{mixed} ({first_line(error)}). Set bf16=True, or cast the model to one type.") from error
    if not is_split:
        logger.warning(
            "%s cannot be split into decoder and head exactly; whole logits are built at once, which takes more memory.",
            type(model).__name__,
        )
    return is_split
