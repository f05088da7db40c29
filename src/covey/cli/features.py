"""`covey features`: columns that describe a data set's rows, among them how often a model solves each."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.columns import column_map, rows_file
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, JSON, Verb
from covey.errors import ConfigError

_FLAGS = (
    Flag(name="output", help="Where the rows go: a .jsonl or .parquet file.", group="data"),
    Flag(name="features", help="length, readability, language, embedding, relevance, pass_rate, difficulty; several with commas.", type="list[str]", group="data"),
    Flag(name="prompt_column", help="Column that holds the prompt.", default="prompt", group="data"),
    Flag(name="columns", help="Rename columns: new=old, so that a reward finds them.", type="list[str]", group="data"),
    Flag(name="answer_column", help="Column of the answer, for relevance.", default="answer", group="data"),
    Flag(name="max_prompts", help="Use only the first N rows.", type=int, group="data"),
    Flag(name="overwrite", help="Replace the output file, and columns of the same names.", type=bool, default=False, group="data"),
    Flag(name="model", help="Model whose answers say how hard a prompt is; its tokenizer counts tokens.", group="difficulty"),
    Flag(name="reward", help="Built-in name or import path that says which answers are right; may be repeated.", type="list[str]", group="difficulty"),
    Flag(name="num_samples", help="Answers drawn for each prompt.", type=int, default=8, least=1, group="difficulty"),
    Flag(name="max_tokens", help="Most tokens of an answer.", type=int, default=256, least=1, group="difficulty"),
    Flag(name="temperature", help="Sampling temperature.", type=float, default=1.0, group="difficulty"),
    Flag(name="threshold", help="An answer is right from this reward on.", type=float, default=0.5, group="difficulty"),
    Flag(name="seed", help="Seed of the drawn answers.", type=int, default=0, group="difficulty"),
    Flag(name="device", help="Where the model computes, such as cpu or cuda:1; left out: this machine's accelerator, else the CPU.", group="difficulty"),
    Flag(name="batch_size", help="Answers in flight at a time.", type=int, default=128, least=1, group="difficulty"),
    Flag(name="embedding_model", help="Folder or hub id of the model that makes vectors, or demo.", group="vectors"),
    JSON,
    CONFIG,
)  # fmt: skip


def run(options: dict[str, Any]) -> None:
    """Read, add the columns, write; print what each column is like."""
    options["features"] = [name.strip() for text in options["features"] for name in text.split(",")]
    _check(options)
    from covey.runs.storage import storage_errors, whole_file

    path = rows_file(options["output"])
    with whole_file(path) as unfinished:
        table = _described(options, path)
        with storage_errors(path):
            _write(table, unfinished, path.suffix)
    summaries = {name: _summary(table[name]) for name in options["features"]}
    if options["json"]:
        output.result_json({"rows": len(table), "output": str(path), "features": summaries})
        return
    output.result(f"{path}: {len(table)} rows")
    for name, summary in summaries.items():
        output.result(f"  {name:<12} {'  '.join(f'{key} {value}' for key, value in summary.items())}")


def _described(options: dict[str, Any], path: Path) -> Any:
    """The data set with the columns that `options` ask for, as it is written to `path`."""
    from covey.data import load
    from covey.data.features import add_features
    from covey.data.features.columns import Embedder
    from covey.data.tables import with_structs
    from covey.models import resolve_source

    dataset = load(
        options["data"],
        prompt_column=options["prompt_column"],
        columns=column_map(options["columns"]),
        limit=options["max_prompts"],
    )
    tokenizer, rates = _judge(options, bool({"pass_rate", "difficulty"} & set(options["features"])))
    embedder = Embedder.of(resolve_source(options["embedding_model"])) if options["embedding_model"] else None
    dataset = with_structs(dataset) if path.suffix == ".parquet" else dataset
    if path.suffix == ".parquet" and (mixed := _mixed(dataset)):
        raise ConfigError(
            f"The column {mixed[0]!r} holds values of several types, which Parquet cannot; write {path.stem}.jsonl."
        )
    return add_features(
        dataset,
        options["features"],
        tokenizer=tokenizer,
        embedder=embedder,
        pass_rates=rates,
        answer_column=options["answer_column"],
        overwrite=options["overwrite"],
    )


def _mixed(dataset: Any) -> list[str]:
    from covey.data.tables import AsWritten

    return [name for name, feature in dataset.features.items() if isinstance(feature, AsWritten)]


def _write(table: Any, path: Path, suffix: str) -> None:
    with _without_bar():
        if suffix == ".parquet":
            table.to_parquet(str(path))
        elif _mixed(table):
            with path.open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
        else:
            table.to_json(str(path), force_ascii=False)


def _check(options: dict[str, Any]) -> None:
    if rows_file(options["output"]).exists() and not options["overwrite"]:
        raise ConfigError(f"{options['output']} is there already; give another --output, or --overwrite.")
    wants = set(options["features"])
    if wants & {"pass_rate", "difficulty"} and not (options["model"] and options["reward"]):
        raise ConfigError(
            "difficulty and pass_rate need --model, which writes the answers, and --reward, which judges them."
        )
    if wants & {"embedding", "relevance"} and not options["embedding_model"]:
        raise ConfigError("embedding and relevance need --embedding-model, a folder or a hub id.")


def _judge(options: dict[str, Any], is_sampled: bool) -> tuple[Any, Any]:
    """The model's tokenizer, and what measures pass rates with it; None where not needed."""
    if not options["model"]:
        return None, None
    from covey.cli.checkpoints import model_folder
    from covey.data import eos_ids, prepare_tokenizer
    from covey.environments.messages import with_messages
    from covey.evaluation.assessment import pass_rates
    from covey.models import context_limit, load_model, load_tokenizer
    from covey.process.device import choose_device, dtype_to_read_in, in_words
    from covey.rewards import Scorer
    from covey.rollout import SamplingParams, choose_sampler

    folder = model_folder(options["model"])
    device = choose_device(options["device"])
    model = load_model(folder, {"dtype": dtype_to_read_in(device)}).to(device)
    tokenizer = prepare_tokenizer(load_tokenizer(model, folder), model)
    if not is_sampled:
        return tokenizer, None
    output.say(f"{options['model']} answers on {in_words(device)} ...")
    limit = context_limit(model)
    scorer = Scorer.of(options["reward"], device=device)
    scorer.read = partial(with_messages, tokenizer=tokenizer)
    rates = partial(
        pass_rates,
        sampler=choose_sampler(model, tokenizer, eos_ids=eos_ids(model, tokenizer)),
        scorer=scorer,
        tokenizer=tokenizer,
        sampling=SamplingParams(
            max_tokens=options["max_tokens"], temperature=options["temperature"], seed=options["seed"]
        ),
        num_samples=options["num_samples"],
        threshold=options["threshold"],
        batch_size=options["batch_size"],
        max_prompt_length=None if limit is None else limit - options["max_tokens"],
    )
    return tokenizer, rates


