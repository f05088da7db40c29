"""Connections of an endpoint: one that sends no whole request in time is closed."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_MOST_HEADER_BYTES = 1 << 18


def impatient(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, with `seconds` for the headers of each request and a bound on their bytes."""

    class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _waiting: asyncio.TimerHandle | None = None
        _num_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
                self._rest()
                return
            self._num_bytes += len(data)
            self._wait()
            if self._num_bytes > _MOST_HEADER_BYTES:
                self.transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._rest()

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self._waiting is None:
                self._waiting = self.loop.call_later(seconds, self.transport.close)

        def _rest(self) -> None:
            self._num_bytes = 0
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return Impatient
