"""Checks of model and tokenizer: end-of-text tokens, chat template, agreement of sampled and trained tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from covey.doctor.finding import Finding, failed, passed, warned
from covey.models import dropouts

AREA = "model"
_MARK = "Qxz"
"""A marker answer that no template contains."""


def model_findings(
    model: Any, tokenizer: Any, eos: Sequence[int], args: Any, *, is_chat: bool | None
) -> Iterator[Finding]:
    """All findings that need no generation. `is_chat`: the prompts are lists of messages; None: unknown."""
    count = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    yield passed(
        AREA,
        f"{type(model).__name__}, {count / 1e6:,.1f}M parameters, {trained / 1e6:,.1f}M trained",
        parameters=count,
        trained=trained,
    )
    yield finite_weights(model)
    yield endings(tokenizer, eos)
    if is_chat is not None:
        yield template(tokenizer, is_chat=is_chat)
    yield padding(tokenizer)
    yield dropout(model, is_off=bool(args.disable_dropout))
    yield from half_weights(model, args.learning_rate)


def finite_weights(model: Any) -> Finding:
    """FAIL when a weight is NaN or infinite: every completion would be noise."""
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            return failed(
                AREA, f"{name} holds numbers that are not finite.", "load the model from an intact checkpoint"
            )
    return passed(AREA, "all weights are finite")


def endings(tokenizer: Any, eos: Sequence[int]) -> Finding:
    """FAIL when the chat template closes an answer with a token that would not end a completion."""
    named = [tokenizer.convert_ids_to_tokens(token) for token in eos]
    shown = ", ".join(map(str, named))
    closing = closing_token(tokenizer)
    if closing is not None and closing not in eos:
        sentence = (
            f"the chat template closes an answer with {tokenizer.convert_ids_to_tokens(closing)}, but completions end at {shown} "
            "only, so they would run to the length limit."
        )
        fix = f"add {closing} to eos_token_id in the model's generation_config.json, or set the tokenizer's eos_token"
        return failed(AREA, sentence, fix, closing=closing, eos=list(eos))
    return passed(AREA, f"a completion ends at {shown}", eos=list(eos))


def closing_token(tokenizer: Any) -> int | None:
    """The id of the first special token after an assistant's words in the chat template; None without a template or such a token."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _MARK}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError:  # one that refuses this conversation says nothing of how it closes others
        return None
    _, mark, after = text.rpartition(_MARK)
    if not mark:
        return None
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", ()))
    return next((int(token) for token in ids if token in special), None)


def template(tokenizer: Any, *, is_chat: bool) -> Finding:
    """Chat prompts need a chat template; plain prompts to a chat model are answered as if a document went on."""
    has = bool(getattr(tokenizer, "chat_template", None))
    if is_chat and not has:
        fix = "use the instruct version of the model, or set tokenizer.chat_template, or give prompts as plain text"
        return failed(AREA, "the prompts are chat messages, but the tokenizer has no chat template.", fix)
    if has and not is_chat:
        sentence = (
            "the prompts are plain text, but the model has a chat template: it will continue the text, not answer it."
        )
        fix = "give prompts as messages, or a --system-prompt, unless the model was trained on plain text"
        return warned(AREA, sentence, fix)
    return passed(
        AREA,
        "prompts are chat messages, and the tokenizer has a template for them"
        if has
        else "prompts are plain text, as the model expects",
    )


def padding(tokenizer: Any) -> Finding:
    """Padding never counts here, so any token will do; one that is not special shows up elsewhere."""
    pad = tokenizer.pad_token_id
    if pad not in tokenizer.all_special_ids:
        fix = "set tokenizer.pad_token to a special token, such as the end-of-text token"
        return warned(
            AREA, f"the padding token {tokenizer.pad_token!r} is an ordinary word of the vocabulary.", fix, pad=pad
        )
    return passed(AREA, f"padding is {tokenizer.pad_token}, and is masked", pad=pad)


def dropout(model: Any, *, is_off: bool) -> Finding:
    """WARN when dropout is active: the learner's log-probabilities would be those of another network at every pass."""
    largest = 0.0 if is_off else max((place[key] for place, key in dropouts(model)), default=0.0)
    if largest > 0:
        sentence = f"dropout of up to {largest:g} is active, so the probabilities that are learnt from are not those that were sampled."
        return warned(AREA, sentence, "--disable-dropout", dropout=largest)
    return passed(AREA, "no dropout is active", dropout=0.0)


def half_weights(model: Any, learning_rate: float) -> Iterator[Finding]:
    """WARN when weights in 16 bits are trained at a rate whose steps round away."""
    trained = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    half = trained & {torch.bfloat16, torch.float16}
    if half and learning_rate < 1e-4:
        name = str(next(iter(half))).removeprefix("torch.")
        sentence = (
            f"the weights are trained in {name}: a weight of 0.02 moves in steps of {0.02 * torch.finfo(next(iter(half))).eps:.0e}, "
            f"and learning_rate={learning_rate:g} rounds away."
        )
        yield warned(
            AREA,
            sentence,
            "--dtype float32 --bf16 keeps float32 weights and computes in bfloat16; or train an adapter, --lora-r 16",
        )
