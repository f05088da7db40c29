"""Trials before a policy computes: its head by itself, and packed rows compared with single rows; choice of their attention kernel."""

import logging
import sys
from collections.abc import Set
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from covey.data import vocabulary_size
from covey.errors import RAW_ERRORS, ConfigError, ModelError, first_line
from covey.kernels import (
    AttentionHeads,
    SharedPromptAttention,
    attention_windows,
    choices,
    choosing_few,
    has_windows,
    other_layers,
    reason_against_choices,
    sampling,
)
from covey.learner import shared_prompt
from covey.learner.logprobs import Head
from covey.learner.packing import Row, pad_rows, unscored_row
from covey.learner.shared_prompt import share_rows
from covey.learner.state_layers import attention_layers, state_layers, whole_row_layers
from covey.models import decoder_of, unwrapped
from covey.models.modalities import banned_ids, reason_against
from covey.process.memory import is_out_of_memory
from covey.process.sharding import compute_device
from covey.process.world import autocast
from covey.types import Completion, Prompt

logger = logging.getLogger(__name__)


def short_row(model: nn.Module, count: int) -> Row:
    """A test row of five prompt tokens and `count` completion tokens, with the same prompt for every count."""
    vocabulary = vocabulary_size(unwrapped(model))
    ids = (torch.arange(5 + count) * 7919 + 11 * count * (torch.arange(5 + count) >= 5)) % vocabulary
    prompt = Prompt(uid="try", token_ids=tuple(ids[:5].tolist()))
    return unscored_row(prompt, Completion(token_ids=ids[5:], text="", finish="stop"))


def find_head(model: nn.Module) -> Head:
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


def _hidden_of(decoder: nn.Module, ids: Tensor) -> Tensor | None:
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


def splits_or_warns(model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> bool:
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


def shares_or_warns(policy: Any, *, splits: bool) -> bool:
    """True if prompts can be shared, by the configuration and by a trial on two short completions; with a warning where layers read whole
    rows. Raises ConfigError where a kernel for shared prompts was requested; `splits`: decoder and head can be called apart.
    """
    with choosing_few(policy.model):
        against = reason_against_sharing(policy.model) if splits else "its head cannot be called apart"
        against = against or try_sharing(policy)
    if against is not None and policy.shared_attention != "auto":
        raise ConfigError(
            f"shared_attention={policy.shared_attention!r}, but {type(unwrapped(policy.model)).__name__} computes each prompt "
            f"once a completion: {against}; leave it out."
        )
    if (reason := against or whole_row_layers(policy.state_layers)) is not None:
        logger.warning("%s computes each prompt once a completion: %s.", type(unwrapped(policy.model)).__name__, reason)
    return against is None


def embeds_or_warns(model: nn.Module, prompt: Prompt) -> bool:
    """True if the language model takes prompts with media as embeddings alone, tried on this prompt; with a warning where it does not."""
    reason = reason_against(model, prompt)
    if reason is not None:
        logger.warning("%s computes media and prompts once a completion: %s.", type(unwrapped(model)).__name__, reason)
    return reason is None


def try_sharing(policy: Any) -> str | None:
    """Compare packed rows with single rows under the model's own attention. Returns a reason if they differ.

    Attention layers that packed rows cannot pass by Covey's attention read whole rows, if that gives the same.
    """
    reason = _try(policy, is_whole=False)
    if reason is None or has_windows(policy.model) or reason_against_choices(policy.model):
        return reason
    if _try(policy, is_whole=True) is None:
        return None
    policy.state_layers = []
    return reason


@torch.no_grad()
def _try(policy: Any, *, is_whole: bool) -> str | None:
    """Reason against packed rows; `is_whole`: the attention layers read whole rows."""
    rows = [short_row(policy.model, count) for count in (3, 2)]
    was_training = policy.model.training
    is_exact = policy.compute_dtype is None and next(policy.model.parameters()).dtype == torch.float32
    shared_prompt.install()
    policy.model.eval()
    try:
        policy.windows = {} if is_whole else attention_windows(unwrapped(policy.model))
        policy.state_layers = policy.within(lambda: state_layers(policy.model))
        if is_whole:
            whole = policy.within(lambda: attention_layers(policy.model))
            inside = {part for layer in whole for part in layer.module.modules()}
            policy.state_layers = [layer for layer in policy.state_layers if layer.module not in inside] + whole
        packed = share_rows(rows, policy.device, is_whole=policy.auxiliary_coefficient != 0)
        with sampling():  # by the modules: formulas would be compiled for two rows, which no later pass has
            apart = policy.measure_packed(pad_rows(rows, policy.pad_id, policy.device), True)
            together = policy.measure_packed(replace(packed, heads=policy.heads), True)
        gap = (apart.logp - together.logp).abs().max().item()
        if apart.balance is not None and together.balance is not None:
            gap = max(gap, (apart.balance.loss() - together.balance.loss()).abs().item())
        is_same = gap < (1e-3 if is_exact else 0.2)
        reason = None if is_same else f"its log-probabilities would differ by {gap:.1g}"
    except (*RAW_ERRORS, StopIteration) as error:
        is_ours = isinstance(error, ValueError) and str(error).startswith("its ")
        reason = str(error) if is_ours else f"its forward takes no packed rows ({type(error).__name__})"
    finally:
        policy.model.train(was_training)
        policy.release()
    if reason is None:
        policy.kernel = choose_kernel(policy.model, policy.shared_attention, policy.heads)
    return reason


def choose_kernel(model: nn.Module, choice: str, heads: Set[AttentionHeads]) -> str:
    """Attention kernel for layers of these shapes. Raises ConfigError if FlexAttention was requested and cannot run."""
    if choice == "sdpa" or (choice == "auto" and compute_device(next(model.parameters())).type == "cpu"):
        return "sdpa" if choice == "sdpa" else "own"
    dropped = "its attention drops weights at random (disable_dropout=True ends that)" if drops(model) else None
    unseen = None if heads else "its layers cannot be looked at from here"
    reason = dropped or unseen or next(filter(None, map(SharedPromptAttention.flex_unavailable_reason, heads)), None)
    if reason is None:
        return "flex"
    if choice == "flex":
        raise ConfigError(f"shared_attention='flex', but FlexAttention is not used: {reason}; leave it out.")
    _tell_once(f"Shared prompts are computed through SDPA by part, not FlexAttention: {reason}.")
    return "sdpa"


@lru_cache
def _tell_once(message: str) -> None:
    logger.warning("%s", message)


def drops(model: nn.Module) -> bool:
    """True if the model has attention dropout in training mode."""
    names = ("attention_dropout", "attn_dropout")
    rates = [getattr(module, name, 0.0) for module in model.modules() for name in names]
    return any((rate.p if isinstance(rate, torch.nn.Dropout) else rate) for rate in rates if rate is not None)


def reason_against_sharing(model: Any) -> str | None:
    """Reason in the model's configuration against sharing prompts; None if there is none.

    The attention implementation of the loaded model does not matter: packed rows use `shared_prompt.attention`, and a trial compares the two.
    """
    config = model.config.get_text_config()
    if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
        return "prompt-learning adapters put tokens of their own before the prompt"
    source = sys.modules[type(unwrapped(model)).__module__]
    if getattr(config, "alibi", True) and any("alibi" in name.lower() for name in vars(source)):
        return "its attention is biased by the distance of tokens (ALiBi)"
    if (others := other_layers(model)) and not choices(unwrapped(model)):
        return f"it has {', '.join(sorted(others))} layers"
    return None
