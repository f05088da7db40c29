"""Access control: the host name is always checked, the token where there is one; and security headers of responses."""

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from covey.process.addresses import names_loopback

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
