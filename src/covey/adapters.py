"""Adapters of PEFT on a model: a new one, or one from its folder, and never a second that takes the place of the first."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.errors import ArgumentTypeError, ConfigError, ModelError, first_line, needed
from covey.files.bounded import read_json

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PATTERNS = ("rank_pattern", "alpha_pattern")
_VALUES = "from which no layer with an adapter takes its value: the first entry that ends a layer's name counts"
_IDLE = {
    **dict.fromkeys(_PATTERNS, _VALUES),
    "modules_to_save": "which ends no module's name",
    "layers_to_transform": "where no layer gets an adapter",
}
"""Options with entries that PEFT passes over, and what such an entry is."""
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


def _refuse_activated(described: Mapping[str, Any]) -> None:
    """Raise ConfigError for an activated LoRA: without the token ids of whole texts its layers compute what their base does."""
    if described.get("alora_invocation_tokens"):
        raise ConfigError(
            "The adapter acts from its alora_invocation_tokens on, which its layers only know in a forward pass of PEFT's own model, so here "
            "it would change nothing; leave them out, and train a LoRA that acts on every token."
        )


_UNFIT = {
    "ADALORA": "moves ranks between its layers in a call after each step, which a run does not make",
    "COFT": "writes to its weights in each pass, to those of a reference too and to none of a split model",
    "LILY": "mixes the tokens of a batch, so that a row's probabilities depend on the others",
    "MONTECLORA": "draws its weights anew in each pass of training, with a term of the loss that PEFT leaves to the user",
    "POLY": "reads the number of a task with each row",
    "PVERA": "draws its weights anew in each pass of training",
    "XLORA": "weighs adapters in a forward pass of PEFT's own model",
}
"""Kinds of adapters that a run would train as another kind, or not at all."""


def _refuse_unfit(adapted: Any) -> None:
    """Raise ConfigError for a model of PEFT whose adapters a run would not train, or as another kind."""
    for config in adapted.peft_config.values():
        _refuse_activated(config.to_dict())
        variants = {"MONTECLORA": "monteclora_config", "COFT": "coft"}
        kind = next((name for name, option in variants.items() if getattr(config, option, None)), config.peft_type)
        if kind == "OFT" and config.module_dropout:
            raise ConfigError("PEFT's layers of OFT do not apply their module_dropout; leave it out.")
        if kind in _UNFIT:
            raise ConfigError(f"The adapter's kind, {str(kind).rsplit('.')[-1]}, {_UNFIT[kind]}; use LoRA or another.")
    if any(getattr(module, "merged_adapters", ()) for module in adapted.modules()):
        raise ConfigError("The adapter is merged into its base, where no gradient reaches it; call unmerge_adapter().")
    scaled = [module for module in adapted.modules() if isinstance(getattr(module, "scaling", None), dict)]
    if any(module.scaling.get(name) == 0 for module in scaled for name in module.active_adapters):
        raise ConfigError("The adapter has layers of scale 0, where no gradient reaches it; leave alpha 0 out.")


def refuse_quantized(model: Any, device: torch.device, has_adapter: bool) -> None:
    """Raises ConfigError for a quantized model without an adapter to train, and for any on a CPU.

    There bitsandbytes 0.50 has no gradient through its products.
    """
    if not getattr(model, "is_quantized", False):
        return
    if device.type == "cpu":
        raise ConfigError(
            "A quantized model cannot be trained on a CPU: bitsandbytes packs its weights for inference there. Leave "
            "quantization_config out (bf16=True and peft_config save memory too), or train on a GPU."
        )
    if not has_adapter:
        raise ConfigError(
            "The weights of a quantized model cannot be trained; give peft_config=LoraConfig(...) to train an adapter on it."
        )


def with_saved_adapter(model: Any, folder: str | Path, *, is_trainable: bool = False) -> Any:
    """The model with the adapter in `folder` on it. Embeddings that were resized before the adapter was trained are resized again.

    Raises ModelError for an adapter of another model, or one without all of its weights.
    """
    with needed("Adapters need the peft package", "peft"):
        from peft import PeftModel, set_peft_model_state_dict
        from peft.utils import load_peft_weights
    if carries_adapter(model):
        raise ModelError(
            f"The adapter in {folder} is to be put on an adapter; first covey merge that one into its base."
        )
    _refuse_activated(adapter_options(folder) or {})
    with _without_notes_of_peft():
        warnings.filterwarnings("error", "Found missing adapter keys")
        if (rows := resized_rows(model, folder)) is not None:
            model.resize_token_embeddings(rows, mean_resizing=False)
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)
        loaded: Any = set_peft_model_state_dict(adapted, load_peft_weights(str(folder), device="cpu"))
    left = {*loaded.unexpected_keys} - {"prompt_embeddings", "prefix_task_cols", "prefix_task_rows"}
    if left:  # PEFT passes over them
        raise ModelError(
            f"The adapter in {folder} is another model's: it has {len(left)} weights, such as {min(left)}, that this one has no place for."
        )
    return adapted


@contextmanager
def _without_notes_of_peft() -> Iterator[None]:
    """Python's warnings without those of PEFT's own call of transformers' former name, and of patterns, of which we warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        yield


