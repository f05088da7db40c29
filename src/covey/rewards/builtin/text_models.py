"""Rewards by models that read: a classifier's probability of a label, likeness of meaning, fluency under a language model."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from covey.data.rendering import chat_ids, prompt_text
from covey.declared import BelowOne, Count, Share, checked
from covey.errors import ConfigError, ModelError, RewardError
from covey.rewards.builtin.inference_model import load_frozen
from covey.rewards.builtin.text import text_of
from covey.rewards.decorators import reward


@reward(timeout=math.inf)
class ClassifierReward:
    """Probability of `label` for each completion, by a sequence classifier: sentiment, toxicity, factual agreement.

    With `premise` the classifier reads a pair: that column's text (or `"prompt"`) first, the completion second, as models
    of natural language inference do; `label="entailment"`. Softmax over the labels, sigmoid for a multi-label model. An empty
    completion scores 0; `None` where the premise is missing. A text longer than the model reads is not scored.

    Example: `ClassifierReward("org/sentiment", "positive")`; `ClassifierReward("org/nli", "entailment", premise="document")`.
    """

    __name__ = "classifier"

    @checked
    def __init__(
        self, model: Any, label: str | int, *, premise: str | None = None, tokenizer: Any = None, **options: Any
    ) -> None:
        self.frozen = load_frozen("classifier", model, tokenizer, **options)
        self.premise = premise
        self.needs_one_of = () if premise in (None, "prompt") else (premise,)
        config = self.frozen.model.config
        if config.num_labels < 2:
            raise ModelError(
                f"{self.frozen.name!r} has one label, so it is a reward model: give its folder or id itself as the reward."
            )
        self.label = _label(config, label)
        self.is_multi = getattr(config, "problem_type", None) == "multi_label_classification"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        texts = [text_of(completion) for completion in completions]
        premises = self._premises(prompts, columns)
        held = [i for i, text in enumerate(texts) if text.strip() and (premises is None or premises[i] is not None)]
        rows = [self._ids(texts[i], None if premises is None else str(premises[i])) for i in held]
        scores: list[float | None] = [
            None if premises is not None and premises[i] is None else 0.0 for i in range(len(texts))
        ]
        for i, value in zip(held, self.frozen.run(rows, self._probability), strict=True):
            scores[i] = float(value)
        return scores

    def _premises(self, prompts: Sequence[Any], columns: Mapping[str, Any]) -> Sequence[Any] | None:
        if self.premise is None:
            return None
        if self.premise == "prompt":
            return [prompt_text(prompt) for prompt in prompts]
        if columns.get(self.premise) is None:
            raise RewardError(f"classifier needs a column {self.premise!r}; rename yours to it.")
        premises: Sequence[Any] = columns[self.premise]
        return premises

    def _ids(self, text: str, premise: str | None) -> list[int]:
        ids = self.frozen.ids(text) if premise is None else self.frozen.ids(premise, text)
        self.frozen.check_length(ids, "the completion")
        return ids

    def _probability(self, output: Any, ids: Tensor, mask: Tensor) -> Tensor:
        logits = output.logits.float()  # [B, labels]
        probabilities: Tensor = (logits.sigmoid() if self.is_multi else logits.softmax(-1))[:, self.label]
        return probabilities


@reward(streams=True, timeout=math.inf)
class SimilarityReward:
    """Cosine of the meanings of completion and `to`, by an embedding model; below 0 it is 0.

    `to` is a column (`reference`), `"prompt"`, or `"group"`: the mean over the other completions of the same prompt, which
    rewards consistency. The embedding is the mean of the last hidden states over the text, or the first (`cls`) or last
    token's: by default what the model's own files say as sentence-transformers writes them, or the mean. `floor` is what unrelated texts score (often 0.6 and more): `(cosine - floor) / (1 - floor)` then counts.
    Empty texts score 0; `None` where the column is empty, or the group has no other. `prefix` stands before every text, as
    some models want it ("query: ").
    """

    __name__ = "similarity"

    @checked
    def __init__(
        self,
        model: Any,
        *,
        to: str = "reference",
        pooling: Pooling | None = None,
        floor: BelowOne = 0.0,
        prefix: str = "",
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        if pooling is None and isinstance(model, str | Path):
            pooling = declared_pooling(str(model))
        self.target, self.pooling, self.floor, self.prefix = to, pooling or "mean", floor, prefix
        self.needs_one_of = () if to in ("prompt", "group") else (to,)
        self.frozen = load_frozen("encoder", model, tokenizer, **options)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        texts = [text_of(completion).strip() for completion in completions]
        if self.target == "group":
            return self._within(texts)
        targets = [prompt_text(prompt) for prompt in prompts] if self.target == "prompt" else columns.get(self.target)
        if targets is None:
            raise RewardError(f"similarity needs a column {self.target!r}; rename yours to it.")
        goals = ["" if target is None else str(target).strip() for target in targets]
        embeddings = self._embedded([*texts, *goals])
        return [
            None if not goal else self._score(embeddings[text] @ embeddings[goal]) if text else 0.0
            for text, goal in zip(texts, goals, strict=True)
        ]

    def _within(self, texts: Sequence[str]) -> list[float | None]:
        embeddings = self._embedded(texts)
        scores: list[float | None] = []
        for i, text in enumerate(texts):
            others = [embeddings[other] for j, other in enumerate(texts) if j != i and other]
            if not text:
                scores.append(0.0)
            else:
                scores.append(self._score((torch.stack(others) @ embeddings[text]).mean()) if others else None)
        return scores

    def _score(self, cosine: Tensor) -> float:
        return max(0.0, (float(cosine) - self.floor) / (1 - self.floor))

    def _embedded(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Unit vectors [H] of every text that is not empty, each computed once."""
        several = [text for text in dict.fromkeys(texts) if text]
        rows = [self.frozen.ids(self.prefix + text) for text in several]
        for row in rows:
            self.frozen.check_length(row, "a text")
        vectors = self.frozen.run(rows, self._pooled)
        return {
            text: torch.nn.functional.normalize(vector, dim=0) for text, vector in zip(several, vectors, strict=True)
        }

    def _pooled(self, output: Any, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = output.last_hidden_state.float()  # [B, L, H]
        if self.pooling == "cls":
            return states[:, 0]
        if self.pooling == "last":
            return states[torch.arange(len(states), device=states.device), mask.sum(-1) - 1]
        weights = mask[..., None].to(states)
        mean: Tensor = (states * weights).sum(1) / weights.sum(1)
        return mean


@reward(timeout=math.inf)
class FluencyReward:
    """Inverse perplexity of a completion under a language model: 1 / perplexity, the geometric mean of its tokens' probabilities.

    `exp(mean log p(token | prompt, tokens before))`; with `enough` above 0 only up to that value, as `min(1, x / enough)`, so
    that text which is fluent enough need not become blander. Repetition is very probable, so combine it with `repetition`. Texts under
    `min_tokens` tokens score 0. `with_prompt=False` leaves the prompt out.
    """

    __name__ = "fluency"

    @checked
    def __init__(
        self,
        model: Any,
        *,
        enough: Share = 0.0,
        min_tokens: Count = 3,
        with_prompt: bool = True,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        self.enough, self.min_tokens, self.with_prompt = enough, min_tokens, with_prompt
        self.frozen = load_frozen("causal", model, tokenizer, **options)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        parts = [
            self._parts(prompt, text_of(completion)) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        held = [i for i, (_, completion_ids) in enumerate(parts) if len(completion_ids) >= self.min_tokens]
        rows = [[*parts[i][0], *parts[i][1]] for i in held]
        for row in rows:
            self.frozen.check_length(row, "prompt and completion")
        scores = [0.0] * len(parts)
        for i, logps in zip(held, self.frozen.run(rows, _next_logps), strict=True):
            before, completion_ids = parts[i]
            start, stop = max(len(before), 1), len(before) + len(completion_ids)  # the very first has no probability
            probable = math.exp(float(logps[start - 1 : stop - 1].mean()))
            scores[i] = min(1.0, probable / self.enough) if self.enough else probable
        return scores

    def _parts(self, prompt: Any, text: str) -> tuple[list[int], list[int]]:
        completion_ids = self.frozen.ids(text, special=False)
        if not self.with_prompt:
            first = self.frozen.tokenizer.bos_token_id
            return ([] if first is None else [first]), completion_ids
        if isinstance(prompt, str) or getattr(self.frozen.tokenizer, "chat_template", None) is None:
            return self.frozen.ids(prompt_text(prompt), reads_control=True), completion_ids
        return chat_ids(self.frozen.tokenizer, list(prompt), add_generation_prompt=True), completion_ids


def _next_logps(output: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """log p of each token but the first, [B, L - 1]; at padding it means nothing."""
    logits = output.logits[:, :-1].float()  # [B, L - 1, V]
    logps: Tensor = logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
    return logps


def _label(config: Any, label: str | int) -> int:
    names = {int(i): str(name) for i, name in config.id2label.items()}
    for i, name in names.items():
        if i == label or name.casefold() == str(label).casefold():
            return i
    raise ConfigError(f"classifier(label={label!r}): the model has the labels {', '.join(names.values())}.")


Pooling = Literal["mean", "cls", "last"]
_POOLINGS: dict[str, Pooling] = {
    **dict.fromkeys(("mean", "mean_tokens", "mean_sqrt_len_tokens"), "mean"),
    **dict.fromkeys(("cls", "cls_token"), "cls"),
    "lasttoken": "last",
}
"""By the names of all versions; a sum over the root of the length has the cosines of a mean."""
_FREE = frozenset(("Transformer", "Pooling", "Normalize", "Dropout"))
"""Modules that the reward computes itself, or that change no cosine."""

logger = logging.getLogger(__name__)


def declared_pooling(model: str) -> Pooling | None:
    """The pooling that a model's `modules.json` and its pooling's `config.json` name; None for a model without them.

    Raises ConfigError for unsupported poolings: maxima, weighted means, several at once, or layers behind the pooling.
    """
    modules = _read(model, "modules.json")
    if not isinstance(modules, list):
        return None
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    if more := sorted(kinds.keys() - _FREE):
        raise ConfigError(
            f"similarity: {model!r} has a module {more[0]} behind its hidden states, which this reward does not compute; choose an "
            "embedding model that ends with its pooling, or give pooling= to leave the module out."
        )
    if "Pooling" not in kinds:
        return None
    config = _read(model, f"{kinds['Pooling']}/config.json")
    if not isinstance(config, dict):
        raise ConfigError(
            f"similarity: {model!r} names a pooling whose config.json is missing; give pooling='mean', 'cls' or 'last'."
        )
    return _pooling_of(model, config)


def _pooling_of(model: str, config: dict[str, Any]) -> Pooling:
    named = config.get("pooling_mode")
    words = named if isinstance(named, list) else [named] if named else []
    modes = words or [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True]
    poolings = [_POOLINGS.get(str(name).removeprefix("pooling_mode_")) for name in modes]
    if len(poolings) != 1 or poolings[0] is None:
        raise ConfigError(
            f"similarity: {model!r} pools by {' and '.join(map(str, modes)) or 'nothing'}, which this reward does not compute; choose "
            "another embedding model, or give pooling='mean', 'cls' or 'last'."
        )
    return poolings[0]


def _read(model: str, name: str) -> Any:
    """A JSON file of a model's folder or of its page on the hub; None where it has none."""
    from transformers.utils import cached_file

    try:
        path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:  # not to be had now: the weights, which were, say no more of it
        logger.info("%s of %s could not be read: %s", name, model, str(error).splitlines()[0])
        return None
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ConfigError(f"similarity: {name} of {model!r} is no JSON: {error}.") from error
