"""Prompts in: data sets from files, folders and the hub, checked, and drawn in an order that resumes exactly."""

from typing import TYPE_CHECKING

from covey.names import lazy

if TYPE_CHECKING:
    from covey.data.checks import check_dataset
    from covey.data.live import follow
    from covey.data.loading import load
    from covey.data.mixing import mix
    from covey.data.order import Outcome
    from covey.data.rendering import chat_ids
    from covey.data.stream import EngineLength, PromptStream, longer_prompt
    from covey.data.tokenizer import eos_ids, expect_ids_below, num_embeddings, prepare_tokenizer, vocabulary_size

__all__ = [
    "EngineLength", "Outcome", "PromptStream", "chat_ids", "check_dataset", "eos_ids", "expect_ids_below", "follow",
    "load", "longer_prompt", "mix", "num_embeddings", "prepare_tokenizer", "vocabulary_size",
]  # fmt: skip
_WHERE = {
    "checks": "check_dataset",
    "live": "follow",
    "loading": "load",
    "mixing": "mix",
    "order": "Outcome",
    "rendering": "chat_ids",
    "stream": "EngineLength PromptStream longer_prompt",
    "tokenizer": "eos_ids expect_ids_below num_embeddings prepare_tokenizer vocabulary_size",
}
__getattr__ = lazy(__name__, _WHERE)
