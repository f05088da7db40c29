"""Loading of models and tokenizers from a folder, a hub id, or a loaded object."""

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covey.adapters import adapter_options, base_of, has_adapter, with_saved_adapter
from covey.data.tokenizer import expect_words
from covey.errors import ConfigError, CoveyError, ModelError, did_you_mean
from covey.files.bounded import read_json
from covey.files.hub import bounded_hub, hub_options
from covey.files.places import near_here, refuse_missing
from covey.models.longrope import follow_run
from covey.models.passes import reads_media, unwrapped
from covey.process.memory import is_out_of_memory

logger = logging.getLogger(__name__)


def load_model(
    model: str | Any,
    init_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    is_trainable: bool = False,
) -> Any:
    """A causal language model, or one that reads images or sounds, in float32 unless `init_kwargs["dtype"]` says otherwise (as TRL loads it).

    `model` is a folder, a hub id, `"demo"` for the model that ships with Covey, or a loaded model, which is returned
    as it is. An adapter is loaded on its base; `is_trainable`: with gradients. Raises ModelError when the folder lacks a file or the id cannot be found.
    """
    if not isinstance(model, (str, Path, SharedBase)):
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is of type {type(model).__name__}; give a folder, a hub id or a loaded model.")
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise ModelError(
                f"The model is a {type(model).__name__}, which has no output layer over a vocabulary; load it with "
                "AutoModelForCausalLM, and give it without a wrapper such as DataParallel."
            )
        if init_kwargs:
            logger.warning(
                "model_init_kwargs changes nothing here: the model is already loaded; give its name instead."
            )
        return model
    if isinstance(model, SharedBase):
        return model.take(init_kwargs, trust_remote_code=trust_remote_code)
    source = resolve_source(model)
    kwargs = {"trust_remote_code": trust_remote_code, **(init_kwargs or {})}
    former_name = kwargs.pop("torch_dtype", None)
    kwargs["dtype"] = dtype_of(kwargs.get("dtype", former_name))
    _check_folder(source)
    if (described := adapter_options(source)) is not None:
        init_kwargs = _of_base(init_kwargs, described)
        base = load_model(base_of(source, described), init_kwargs, trust_remote_code=trust_remote_code)
        with quiet_bars(), as_model_errors(source):
            adapted = with_saved_adapter(base, source, is_trainable=is_trainable)
        follow_run(adapted, source)
        return _finite(adapted, source)
    with quiet_bars(), as_model_errors(model, kwargs):
        auto = auto_class(source, trust_remote_code, init_kwargs)
        loaded, info = auto.from_pretrained(source, **kwargs, output_loading_info=True)
    if missing := sorted(info.get("missing_keys") or ()):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"The model {str(model)!r} has no weights for {missing[0]}{more}, which would be random numbers; its files are "
            "not whole, or of another kind of model."
        )
    follow_run(loaded, source)
    return _finite(loaded, model)


def _finite(model: nn.Module, source: str | Path) -> Any:
    """The model. Raises ModelError where a weight is NaN or infinite, which every later number would be."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.is_meta or not weight.numel() or weight.element_size() < 2:
            continue
        low, high = torch.aminmax(weight.detach())
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise ModelError(
                f"The model {str(source)!r} is broken: {name} holds numbers that are not finite; take an earlier checkpoint or "
                "another copy."
            )
    return model


def _of_base(init_kwargs: Mapping[str, Any] | None, described: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `from_pretrained` for the base of an adapter, which names its revision."""
    return {**(init_kwargs or {}), **hub_options(described)}


def config_of(
    model: str | Any, init_kwargs: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False
) -> Any:
    """Configuration of a model (of an adapter's folder: of its base), read without the weights. Raises what `load_model` raises."""
    from transformers import AutoConfig

    named = model.source if isinstance(model, SharedBase) else model
    if not isinstance(named, (str, Path)):
        return unwrapped(load_model(named)).config
    source = resolve_source(named)
    _check_folder(source)
    if (described := adapter_options(source)) is not None:
        init_kwargs = _of_base(init_kwargs, described)
        return config_of(base_of(source, described), init_kwargs, trust_remote_code=trust_remote_code)
    kwargs = {"trust_remote_code": trust_remote_code, **(init_kwargs or {})}
    with as_model_errors(named, kwargs):
        return AutoConfig.from_pretrained(source, **kwargs)


