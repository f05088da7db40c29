"""Pooling of an embedding model, read from the sentence-transformers files in its folder."""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

from covey.errors import ConfigError

Pooling = Literal["mean", "cls", "last"]
_NAMES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_sqrt_len_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""By the names of former versions; a sum over the root of the length has the cosines of a mean."""
_WORDS: dict[str, Pooling] = {"mean": "mean", "mean_sqrt_len_tokens": "mean", "cls": "cls", "lasttoken": "last"}
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
    poolings = [_WORDS.get(str(name)) or _NAMES.get(str(name)) for name in modes]
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
