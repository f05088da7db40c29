"""Sessions by address: for clients that can set a base URL, and no header."""

from starlette.types import ASGIApp, Receive, Scope, Send

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
