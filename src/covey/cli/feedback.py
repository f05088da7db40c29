"""`covey feedback`: a score for an answer of `covey serve --learn`; the state of learning; rollback."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from covey.cli import output
from covey.cli.flags import Flag
from covey.cli.serve import KEY
from covey.cli.verb import JSON, Given, Verb
from covey.errors import ConfigError, ServerError

URL = "http://127.0.0.1:8000/v1"


def run(given: Given) -> None:
    """Send a score, ask for the state of learning, or roll back."""
    wanted = [bool(given.get("id")), bool(given.get("status")), bool(given.get("rollback"))]
    if sum(wanted) != 1:
        raise ConfigError("covey feedback does one of ID SCORE, --status and --rollback.")
    if given.get("status"):
        _show(_ask(given, "learning"), given)
    elif given.get("rollback"):
        said = _ask(given, "rollback", {"model": given["model"]} if given.get("model") else {})
        told = f"{said['model']} is served in version {said['weights_version']}; {said['withdrawn']} is withdrawn."
        output.result_json(said) if given.get("json") else output.result(told)
    else:
        _send(given)


def _send(given: Given) -> None:
    if given.get("score") is None:
        raise ConfigError("covey feedback ID needs a score from -1 to 1: covey feedback chatcmpl-... 1")
    try:
        score = float(given["score"])
    except ValueError as error:
        raise ConfigError(f"{given['score']!r} is no score; give a number from -1 to 1.") from error
    body = {name: given[name] for name in ("id", "index", "comment") if given.get(name) is not None}
    body["score"] = score
    said = _ask(given, "feedback", body)
    if given.get("json"):
        output.result_json(said)
        return
    told = "" if said["trained_on"] else f" It will not be trained on: {said['reason']}."
    output.result(f"{said['score']:g} for an answer of version {said['weights_version']}.{told}")


def _show(said: dict[str, Any], given: Given) -> None:
    if given.get("json"):
        output.result_json(said)
        return
    for name, version in said["served"].items():
        output.result(_row("served", f"{name} in version {version}"))
    waiting = sum(said["waiting"].values())
    output.result(_row("scores", f"{waiting} wait, {said['needed']} make a candidate"))
    for name, count in said["scores"].items():
        output.result(_row("", f"{count} {name.replace('_', ' ')}"))
    for one in said["candidates"]:
        verdicts = one.get("verdicts", {}).values()
        against = "; ".join(
            f"{v['served']:.3f} -> {v['candidate']:.3f}, 95% {v['low']:+.3f} to {v['high']:+.3f}" for v in verdicts
        )
        version = f" {one['version']}" if "version" in one else ""
        output.result(_row(one["outcome"].replace("_", " ") + version, against))
    if said["problem"]:
        output.result(_row("learning ended", said["problem"]))


def _row(name: str, said: str) -> str:
    return f"{name:<16}{said}"


def _ask(given: Given, page: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Answer of the endpoint. Raises ServerError with its words, or where it cannot be reached."""
    url = f"{(given.get('url') or URL).rstrip('/')}/{page}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {given['url']} is no address; give one such as {URL}.")
    key = given.get("api_key") or os.environ.get(KEY)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        raise ServerError(_words(error, url)) from error
    except (OSError, ValueError) as error:
        raise ServerError(f"{url} does not answer ({error}); is covey serve --learn running there?") from error


def _words(error: urllib.error.HTTPError, url: str) -> str:
    try:
        said = str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = f"{url} answers {error.code}."
    return f"{url} is not there; start the endpoint with covey serve --learn." if said.endswith("Not Found.") else said


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
        Flag(name="index", help="Which answer, where a request asked for several; 0 is the first.", type=int, group="score"),
        Flag(name="comment", help="Words to keep beside the score.", group="score"),
        Flag(name="status", help="Show the served version, scores that wait, and the latest candidates.", type=bool, group="learning"),
        Flag(name="rollback", help="Serve the version of before, and withdraw the present one.", type=bool, group="learning"),
        Flag(name="model", help="With --rollback: which model; the one that is served to all when left out.", group="learning"),
        Flag(name="url", help=f"Base URL of the endpoint; {URL} when left out.", group="server"),
        Flag(name="api_key", help=f"Key of the endpoint; better set {KEY}.", group="server"),
        JSON,
    ),
)  # fmt: skip
