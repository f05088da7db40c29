"""Prompts in: data sets from files, folders and the hub, checked, and drawn in an order that resumes exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.data.checks import check_dataset
    from covey.data.live import follow
    from covey.data.loading import load
    from covey.data.mixing import mix
    from covey.data.order import Outcome
    from covey.data.rendering import chat_ids
    from covey.data.stream import PromptStream
    from covey.data.tokenizer import eos_ids, expect_ids_below, num_embeddings, prepare_tokenizer, vocabulary_size

_WHERE = {
    "Outcome": "order",
    "PromptStream": "stream",
    "check_dataset": "checks",
    "eos_ids": "tokenizer",
    "chat_ids": "rendering",
    "expect_ids_below": "tokenizer",
    "follow": "live",
    "load": "loading",
    "mix": "mixing",
    "num_embeddings": "tokenizer",
    "vocabulary_size": "tokenizer",
    "prepare_tokenizer": "tokenizer",
}
__all__ = [
    "Outcome",
    "PromptStream",
    "chat_ids",
    "check_dataset",
    "eos_ids",
    "expect_ids_below",
    "follow",
    "load",
    "mix",
    "num_embeddings",
    "prepare_tokenizer",
    "vocabulary_size",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
