"""Access control and query parameters. The host name is always checked, the token where there is one; security headers of responses."""

import hmac
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from covey.process.addresses import names_loopback

_LONGEST = 1000
_MISSING = object()


def text(request: Request, name: str, default: Any = _MISSING) -> str:
    """A text of at most 1000 characters; 400 when it is needed and not there."""
    value = request.query_params.get(name)
    if value is None and default is _MISSING:
        raise HTTPException(400, f"{name} is missing.")
    value = default if value is None else value
    if len(value) > _LONGEST:
        raise HTTPException(400, f"{name} is longer than {_LONGEST} characters.")
    return str(value)


def number(request: Request, name: str) -> float | None:
    """A finite number, or None when nothing was given."""
    raw = request.query_params.get(name)
    if not raw:
        return None
    try:
        value = float(raw)
    except ValueError as error:
        raise HTTPException(400, f"{name} is not a number.") from error
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} is not a finite number.")
    return value


def whole(request: Request, name: str, default: Any, *, low: int, high: int) -> Any:
    """A whole number between `low` and `high`, or the default when nothing was given."""
    raw = request.query_params.get(name)
    if not raw:
        return default
    if not raw.isascii() or not raw.isdigit() or not low <= int(raw[:30]) <= high:
        raise HTTPException(400, f"{name} is not a whole number from {low} to {high}.")
    return int(raw)


def flag(request: Request, name: str) -> bool:
    """True if the query parameter is set to 1, true, yes or on."""
    return request.query_params.get(name, "") in ("1", "true", "yes", "on")


def one_of(request: Request, name: str, choices: Sequence[str], default: str) -> str:
    """One of the choices; 400 otherwise."""
    value = request.query_params.get(name) or default
    if value not in choices:
        raise HTTPException(400, f"{name} is none of {', '.join(choices)}.")
    return value


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_COOKIE = "covey-view"


class Guard:
    """Lets a request through to `app`, or answers 400, 401 or 405 itself.

    Without a token the `Host` header must name this machine, so that a page elsewhere cannot reach the server under a name of its
    own. With one, `?token=` in the first address sets a cookie and leaves the address bar.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await self._answer(scope)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is only read.", 405)
        if self.token is None:
            is_ours = names_loopback(headers.get("host", ""))
            return self.app if is_ours else PlainTextResponse("Not the name of this server.", 400)
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._is_right(token):
            reply = RedirectResponse("/", 303)
            reply.set_cookie(_COOKIE, self.token, httponly=True, samesite="strict")
            return reply
        return self.app if self._has_token(headers) else PlainTextResponse("This page needs ?token=...", 401)

    def _has_token(self, headers: Headers) -> bool:
        sent = headers.get("authorization", "").removeprefix("Bearer ")
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";") if "=" in part)
        return self._is_right(sent) or self._is_right(cookies.get(_COOKIE, ""))

    def _is_right(self, word: str) -> bool:
        return self.token is not None and hmac.compare_digest(word.encode(), self.token.encode())
