"""Access rules: clients with the key; without one, this machine alone, and no web page that a browser on it shows."""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from covey.errors import ConfigError
from covey.process.addresses import is_loopback, names_loopback
from covey.serving.errors import APIError

SHORTEST_KEY = 16
"""Characters of an API key at least."""


def checked_key(api_key: str | None, host: str) -> str | None:
    """The key. Raises ConfigError for one that can be guessed, or for none where other machines reach `host`."""
    if api_key is not None and len(api_key) < SHORTEST_KEY:
        raise ConfigError(f"The API key is short enough to be guessed; give {SHORTEST_KEY} characters or more.")
    if api_key is None and not is_loopback(host):
        raise ConfigError(f"{host} can be reached from other machines; give an API key, or listen on 127.0.0.1.")
    return api_key


class Guard:
    """Lets a request through to `app`, or answers 400 or 401 itself. `/health` is open.

    Without a key the `Host` header must name this machine, so that a web page cannot reach the server under a name of its own.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app, self.api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" and scope["path"] != "/health" else None
        if problem is not None:
            await JSONResponse(problem.body, problem.status)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _problem(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        if self.api_key is None:
            if names_loopback(headers.get("host", "")):
                return None
            return APIError(400, "This server answers under the name of this machine only; call it as 127.0.0.1.")
        sent = headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(sent.encode(), self.api_key.encode()):
            return None
        return APIError(401, "The API key is missing or wrong; send Authorization: Bearer KEY.", code="invalid_api_key")
