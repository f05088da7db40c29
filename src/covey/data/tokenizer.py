"""What training needs of a tokenizer: a padding token, and every id that ends a text."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from covey.errors import ModelError

logger = logging.getLogger(__name__)


def prepare_tokenizer(tokenizer: Any, model: Any = None) -> Any:
    """The same tokenizer (of a processor: its tokenizer), padding on the left, with a padding token.

    A missing padding token becomes EOS, with a warning. Raises ModelError when neither the tokenizer nor `model` names an
    EOS, because completions could then end only at the length limit, or when a token id is beyond the model's embeddings.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id"):
        raise ModelError(f"processing_class is a {type(tokenizer).__name__}; pass a transformers tokenizer.")
    ends = eos_ids(model, tokenizer)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token_id = ends[0]
    if tokenizer.pad_token_id is None:
        _warn_once(
            f"The tokenizer has no padding token; its end-of-text token {tokenizer.eos_token!r} is used for padding."
        )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"  # as TRL's; completions must follow their prompt without a gap
    _check_vocabulary(tokenizer, model)
    return tokenizer


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's EOS first, then those of the generation config and the config.

    Raises ModelError when there is none.
    """
    named: list[Any] = [getattr(tokenizer, "eos_token_id", None)]
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        named += list(ids) if isinstance(ids, list | tuple) else [ids]
    found = tuple(dict.fromkeys(int(one) for one in named if one is not None))
    if not found:
        raise ModelError(
            "Neither the tokenizer nor the model's generation config names an end-of-text token, so no completion could ever end; "
            "set tokenizer.eos_token (such as '<|im_end|>') before training."
        )
    return found


def _check_vocabulary(tokenizer: Any, model: Any) -> None:
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embeddings, "num_embeddings", None)
    if rows is None:
        return
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= rows:
        raise ModelError(
            f"The tokenizer has token ids up to {highest}, but the model has only {rows} embeddings; "
            f"use the model's own tokenizer, or call model.resize_token_embeddings({highest + 1})."
        )


@lru_cache(maxsize=256)
def _warn_once(said: str) -> None:
    logger.warning(said)