@contextmanager
def _without_bar() -> Iterator[None]:
    """Without the bar that datasets draws for a file that is written at once."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _summary(values: list[Any]) -> dict[str, Any]:
    present = [value for value in values if value is not None]
    missing = {"none": len(values) - len(present)} if len(present) < len(values) else {}
    if present and isinstance(present[0], str):
        counts = sorted({value: present.count(value) for value in set(present)}.items(), key=lambda item: -item[1])
        return {**dict(counts[:5]), **missing}
    if present and isinstance(present[0], list):
        return {"numbers": len(present[0]), **missing}
    ranked = sorted(present)
    at = lambda share: round(float(ranked[min(int(share * len(ranked)), len(ranked) - 1)]), 3)
    return {"10%": at(0.1), "median": at(0.5), "90%": at(0.9), **missing} if ranked else missing


verb = Verb(
    name="features",
    usage="DATA --features NAMES --output FILE [options]",
    sentence="Add columns that describe rows: length, readability, language, vectors, and how often a model solves them.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("data",),
    needs={
        "data": "a data set: covey features train.jsonl --features length --output out.jsonl.",
        "features": "--features, such as --features length,readability.",
    },
    places={"data": "data set", "model": "model folder", "embedding_model": "model folder"},
    examples=(
        "covey features train.jsonl --features length,readability,language --output described.jsonl",
        "covey features train.jsonl --features difficulty --model runs/x --reward math --output graded.jsonl",
    ),
)
