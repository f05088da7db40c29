"""Processors of models that read media: tokenizer and the parts for each modality in one, without torchvision where that can be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.errors import CoveyError, ModelError
from covey.files.bounded import read_json
from covey.files.hub import bounded_hub, hub_options
from covey.models.loading import first_line, load_tokenizer, resolve_source
from covey.models.passes import reads_media

_CONFIGS = ("processor_config.json", "preprocessor_config.json")


def load_processing(
    model: Any,
    source: str | Path | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """The processor of a model that reads media, or the tokenizer of any other, at `source` or in the model's folder.

    The tokenizer alone for a local folder that holds no processor. `init_kwargs`: as of `load_tokenizer`. Raises ModelError when there is neither.
    """
    where = resolve_source(source if source is not None else model.config._name_or_path)
    is_bare = Path(where).is_dir() and not any((Path(where) / name).is_file() for name in _CONFIGS)
    if not where or is_bare or not reads_media(model):
        return load_tokenizer(model, source, init_kwargs, trust_remote_code=trust_remote_code)
    from transformers import AutoProcessor

    try:
        with bounded_hub(where):
            return AutoProcessor.from_pretrained(where, trust_remote_code=trust_remote_code, **hub_options(init_kwargs))
    except CoveyError:
        raise
    except Exception as error:
        if _lacks_video(error):
            return _without_video(model, where, hub_options(init_kwargs))
        hint = " (pip install 'covey[vision,audio]')" if isinstance(error, ImportError) else ""
        raise ModelError(
            f"No processor could be loaded from {where!r}{hint}: {first_line(error)}; pass processing_class= to give another."
        ) from error


def _lacks_video(error: Exception) -> bool:
    """True where torchvision is missing, or the folder was written by a processor without the part for videos."""
    is_unsaved = isinstance(error, OSError) and "load video processor" in str(error)
    return is_unsaved or (isinstance(error, ImportError) and "VideoProcessor" in str(error))


def _without_video(model: Any, where: str, options: Mapping[str, Any]) -> Any:
    """The processor without the part for videos."""
    try:
        with bounded_hub(where):
            return without_video(_processor_class(model, where, options)).from_pretrained(where, **options)
    except CoveyError:
        raise
    except Exception as error:
        raise ModelError(
            f"No processor could be loaded from {where!r} without its part for videos: {first_line(error)}; pip install torchvision."
        ) from error


def _processor_class(model: Any, where: str, options: Mapping[str, Any]) -> Any:
    """The class that the folder names, since a part of a model has no processor of its own; else that of the model."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils.hub import cached_file

    for name in _CONFIGS:
        file = cached_file(where, name, _raise_exceptions_for_missing_entries=False, **options)
        if file is not None and (named := read_json(file, ModelError).get("processor_class")):
            return getattr(transformers, named)
    mapping: Any = PROCESSOR_MAPPING
    return mapping[type(model.config)]


def without_video(processor_class: Any) -> Any:
    """The processor class for every other modality: it has no video processor, which would need torchvision."""
    from transformers import ProcessorMixin

    every = processor_class.get_attributes()
    rest = [name for name in every if name != "video_processor"]

    class Named(ProcessorMixin):
        """The parts by name: processor classes hand them on by their places in `every`."""

        def __init__(self, *parts: Any, **options: Any) -> None:
            named = dict(zip(every, parts, strict=False))
            super().__init__(**{name: named[name] for name in rest if name in named}, **options)

    class WithoutVideo(processor_class, Named):  # type: ignore[misc]
        def __init__(self, *parts: Any, **options: Any) -> None:
            super().__init__(**dict(zip(rest, parts, strict=False)), **options)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return rest

    WithoutVideo.__name__ = WithoutVideo.__qualname__ = processor_class.__name__
    return WithoutVideo
