"""`add_features(dataset, ["length", "difficulty"])`: a data set with columns that describe its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from covey.data.features.embedding import Embedder, relevance
from covey.data.features.language import language
from covey.data.features.text import prompt_text, readability
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