def resized_rows(model: Any, folder: str | Path) -> int | None:
    """Rows of the embeddings that the adapter in `folder` holds; None where it holds none, or as many as the model has."""
    from safetensors import safe_open

    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        return None
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    ends = tuple(f".{name}.{part}weight" for name in names for part in ("", "base_layer."))
    with safe_open(file, "pt") as saved:
        rows = [saved.get_slice(key).get_shape()[0] for key in saved.keys() if key.endswith(ends)]  # noqa: SIM118
    most = max(rows, default=None)
    return None if most is None or most == model.get_input_embeddings().weight.shape[0] else most


def with_adapter(model: Any, peft_config: Any) -> Any:
    """The model with a fresh PEFT adapter on it; as it is when `peft_config` is None.

    Raises ConfigError for a second adapter, or when peft is not installed.
    """
    refuse_second_adapter(model, peft_config)
    if peft_config is None:
        if has_adapter(model):
            _settle(model)
        return model
    with needed("peft_config needs the peft package", "peft"):
        from peft import PeftConfig, get_peft_model
    if not isinstance(peft_config, PeftConfig):
        raise ArgumentTypeError(
            f"peft_config is a {type(peft_config).__name__}; give one of PEFT's, such as LoraConfig()."
        )
    _refuse_activated(peft_config.to_dict())
    _refuse_options(model, peft_config)
    experts, requested = expert_parameters(model), copy(getattr(peft_config, "target_modules", None))
    _refuse_unknown_parameters(model, peft_config, experts)
    options = {option: getattr(peft_config, option, None) for option in _IDLE}
    entries = {option: [held] if isinstance(held, int) else [*(held or ())] for option, held in options.items()}
    try:
        with _without_notes_of_peft():
            adapted = get_peft_model(model, peft_config)
    except (ValueError, TypeError, LookupError, AttributeError, re.error) as error:
        if unfit := re.search(r"ParamWrapper does not work (?:with|when) `?(\w+)", str(error)):
            raise ConfigError(
                f"peft_config: {unfit[1]} does not go with an adapter on experts ({', '.join(experts)}); leave it out, or "
                "leave the experts out of target_parameters and target_modules."
            ) from error
        raise ConfigError(f"peft_config cannot be used with this model: {first_line(error)}") from error
    ends, names = _settle(adapted), [name for name, _ in adapted.named_modules()]
    ends.update(str(end) for end in entries["modules_to_save"] if any(name.endswith(end) for name in names))
    targeted = getattr(adapted.base_model, "targeted_module_names", ())
    used = {*ends, *(int(number) for name in targeted for number in re.findall(r"\.(\d+)\.", name)[:1])}
    for option, keys in entries.items():
        if idle := [key for key in keys if key not in used]:
            logger.warning("%s holds %s, %s.", option, ", ".join(map(repr, idle)), _IDLE[option])
    if requested == "all-linear" or isinstance(requested, list | set | tuple):
        _name_left_out(model, requested, experts)  # which has the layers of PEFT in it now
    return adapted


