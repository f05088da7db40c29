"""OpenEnv servers as environments of a run, over their WebSocket sessions (extra `openenv`)."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from covey.environments.stepping import Stepped
from covey.errors import ConfigError, needed

_MOST_BYTES = 100 * 2**20


def openenv_environment(
    url: str, description: str = "Take an action in the environment.", timeout: float = 60.0
) -> Callable[[], Stepped]:
    """A factory for `environment_factory` from a running OpenEnv server, such as `http://localhost:8000`.

    Every completion has a session of its own. The tool `step` takes the server's action, by the JSON schema at `/schema`.
    `timeout`: seconds for one answer. Raises ConfigError for a server that does not answer or is no OpenEnv server.
    """
    base = str(url).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"OpenEnv server {url!r} is no URL; give one such as http://localhost:8000.")
    schema: dict[str, Any] = {}

    def factory() -> Stepped:
        if not schema:
            schema.update(_action_schema(base, timeout))
        return Stepped(_Session(base, timeout), schema, description)

    return factory


class _Session:
    """One WebSocket session; connected again where it was lost between episodes."""

    def __init__(self, base: str, timeout: float) -> None:
        self.base, self.timeout = base, timeout
        self._socket: Any = None

    def reset(self, seed: int) -> Any:
        try:
            return self._ask("reset", {"seed": seed})["observation"]
        except ConnectionError:
            self._drop()
            return self._ask("reset", {"seed": seed})["observation"]

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool]:
        reply = self._ask("step", dict(action))
        return reply["observation"], float(reply.get("reward") or 0.0), bool(reply.get("done"))

    def close(self) -> None:
        if self._socket is not None:
            from websockets.exceptions import WebSocketException

            with suppress(OSError, WebSocketException):
                self._socket.send(json.dumps({"type": "close"}))
            self._drop()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of an answer. Raises ConnectionError where the session is gone, RuntimeError where the server refuses."""
        from websockets.exceptions import WebSocketException

        try:
            socket = self._connected()
            socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(socket.recv(timeout=self.timeout))
            reply = answer["data"]
        except TimeoutError:
            self._drop()  # a late answer would be taken for the next one's
            raise
        except (OSError, WebSocketException, ValueError, KeyError, TypeError) as error:
            self._drop()
            raise ConnectionError(f"{self.base}: {type(error).__name__}: {error}") from error
        if answer.get("type") == "error":
            raise RuntimeError(reply.get("message", "the server refused"))
        return dict(reply)

    def _connected(self) -> Any:
        if self._socket is None:
            from websockets.sync.client import connect

            place = "ws" + self.base.removeprefix("http") + "/ws"
            how: dict[str, Any] = {"open_timeout": self.timeout, "close_timeout": 1, "proxy": None}
            self._socket = connect(place, max_size=_MOST_BYTES, **how)
        return self._socket

    def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(OSError):
                socket.close()


def _action_schema(base: str, timeout: float) -> dict[str, Any]:
    """JSON schema of the server's action, without the fields that every action has."""
    with needed("OpenEnv servers need websockets", "openenv"):
        import websockets  # noqa: F401
    try:
        with urllib.request.urlopen(f"{base}/schema", timeout=timeout) as answer:
            schema = json.loads(answer.read(_MOST_BYTES))["action"]
        properties = {name: field for name, field in schema["properties"].items() if name != "metadata"}
    except (urllib.error.URLError, OSError) as error:
        raise ConfigError(f"OpenEnv server {base} does not answer ({error}); start it, or give another URL.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{base}/schema has no schema of an action, so it is no OpenEnv server.") from error
    required = [name for name in schema.get("required", []) if name in properties]
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "object", "properties": properties, "required": required, **definitions}
