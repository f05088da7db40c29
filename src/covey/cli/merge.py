"""`covey merge`: an adapter added into its base model, or several models or adapters merged into one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.adapters import adapter_options, base_of, with_saved_adapter
from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.merge_models import merge, refuse_idle
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError, ModelError, first_line
from covey.files.hub import hub_options

MOST_APART = 1e-3
"""Logits in float32 may differ so much, relative to their largest, before and after adding."""


def run(args: Args) -> None:
    """Add one adapter into its base, or merge several models or several adapters."""
    from covey.cli.checkpoints import model_folder
    from covey.models import resolve_source

    out = Path(args["output"]).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give --output another name, or remove it.")
    folders = [Path(resolve_source(model_folder(source))) for source in args["model"]]
    for named, folder in zip(args["model"], folders, strict=True):
        if not folder.is_dir():
            raise ConfigError(
                f"{named} is no folder here; give a run, a checkpoint or a folder with a model or an adapter."
            )
    adapters = [(folder / "adapter_config.json").is_file() for folder in folders]
    if len(folders) == 1 and args.get("method") is None:
        if not adapters[0]:
            raise ConfigError(
                f"{args['model'][0]} holds whole weights and no adapter (adapter_config.json): use it as it is."
            )
        refuse_idle(args, ("base", "dtype"), "one adapter that is added into its base")
        return add_adapter(folders[0], out, args)
    if all(adapters):
        return _merge_adapters(folders, out, args)
    return merge(folders, out, args, _dtype_of(args))


def add_adapter(folder: Path, out: Path, args: Args) -> None:
    """Load, add, compare, write."""
    base = args.get("base") or base_of(folder)
    merged = merged_model(base, folder, args)
    _write(out, merged, folder, base, args)
    dtype = str(merged.dtype).removeprefix("torch.")
    if args.get("json"):
        facts = {"dtype": dtype, "logits_apart": merged.apart, "logits_moved": merged.moved}
        output.result_json({"out": str(out), "base": base, "adapter": str(folder), **facts})
        return
    effect = f"as {dtype}, logits are {merged.apart:.1e} of their largest from the adapter's, which moved them by {merged.moved:.1e}"
    output.result(f"{folder} added into {base}: {out} ({effect})")
    if merged.apart > SHARE_LOST * merged.moved:
        output.say(
            f"{dtype} rounds away {100 * merged.apart / merged.moved:.0f}% of what the adapter changed; --dtype float32 keeps it."
        )


def _merge_adapters(folders: Sequence[Path], out: Path, args: Args) -> None:
    from covey.merging import merge_adapters

    is_plain = args.get("method") in (None, "linear")
    refuse_idle(
        args, ("weights", "rank", *(("method",) if is_plain else ())), "adapters, which are merged as a weighted mean"
    )
    if out.exists():
        out.rmdir()
    error = merge_adapters(folders, out, args.get("weights") or (), args.get("rank"))
    exact = "exact" if args.get("rank") is None else f"its updates differ by at most {100 * error:.2g}%"
    facts = {"out": str(out), "adapters": [str(folder) for folder in folders], "error": error}
    output.answer(args, facts, f"{len(folders)} adapters merged: {out} ({exact})")


@dataclass(frozen=True, eq=False)
class Merged:
    """A model with its adapter added in float32, then rounded to `dtype`. Distances are shares of the largest logit."""

    model: Any
    dtype: Any
    apart: float
    """Between the adapter's logits and those of the weights as they are written, both computed in float32."""
    moved: float
    """Between the adapter's logits and the base model's."""


SHARE_LOST = 0.01
"""Share of the adapter's effect that rounding may lose before the user is warned."""


def merged_model(base: str, folder: Path, args: Args) -> Merged:
    """The base model with the adapter in its weights. Raises ModelError where the sum itself answers otherwise."""
    import torch

    from covey.data import vocabulary_size
    from covey.models import load_model

    trusts = args.get("trust_remote_code", False)
    dtype = _dtype_of(args)
    place = {} if args.get("base") else hub_options(adapter_options(folder))
    model = load_model(base, place, trust_remote_code=trusts).eval()
    dtype = dtype or _stored_dtype(base, place, trusts)
    try:
        ids = torch.arange(1, 17)[None] % vocabulary_size(model)
        with torch.no_grad():
            plain = model(ids).logits
            adapted = with_saved_adapter(model, folder).eval()
            before = adapted(ids).logits
            is_tied = model.get_output_embeddings() is not None and model.config.get_text_config().tie_word_embeddings
            if is_tied:
                _untie(adapted)
            merged = adapted.merge_and_unload(safe_merge=True)
            if is_tied:
                _tie_again(merged)
            after = merged(ids).logits
            for weight in merged.parameters():  # rounded as they are written, and computed with in float32
                weight.data = weight.data.to(dtype).float()
            written = merged(ids).logits
    except (ValueError, RuntimeError, AttributeError, KeyError, OSError) as error:
        reason = first_line(error)
        raise ModelError(f"The adapter in {folder} cannot be added into {base}: {reason}") from error
    size = before.abs().max().clamp_min(1e-30)
    width = min(plain.shape[-1], before.shape[-1])  # an adapter may bring further tokens
    share = lambda logits, other: float((logits[..., :width] - other[..., :width]).abs().max() / size)
    if not share(after, before) <= MOST_APART:
        raise ModelError(
            f"The merged model answers unlike the adapted one (logits differ by {share(after, before):.1e}); not written."
        )
    return Merged(merged.to(dtype), dtype, share(written, before), share(plain, before))


