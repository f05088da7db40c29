"""Models to serve: a base and its LoRA adapters, each adapter merged into copies of the layers that it changes."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.adapters import adapter_options, resized_rows, with_saved_adapter, writes_base
from covey.errors import ConfigError, ModelError, needed
from covey.models import as_model_errors


def with_merged_adapter(model: Any, folder: str | Path) -> Any:
    """A model that shares all weights of `model` but those that the adapter in `folder` changes; `model` stays as it is.

    An adapter that writes to weights of its base as it is loaded (PiSSA's kind, or with biases), or resizes embeddings, gets a copy of all.
    Raises ModelError for a folder without an adapter, or with one that cannot be merged into this model.
    """
    if (described := adapter_options(folder)) is None:
        raise ModelError(f"{folder} holds no adapter: there is no adapter_config.json in it.")
    with needed("Adapters need the peft package", "peft"):
        from peft.tuners.tuners_utils import BaseTunerLayer
    with as_model_errors(str(folder)):
        is_written = writes_base(described) or resized_rows(model, folder) is not None
        weights = () if is_written else (*model.parameters(), *model.buffers())
        shared = {id(held): held for held in weights}
        adapted = with_saved_adapter(copy.deepcopy(model, shared), folder).eval()
        if not hasattr(adapted.base_model, "merge_and_unload"):
            raise ModelError(f"The adapter in {folder} is not LoRA and cannot be merged into the model.")
        with torch.no_grad():
            for layer in (module for module in adapted.modules() if isinstance(module, BaseTunerLayer)):
                base: Any = layer.get_base_layer()
                for name, held in list(base.named_parameters(recurse=False)):
                    setattr(base, name, nn.Parameter(held.clone(), requires_grad=False))
            return adapted.merge_and_unload(safe_merge=True)


def named_adapters(words: list[str]) -> Mapping[str, str]:
    """Folders by model name from `NAME=PATH`. Raises ConfigError for a word of another form, or a name given twice."""
    folders: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"--adapter {word}: write NAME=FOLDER.")
        if name in folders:
            raise ConfigError(f"--adapter {name} is given twice.")
        folders[name] = folder
    return folders
