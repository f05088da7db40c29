"""A byte-level BPE tokenizer as GGUF describes one: tokens with their types, merges, special ids, the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from covey.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BY_PATTERN = {_GPT2: "gpt-2", _LLAMA3: "llama-bpe", _QWEN2: "qwen2"}
"""llama.cpp's name of each way to cut text into words, by its pattern in `tokenizer.json`."""
_DIGITS_FIRST = "smollm"
"""Each digit alone, then GPT-2's pattern."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Values of GGUF's `tokenizer.ggml.*`, V entries."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    """1 normal, 3 control, 4 defined by the user, 5 unused (llama.cpp's `llama_token_type`)."""
    merges: tuple[str, ...]
    pre: str
    bos: int | None
    eos: int | None
    pad: int | None
    adds_bos: bool
    chat_template: str | None


def vocabulary_of(tokenizer: Any, size: int) -> Vocabulary:
    """The tokenizer of a model with `size` embeddings. Raises ModelError for one that GGUF would not reproduce."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {}
    model = described.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ModelError(
            f"{type(tokenizer).__name__} is no byte-level BPE tokenizer, the only kind that is written to GGUF; convert this model "
            "with llama.cpp's own script."
        )
    words = {index: text for text, index in model["vocab"].items()}
    special = set()
    for added in described.get("added_tokens") or ():
        words[added["id"]] = added["content"]
        special.add((added["id"], added["special"]))
    if max(words) >= size:
        raise ModelError(
            f"The tokenizer has token {max(words)} and the model {size} embeddings; they do not belong together."
        )
    kinds = {index: 3 if is_special else 4 for index, is_special in special}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(
        tokens=tuple(words.get(i, f"[PAD{i}]") for i in range(size)),
        types=tuple(kinds.get(i, 1) if i in words else 5 for i in range(size)),
        merges=tuple(merges),
        pre=_pre(described.get("pre_tokenizer"), described.get("normalizer"), bool(model.get("ignore_merges"))),
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        adds_bos=tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id,
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def _pre(described: Any, normalizer: Any, ignores_merges: bool) -> str:
    """llama.cpp's name for the pre-tokenizer. Raises ModelError where it has none that cuts text alike."""
    steps = (described or {}).get("pretokenizers") or [described or {}]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        pre_tokenizer: str | None = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        pre_tokenizer = _DIGITS_FIRST
    elif kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pre_tokenizer = _BY_PATTERN.get((steps[0].get("pattern") or {}).get("Regex", ""))
    else:
        pre_tokenizer = None
    normal = {"type": "NFC"} if pre_tokenizer == "qwen2" else None
    spaced = any(step.get("add_prefix_space") for step in steps)
    if (
        pre_tokenizer is None
        or spaced
        or normalizer not in (None, normal)
        or ignores_merges != (pre_tokenizer == "llama-bpe")
    ):
        raise ModelError(
            "llama.cpp would cut text into other words than this tokenizer does, so the model would read other tokens; convert it with "
            "llama.cpp's own script, which knows more tokenizers."
        )
    return pre_tokenizer
