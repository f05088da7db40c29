"""An OpenAI-compatible endpoint over native samplers, in a process of its own or in that of a training run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from covey.declared import checked
from covey.errors import ConfigError
from covey.process.addresses import listen, url_of
from covey.process.connections import impatient
from covey.rollout import NativeSampler
from covey.rollout.live import LogprobsMode
from covey.serving.access import checked_key
from covey.serving.app import Admit, Routes, Service
from covey.serving.asking import APIRequest
from covey.serving.engine import Call, Engine
from covey.serving.limits import Limits


class Endpoint:
    """An OpenAI-compatible HTTP endpoint of one or more models. `with Endpoint(sampler) as endpoint: endpoint.url`.

    Models are samplers by name; the first is the default, the others count as its adapters. `on_call` gets every answered
    prompt as a `Call`, token ids, log-probabilities and version of the weights included, on the thread that decodes; where it
    raises, the client gets an error. While the endpoint is open, `sampler.sample` and `sampler.load` must not be called
    directly: use `load`.
    """

    @checked
    def __init__(
        self,
        samplers: NativeSampler | Mapping[str, NativeSampler],
        *,
        name: str = "policy",
        limits: Limits | None = None,
        api_key: str | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        on_call: Callable[[Call], None] | None = None,
        routes: Routes | None = None,
        model_for: Callable[[APIRequest], str] | None = None,
        admit: Admit | None = None,
        processor: Any = None,
    ) -> None:
        """`logprobs_mode`: log-probabilities that clients receive; a `Call` always has those of the sampling distribution.

        `routes`: the user's own pages. `model_for`: picks the model of a request, where it is not the requested one.
        `admit` receives each request with its session before it is queued, and may change it or raise APIError. `processor`: that of
        models that read images, sounds or videos, which are then read in chat requests.
        """
        self.samplers = dict(samplers) if isinstance(samplers, Mapping) else {name: samplers}
        if not self.samplers:
            raise ConfigError("An endpoint needs at least one model.")
        for sampler in self.samplers.values():
            if getattr(sampler, "environment", None) is not None:
                raise ConfigError("An endpoint's client runs the tools; give a sampler without an environment.")
        if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ConfigError(f"logprobs_mode {logprobs_mode!r} is not known; take raw_logprobs or processed_logprobs.")
        self.limits, self.api_key = limits or Limits(), checked_key(api_key, "127.0.0.1")
        self.engine = Engine(self.samplers, max_waiting=self.limits.max_waiting, mode=logprobs_mode, on_call=on_call)
        self.app = Service(self.samplers, self.engine, self.limits, routes, model_for, admit, processor).app(api_key)
        """The ASGI application, for a server of your own; `engine.start()` comes first."""
        self.url = ""
        """Base URL for clients, `http://127.0.0.1:PORT/v1`, while it is open."""
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def load(self, policy: Any, version: int, model: str | None = None) -> None:
        """Answer with these weights from now on. Requests that run are finished with the former ones first."""
        sampler = self.samplers[model or next(iter(self.samplers))]
        self.engine.when_idle(lambda: sampler.load(policy, version)).result()

    def add(self, name: str, sampler: NativeSampler) -> None:
        """Serve one more model from now on."""
        self.engine.add(name, sampler)
        self.samplers[name] = sampler

    # -- within another process -------------------------------------------------------------------------------------

    def open(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen in a thread. Returns the base URL for clients."""
        listener = self.listen(host, port)
        self.url = f"{url_of(host, listener)}/v1"
        self._server = _Server(self._config(), lambda: None)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="covey-http", daemon=True)
        self.engine.start()
        self._thread.start()
        return self.url

    def close(self) -> None:
        """Finish what runs, within `limits.drain_seconds`, and stop listening."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
        self.engine.close()
        self.url = ""

    def __enter__(self) -> Endpoint:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- in a process of its own ------------------------------------------------------------------------------------

    def run(self, listener: socket.socket, on_start: Callable[[], None]) -> None:
        """Serve until SIGTERM or Ctrl-C, then finish what runs within `limits.drain_seconds`."""
        self.engine.start()
        try:
            _Server(self._config(), on_start).run(sockets=[listener])
        finally:
            self.engine.close()

    def listen(self, host: str, port: int) -> socket.socket:
        """A socket to serve on. Raises ConfigError for an address that others can reach without a key, or that is taken."""
        checked_key(self.api_key, host)
        return listen(host, port)

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            http=impatient(self.limits.header_seconds),
            limit_concurrency=self.limits.max_connections,
            timeout_graceful_shutdown=max(1, round(self.limits.drain_seconds)),
        )


class _Server(uvicorn.Server):
    """uvicorn's server, which ends a stopped process with 0 instead of by the signal once more."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()
