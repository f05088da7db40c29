"""`add_features(dataset, ["length", "difficulty"])`: a data set with columns that describe its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from covey.data.features.embedding import Embedder, relevance
from covey.data.features.language import language
from covey.errors import DataError, did_you_mean
from covey.process.counting import counted

FEATURES: Mapping[str, str] = {
    "length": "tokens of the prompt (characters without a tokenizer)",
    "readability": "Flesch's reading ease of the prompt: 90 easy, 30 hard; English",
    "language": "ISO 639-1 code of the prompt's language, or none",
    "embedding": "vector of the prompt from an embedding model, of length 1",
    "relevance": "cosine of the prompt's and the answer's vectors",
    "pass_rate": "share of drawn answers of a model that are right",
    "difficulty": "1 - pass_rate",
}
"""Features by name, with a description of each."""

PassRates = Callable[[datasets.Dataset], Sequence[float]]


def add_features(
    dataset: datasets.Dataset,
    names: Sequence[str],
    *,
    tokenizer: Any = None,
    embedder: Embedder | None = None,
    pass_rates: PassRates | None = None,
    answer_column: str = "answer",
    overwrite: bool = False,
) -> datasets.Dataset:
    """`dataset` with a column for each of `names`; see `FEATURES`. Rows and their order stay as they are.

    `embedding` and `relevance` need `embedder`, `pass_rate` and `difficulty` need `pass_rates` (see `covey.evaluation.difficulty`).
    Raises DataError for an unknown name, for a column that is there already (unless `overwrite`), and for what is missing.
    """
    _check(dataset, names, embedder, pass_rates, answer_column, overwrite)
    texts = [prompt_text(prompt) for prompt in dataset["prompt"]]
    made: dict[str, list[Any]] = {}
    if "length" in names:
        made["length"] = [
            len(text) if tokenizer is None else len(tokenizer(text)["input_ids"]) for text in counted(texts, "length")
        ]
    if "readability" in names:
        made["readability"] = [readability(text) for text in counted(texts, "readability")]
    if "language" in names:
        made["language"] = [language(text) for text in counted(texts, "language")]
    if embedder is not None and {"embedding", "relevance"} & set(names):
        vectors = embedder(texts)
        made["embedding"] = vectors.tolist()
        if "relevance" in names:
            answers = embedder(["" if answer is None else str(answer) for answer in dataset[answer_column]])
            made["relevance"] = relevance(vectors, answers)
    if pass_rates is not None and {"pass_rate", "difficulty"} & set(names):
        rates = [None if math.isnan(rate) else rate for rate in pass_rates(dataset)]
        made["pass_rate"] = rates
        made["difficulty"] = [None if rate is None else 1.0 - rate for rate in rates]
    table = dataset.remove_columns([name for name in names if name in dataset.column_names])
    for name in names:
        table = table.add_column(name, made[name])
    return table


def _check(
    dataset: Any, names: Sequence[str], embedder: Any, pass_rates: Any, answer_column: str, overwrite: bool
) -> None:
    have = dataset.column_names
    for name in names:
        if name not in FEATURES:
            raise DataError(f"{name!r} is no feature; there are {', '.join(FEATURES)}.{did_you_mean(name, FEATURES)}")
        if name in have and not overwrite:
            raise DataError(
                f"The data set has a column {name!r} already; rename it, or let it be replaced with overwrite."
            )
    if {"embedding", "relevance"} & set(names) and embedder is None:
        raise DataError("embedding and relevance need an embedding model.")
    if "relevance" in names and answer_column not in have:
        raise DataError(f"relevance needs the column {answer_column!r}; the data set has {', '.join(have)}.")
    if {"pass_rate", "difficulty"} & set(names) and pass_rates is None:
        raise DataError("pass_rate and difficulty need a model and a reward that say which answers are right.")


_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")  # noqa: RUF001 - the typographic apostrophe is one
_SENTENCE_END = re.compile(r"[.!?…]+(?=\s|$)|\n{2,}")
_VOWELS = re.compile(r"[aeiouyäöüéèêàâîïôûáíóúãõ]+")
_SILENT = re.compile(r"(?<=[^aeiouyl])e(?:s|d)?$")


def prompt_text(prompt: Any) -> str:
    """The text of a prompt; for a conversation the contents of its messages, joined."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in messages_of(prompt))


def messages_of(prompt: Any) -> Sequence[Mapping[str, Any]]:
    """The messages of a conversation, none for what is no list of them."""
    return [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list | tuple) else []


def readability(text: str) -> float | None:
    """Flesch's reading ease: about 90 for a child's book, 30 for a scientific paper. `None` for a text without a word.

    `206.835 - 1.015 words/sentence - 84.6 syllables/word` (Flesch 1948, "A new readability yardstick"), made for English;
    syllables are counted as groups of vowels, without a silent e at the end.
    """
    words = _WORD.findall(text)
    if not words:
        return None
    pieces = [piece for piece in _SENTENCE_END.split(text) if _WORD.search(piece)]
    syllables = sum(_syllables(word.casefold()) for word in words)
    return 206.835 - 1.015 * len(words) / len(pieces) - 84.6 * syllables / len(words)


def _syllables(word: str) -> int:
    return max(1, len(_VOWELS.findall(_SILENT.sub("", word))))
