"""Adapters of PEFT on a model: a new one, or one from its folder, and never a second that takes the place of the first."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    with _without_notes_of_peft():
        warnings.filterwarnings("error", "Found missing adapter keys")
        rows = _saved_rows(model, Path(folder))
        if rows is not None and rows != model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows, mean_resizing=False)
        return PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)


@contextmanager
def _without_notes_of_peft() -> Iterator[None]:
    """Python's warnings without the one that PEFT's own call of transformers' former name causes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        yield


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
        with _without_notes_of_peft():
            return get_peft_model(model, peft_config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"peft_config cannot be used with this model: {first_line(error)}") from error


def weights_on_same_base(model: Any, folder: str | Path) -> dict[str, Any] | None:
    """Values for the trained parameters of a model with a LoRA adapter that make it the model of the adapter in `folder`.

    None where that is no LoRA of the same base, or has layers, a form or a rank that the model's adapter cannot hold.
    """
    described = adapter_options(folder)
    config = getattr(model, "peft_config", {}).get("default")
    if described is None or config is None or not _is_plain_lora(described) or not _is_plain_lora(config.to_dict()):
        return None
    bases = {_place_of(base_of(folder, described)), _place_of(str(config.base_model_name_or_path))}
    if len(bases) > 1:
        return None
    from peft.utils import load_peft_weights

    saved = load_peft_weights(str(folder), device="cpu")
    factor = _scaling(described) / _scaling(config.to_dict())
    fitted = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        value = saved.pop(name.replace(".default", ""), None)
        whole = parameter.detach().new_zeros(parameter.shape)  # no such layer there: a B of zeros changes nothing
        if value is not None:
            if value.ndim != 2 or any(a > b for a, b in zip(value.shape, whole.shape, strict=True)):
                return None
            whole[: value.shape[0], : value.shape[1]] = value * (factor if ".lora_B." in name else 1.0)
        fitted[name] = whole
    return None if saved else fitted


def _is_plain_lora(config: Mapping[str, Any]) -> bool:
    odd = ("rank_pattern", "alpha_pattern", "use_dora", "modules_to_save", "lora_bias", "bias", "layer_replication")
    return str(config.get("peft_type")).rpartition(".")[2] == "LORA" and all(
        config.get(name) in (None, False, "none", {}, []) for name in odd
    )


def _scaling(config: Mapping[str, Any]) -> float:
    rank = float(config["r"])
    return float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)


def _place_of(name: str) -> str:
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().exists() else name