def _untie(adapted: Any) -> None:
    """Give the LM head weights of its own where it shares the embeddings', so that an adapter on one of them changes that one alone."""
    from torch import nn

    from covey.models import unwrapped

    model = unwrapped(adapted)
    shared = {id(weight) for weight in model.get_input_embeddings().parameters()}
    for part in model.get_output_embeddings().modules():
        for name, weight in part.named_parameters(recurse=False):
            if id(weight) in shared:
                part.register_parameter(name, nn.Parameter(weight.detach().clone(), weight.requires_grad))
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _tie_again(model: Any) -> None:
    """Let a merged model's head share the embeddings' weight again where they are still equal; its configuration says whether they are."""
    import torch

    text, ends = model.config.get_text_config(), (model.get_input_embeddings(), model.get_output_embeddings())
    model.config.tie_word_embeddings = text.tie_word_embeddings = torch.equal(ends[0].weight, ends[1].weight)
    if text.tie_word_embeddings:
        ends[1].weight = ends[0].weight


def _dtype_of(args: Args) -> Any:
    """The torch dtype of `--dtype`, None without one."""
    import torch

    if args.get("dtype") is None:
        return None
    dtype = getattr(torch, args["dtype"], None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype {args['dtype']!r} cannot be written; give float32, bfloat16 or float16.")
    return dtype


def _stored_dtype(base: str, place: Mapping[str, Any], trusts: bool) -> Any:
    """The type that the base is stored in by its configuration; float32 when it does not say."""
    import torch

    from covey.models import config_of

    dtype = config_of(base, place, trust_remote_code=trusts).get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def processing_of(model: Any, folder: Path, base: str | None, args: Args) -> Any:
    """The tokenizer in `folder`; of a model that reads media the processor around it, its base's where the folder of an adapter has none."""
    from covey.models import reads_media
    from covey.models.modalities import load_processing

    trusts = args.get("trust_remote_code", False)
    processing = load_processing(model, folder, trust_remote_code=trusts)
    if base is None or not reads_media(model) or hasattr(processing, "tokenizer"):
        return processing
    place = None if args.get("base") else adapter_options(folder)  # the base's revision
    whole = load_processing(model, base, place, trust_remote_code=trusts)
    if not hasattr(whole, "tokenizer"):
        return processing
    whole.tokenizer = processing
    return whole


def _write(out: Path, merged: Merged, folder: Path, base: str, args: Args) -> None:
    """Model and tokenizer or processor, whole or not at all."""
    from covey.models.merging.models import name_dtype
    from covey.runs.storage import storage_errors, whole_folder
    from covey.training.recording import write_model

    processing = processing_of(merged.model, folder, base, args)
    with storage_errors(out), whole_folder(out) as unfinished:
        write_model(unfinished, merged.model, processing)
        name_dtype(unfinished, merged.dtype)


verb = Verb(
    name="merge",
    usage="ADAPTER | MODEL MODEL ... -o FOLDER [options]",
    sentence="Add an adapter into its base model, or merge several models or adapters into one.",
    examples=(
        "covey merge runs/first -o merged",
        "covey merge runs/a runs/b --method slerp --weights 0.3 -o merged",
        "covey merge runs/a runs/b --method ties --base Qwen2.5-0.5B -o merged --choose test.jsonl --reward math",
    ),
    positional=("model",),
    needs=dict.fromkeys(
        ("model", "output"),
        "what to merge and a folder to write to: covey merge runs/first -o merged, or covey merge A B --method slerp -o merged.",
    ),
    places={"model": "model folder", "base": "model folder", "choose": "data set"},
    run=run,
    flags=lambda: (
        Flag(name="model", help="Runs, checkpoints or folders with a model or an adapter; one adapter is added into its base.", type=list[str], group="what"),
        Flag(name="output", short="o", help="Folder to write; it must not exist.", group="what"),
        Flag(name="base", help="The model that the adapter belongs to (default: the one that the adapter names), or that the models come from.", group="what"),
        Flag(name="method", help="Of several models: linear, slerp, task_arithmetic, ties, dare_linear or dare_ties; linear when left out.", group="merge"),
        Flag(name="weights", help="Weight of each model; equal when left out. slerp: the share of the second.", type=list[float], group="merge"),
        Flag(name="density", help="ties and dare: share of each difference that is kept; 0.5 when left out.", type=float, group="merge"),
        Flag(name="scale", help="Factor on the merged difference from the base; 1 when left out.", type=float, group="merge"),
        Flag(name="normalize", help="Divide by the sum of the weights; yes when left out.", type=bool, group="merge"),
        Flag(name="rank", help="Of several adapters: rank to reduce them to; exact when left out.", type=int, group="merge"),
        Flag(name="choose", help="Prompts: try several weights and keep the best, unless it is worse than the best of the models.", group="choose"),
        Flag(name="reward", help="With --choose: reward by name or import path.", type=list[str], group="choose"),
        Flag(name="prompt_column", help="With --choose: column that holds the prompt; prompt when left out.", group="choose"),
        Flag(name="columns", help="With --choose: columns under new names, as new=old.", type=list[str], group="choose"),
        Flag(name="max_prompts", help="With --choose: use only the first N rows.", type=int, group="choose"),
        Flag(name="max_tokens", help="With --choose: most tokens of an answer; 256 when left out.", type=int, group="choose"),
        Flag(name="seed", help="Seed of the entries that DARE drops.", type=int, group="merge", is_common=False),
        Flag(name="dtype", help="Type of the written weights; default: as the base is stored.", group="model"),
        Flag(name="trust_remote_code", help="Run Python code that comes with the model.", type=bool, group="model", is_common=False),
        JSON,
    ),
)  # fmt: skip
