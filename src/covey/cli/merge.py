"""`covey merge`: an adapter added into its base model, as a model of its own that any tool can load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Given, Verb
from covey.errors import ConfigError, CoveyError, ModelError
from covey.files.bounded import read_json

MOST_APART = 1e-3
"""Logits in float32 may differ so much, relative to their largest, before and after adding."""


def run(given: Given) -> None:
    """Load, add, compare, write."""
    from covey.cli.checkpoints import model_folder

    if not given.get("model") or not given.get("output"):
        raise ConfigError("covey merge needs an adapter and a folder to write to: covey merge runs/first -o merged.")
    folder, out = Path(model_folder(given["model"])), Path(given["output"]).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give --output another name, or remove it.")
    if not folder.is_dir():
        raise ConfigError(f"{given['model']} is no folder here; give a run, a checkpoint or a folder with an adapter.")
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{given['model']} holds whole weights and no adapter (adapter_config.json): use it as it is."
        )
    base = given.get("base") or _base_of(folder)
    merged, apart = _merged(base, folder, given)
    _write(out, merged, folder, given)
    if given.get("json"):
        output.result_json({"out": str(out), "base": base, "adapter": str(folder), "logits_apart": apart})
    else:
        output.result(f"{folder} added into {base}: {out} (logits differ by {apart:.1e} of their largest)")


def _base_of(folder: Path) -> str:
    described = read_json(folder / "adapter_config.json", ModelError)
    if not isinstance(described, dict):
        raise ModelError(
            f"{folder / 'adapter_config.json'} holds a {type(described).__name__}, not the options of an adapter."
        )
    name = described.get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"The adapter in {folder} does not say which model it belongs to; give --base.")
    return str(name)


def _merged(base: str, folder: Path, given: Given) -> tuple[Any, float]:
    """The base model with the adapter in its weights, and how far their logits are apart. Added in float32."""
    import torch

    from covey.models import load_model

    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError('Adapters need peft: pip install "covey[peft]".') from error
    trusts = given.get("trust_remote_code", False)
    dtype = _asked_dtype(given)
    model = load_model(base, trust_remote_code=trusts).eval()
    dtype = dtype or _stored_dtype(base, trusts)
    ids = torch.arange(1, 17)[None] % model.get_input_embeddings().num_embeddings
    try:
        adapted = PeftModel.from_pretrained(model, folder).eval()
        with torch.no_grad():
            before = adapted(ids).logits
            merged = adapted.merge_and_unload(safe_merge=True)
            after = merged(ids).logits
    except (ValueError, RuntimeError, AttributeError, KeyError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"The adapter in {folder} cannot be added into {base}: {reason}") from error
    apart = float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))
    if not apart <= MOST_APART:
        raise ModelError(
            f"The merged model answers unlike the adapted one (logits differ by {apart:.1e}); not written."
        )
    return merged.to(dtype), apart


def _asked_dtype(given: Given) -> Any:
    """None when nothing was asked for."""
    import torch

    if given.get("dtype") is None:
        return None
    dtype = getattr(torch, given["dtype"], None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype {given['dtype']!r} cannot be written; give float32, bfloat16 or float16.")
    return dtype


def _stored_dtype(base: str, trusts: bool) -> Any:
    """The type that the base is stored in by its configuration; float32 when it does not say."""
    import torch
    from transformers import AutoConfig

    from covey.models import resolve_source

    dtype = AutoConfig.from_pretrained(resolve_source(base), trust_remote_code=trusts).get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _write(out: Path, merged: Any, folder: Path, given: Given) -> None:
    """Model and tokenizer, whole or not at all."""
    from covey.models import load_tokenizer
    from covey.runs.storage import temporary_beside
    from covey.training.recording import write_model

    tokenizer = load_tokenizer(merged, folder, trust_remote_code=given.get("trust_remote_code", False))
    unfinished = temporary_beside(out)
    try:
        write_model(unfinished, merged, tokenizer)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise CoveyError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


verb = Verb(
    name="merge",
    usage="ADAPTER -o FOLDER [options]",
    sentence="Add an adapter into its base model: a model of its own, in the base's precision, that any tool can load.",
    examples=("covey merge runs/first -o merged", "covey merge runs/first/checkpoint-100 -o merged --dtype bfloat16"),
    positional=("model",),
    run=run,
    flags=lambda: (
        Flag(name="model", help="A run, a checkpoint or a folder with an adapter.", group="what"),
        Flag(name="output", short="o", help="Folder to write; it must not be there yet.", group="what"),
        Flag(name="base", help="The model that the adapter belongs to; default: what the adapter says.", group="what"),
        Flag(name="dtype", help="Type of the written weights; default: as the base is stored.", group="model"),
        Flag(name="trust_remote_code", help="Run Python code that comes with the model.", type=bool, group="model", is_common=False),
        JSON,
    ),
)  # fmt: skip
