"""Adapters of PEFT on a model: a new one, or one from its folder, and never a second that takes the place of the first."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.errors import ArgumentTypeError, ConfigError, ModelError, first_line
from covey.files.bounded import read_json

SECOND_ADAPTER = (
    "peft_config (--lora-r) asks for a new adapter, but {} one already. Leave it out to go on training that adapter, or add it into "
    "its base first (covey merge ADAPTER -o FOLDER) and train a new one on the result."
)


def has_adapter(model: Any) -> bool:
    """True for a model of PEFT."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def carries_adapter(model: Any) -> bool:
    """True for a model with layers of PEFT in it, also where no PeftModel is around it, as transformers loads an adapter."""
    if "peft" not in sys.modules or not hasattr(model, "modules"):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return has_adapter(model) or any(isinstance(module, BaseTunerLayer) for module in model.modules())


def adapter_options(source: Any) -> Mapping[str, Any] | None:
    """`adapter_config.json` of a folder; None where `source` is no folder with an adapter."""
    file = Path(source).expanduser() / "adapter_config.json" if isinstance(source, (str, Path)) else None
    if file is None or not file.is_file():
        return None
    described = read_json(file, ModelError)
    if not isinstance(described, dict):
        raise ModelError(f"{file} holds a {type(described).__name__}, not the options of an adapter.")
    return described


def base_of(folder: str | Path, described: Mapping[str, Any] | None = None) -> str:
    """Name or folder of the model that the adapter in `folder` belongs to. Raises ModelError where it names none."""
    named = (described or adapter_options(folder) or {}).get("base_model_name_or_path")
    if not named or Path(str(named)).resolve() == Path(folder).resolve():
        raise ModelError(
            f"The adapter in {folder} does not name its base (base_model_name_or_path in adapter_config.json)."
        )
    return str(named)


def refuse_second_adapter(model: Any, peft_config: Any) -> None:
    """Raise ConfigError for a new adapter on a model, loaded or a folder, that carries one, which would be lost."""
    if peft_config is not None and adapter_options(model) is not None:
        raise ConfigError(SECOND_ADAPTER.format(f"{str(model)!r} holds"))
    if peft_config is not None and carries_adapter(model):
        raise ConfigError(SECOND_ADAPTER.format("the model carries"))
    if carries_adapter(model) and not has_adapter(model):
        raise ConfigError(
            "This model carries an adapter without PEFT's model around it; give the adapter's folder as the model to train it further, or merge it "
            "first (covey merge)."
        )


def with_saved_adapter(model: Any, folder: str | Path, *, is_trainable: bool = False) -> Any:
    """The model with the adapter in `folder` on it. Embeddings that were resized before the adapter was trained are resized again.

    Raises ModelError for an adapter of another model, or one without all of its weights.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError("Adapters need the peft package: pip install 'covey[peft]'.") from error
    if carries_adapter(model):
        raise ModelError(
            f"The adapter in {folder} is to be put on an adapter; first covey merge that one into its base."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        rows = _saved_rows(model, Path(folder))
        if rows is not None and rows != model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows, mean_resizing=False)
        return PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)


def _saved_rows(model: Any, folder: Path) -> int | None:
    """Rows of the embeddings that an adapter's file holds; None where it holds none."""
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return None
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    ends = tuple(f".{name}.{part}weight" for name in names for part in ("", "base_layer."))
    with safe_open(file, "pt") as saved:
        rows = [saved.get_slice(key).get_shape()[0] for key in saved.keys() if key.endswith(ends)]  # noqa: SIM118
    return max(rows, default=None)


def with_adapter(model: Any, peft_config: Any) -> Any:
    """The model with a fresh PEFT adapter on it; as it is when `peft_config` is None.

    Raises ConfigError for a second adapter, or when peft is not installed.
    """
    refuse_second_adapter(model, peft_config)
    if peft_config is None:
        return model
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("peft_config needs the peft package: pip install 'covey[peft]'.") from error
    if not isinstance(peft_config, PeftConfig):
        raise ArgumentTypeError(
            f"peft_config is a {type(peft_config).__name__}; give one of PEFT's, such as LoraConfig()."
        )
    try:
        return get_peft_model(model, peft_config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"peft_config cannot be used with this model: {first_line(error)}") from error
