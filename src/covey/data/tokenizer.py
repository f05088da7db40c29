"""Tokenizer set-up for training: a padding token, and every id that ends a text."""

from collections.abc import Sequence
from typing import Any

from covey.data.rendering import say_once
from covey.errors import DataError, ModelError, TokenizerTypeError


def prepare_tokenizer(tokenizer: Any, model: Any = None) -> Any:
    """The same tokenizer (of a processor: its tokenizer), padding on the left, with a padding token.

    A missing padding token becomes EOS, with a warning. Raises ModelError when neither the tokenizer nor `model` names an
    EOS, because completions could then end only at the length limit, or when an id that training uses (padding, EOS, the chat
    template's own tokens) is beyond the model's embeddings; other ids beyond them are logged once.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id"):
        raise TokenizerTypeError(f"processing_class is a {type(tokenizer).__name__}; pass a transformers tokenizer.")
    expect_words(tokenizer)
    ends = eos_ids(model, tokenizer)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token_id = ends[0]
    if tokenizer.pad_token_id is None:
        say_once(
            f"The tokenizer has no padding token; its end-of-text token {tokenizer.eos_token!r} is used for padding."
        )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"  # as TRL's; completions must follow their prompt without a gap
    _check_vocabulary(tokenizer, model)
    return tokenizer


def expect_words(tokenizer: Any) -> None:
    """Raise ModelError for the tokenizer without a vocabulary that transformers makes where a folder has a model alone."""
    controls = set(getattr(tokenizer, "all_special_tokens", ()))
    # its length counts a token twice at most, as word and as added; a whole vocabulary takes 0.1 s to copy
    if len(tokenizer) <= 2 * len(controls) and set(tokenizer.get_vocab()) <= controls:
        raise ModelError(
            f"The tokenizer at {tokenizer.name_or_path!r} has no words but control tokens, for no file there holds its vocabulary; copy the model's "
            "tokenizer.json and tokenizer_config.json there."
        )


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's EOS first, then those of the generation config and the config.

    Raises ModelError when there is none.
    """
    named: list[Any] = [getattr(tokenizer, "eos_token_id", None)]
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        named += list(ids) if isinstance(ids, list | tuple) else [ids]
    end_ids = tuple(dict.fromkeys(int(token_id) for token_id in named if token_id is not None))
    if not end_ids:
        raise ModelError(
            "Neither the tokenizer nor the model's generation config names an end-of-text token, so no completion could ever end; "
            "set tokenizer.eos_token (such as '<|im_end|>') before training."
        )
    return end_ids


def _check_vocabulary(tokenizer: Any, model: Any) -> None:
    rows = num_embeddings(model)
    if rows is None:
        return
    beyond = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items() if token_id >= rows)
    if not beyond:
        return
    highest = beyond[-1][0]
    used = [("padding token", tokenizer.pad_token_id), ("end-of-text token", tokenizer.eos_token_id)]
    used += [("chat template's token", token_id) for token_id in _template_ids(tokenizer)]
    for what, token_id in used:
        if token_id is not None and token_id >= rows:
            raise ModelError(
                f"The tokenizer's {what} {tokenizer.convert_ids_to_tokens(token_id)!r} has id {token_id}, but the model has only {rows} "
                f"embeddings; use the model's own tokenizer, or call model.resize_token_embeddings({highest + 1})."
            )
    say_once(
        f"The tokenizer has ids up to {highest}, but the model has only {rows} embeddings; a prompt that holds "
        f"{beyond[0][1]!r} or another of the {len(beyond)} ids beyond them is refused."
    )


def num_embeddings(model: Any) -> int | None:
    """Token ids that the model has embeddings for, under an adapter too; None where it does not say."""
    layer: Any = getattr(model, "get_input_embeddings", lambda: None)()
    layer = layer.get_base_layer() if hasattr(layer, "get_base_layer") else getattr(layer, "original_module", layer)
    rows = getattr(layer, "num_embeddings", None)
    return len(layer.weight) if rows is None and hasattr(layer, "weight") else rows


def vocabulary_size(model: Any) -> int:
    """Token ids that the model reads: the rows of its embeddings, or the vocabulary of its config."""
    return num_embeddings(model) or int(model.config.get_text_config().vocab_size)


def expect_ids_below(token_ids: Sequence[int], limit: int | None, where: str) -> None:
    """Raise DataError when one of `token_ids` is negative, or not below `limit`, the model's embeddings; `where` names the prompt."""
    highest = max(token_ids, default=0)
    if min(token_ids, default=0) < 0:
        raise DataError(f"{where} has token id {min(token_ids)}; ids begin at 0.")
    if limit is not None and highest >= limit:
        raise DataError(
            f"{where} has token id {highest}, but the model has only {limit} embeddings; change the prompt, or call "
            "model.resize_token_embeddings(len(tokenizer))."
        )


def tokens_beyond(tokenizer: Any, limit: int | None) -> list[str]:
    """Tokens whose ids are `limit` or more: a text that holds none of them encodes to ids below it."""
    return [] if limit is None else [token for token, token_id in tokenizer.get_vocab().items() if token_id >= limit]


def _template_ids(tokenizer: Any) -> list[int]:
    """Ids that the chat template writes around a message; [] without a template, or for one that wants other messages."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": "a"}]
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except (TemplateError, TypeError, ValueError, KeyError):  # it is judged where it meets the messages of the data set
        return []
