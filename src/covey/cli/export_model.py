"""`covey export RUN --format ...`: a run's model as merged weights, an adapter, or a GGUF file, verified by reading it back."""

import shutil
from pathlib import Path

from covey.adapters import base_of
from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError, ModelError, did_you_mean

FORMATS = ("merged", "adapter", "gguf")


def run(args: Args) -> None:
    """Write the model in the format of `--format`, whole or not at all."""
    from covey.cli.checkpoints import model_folder
    from covey.models import resolve_source

    kind = args["format"]
    if kind not in FORMATS:
        near = did_you_mean(str(kind), FORMATS) if kind else ""
        raise ConfigError(f"--format is one of {', '.join(FORMATS)}.{near}")
    if args.get("outtype") is not None and kind != "gguf":
        raise ConfigError("--outtype belongs to --format gguf; weights in other formats have --dtype.")
    if args.get("dtype") is not None and kind != "merged":
        raise ConfigError(
            f"--dtype belongs to --format merged; {'use --outtype' if kind == 'gguf' else 'an adapter is copied'}."
        )
    out = Path(args["output"]).expanduser()
    if out.exists() and (kind == "gguf" or not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give --output another name, or remove it.")
    folder = Path(resolve_source(model_folder(args["model"])))
    if not folder.is_dir():
        raise ConfigError(
            f"{args['model']} is no folder here; give a run, a checkpoint or a folder with a model or an adapter."
        )
    if args.get("base") is not None and (kind == "adapter" or not _is_adapter(folder)):
        raise ConfigError("--base is what an adapter is added into, and nothing is added here; leave it out.")
    {"merged": _export_merged, "adapter": _export_adapter, "gguf": _export_gguf}[kind](folder, out, args)


def _export_merged(folder: Path, out: Path, args: Args) -> None:
    from covey.cli.merge import add_adapter, processing_of
    from covey.models import load_model
    from covey.runs.storage import storage_errors, whole_folder
    from covey.training.recording import write_model

    if _is_adapter(folder):
        return add_adapter(folder, out, args)
    trust = bool(args["trust_remote_code"])
    model = load_model(str(folder), {"dtype": args["dtype"] or "auto"}, trust_remote_code=trust)
    processing = processing_of(model, folder, None, args)
    with storage_errors(out), whole_folder(out) as unfinished:
        write_model(unfinished, model, processing)
    back = load_model(str(out), {"dtype": "auto"}, trust_remote_code=trust).state_dict()
    for name, weight in model.state_dict().items():
        if not bool((back[name] == weight).all()):
            raise ModelError(f"{out} was written but {name} reads back unlike it was. Check the disk.")
    facts = {"out": str(out), "format": "merged", "tensors": len(back)}
    output.answer(args, facts, f"{out}: {len(back)} tensors, read back equal")


def _export_adapter(folder: Path, out: Path, args: Args) -> None:
    """The adapter's files and the tokenizer's, byte by byte, and nothing of the optimizer."""
    if not _is_adapter(folder):
        raise ConfigError(
            f"{folder} holds whole weights and no adapter (adapter_config.json); use --format merged or gguf."
        )
    from covey.runs.storage import checksum, storage_errors, whole_folder

    base = base_of(folder)
    names = [path.name for path in sorted(folder.iterdir()) if path.is_file() and _is_of_adapter(path.name)]
    with storage_errors(out), whole_folder(out) as unfinished:
        unfinished.mkdir(parents=True)
        for name in names:
            shutil.copyfile(folder / name, unfinished / name)
    for name in names:
        if checksum(folder / name) != checksum(out / name):
            raise ModelError(f"{out / name} was written but reads back unlike it was. Check the disk.")
    facts = {"out": str(out), "format": "adapter", "base": base, "files": names}
    output.answer(args, facts, f"{out}: {len(names)} files, for {base}")


def _export_gguf(folder: Path, out: Path, args: Args) -> None:
    from covey.models import load_model, load_tokenizer
    from covey.models.gguf import expect_exportable, load_gguf, write_gguf
    from covey.runs.storage import storage_errors, whole_file

    load_gguf()
    outtype, trust = args["outtype"] or "f16", bool(args["trust_remote_code"])
    if _is_adapter(folder):
        from covey.cli.merge import merged_model

        base = args.get("base") or base_of(folder)
        model = merged_model(base, folder, {**args, "dtype": "float32"}).model  # rounded once, to the file's type
    else:
        model = load_model(str(folder), {"dtype": "auto"}, trust_remote_code=trust)
    expect_exportable(model.config.get_text_config(), outtype)
    tokenizer = load_tokenizer(model, folder, trust_remote_code=trust)
    with whole_file(out) as unfinished, storage_errors(out):
        done = write_gguf(unfinished, model, tokenizer, name=out.stem, outtype=outtype)
    facts = {
        "out": str(out),
        "format": "gguf",
        "outtype": outtype,
        "tensors": done.num_tensors,
        "bytes": done.size,
        "error": done.largest_error,
    }
    size = f"{done.num_tensors} tensors, {done.size / 1e6:.1f} MB"
    output.answer(args, facts, f"{out}: {size}, read back: the largest error of a weight is {done.largest_error:.1e}")


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _is_of_adapter(name: str) -> bool:
    is_tokenizer = name.startswith(("adapter_", "tokenizer", "vocab.")) or name.endswith(
        (".model", "processor_config.json")
    )
    return is_tokenizer or name in (
        *("special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja", "README.md"),
    )


model_verb = Verb(
    name="export",
    usage="RUN | CHECKPOINT | MODEL --format merged|adapter|gguf -o OUT [options]",
    sentence="A trained model in the formats of other programs; the output is read back and compared.",
    examples=(
        "covey export runs/first --format gguf -o first.gguf",
        "covey export runs/first --format gguf --outtype q8_0 -o first-q8.gguf",
        "covey export runs/lora --format adapter -o adapter",
    ),
    positional=("model",),
    needs=dict.fromkeys(("model", "output"), "a model and --output: covey export runs/first -o first.gguf --format gguf."),
    places={"model": "model folder", "base": "model folder"},
    run=run,
    flags=lambda: (
        Flag(name="model", help="A run, a checkpoint, or a folder with a model or an adapter.", group="what"),
        Flag(name="format", help="merged: weights and tokenizer as transformers reads them; adapter: the adapter alone; gguf: one file for llama.cpp.", group="what"),
        Flag(name="output", short="o", help="Folder, or file for gguf, to write; it must not exist.", group="what"),
        Flag(name="outtype", help="gguf: f32, f16, bf16 or q8_0; f16 when left out.", group="model"),
        Flag(name="dtype", help="merged: float32, bfloat16 or float16; as stored when left out.", group="model"),
        Flag(name="base", help="The model that the adapter belongs to; default: the one that the adapter names.", group="what"),
        Flag(name="trust_remote_code", help="Run Python code that comes with the model.", type=bool, group="model", is_common=False),
        JSON,
    ),
)  # fmt: skip
