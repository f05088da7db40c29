"""`covey serve`: an OpenAI-compatible endpoint of a model, an adapter, a checkpoint or what a run ended with; with `--learn` it learns from feedback."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, Args, Verb
from covey.errors import ConfigError
from covey.process.addresses import url_of

FLAGS = (
    Flag(name="learn", help="Learn from scores of the answers: POST /v1/feedback, or covey feedback ID SCORE.", type=bool, default=False, group="learning"),
    Flag(name="fixed_set", help="Prompts that measure what must not get worse: a file, a folder or a hub id, optionally with :split; demo for the demo's. Never trained on.", group="learning"),
    Flag(name="reward", help="Built-in name or import path that scores answers to the fixed set; may be repeated.", type="list[str]", default=[], group="learning"),
    Flag(name="tolerance", help="Mean reward on the fixed set that a promotion may risk; 0: it must certainly be better.", type=float, default=0.02, group="learning"),
    Flag(name="scores_per_candidate", help="Scored answers that a candidate is trained on.", type=int, default=128, group="learning"),
    Flag(name="learn_folder", help="Where scores and versions are kept; learning/ in the folder of the model when left out.", group="learning"),
    Flag(name="learning_rate", help="Learning rate of the adapter.", type=float, default=2e-4, group="learning"),
    Flag(name="per_device_train_batch_size", help="Scored answers of an optimizer step.", type=int, default=32, group="learning", is_common=False),
    Flag(name="beta", help="Weight of the KL to the served version.", type=float, default=0.01, group="learning", is_common=False),
    Flag(name="lora_r", help="Rank of the adapter.", type=int, default=16, group="learning", is_common=False),
    Flag(name="max_feedback_hours", help="Age of an answer from which on its score comes too late.", type=float, default=24.0, group="learning", is_common=False),
    Flag(name="fixed_set_prompts", help="Use only the first N rows of the fixed set.", type=int, group="learning", is_common=False),
    Flag(name="fixed_set_samples", help="Answers drawn to each prompt of the fixed set.", type=int, default=4, group="learning", is_common=False),
    Flag(name="learn_users", help="Learn an adapter for each user (the field user of requests) of that user's scores alone, served as MODEL@USER.", type=bool, default=False, group="learning"),
    Flag(name="max_users", help="Users who may have an adapter.", type=int, default=64, group="learning", is_common=False),
)  # fmt: skip


def refuse_alone(options: Args) -> None:
    """Raise ConfigError for options of learning without `--learn`, and for options that contradict it."""
    if not options["learn"]:
        for flag in FLAGS:
            if options[flag.name] != flag.default:
                raise ConfigError(f"{flag.spelled} belongs to --learn; give both, or leave it out.")
        return
    for name in ("fixed_set", "reward"):
        if not options[name]:
            raise ConfigError(f"--learn needs --{name.replace('_', '-')}: what a new version may not lose.")
    if options["adapter"]:
        raise ConfigError("--learn makes adapters of its own; leave --adapter out, or merge it first (covey merge).")


def settings_of(options: Args) -> Any:
    """Settings of learning. Raises ConfigError or DataError before a model is loaded."""
    from covey.cli.checkpoints import model_folder
    from covey.data import load
    from covey.feedback.settings import Settings
    from covey.rewards import Scorer

    rows = load(options["fixed_set"], limit=options["fixed_set_prompts"])
    with closing(Scorer.of(list(options["reward"]))) as scorer:
        scorer.check(rows.column_names)
    return Settings(
        folder=_folder(options),
        model=str(model_folder(options["model"])),
        fixed_rows=tuple(rows),
        rewards=tuple(options["reward"]),
        tolerance=options["tolerance"],
        scores_per_candidate=options["scores_per_candidate"],
        batch_size=options["per_device_train_batch_size"],
        learning_rate=options["learning_rate"],
        beta=options["beta"],
        lora_r=options["lora_r"],
        max_age_seconds=3600 * options["max_feedback_hours"],
        max_tokens=options["max_output_tokens"] or 256,
        num_samples=options["fixed_set_samples"],
        users=options["learn_users"],
        max_users=options["max_users"],
        dtype=options["dtype"],
        trust_remote_code=bool(options["trust_remote_code"]),
        use_cpu=bool(options["use_cpu"]),
    )


def _folder(options: Args) -> Path:
    if options["learn_folder"]:
        return Path(options["learn_folder"]).expanduser()
    parent = Path(options["model"]).expanduser()
    if not parent.is_dir():
        raise ConfigError(f"{options['model']} is no folder to keep versions in; give --learn-folder FOLDER.")
    return parent / "learning"


KEY = "COVEY_API_KEY"
"""Environment variable of the key, which other users of the machine do not see."""
_FLAGS = (
    Flag(name="model", help="A folder, a run, a hub id, or demo.", group="what"),
    Flag(name="adapter", help="NAME=FOLDER of a LoRA adapter, which clients request as the model NAME; may be repeated.", type="list[str]", default=[], group="what"),
    Flag(name="served_model_name", help="Name by which clients request the model; left out: its path or hub id.", group="what"),
    Flag(name="host", help="Address to listen on; any other than this machine's own needs a key.", default="127.0.0.1", group="server"),
    Flag(name="port", help="Port to listen on; 0: any free one.", type=int, default=8000, least=0, most=65535, group="server"),
    Flag(name="api_key", help=f"Require this key from every client; better set {KEY}, which is not shown in the list of processes.", group="server"),
    Flag(name="max_rows", help="Completions that are written at once.", type=int, default=256, group="limits"),
    Flag(name="max_waiting", help="Prompts that may wait; the next one is answered 429.", type=int, default=256, group="limits"),
    Flag(name="max_output_tokens", help="Most tokens of one answer; the rest of the context after the prompt when left out.", type=int, group="limits"),
    Flag(name="max_choices", help="Most answers of one request: prompts times n.", type=int, default=128, group="limits", is_common=False),
    Flag(name="max_body_bytes", help="Largest body of a request; a larger one is answered 413.", type=int, default=8 * 2**20, group="limits", is_common=False),
    Flag(name="max_connections", help="Connections that may be open; the next one is answered 503.", type=int, default=1024, group="limits", is_common=False),
    Flag(name="drain_seconds", help="Seconds in which running requests may finish after SIGTERM.", type=float, default=30.0, group="limits", is_common=False),
    Flag(name="logprobs_mode", help="raw_logprobs: of the model itself; processed_logprobs: of the distribution that was drawn from.", default="raw_logprobs", group="model", is_common=False),
    Flag(name="dtype", help="Type that the weights are loaded in.", default="float32", group="model", is_common=False),
    Flag(name="sampler_dtype", help="Type that is computed in: auto, float32 (exact) or bfloat16.", default="auto", group="model", is_common=False),
    Flag(name="trust_remote_code", help="Run Python code that comes with the model.", type=bool, group="model", is_common=False),
    Flag(name="use_cpu", help="Use the CPU even where there is an accelerator.", type=bool, group="model", is_common=False),
    *FLAGS,
    CONFIG,
)  # fmt: skip
_LIMITS = ("max_waiting", "max_output_tokens", "max_choices", "max_body_bytes", "max_connections", "drain_seconds")


def run(options: Args) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        from covey.serving import Endpoint, Limits
        from covey.serving.access import checked_key
    except ModuleNotFoundError as error:
        raise ConfigError(f"covey serve needs {error.name}; install it with pip install 'covey[serve]'.") from error
    refuse_alone(options)
    limits = Limits(**{name: options[name] for name in _LIMITS})
    key = checked_key(options["api_key"] or os.environ.get(KEY) or None, options["host"])
    how: dict[str, Any] = {"limits": limits, "api_key": key, "logprobs_mode": options["logprobs_mode"]}
    if options["learn"]:
        from covey.feedback.endpoint import LearningEndpoint

        settings = settings_of(options)
        ((name, sampler),) = samplers_of(options)[0].items()
        served: Any = LearningEndpoint(sampler, settings, name=name, **how)
    else:
        samplers, processor = samplers_of(options)
        served = Endpoint(samplers, **how, processor=processor)
    endpoint = getattr(served, "endpoint", served)
    try:
        listener = endpoint.listen(options["host"], options["port"])
        names = ", ".join(endpoint.samplers)
        served.run(
            listener, lambda: output.result(f"{names} at {url_of(options['host'], listener)}/v1  (Ctrl-C ends it)")
        )
    finally:
        served.close()


def samplers_of(options: Args) -> tuple[dict[str, Any], Any]:
    """The model and its adapters, by the names that clients use, and the processor of a model that reads media, else None."""
    import torch

    from covey import data
    from covey.cli.checkpoints import model_folder
    from covey.models import load_model, unwrapped
    from covey.models.modalities import load_processing
    from covey.rollout import Unsupported, choose_sampler
    from covey.serving.loading import named_adapters, with_merged_adapter

    adapters = named_adapters(options["adapter"])
    name = options["served_model_name"] or options["model"]
    if name in adapters:
        raise ConfigError(f"--adapter {name} has the name of the model itself; give it another.")
    folder, trust = model_folder(options["model"]), bool(options["trust_remote_code"])
    model = load_model(folder, {"dtype": options["dtype"]}, trust_remote_code=trust).eval()
    processing = load_processing(model, folder, trust_remote_code=trust)
    tokenizer = data.prepare_tokenizer(processing, model)
    if torch.accelerator.is_available() and not options["use_cpu"]:
        model = model.to(torch.accelerator.current_accelerator())
    models = {name: model} | {
        adapter_name: with_merged_adapter(unwrapped(model), model_folder(where))
        for adapter_name, where in adapters.items()
    }
    how: dict[str, Any] = {"dtype": options["sampler_dtype"], "max_rows": options["max_rows"]}
    how["eos_ids"] = data.eos_ids(model, tokenizer)
    try:
        samplers = {
            served_name: choose_sampler(served_model, tokenizer, backend="native", **how)
            for served_name, served_model in models.items()
        }
    except Unsupported as error:
        raise ConfigError(f"covey serve runs on the native engine, which cannot run this model: {error}.") from error
    return samplers, None if processing is tokenizer else processing


verb = Verb(
    name="serve",
    usage="MODEL [options]",
    sentence="An OpenAI-compatible endpoint of a model or a run: chat, completions, streaming, tools, log-probabilities, adapters.",
    examples=(
        "covey serve runs/first",
        "covey serve demo --port 0",
        "covey serve BASE --adapter polite=runs/lora/model",
        "COVEY_API_KEY=... covey serve runs/first --host 0.0.0.0",
        "covey serve runs/first --learn --fixed-set held_out.jsonl --reward my.py:reward",
    ),
    positional=("model",),
    needs={"model": "a model: a folder, a run, a hub id, or demo."},
    places={"model": "model folder"},
    flags=lambda: _FLAGS,
    run=run,
)
