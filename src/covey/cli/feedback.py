"""`covey feedback`: a score for an answer of `covey serve --learn`; the state of learning; rollback."""

import json
import os
import urllib.error
import urllib.request
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.serve import KEY
from covey.cli.verb import JSON, Args, Verb
from covey.errors import ConfigError, ServerError
from covey.process.addresses import opener_of

URL = "http://127.0.0.1:8000/v1"


def run(args: Args) -> None:
    """Send a score, ask for the state of learning, or roll back."""
    actions = [bool(args.get("id")), bool(args.get("status")), bool(args.get("rollback"))]
    if sum(actions) != 1:
        raise ConfigError("covey feedback does one of ID SCORE, --status and --rollback.")
    if args.get("status"):
        _show(_ask(args, "learning"), args)
    elif args.get("rollback"):
        reply = _ask(args, "rollback", {"model": args["model"]} if args.get("model") else {})
        served = f"{reply['model']} is served in version {reply['weights_version']}"
        output.answer(args, reply, f"{served}; {reply['withdrawn']} is withdrawn.")
    else:
        _send(args)


def _send(args: Args) -> None:
    if args.get("score") is None:
        raise ConfigError("covey feedback ID needs a score from -1 to 1: covey feedback chatcmpl-... 1")
    try:
        score = float(args["score"])
    except ValueError as error:
        raise ConfigError(f"{args['score']!r} is no score; give a number from -1 to 1.") from error
    body = {name: args[name] for name in ("id", "index", "comment") if args.get(name) is not None}
    body["score"] = score
    reply = _ask(args, "feedback", body)
    note = "" if reply["trained_on"] else f" It will not be trained on: {reply['reason']}."
    output.answer(args, reply, f"{reply['score']:g} for an answer of version {reply['weights_version']}.{note}")


def _show(state: dict[str, Any], args: Args) -> None:
    if args.get("json"):
        output.result_json(state)
        return
    for name, version in state["served"].items():
        output.result(_row("served", f"{name} in version {version}"))
    waiting = sum(state["waiting"].values())
    output.result(_row("scores", f"{waiting} wait, {state['needed']} make a candidate"))
    for name, count in state["scores"].items():
        output.result(_row("", f"{count} {name.replace('_', ' ')}"))
    for candidate in state["candidates"]:
        verdicts = candidate.get("verdicts", {}).values()
        against = "; ".join(
            f"{v['served']:.3f} -> {v['candidate']:.3f}, 95% {v['low']:+.3f} to {v['high']:+.3f}" for v in verdicts
        )
        version = f" {candidate['version']}" if "version" in candidate else ""
        output.result(_row(candidate["outcome"].replace("_", " ") + version, against))
    if state["problem"]:
        output.result(_row("learning ended", state["problem"]))


def _row(name: str, text: str) -> str:
    return f"{name:<16}{text}"


def _ask(args: Args, page: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Answer of the endpoint. Raises ServerError with its words, or where it cannot be reached."""
    url = f"{(args.get('url') or URL).rstrip('/')}/{page}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {args['url']} is no address; give one such as {URL}.")
    key = args.get("api_key") or os.environ.get(KEY)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with opener_of(url).open(request, timeout=60) as answer:
            reply: dict[str, Any] = json.loads(answer.read())
            return reply
    except urllib.error.HTTPError as error:
        raise ServerError(_words(error, url)) from error
    except (OSError, ValueError) as error:
        raise ServerError(f"{url} does not answer ({error}); is covey serve --learn running there?") from error


def _words(error: urllib.error.HTTPError, url: str) -> str:
    try:
        message = str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{url} answers {error.code}."
    return (
        f"{url} is not there; start the endpoint with covey serve --learn."
        if message.endswith("Not Found.")
        else message
    )


verb = Verb(
    name="feedback",
    usage="ID SCORE [options]",
    sentence="A score from -1 to 1 for an answer of covey serve --learn; the state of learning; rollback.",
    examples=(
        "covey feedback chatcmpl-1f0c... 1",
        'covey feedback chatcmpl-1f0c... -0.5 --comment "too long"',
        "covey feedback --status",
        "covey feedback --rollback",
    ),
    positional=("id", "score"),
    run=run,
    flags=lambda: (
        Flag(name="index", help="Which answer, if a request has several; 0 is the first.", type=int, group="score"),
        Flag(name="comment", help="Comment to store with the score.", group="score"),
        Flag(name="status", help="Show the served version, scores that wait, and the latest candidates.", type=bool, group="learning"),
        Flag(name="rollback", help="Serve the previous version, and withdraw the present one.", type=bool, group="learning"),
        Flag(name="model", help="With --rollback: which model; the one that is served to all when left out.", group="learning"),
        Flag(name="url", help=f"Base URL of the endpoint; {URL} when left out.", group="server"),
        Flag(name="api_key", help=f"Key of the endpoint; better set {KEY}.", group="server"),
        JSON,
    ),
)  # fmt: skip
