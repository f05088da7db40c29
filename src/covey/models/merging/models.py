"""Whole models of one architecture, merged tensor by tensor from their files. No model is loaded."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.errors import ConfigError, ModelError
from covey.files.bounded import read_json
from covey.models.loading import config_of
from covey.models.merging.methods import Recipe
from covey.models.merging.weights import Described, Weights, write

_FREE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"})
"""Entries of config.json that may differ between models that fit together."""
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*")
_LEFT = ("model.safetensors.index.json", "manifest.json", "covey_state.json", "trainer_state.json")
"""Of the first model's files, or of a checkpoint's: they say what is no longer true of the merge."""


def merge_models(
    folders: Sequence[Path],
    out: Path,
    recipe: Recipe,
    *,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Recipe:
    """Write the merge of the models in `folders` to the new folder `out`; the recipe with its weights filled in.

    Config, tokenizer and generation config are the first model's. `dtype` is the written type (None: the first model's).
    Raises ConfigError or ModelError, before anything is written, for models that do not fit together.
    """
    recipe = recipe.check(len(folders), base is not None)
    every = [*folders, *([] if base is None else [base])]
    _check_configs(every)
    _check_tokenizers(every, report)
    weights = [_without_tied_head(Weights(folder), _config(folder)) for folder in every]
    names = _common_names(every, weights)
    first = weights[0]
    written = lambda stored: dtype if dtype is not None and stored.is_floating_point else stored
    described = {name: (written(first.dtype(name)), first.shape(name)) for name in names}
    out.mkdir(parents=True)
    try:
        bases = None if base is None else weights[-1]
        write(out, described, _merge(recipe, described, weights[: len(folders)], bases))
        _copy_rest(folders[0], out, dtype)
        lineage = {"method": recipe.method, "weights": recipe.weights, "models": [str(folder) for folder in folders]}
        (out / "merge.json").write_text(json.dumps({**lineage, "base": base and str(base)}, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return recipe


def _merge(recipe: Recipe, described: Described, weights: Sequence[Weights], base: Weights | None) -> Iterator[Tensor]:
    for name, (dtype, _) in described.items():
        tensors = [source[name] for source in weights]
        if tensors[0].is_floating_point():
            merged = recipe(tensors, None if base is None else base[name], name).to(dtype)
            if not bool(torch.isfinite(merged).all()):
                raise ModelError(
                    f"{name} is not finite after the merge as {dtype}; one of the models holds NaN or infinity, or the type is too small."
                )
            yield merged
            continue
        if any(not torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            raise ModelError(f"{name} holds {tensors[0].dtype} and differs between the models, so it cannot be merged.")
        yield tensors[0]


def _check_configs(folders: Sequence[Path]) -> None:
    configs = [_config(folder) for folder in folders]
    for folder, config in zip(folders[1:], configs[1:], strict=True):
        for name in sorted({*configs[0], *config}):
            if configs[0].get(name) == config.get(name):
                continue
            raise ConfigError(
                f"{folders[0]} and {folder} are not of one architecture: {name} is {configs[0].get(name)!r} and "
                f"{config.get(name)!r}. Models that are merged come from one base."
            )


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder} is an adapter and other models are not; give whole models, or adapters alone.")
    config = read_json(folder / "config.json", ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} holds no object.")
    with suppress(ModelError, ConfigError):  # of code that comes with a model: as it is written
        config = config_of(folder).to_dict()  # other releases of transformers write it otherwise
    return _bound(config)


def _bound(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries, those of parts too, that are the same in models that fit together."""
    entries = {
        name: value for name, value in config.items() if name not in _FREE and not str(name).endswith("_token_id")
    }
    return {name: _bound(value) if isinstance(value, dict) else value for name, value in entries.items()}


def _check_tokenizers(folders: Sequence[Path], report: Callable[[str], None]) -> None:
    """Raise where two tokenizers give a word different ids. Raises ConfigError."""
    tokenizers: list[tuple[Path, dict[str, Any]]] = []
    for folder in folders:
        file = folder / "tokenizer.json"
        if file.is_file():
            tokenizers.append((folder, json.loads(file.read_bytes())))
        else:
            report(f"{folder} has no tokenizer.json, so its vocabulary is not compared.")
    for folder, tokenizer in tokenizers[1:]:
        if not _agree(_ids(tokenizers[0][1]), _ids(tokenizer)):
            raise ConfigError(
                f"{tokenizers[0][0]} and {folder} have different vocabularies, so their embeddings do not match row by row; merge "
                "models with one tokenizer."
            )
        more = sorted(_ids(tokenizers[0][1]).keys() ^ _ids(tokenizer).keys())
        if more:
            report(
                f"{more[0]!r} is a word of {tokenizers[0][0]} or {folder} alone ({len(more)} such); its embedding is merged all the same."
            )


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Id of each word of a `tokenizer.json`, added ones too."""
    vocab = tokenizer.get("model", {}).get("vocab") or {}
    words = dict(vocab) if isinstance(vocab, dict) else {entry[0]: place for place, entry in enumerate(vocab)}
    return words | {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}


def _agree(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """True if no word has two ids and no id two words. One may have more words: transformers adds some as it saves."""
    word_of = {place: word for word, place in first.items()}
    return all(first.get(word, place) == place and word_of.get(place, word) == word for word, place in second.items())


def _without_tied_head(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """Without an output layer that repeats the embeddings which the configuration ties it to, and which a merge would part from it.

    transformers leaves it out as it saves; earlier releases did not.
    """
    is_tied = {**config, **config.get("text_config", {})}.get("tie_word_embeddings")
    for head in [name for name in weights.names if is_tied and name.endswith("lm_head.weight")]:
        others = [name for name in weights.names if name != head and weights.shape(name) == weights.shape(head)]
        if any(torch.equal(weights[name], weights[head]) for name in others):
            weights.leave_out(head)
    return weights


def _common_names(folders: Sequence[Path], weights: Sequence[Weights]) -> list[str]:
    names = weights[0].names
    for folder, other in zip(folders[1:], weights[1:], strict=True):
        missing = sorted(set(names) ^ set(other.names))
        if missing:
            raise ModelError(
                f"{folders[0]} and {folder} do not hold the same tensors; {missing[0]} is in one of them only."
            )
        for name in names:
            if weights[0].shape(name) != other.shape(name):
                raise ModelError(
                    f"{name} is {list(weights[0].shape(name))} in {folders[0]} and {list(other.shape(name))} in {folder}; "
                    "merge models of one shape."
                )
    return names


def _copy_rest(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Config, tokenizer and the like of the first model."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in _LEFT:
                shutil.copyfile(file, out / file.name)
    if dtype is not None:
        name_dtype(out, dtype)


def name_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Name the type of the weights in `config.json`, and in its parts for text and media."""
    config = json.loads((folder / "config.json").read_text())
    _name_dtype(config, str(dtype).removeprefix("torch."))
    config.setdefault("dtype", str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _name_dtype(config: dict[str, Any], dtype: str) -> None:
    config.update({key: dtype for key in ("dtype", "torch_dtype") if key in config})
    for name, part in config.items():
        if name.endswith("_config") and name != "quantization_config" and isinstance(part, dict):
            _name_dtype(part, dtype)