def _refuse_options(model: Any, peft_config: Any) -> None:
    """Raise ConfigError for options of a new adapter that PEFT reads as others, or not at all."""
    start, saved = str(getattr(peft_config, "init_lora_weights", "")), getattr(peft_config, "modules_to_save", None)
    if start.startswith("pissa_niter"):
        raise ConfigError(
            f"peft_config: init_lora_weights={start!r} takes a part out of the base's weights by a random "
            "algorithm, so that the saved adapter would belong to no model that can be loaded; use 'pissa'."
        )
    if start == "eva" or (start == "lora_ga" and not any(hasattr(x, "_peft_loraga_grad") for x in model.modules())):
        raise ConfigError(
            f"peft_config: init_lora_weights={start!r} begins from data, which PEFT measures in a call of its own; without it the adapter "
            "begins as any other. Make the model with PEFT's functions for it and give that, or leave the option out."
        )
    if isinstance(saved, str):
        raise ConfigError(f"peft_config: modules_to_save is the text {saved!r}, read by the letter; give [{saved!r}].")
    if getattr(peft_config, "trainable_token_indices", None) in ([], {}):
        raise ConfigError("peft_config: trainable_token_indices names no token; leave it out.")


def _settle(adapted: Any) -> set[str]:
    """Name a base folder by its whole path, since a relative one is another elsewhere; `_refuse_unfit`; `_settle_patterns`."""
    _refuse_unfit(adapted)
    for config in adapted.peft_config.values():
        if config.base_model_name_or_path:
            config.base_model_name_or_path = place_of(str(config.base_model_name_or_path))
    return _settle_patterns(adapted)


def _settle_patterns(adapted: Any) -> set[str]:
    """Make `rank_pattern` and `alpha_pattern` mean the same in a file, whose entries PEFT sorts; the entries with an effect.

    The first entry that ends a layer's name counts. Where sorting changes which, every layer gets an entry of its own.
    """
    tuner, used = adapted.base_model, set[str]()
    names = [*getattr(tuner, "targeted_module_names", ()), *getattr(tuner, "targeted_parameter_names", ())]
    for config, option in ((config, option) for config in adapted.peft_config.values() for option in _PATTERNS):
        patterns = getattr(config, option, None) or {}
        ends = {name: [key for key in patterns if re.match(rf"(.*\.)?({key})$", name)] for name in names}
        first = {name: keys[0] for name, keys in ends.items() if keys}
        used.update(first.values())
        if any(patterns[min(ends[name])] != patterns[key] for name, key in first.items()):
            setattr(config, option, {f"^{re.escape(name)}": patterns[key] for name, key in first.items()})
    return used


def expert_parameters(model: Any) -> list[str]:
    """Ends of the names of weights [E, ., .] that hold the matrices of E experts, as `target_parameters` of PEFT takes them."""
    from torch import nn

    ends = dict[str, None]()
    for place, module in model.named_modules():
        is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        for name, parameter in () if is_convolution else module.named_parameters(recurse=False):
            if parameter.ndim == 3 and re.search(r"\.\d+\.", place):
                ends[f"{_end_of(place)}.{name}"] = None
    return list(ends)


def _end_of(place: str) -> str:
    """The part of a module's name behind the number of its layer."""
    return re.sub(r"^.*?\.\d+\.", "", place)


def _refuse_unknown_parameters(model: Any, peft_config: Any, experts: Sequence[str]) -> None:
    """Raise ConfigError for `target_parameters` that name no parameter, which PEFT passes over."""
    names = [f".{name}" for name, _ in model.named_parameters()]
    for target in getattr(peft_config, "target_parameters", None) or ():
        if not any(name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"target_parameters names {target!r}, and no parameter of {type(model).__name__} ends so; "
                + (f"its experts are {', '.join(experts)}." if experts else "it has no experts in parameters.")
            )


