"""`covey serve`: an OpenAI-compatible endpoint of a model, an adapter, a checkpoint or what a run ended with."""

import os
from typing import Any

from covey.cli import output, serve_learn
from covey.cli.flags import Flag
from covey.cli.verb import CONFIG, Args, Verb
from covey.errors import ConfigError
from covey.process.addresses import url_of

KEY = "COVEY_API_KEY"
"""Environment variable of the key, which other users of the machine do not see."""
_FLAGS = (
    Flag(name="model", help="A folder, a run, a hub id, or demo.", group="what"),
    Flag(name="adapter", help="NAME=FOLDER of a LoRA adapter, which clients request as the model NAME; may be repeated.", type="list[str]", default=[], group="what"),
    Flag(name="served_model_name", help="Name by which clients request the model; left out: its path or hub id.", group="what"),
    Flag(name="host", help="Address to listen on; any other than this machine's own needs a key.", default="127.0.0.1", group="server"),
    Flag(name="port", help="Port to listen on; 0: any free one.", type=int, default=8000, group="server"),
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
    *serve_learn.FLAGS,
    CONFIG,
)  # fmt: skip
_LIMITS = ("max_waiting", "max_output_tokens", "max_choices", "max_body_bytes", "max_connections", "drain_seconds")


def run(args: Args) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    options: dict[str, Any] = {flag.name: flag.default for flag in _FLAGS} | dict(args)
    if not options["model"]:
        raise ConfigError("covey serve needs a model: a folder, a run, a hub id, or demo.")
    if not 0 <= options["port"] < 2**16:
        raise ConfigError(f"--port {options['port']} is none; give one from 0 to 65535.")
    try:
        from covey.serving import Endpoint, Limits
        from covey.serving.access import checked_key
    except ModuleNotFoundError as error:
        raise ConfigError(f"covey serve needs {error.name}; install it with pip install 'covey[serve]'.") from error
    serve_learn.refuse_alone(options)
    limits = Limits(**{name: options[name] for name in _LIMITS})
    key = checked_key(options["api_key"] or os.environ.get(KEY) or None, options["host"])
    how: dict[str, Any] = {"limits": limits, "api_key": key, "logprobs_mode": options["logprobs_mode"]}
    if options["learn"]:
        served: Any = learning_endpoint(options, how)
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


def learning_endpoint(options: Args, how: Args) -> Any:
    """The endpoint of `--learn`."""
    from covey.feedback.endpoint import LearningEndpoint

    settings = serve_learn.settings_of(options)
    ((name, sampler),) = samplers_of(options)[0].items()
    return LearningEndpoint(sampler, settings, name=name, **how)


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
    flags=lambda: _FLAGS,
    run=run,
)
