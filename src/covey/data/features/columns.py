"""`add_features(dataset, ["length", "difficulty"])`: a data set with columns that describe its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor

from covey.data.features.language import language
from covey.data.rendering import prompt_text
from covey.errors import DataError, ModelError, did_you_mean
from covey.files.places import refuse_missing
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

    `embedding` and `relevance` need `embedder`, `pass_rate` and `difficulty` need `pass_rates` (see `covey.evaluation.assessment`).
    Raises DataError for an unknown name, for a column that is there already (unless `overwrite`), and for what is missing.
    """
    _check(dataset, names, embedder, pass_rates, answer_column, overwrite)
    texts = [prompt_text(prompt) for prompt in dataset["prompt"][:]]
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
            answers = embedder(["" if answer is None else str(answer) for answer in dataset[answer_column][:]])
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


def readability(text: str) -> float | None:
    """Flesch's reading ease: about 90 for a child's book, 30 for a scientific paper. `None` for a text without a word.

    `206.835 - 1.015 words/sentence - 84.6 syllables/word` (Flesch 1948, "A new readability yardstick"), made for English;
    syllables are counted as groups of vowels, without a silent e at the end.
    """
    words = _WORD.findall(text)
    if not words:
        return None
    pieces = [piece for piece in _SENTENCE_END.split(text) if _WORD.search(piece)]
    vowels = [_VOWELS.findall(_SILENT.sub("", word.casefold())) for word in words]
    syllables = sum(max(1, len(groups)) for groups in vowels)
    return 206.835 - 1.015 * len(words) / len(pieces) - 84.6 * syllables / len(words)


@dataclass(frozen=True, eq=False)
class Embedder:
    """Means of the last hidden states over a text's tokens, of length 1. Texts past the model's context are cut, and counted."""

    model: Any
    tokenizer: Any
    max_tokens: int = 512

    @classmethod
    def of(cls, name: str | Path, device: Any = None) -> Embedder:
        """The model in a folder or of a hub id. Raises ModelError where there is none."""
        from transformers import AutoModel, AutoTokenizer

        refuse_missing(str(name), "model folder")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(name))
            model = AutoModel.from_pretrained(str(name))
        except (OSError, ValueError) as error:
            raise ModelError(f"{str(name)!r} is no model that can embed texts: {error}") from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        limit = getattr(model.config, "max_position_embeddings", None) or cls.max_tokens
        return cls(model.eval().to(device or "cpu"), tokenizer, min(int(limit), cls.max_tokens))

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_size: int = 32) -> Tensor:
        """[N, H] float32, rows of length 1; zeros for an empty text."""
        vectors = []
        for start in range(0, len(texts), batch_size):
            part = [text or " " for text in texts[start : start + batch_size]]
            batch = self.tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=self.max_tokens)
            batch = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
            hidden = self.model(**batch).last_hidden_state.float()  # [B, T, H]
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
            empty = torch.tensor([not text for text in texts[start : start + batch_size]], device=mean.device)
            vectors.append(torch.nn.functional.normalize(mean, dim=-1).masked_fill(empty[:, None], 0.0).cpu())
        return torch.cat(vectors) if vectors else torch.empty(0, 0)


def relevance(prompts: Tensor, answers: Tensor) -> list[float]:
    """Cosine of each prompt's vector with its answer's, [N, H] and [N, H] of length 1: 1 the same, 0 unrelated."""
    return (prompts * answers).sum(-1).tolist()
