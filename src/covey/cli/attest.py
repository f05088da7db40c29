"""`covey attest`: whether a running server computes with the weights of a folder, by its log-probabilities alone."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.verb import JSON, Args, Verb
from covey.errors import AttestationError, ConfigError, ServerError

if TYPE_CHECKING:
    from covey.evaluation.scored_tokens import ScoredTokens, TokenScorer

_FLAGS = (
    Flag(name="url", help="Address of the server, such as http://127.0.0.1:8000.", group="server"),
    Flag(name="served_name", help="Model name for requests; the server's only model when left out.", group="server"),
    Flag(name="api_key_env", help="Environment variable that holds the server's API key.", group="server"),
    Flag(name="timeout", help="Deadline of each request in seconds.", type=float, default=60.0, group="server"),
    Flag(name="model", help="Weights that the server is to have: a folder, a hub id, an adapter, a checkpoint, or demo.", group="weights"),
    Flag(name="other", help="Weights that it may have instead, such as the base model or the last adapter; may be repeated.", type="list[str]", group="weights"),
    Flag(name="dtype", help="Type in which the server computes: float32, float16, bfloat16; auto: the type of the folder.", default="auto", group="weights"),
    JSON,
)  # fmt: skip


def run(args: Args) -> int:
    """Ask, compare, print. Returns 0 for an attested server, 73 for one with other weights or another dtype, 1 if it cannot be decided."""
    from covey.evaluation.attestation import PROBES, SLOPE_PROBES, Reference, attest, logprobs_of, probes, served_values
    from covey.models import config_of, context_limit, load_tokenizer, short_rope_limit, unwrapped

    folder = args["model"]
    config = config_of(folder)
    dtype = _dtype(args["dtype"], config)
    scorer = _scorer(args, load_tokenizer(None, folder))
    others = args["other"] or ()
    context = None if short_rope_limit(config.get_text_config()) is None else _context(scorer)
    model = _loaded(folder, "float32", context)
    vocabulary = min(model.get_input_embeddings().weight.shape[0], len(scorer.tokenizer))
    rows = probes(vocabulary, context_limit(unwrapped(model)), SLOPE_PROBES if others else PROBES)
    answers: list[ScoredTokens] = [scorer.score(ids) for ids in rows]
    exact = logprobs_of(model, answers)
    del model

    def reference(source: str, dtype: str) -> Reference:
        model = _loaded(source, dtype, context)
        computed = logprobs_of(model, answers)
        is_rounded = bool(others) and dtype != "float32"  # slopes alone read what is stored
        return Reference(logprobs_of(model.float(), answers) if is_rounded else computed, computed)

    rounded = reference(folder, "bfloat16")
    mine = rounded if dtype == "bfloat16" or not others else reference(folder, dtype)
    against = {name: reference(name, dtype) for name in others}
    result = attest(served_values(answers), exact, rounded.computed, dtype, mine, against)
    if args.get("json"):
        output.result_json({"sentence": result.sentence, "form": scorer.form, **asdict(result)})
    else:
        output.result(result.sentence)
        output.say(_margins(result))
    return {"attested": 0, "not decidable": 1}.get(result.verdict, AttestationError.exit_code)


def _loaded(source: str, dtype: str, context: int | None) -> Any:
    """The model, rotated by the set of `longrope` factors that a server of this context length takes for every row."""
    from covey.models import dtype_of, load_model, short_rope_limit, take_factors, unwrapped

    model = load_model(source, {"dtype": dtype_of(dtype)}).eval()
    limit = short_rope_limit(unwrapped(model).config.get_text_config())
    if limit is not None and context is not None:
        take_factors(model, "long" if context > limit else "short")
    return model


def _context(scorer: TokenScorer) -> int | None:
    """Tokens of the server's context, None where it does not tell them."""
    try:
        length = _lengths(scorer.client).get(scorer.model)
    except ServerError:
        return None
    return length if isinstance(length, int) else None


def _lengths(client: Any) -> dict[str, Any]:
    """Context length by name of the server's models, None where it tells none. Raises ServerError without a list of models."""
    try:
        listed = client.call("GET", "/v1/models", seconds=client.deadlines.read)
        return {str(entry["id"]): entry.get("max_model_len") for entry in listed["data"]}
    except (ServerError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(
            f"{client.address} does not list its models at /v1/models ({error}); give an OpenAI-compatible server, or --served-name."
        ) from error


def _margins(result: Any) -> str:
    noticed = f"a change of {result.detectable:.2g} nats or more would have been noticed"
    if result.verdict == "attested" and not result.slopes:
        lines = [
            f"{noticed}; a smaller one can hide in rounding, unless --other names the weights that it may have instead"
        ]
    else:
        chance = "below 1e-9" if result.chance < 1e-9 else f"{result.chance:.1e}"
        lines = [f"chance that this is wrong: {chance}; {noticed}"]
    lines += [
        f"against {name}: slope {slope.value:.3f} ± {slope.error:.2g}, where 1 is --model and 0 is {name}"
        for name, slope in result.slopes.items()
    ]
    return "\n".join(lines)


def _dtype(name: str, config: Any) -> str:
    """Name of the dtype in which the server is to compute."""
    from covey.models import dtype_of

    stored = getattr(config, "dtype", None) if name == "auto" else dtype_of(name)
    return str(stored or "float32").removeprefix("torch.")


def _scorer(args: Args, tokenizer: Any) -> TokenScorer:
    from covey.evaluation.scored_tokens import TokenScorer
    from covey.rollout.vllm.client import Address, Client, Deadlines

    seconds, variable = args["timeout"], args["api_key_env"]
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"--api-key-env {variable}: the environment has no such variable; export {variable}=... first."
        )
    key, deadlines = os.environ[variable] if variable else None, Deadlines(probe=seconds, read=seconds)
    where = f"the environment variable {variable or 'that --api-key-env names'}"
    client = Client(Address.of(args["url"]), deadlines, key=key, key_from=where)
    return TokenScorer(client, args.get("served_name") or _only_model(client), tokenizer)


def _only_model(client: Any) -> str:
    """Name of the server's only model. Raises ConfigError if it has several."""
    names = [*_lengths(client)]
    if len(names) != 1:
        raise ConfigError(f"{client.address} serves {', '.join(names) or 'nothing'}; say which with --served-name.")
    return names[0]


verb = Verb(
    name="attest",
    usage="URL --model FOLDER [options]",
    sentence="Whether a running server computes with these weights, by its log-probabilities alone; the exit code is for scripts.",
    flags=lambda: _FLAGS,
    run=run,
    positional=("url",),
    needs={
        name: f"{name}: covey attest http://127.0.0.1:8000 --model runs/first/checkpoint-100."
        for name in ("url", "model")
    },
    places={"model": "model folder", "other": "model folder"},
    examples=(
        "covey attest http://127.0.0.1:8000 --model runs/a/checkpoint-100",
        "covey attest http://127.0.0.1:8000 --model runs/a/adapter --other Qwen/Qwen2.5-0.5B-Instruct",
    ),
)