class SharedBase:
    """A frozen base model that several adapters share: give it to each trainer as its model.

    `source` is loaded once, by the first run. Each run gets modules of its own over the same weight tensors, so that an
    adapter, gradient checkpointing or a mode that one of them sets is not seen by the others. Weights are not copied.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = source
        self._base: Any = None
        self._options: dict[str, Any] = {}

    def take(self, init_kwargs: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False) -> Any:
        """The model for one more run. Raises ConfigError where it is to be loaded with other options than the first time."""
        options = {**(init_kwargs or {}), "trust_remote_code": trust_remote_code}
        if self._base is None:
            before = torch.get_rng_state()
            loaded = load_model(self.source, init_kwargs, trust_remote_code=trust_remote_code)
            if has_adapter(loaded):
                raise ConfigError(
                    f"{self.source} is an adapter, and runs share a whole model; first covey merge it into its base."
                )
            if not torch.equal(before, torch.get_rng_state()):
                raise ModelError(
                    f"Loading {self.source} draws random numbers, which a run that shares it would miss; train its runs alone."
                )
            self._base, self._options = loaded, options
        changed = sorted(name for name in {*options, *self._options} if options.get(name) != self._options.get(name))
        if changed:
            raise ConfigError(
                f"Runs on one base load it alike, but {', '.join(changed)} differs; give them the same value, or train them alone."
            )
        return copy.deepcopy(self._base, {id(weight): weight for weight in self._base.parameters()})


def auto_class(source: str, trust_remote_code: bool = False, init_kwargs: Mapping[str, Any] | None = None) -> Any:
    """transformers' class that loads this model, as its config says; a model that speaks (Qwen2.5-Omni) by its part that writes."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL

    config = transformers.AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code, **hub_options(init_kwargs)
    )
    if (thinker := getattr(config, "thinker_config", None)) is not None:
        return getattr(transformers, MULTIMODAL[thinker.model_type])
    is_named = any(name in MULTIMODAL.get(config.model_type, ()) for name in config.architectures or ())
    reads = is_named and reads_media(config)
    return transformers.AutoModelForMultimodalLM if reads else transformers.AutoModelForCausalLM