def _name_left_out(base: Any, requested: Any, experts: Sequence[str]) -> None:
    """Warn once of layers that `target_modules` names, and of experts, that PEFT left without an adapter.

    PEFT reads names of linear layers as those of fused experts in some families, and so passes over dense layers there.
    """
    from torch import nn

    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    linear, done, inner = set[str](), set[str](), re.compile(r"\.(lora_|modules_to_save\.|original_module)")
    for place, module in base.named_modules():
        if hasattr(module, "get_base_layer"):
            parameter = getattr(module, "parameter_name", None)
            done.add(_end_of(re.sub(r"(\.base_layer)+$", "", place)) + (f".{parameter}" if parameter else ""))
        elif isinstance(module, nn.Linear) and module is not head and not inner.search(place):
            linear.add(_end_of(place.removesuffix(".base_layer")))
    is_requested = lambda name: requested == "all-linear" or any(f".{name}".endswith(f".{end}") for end in requested)
    left = sorted(name for name in linear - done if is_requested(name))
    notes = [f"the linear layers {', '.join(left)}, whose names PEFT reads as those of experts"] if left else []
    missing = [name for name in experts if name not in done]
    if missing and requested == "all-linear":
        hint = f"to train them too, add target_parameters={missing} (--lora-target-parameters)"
        notes.append(f"the experts, which are no linear layers: {hint}")
    idle = [] if requested == "all-linear" else [end for end in requested if not _matches(base, end)]
    if idle:
        hint = f" (its experts are target_parameters={missing})" if missing else ""
        notes.append(f"{', '.join(sorted(idle))}, which is in no layer's name{hint}")
    if notes:
        logger.warning("The adapter leaves out %s.", "; and ".join(notes))


def _matches(base: Any, end: str) -> bool:
    """True if `end` ends the name of a module, or of a matrix inside of fused experts that has an adapter."""
    names = [re.sub(r"\.base_layer", "", name) for name, _ in base.named_modules()]
    fused = [getattr(module, "parameter_name", "") for module in base.modules()]
    part = end.removesuffix("_proj")
    return any(f".{name}".endswith(f".{end}") for name in names) or any(part and part in name for name in fused)


_PLAIN = frozenset({
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
    "corda_config", "ensure_weight_tying", "eva_config", "loftq_config", "lora_ga_config",
})  # fmt: skip
"""Options of LoRA under which an adapter is `scaling B A` of each of its layers: those of its start among them."""


def odd_options(config: Mapping[str, Any]) -> list[str]:
    """Options of a LoRA, PEFT's future ones too, with which its factors are not all of it, or mean another update than `scaling B A`."""
    return sorted(
        name for name, value in config.items() if name not in _PLAIN and value not in (None, False, "none", [], {})
    )


def changes_base(config: Mapping[str, Any]) -> bool:
    """True if PEFT takes a part out of the base's weights as it makes an adapter with this configuration: PiSSA, OLoRA and others.

    The part depends on the rank, so that factors of two adapters do not add up.
    """
    return str(config.get("init_lora_weights", True)).lower() not in ("true", "false", "none", "gaussian", "eva", "orthogonal")  # fmt: skip


def writes_base(config: Mapping[str, Any]) -> bool:
    """True if an adapter of this configuration writes to weights of its base: to biases, or what `changes_base` tells."""
    return changes_base(config) or config.get("bias") not in (None, "none")


def refuse_base_writes(peft_config: Any) -> None:
    """Raise ConfigError for an adapter that writes to its base, where other runs share that."""
    if hasattr(peft_config, "to_dict") and writes_base(peft_config.to_dict()):
        raise ConfigError(
            "Runs on one base cannot have an adapter that writes to weights of the base (bias, or init_lora_weights such as 'pissa'), "
            "which the others would see; leave these out, or train the runs alone."
        )


def scaling(config: Mapping[str, Any]) -> float:
    """The factor on the product of a LoRA's matrices."""
    rank = float(config["r"])
    alpha = rank if config.get("lora_alpha") is None else float(config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def place_of(name: str) -> str:
    """The whole path of a model that is a folder here; any other name as it is."""
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().exists() else name
