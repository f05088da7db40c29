"""JSON bodies of requests, read within bounds: text that can be written, finite numbers, brackets that are nested a little; sessions by address."""

import json
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from covey.files.bounded import MOST_DEPTH, json_depth
from covey.serving.errors import bad

PREFIX = "/sessions/"


class SessionPaths:
    """ASGI: `/sessions/NAME/v1/...` is `/v1/...` with the header `X-Session-Id: NAME`, for clients that can set a base URL alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            name, _, rest = scope["path"].removeprefix(PREFIX).partition("/")
            headers = [(key, value) for key, value in scope["headers"] if key.lower() != b"x-session-id"]
            path = f"/{rest}"
            scope = {
                **scope,
                "path": path,
                "raw_path": path.encode(),
                "headers": [*headers, (b"x-session-id", name.encode())],
            }
        await self.app(scope, receive, send)


def body_of(content: bytes) -> Any:
    """The value of a JSON body. Raises APIError 400 for anything that JSON or UTF-8 does not allow."""
    if json_depth(content) > MOST_DEPTH:
        raise bad(f"The body is nested more than {MOST_DEPTH} deep.")
    try:
        text = content.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:  # half of a pair of escapes is no character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad("The body holds half of a surrogate pair, which is no character.") from error
    except (ValueError, RecursionError) as error:
        raise bad(f"The body is no JSON in UTF-8: {error}.") from error
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number in JSON")