@contextmanager
def as_model_errors(name: Any, kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Context manager: hub requests get time limits, and exceptions of transformers about a folder's files become ModelErrors.

    So do missing packages that a model's code needs. Out-of-memory errors, and errors of Covey itself, pass unchanged.
    """
    refuse_missing(str(name), "model folder")
    with bounded_hub(str(name)) as is_reachable:
        try:
            yield
        except (CoveyError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            options = [key for key in (kwargs or ()) if re.search(rf"\b{re.escape(key)}\b", str(error))]
            raise ModelError(_unloadable(name, error, options, is_reachable=is_reachable)) from error


def _unloadable(name: Any, error: Exception, options: Sequence[str], *, is_reachable: bool) -> str:
    if not is_reachable and not Path(resolve_source(name)).exists():
        return f"The model {str(name)!r} is neither a folder here nor in the cache, and the hub cannot be reached.{near_here(str(name))}"
    if isinstance(error, TypeError) and options:
        return f"The model {str(name)!r} does not take {options[0]} of model_init_kwargs: {first_line(error)}"
    hint = "" if Path(resolve_source(name)).exists() else near_here(str(name))
    return f"The model {str(name)!r} could not be loaded: {first_line(error)}{hint}"


def load_tokenizer(
    model: Any,
    source: str | Path | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """The tokenizer at `source`, or the one in the folder of the loaded model; an adapter's folder without one has its base's.

    `init_kwargs`: those that the model was loaded with, as `load_model` takes them. Raises ModelError when there is none.
    """
    from transformers import AutoTokenizer

    where = resolve_source(source if source is not None else model.config._name_or_path)
    if (described := adapter_options(where)) is not None and not any(Path(where).glob("tokenizer*")):
        where, init_kwargs = resolve_source(base_of(where, described)), _of_base(init_kwargs, described)
    if not str(where):
        raise ModelError(
            "The model was not loaded from a folder or id, so its tokenizer is unknown; pass processing_class=."
        )
    refuse_missing(str(where), "model folder")
    try:
        with bounded_hub(where):
            tokenizer = AutoTokenizer.from_pretrained(
                where, trust_remote_code=trust_remote_code, **hub_options(init_kwargs)
            )
    except Exception as error:  # tokenizers raises Exception itself
        files = "tokenizer.json and tokenizer_config.json must lie beside the model, or pass processing_class="
        hint = _model_of_run(Path(where)) or files
        raise ModelError(f"No tokenizer could be loaded from {str(where)!r} ({hint}): {first_line(error)}") from error
    expect_words(tokenizer)
    return tokenizer


@contextmanager
def quiet_bars() -> Iterator[None]:
    """transformers draws a bar for each file it reads or writes, which would tear the progress line."""
    from transformers.utils import logging as hf_logging

    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()


def resolve_source(source: str | Path) -> str:
    """A folder or hub id; `"demo"` is the shipped model unless a folder of that name exists here."""
    if str(source) == "demo" and not Path("demo").exists():
        from covey.demo import model_path

        return str(model_path())
    return str(Path(source).expanduser()) if str(source).startswith("~") else str(source)


def _check_folder(source: str) -> None:
    """A local folder must hold its files; anything that does not look like a path is left to the hub."""
    folder = Path(source)
    refuse_missing(source, "model folder")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ModelError(f"The model {source!r} is a file; give the folder that holds config.json and the weights.")
    patterns = {"config.json": ("config.json",), "model.safetensors": ("*.safetensors", "*.bin")}
    is_adapter = (folder / "adapter_config.json").is_file()
    has = lambda names: any(path for name in names for path in folder.glob(name))
    missing = [] if is_adapter else [name for name, names in patterns.items() if not has(names)]
    if missing:
        content = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        fix = _model_of_run(folder) or f"it holds {content}"
        raise ModelError(f"The model folder {source!r} lacks {' and '.join(missing)}; {fix}.")
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        if (folder / name).is_file() and not isinstance(read_json(folder / name, ModelError), dict):
            raise ModelError(f"{folder / name} holds no options of a model: it must be one JSON object.")


def _model_of_run(folder: Path) -> str:
    """The advice to give the model that a run ended with, where the folder is a run's."""
    is_run = any((folder / "model" / name).is_file() for name in ("config.json", "adapter_config.json"))
    return f"give {str(folder / 'model')!r}, what this run ended with" if is_run else ""


def dtype_of(value: Any) -> Any:
    """The type of a model's weights from `model_init_kwargs["dtype"]`: float32 by default, "auto" for the dtype of its files."""
    if value is None:
        return torch.float32
    if value == "auto" or not isinstance(value, str):
        return value
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        names = ["auto", "float32", "bfloat16", "float16"]
        raise ConfigError(f"dtype {value!r} is not known.{did_you_mean(value, names)} Use one of {', '.join(names)}.")
    return dtype


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "trust_remote_code" in str(error):
        return "it comes with Python code of its own; read that code, and allow it with trust_remote_code=True"
    if lines and lines[0].endswith(":"):  # such as a missing package, and the command that installs it
        return " ".join(lines[:2])
    return lines[0] if lines else type(error).__name__


def short_name(model: Any) -> str:
    """Last part of the name or folder that a model was loaded from; "model" if it has none."""
    named = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "_name_or_path", "")
    return Path(str(named)).name or "model"
