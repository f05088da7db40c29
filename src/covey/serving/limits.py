"""Limits of an endpoint: sizes of one request, and the number of requests at once."""

from dataclasses import dataclass

from covey.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an endpoint. Raises ConfigError for one that lets nothing through."""

    max_body_bytes: int = 8 * 2**20
    """Largest body of a request; a larger one is answered 413."""
    max_output_tokens: int | None = None
    """Most tokens of one answer, the default of chat requests. None: the rest of the context after the prompt."""
    max_choices: int = 128
    """Most answers of one request: prompts times `n`."""
    max_waiting: int = 256
    """Prompts that may wait for room in the batch; the next one is answered 429 with Retry-After."""
    max_connections: int = 1024
    """Connections that may be open; the next one is answered 503."""
    header_seconds: float = 10.0
    """Time that a client has to send the headers of a request; the connection of a slower one is closed."""
    body_seconds: float = 30.0
    """Time that a client has to send its body; a slower one is answered 408."""
    drain_seconds: float = 30.0
    """Seconds that running requests have to finish after the server gets a stop signal."""

    def __post_init__(self) -> None:
        sizes = ("max_body_bytes", "max_choices", "max_waiting", "max_connections", "header_seconds", "body_seconds")
        for name in sizes:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, which lets no request through; give at least 1.")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ConfigError(f"max_output_tokens is {self.max_output_tokens}; an answer needs at least 1.")
        if self.drain_seconds < 0:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; give 0 or more.")
